"""Linear attention (Katharopoulos, Vyas, Pappas and Fleuret 2020, arXiv 2006.16236).

In place of softmax(q · k) a weight is φ(q) · φ(k), with φ(x) = elu(x) + 1. Then a sum over the keys can be taken
once for all queries, and a causal one goes along with the text: a head remembers S = Σ φ(k) vᵀ and z = Σ φ(k),
whatever the length is, and a query gets φ(q)ᵀ S / φ(q)ᵀ z.
"""

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from .cache import State, Stateful
from .context import Context
from .ssm import Recurrent, chunks, unpadded
from .tap import tap

LEAST = 1e-30
"""What a sum of weights is at least when it is divided by; that of padding is zero."""


class LinearAttention(Stateful):
    """`heads` heads of `head_dim` features; where `causal`, a token sees itself and what came before it.

    Many tokens go through it a chunk at a time, all of a chunk at once; one token is a chunk of one, and so a step of
    the recurrence. The taps `q` and `k` see what φ made of queries and keys. Raises UsageError where it is not causal
    and a cache is given: it needs the whole text at once.

    >>> LinearAttention(16, heads=2)(mx.zeros((1, 5, 16))).shape
    (1, 5, 16)
    """

    sites = ("q", "k", "v", "z")

    def __init__(self, dim: int, heads: int, head_dim: int | None = None, *, bias: bool = False, causal: bool = True):
        super().__init__()
        self.heads, self.head_dim, self.causal = heads, dim // heads if head_dim is None else head_dim, causal
        self.qkv = nn.Linear(dim, 3 * heads * self.head_dim, bias)
        self.out = nn.Linear(heads * self.head_dim, dim, bias)

    def new_state(self) -> State:
        return Recurrent()

    def state_bytes(self, tokens: int, dtype: mx.Dtype) -> int:
        return self.causal * self.heads * self.head_dim * (self.head_dim + 1) * mx.float32.size

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        ctx = Context.alone(x) if ctx is None else ctx
        q, k, v = mx.split(self.qkv(x), 3, axis=-1)  # (B, L, H * D) each
        k = unpadded(feature_map(k.astype(mx.float32)), ctx)  # padding weighs nothing
        q = tap(self, "q", self._heads(feature_map(q.astype(mx.float32))))
        k, v = tap(self, "k", self._heads(k)), tap(self, "v", self._heads(v.astype(mx.float32)))
        v = mx.concatenate([v, mx.ones_like(v[..., :1])], axis=-1)  # the last feature adds up the weights themselves
        y = self._along(q, k, v, ctx) if self.causal else self._everywhere(q, k, v, ctx)  # (B, H, L, D + 1)
        z = (y[..., :-1] / mx.maximum(y[..., -1:], LEAST)).astype(x.dtype)
        return self.out(tap(self, "z", z).swapaxes(1, 2).flatten(2))  # (B, H, L, D) -> (B, L, C)

    def _heads(self, x: mx.array) -> mx.array:
        """(B, L, H * D) -> (B, H, L, D)"""
        return mx.unflatten(x, -1, (self.heads, self.head_dim)).swapaxes(1, 2)

    def _everywhere(self, q: mx.array, k: mx.array, v: mx.array, ctx: Context) -> mx.array:
        """Sums over all keys of the text, or over those that are no padding, wherever that stands."""
        if ctx.state(self.path) is not None:
            raise UsageError("linear attention that is not causal reads a whole text at once; leave out the cache")
        k = k if ctx.real is None else mx.where(ctx.real[:, None, :, None], k, 0)
        return q @ (k.swapaxes(-1, -2) @ v)

    def _along(self, q: mx.array, k: mx.array, v: mx.array, ctx: Context) -> mx.array:
        """Sums over the keys up to each query, from the state on; leaves the state behind the last one."""
        state, read = ctx.state(self.path), []
        h = state.hidden if isinstance(state, Recurrent) else None
        h = mx.zeros((len(q), self.heads, self.head_dim, self.head_dim + 1)) if h is None else h
        for at in chunks(q.shape[2]):
            c, b, x = q[:, :, at], k[:, :, at], v[:, :, at]
            read.append(mx.tril(c @ b.swapaxes(-1, -2)) @ x + c @ h)
            h = h + b.swapaxes(-1, -2) @ x
        if isinstance(state, Recurrent):
            state.hidden, state.length = mx.contiguous(h), state.length + q.shape[2]
        return mx.concatenate(read, axis=2)


def feature_map(x: mx.array) -> mx.array:
    """φ(x) = elu(x) + 1, which is above zero.

    >>> feature_map(mx.array([-1000.0, 0.0, 2.0])).tolist()
    [0.0, 1.0, 3.0]
    """
    return mx.where(x > 0, x + 1, mx.exp(mx.minimum(x, 0)))  # elu rounds what is near -1, and the sum shows it
