"""Which tokens may come where, as configs of encoder-decoder models say it: the first, the last, some never, and none
that would repeat what stands there. The rules and their order are those of transformers 5."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .penalties import repeated


@dataclass(frozen=True)
class Rules:
    """What is not left to the model. Tokens are ids.

    start: what the decoder begins with, which is no part of the text (config key `decoder_start_token_id`). first: the
    first token of the text (`forced_bos_token_id`: of a multilingual model, the language). last: those of which one
    must be the last, where no more than `max_tokens` may come (`forced_eos_token_id`). words: sequences that never come
    (`bad_words_ids`: Marian must not write padding). ends, shortest: tokens that end a text do not come before it has
    `shortest` ones (`min_length`, which counts the start, less one; `min_new_tokens`).

    penalty: against tokens that are there already (`repetition_penalty`, arXiv 1909.05858). ngram: no sequence of so
    many tokens comes twice (`no_repeat_ngram_size`). source_ngram, source: none comes that is in the source
    (`encoder_no_repeat_ngram_size`). suppressed: tokens that never come (`suppress_tokens`), and those that are not the
    first left to the model (`begin_suppress_tokens`). decay: from so many tokens on, ends gain by this factor a token
    (`exponential_decay_length_penalty`).
    """

    start: int
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

    def apply(self, scores: mx.array, ids: mx.array, limit: int) -> mx.array:
        """Scores (B, V) of what follows ids (B, L), the start and the text so far, which may have `limit` tokens: -inf
        for what may not come, 0 for what must.

        >>> Rules(0, first=2, words=((1,),)).apply(mx.array([[-3.0, -1.0, -2.0]]), mx.array([[0]]), limit=9).tolist()
        [[-inf, -inf, 0.0]]
        """
        at = ids.shape[1] - 1
        scores = self._unrepeated(scores, ids)
        scores = _without(self.ends if at < self.shortest else (), scores)
        if self.last and at + 1 == limit:
            scores = _only(self.last, scores)
        elif self.first is not None and at == 0:
            scores = _only((self.first,), scores)
        scores = self._hastened(scores, at)
        begins = at == (0 if self.first is None else 1)
        return _without(self.suppressed + (self.suppressed_first if begins else ()), scores)

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


def _only(chosen: Sequence[int], scores: mx.array) -> mx.array:
    return mx.where(_marks(chosen, scores), 0.0, mx.full(scores.shape, -mx.inf, scores.dtype))


def _without(chosen: Sequence[int], scores: mx.array) -> mx.array:
    return mx.where(_marks(chosen, scores), -mx.inf, scores) if chosen else scores


def _marks(chosen: Sequence[int], scores: mx.array) -> mx.array:
    """True at these ids, (V,)."""
    return (mx.arange(scores.shape[-1])[:, None] == mx.array(list(chosen))).any(axis=-1)


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
