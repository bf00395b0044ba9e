"""The words in which attention is asked for, besides its queries, keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import mlx.core as mx


@dataclass(frozen=True)
class Sight:
    """Who sees whom by place alone: intervals of keys, which kernels need no mask for.

    The queries are the last tokens of the keys' text, whose first key stands at `first`. causal: nobody sees what
    comes later. window: so many keys, a query's own among them. reach: so many on either side. chunk: the keys of its
    own stretch of so many positions.
    """

    causal: bool = False
    window: int | None = None
    reach: int | None = None
    chunk: int | None = None
    first: int = 0

    @property
    def relative(self) -> bool:
        """True if it matters where queries stand."""
        return self.causal or any(rule is not None for rule in (self.window, self.reach, self.chunk))

    def booleans(self, queries: int, keys: int, left: mx.array | None) -> mx.array:
        """(1, 1, L, S), or (B, 1, L, S) with `left` (B,) tokens of padding in front of each row."""
        key = mx.arange(keys)
        query = mx.arange(keys - queries, keys)[:, None]
        seen = mx.broadcast_to(mx.array(True), (1, 1, queries, keys))
        if self.causal:
            seen = seen & (key <= query)
        if self.window is not None:
            seen = seen & (query - key < self.window)
        if self.reach is not None:
            seen = seen & (mx.abs(query - key) <= self.reach)
        offset = self.first if left is None else self.first - left[:, None, None, None]
        if self.chunk is not None:
            seen = seen & ((query + offset) // self.chunk == (key + offset) // self.chunk)
        return seen if left is None else seen & (query + offset >= 0) & (key + offset >= 0)


@dataclass(frozen=True)
class Slopes:
    """A bias of slope · (key's place - query's), one slope for each head (ALiBi, arXiv 2108.12409)."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Buckets:
    """A bias out of a table (buckets, H): `rows` (2R + 1,) are its rows for the distances of a key from a query from
    R back to R ahead, the ends for all beyond (T5, arXiv 1910.10683)."""

    table: mx.array
    rows: mx.array


Distances = Slopes | Buckets
"""What scores gain by how far apart query and key are."""


@dataclass(frozen=True)
class Asked:
    """Everything besides q, k and v that attention depends on.

    mask: booleans that broadcast to (B, H, L, S), True is seen. left (B,): padding in front of each row. sinks (H,):
    one more score in each softmax, whose weight goes nowhere (gpt-oss).
    """

    scale: float
    sight: Sight = Sight()
    softcap: float | None = None
    distances: Distances | None = None
    mask: mx.array | None = None
    left: mx.array | None = None
    sinks: mx.array | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What has a gradient besides q, k and v."""
        table = self.distances.table if isinstance(self.distances, Buckets) else None
        return tuple(x for x in (table, self.sinks) if x is not None)

    def of(self, arrays: Sequence[mx.array]) -> "Asked":
        """The same with other `arrays`."""
        given = iter(arrays)
        distances = self.distances
        if isinstance(distances, Buckets):
            distances = replace(distances, table=next(given))
        return replace(self, distances=distances, sinks=None if self.sinks is None else next(given))

    def inputs(self, shape: tuple[int, ...], keys: int, splits: int) -> list[mx.array]:
        """The kernel's inputs for queries of `shape`, in the order of their names."""
        none = _none(mx.float32)
        seen = _none(mx.bool_) if self.mask is None else self.mask
        biased, bias, rows, sight = 0, none, _none(mx.int32), self.sight
        if isinstance(self.distances, Slopes):
            biased, bias = 1, _floats(self.distances.values)
        elif isinstance(self.distances, Buckets):
            biased, bias, rows = 2, self.distances.table, self.distances.rows
        rules = (
            int(sight.causal),
            sight.window or 0,
            sight.chunk or 0,
            -1 if sight.reach is None else sight.reach,
            sight.first if sight.chunk or self.left is not None else 0,
            int(self.mask is not None),
            biased,
            int(self.sinks is not None),
            int(self.left is not None),
            splits,
            rows.size // 2,
        )
        return [
            mx.broadcast_to(seen, (*shape[:3], keys)),
            _none(mx.int32) if self.left is None else self.left.astype(mx.int32),
            bias.astype(mx.float32),
            rows.astype(mx.int32),
            none if self.sinks is None else self.sinks.astype(mx.float32),
            _floats((self.scale, self.softcap or 0.0)),
            _integers(rules),
        ]


@dataclass(frozen=True)
class Wanted:
    """What to tell of each row of the pattern besides logsumexp, entropy, mean distance and peak: the weight on each
    of these spans of keys, (start, stop), and so many keys with the largest weights."""

    spans: tuple[tuple[int, int], ...] = ()
    top: int = 0


@lru_cache(maxsize=8)
def _none(dtype: mx.Dtype) -> mx.array:
    """What stands for an input that is not there."""
    return mx.zeros((1,), dtype)


@lru_cache(maxsize=256)
def _floats(values: tuple[float, ...]) -> mx.array:
    return mx.array(values, mx.float32)


@lru_cache(maxsize=256)
def _integers(values: tuple[int, ...]) -> mx.array:
    return mx.array(values, mx.int32)
