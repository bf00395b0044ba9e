"""Gemma: norms that multiply by 1 + weight, an embedding scaled by the root of its width, one key head in the 2B."""

from collections.abc import Callable
from math import sqrt
from typing import Any

from ..config import Config
from ..nn import LM, Attention, Block, Embed, GatedMlp, Residual, Rope, ShiftedRMSNorm, SoftCap, Stack
from . import llama

ABSENT = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}


def model(c: Config) -> LM:
    # The first configs say gelu and mean its tanh form, as the reference does.
    c.ignore("hidden_activation")
    act = "gelu_pytorch_tanh" if c["hidden_act"] == "gelu" else c["hidden_act"]
    return decoder(c, act, lambda layer: attention(c))


def decoder(c: Config, act: str, attention_of: Callable[[int], Attention], *, sandwich: bool = False) -> LM:
    """What the Gemmas share; with `sandwich` a norm after each operation as well."""
    dim, hidden, eps = c["hidden_size"], c["intermediate_size"], c.get("rms_norm_eps", 1e-6)
    cap = c.get("final_logit_softcapping")
    c.expect(use_bidirectional_attention=False)

    def norm() -> ShiftedRMSNorm:
        return ShiftedRMSNorm(dim, eps)

    def post() -> ShiftedRMSNorm | None:
        return norm() if sandwich else None

    def block(layer: int) -> Block:
        return Block(
            attn=Residual(attention_of(layer), pre=norm(), post=post()),
            mlp=Residual(GatedMlp(dim, hidden, act), pre=norm(), post=post()),
        )

    stack = Stack([block(layer) for layer in range(c["num_hidden_layers"])], norm())
    finish = None if cap is None else SoftCap(cap)
    embed = Embed(c["vocab_size"], dim, scale=sqrt(dim))
    return LM(embed, stack, llama.head(c), context=c["max_position_embeddings"], finish=finish)


def attention(c: Config, *, position: Rope | None = None, **settings: Any) -> Attention:
    """The heads of a Gemma."""
    heads, kv_heads, head_dim = llama.head_sizes(c)
    bias = c.get("attention_bias", False)
    position = c.rope(head_dim) if position is None else position
    return Attention(c["hidden_size"], heads, kv_heads, head_dim, bias=bias, position=position, **settings)


names = llama.names
