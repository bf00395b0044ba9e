"""Selective state spaces: Mamba (Gu and Dao 2023, arXiv 2312.00752) and Mamba 2 (Dao and Gu 2024, arXiv 2405.21060).

A token changes a hidden state of fixed size, h = decay · h + input, and reads it. Both depend on the token. Many tokens
go through it a chunk at a time, all tokens of a chunk at once, so memory is linear in the length. One token is a chunk
of one, so a step is the recurrence itself.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from .cache import State, Stateful
from .context import Context
from .tap import Module, tap, wanted

Join = Callable[[mx.array, mx.array], mx.array]
"""How what is read of a hidden state and its gate become one."""

CHUNK = 64
"""Tokens that go through a state space at once."""


class Recurrent(State):
    """The hidden state after the last token, and the inputs that the convolution still needs; neither grows."""

    rewinds = False
    saved = ("length", "inputs", "hidden")

    def __init__(self) -> None:
        self.inputs: mx.array | None = None  # (B, taps - 1, features)
        self.hidden: mx.array | None = None  # (B, ..., N), float32
        self.length = 0

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.inputs, self.hidden) if array is not None]

    def trim(self, count: int) -> None:
        if count:
            raise UsageError(f"cannot forget {count} tokens: a state space keeps no token apart from the others")

    def take(self, rows: mx.array) -> None:
        self.inputs = None if self.inputs is None else self.inputs[rows]
        self.hidden = None if self.hidden is None else self.hidden[rows]

    def join(self, others: Sequence[State]) -> None:
        states = [self, *(other for other in others if isinstance(other, Recurrent))]
        self.length = max(state.length for state in states)
        self.inputs = mx.concatenate([state.inputs for state in states if state.inputs is not None])
        self.hidden = mx.concatenate([state.hidden for state in states if state.hidden is not None])

    def drop(self, count: int) -> None:
        self.length -= count


class CausalConv(Module):
    """A convolution of each feature by itself over the last `size` tokens, (B, L, C) -> (B, L, C).

    What came before the first token is zero, or `before`, (B, size - 1, C).
    """

    def __init__(self, dim: int, size: int, bias: bool = True):
        super().__init__()
        self.size, self.has_bias = size, bias
        self.weight = mx.random.uniform(-(size**-0.5), size**-0.5, (dim, 1, size))
        if bias:
            self.bias = mx.zeros((dim,))

    def __call__(self, x: mx.array, before: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """The convolved tokens, and what the next ones need as `before`."""
        length = x.shape[1]
        if before is None:
            before = mx.zeros((x.shape[0], self.size - 1, x.shape[2]), x.dtype)
        x = mx.concatenate([before, x], axis=1)  # (B, size - 1 + L, C)
        weight = self.weight.astype(mx.float32)  # so that the sum is rounded once
        parts = [weight[:, 0, i] * x[:, i : i + length] for i in range(self.size)]
        y = sum(parts[1:], parts[0])
        y = y + self.bias if self.has_bias else y
        # Copied, or the state would hold the whole text.
        return y.astype(x.dtype), mx.contiguous(x[:, length:])


class StateSpace(Stateful):
    """What Mamba and Mamba 2 share: padding, the state, and chunks.

    A tap on `hidden` sees the hidden state after every token, (B, L, ..., N); another value changes what these tokens
    read and not what the next ones go on with. It costs the memory that is saved otherwise.
    """

    sites: tuple[str, ...] = ("x", "dt", "hidden", "z")
    precise = ("a_log", "skip")
    conv: CausalConv
    features: int
    """Features that the convolution works on."""
    hidden_shape: tuple[int, ...]
    """Shape of the hidden state of one text."""

    def new_state(self) -> State:
        return Recurrent()

    def state_bytes(self, tokens: int, dtype: mx.Dtype) -> int:
        size = mx.float32.size
        for axis in self.hidden_shape:
            size *= axis
        return (self.conv.size - 1) * self.features * dtype.size + size

    def _convolved(self, x: mx.array, ctx: Context) -> mx.array:
        """silu(conv(x)), (B, L, F), where padding is zero before and after: so it leaves no trace in a state."""
        state = ctx.state(self.path)
        before = state.inputs if isinstance(state, Recurrent) else None
        y, after = self.conv(unpadded(x, ctx), before)
        if isinstance(state, Recurrent):
            state.inputs = after
        return unpadded(nn.silu(y), ctx)

    def _run(self, ctx: Context, *tokens: mx.array) -> mx.array:
        """What the tokens read, (B, L, ...), from what each of them brings, arrays (B, L, ...) in float32."""
        state, length = ctx.state(self.path), tokens[0].shape[1]
        h = state.hidden if isinstance(state, Recurrent) else None
        h = mx.zeros((tokens[0].shape[0], *self.hidden_shape)) if h is None else h
        parts = list(chunks(length))
        if wanted(self, "hidden"):
            every = []
            for at in parts:
                every.append(self._states(h, *(x[:, at] for x in tokens)))
                h = every[-1][:, -1]
            hidden = tap(self, "hidden", mx.concatenate(every, axis=1))
            read = [self._read(hidden[:, at], *(x[:, at] for x in tokens)) for at in parts]
        else:
            read = []
            for at in parts:
                y, h = self._chunk(h, *(x[:, at] for x in tokens))
                # Or all chunks would be read last, when the hidden states of every token are there.
                h = mx.depends(h, y)
                read.append(y)
        if isinstance(state, Recurrent):
            state.hidden, state.length = mx.contiguous(h), state.length + length
        return mx.concatenate(read, axis=1)

    def _chunk(self, h: mx.array, *tokens: mx.array) -> tuple[mx.array, mx.array]:
        """What the tokens of one chunk read, and the state after it, from the state `h` before it."""
        states = self._states(h, *tokens)
        return self._read(states, *tokens), states[:, -1]

    @abstractmethod
    def _states(self, h: mx.array, *tokens: mx.array) -> mx.array:
        """The hidden state after each token of a chunk."""

    @abstractmethod
    def _read(self, states: mx.array, *tokens: mx.array) -> mx.array:
        """What each token reads of its hidden state."""


class Mamba(StateSpace):
    """A selective scan over `inner` features, each with a hidden state of `states` numbers.

    The step size of a feature comes through a small vector of `rank` numbers. Jamba has norms on that and on what is
    written and read (`dt_norm`, `b_norm`, `c_norm`). `into` makes the input's rows first and then the gate's, `select`
    the small vector, what is written (B in the paper) and what is read (C).

    >>> Mamba(16, inner=32, states=4, rank=2)(mx.zeros((1, 5, 16))).shape
    (1, 5, 16)
    """

    def __init__(
        self,
        dim: int,
        *,
        inner: int,
        states: int,
        rank: int,
        conv: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        dt_norm: nn.Module | None = None,
        b_norm: nn.Module | None = None,
        c_norm: nn.Module | None = None,
    ):
        super().__init__()
        self.rank, self.states, self.features, self.hidden_shape = rank, states, inner, (inner, states)
        self.into, self.out = nn.Linear(dim, 2 * inner, bias), nn.Linear(inner, dim, bias)
        self.conv = CausalConv(inner, conv, conv_bias)
        self.select, self.dt = nn.Linear(inner, rank + 2 * states, bias=False), nn.Linear(rank, inner)
        self.dt_norm = nn.Identity() if dt_norm is None else dt_norm
        self.b_norm = nn.Identity() if b_norm is None else b_norm
        self.c_norm = nn.Identity() if c_norm is None else c_norm
        self.a_log = mx.broadcast_to(mx.log(mx.arange(1.0, states + 1)), (inner, states))
        self.skip = mx.ones((inner,))

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        ctx = Context.alone(x) if ctx is None else ctx
        x, gate = mx.split(self.into(x), 2, axis=-1)  # (B, L, inner) each
        x = tap(self, "x", self._convolved(x, ctx))
        dt, b, c = mx.split(self.select(x), [self.rank, self.rank + self.states], axis=-1)
        dt = tap(self, "dt", nn.softplus(self.dt(self.dt_norm(dt)).astype(mx.float32)))  # (B, L, inner)
        wide, b, c = (v.astype(mx.float32) for v in (x, self.b_norm(b), self.c_norm(c)))
        y = self._run(ctx, dt, dt * wide, b, c) + self.skip * wide
        return self.out(tap(self, "z", y.astype(x.dtype) * nn.silu(gate)))

    def _states(self, h: mx.array, *tokens: mx.array) -> mx.array:
        """dt and dt · x (B, Q, inner), b and c (B, Q, N) -> (B, Q, inner, N)"""
        dt, x, b, _ = tokens
        decay = mx.exp(dt[..., None] * -mx.exp(self.a_log.astype(mx.float32)))
        return scan(decay, x[..., None] * b[:, :, None], h)

    def _read(self, states: mx.array, *tokens: mx.array) -> mx.array:
        return (states @ tokens[3][..., None]).squeeze(-1)  # (B, Q, inner, N) @ (B, Q, N, 1) -> (B, Q, inner)


class Mamba2(StateSpace):
    """H heads of D features, each with one decay and a hidden state of D · `states` numbers; heads of one of `groups`
    share what is written and read.

    `into` makes the rows of the gate, of the input, of what is written (B in the paper), of what is read (C), and of
    the step sizes, and `scaled` works on them before anything else does. `limits` bound the step size. `norm` joins
    what the heads say with the gate, (y, gate) -> z; if it is left out a `GatedNorm`.

    >>> Mamba2(16, heads=4, head_dim=8, states=4, groups=2)(mx.zeros((1, 5, 16))).shape
    (1, 5, 16)
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        head_dim: int,
        states: int,
        groups: int = 1,
        conv: int = 4,
        bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        limits: tuple[float, float] = (0.0, float("inf")),
        eps: float = 1e-5,
        norm: Join | None = None,
        scaled: nn.Module | None = None,
    ):
        super().__init__()
        if heads % groups:
            raise ValueError(f"heads ({heads}) must be a multiple of groups ({groups})")
        self.heads, self.head_dim, self.states, self.groups, self.limits = heads, head_dim, states, groups, limits
        self.inner, self.hidden_shape = heads * head_dim, (heads, head_dim, states)
        self.features = self.inner + 2 * groups * states
        self.into = nn.Linear(dim, self.inner + self.features + heads, bias)
        self.scaled = nn.Identity() if scaled is None else scaled
        self.conv = CausalConv(self.features, conv, conv_bias)
        self.norm: Join = GatedNorm(self.inner, groups, eps) if norm is None else norm
        self.a_log, self.skip, self.dt_bias = mx.log(mx.arange(1.0, heads + 1)), mx.ones((heads,)), mx.ones((heads,))
        self.out = nn.Linear(self.inner, dim, bias if out_bias is None else out_bias)

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        ctx = Context.alone(x) if ctx is None else ctx
        gate, xbc, dt = mx.split(self.scaled(self.into(x)), [self.inner, self.inner + self.features], axis=-1)
        ends = [self.inner, self.inner + self.groups * self.states]
        x, b, c = mx.split(self._convolved(xbc, ctx), ends, axis=-1)
        x = tap(self, "x", mx.unflatten(x, -1, (self.heads, self.head_dim)))  # (B, L, H, D)
        dt = mx.clip(nn.softplus(dt.astype(mx.float32) + self.dt_bias.astype(mx.float32)), *self.limits)
        # A chunk adds up decays, and those of padding would be rounded into those of the text.
        dt = tap(self, "dt", unpadded(dt, ctx))  # (B, L, H)
        wide = x.astype(mx.float32)
        b, c = (mx.unflatten(v.astype(mx.float32), -1, (self.groups, self.states)) for v in (b, c))  # (B, L, G, N)
        y = self._run(ctx, -mx.exp(self.a_log.astype(mx.float32)) * dt, dt[..., None] * wide, b, c)
        y = (y + self.skip[:, None] * wide).astype(x.dtype).flatten(2)  # (B, L, H * D)
        return self.out(tap(self, "z", self.norm(y, gate)))

    def _chunk(self, h: mx.array, *tokens: mx.array) -> tuple[mx.array, mx.array]:
        """The chunk as attention (the dual form): scores c · b that decay with distance, and what `h` adds."""
        decay, x, b, c = tokens  # (B, Q, H), (B, Q, H, D), (B, Q, G, N) twice
        kept, since = decays(decay.swapaxes(1, 2))
        b, c = self._for_heads(b), self._for_heads(c)  # (B, H, Q, N)
        x = x.swapaxes(1, 2)  # (B, H, Q, D)
        y = (kept * (c @ b.swapaxes(-1, -2))) @ x + since[..., None] * (c @ h.swapaxes(-1, -2))
        written = (x * kept[..., -1, :, None]).swapaxes(-1, -2) @ b
        return y.swapaxes(1, 2), since[..., -1, None, None] * h + written

    def _states(self, h: mx.array, *tokens: mx.array) -> mx.array:
        decay, x, b, _ = tokens
        written = x[..., None] * self._for_heads(b).swapaxes(1, 2)[..., None, :]  # (B, Q, H, D, N)
        return scan(mx.exp(decay)[..., None, None], written, h)

    def _read(self, states: mx.array, *tokens: mx.array) -> mx.array:
        return (states @ self._for_heads(tokens[3]).swapaxes(1, 2)[..., None]).squeeze(-1)  # (B, Q, H, D)

    def _for_heads(self, x: mx.array) -> mx.array:
        """(B, Q, G, N) -> (B, H, Q, N)"""
        return mx.repeat(x.swapaxes(1, 2), self.heads // self.groups, axis=1)


class Multipliers(Module):
    """Factors on stretches of the last axis, of so many features each (Falcon-H1's `ssm_multipliers`)."""

    def __init__(self, factors: Sequence[float], sizes: Sequence[int]):
        super().__init__()
        self.factors, self.ends = tuple(map(float, factors)), tuple(accumulate(sizes))

    def __call__(self, x: mx.array) -> mx.array:
        parts = mx.split(x, list(self.ends[:-1]), axis=-1)
        return mx.concatenate([factor * part for factor, part in zip(self.factors, parts, strict=True)], axis=-1)


class SiluGate(Module):
    """y · silu(gate)."""

    def __call__(self, y: mx.array, gate: mx.array) -> mx.array:
        return y * nn.silu(gate)


class NormedGate(Module):
    """RMS norm of y, in each of `groups` parts by itself, times silu(gate)."""

    def __init__(self, dim: int, groups: int = 1, eps: float = 1e-6):
        super().__init__()
        self.weight, self.groups, self.eps = mx.ones((dim,)), groups, eps

    def __call__(self, y: mx.array, gate: mx.array) -> mx.array:
        x = mx.fast.rms_norm(mx.unflatten(y.astype(mx.float32), -1, (self.groups, -1)), None, self.eps).flatten(-2)
        return (self.weight * x * nn.silu(gate.astype(mx.float32))).astype(y.dtype)


class GatedNorm(Module):
    """RMS norm of y · silu(gate), in each of `groups` parts by itself (Mamba 2)."""

    def __init__(self, dim: int, groups: int = 1, eps: float = 1e-5):
        super().__init__()
        self.weight, self.groups, self.eps = mx.ones((dim,)), groups, eps

    def __call__(self, y: mx.array, gate: mx.array) -> mx.array:
        x = y.astype(mx.float32) * nn.silu(gate.astype(mx.float32))
        x = mx.fast.rms_norm(mx.unflatten(x, -1, (self.groups, -1)), None, self.eps).flatten(-2)
        return self.weight * x.astype(y.dtype)


def decays(log: mx.array) -> tuple[mx.array, mx.array]:
    """From the logarithm of each token's decay (B, H, Q): what is left, at token i, of what token j wrote (B, H, Q, Q),
    and of what was there before the first (B, H, Q).

    >>> kept, since = decays(mx.log(mx.array([[[0.5, 0.25]]])))
    >>> kept.tolist(), since.tolist()
    ([[[[1.0, 0.0], [0.25, 1.0]]]], [[[0.5, 0.125]]])
    """
    length = log.shape[-1]
    # Sums from one token to another, each added up by itself: differences of totals lose what float32 rounds off.
    sums = mx.cumsum(mx.where(mx.tri(length, length, -1, dtype=mx.bool_), log[..., None], 0), axis=-2)
    kept = mx.exp(mx.where(mx.tri(length, length, dtype=mx.bool_), sums, -mx.inf))
    return kept, mx.exp(mx.cumsum(log, axis=-1))


def scan(decay: mx.array, written: mx.array, h: mx.array) -> mx.array:
    """h[t] = decay[t] · h[t - 1] + written[t] for all t at once, (B, L, ...); `h` (B, ...) comes before the first.

    Doubling: after k rounds each token has what the last 2**k of them wrote. Nothing is divided by a product of decays,
    which may be too small for float32.

    >>> scan(mx.array([[0.5, 0.5, 0.5]]), mx.array([[1.0, 1.0, 1.0]]), mx.array([2.0])).tolist()
    [[2.0, 2.0, 2.0]]
    """
    written = mx.concatenate([written[:, :1] + decay[:, :1] * h[:, None], written[:, 1:]], axis=1)
    reach = 1
    while reach < written.shape[1]:
        later = written[:, reach:] + decay[:, reach:] * written[:, :-reach]
        written = mx.concatenate([written[:, :reach], later], axis=1)
        decay = mx.concatenate([decay[:, :reach], decay[:, reach:] * decay[:, :-reach]], axis=1)
        reach *= 2
    return written


def chunks(length: int) -> Iterator[slice]:
    """Where the chunks of so many tokens stand."""
    return (slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))


def unpadded(x: mx.array, ctx: Context) -> mx.array:
    """(B, L, C) with zeros in place of padding."""
    if ctx.left is None:
        return x
    positions = mx.arange(ctx.start, ctx.start + ctx.length)
    return mx.where((positions >= ctx.left[:, None])[..., None], x, 0)
