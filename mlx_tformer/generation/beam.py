"""Beam search: several texts grow side by side, and the one with the best score of all is taken.

The rules are those of transformers 5, so that the same beams end in the same text.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from ..errors import UsageError
from ..nn import Cache
from .decode import NotANumber, Writer
from .rules import Started
from .scores import Top


@dataclass(frozen=True)
class Search:
    """How to search.

    beams: texts that grow side by side. length_penalty: scores are divided by the number of tokens to this power, so
    that above 0 long texts gain. early_stopping: True ends the search as soon as there are as many complete texts as
    beams; False when the best beam could not get into them at its present length; "never" when it could not at its
    best possible length.

    >>> Search(beams=0)
    Traceback (most recent call last):
    mlx_tformer.errors.UsageError: beams: found 0, expected a whole number of 1 or more
    """

    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        if isinstance(self.beams, bool) or not isinstance(self.beams, int) or self.beams < 1:
            raise UsageError(f"beams: found {self.beams}, expected a whole number of 1 or more")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not math.isfinite(penalty):
            raise UsageError(f"length_penalty: found {penalty}, expected a number")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise UsageError(f'early_stopping: found {self.early_stopping!r}, expected True, False or "never"')

    def score(self, total: float, length: int) -> float:
        """What a text of `length` tokens is worth whose log-probabilities add up to `total`."""
        return total / float(length) ** self.length_penalty


@dataclass(frozen=True)
class Beam:
    """A text that grows: its tokens, their log-probabilities and the sum of these, and its row in the cache."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    row: int = 0


@dataclass
class BeamDecoder:
    """One search; going through it gives the tokens of the best text and their log-probabilities, all at the end."""

    model: Writer
    rules: Started
    search: Search
    end_ids: frozenset[int]
    cache: Cache = field(init=False)
    score: float | None = None
    """Of the text that was found."""
    first_seconds: float = 0.0
    """Until the first tokens were there."""

    def __post_init__(self) -> None:
        self.cache = self.model.new_cache()

    def __iter__(self) -> Iterator[tuple[int, float, Top]]:
        self.score, best = self._found()[0]
        for token, logprob in zip(best.tokens, best.logprobs, strict=True):
            yield token, logprob, ()

    def _found(self) -> list[tuple[float, Beam]]:
        """The complete texts with their scores, the best first."""
        begun, beams, complete = time.perf_counter(), [Beam()], list[tuple[float, Beam]]()
        for at in range(self.rules.limit):
            longer = self._continued(beams, self._scores(beams))
            ended = [beam.tokens[-1] in self.end_ids or at + 1 == self.rules.limit for beam in longer]
            best = zip(longer[: self.search.beams], ended, strict=False)
            complete += [(self.search.score(beam.total, at + 1), beam) for beam, end in best if end]
            complete = sorted(complete, key=lambda found: -found[0])[: self.search.beams]
            beams = [beam for beam, end in zip(longer, ended, strict=True) if not end][: self.search.beams]
            self.first_seconds = self.first_seconds or time.perf_counter() - begun
            if not beams or self._decided(complete, beams[0], at + 1):
                break
            rows = [beam.row for beam in beams]
            if rows != list(range(self.search.beams)):
                self.cache.take(rows)
        return complete

    def _scores(self, beams: Sequence[Beam]) -> mx.array:
        """Log-probabilities (N, V) of what follows each beam, by the model and the rules."""
        ids = mx.array([[self.rules.start, *beam.tokens] for beam in beams])
        logits = self.model(ids[:, -1:], self.cache)[:, -1].astype(mx.float32)
        return self.rules.apply(logits - mx.logsumexp(logits, axis=-1, keepdims=True), ids)

    def _continued(self, beams: Sequence[Beam], scores: mx.array) -> list[Beam]:
        """The best continuations of all beams together, the best first: so many that, even if the best ones of all
        beams end, as many go on as there are beams."""
        vocab, keep = scores.shape[-1], max(2, 1 + len(self.end_ids)) * self.search.beams
        totals = (scores + mx.array([beam.total for beam in beams])[:, None]).flatten()
        if mx.any(mx.isnan(totals)).item():
            raise NotANumber(f"the logits of token {len(beams[0].tokens)} are not numbers; try another --dtype")
        best = mx.argpartition(-totals, min(keep, totals.size) - 1)[:keep]
        best = best[mx.argsort(-totals[best])]
        places = cast(list[int], best.tolist())
        sums = cast(list[float], totals[best].tolist())
        logprobs = cast(list[float], scores.flatten()[best].tolist())
        found = []
        for place, total, logprob in zip(places, sums, logprobs, strict=True):
            row, token = divmod(place, vocab)
            if total > -math.inf:
                beam = beams[row]
                found.append(Beam((*beam.tokens, token), (*beam.logprobs, logprob), total, row))
        return found

    def _decided(self, complete: Sequence[tuple[float, Beam]], best: Beam, length: int) -> bool:
        """True if the search is over: by the setting, or because no beam can get into the complete texts any more."""
        if len(complete) < self.search.beams:
            return False
        if self.search.early_stopping is True:
            return True
        patient = self.search.early_stopping == "never" and self.search.length_penalty > 0
        return self.search.score(best.total, self.rules.limit if patient else length) <= complete[-1][0]
