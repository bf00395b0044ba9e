"""Who sees whom. Masks are predicates on the positions of a query and a key, and compose before the softmax.

`visible` turns a mask into what attention wants: None if every query sees every key, "causal" if that is all there
is to say (no array is built, and kernels skip half of the work), or a boolean array in which True means seen.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import mlx.core as mx


class Mask(ABC):
    """A predicate on positions; `a & b` sees what both see."""

    @property
    def parts(self) -> tuple["Mask", ...]:
        """The predicates that must all hold."""
        return (self,)

    def __and__(self, other: "Mask") -> "Mask":
        return Both(tuple(dict.fromkeys(self.parts + other.parts)))

    @abstractmethod
    def sees(self, query: mx.array, key: mx.array) -> mx.array:
        """Positions of queries (..., L, 1) and keys (..., S) -> booleans (..., L, S)."""

    @abstractmethod
    def covers(self, queries: range, keys: range) -> bool:
        """True if each of these queries sees each of these keys, so that nothing has to be masked."""


@dataclass(frozen=True)
class Everything(Mask):
    """Each query sees each key: encoders, and cross-attention."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        return ()

    def sees(self, query: mx.array, key: mx.array) -> mx.array:
        return mx.broadcast_to(mx.array(True), mx.broadcast_shapes(query.shape, key.shape))

    def covers(self, queries: range, keys: range) -> bool:
        return True

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and what came before."""

    def sees(self, query: mx.array, key: mx.array) -> mx.array:
        return key <= query

    def covers(self, queries: range, keys: range) -> bool:
        return keys[-1] <= queries[0]

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True)
class Window(Mask):
    """A query sees the `size` last keys, itself among them (config key `sliding_window`)."""

    size: int

    def sees(self, query: mx.array, key: mx.array) -> mx.array:
        return query - key < self.size

    def covers(self, queries: range, keys: range) -> bool:
        return queries[-1] - keys[0] < self.size

    def __str__(self) -> str:
        return f"window of {self.size}"


@dataclass(frozen=True)
class Around(Mask):
    """A query sees itself and `reach` keys on either side (ModernBERT: half of `local_attention`)."""

    reach: int

    def sees(self, query: mx.array, key: mx.array) -> mx.array:
        return mx.abs(query - key) <= self.reach

    def covers(self, queries: range, keys: range) -> bool:
        return max(queries[-1] - keys[0], keys[-1] - queries[0]) <= self.reach

    def __str__(self) -> str:
        return f"{self.reach} on either side"


@dataclass(frozen=True)
class Chunk(Mask):
    """A query sees the keys of its own stretch of `size` positions (Llama 4's `attention_chunk_size`)."""

    size: int

    def sees(self, query: mx.array, key: mx.array) -> mx.array:
        return query // self.size == key // self.size

    def covers(self, queries: range, keys: range) -> bool:
        return len({at // self.size for at in (queries[0], queries[-1], keys[0], keys[-1])}) == 1

    def __str__(self) -> str:
        return f"chunks of {self.size}"


@dataclass(frozen=True)
class Recent(Mask):
    """A query sees the first `keep` keys and the last ones, `size` in all: what a bounded cache holds."""

    size: int
    keep: int

    def sees(self, query: mx.array, key: mx.array) -> mx.array:
        return (key < self.keep) | (query - key < self.size - self.keep)

    def covers(self, queries: range, keys: range) -> bool:
        return queries[-1] - max(keys[0], self.keep) < self.size - self.keep

    def __str__(self) -> str:
        return f"the first {self.keep} of {self.size}" if self.keep else f"the last {self.size}"


@dataclass(frozen=True)
class Both(Mask):
    """All of several predicates."""

    of: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.of

    def sees(self, query: mx.array, key: mx.array) -> mx.array:
        seen = Everything().sees(query, key)
        for part in self.of:
            seen = seen & part.sees(query, key)
        return seen

    def covers(self, queries: range, keys: range) -> bool:
        return all(part.covers(queries, keys) for part in self.of)

    def __str__(self) -> str:
        return ", ".join(map(str, self.of))


def window_of(mask: Mask) -> int | None:
    """How many keys a query sees at most, or None if there is no limit: what a cache has to keep."""
    return min((part.size for part in mask.parts if isinstance(part, Window | Chunk)), default=None)


def visible(
    mask: Mask, queries: range, keys: range, left: mx.array | None = None, real: mx.array | None = None
) -> mx.array | str | None:
    """The mask for these positions: None, "causal", or booleans (L, S), with padding (B, 1, L, S) or (B, 1, 1, S).

    `left` (B,) counts the padding in front of each row of a batch; nobody sees padding, and a padded query sees
    nothing. In a row of several texts `left` (B, L) says for each token where its text begins, and a token sees its own
    text alone. `real` (B, S) is True at keys that are no padding, wherever that stands; what its queries see is left
    open.

    >>> visible(Causal() & Window(3), range(2), range(2))
    'causal'
    >>> print(visible(Causal() & Window(2), range(1, 4), range(4)).astype(mx.int32))
    array([[1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]], dtype=int32)
    """
    query, key = mx.arange(queries.start, queries.stop)[:, None], mx.arange(keys.start, keys.stop)
    if left is not None:
        of_query, of_key = (
            (left[:, None, None, None],) * 2 if left.ndim == 1 else (left[:, None, :, None], left[:, None, None])
        )
        query, key = query - of_query, key - of_key
        return _and(mask.sees(query, key) & (query >= 0) & (key >= 0) & (of_query == of_key), real)
    parts = tuple(part for part in mask.parts if not part.covers(queries, keys))
    if not parts:
        return None if real is None else real[:, None, None]
    if parts == (Causal(),) and queries[-1] == keys[-1] and real is None:
        return "causal"
    return _and(Both(parts).sees(query, key), real)


def visible_apart(mask: Mask, queries: range, first: int, keys: range) -> mx.array:
    """The same where the keys are the `first` ones of the text and those of `keys`, as booleans (L, S)."""
    key = mx.concatenate([mx.arange(first), mx.arange(keys.start, keys.stop)])
    return mask.sees(mx.arange(queries.start, queries.stop)[:, None], key)


def _and(seen: mx.array, real: mx.array | None) -> mx.array:
    """What is seen (..., L, S) of the keys that are no padding (B, S)."""
    return seen if real is None else seen & real[:, None, None]
