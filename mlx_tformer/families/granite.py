"""Granite 3: Llama with four multipliers: on the embedding, the scores, the residual steps and the logits."""

from collections.abc import Callable

from ..config import Config
from ..nn import LM, Attention, Block, Embed, GatedMlp, Residual, RMSNorm, Scaled, Stack
from ..nn.tap import Module
from . import llama

ABSENT = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "residual_multiplier": 1.0,
}


def model(c: Config) -> LM:
    bias = c.get("mlp_bias", False)
    return decoder(c, lambda: GatedMlp(c["hidden_size"], c["intermediate_size"], c.get("hidden_act", "silu"), bias))


def decoder(c: Config, feed_forward: Callable[[], Module]) -> LM:
    """What Granite and its mixtures of experts share."""
    dim, eps, scale = c["hidden_size"], c.get("rms_norm_eps", 1e-6), c["residual_multiplier"]
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
            scale=c["attention_multiplier"],
        )
        return Block(
            attn=Residual(attention, pre=RMSNorm(dim, eps), scale=scale),
            mlp=Residual(feed_forward(), pre=RMSNorm(dim, eps), scale=scale),
        )

    stack = Stack([block() for _ in range(c["num_hidden_layers"])], RMSNorm(dim, eps))
    embed, finish = Embed(c["vocab_size"], dim, scale=c["embedding_multiplier"]), Scaled(1 / c["logits_scaling"])
    return LM(embed, stack, llama.head(c), context=c["max_position_embeddings"], finish=finish)


names = llama.names
