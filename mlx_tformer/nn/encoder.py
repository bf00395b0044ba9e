"""Encoders: every token sees every other one, and nothing is remembered between calls."""

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from .block import Norm
from .context import Context
from .mlp import ACTIVATIONS
from .model import Embed, Stack
from .tap import Module, name_modules, tap


class TokenHead(Module):
    """What stands before the tied matrix of a masked-language model: norm(act(dense(x))), and the bias of the logits.

    BERT's `cls.predictions` (Devlin et al. 2018, arXiv 1810.04805).
    """

    sites = ("out",)

    def __init__(self, dim: int, vocab: int, norm: Norm, act: str = "gelu", *, dense_bias: bool = True):
        super().__init__()
        self.dense = nn.Linear(dim, dim, dense_bias)
        self.norm, self.act = norm, act
        self.bias = mx.zeros((vocab,))

    def __call__(self, x: mx.array) -> mx.array:
        return tap(self, "out", self.norm(ACTIVATIONS[self.act](self.dense(x))))


class Classifier(Module):
    """Logits of labels, out(norm(act(dense(x)))): of one vector for each text, or of every token.

    pool: how hidden states become that vector, see `POOLS`; None: each token by itself. Without a `dense` the last
    matrix reads hidden states as they are. BERT's pooler and classifier, and RoBERTa's, DistilBERT's and ModernBERT's.
    """

    sites = ("pooled", "logits")

    def __init__(
        self,
        dim: int,
        labels: int,
        *,
        dense: nn.Linear | None = None,
        act: str = "tanh",
        norm: Norm | None = None,
        pool: str | None = "cls",
    ):
        super().__init__()
        self.has_dense = dense is not None
        if dense is not None:
            self.dense = dense
        self.norm: Norm = nn.Identity() if norm is None else norm
        self.out = nn.Linear(dim, labels)
        self.act, self.pool, self.labels = act, pool, labels

    def __call__(self, x: mx.array, real: mx.array | None = None) -> mx.array:
        """(B, L, C) -> (B, labels), or (B, L, labels) token by token; `real` (B, L) is 0 at padding."""
        x = tap(self, "pooled", x if self.pool is None else pooled(x, real, self.pool))
        x = ACTIVATIONS[self.act](self.dense(x)) if self.has_dense else x
        return tap(self, "logits", self.out(self.norm(x)))


POOLS = ("mean", "cls", "last")
"""How a text's hidden states become one vector: their mean, that of the first token, that of the last."""


def pooled(hidden: mx.array, mask: mx.array | None, pool: str) -> mx.array:
    """One vector a row, (B, C), of hidden states (B, L, C) whose mask (B, L) is True for text (None: all of it).

    >>> x, mask = mx.array([[[1.0], [3.0], [8.0]]]), mx.array([[True, True, False]])
    >>> [pooled(x, mask, pool).item() for pool in POOLS]
    [2.0, 1.0, 3.0]
    """
    real = mx.ones(hidden.shape[:2], dtype=mx.bool_) if mask is None else mask.astype(mx.bool_)
    places = mx.arange(real.shape[1])
    if pool == "mean":
        total = mx.where(real[..., None], hidden.astype(mx.float32), 0).sum(axis=1)  # may be more than float16 holds
        return (total / real.sum(axis=1, keepdims=True)).astype(hidden.dtype)
    at = mx.argmax(real, axis=1) if pool == "cls" else mx.max(mx.where(real, places, 0), axis=1)
    return mx.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0]


class Encoder(Module):
    """An encoder: ids (B, L) -> logits of labels if it has a `classifier`, logits (B, L, V) of the vocabulary if it has
    a `head`, else hidden states (B, L, C).

    The embedding serves as the head's last matrix. `context` is how many tokens its positions are made for.

    >>> from mlx_tformer.nn import Attention, Block, Everything, LayerNorm, Mlp, Residual
    >>> attn = Residual(Attention(16, heads=2, mask=Everything()), after=LayerNorm(16))
    >>> model = Encoder(Embed(100, 16), Stack([Block(attn=attn, mlp=Residual(Mlp(16, 32), after=LayerNorm(16)))]))
    >>> model(mx.array([[1, 2, 3]])).shape
    (1, 3, 16)
    """

    sites = ("logits",)

    def __init__(
        self,
        embed: Embed,
        encoder: Stack,
        head: TokenHead | None = None,
        *,
        classifier: Classifier | None = None,
        context: int | None = None,
    ):
        super().__init__()
        self.embed, self.encoder, self.context = embed, encoder, context
        if head is not None:
            self.head = head
        if classifier is not None:
            self.classifier = classifier
        self.has_head, self.has_classifier = head is not None, classifier is not None
        self.tied = self.has_head  # the embedding makes the logits
        name_modules(self)

    @property
    def vocab(self) -> int:
        """Ids that it knows: the rows of the embedding."""
        return self.embed.vocab

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Tokens that it was trained on, and that it can look at; None: no limit."""
        return None if self.context is None else (self.context, self.context)

    def __call__(
        self, ids: mx.array, *, attention_mask: mx.array | None = None, token_types: mx.array | None = None
    ) -> mx.array:
        """Logits of labels, (B, labels) or (B, L, labels), or of the vocabulary, (B, L, V), or hidden states (B, L, C)
        without a head for either; for the arguments see `hidden`."""
        x = self.hidden(ids, attention_mask=attention_mask, token_types=token_types)
        if self.has_classifier:
            return self.classifier(x, attention_mask)
        return self.logits(x) if self.has_head else x

    def hidden(
        self, ids: mx.array, *, attention_mask: mx.array | None = None, token_types: mx.array | None = None
    ) -> mx.array:
        """The residual stream after the last block and norm, (B, L, C).

        attention_mask (B, L) is 0 at padding, which may stand anywhere; positions count from the first token that is
        none, and a gap within the text keeps its places. token_types (B, L) tell the parts of a pair apart. Rows of
        padding hold nothing of use. Raises UsageError for arguments of another shape, and for a text that is longer
        than the positions.
        """
        for name, given in {"attention_mask": attention_mask, "token_types": token_types}.items():
            if given is not None and given.shape != ids.shape:
                raise UsageError(f"{name}: found shape {given.shape}, expected that of the ids, {ids.shape}")
        real = None if attention_mask is None else attention_mask.astype(mx.bool_)
        length = ids.shape[1]
        ctx = Context(0, length, left=None if real is None else padding_before(real), context=length, real=real)
        return self.encoder(self.embed(ids, ctx, token_types), ctx)

    def logits(self, x: mx.array) -> mx.array:
        """(B, L, C) -> (B, L, V)"""
        return tap(self, "logits", self.embed.tokens.as_linear(self.head(x)) + self.head.bias)


def padding_before(real: mx.array) -> mx.array | None:
    """How many tokens of padding stand before the first real one of each row, (B,); None if there are none."""
    if real.shape[1] == 0:
        return None
    left = mx.argmax(real, axis=1).astype(mx.int32)
    return left if mx.any(left).item() else None
