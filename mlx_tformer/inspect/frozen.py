"""Norms with their scale frozen: what a norm makes of one part of its input, so that the parts add up to the whole."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from ..nn import ShiftedRMSNorm, UnitRMSNorm


@dataclass(frozen=True)
class Frozen:
    """A norm as a linear map: `part` works on what adds up to the input, and `bias` is what the norm adds itself."""

    part: Callable[[mx.array], mx.array]
    bias: mx.array | None = None

    def then(self, after: "Frozen") -> "Frozen":
        """This, and another one after it."""
        moved = None if self.bias is None else after.part(self.bias)
        both = moved if after.bias is None else after.bias if moved is None else moved + after.bias
        return Frozen(lambda c: after.part(self.part(c)), both)


@singledispatch
def frozen(norm: object, x: mx.array) -> Frozen:
    """What `norm` does to the parts of x (C,), in float32; raises UsageError for a norm that has no such form."""
    raise UsageError(f"attribution cannot look through a {type(norm).__name__}")


@frozen.register(nn.Identity)
def _(norm: nn.Identity, x: mx.array) -> Frozen:
    return Frozen(lambda c: c)


@frozen.register(nn.RMSNorm)
def _(norm: nn.RMSNorm, x: mx.array) -> Frozen:
    return _rms(x, norm.eps, norm.weight.astype(mx.float32))


@frozen.register(ShiftedRMSNorm)
def _(norm: ShiftedRMSNorm, x: mx.array) -> Frozen:
    return _rms(x, norm.eps, 1 + norm.weight.astype(mx.float32))


@frozen.register(UnitRMSNorm)
def _(norm: UnitRMSNorm, x: mx.array) -> Frozen:
    return _rms(x, norm.eps, mx.array(1.0))


def _rms(x: mx.array, eps: float, weight: mx.array) -> Frozen:
    factor = mx.rsqrt(x.square().mean() + eps) * weight
    return Frozen(lambda c: c * factor)


@frozen.register(nn.LayerNorm)
def _(norm: nn.LayerNorm, x: mx.array) -> Frozen:
    factor = mx.rsqrt(mx.var(x) + norm.eps)
    factor = factor * norm.weight.astype(mx.float32) if "weight" in norm else factor
    bias = norm.bias.astype(mx.float32) if "bias" in norm else None
    return Frozen(lambda c: (c - c.mean(axis=-1, keepdims=True)) * factor, bias)


@frozen.register(nn.Linear)
def _(norm: nn.Linear, x: mx.array) -> Frozen:
    weight = norm.weight.astype(mx.float32).T
    return Frozen(lambda c: c @ weight, norm.bias.astype(mx.float32) if "bias" in norm else None)


@frozen.register(nn.Sequential)
def _(norm: nn.Sequential, x: mx.array) -> Frozen:
    made = Frozen(lambda c: c)
    for layer in norm.layers:
        made = made.then(frozen(layer, x))
        x = layer(x)
    return made
