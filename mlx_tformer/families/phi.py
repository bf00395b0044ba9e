"""Phi 1, 1.5 and 2: attention and MLP share one norm and run side by side; part of each head turns; biases
everywhere."""

from ..config import Config
from ..names import Names, joined
from ..nn import LM, Attention, Embed, LayerNorm, Linear, Mlp, Parallel, Residual, Stack
from . import llama

ABSENT = {"max_position_embeddings": 2048, "partial_rotary_factor": 0.5}


def model(c: Config) -> LM:
    dim, hidden, act, eps = (
        c["hidden_size"],
        c["intermediate_size"],
        c.get("hidden_act", "gelu_new"),
        c.get("layer_norm_eps", 1e-5),
    )
    heads, kv_heads, head_dim = llama.head_sizes(c)
    c.expect(qk_layernorm=False, tie_word_embeddings=False)

    def block() -> Parallel:
        attention = Attention(dim, heads, kv_heads, head_dim, bias=True, position=c.rope(head_dim))
        return Parallel(LayerNorm(dim, eps), attn=Residual(attention), mlp=Residual(Mlp(dim, hidden, act)))

    layers = [block() for _ in range(c["num_hidden_layers"])]
    head = Linear(dim, c["vocab_size"])
    return LM(
        Embed(c["vocab_size"], dim), Stack(layers, LayerNorm(dim, eps)), head, context=c["max_position_embeddings"]
    )


def names(c: Config) -> Names:
    heads, kv_heads, _ = llama.head_sizes(c)
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    shares = {f"{theirs}.self_attn.{x}_proj": n for x, n in zip("qkv", (heads, kv_heads, kv_heads), strict=True)}
    return {
        "model.embed_tokens": "embed.tokens",
        f"{theirs}.input_layernorm": f"{ours}.pre",
        **joined(f"{ours}.attn.op.qkv", shares),
        f"{theirs}.self_attn.dense": f"{ours}.attn.op.out",
        f"{theirs}.mlp.fc1": f"{ours}.mlp.op.up",
        f"{theirs}.mlp.fc2": f"{ours}.mlp.op.down",
        "model.final_layernorm": "decoder.norm",
        "lm_head": "head",
    }
