"""Where drafts come from: the text itself, a smaller model, or the module of a model that looks one token further."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from ..errors import UsageError
from ..nn import LM, Cache, unseen
from .decode import CHUNK
from .sampling import COLDEST, Sampler, filtered, row_key
from .settings import Sampling

LONGEST = 3
"""Tokens at the end of a text that are looked for earlier in it, at most."""


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow, and the log-probabilities (n, V) that they were drawn by; None if nothing was drawn."""

    tokens: list[int]
    logprobs: mx.array | None = None


class Draft(ABC):
    """Guesses what follows a text. Whatever it guesses, the model that checks it writes what it would write alone."""

    def see(self, hidden: mx.array, following: Sequence[int]) -> None:  # noqa: B027 - most drafts look at nothing
        """The model's hidden states (1, L, C) of the next tokens of the text, and the token that follows each."""

    @abstractmethod
    def propose(self, ids: Sequence[int], count: int) -> Proposal:
        """Up to `count` tokens that may follow `ids`."""


class Lookup(Draft):
    """What followed the last time that the text had these last tokens (prompt lookup, Saxena 2023).

    >>> Lookup().propose([5, 6, 7, 8, 1, 5, 6], 2).tokens
    [7, 8]
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._known = 0

    def propose(self, ids: Sequence[int], count: int) -> Proposal:
        self._learn(ids)
        for size in range(min(LONGEST, len(ids)), 0, -1):
            at = self._ends.get(tuple(ids[len(ids) - size :]))
            if at is not None:
                return Proposal(list(ids[at : at + count]))
        return Proposal([])

    def _learn(self, ids: Sequence[int]) -> None:
        """Remember where sequences end; that of the whole text ends nowhere yet, since nothing follows it."""
        for end in range(max(self._known, 1), len(ids)):
            for size in range(1, min(LONGEST, end) + 1):
                self._ends[tuple(ids[end - size : end])] = end
        self._known = len(ids)


class Text:
    """What a model has read of a text; it can go back, where it cannot forget by reading once more from a mark."""

    def __init__(self, model: LM, cache: Cache, ids: Sequence[int] = ()):
        """`ids` are what the cache has read already."""
        self.model, self.cache = model, cache
        self.ids = list(ids)
        self._mark: tuple[int, Cache] | None = None

    def mark(self) -> None:
        """Remember this place; nobody goes back beyond it."""
        self._mark = None if self.cache.rewinds else (len(self.ids), self.cache.fork())

    def read(self, ids: Sequence[int]) -> mx.array:
        """The hidden states (1, L, C) of tokens that follow."""
        self.ids += ids
        return self.model.hidden(mx.array([list(ids)]), self.cache)

    def back(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if self._mark is None or length == len(self.ids):
            self.cache.trim(len(self.ids) - length)
            del self.ids[length:]
            return
        start, cache = self._mark
        again = self.ids[start:length]
        self.cache = cache.fork()
        del self.ids[start:]
        if again:
            self.read(again)


class Smaller(Draft):
    """A smaller model with the same tokens (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv
    2302.01318). Its tokens are drawn as the settings say, penalties apart."""

    def __init__(self, model: LM, sampling: Sampling, planned: int):
        self._text, self._sampling = Text(model, model.new_cache(planned)), sampling
        self._key = row_key(sampling.seed)

    @unseen()
    def propose(self, ids: Sequence[int], count: int) -> Proposal:
        text = self._text
        same = next((i for i, (a, b) in enumerate(zip(text.ids, ids, strict=False)) if a != b), len(text.ids))
        text.back(min(same, len(ids) - 1))
        tokens, logprobs = list[mx.array](), list[mx.array]()
        for start in range(len(text.ids), len(ids), CHUNK):
            hidden = text.read(ids[start : start + CHUNK])
            mx.eval(hidden, text.cache.arrays)
        logits = self._logits(hidden)
        text.mark()
        for _ in range(count):
            token, scores = self._draw(logits)
            tokens.append(token)
            logprobs.append(scores)
            if len(tokens) < count:
                # Read without being told, so that the device need not wait for this program.
                logits = self._logits(text.model.hidden(token[None], text.cache))
        found = cast(list[int], mx.concatenate(tokens).tolist())
        text.ids += found[:-1]
        greedy = self._sampling.temperature < COLDEST
        return Proposal(found, None if greedy else mx.concatenate(logprobs))

    def _logits(self, hidden: mx.array) -> mx.array:
        return self._text.model.logits(hidden[:, -1:])[:, 0].astype(mx.float32)

    def _draw(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """A token (1,) and the log-probabilities (1, V) that it was drawn by."""
        if self._sampling.temperature < COLDEST:
            return mx.argmax(logits, axis=-1), logits
        scores = filtered(logits, [self._sampling])
        scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(scores, key=key), scores


class LookAhead(Draft):
    """The model's own module that predicts the token after the next (DeepSeek-V3, arXiv 2412.19437, section 2.2): one
    token at a time."""

    def __init__(self, model: LM, planned: int):
        if not model.depth:
            raise UsageError("draft: the model has no module that looks further ahead; a lookup or another model can")
        self._model, self._cache = model, model.new_draft_cache(0, planned)
        self._best: mx.array | None = None

    def see(self, hidden: mx.array, following: Sequence[int]) -> None:
        logits = self._model.draft(hidden, mx.array([list(following)]), self._cache)
        self._best = mx.argmax(logits[:, -1], axis=-1)
        mx.async_eval(self._best, self._cache.arrays)

    def propose(self, ids: Sequence[int], count: int) -> Proposal:
        return Proposal([] if self._best is None or count < 1 else cast(list[int], self._best.tolist()))


def draft_for(kind: str | LM, model: LM, sampler: Sampler, planned: int, count: int) -> Draft:
    """The draft that a caller names for a text of `planned` tokens: "lookup", "ahead" for the model's own module, or a
    model with the same tokens; of `count` tokens at most.

    Raises UsageError for anything else, and for a model with other tokens.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"draft_tokens: found {count}, expected a whole number of 1 or more")
    if kind == "lookup":
        return Lookup()
    if kind == "ahead":
        return LookAhead(model, planned)
    if not isinstance(kind, LM):
        raise UsageError(f'draft: found {kind!r}, expected "lookup", "ahead" or a model')
    if kind.vocab != model.vocab:
        raise UsageError(f"draft: it knows {kind.vocab} ids, and the model {model.vocab}; they must be the same tokens")
    if kind.lengths is not None and kind.lengths[1] < planned:
        raise UsageError(f"draft: its context is {kind.lengths[1]} tokens, less than the {planned} of this text")
    return Smaller(kind, sampler.rows[0], planned)
