"""A model put together by hand from the parts: grouped heads, rotary positions, every other layer sees a window alone.

python examples/build.py
"""

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_tformer.nn import LM, Attention, Block, Causal, Embed, GatedMlp, Residual, RMSNorm, Rope, Stack, Window

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 1000, 128, 8, 2, 16, 256, 4


def block(layer: int) -> Block:
    mask = Causal() & Window(16) if layer % 2 else Causal()
    attention = Attention(DIM, HEADS, KV_HEADS, HEAD_DIM, position=Rope(HEAD_DIM, theta=10_000), mask=mask)
    return Block(
        attn=Residual(attention, pre=RMSNorm(DIM)),
        mlp=Residual(GatedMlp(DIM, HIDDEN), pre=RMSNorm(DIM)),
    )


model = LM(Embed(VOCAB, DIM), Stack([block(layer) for layer in range(LAYERS)], RMSNorm(DIM)))
print(sum(value.size for _, value in tree_flatten(model.parameters())), "parameters")

ids = mx.random.randint(0, VOCAB, (1, 40))
whole = model(ids)  # (1, 40, VOCAB)

cache = model.new_cache()
steps = [model(ids[:, :25], cache), *(model(ids[:, i : i + 1], cache) for i in range(25, 40))]
gap = mx.abs(mx.concatenate(steps, axis=1) - whole).max().item()
print(f"25 tokens and then one at a time: logits within {gap:.1e} of one pass; the cache holds {cache.nbytes} bytes")
