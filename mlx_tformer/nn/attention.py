"""Attention: many heads, grouped heads, one head; and `attend`, the one place where scores become outputs."""

import mlx.core as mx
import mlx.nn as nn

from .cache import KV, State, Stateful, WindowKV
from .context import Context
from .mask import Causal, Mask, window_of
from .position import Position
from .tap import Module, tap, wanted


class Attention(Stateful):
    """Attention of H query heads that share K key and value heads of D features (Vaswani et al. 2017; Ainslie et
    al. 2023).

    K = H is multi-head attention, K = 1 multi-query, and between the two grouped-query attention. Queries, keys and
    values come from one matrix, whose rows are all q heads, then all k heads, then all v heads. `q_norm` and
    `k_norm` work on each head before the position turns it; `mask` says who sees whom, and a window in it bounds
    what is remembered.

    >>> Attention(32, heads=4, kv_heads=2)(mx.zeros((1, 5, 32))).shape
    (1, 5, 32)
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        position: Position | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({self.kv_heads})")
        self.qkv = nn.Linear(dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias)
        self.out = nn.Linear(self.heads * self.head_dim, dim, bias if out_bias is None else out_bias)
        self.position = Position() if position is None else position
        self.q_norm = nn.Identity() if q_norm is None else q_norm
        self.k_norm = nn.Identity() if k_norm is None else k_norm
        self.mask = Causal() if mask is None else mask
        self.scale = self.head_dim**-0.5 if scale is None else scale

    def new_state(self) -> State:
        window = window_of(self.mask)
        return KV() if window is None else WindowKV(window)

    def state_bytes(self, tokens: int, dtype: mx.Dtype) -> int:
        window = window_of(self.mask)
        kept = tokens if window is None else min(tokens, window)
        return 2 * self.kv_heads * self.head_dim * kept * dtype.size

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        ctx = Context.alone(x) if ctx is None else ctx
        q, k, v = self._heads(self.qkv(x))
        q = self.position.rotate(self.q_norm(q), ctx.offset, ctx.context)
        k = self.position.rotate(self.k_norm(k), ctx.offset, ctx.context)
        q, k, v = tap(self, "q", q), tap(self, "k", k), tap(self, "v", v)
        state = ctx.state(self.path)
        if isinstance(state, KV):
            k, v = state.append(k, v)  # (B, K, S, D)
        z = attend(self, q, k, v, scale=self.scale, mask=ctx.visible(self.mask, k.shape[2]))
        return self.out(tap(self, "z", z).swapaxes(1, 2).flatten(2))  # (B, L, H * D) -> (B, L, C)

    def _heads(self, qkv: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """(B, L, (H + 2K) * D) -> q (B, H, L, D), k and v (B, K, L, D)"""
        heads = mx.unflatten(qkv, -1, (-1, self.head_dim)).swapaxes(1, 2)
        q, k, v = mx.split(heads, [self.heads, self.heads + self.kv_heads], axis=1)
        return q, k, v


def attend(
    module: Module, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array | str | None = None
) -> mx.array:
    """softmax(scale · q kᵀ) v over what `mask` lets be seen; q (B, H, L, D), k and v (B, K, S, D) -> (B, H, L, D).

    Fused, unless somebody watches the scores or the pattern of this module: then the explicit twin, which gives the
    same. A query that sees nothing gets zeros. The softmax is taken in float32, and k and v are not repeated for
    grouped heads.
    """
    watched = wanted(module, "scores") or wanted(module, "pattern")
    if watched:
        return _explicit(module, q, k, v, scale, mask)
    z = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    return z if not isinstance(mask, mx.array) else mx.where(mask.any(axis=-1, keepdims=True), z, 0)


def _explicit(
    module: Module, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Attention written out, with taps on the scores (B, H, L, S) before the softmax and the pattern after it."""
    grouped = mx.unflatten(q * scale, 1, (k.shape[1], -1))  # (B, K, H / K, L, D)
    scores = (grouped @ k[:, :, None].swapaxes(-1, -2)).flatten(1, 2).astype(mx.float32)
    if isinstance(mask, str):
        mask = mx.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=mx.bool_)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    scores = tap(module, "scores", scores)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)  # an edit cannot make visible what is not
    pattern = mx.softmax(scores, axis=-1)
    if mask is not None:
        pattern = mx.where(mask, pattern, 0)  # a row with nothing to see is 0 / 0
    pattern = tap(module, "pattern", pattern).astype(v.dtype)
    return (mx.unflatten(pattern, 1, (k.shape[1], -1)) @ v[:, :, None]).flatten(1, 2)
