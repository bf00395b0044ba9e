"""OLMo 2: the norm comes after each operation, inside the residual step; q and k are normed over all heads together."""

from ..config import Config
from ..names import Names
from ..nn import LM, AllHeads, Attention, Block, Embed, GatedMlp, Residual, RMSNorm, Stack
from . import llama

ABSENT = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def model(c: Config) -> LM:
    dim, hidden, act, eps = c["hidden_size"], c["intermediate_size"], c.get("hidden_act", "silu"), c["rms_norm_eps"]
    heads, kv_heads, head_dim = llama.head_sizes(c)
    bias = c.get("attention_bias", False)

    def block() -> Block:
        attention = Attention(
            dim,
            heads,
            kv_heads,
            head_dim,
            bias=bias,
            position=c.rope(head_dim),
            q_norm=AllHeads(RMSNorm(heads * head_dim, eps)),
            k_norm=AllHeads(RMSNorm(kv_heads * head_dim, eps)),
        )
        return Block(
            attn=Residual(attention, post=RMSNorm(dim, eps)),
            mlp=Residual(GatedMlp(dim, hidden, act), post=RMSNorm(dim, eps)),
        )

    layers = [block() for _ in range(c["num_hidden_layers"])]
    stack = Stack(layers, RMSNorm(dim, eps))
    return LM(Embed(c["vocab_size"], dim), stack, llama.head(c), context=c["max_position_embeddings"])


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    return llama.names(c) | {
        f"{theirs}.self_attn.q_norm": f"{ours}.attn.op.q_norm.norm",
        f"{theirs}.self_attn.k_norm": f"{ours}.attn.op.k_norm.norm",
        f"{theirs}.post_attention_layernorm": f"{ours}.attn.post",
        f"{theirs}.post_feedforward_layernorm": f"{ours}.mlp.post",
    }
