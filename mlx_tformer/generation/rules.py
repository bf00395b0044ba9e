"""Which tokens may come where, as configs say it: the first, the last, some never, and none that would repeat what
stands there. The rules and their order are those of transformers 5.

Settings that look at one row of numbers for all texts at once, such as penalties, are in `penalties`; a rule looks at
the ids of a text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import mlx.core as mx

from .penalties import repeated
from .settings import NO_LIMIT, Sampling

RULED = {
    "repetition_penalty": "penalty",
    "no_repeat_ngram_size": "ngram",
    "min_length": "shortest",
    "forced_bos_token_id": "first",
    "forced_eos_token_id": "last",
    "exponential_decay_length_penalty": "decay",
    "suppress_tokens": "suppressed",
    "begin_suppress_tokens": "suppressed_first",
}
"""Settings of `Sampling` that are rules, and the names of these."""


@dataclass(frozen=True)
class Rules:
    """What is not left to the model. Tokens are ids.

    before: tokens that stand before the text and are no part of it, a prompt, or the one that a decoder begins with.
    limit: tokens that the text may have.

    first: the first token of the text, where one token stands before it (config key `forced_bos_token_id`: of a
    multilingual model, the language). last: those of which one must be the last, where no more than `limit` may come
    (`forced_eos_token_id`). words: sequences that never come (`bad_words_ids`: Marian must not write padding). ends,
    shortest: tokens that end a text do not come before it has `shortest` ones (`min_length`, which counts what stands
    before too; `min_new_tokens`).

    penalty: against tokens that are there already (`repetition_penalty`, arXiv 1909.05858). ngram: no sequence of so
    many tokens comes twice (`no_repeat_ngram_size`). source_ngram, source: none comes that is in the source
    (`encoder_no_repeat_ngram_size`). suppressed: tokens that never come (`suppress_tokens`), and those that are not the
    first left to the model (`begin_suppress_tokens`). decay: from so many tokens on, ends gain by this factor a token
    (`exponential_decay_length_penalty`).
    """

    first: int | None = None
    last: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    ends: tuple[int, ...] = ()
    shortest: int = 0
    penalty: float = 1.0
    ngram: int = 0
    source_ngram: int = 0
    source: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    decay: tuple[int, float] | None = None
    before: int = 1
    limit: int = NO_LIMIT

    def changed(self, settings: Sampling, names: Iterable[str]) -> Self:
        """The same with what `settings`, in ids, say by these names, which are those of `RULED`."""
        told: dict[str, Any] = {RULED[name]: vars(settings)[name] for name in names}
        if "shortest" in told:
            told["shortest"] = max(0, settings.min_length - self.before)
        if "last" in told:
            told["last"] = told["last"] or ()
        return replace(self, **told)

    def apply(self, scores: mx.array, ids: mx.array) -> mx.array:
        """Scores (B, V) of what follows ids (B, L), what stands before and the text so far: -inf for what may not come,
        0 for what must.

        >>> Rules(first=2, words=((1,),)).apply(mx.array([[-3.0, -1.0, -2.0]]), mx.array([[0]])).tolist()
        [[-inf, -inf, 0.0]]
        """
        at, forced = ids.shape[1] - self.before, self.first is not None and self.before == 1
        scores = self._unrepeated(scores, ids)
        scores = _without(self.ends if at < self.shortest else (), scores)
        if self.last and at + 1 == self.limit:
            scores = _only(self.last, scores)
        elif self.first is not None and forced and at == 0:
            scores = _only((self.first,), scores)
        scores = self._hastened(scores, at)
        begins = at == (1 if forced else 0)
        return _without((*self.suppressed, *(self.suppressed_first if begins else ())), scores)

    def _unrepeated(self, scores: mx.array, ids: mx.array) -> mx.array:
        """The scores after the rules that look at the tokens before."""
        if self.penalty != 1:
            scores = repeated(scores, _seen(ids, scores.shape[-1]), self.penalty)
        if self.ngram:
            scores = _without_following(ids, ids, self.ngram, scores)
        if self.source_ngram:
            scores = _without_following(_rows(self.source, ids), ids, self.source_ngram, scores)
        for word in self.words:
            if len(word) > 1:
                scores = _without_following(_rows(word, ids), ids, len(word), scores)
        single = [word[0] for word in self.words if len(word) == 1 and word[0] not in self.ends]
        return _without(single, scores)

    def _hastened(self, scores: mx.array, at: int) -> mx.array:
        """The scores with more for the ends of a long text."""
        if self.decay is None or not self.ends or at <= self.decay[0]:
            return scores
        gain = mx.abs(scores) * (self.decay[1] ** (at - self.decay[0]) - 1)
        return mx.where(_marks(self.ends, scores) & (scores > -mx.inf), scores + gain, scores)


@dataclass(frozen=True)
class Started(Rules):
    """The rules of a decoder that begins with the token `start` (config key `decoder_start_token_id`)."""

    start: int = field(kw_only=True)


def rules_for(settings: Sampling, before: int, limit: int, ends: Sequence[int]) -> Rules | None:
    """The rules of a text that follows a prompt of `before` tokens, by settings in ids; None if they say nothing.

    The penalty for repeating is left out, since `penalties` has it for all texts of a batch at once.
    """
    neutral = vars(Sampling())
    names = [name for name in RULED if vars(settings)[name] != neutral[name] and name != "repetition_penalty"]
    return Rules(ends=tuple(ends), before=before, limit=limit).changed(settings, names) if names else None


class RowRules:
    """The rules of each row of a batch, or None where it has none, and the ids that they look at."""

    def __init__(self, rules: Sequence[Rules | None], texts: Sequence[Sequence[int]]):
        self._rules = list(rules)
        self._ids = [mx.array([list(text)], dtype=mx.int32).reshape(1, len(text)) for text in texts]

    def add(self, tokens: mx.array) -> None:
        """Go on by the tokens (B,) that were chosen."""
        new = tokens.astype(mx.int32)[:, None, None]
        for row, rules in enumerate(self._rules):
            if rules is not None:
                self._ids[row] = mx.concatenate([self._ids[row], new[row]], axis=1)

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits (B, V) after the rules of each row."""
        rows = [logits[row : row + 1] for row in range(len(self._rules))]
        told = zip(self._rules, rows, self._ids, strict=True)
        return mx.concatenate([row if rules is None else rules.apply(row, ids) for rules, row, ids in told])


def _only(chosen: Sequence[int], scores: mx.array) -> mx.array:
    return mx.where(_marks(chosen, scores), 0.0, mx.full(scores.shape, -mx.inf, scores.dtype))


def _without(chosen: Sequence[int], scores: mx.array) -> mx.array:
    return mx.where(_marks(chosen, scores), -mx.inf, scores) if chosen else scores


def _marks(chosen: Sequence[int], scores: mx.array) -> mx.array:
    """True at these ids, (V,)."""
    marks = mx.zeros(scores.shape[-1:], mx.bool_)
    marks[mx.array(list(chosen))] = True
    return marks


def _rows(text: Sequence[int], ids: mx.array) -> mx.array:
    """The same text for each row of ids, (B, S)."""
    return mx.broadcast_to(mx.array(list(text)), (ids.shape[0], len(text)))


def _seen(ids: mx.array, vocab: int) -> mx.array:
    """True at the tokens of each row, (B, V)."""
    rows = mx.broadcast_to(mx.arange(ids.shape[0])[:, None], ids.shape)
    return mx.zeros((ids.shape[0], vocab)).at[rows, ids].add(1) > 0


def _without_following(text: mx.array, ids: mx.array, n: int, scores: mx.array) -> mx.array:
    """Scores (B, V), -inf where the last n - 1 of ids (B, L) with the new token are n tokens that `text` (B, S) has."""
    places = text.shape[1] - n + 1
    if places < 1 or ids.shape[1] < n - 1:
        return scores
    same = mx.ones((text.shape[0], places), mx.bool_)
    for i in range(n - 1):
        same = same & (text[:, i : i + places] == ids[:, ids.shape[1] - n + 1 + i, None])
    rows = mx.broadcast_to(mx.arange(text.shape[0])[:, None], same.shape)
    last, most = text[:, n - 1 :], scores.shape[-1] - 1  # a source may have tokens that the decoder cannot write
    return scores.at[rows, mx.minimum(last, most)].minimum(mx.where(same & (last <= most), -mx.inf, mx.inf))
