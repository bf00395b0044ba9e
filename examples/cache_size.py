"""What a token costs in the cache: many heads, grouped heads, one head, and one latent for all heads.

python examples/cache_size.py
"""

import mlx.core as mx

import mlx_tformer as mt
from mlx_tformer.memory import human, kv_bytes, parameter_count

SIZES = {"dim": 256, "layers": 4, "heads": 8, "vocab": 500}
LENGTH = 256  # tokens by which a cache grows, so that none of its room is empty

latent = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "q_lora_rank": None, "first_k_dense_replace": 4}
models = {
    "multi-head (MHA)": mt.build("llama", **SIZES, kv_heads=8),
    "grouped, 2 (GQA)": mt.build("llama", **SIZES, kv_heads=2),
    "multi-query (MQA)": mt.build("llama", **SIZES, kv_heads=1),
    "latent, 64 + 16 (MLA)": mt.build("deepseek_v2", **SIZES, **latent),
}
ids = mx.random.randint(0, 500, (1, LENGTH), key=mx.random.key(0))
print(f"{'attention':<22} {'parameters':>10} {'bytes a token':>14} {'of MHA':>7} {'at 32,768 tokens':>17}")
sizes = []
for name, lm in models.items():
    cache = lm.new_cache()
    mx.eval(lm(ids, cache), cache.arrays)
    said, measured = kv_bytes(lm.model, 1, mx.float32), cache.nbytes / LENGTH
    assert measured == said, (name, measured, said)  # what the modules say is what the cache holds
    sizes.append(said)
    many = human(kv_bytes(lm.model, 32768, mx.float32))
    print(f"{name:<22} {parameter_count(lm.model):>10,} {said:>14,} {said / sizes[0]:>7.1%} {many:>17}")

mha, gqa, mqa, mla = sizes
assert (gqa, mqa) == (mha / 4, mha / 8)  # keys and values of 2 heads, and of 1, instead of 8
assert mla < gqa  # less than two heads of keys and values, and every head still sees keys of its own
