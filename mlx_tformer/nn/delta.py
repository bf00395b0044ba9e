"""The gated delta rule: linear attention that forgets, and that corrects what it remembers (Yang, Kautz and
Hatamizadeh 2024, arXiv 2412.06464).

A head keeps a matrix S that answers a key with a value. A token decays it and then puts right what it answers to the
token's own key: S = a S + k (b (v - a Sᵀk))ᵀ, which the token's query reads, Sᵀq. Each correction depends on those
before it, so the corrections of a chunk solve one triangular system (Yang et al. 2024, arXiv 2406.06484), and then
all of them are written at once. One token is a chunk of one, whose system is trivial: a step is the recurrence itself.
"""

import mlx.core as mx
import mlx.nn as nn

from .context import Context
from .ssm import CausalConv, NormedGate, StateSpace, decays, scan, unpadded
from .tap import tap


class GatedDelta(StateSpace):
    """`heads` heads, each of which remembers values of `value_dim` features under keys of `key_dim`; each of
    `key_heads` heads of queries and keys serves as many neighbouring ones (Qwen3-Next).

    `into` makes the rows of q, of k, of v, which go through the convolution, and of the output's gate; `rates` those of
    how much is put right (b) and of how much is kept (a). They are two matrices, so that the few rows of the second can
    be kept in full where the first is packed.

    >>> GatedDelta(16, heads=4, key_heads=2, key_dim=8, value_dim=6)(mx.zeros((1, 5, 16))).shape
    (1, 5, 16)
    """

    sites = ("q", "k", "v", "decay", "write", "hidden", "z")

    precise = ("a_log", "dt_bias")

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_heads: int,
        key_dim: int,
        value_dim: int,
        conv: int = 4,
        eps: float = 1e-6,
    ):
        super().__init__()
        if heads % key_heads:
            raise ValueError(f"heads ({heads}) must be a multiple of key_heads ({key_heads})")
        self.heads, self.key_heads, self.key_dim, self.value_dim = heads, key_heads, key_dim, value_dim
        self.hidden_shape, inner = (heads, key_dim, value_dim), heads * value_dim
        self.features = 2 * key_heads * key_dim + inner
        self.into = nn.Linear(dim, self.features + inner, bias=False)
        self.rates = nn.Linear(dim, 2 * heads, bias=False)
        self.conv, self.norm = CausalConv(self.features, conv, bias=False), NormedGate(value_dim, eps=eps)
        self.a_log, self.dt_bias = mx.log(mx.linspace(1, 16, heads)), mx.ones((heads,))
        self.out = nn.Linear(inner, dim, bias=False)

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        ctx = Context.alone(x) if ctx is None else ctx
        qkv, gate = mx.split(self.into(x), [self.features], axis=-1)
        write, keep = mx.split(self.rates(x).astype(mx.float32), 2, axis=-1)  # (B, L, H) each
        width = self.key_heads * self.key_dim
        q, k, v = mx.split(self._convolved(qkv, ctx), [width, 2 * width], axis=-1)
        q, k = (tap(self, name, unit(self._heads(y, self.key_dim))) for name, y in (("q", q), ("k", k)))
        v = tap(self, "v", self._heads(v, self.value_dim))  # (B, L, H, D)
        decay = -mx.exp(self.a_log.astype(mx.float32)) * nn.softplus(keep + self.dt_bias.astype(mx.float32))
        decay = tap(self, "decay", unpadded(decay, ctx))  # its logarithm
        write = tap(self, "write", mx.sigmoid(write))
        y = self._run(ctx, decay, write, q * self.key_dim**-0.5, k, v).astype(x.dtype)
        y = self.norm(y, mx.unflatten(gate, -1, (self.heads, self.value_dim)))
        return self.out(tap(self, "z", y.flatten(2)))

    def _heads(self, x: mx.array, size: int) -> mx.array:
        """(B, L, K * D) -> (B, L, K, D) in float32"""
        return mx.unflatten(x.astype(mx.float32), -1, (-1, size))

    def _chunk(self, h: mx.array, *tokens: mx.array) -> tuple[mx.array, mx.array]:
        decay, write, q, k, v = self._by_head(*tokens)
        kept, since = decays(decay)
        new = self._corrections(h, write, k, v, kept, since)
        y = (kept * (q @ k.swapaxes(-1, -2))) @ new + since[..., None] * (q @ h)
        written = (k * kept[..., -1, :, None]).swapaxes(-1, -2) @ new
        return y.swapaxes(1, 2), since[..., -1, None, None] * h + written

    def _corrections(
        self, h: mx.array, write: mx.array, k: mx.array, v: mx.array, kept: mx.array, since: mx.array
    ) -> mx.array:
        """What each token writes under its key, (B, H, Q, Dv): its value, less what is answered to the key already,
        because of `h` and because of the tokens before it in the chunk."""
        overlap = mx.tril(kept * (k @ k.swapaxes(-1, -2)) * write[..., None], -1)  # (B, H, Q, Q)
        return inverse(overlap) @ (write[..., None] * (v - since[..., None] * (k @ h)))

    def _states(self, h: mx.array, *tokens: mx.array) -> mx.array:
        decay, write, _, k, v = self._by_head(*tokens)
        new = self._corrections(h, write, k, v, *decays(decay)).swapaxes(1, 2)  # (B, Q, H, Dv)
        return scan(mx.exp(tokens[0])[..., None, None], k.swapaxes(1, 2)[..., None] * new[..., None, :], h)

    def _read(self, states: mx.array, *tokens: mx.array) -> mx.array:
        q = mx.repeat(tokens[2], self.heads // self.key_heads, axis=2)
        return (q[..., None, :] @ states).squeeze(-2)  # (B, Q, H, 1, Dk) @ (B, Q, H, Dk, Dv) -> (B, Q, H, Dv)

    def _by_head(self, *tokens: mx.array) -> list[mx.array]:
        """(B, Q, K or H, ...) -> (B, H, Q, ...)"""
        return [mx.repeat(x.swapaxes(1, 2), self.heads // x.shape[2], axis=1) for x in tokens]


def unit(x: mx.array) -> mx.array:
    """Vectors of length one in the last axis; those near zero stay so."""
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def inverse(below: mx.array) -> mx.array:
    """(1 + A)⁻¹ for matrices A (..., Q, Q) that are zero on the diagonal and above it.

    Blocks of 1, 2, 4, ... rows: the inverse of [[P, 0], [A, R]] is [[P⁻¹, 0], [-R⁻¹ A P⁻¹, R⁻¹]], and all blocks of a
    size are done in one product. A series in powers of A would have fewer products, but terms that grow beyond float32
    where the keys of a chunk are alike, and cancel.

    >>> inverse(mx.array([[0.0, 0.0], [3.0, 0.0]])).tolist()
    [[1.0, 0.0], [-3.0, 1.0]]
    """
    rows = mx.arange(below.shape[-1])
    done, size = mx.broadcast_to(mx.eye(below.shape[-1]), below.shape), 1
    while size < below.shape[-1]:
        block = rows // size
        corner = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block)  # rows of R, columns of P
        done = done - done @ mx.where(corner, below, 0) @ done
        size *= 2
    return done
