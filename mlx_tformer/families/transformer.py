"""The Transformer of 2017 (Vaswani et al., arXiv 1706.03762): post-norm, sinusoids, one table for both sides and the
head."""

from ..config import Config
from ..names import Names
from ..nn import (
    Attention,
    Block,
    CrossAttention,
    Embed,
    Everything,
    LayerNorm,
    Mlp,
    Residual,
    Seq2Seq,
    Sinusoidal,
    Stack,
)
from ..nn.tap import Module

ABSENT = {
    "attention_bias": False,
    "d_ff": 2048,
    "d_model": 512,
    "initializer_range": 512**-0.5,
    "layer_norm_eps": 1e-6,
    "num_heads": 8,
    "num_layers": 6,
}
"""The base model of the paper; of the norm and of how weights begin it says nothing, and this is what tensor2tensor,
its code, has."""


def model(c: Config) -> Seq2Seq:
    dim, heads, hidden, eps = c["d_model"], c["num_heads"], c["d_ff"], c["layer_norm_eps"]
    head_dim, bias = c.head_dim("d_model", "num_heads"), c["attention_bias"]
    if dim % 2:
        raise c.wrong("d_model", "an even number: a sine and a cosine for each wave")

    def step(op: Module) -> Residual:
        return Residual(op, after=LayerNorm(dim, eps))

    def stack(*, reads: bool) -> Stack:
        def block() -> Block:
            attn = Attention(dim, heads, head_dim=head_dim, bias=bias, mask=Everything() if reads else None)
            cross = {} if reads else {"cross": step(CrossAttention(dim, heads, head_dim=head_dim, bias=bias))}
            return Block(attn=step(attn), **cross, mlp=step(Mlp(dim, hidden, "relu")))

        return Stack([block() for _ in range(c["num_layers"])])

    def embed(of: Embed | None = None) -> Embed:
        return Embed(c["vocab_size"], dim, positions=Sinusoidal(dim, interleaved=True), scale=dim**0.5, of=of)

    source = embed()
    return Seq2Seq(source, stack(reads=True), stack(reads=False), target=embed(source))


def names(c: Config) -> Names:
    """As they are here: nobody publishes checkpoints of it under names of its own."""
    both = ("attn.op.qkv", "attn.op.out", "attn.after")
    last = ("mlp.op.up", "mlp.op.down", "mlp.after")
    parts = {
        "encoder": (*both, *last),
        "decoder": (*both, *(f"cross.{part}" for part in ("op.q", "op.kv", "op.out", "after")), *last),
    }
    found: Names = {"embed.tokens": "embed.tokens"}
    return found | {f"{side}.layers.{{}}.{x}": f"{side}.layers.{{}}.{x}" for side, own in parts.items() for x in own}
