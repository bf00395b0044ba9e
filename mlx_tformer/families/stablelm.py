"""StableLM: layer norms, part of each head turns, biases on q, k and v at most; side by side in some."""

from ..config import Config
from ..names import Expert, Names
from ..nn import LM, Attention, Block, EachHead, Embed, GatedMlp, LayerNorm, Parallel, Residual, Stack
from . import llama

ABSENT = {"max_position_embeddings": 4096, "num_key_value_heads": 32, "partial_rotary_factor": 0.25}


def model(c: Config) -> LM:
    dim, hidden, act, eps = (
        c["hidden_size"],
        c["intermediate_size"],
        c.get("hidden_act", "silu"),
        c.get("layer_norm_eps", 1e-5),
    )
    heads, kv_heads, head_dim = llama.head_sizes(c)
    bias, normed = c.get("use_qkv_bias", False), c.get("qk_layernorm", False)
    parallel = c.get("use_parallel_residual", False)

    def block() -> Block:
        attention = Attention(
            dim,
            heads,
            kv_heads,
            head_dim,
            bias=bias,
            out_bias=False,
            position=c.rope(head_dim),
            q_norm=EachHead(heads, head_dim, eps) if normed else None,
            k_norm=EachHead(kv_heads, head_dim, eps) if normed else None,
        )
        mlp = GatedMlp(dim, hidden, act)
        if parallel:
            return Parallel(LayerNorm(dim, eps), attn=Residual(attention), mlp=Residual(mlp))
        return Block(attn=Residual(attention, pre=LayerNorm(dim, eps)), mlp=Residual(mlp, pre=LayerNorm(dim, eps)))

    layers = [block() for _ in range(c["num_hidden_layers"])]
    stack = Stack(layers, LayerNorm(dim, eps))
    return LM(Embed(c["vocab_size"], dim), stack, llama.head(c), context=c["max_position_embeddings"])


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    own = {
        f"{theirs}.self_attn.{x}_layernorm.norms.{{}}.weight": Expert(f"{ours}.attn.op.{x}_norm.weight") for x in "qk"
    }
    shared = {f"{theirs}.input_layernorm": f"{ours}.pre"} if c.get("use_parallel_residual", False) else {}
    return llama.names(c) | own | shared
