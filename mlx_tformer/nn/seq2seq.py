"""Encoder-decoder models: one stack reads a text as a whole, another writes its own and looks at the first one's."""

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from .block import Norm
from .cache import Cache
from .context import Context
from .encoder import padding_before
from .keeping import WHOLE, Keeping
from .model import Embed, Stack
from .tap import Module, name_modules, tap, wanted


class LogitBias(Module):
    """Adds a learned number to the logits of each token (`final_logits_bias` of BART and Marian)."""

    def __init__(self, vocab: int):
        super().__init__()
        self.bias = mx.zeros((1, vocab))

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.bias.astype(x.dtype)


class Seq2Seq(Module):
    """An encoder and a decoder (Vaswani et al. 2017, arXiv 1706.03762): ids of a source (B, S) and of what is written
    so far (B, L) -> logits (B, L, V) of what follows.

    embed: vectors of the source's tokens. target: those of the decoder's (None: `embed` serves both); where the table
    is the same, `Embed(..., of=embed)`. head: makes the logits (None: the decoder's table does). finish: done to the
    logits at last. context: tokens that the positions of either side are made for (None: no limit).

    Layers of the decoder have a step with `CrossAttention`; its activations read `decoder.layers.0.cross.op.pattern`.

    >>> from mlx_tformer.nn import Attention, Block, CrossAttention, Everything, Mlp, Residual
    >>> reads = Block(attn=Residual(Attention(16, heads=2, mask=Everything())), mlp=Residual(Mlp(16, 32)))
    >>> writes = Block(attn=Residual(Attention(16, heads=2)), cross=Residual(CrossAttention(16, heads=2)))
    >>> model = Seq2Seq(Embed(100, 16), Stack([reads]), Stack([writes]))
    >>> model(mx.array([[1, 2, 3]]), decoder_input_ids=mx.array([[0, 7]])).shape
    (1, 2, 100)
    """

    sites = ("first", "logits")

    def __init__(
        self,
        embed: Embed,
        encoder: Stack,
        decoder: Stack,
        head: nn.Module | None = None,
        *,
        target: Embed | None = None,
        finish: Norm | None = None,
        context: int | None = None,
    ):
        super().__init__()
        self.embed, self.encoder, self.decoder, self.context = embed, encoder, decoder, context
        if target is not None:
            self.target = target
        if head is not None:
            self.head = head
        self.has_target, self.tied = target is not None, head is None
        self.finish: Norm = nn.Identity() if finish is None else finish
        name_modules(self)

    def __call__(
        self, ids: mx.array, *, decoder_input_ids: mx.array, attention_mask: mx.array | None = None
    ) -> mx.array:
        """Logits (B, L, V) of the next token after each of `decoder_input_ids` (B, L), given a source `ids` (B, S).

        attention_mask (B, S) is 0 at padding of the source, wherever that stands.
        """
        memory = self.encode(ids, attention_mask=attention_mask)
        return self.logits(self.decode(decoder_input_ids, memory, attention_mask=attention_mask))

    def encode(self, ids: mx.array, *, attention_mask: mx.array | None = None) -> mx.array:
        """What the encoder makes of a source (B, S), (B, S, C): the memory that `decode` looks at.

        attention_mask (B, S) is 0 at padding; positions count from the first token that is none, and rows of padding
        hold nothing of use. Raises UsageError for a mask of another shape, and for a text that is longer than the
        positions.
        """
        real = _real(attention_mask, ids.shape)
        left = None if real is None else padding_before(real)
        ctx = Context(0, ids.shape[1], left=left, context=ids.shape[1], real=real)
        return self.encoder(self.embed(ids, ctx), ctx)

    def decode(
        self,
        ids: mx.array,
        memory: mx.array | None = None,
        cache: Cache | None = None,
        *,
        attention_mask: mx.array | None = None,
    ) -> mx.array:
        """The residual stream (B, L, C) after the decoder's last norm, which `logits` reads, for `ids` (B, L) that
        follow what `cache` remembers.

        memory (B, S, C), with the source's attention_mask (B, S), is looked at; a cache keeps what is needed of both,
        so that later calls can leave them out. Raises UsageError where there is neither.
        """
        start, length = (0 if cache is None else cache.length), ids.shape[1]
        real = None
        if memory is not None:
            real = _real(attention_mask, memory.shape[:2])
        if cache is not None:
            cache.real = real if start == 0 else cache.real
            real = cache.real
        ctx = Context(start, length, cache, context=start + length, memory=memory, memory_real=real)
        return self.decoder(self._target(ids, ctx), ctx)

    def logits(self, x: mx.array, first: int = 0) -> mx.array:
        """(B, L, C) -> (B, L, V); watchers are told which token of the pass is the `first` of these."""
        if wanted(self, "first"):
            tap(self, "first", mx.array([first]))
        table = self.target if self.has_target else self.embed
        return tap(self, "logits", self.finish(table.as_linear(x) if self.tied else self.head(x)))

    def new_cache(self, context: int = 0, how: Keeping = WHOLE) -> Cache:
        """An empty cache of the decoder; `how` much of it is kept."""
        return Cache.of(self.decoder, context, how)

    @property
    def vocab(self) -> int:
        """Ids that it reads: the rows of the embedding."""
        return self.embed.vocab

    @property
    def target_vocab(self) -> int:
        """Ids that it writes."""
        return self.target.vocab if self.has_target else self.embed.vocab

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Tokens that either side was trained on, and that it can look at; None: no limit."""
        return None if self.context is None else (self.context, self.context)

    def _target(self, ids: mx.array, ctx: Context) -> mx.array:
        return self.target(ids, ctx) if self.has_target else self.embed(ids, ctx)


def _real(attention_mask: mx.array | None, shape: tuple[int, ...]) -> mx.array | None:
    """Where a mask says that there is text, as booleans."""
    if attention_mask is None:
        return None
    if attention_mask.shape != shape:
        raise UsageError(f"attention_mask: found shape {attention_mask.shape}, expected that of the source, {shape}")
    return attention_mask.astype(mx.bool_)
