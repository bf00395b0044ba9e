"""Which tokens may come where, as configs of encoder-decoder models say it: the first, the last, and some never."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import BadInput


@dataclass(frozen=True)
class Rules:
    """What is not left to the model. All of these are ids.

    start: what the decoder begins with, which is no part of the text (config key `decoder_start_token_id`). first: the
    first token of the text (`forced_bos_token_id`: of a multilingual model, the language). last: those of which one
    must be the last, where no more than `max_tokens` may come (`forced_eos_token_id`). banned: those that never come
    (`bad_words_ids`: Marian must not write padding). ends, shortest: tokens that end a text do not come before it has
    `shortest` ones (`min_length`, which counts the start, less one).
    """

    start: int
    first: int | None = None
    last: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    shortest: int = 0

    def apply(self, scores: mx.array, at: int, limit: int) -> mx.array:
        """Scores (B, V) of token number `at`, of `limit` at most: -inf for what may not come, 0 for what must.

        >>> Rules(0, first=2, banned=(1,)).apply(mx.array([[-3.0, -1.0, -2.0]]), at=0, limit=9).tolist()
        [[-inf, -inf, 0.0]]
        """
        if self.last and at + 1 == limit:
            return _only(self.last, scores)
        if self.first is not None and at == 0:
            return _only((self.first,), scores)
        never = self.banned + (self.ends if at < self.shortest else ())
        return mx.where(_marks(never, scores), -mx.inf, scores) if never else scores


def rules_of(setting: Callable[[str], Any], vocab: int, file: str) -> Rules:
    """The rules of a config, which `setting` looks up by key; raises BadInput for what cannot be followed."""

    def ids(key: str, *, several: bool = True) -> tuple[int, ...]:
        found = setting(key)
        listed = [] if found is None else found if several and isinstance(found, list) else [found]
        return tuple(_checked(index, key) for index in listed)

    def _checked(index: Any, key: str) -> int:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < vocab:
            raise BadInput(f"found {index!r}, expected an id from 0 to {vocab - 1}", file=file, field=key)
        return index

    key = "decoder_start_token_id"
    start = ids(key, several=False) or ids("bos_token_id", several=False)
    if not start:
        raise BadInput("missing, expected the id that the decoder begins with", file=file, field=key)
    words, key = setting("bad_words_ids") or [], "bad_words_ids"
    if not isinstance(words, list) or any(not isinstance(word, list) or len(word) != 1 for word in words):
        raise BadInput("found words of several tokens; single ones alone can be left out", file=file, field=key)
    shortest = setting("min_length") or 0
    if isinstance(shortest, bool) or not isinstance(shortest, int) or shortest < 0:
        raise BadInput(f"found {shortest!r}, expected a whole number of 0 or more", file=file, field="min_length")
    first = ids("forced_bos_token_id", several=False)
    return Rules(
        start[0],
        first[0] if first else None,
        ids("forced_eos_token_id"),
        tuple(_checked(word[0], key) for word in words),
        shortest=max(0, shortest - 1),
    )


def _only(chosen: Sequence[int], scores: mx.array) -> mx.array:
    return mx.where(_marks(chosen, scores), 0.0, mx.full(scores.shape, -mx.inf, scores.dtype))


def _marks(chosen: Sequence[int], scores: mx.array) -> mx.array:
    """True at these ids, (V,)."""
    return (mx.arange(scores.shape[-1])[:, None] == mx.array(list(chosen))).any(axis=-1)
