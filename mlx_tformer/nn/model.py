"""Whole models: what surrounds a stack of blocks."""

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from .block import Block, Norm
from .cache import Cache
from .context import Context
from .draft import NextToken
from .keeping import WHOLE, Keeping
from .position import Learned, Position, Rope, Sinusoidal, Unscaled
from .tap import Elsewhere, Module, name_modules, tap, wanted


class Embed(Module):
    """Token vectors, (B, L) -> (B, L, C): norm(scale * token + position + type), with the parts that a family has.

    `into` widens vectors that are narrower than the model (OPT's `word_embed_proj_dim`). `types` is how many kinds of
    token there are, as the two texts of a pair are (BERT's `type_vocab_size`; 0: no such vectors). `of` is another
    embedding whose vectors of tokens these are as well, as a decoder's are an encoder's.
    """

    sites = ("slots", "real", "ids", "out")

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        positions: Learned | Sinusoidal | None = None,
        scale: float = 1.0,
        norm: Norm | None = None,
        into: nn.Module | None = None,
        types: int = 0,
        of: "Embed | None" = None,
    ):
        super().__init__()
        self._of = None if of is None else Elsewhere(of)
        if of is None:
            self.tokens = nn.Embedding(vocab, dim)
        self.kinds = types
        if types:
            self.types = nn.Embedding(types, dim)
        self.vocab, self.scale = vocab, scale
        self.dtype: mx.Dtype | None = None
        """What the vectors are made into, if they do not come so: packed ones with scales of 8 bits are bfloat16, which
        holds them exactly, whatever the model computes in."""
        if positions is not None:
            self.positions = positions
        self.has_positions = positions is not None
        self.norm: Norm = nn.Identity() if norm is None else norm
        self.into = nn.Identity() if into is None else into

    def __call__(self, ids: mx.array, ctx: Context, types: mx.array | None = None) -> mx.array:
        """`types` (B, L) are the kinds of the tokens; None: all of the first."""
        if wanted(self, "slots"):
            tap(self, "slots", mx.arange(ctx.start, ctx.start + ctx.length))
        if wanted(self, "real"):
            tap(self, "real", mx.ones(ids.shape, mx.bool_) if ctx.text is None else ctx.text)
        ids = tap(self, "ids", ids)
        x = self.into(self.vectors(ids))
        x = x if self.scale == 1.0 else x * mx.array(self.scale, dtype=x.dtype)
        if self.has_positions:
            x = x + self.positions(ids.shape[1], ctx.offset).astype(x.dtype)
        if self.kinds:
            x = x + self.types(mx.array([0]) if types is None else types)
        return tap(self, "out", self.norm(x))

    def vectors(self, ids: mx.array) -> mx.array:
        """What stands in the table for each token, (B, L, C)."""
        if self._of is not None:
            return self._of.module.vectors(ids)
        x = self.tokens(ids)
        return x if self.dtype is None else x.astype(self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """The table as a head: (B, L, C) -> (B, L, V)."""
        return self.tokens.as_linear(x) if self._of is None else self._of.module.as_linear(x)


class Stack(Module):
    """Blocks in order, then a norm. `position` is one whose weights all layers share, each through a `Shared` one.

    Watchers are told where the tokens of a pass stand: their `slots` (L,) count all that came before, padding too, and
    `left` (B,) is how much padding there is in front of each row.
    """

    sites = ("slots", "left", "out")

    def __init__(self, layers: Sequence[Block], norm: Norm | None = None, *, position: Position | None = None):
        super().__init__()
        self.layers = list(layers)
        if position is not None:
            self.position = position
        self.norm: Norm = nn.Identity() if norm is None else norm
        self._run: Run = directly

    def run_by(self, run: "Run") -> None:
        """Call the layers by `run`, which may change what is kept for the gradient, and not what is computed."""
        self._run = run

    def __call__(self, x: mx.array, ctx: Context) -> mx.array:
        if wanted(self, "slots"):
            tap(self, "slots", mx.arange(ctx.start, ctx.start + ctx.length))
        if wanted(self, "left"):
            tap(self, "left", mx.zeros(x.shape[:1], mx.int32) if ctx.left is None else ctx.left)
        for layer in self.layers:
            x = self._run(self, layer, x, ctx)
        return tap(self, "out", self.norm(x))


Run = Callable[[Stack, Block, mx.array, Context], mx.array]


def directly(stack: Stack, layer: Block, x: mx.array, ctx: Context) -> mx.array:
    """Call a layer of a stack, and nothing else."""
    return layer(x, ctx)


class SoftCap(Module):
    """cap · tanh(x / cap): values that stay within ± cap (Gemma 2's `final_logit_softcapping`)."""

    def __init__(self, cap: float):
        super().__init__()
        self.cap = float(cap)

    def __call__(self, x: mx.array) -> mx.array:
        return self.cap * mx.tanh(x / self.cap)


class Scaled(Module):
    """x · factor (Cohere's `logit_scale`, Granite's `logits_scaling`)."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = float(factor)

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.factor


class LM(Module):
    """A decoder-only language model: ids (B, L) -> logits (B, L, V). Without a `head` the embedding serves as one.

    `finish` is done to the logits at last. `context` is the number of tokens that its positions are made for,
    before any scaling stretches them (None: no limit). `drafts` look further ahead; the model runs without them.

    >>> from mlx_tformer.nn import Attention, Block, GatedMlp, Residual
    >>> block = Block(attn=Residual(Attention(16, heads=2)), mlp=Residual(GatedMlp(16, 32)))
    >>> model = LM(Embed(100, 16), Stack([block]))
    >>> model(mx.array([[1, 2, 3]])).shape
    (1, 3, 100)
    """

    sites = ("first", "logits")

    def __init__(
        self,
        embed: Embed,
        decoder: Stack,
        head: nn.Module | None = None,
        *,
        context: int | None = None,
        finish: Norm | None = None,
        drafts: Sequence[NextToken] = (),
    ):
        super().__init__()
        self.context = context
        self.depth = len(drafts)
        """How many tokens behind the next one `draft` can look."""
        if drafts:
            self.drafts = list(drafts)
        self.finish: Norm = nn.Identity() if finish is None else finish
        self.embed, self.decoder = embed, decoder
        if head is not None:
            self.head = head
        self.tied = head is None
        name_modules(self)

    def __call__(
        self,
        ids: mx.array,
        cache: Cache | None = None,
        *,
        attention_mask: mx.array | None = None,
        segments: mx.array | None = None,
    ) -> mx.array:
        """Logits (B, L, V) of the next token after each of `ids` (B, L), which follow what `cache` remembers.

        attention_mask (B, L) is 0 at padding, which must stand in front of the text. segments (B, L) number the texts
        of rows that hold several, one after the other: a text sees itself alone, its positions begin at 0, and its
        logits are those that it has in a row of its own (`mlx_tformer.training.pack`). Raises UsageError for segments
        together with a cache or a mask, in a model that cannot keep texts apart, and for texts so long that positions
        scale with their length.
        """
        return self.logits(self.hidden(ids, cache, attention_mask=attention_mask, segments=segments))

    def hidden(
        self,
        ids: mx.array,
        cache: Cache | None = None,
        *,
        attention_mask: mx.array | None = None,
        segments: mx.array | None = None,
    ) -> mx.array:
        """The residual stream after the last norm, (B, L, C): what `logits` reads; for the arguments see a call."""
        if segments is None:
            ctx = self._context(ids, cache, attention_mask)
        else:
            ctx = self._packed(ids, cache, attention_mask, segments)
        return self.decoder(self.embed(ids, ctx), ctx)

    def logits(self, x: mx.array, first: int = 0) -> mx.array:
        """(B, L, C) -> (B, L, V); watchers are told which token of the pass is the `first` of these."""
        if wanted(self, "first"):
            tap(self, "first", mx.array([first]))
        return tap(self, "logits", self._project(x))

    def _project(self, x: mx.array) -> mx.array:
        return self.finish(self.embed.tokens.as_linear(x) if self.tied else self.head(x))

    def draft(
        self,
        hidden: mx.array,
        ids: mx.array,
        cache: Cache | None = None,
        *,
        module: int = 0,
        attention_mask: mx.array | None = None,
    ) -> mx.array:
        """Logits (B, L, V) of the tokens that follow `ids` (B, L), which follow what `hidden` (B, L, C) was read from.

        hidden: what `self.hidden` gave, after its norm, as vLLM has it for DeepSeek; the report leaves that open. For a
        further `module`, what `draft_hidden` gave for the one before it. cache: one of `new_draft_cache`.
        Raises UsageError for a module that the model does not have.
        """
        x = self.draft_hidden(hidden, ids, cache, module=module, attention_mask=attention_mask)
        part = self.drafts[module]
        x = part.norm(x)
        return tap(part, "logits", self.finish(part.head(x)) if part.has_head else self._project(x))

    def draft_hidden(
        self,
        hidden: mx.array,
        ids: mx.array,
        cache: Cache | None = None,
        *,
        module: int = 0,
        attention_mask: mx.array | None = None,
    ) -> mx.array:
        """The residual stream (B, L, C) of a module that looks ahead, before its norm; see `draft`."""
        part, ctx = self._draft(module), self._context(ids, cache, attention_mask)
        return part(part.embed(ids, ctx) if part.has_embed else self.embed(ids, ctx), hidden, ctx)

    def new_draft_cache(self, module: int = 0, context: int = 0) -> Cache:
        """An empty cache for `draft`, which the model's own does not hold."""
        return Cache.of(self._draft(module), context)

    def _draft(self, module: int) -> NextToken:
        if not 0 <= module < self.depth:
            raise UsageError(f"module: found {module}, but the model has {self.depth} that look further ahead")
        return self.drafts[module]

    def new_cache(self, context: int = 0, how: Keeping = WHOLE) -> Cache:
        """An empty cache, for a text that is planned to have `context` tokens (0: as long as the first call); `how`
        much of it is kept, and in what form."""
        return Cache.of(self, context, how)

    @property
    def vocab(self) -> int:
        """Ids that it knows: the rows of the embedding."""
        return self.embed.vocab

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Tokens that it was trained on, and that it can look at with its positions stretched; None: no limit."""
        if self.context is None:
            return None
        scalings = [m.scaling for m in self.modules() if isinstance(m, Rope)] or [Unscaled()]
        trained, deployed = zip(*(scaling.lengths(self.context) for scaling in scalings), strict=True)
        return min(trained), min(deployed)

    def scaled_positions(self) -> list[Position]:
        """The positions whose scale depends on the length of the text, one of each kind; for most models there are
        none."""
        found = [m for m in self.modules() if isinstance(m, Position) and m.regime(2**40) != m.regime(1)]
        return list({str(position): position for position in found}.values())

    def _packed(
        self, ids: mx.array, cache: Cache | None, attention_mask: mx.array | None, segments: mx.array
    ) -> Context:
        """The context of rows that hold several texts."""
        if cache is not None or attention_mask is not None:
            raise UsageError("segments: found a cache or an attention_mask too; rows of several texts go without")
        if segments.shape != ids.shape:
            raise UsageError(f"segments: found shape {segments.shape}, expected that of the ids, {ids.shape}")
        parts = (m for m in self.decoder.modules() if isinstance(m, Module))
        other = next((m for m in parts if not m.packs), None)
        if other is not None:
            raise UsageError(f"segments: {other.path} ({type(other).__name__}) cannot keep the texts of a row apart")
        starts, length, scaled = text_starts(segments), ids.shape[1], self.scaled_positions()
        if any(position.regime(length) for position in scaled):
            length = cast(int, (mx.arange(length) - starts).max().item()) + 1  # of the longest text
            if any(position.regime(length) for position in scaled):
                raise UsageError(f"segments: a text of {length} tokens needs a row of its own: its positions scale")
        return Context(0, ids.shape[1], left=starts, context=length)

    def _context(self, ids: mx.array, cache: Cache | None, attention_mask: mx.array | None) -> Context:
        start, length = (0 if cache is None else cache.length), ids.shape[1]
        left = None if attention_mask is None else left_padding(attention_mask, ids.shape)
        if start and left is not None:
            raise UsageError("attention_mask: padding after the first chunk; a decoder wants its padding in front")
        total = start + length
        if cache is not None:
            cache.context = max(cache.context, total) if start == 0 else cache.context
            cache.left = left if start == 0 else cache.left
            left, total = cache.left, cache.context
        return Context(start, length, cache, left, total)


def text_starts(segments: mx.array) -> mx.array:
    """Where in its row the text of each token begins, (B, L), from the number of its text; neighbours with the same
    number are one text.

    >>> text_starts(mx.array([[0, 0, 1, 1, 1, -1]])).tolist()
    [[0, 0, 2, 2, 2, 5]]
    """
    begins = mx.where(segments[:, 1:] != segments[:, :-1], mx.arange(1, segments.shape[1]), 0)
    return mx.cummax(mx.concatenate([mx.zeros_like(segments[:, :1]), begins], axis=1), axis=1)


def left_padding(attention_mask: mx.array, shape: tuple[int, ...]) -> mx.array | None:
    """Padding in front of each row, (B,), from a mask of 0 and 1 for ids of `shape` (B, L); None if there is none.

    >>> print(left_padding(mx.array([[0, 0, 1], [1, 1, 1]]), (2, 3)))
    array([2, 0], dtype=int32)
    """
    if attention_mask.shape != shape:
        raise UsageError(f"attention_mask: found shape {attention_mask.shape}, expected that of the ids, {shape}")
    real = attention_mask.astype(mx.int32)
    if mx.any(real[:, 1:] < real[:, :-1]).item():
        raise UsageError("attention_mask: a 0 after a 1; a decoder wants its padding in front (pad on the left)")
    left = real.shape[1] - real.sum(axis=1)
    return left if mx.any(left).item() else None
