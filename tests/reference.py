"""The mechanisms written out in NumPy and float64, one head and one position at a time: slow, and easy to believe."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tformer.nn import Rope

Array = np.ndarray


def f64(x: mx.array) -> Array:
    """An MLX array as float64."""
    return np.array(x.astype(mx.float32), np.float64)


def linear(layer: Any, x: Array) -> Array:
    """x Wᵀ + b, with the weights of an MLX layer."""
    y = x @ f64(layer.weight).T
    return y + f64(layer.bias) if "bias" in layer else y


def rms_norm(layer: Any, x: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + layer.eps) * f64(layer.weight)


def layer_norm(layer: Any, x: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + layer.eps)
    return scaled * f64(layer.weight) + f64(layer.bias)


def _tanh_gelu(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_fast": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": _silu,
    "swish": _silu,
    "tanh": math.tanh,
}


def activation(name: str, x: Array) -> Array:
    return np.vectorize(ACTIVATIONS[name], otypes=[np.float64])(x)


def frequencies(rope: Rope, context: int = 0) -> Array:
    """What a rotary position turns by in a text of `context` tokens."""
    return np.array(rope.scaling.frequencies(rope.dims, rope.theta, rope.regime(context)))


def rotate(x: Array, positions: Array, speeds: Array, *, interleaved: bool = False, amplitude: float = 1) -> Array:
    """Turn x (B, H, L, D), whose tokens stand at `positions` (B, L), pair by pair; further features are left alone."""
    half = len(speeds)
    out = x.copy()
    for i, frequency in enumerate(speeds):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = (positions * frequency)[:, None, :]  # (B, 1, L)
        cos, sin = np.cos(angle) * amplitude, np.sin(angle) * amplitude
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    sees: Array,
    *,
    bias: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Outputs (B, H, L, D) and patterns (B, H, L, S) where `sees` (B, L, S) holds; a row without any gives zeros.

    bias (B, H, L, S) is added to the scores, which `softcap` bounds before; sinks (H,) are scores that add nothing.
    """
    batch, heads, queries, _ = q.shape
    share = heads // k.shape[1]
    z, pattern = np.zeros((*q.shape[:3], v.shape[3])), np.zeros((batch, heads, queries, k.shape[2]))
    for b, h, i in np.ndindex(batch, heads, queries):
        keys = np.flatnonzero(sees[b, i])
        if not keys.size:
            continue
        scores = scale * (k[b, h // share, keys] @ q[b, h, i])
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        scores = scores if bias is None else scores + bias[b, h, i, keys]
        top = scores.max() if sinks is None else max(scores.max(), sinks[h])
        weights = np.exp(scores - top)
        pattern[b, h, i, keys] = weights / (weights.sum() + (0 if sinks is None else np.exp(sinks[h] - top)))
        z[b, h, i] = pattern[b, h, i, keys] @ v[b, h // share, keys]
    return z, pattern
