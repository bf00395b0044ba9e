"""How attention knows where tokens stand: queries and keys are turned, scores added to, or vectors of positions.

`Rope` is Su et al. 2021 (arXiv 2104.09864). Contexts beyond the trained length need slower turning; each way to
slow down that configs name is a small object that gives the frequencies, and some of them an amplitude for the
turned features.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..errors import UsageError
from .tap import Module


class Scaling(ABC):
    """How the frequencies of a rotary position follow from theta and, for some, from the length of the context."""

    @abstractmethod
    def frequencies(self, dims: int, theta: float, regime: int = 0) -> list[float]:
        """Radians per position of each pair of features, (dims / 2,), in the regime that `regime` named."""

    def regime(self, context: int) -> int:
        """A number that is the same for all lengths of context that share their frequencies; 0 while the text is
        short."""
        return 0

    def lengths(self, context: int) -> tuple[int, int]:
        """Tokens trained on, and tokens reached, by a model whose config says `context` (`max_position_embeddings`)."""
        return context, context

    @property
    def sharpening(self) -> float:
        """What DeepSeek's attention multiplies its scores with on top."""
        return 1.0

    @property
    def amplitude(self) -> float:
        """What turned queries and keys are multiplied with (`attention_factor`)."""
        return 1.0


def plain(dims: int, theta: float) -> list[float]:
    """theta^(-2i / dims) for i = 0 .. dims/2 - 1."""
    return [theta ** -(i / dims) for i in range(0, dims, 2)]


def _clip(share: float) -> float:
    return min(max(share, 0.0), 1.0)


@dataclass(frozen=True)
class Unscaled(Scaling):
    """The frequencies of the paper (`rope_type: default`)."""

    def frequencies(self, dims: int, theta: float, regime: int = 0) -> list[float]:
        return plain(dims, theta)

    def __str__(self) -> str:
        return "unscaled"


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Positions divided by a factor (`rope_type: linear`; Chen et al. 2023, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, dims: int, theta: float, regime: int = 0) -> list[float]:
        return [f / self.factor for f in plain(dims, theta)]

    def lengths(self, context: int) -> tuple[int, int]:
        return context, int(context * self.factor)

    def __str__(self) -> str:
        return f"linear ×{self.factor:g}"


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """A theta that grows with the context once that is longer than the trained one (`rope_type: dynamic`)."""

    factor: float
    trained: int

    def frequencies(self, dims: int, theta: float, regime: int = 0) -> list[float]:
        stretch = self.factor * max(regime, self.trained) / self.trained - (self.factor - 1)
        return plain(dims, theta * stretch ** (dims / (dims - 2)))

    def regime(self, context: int) -> int:
        return context if context > self.trained else 0

    def lengths(self, context: int) -> tuple[int, int]:
        return self.trained, max(context, int(self.trained * self.factor))

    def __str__(self) -> str:
        return f"dynamic NTK ×{self.factor:g} beyond {self.trained}"


@dataclass(frozen=True)
class Yarn(Scaling):
    """Fast pairs keep their frequency, slow ones are divided, a ramp lies between (`rope_type: yarn`; arXiv
    2309.00071).

    `fast` and `slow` are the turns within the trained length that bound the ramp (`beta_fast`, `beta_slow`), and
    `truncate` says whether the bounds are rounded outwards to whole pairs. Without `attention_factor` the amplitude
    follows from the factor and, where a config has both, from `mscale` and `mscale_all_dim`.
    """

    factor: float
    trained: int
    attention_factor: float | None = None
    fast: float = 32.0
    slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, dims: int, theta: float, regime: int = 0) -> list[float]:
        low, high = self._pair(self.fast, dims, theta), self._pair(self.slow, dims, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        ramp = [_clip((i - low) / ((high - low) or 0.001)) for i in range(dims // 2)]
        return [f * (1 - r + r / self.factor) for f, r in zip(plain(dims, theta), ramp, strict=True)]

    def _pair(self, turns: float, dims: int, theta: float) -> float:
        """The pair that turns so often within the trained length."""
        return dims * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    @property
    def sharpening(self) -> float:
        return self._grown(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _grown(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def lengths(self, context: int) -> tuple[int, int]:
        return self.trained, max(context, int(self.trained * self.factor))

    def __str__(self) -> str:
        return f"YaRN ×{self.factor:g} beyond {self.trained}"


@dataclass(frozen=True)
class Llama3(Scaling):
    """Long waves are divided, short ones kept, those between interpolated (`rope_type: llama3`)."""

    factor: float
    low: float
    high: float
    trained: int

    def frequencies(self, dims: int, theta: float, regime: int = 0) -> list[float]:
        def scaled(freq: float) -> float:
            turns = self.trained * freq / (2 * math.pi)
            kept = _clip((turns - self.low) / (self.high - self.low or 1e-12))  # Llama 4 has no waves between
            return freq * (kept + (1 - kept) / self.factor)

        return [scaled(freq) for freq in plain(dims, theta)]

    def lengths(self, context: int) -> tuple[int, int]:
        return self.trained, context

    def __str__(self) -> str:
        return f"llama3 ×{self.factor:g} beyond {self.trained}"


@dataclass(frozen=True)
class LongRope(Scaling):
    """One divisor for each pair: a short set while the whole context fits the trained length, a long set after
    (`rope_type: longrope`; Ding et al. 2024, arXiv 2402.13753)."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    factor: float
    attention_factor: float | None = None

    def frequencies(self, dims: int, theta: float, regime: int = 0) -> list[float]:
        return [f / d for f, d in zip(plain(dims, theta), self.long if regime else self.short, strict=True)]

    def regime(self, context: int) -> int:
        return int(context > self.trained)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.trained))

    def lengths(self, context: int) -> tuple[int, int]:
        return self.trained, context

    def __str__(self) -> str:
        return f"longrope ×{self.factor:g} beyond {self.trained}"


@lru_cache(maxsize=64)
def periods(scaling: Scaling, dims: int, theta: float, regime: int) -> mx.array:
    """What `mx.fast.rope` calls freqs: positions per radian, (dims / 2,) in float32; layers share one table."""
    return mx.array([1 / freq for freq in scaling.frequencies(dims, theta, regime)], dtype=mx.float32)


@lru_cache(maxsize=64)
def frequencies(scaling: Scaling, dims: int, theta: float, regime: int) -> mx.array:
    """Radians per position, (dims / 2,) in float32; layers share one table."""
    return mx.array(scaling.frequencies(dims, theta, regime), dtype=mx.float32)


def places(offset: int | mx.array, length: int) -> mx.array:
    """The position of each of so many tokens, (L,) or (B, L), negative for padding.

    `offset` is the position of the first one, for all rows or for each (B,). In rows of several texts, (B, L), it is by
    how much the position of each token differs from its place in the row.

    >>> places(mx.array([[0, 0, -2, -2]]), 4).tolist()
    [[0, 1, 0, 1]]
    """
    ahead = mx.arange(length)
    return ahead + (offset if isinstance(offset, int) or offset.ndim == 2 else offset[:, None])


def reached(offset: int | mx.array, length: int, count: int | None) -> int:
    """Tokens of the longest text up to the last of these, or at least as many; for the arguments see `places`.

    Raises UsageError if a text has more than `count` of them.
    """
    if isinstance(offset, int):
        longest = length + offset
    elif offset.ndim == 2 and (count is None or length <= count):
        return length  # no text is longer than its row
    else:
        longest = cast(int, places(offset, length).max().item()) + 1
    if count is not None and longest > count:
        raise UsageError(f"ids: found a text of {longest} tokens, but the model has {count} positions")
    return longest


class Position(Module):
    """Where tokens stand, told by turning queries and keys or by adding to their scores. This base does neither:
    NoPE."""

    def turn(self, q: mx.array, k: mx.array, offset: int | mx.array, context: int) -> tuple[mx.array, mx.array]:
        """Queries (B, H, L, D) and keys (B, K, L, D) as their positions turn them; for the rest see `rotate`."""
        return self.rotate(q, offset, context), self.rotate(k, offset, context)

    def bias(self, queries: range, keys: range, left: mx.array | None = None) -> mx.array | None:
        """What is added to the scores of these queries and keys, (H, L, S), or None.

        `left` (B,) or (B, S) counts what stands in each row before the text; a position for which more counts than the
        distance gives (B, H, L, S).
        """
        return None

    def rotate(self, x: mx.array, offset: int | mx.array, context: int) -> mx.array:
        """Turn x (B, H, L, D), whose first token stands at `offset`: one for all rows, or (B,), or as in `places`.

        `context` is the length of the whole text, on which the frequencies of some scalings depend.
        """
        return x

    @property
    def distances(self) -> kernels.Distances | None:
        """What `bias` adds as kernels know it, where only the distance matters; None where it does not, or there is
        no bias."""
        return None

    def regime(self, context: int) -> int:
        """Equal numbers mean that keys rotated for one context are right for the other."""
        return 0

    def __str__(self) -> str:
        return "none"


class Rope(Position):
    """Rotary positions on the first `dims` features of each head, and on one more if they are odd.

    Features i and i + dims/2 turn together; if `interleaved`, features 2i and 2i + 1 do (GPT-J's order).
    """

    def __init__(self, dims: int, theta: float = 10000.0, scaling: Scaling | None = None, *, interleaved: bool = False):
        super().__init__()
        if dims < 1:
            raise ValueError(f"rotary dims: found {dims}, expected 1 or more")
        self.dims, self.theta, self.interleaved = dims, theta, interleaved
        self.scaling = Unscaled() if scaling is None else scaling
        self.turned = dims + dims % 2

    def turn(self, q: mx.array, k: mx.array, offset: int | mx.array, context: int) -> tuple[mx.array, mx.array]:
        plain = self.scaling.amplitude == 1.0 and self.turned == q.shape[-1]
        if not kernels.worth_turning(q.shape[2], plain=plain):
            return super().turn(q, k, offset, context)
        table = frequencies(self.scaling, self.dims, self.theta, self.regime(context))
        several = isinstance(offset, mx.array) and offset.ndim == 2  # rows of several texts
        at = places(offset, q.shape[2]) if several else offset
        return kernels.rope(q, k, at, table, amplitude=self.scaling.amplitude, interleaved=self.interleaved)

    def rotate(self, x: mx.array, offset: int | mx.array, context: int) -> mx.array:
        table = periods(self.scaling, self.dims, self.theta, self.regime(context))
        if self.scaling.amplitude != 1.0:
            x = self._amplified(x)
        if isinstance(offset, int) or offset.ndim == 1:
            return self._turned(x, offset, table)
        # Rows of several texts: each token as a row of its own.
        tokens = x.swapaxes(1, 2)  # (B, L, H, D)
        alone = tokens.flatten(0, 1)[:, :, None]
        return self._turned(alone, places(offset, x.shape[2]).flatten(), table).reshape(tokens.shape).swapaxes(1, 2)

    def _turned(self, x: mx.array, offset: int | mx.array, table: mx.array) -> mx.array:
        return mx.fast.rope(
            x, self.turned, traditional=self.interleaved, base=None, scale=1.0, offset=offset, freqs=table
        )

    def _amplified(self, x: mx.array) -> mx.array:
        if self.turned == x.shape[-1]:
            return x * self.scaling.amplitude
        turned, rest = mx.split(x, [self.turned], axis=-1)
        return mx.concatenate([turned * self.scaling.amplitude, rest], axis=-1)

    def regime(self, context: int) -> int:
        return self.scaling.regime(context)

    def __str__(self) -> str:
        order = ", interleaved" if self.interleaved else ""
        return f"rotary on {self.dims} features, theta {self.theta:g}, {self.scaling}{order}"


class Alibi(Position):
    """A penalty for distance, steeper for the earlier heads (Press et al. 2021, arXiv 2108.12409).

    The slopes of a number of heads that is no power of two are those of the power below and every other one of the
    power above.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.slopes = alibi_slopes(heads)

    @property
    def distances(self) -> kernels.Distances:
        return kernels.Slopes(self.slopes)

    def bias(self, queries: range, keys: range, left: mx.array | None = None) -> mx.array:
        distance = mx.arange(keys.start, keys.stop) - mx.arange(queries.start, queries.stop)[:, None]
        return mx.array(self.slopes)[:, None, None] * distance.astype(mx.float32)

    def __str__(self) -> str:
        return f"ALiBi over {len(self.slopes)} heads"


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    near = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / near) for i in range(near)]
    between = [2 ** (-8 * (2 * i + 1) / (2 * near)) for i in range(heads - near)]
    return tuple(slopes + between)


class Learned(Module):
    """A vector for each position, added to that of the token (GPT-2); `first` rows are left out before the first
    (OPT)."""

    def __init__(self, count: int, dim: int, first: int = 0):
        super().__init__()
        self.table = nn.Embedding(count + first, dim)
        self.count, self.first = count, first

    def __call__(self, length: int, offset: int | mx.array) -> mx.array:
        """Vectors (L, C) of the positions from `offset` on; (B, L, C) if the rows of a batch begin elsewhere.

        Raises UsageError for a text that is longer than the table: MLX would read whatever lies behind it.
        """
        reached(offset, length, self.count)
        return self.table(mx.maximum(places(offset, length), 0) + self.first)  # padding stands at the first position

    def __str__(self) -> str:
        return f"learned, {self.count} positions"


class Sinusoidal(Module):
    """Waves of lengths from 2π to 10000 · 2π, added to the vectors of tokens (Vaswani et al. 2017, section 3.5).

    The sines come first and then the cosines, or in turn if `interleaved`, as the paper has them. `closed`: the longest
    wave is 10000 · 2π to the letter, as in tensor2tensor; the paper's falls short of it by a step. The first token
    stands at position `first`. `count`: tokens that it may be used for (None: no limit).
    """

    def __init__(
        self, dim: int, count: int | None = None, *, first: int = 0, closed: bool = False, interleaved: bool = False
    ):
        super().__init__()
        if dim % 2 or dim < 2 + 2 * closed:
            raise ValueError(f"sinusoidal positions want an even number of features, found {dim}")
        self.dim, self.count, self.first, self.closed, self.interleaved = dim, count, first, closed, interleaved

    def __call__(self, length: int, offset: int | mx.array) -> mx.array:
        """Vectors (L, C) of the positions from `offset` on; (B, L, C) if the rows of a batch begin elsewhere.

        Raises UsageError for a text that is longer than `count`.
        """
        size = max(256, 1 << (reached(offset, length, self.count) + self.first - 1).bit_length())
        table = waves(self.dim, size, self.closed, self.interleaved)
        return table[mx.maximum(places(offset, length), 0) + self.first]

    def __str__(self) -> str:
        return "sinusoidal" if self.count is None else f"sinusoidal, {self.count} positions"


@lru_cache(maxsize=8)
def waves(dim: int, size: int, closed: bool, interleaved: bool) -> mx.array:
    """The vectors of `size` positions, (size, dim) in float32, computed in float64: far positions lose digits else.

    >>> waves(4, 2, False, False).tolist()[0], waves(4, 2, False, True).tolist()[0]
    ([0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0])
    """
    import numpy as np  # slow to import, and MLX's float64 rounds on the way

    half = dim // 2
    angles = np.arange(size)[:, None] * 10000.0 ** (-np.arange(half) / (half - closed))
    parts = np.sin(angles), np.cos(angles)
    table = np.stack(parts, axis=-1).reshape(size, dim) if interleaved else np.concatenate(parts, axis=-1)
    return mx.array(table.astype(np.float32))
