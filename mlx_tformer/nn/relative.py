"""A learned bias for each range of distance, in one table for all layers of a stack."""

import math
from functools import lru_cache

import mlx.core as mx

from .. import kernels
from .position import Position
from .tap import Elsewhere


class RelativeBias(Position):
    """One learned number for each head and each of `buckets` ranges of distance, added to the scores (T5, Raffel et al.
    2019, arXiv 1910.10683, section 2.1).

    Near distances have a bucket each; from half of the buckets on they widen with the logarithm of the distance up to
    `farthest`, and what lies beyond shares the last. Of a `causal` one all buckets look back, else half look ahead.
    Layers that have the table in common get `Shared` ones.
    """

    def __init__(self, buckets: int, heads: int, farthest: int, *, causal: bool):
        super().__init__()
        ways = buckets if causal else buckets // 2
        if ways < 2 or farthest <= ways // 2:
            raise ValueError(f"{buckets} buckets and a farthest distance of {farthest} do not go together")
        self.table = mx.zeros((buckets, heads))
        self.buckets, self.farthest, self.causal = buckets, farthest, causal

    @property
    def distances(self) -> kernels.Distances:
        return kernels.Buckets(self.table, bucket_numbers(self.buckets, self.farthest, self.causal))

    def bias(self, queries: range, keys: range, left: mx.array | None = None) -> mx.array:
        ahead = mx.arange(keys.start, keys.stop) - mx.arange(queries.start, queries.stop)[:, None]
        numbers = bucket_numbers(self.buckets, self.farthest, self.causal)
        bucket = numbers[mx.clip(ahead, -self.farthest, self.farthest) + self.farthest]  # (L, S)
        return self.table[bucket].transpose(2, 0, 1)  # (H, L, S)

    def __str__(self) -> str:
        way = "back" if self.causal else "both ways"
        return f"learned for {self.buckets} ranges of distance up to {self.farthest}, {way}"


@lru_cache(maxsize=64)
def bucket_numbers(buckets: int, farthest: int, causal: bool) -> mx.array:
    """The bucket of each distance of a key from a query, from `farthest` back to as far ahead.

    >>> bucket_numbers(8, 6, True).tolist()
    [7, 6, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0]
    >>> bucket_numbers(8, 6, False).tolist()
    [3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7]
    """
    ways = buckets if causal else buckets // 2
    near = ways // 2

    def number(distance: int) -> int:
        if distance < near:
            return distance
        wide = math.log(distance / near) / math.log(farthest / near) * (ways - near)
        return min(near + int(wide), ways - 1)

    back = [number(distance) for distance in range(farthest, -1, -1)]
    ahead = [0 if causal else ways + number(distance) for distance in range(1, farthest + 1)]
    return mx.array(back + ahead)


class Shared(Position):
    """A position whose weights stand elsewhere in the model, in its stack: layers that share it do not have them
    again."""

    def __init__(self, of: Position):
        super().__init__()
        self._of = Elsewhere(of)

    def turn(self, q: mx.array, k: mx.array, offset: int | mx.array, context: int) -> tuple[mx.array, mx.array]:
        return self._of.module.turn(q, k, offset, context)

    @property
    def distances(self) -> kernels.Distances | None:
        return self._of.module.distances

    def bias(self, queries: range, keys: range, left: mx.array | None = None) -> mx.array | None:
        return self._of.module.bias(queries, keys, left)

    def rotate(self, x: mx.array, offset: int | mx.array, context: int) -> mx.array:
        return self._of.module.rotate(x, offset, context)

    def regime(self, context: int) -> int:
        return self._of.module.regime(context)

    def __str__(self) -> str:
        return str(self._of.module)
