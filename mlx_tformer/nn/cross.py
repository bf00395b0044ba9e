"""Cross-attention: a decoder that looks at what an encoder made of another text."""

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from .attention import attend, joined_heads
from .cache import Memory, State, Stateful
from .context import Context
from .spectator import Places
from .tap import tap


class CrossAttention(Stateful):
    """Attention of H query heads to a memory (B, S, M), whose keys and values K heads share (Vaswani et al. 2017,
    section 3.2.3).

    Queries come from x, keys and values from the memory by one matrix, whose rows are all k heads and then all v heads.
    Every token sees all of the memory that is text. With a cache, keys and values are made in the first call and kept.
    `memory_dim` is M where the encoder is not as wide as the decoder.

    >>> x, memory = mx.zeros((1, 3, 32)), mx.zeros((1, 5, 32))
    >>> CrossAttention(32, heads=4)(x, Context.alone(x, memory)).shape
    (1, 3, 32)
    """

    sites = ("q", "k", "v", "scores", "pattern", "z", "result")

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        memory_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({self.kv_heads})")
        width = dim if memory_dim is None else memory_dim
        self.q = nn.Linear(dim, self.heads * self.head_dim, bias)
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.head_dim, bias)
        self.out = nn.Linear(self.heads * self.head_dim, dim, bias if out_bias is None else out_bias)
        self.scale = self.head_dim**-0.5 if scale is None else scale

    def new_state(self) -> State:
        return Memory()

    def state_bytes(self, tokens: int, dtype: mx.Dtype) -> int:
        """For a memory of as many tokens as the text."""
        return 2 * self.kv_heads * self.head_dim * tokens * dtype.size

    def __call__(self, x: mx.array, ctx: Context) -> mx.array:
        q = tap(self, "q", self._heads(self.q(x)))  # (B, H, L, D)
        k, v = self._memory(ctx, x.shape[1])
        k, v = tap(self, "k", k), tap(self, "v", v)
        mask = None if ctx.memory_real is None else ctx.memory_real[:, None, None]  # (B, 1, 1, S)
        at = Places(range(ctx.start, ctx.start + ctx.length), range(k.shape[2]))
        z = attend(self, q, k, v, scale=self.scale, mask=mask, at=at)
        return joined_heads(self, z, self.out)

    def _memory(self, ctx: Context, length: int) -> tuple[mx.array, mx.array]:
        """Keys and values (B, K, S, D) of the memory: those that are kept, or new ones."""
        state = ctx.state(self.path)
        if isinstance(state, Memory):
            state.length += length
            if state.keys is not None and state.values is not None:
                return state.keys, state.values
        if ctx.memory is None:
            raise UsageError("memory: found none; cross-attention wants what an encoder made of a text")
        k, v = mx.split(self._heads(self.kv(ctx.memory)), 2, axis=1)
        if isinstance(state, Memory):
            state.keys, state.values = k, v
        return k, v

    def _heads(self, x: mx.array) -> mx.array:
        """(B, L, heads * D) -> (B, heads, L, D)"""
        return mx.unflatten(x, -1, (-1, self.head_dim)).swapaxes(1, 2)
