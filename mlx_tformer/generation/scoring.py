"""How well a model predicts a text, and how far the predictions of two models are apart."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from ..errors import UsageError
from ..nn import LM, WHOLE, Keeping
from . import decode
from .scores import ROWS, PromptScores, TokenScore
from .task import Prompt, checked_ids

if TYPE_CHECKING:
    from ..lm import LanguageModel

WINDOW = 2048
"""Tokens that a text is read in at a time, where nobody says otherwise and the model has room for them."""
Advance = Callable[[int, int], None]
"""Called with the tokens that are done, and with all that there are."""


@dataclass(frozen=True)
class Score:
    """What a model thinks of a text: its tokens with their log-probabilities, in nats and float32."""

    tokens: list[TokenScore]

    @property
    def logprobs(self) -> list[float]:
        """The log-probabilities of all tokens but the first, which nothing comes before."""
        return [token.logprob for token in self.tokens if token.logprob is not None]

    @property
    def logprob(self) -> float:
        """Their sum: the log-probability of the text after its first token."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of their negative mean; not a number for a text of one token."""
        return math.exp(-self.logprob / len(self.logprobs)) if self.logprobs else math.nan


def score(lm: "LanguageModel", texts: Prompt | Sequence[Prompt], *, top: int = 0) -> list[Score]:
    """What the model thinks of each text (text, ids or an array (L,)); for one text a list of one.

    top: how many of the likeliest tokens to tell in place of each. A long text is read in chunks. Raises UsageError for
    an empty text, one that is longer than the model's context, and ids that the model does not have.

    >>> import mlx_tformer as mt
    >>> found = mt.load("shakespeare").score(["To be, or not to be", "To be, or not to bee"])
    >>> found[0].logprob > found[1].logprob
    True
    """
    return [Score(_scored(lm, _whole(lm, text), top)) for text in _several(texts)]


def _several(texts: Any) -> list[Prompt]:
    one = isinstance(texts, str | mx.array) or (len(texts) > 0 and isinstance(texts[0], int))
    return [texts] if one else list(texts)


def _whole(lm: "LanguageModel", text: Prompt) -> list[int]:
    ids = checked_ids(lm, text)
    if len(ids) > lm.context:
        raise UsageError(f"text: it has {len(ids)} tokens, and the model's context {lm.context}")
    return ids


def _scored(lm: "LanguageModel", ids: list[int], top: int, how: Keeping = WHOLE) -> list[TokenScore]:
    scores, cache = PromptScores(ids, top), lm.new_cache(len(ids), how)
    for start in range(0, len(ids), decode.CHUNK):
        scores.read(lm.model, lm.model.hidden(mx.array([ids[start : start + decode.CHUNK]]), cache))
        mx.eval(cache.arrays)
        mx.clear_cache()
    return scores.found


class Window(NamedTuple):
    """A stretch of a text that is read at once, [start, stop), of which the tokens from `scored` on count."""

    start: int
    stop: int
    scored: int


def windows(length: int, size: int, stride: int) -> Iterator[Window]:
    """Stretches of `size` tokens that begin `stride` apart, so that each token but the first counts once, with at least
    size - stride tokens before it.

    >>> list(windows(7, 4, 2))
    [Window(start=0, stop=4, scored=1), Window(start=2, stop=6, scored=4), Window(start=4, stop=7, scored=6)]
    """
    scored = 1
    for start in range(0, length, stride):
        stop = min(start + size, length)
        if scored < stop:
            yield Window(start, stop, scored)
            scored = stop


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a long text."""

    tokens: int
    """Tokens that count: all but the first."""
    logprob: float
    """The sum of their log-probabilities, in nats."""
    bytes: int | None
    """What they are in UTF-8; None without a tokenizer."""
    window: int
    stride: int

    @property
    def perplexity(self) -> float:
        """exp of the mean surprise of a token."""
        return math.exp(min(-self.logprob / self.tokens, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """The surprise in bits, for each byte of the text, which does not depend on how it is cut into tokens."""
        return None if not self.bytes else -self.logprob / math.log(2) / self.bytes

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**asdict(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


def perplexity(
    lm: "LanguageModel",
    text: Prompt,
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Advance | None = None,
    how: Keeping = WHOLE,
) -> Perplexity:
    """How well the model predicts a text of any length.

    window: tokens that are read at once (None: the context, at most `WINDOW`). stride: how far windows are apart (None:
    half a window); the tokens that two have in common count in the first. how: what the cache keeps. Raises UsageError
    for a text of less than two tokens, and for a window or stride that cannot be.
    """
    ids = checked_ids(lm, text)
    size, step = window_settings(lm, ids, window, stride)
    total, count = 0.0, 0
    for part in windows(len(ids), size, step):
        found = _scored(lm, ids[part.start : part.stop], 0, how)[part.scored - part.start :]
        total += math.fsum(token.logprob for token in found if token.logprob is not None)
        count += len(found)
        if progress is not None:
            progress(count, len(ids) - 1)
    written = None if lm.tokenizer is None else len(lm.tokenizer.decode(ids[1:]).encode())
    return Perplexity(count, total, written, size, step)


def window_settings(lm: "LanguageModel", ids: Sequence[int], window: int | None, stride: int | None) -> tuple[int, int]:
    """The size of windows and the distance between them."""
    if len(ids) < 2:
        raise UsageError(f"text: found {len(ids)} tokens, expected two or more")
    size = min(lm.context, WINDOW) if window is None else window
    if not 2 <= size <= lm.context:
        raise UsageError(f"window: found {size}, expected 2 to {lm.context}, the model's context")
    step = max(size // 2, 1) if stride is None else stride
    if not 1 <= step < size:
        raise UsageError(f"stride: found {step}, expected 1 to {size - 1}, less than the window")
    return size, step


@dataclass(frozen=True)
class Comparison:
    """How far the predictions of model `b` are from those of model `a` on one text: what a quantization costs."""

    a: str
    b: str
    tokens: int
    """Positions at which predictions were compared."""
    mean_kl: float
    """KL divergence of b's next-token distribution from a's, mean over the positions, in nats."""
    largest_kl: float
    top1: float
    """Share of the positions at which both find the same token most likely."""
    perplexity_a: float
    perplexity_b: float

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


class _Sums:
    """What adds up over the positions of a text."""

    def __init__(self) -> None:
        self.kl, self.largest, self.same, self.a, self.b, self.count = 0.0, 0.0, 0, 0.0, 0.0, 0

    def add(self, a: mx.array, b: mx.array, targets: mx.array) -> None:
        """Log-probabilities (L, V) of two models, and the tokens (L,) that came."""
        kl = (mx.exp(a) * mx.where(a == -mx.inf, 0, a - b)).sum(axis=-1)
        same = (mx.argmax(a, axis=-1) == mx.argmax(b, axis=-1)).sum()
        found = [mx.take_along_axis(x, targets[:, None], axis=-1).sum() for x in (a, b)]
        figures: Any = mx.stack([kl.sum(), kl.max(), same.astype(mx.float32), *found]).tolist()
        self.kl, self.largest = self.kl + figures[0], max(self.largest, figures[1])
        self.same, self.count = self.same + round(figures[2]), self.count + targets.shape[0]
        self.a, self.b = self.a + figures[3], self.b + figures[4]


def compare(
    a: "LanguageModel",
    b: "LanguageModel",
    text: Prompt,
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Advance | None = None,
    how: Keeping = WHOLE,
) -> Comparison:
    """How far what `b` predicts of a text is from what `a` does; both read the ids that a's tokenizer makes.

    window, stride: as for `perplexity`. how: what the cache of `b` keeps, so that with the same model twice it is the
    cost of a packed or bounded cache. Raises UsageError for models with different vocabularies.
    """
    if a.vocab != b.vocab:
        raise UsageError(f"b: it knows {b.vocab} ids, and a knows {a.vocab}: they cannot be compared")
    ids = checked_ids(a, text)
    size, step = window_settings(min(a, b, key=lambda lm: lm.context), ids, window, stride)
    sums = _Sums()
    for part in windows(len(ids), size, step):
        _compare_window(a.model, b.model, ids[part.start : part.stop], part.scored - part.start, sums, how)
        if progress is not None:
            progress(sums.count, len(ids) - 1)
    count = sums.count
    perplexities = (math.exp(min(-total / count, 700.0)) for total in (sums.a, sums.b))
    return Comparison(a.origin, b.origin, count, sums.kl / count, sums.largest, sums.same / count, *perplexities)


def _compare_window(a: LM, b: LM, ids: list[int], scored: int, sums: _Sums, how: Keeping) -> None:
    """Add up the positions of a window that predict its tokens from `scored` on."""
    caches = [a.new_cache(len(ids)), b.new_cache(len(ids), how)]
    for start in range(0, len(ids) - 1, decode.CHUNK):
        chunk = mx.array([ids[start : min(start + decode.CHUNK, len(ids) - 1)]])
        hidden = [model.hidden(chunk, cache) for model, cache in zip((a, b), caches, strict=True)]
        for at in range(max(scored - 1 - start, 0), chunk.shape[1], ROWS):
            rows = slice(at, min(at + ROWS, chunk.shape[1]))
            logits = [m.logits(h[:, rows])[0].astype(mx.float32) for m, h in zip((a, b), hidden, strict=True)]
            logprobs = [x - mx.logsumexp(x, axis=-1, keepdims=True) for x in logits]
            following = ids[start + rows.start + 1 : start + rows.stop + 1]
            sums.add(logprobs[0], logprobs[1], mx.array(following))
        mx.eval([array for cache in caches for array in cache.arrays])
        mx.clear_cache()
