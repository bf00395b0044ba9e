"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): keys and values come from one small vector for each
token.

What is remembered of a token is that latent and one rotary key that all heads share. A prompt expands the latents
into keys and values of all heads; a step absorbs the expansion into the query and the output instead, and attends
over the latents.
"""

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from .attention import asked_of, attend, joined_heads, placed
from .cache import KV, State, Stateful, WindowKV
from .context import Context
from .keeping import Keeping
from .mask import Causal, Mask
from .packed import KeptKV
from .position import Position
from .spectator import Places, spectators
from .tap import tap, wanted

ABSORBED_UP_TO = 8
"""Queries at a time for which absorbing is cheaper than expanding."""


class LatentAttention(Stateful):
    """Attention of H heads over latents of `rank` features.

    A query head has `plain` features without a position and `rotary` with one, a value head `value`. With `q_rank`
    the queries come through a small vector of their own. The projections that read the input are one matrix: the
    query's (or its small vector's) rows, then the latent's, then the rotary key's.

    >>> attention = LatentAttention(32, heads=4, rank=16, plain=8, rotary=4, value=8)
    >>> attention(mx.zeros((1, 5, 32))).shape
    (1, 5, 32)
    """

    sites = ("latent", "q", "k", "v", "scores", "pattern", "z", "result")
    packs = True

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rank: int,
        plain: int,
        rotary: int,
        value: int,
        q_rank: int | None = None,
        bias: bool = False,
        position: Position | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
        eps: float = 1e-6,
    ):
        super().__init__()
        self.heads, self.rank, self.plain, self.rotary, self.value, self.q_rank = (
            heads,
            rank,
            plain,
            rotary,
            value,
            q_rank,
        )
        queries = heads * (plain + rotary)
        self.into = nn.Linear(dim, (queries if q_rank is None else q_rank) + rank + rotary, bias)
        if q_rank is not None:
            self.q_norm, self.q_up = nn.RMSNorm(q_rank, eps), nn.Linear(q_rank, queries, bias=False)
        self.kv_norm = nn.RMSNorm(rank, eps)
        self.kv_up = mx.zeros((heads, plain + value, rank))
        self.out = nn.Linear(heads * value, dim, bias)
        self.position = Position() if position is None else position
        self.mask = Causal() if mask is None else mask
        self.scale = (plain + rotary) ** -0.5 if scale is None else scale

    def new_state(self) -> State:
        return KV()

    def state_bytes(self, tokens: int, dtype: mx.Dtype) -> int:
        return (self.rank + self.rotary) * tokens * dtype.size

    def kept_state(self, how: Keeping) -> State:
        """Latents are not packed: they are small, and everything is made of them."""
        if how.size is not None:
            return KeptKV(how.size, how.keep) if how.keep else WindowKV(how.size)
        return self.new_state()

    def kept_bytes(self, tokens: int, dtype: mx.Dtype, how: Keeping) -> int:
        return self.state_bytes(tokens if how.size is None else min(tokens, how.size), dtype)

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        ctx = Context.alone(x) if ctx is None else ctx
        q, latent, turning = self._projected(x)
        q_plain, q_turning = mx.split(q, [self.plain], axis=-1)  # (B, H, L, plain), (B, H, L, rotary)
        q_turning, turning = self.position.turn(q_turning, turning, ctx.offset, ctx.context)
        state = ctx.state(self.path)
        if isinstance(state, KV):
            latent, turning = state.append(latent, turning)  # (B, 1, S, rank), (B, 1, S, rotary)
        at = placed(self, ctx, state, latent.shape[2])
        latent = tap(self, "latent", latent)
        mask = ctx.visible(self.mask, latent.shape[2])
        z = self._attended(q_plain, q_turning, latent, turning, mask, at)  # (B, H, L, value)
        return joined_heads(self, z, self.out)

    def _projected(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """(B, L, C) -> q (B, H, L, plain + rotary), latent (B, 1, L, rank), the shared rotary key (B, 1, L, rotary)"""
        q, latent, turning = mx.split(self.into(x), [-self.rank - self.rotary, -self.rotary], axis=-1)
        if self.q_rank is not None:
            q = self.q_up(self.q_norm(q))
        q = mx.unflatten(q, -1, (self.heads, -1)).swapaxes(1, 2)
        return q, self.kv_norm(latent)[:, None], turning[:, None]

    def _attended(
        self,
        q: mx.array,
        q_turning: mx.array,
        latent: mx.array,
        turning: mx.array,
        mask: mx.array | str | None,
        at: Places,
    ) -> mx.array:
        """Few queries over the latents, many over keys and values. Watchers see keys and values either way, and few
        queries use them only if a watcher changed them."""
        few = q.shape[2] <= ABSORBED_UP_TO
        if few and not any(wanted(self, name) for name in "qkv"):
            return self._absorbed(q, q_turning, latent, turning, mask, at)
        made = self._expanded(q, q_turning, latent, turning)
        heads = [tap(self, name, value) for name, value in zip("qkv", made, strict=True)]
        if few and all(after is before for after, before in zip(heads, made, strict=True)):
            return self._absorbed(q, q_turning, latent, turning, mask, at)
        return attend(self, *heads, scale=self.scale, mask=mask, at=at)

    def _expanded(
        self, q: mx.array, q_turning: mx.array, latent: mx.array, turning: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values of every head, made of the latents."""
        k, v = mx.split(latent @ self.kv_up.swapaxes(1, 2), [self.plain], axis=-1)  # (B, H, S, plain), (B, H, S, value)
        turning = mx.broadcast_to(turning, (*k.shape[:3], self.rotary))
        return mx.concatenate([q, q_turning], axis=-1), mx.concatenate([k, turning], axis=-1), v

    def _absorbed(
        self,
        q: mx.array,
        q_turning: mx.array,
        latent: mx.array,
        turning: mx.array,
        mask: mx.array | str | None,
        at: Places,
    ) -> mx.array:
        """(q Wk) · latent instead of q · (Wk latent), and Wv after the sum instead of before: one key head for all."""
        to_key, to_value = mx.split(self.kv_up, [self.plain], axis=1)  # (H, plain, rank), (H, value, rank)
        q = mx.concatenate([q @ to_key, q_turning], axis=-1)  # (B, H, L, rank + rotary)
        keys, asked = kernels.Latent(latent, turning), asked_of(self.scale, mask)
        shown = spectators() or wanted(self, "scores") or wanted(self, "pattern")
        if not shown and kernels.chosen_for(q, keys, asked):
            z = kernels.attention(q, keys, asked)
        else:
            k = mx.concatenate([latent, turning], axis=-1)
            z = attend(self, q, k, latent, scale=self.scale, mask=mask, at=at)
        return z @ to_value.swapaxes(1, 2)
