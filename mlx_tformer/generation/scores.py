"""What a model thinks of tokens that are there already: log-probabilities, in float32."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import mlx.core as mx

from .sampling import best

ROWS = 64
"""Positions whose logits are there at a time: logits of a whole chunk would be the largest thing in memory."""
Top = tuple[tuple[int, float], ...]
"""Ids and log-probabilities, the best first."""


class Head(Protocol):
    """What makes logits (B, L, V) of hidden states (B, L, C)."""

    def logits(self, x: mx.array, first: int = 0) -> mx.array: ...


class TokenScore(NamedTuple):
    """A token of a text, its log-probability after those before it, and the likeliest tokens in its place."""

    token: int
    logprob: float | None
    """None for the first token, which nothing comes before."""
    top: Top = ()


class TargetScores(NamedTuple):
    """Log-probabilities of tokens, (L,) in float32, and the likeliest tokens in their places, (L, n)."""

    logprobs: mx.array
    top: mx.array
    top_logprobs: mx.array


def score_targets(model: Head, hidden: mx.array, targets: mx.array, top: int = 0) -> TargetScores:
    """What the model thinks of `targets` (L,), from the hidden states (1, L, C) before them; evaluated."""
    parts = []
    for start in range(0, targets.shape[0], ROWS):
        logits = model.logits(hidden[:, start : start + ROWS], start)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, targets[start : start + ROWS, None], axis=-1)[:, 0]
        parts.append((chosen, *best(logprobs, top)))
        mx.eval(parts[-1])
    return TargetScores(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)))


class PromptScores:
    """Collects `found`, the scores of a prompt's tokens, as the prompt is read chunk by chunk."""

    def __init__(self, ids: Sequence[int], top: int = 0):
        self._ids, self._top = list(ids), top
        self.found = [TokenScore(self._ids[0], None)]

    @property
    def complete(self) -> bool:
        """Whether all tokens have been scored."""
        return len(self.found) == len(self._ids)

    def read(self, model: Head, hidden: mx.array) -> None:
        """Score the tokens that follow the next chunk, whose hidden states are (1, L, C)."""
        at = len(self.found)
        following = self._ids[at : at + hidden.shape[1]]
        if not following:
            return
        scores = score_targets(model, hidden[:, : len(following)], mx.array(following), self._top)
        logprobs = cast(list[float], scores.logprobs.tolist())
        tops = map(top_of, scores.top, scores.top_logprobs)
        self.found += map(TokenScore, following, logprobs, tops)


def top_of(ids: mx.array, logprobs: mx.array) -> Top:
    """Ids (n,) and their log-probabilities (n,) as pairs."""
    return tuple(zip(cast(list[int], ids.tolist()), cast(list[float], logprobs.tolist()), strict=True))
