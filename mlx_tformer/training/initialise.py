"""Random weights to begin a training with."""

import math
from functools import singledispatch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..nn import ExpertLinear, LatentAttention, Mamba, Mamba2, RelativeBias, Router
from ..nn.ssm import CausalConv

STEPS = (1e-3, 1e-1)
"""The step sizes that state spaces begin with."""


def initialise(model: nn.Module, *, std: float = 0.02, seed: int = 0) -> None:
    """Give every matrix of a model normal weights of standard deviation `std`, and every bias zeros; the same for the
    same seed, whatever was drawn before.

    Norms, decays and whatever else begins at a value of its own keep it. State spaces begin with step sizes from 0.001
    to 0.1 (Gu and Dao 2023, arXiv 2312.00752, section 3.6), convolutions uniform within ± 1 / √taps.
    """
    modules = sorted(model.named_modules(), key=lambda pair: pair[0].count("."), reverse=True)  # parts before wholes
    keys = mx.random.split(mx.random.key(seed), len(modules))
    for (_, module), key in zip(modules, keys, strict=True):
        weights = _weights(module, std, key)
        if weights:
            module.update(tree_unflatten(list(weights.items())))


@singledispatch
def _weights(module: nn.Module, std: float, key: mx.array) -> dict[str, mx.array]:
    """The parameters of a module, by name, that do not stay as it was made with."""
    return {}


@_weights.register
def _(module: nn.Linear | nn.Embedding | ExpertLinear | Router, std: float, key: mx.array) -> dict[str, mx.array]:
    found = {"weight": std * mx.random.normal(module.weight.shape, key=key)}
    return found | {"bias": mx.zeros_like(module.bias)} if "bias" in module else found


@_weights.register
def _(module: LatentAttention, std: float, key: mx.array) -> dict[str, mx.array]:
    return {"kv_up": std * mx.random.normal(module.kv_up.shape, key=key)}


@_weights.register
def _(module: RelativeBias, std: float, key: mx.array) -> dict[str, mx.array]:
    return {"table": std * mx.random.normal(module.table.shape, key=key)}


@_weights.register
def _(module: CausalConv, std: float, key: mx.array) -> dict[str, mx.array]:
    limit = module.size**-0.5
    return {"weight": mx.random.uniform(-limit, limit, module.weight.shape, key=key)}


@_weights.register
def _(module: Mamba, std: float, key: mx.array) -> dict[str, mx.array]:
    return {"dt.bias": _steps(module.dt.bias.shape, key)}


@_weights.register
def _(module: Mamba2, std: float, key: mx.array) -> dict[str, mx.array]:
    return {"dt_bias": _steps(module.dt_bias.shape, key)}


def _steps(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """What softplus turns into step sizes, which are even on a logarithmic scale."""
    low, high = map(math.log, STEPS)
    return mx.log(mx.expm1(mx.exp(mx.random.uniform(low, high, shape, key=key))))
