"""Heads that look further ahead than the next token, for drafts that the model itself then checks."""

import mlx.core as mx
import mlx.nn as nn

from .block import Block, Norm
from .cache import Apart
from .context import Context
from .tap import Module, tap


class NextToken(Apart):
    """One module of multi-token prediction: a block that reads a hidden state and the token that follows it.

    h' = block(join([embed_norm(embedding of the token); hidden_norm(h)])), whose norm and head give the logits of the
    token after it (DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2; published weights join the embedding
    first). `embed` and `head` are None where those of the model serve.

    >>> from mlx_tformer.nn import Attention, GatedMlp, Residual
    >>> block = Block(attn=Residual(Attention(16, heads=2)), mlp=Residual(GatedMlp(16, 32)))
    >>> module = NextToken(16, block, norms=(nn.RMSNorm(16), nn.RMSNorm(16), nn.RMSNorm(16)))
    >>> x = mx.zeros((1, 3, 16))
    >>> module(x, x, Context.alone(x)).shape
    (1, 3, 16)
    """

    sites = ("out", "logits")

    def __init__(
        self,
        dim: int,
        block: Block,
        *,
        norms: tuple[Norm, Norm, Norm],
        embed: Module | None = None,
        head: nn.Module | None = None,
    ):
        super().__init__()
        self.embed_norm, self.hidden_norm, self.norm = norms
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.block = block
        self.has_embed, self.has_head = embed is not None, head is not None
        if embed is not None:
            self.embed = embed
        if head is not None:
            self.head = head

    def __call__(self, embedded: mx.array, hidden: mx.array, ctx: Context) -> mx.array:
        """(B, L, C) of tokens and of the states before them -> (B, L, C): what the norm reads, and the next module."""
        both = mx.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1)  # (B, L, 2C)
        return tap(self, "out", self.block(self.join(both), ctx))
