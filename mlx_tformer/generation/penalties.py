"""What changes logits because of the tokens before: penalties for repeating, words that must not come, ends that must
not come yet. All on the device, so that a step need not wait for the token before it to be read.

Rows are padded in front with -1, so that their ends are at one place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

PADDING = -1
LARGEST = 80.0
"""Largest exponent, base e, of a DRY penalty: beyond it float32 has no number."""


def repeated(logits: mx.array, seen: mx.array, penalty: float | mx.array) -> mx.array:
    """Logits (B, V) of tokens in `seen` divided by `penalty` where they are above 0, and multiplied by it below (Keskar
    et al. 2019, arXiv 1909.05858)."""
    return mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)


class Counts:
    """How often each row's text has had each token: in the prompt at all, and since then."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], vocab: int, written: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.prompt = mx.zeros((len(prompts), vocab), mx.bool_)
        self.written = mx.zeros((len(prompts), vocab), mx.float32)
        for row, ids in enumerate(prompts):
            if len(ids):
                self.prompt[row, mx.array(list(ids))] = True
        for row, ids in enumerate(written or ()):
            for index in ids:
                self.written[row, index] += 1

    @property
    def seen(self) -> mx.array:
        """Tokens that occur, (B, V)."""
        return self.prompt | (self.written > 0)

    def add(self, tokens: mx.array) -> None:
        """Count the tokens (B,) that were chosen."""
        self.written = self.written.at[mx.arange(tokens.shape[0]), tokens].add(1)


@dataclass(frozen=True)
class Dry:
    """The settings of `Repeats.penalty`; multiplier and base may be arrays (B, 1)."""

    multiplier: float | mx.array
    base: float | mx.array = 1.75
    allowed: int | mx.array = 2


class Repeats:
    """Where the end of a text has occurred before (DRY, "don't repeat yourself", by p-e-w).

    `lengths[i]` is how many tokens that end at i are those that end the text. A new token prolongs the matches that
    ended one before an equal token and ends the others, so that a step is linear in the length of the text. A token in
    `breakers` is part of no match.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], breakers: Sequence[Sequence[int]]):
        longest = max(map(len, prompts))
        rows = [[PADDING] * (longest - len(ids)) + list(ids) for ids in prompts]
        self.ids = mx.array(rows, dtype=mx.int32).reshape(len(rows), longest)  # (B, S)
        most = max(map(len, breakers))
        self.breakers = mx.array([[*row, *[PADDING] * (most - len(row) + 1)] for row in breakers], dtype=mx.int32)
        matches = [_matches(row, set(row_breakers)) for row, row_breakers in zip(rows, breakers, strict=True)]
        self.lengths = mx.array(matches, dtype=mx.int32).reshape(len(rows), max(longest - 1, 0))  # (B, S - 1)

    def add(self, tokens: mx.array) -> None:
        """Go on by the tokens (B,) that were chosen."""
        tokens = tokens.astype(mx.int32)[:, None]
        equal = (self.ids == tokens) & ~self._breaks(tokens)
        before = mx.concatenate([mx.zeros((tokens.shape[0], 1), mx.int32), self.lengths], axis=1)
        if self.ids.shape[1]:
            self.lengths = mx.where(equal, before + 1, 0)
        self.ids = mx.concatenate([self.ids, tokens], axis=1)

    def penalty(self, dry: Dry, vocab: int) -> mx.array:
        """What to take from the logits, (B, V): multiplier · base^(length - allowed) from a token that would prolong a
        match of `allowed` tokens or more."""
        found = mx.zeros((self.ids.shape[0], vocab))
        if self.ids.shape[1] < 2:
            return found
        following = self.ids[:, 1:]
        exponent = (self.lengths - dry.allowed).astype(mx.float32) * mx.log(mx.array(dry.base, dtype=mx.float32))
        amount = dry.multiplier * mx.exp(mx.minimum(exponent, LARGEST))
        amount = mx.where((self.lengths >= dry.allowed) & (self.lengths > 0) & ~self._breaks(following), amount, 0)
        rows = mx.broadcast_to(mx.arange(following.shape[0])[:, None], following.shape)
        return found.at[rows, mx.maximum(following, 0)].maximum(mx.where(following == PADDING, 0, amount))

    def _breaks(self, tokens: mx.array) -> mx.array:
        """Which of `tokens` (B, S) take part in no match."""
        return (tokens[:, :, None] == self.breakers[:, None]).any(axis=-1)


def _matches(ids: Sequence[int], breakers: set[int]) -> list[int]:
    """For each place but the last, how many tokens that end there are those that end `ids` (the Z function)."""
    # A token that takes part in no match is told apart from all others by its place.
    text = [(i, at) if i in breakers or i == PADDING else (i, -1) for at, i in enumerate(ids)][::-1]
    lengths = [0] * len(text)
    left = right = 0
    for i in range(1, len(text)):
        found = min(right - i, lengths[i - left]) if i < right else 0
        while i + found < len(text) and text[found] == text[i + found]:
            found += 1
        lengths[i] = found
        if i + found > right:
            left, right = i, i + found
    return lengths[:0:-1]


class Sequences:
    """Sequences of tokens that come more or less often: a bias is added to the last token of one where the others stand
    before it. With a bias of -inf it never comes."""

    def __init__(self, prompts: Sequence[Sequence[int]], biased: Sequence[Mapping[tuple[int, ...], float]], vocab: int):
        """`biased`: for each row, sequences of ids and their biases."""
        found = [(row, word, bias) for row, several in enumerate(biased) for word, bias in several.items()]
        pad = max((len(word) - 1 for _, word, _ in found), default=0)
        self._reach, self._always = pad, mx.zeros((len(prompts), vocab))
        for row, word, bias in found:
            if len(word) == 1:
                self._always[row, word[0]] = bias
        later = [(row, word, bias) for row, word, bias in found if len(word) > 1]
        self._rows = mx.array([row for row, _, _ in later], dtype=mx.int32)
        self._last = mx.array([word[-1] for _, word, _ in later], dtype=mx.int32)
        self._biases = mx.array([bias for _, _, bias in later], dtype=mx.float32)
        before = [[PADDING] * (pad - len(word) + 1) + list(word[:-1]) for _, word, _ in later]
        self._before = mx.array(before, dtype=mx.int32).reshape(len(later), pad)
        tails = [[PADDING - 1] * max(pad - len(ids), 0) + list(ids)[max(len(ids) - pad, 0) :] for ids in prompts]
        self._tail = mx.array(tails, dtype=mx.int32).reshape(len(prompts), pad)

    def add(self, tokens: mx.array) -> None:
        """Go on by the tokens (B,) that were chosen."""
        if self._reach:
            self._tail = mx.concatenate([self._tail[:, 1:], tokens.astype(mx.int32)[:, None]], axis=1)

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits (B, V), with the bias where a sequence would be complete."""
        logits = logits + self._always
        if not self._reach:
            return logits
        complete = ((self._tail[self._rows] == self._before) | (self._before == PADDING)).all(axis=-1)
        return logits.at[self._rows, self._last].add(mx.where(complete, self._biases, 0.0))
