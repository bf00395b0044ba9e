"""The token loop: read the prompt in chunks, then one token after the other, with the device always busy."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from ..errors import MlxTformerError
from ..nn import WHOLE, Cache, Keeping, Position
from .sampling import Chosen
from .scores import PromptScores, Top, top_of

CHUNK = 512
"""Tokens of a prompt that are read at a time: enough to fill a GPU, few enough to bound what the scores need."""


class NotANumber(MlxTformerError):
    """The model's logits are not numbers, so no token can be chosen."""

    exit_code = 3


class Writer(Protocol):
    """A model that continues ids, with a cache: an `LM`, or a decoder that looks at a source."""

    def new_cache(self, context: int = 0, how: Keeping = WHOLE) -> Cache: ...

    def hidden(self, ids: mx.array, cache: Cache) -> mx.array: ...

    def logits(self, x: mx.array, first: int = 0) -> mx.array: ...

    def __call__(self, ids: mx.array, cache: Cache) -> mx.array: ...

    def scaled_positions(self) -> list[Position]: ...


class Choice(Protocol):
    """What chooses tokens from logits (B, V)."""

    def __call__(self, logits: mx.array) -> Chosen: ...


@dataclass
class Decoder:
    """One text that grows: the ids so far and what the model remembers of them.

    `planned` is the length that the text may reach. Where positions depend on the length of the text (longrope,
    dynamic NTK), the cache is made for the prompt's length, and once the text outgrows what that is right for,
    everything is read once more for the planned length, so that keys of different scales are never mixed.
    """

    model: Writer
    prompt: Sequence[int]
    sampler: Choice
    planned: int
    scores: PromptScores | None = None
    """Where to put what the model thought of the prompt's tokens, if somebody wants to know."""
    how: Keeping = WHOLE
    given: Cache | None = None
    """What is remembered already, of the first tokens of the prompt."""
    whole: bool = field(default=True, init=False)
    """Whether every layer has read the same tokens; not so where something came in between."""
    ids: list[int] = field(init=False)
    cache: Cache = field(init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)
        self.cache = self.model.new_cache(len(self.ids), self.how) if self.given is None else self.given
        self._scaled = self.model.scaled_positions()

    def __iter__(self) -> Iterator[tuple[int, float, Top]]:
        """Ids, their log-probabilities and the likeliest ids in their place, up to the planned length. Step n + 1 is
        under way before step n is read."""
        current = self.begin()
        while len(self.ids) + 1 < self.planned:
            if self._outgrown():
                yield self.take(current)
                self.cache = self.model.new_cache(self.planned, self.how)
                current = self.begin()
                continue
            self.whole = False
            logits = self.model(current.token[:, None], self.cache)[:, -1]
            self.whole = True
            following = self._sample(logits)
            yield self.take(current)
            current = following
            if len(self.ids) % CHUNK == 0:
                mx.clear_cache()
        yield self.take(current)

    @property
    def steady(self) -> bool:
        """Whether the cache is right for the text up to its planned length."""
        return all(p.regime(self.planned) == p.regime(len(self.ids)) for p in self._scaled)

    def begin(self) -> Chosen:
        """Read the text so far; returns the token after it, under way."""
        return self._sample(self._read_prompt())

    def _read_prompt(self) -> mx.array:
        """Put all ids that the cache has not read into it, chunk by chunk; returns the logits (1, V) after the last."""
        ids, known, self.whole = mx.array([self.ids]), self.cache.length, False
        last = known + (len(self.ids) - known - 1) // CHUNK * CHUNK
        for start in range(known, last, CHUNK):
            self.score(self.model.hidden(ids[:, start : start + CHUNK], self.cache))
            mx.eval(self.cache.arrays)
            mx.clear_cache()
        hidden = self.model.hidden(ids[:, last:], self.cache)
        self.score(hidden)
        logits = self.model.logits(hidden[:, -1:], hidden.shape[1] - 1)[:, 0]
        mx.eval(logits)
        mx.clear_cache()
        self.whole = True
        return logits

    def score(self, hidden: mx.array) -> None:
        """Tell what the model thought of the tokens of the prompt, once."""
        if self.scores is not None and not self.scores.complete:
            self.scores.read(self.model, hidden)

    def _sample(self, logits: mx.array) -> Chosen:
        chosen = self.sampler(logits)
        mx.async_eval(*chosen)
        return chosen

    def take(self, chosen: Chosen) -> tuple[int, float, Top]:
        """Wait for a token and append it to the text."""
        token, logprob = chosen.token.item(), chosen.logprob.item()
        assert isinstance(token, int) and isinstance(logprob, float)
        if math.isnan(logprob):
            raise NotANumber(f"the logits after token {len(self.ids)} are not numbers; try another --dtype")
        self.ids.append(token)
        return token, logprob, top_of(chosen.top[0], chosen.top_logprobs[0])

    def _outgrown(self) -> bool:
        """True if the cache is not right for a text of one more token."""
        length, context = self.cache.length + 1, self.cache.context
        return length > context and any(p.regime(length) != p.regime(context) for p in self._scaled)
