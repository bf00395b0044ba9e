"""Attention within buckets of a locality-sensitive hash: the Reformer (Kitaev, Kaiser and Levskaya 2020, arXiv
2001.04451).

Queries are keys as well, and near ones mostly fall into one bucket. The tokens of a text are sorted by bucket and
cut into chunks, and a token looks into its own chunk and the one before it: memory grows with the length, not with
its square. Several rounds of hashing find what one misses.
"""

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from .context import Context
from .delta import unit
from .tap import Module, tap

ITSELF, HIDDEN = -1e5, -1e9
"""Scores of a token with itself, which counts only where there is nothing else, and of what it must not see."""


class LSHAttention(Module):
    """`heads` heads of shared queries and keys. A token sees the tokens that share a bucket with it in one of `rounds`
    rounds and stand in its chunk of `chunk` sorted tokens or in the one before; each of them once, and where `causal`
    none that comes after it. It sees itself only if it sees nothing else. Keys have length one (section 2 of the
    paper).

    The hash is that of `seed`, always the same. Where a chunk ends depends on all tokens of the text, so nothing can be
    remembered between calls: raises UsageError if a cache is given.

    >>> LSHAttention(16, heads=2, buckets=4, chunk=4)(mx.zeros((1, 10, 16))).shape
    (1, 10, 16)
    """

    sites = ("q", "v", "z")
    packs = False  # tokens of one text and of another share buckets

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int | None = None,
        *,
        buckets: int,
        rounds: int = 1,
        chunk: int = 64,
        bias: bool = False,
        causal: bool = True,
        seed: int = 0,
    ):
        super().__init__()
        if buckets != 1 and buckets % 2:
            raise ValueError(
                f"buckets ({buckets}) must be 1 or an even number: half of them are the others turned round"
            )
        self.heads, self.head_dim = heads, dim // heads if head_dim is None else head_dim
        self.buckets, self.rounds, self.chunk, self.causal, self.seed = buckets, rounds, chunk, causal, seed
        self.qkv = nn.Linear(dim, 2 * heads * self.head_dim, bias)
        self.out = nn.Linear(heads * self.head_dim, dim, bias)

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        ctx = Context.alone(x) if ctx is None else ctx
        if ctx.cache is not None:
            raise UsageError("LSH attention sorts a whole text and remembers nothing; leave out the cache")
        more = -x.shape[1] % self.chunk  # tokens that fill the last chunk
        heads = mx.unflatten(self.qkv(x), -1, (-1, self.head_dim)).swapaxes(1, 2)
        q, v = (tap(self, name, part) for name, part in zip("qv", mx.split(heads, 2, axis=1), strict=True))
        q, v = (mx.pad(part.astype(mx.float32), [(0, 0), (0, 0), (0, more), (0, 0)]) for part in (q, v))
        real = mx.pad(_real(x, ctx), [(0, 0), (0, more)])
        z = self._attend(q, v, self.hash(mx.stop_gradient(q)), real)[:, :, : x.shape[1]]
        return self.out(tap(self, "z", z.astype(x.dtype)).swapaxes(1, 2).flatten(2))

    def hash(self, q: mx.array) -> mx.array:
        """The bucket of each token in each round, (B, H, L, D) -> (B, H, R, L): which of as many directions it is
        nearest to."""
        if self.buckets == 1:
            return mx.zeros((*q.shape[:2], self.rounds, q.shape[2]), mx.int32)
        shape = (self.rounds, self.head_dim, self.buckets // 2)
        turned = q[:, :, None] @ mx.random.normal(shape, key=mx.random.key(self.seed))  # (B, H, R, L, buckets / 2)
        return mx.argmax(mx.concatenate([turned, -turned], axis=-1), axis=-1).astype(mx.int32)

    def _attend(self, q: mx.array, v: mx.array, bucket: mx.array, real: mx.array) -> mx.array:
        """What each token finds, (B, H, L, D), in all rounds together."""
        # Padding is sorted behind everything else, so that it moves no chunk.
        bucket, length = mx.where(real[:, None, None], bucket, self.buckets), q.shape[2]
        order = mx.argsort(bucket * length + mx.arange(length), axis=-1).astype(mx.int32)  # (B, H, R, L)
        rank = mx.argsort(order, axis=-1).astype(mx.int32)
        scores = self._scores(q, bucket, order, rank // self.chunk)  # (B, H, R, n, c, 2c)
        found = mx.softmax(scores, axis=-1) @ _with_previous(self._chunks(v, order))
        found = mx.take_along_axis(found.flatten(3, 4), rank[..., None], axis=3)  # in the order of the text again
        weight = mx.take_along_axis(mx.logsumexp(scores, axis=-1).flatten(3, 4), rank, axis=3)  # (B, H, R, L)
        together = (mx.softmax(weight, axis=2)[..., None] * found).sum(axis=2)
        return mx.where(real[:, None, :, None], together, 0)

    def _scores(self, q: mx.array, bucket: mx.array, order: mx.array, chunk: mx.array) -> mx.array:
        """Of each token with those of its chunk and the one before, (B, H, R, n, c, 2c). A pair that m rounds have
        loses log m in each, and so counts once."""
        mine = self._chunks(q, order)
        scores = (mine @ _with_previous(unit(mine)).swapaxes(-1, -2)) * self.head_dim**-0.5
        at, there = mx.unflatten(order, 3, (-1, self.chunk)), self._chunks(bucket.swapaxes(2, 3), order)
        away = self._chunks(chunk.swapaxes(2, 3), order)
        query, key = at[..., None], _with_previous(at)[..., None, :]
        count = mx.zeros(scores.shape, mx.int32)
        for i in range(self.rounds):
            same = there[..., i, None] == _with_previous(there[..., i])[..., None, :]
            back = away[..., i, None] - _with_previous(away[..., i])[..., None, :]
            count = count + (same & (back >= 0) & (back <= 1))
        own = mx.take_along_axis(bucket, order, axis=3)
        own = mx.unflatten(own, 3, (-1, self.chunk))
        seen = own[..., None] == _with_previous(own)[..., None, :]
        seen = seen & (key <= query) if self.causal else seen
        scores = mx.where(key == query, ITSELF, scores) - mx.log(mx.maximum(count, 1))
        return mx.where(seen, scores, HIDDEN)

    def _chunks(self, x: mx.array, order: mx.array) -> mx.array:
        """(B, H, L, D), sorted as each round has it and cut: (B, H, R, n, c, D)"""
        x = mx.broadcast_to(x[:, :, None], (*order.shape, x.shape[-1]))
        return mx.unflatten(mx.take_along_axis(x, order[..., None], axis=3), 3, (-1, self.chunk))


def _with_previous(x: mx.array) -> mx.array:
    """Chunks (B, H, R, n, c, ...) with the one before in front of each, (B, H, R, n, 2c, ...); before the first is -1,
    which is no position and no bucket."""
    before = mx.concatenate([mx.full(x[:, :, :, :1].shape, -1, x.dtype), x[:, :, :, :-1]], axis=3)
    return mx.concatenate([before, x], axis=4)


def _real(x: mx.array, ctx: Context) -> mx.array:
    """Which tokens are no padding, (B, L)."""
    real = mx.ones(x.shape[:2], mx.bool_) if ctx.real is None else ctx.real
    return real if ctx.left is None else real & (mx.arange(x.shape[1]) >= ctx.left[:, None])
