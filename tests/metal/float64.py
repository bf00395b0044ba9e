"""What the kernels compute, written out in float64 numpy, and how far a kernel may be from it."""

import mlx.core as mx
import numpy as np

TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}


def random(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Normal numbers, the same for the same shape and seed."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def f64(a: mx.array) -> np.ndarray:
    """The same numbers in float64."""
    return np.array(a.astype(mx.float32)).astype(np.float64)


def bits(a: mx.array) -> bytes:
    """The bytes of an array."""
    return np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a).tobytes()


def assert_close(found: mx.array, wanted: np.ndarray, tolerance: float) -> None:
    """Each number within `tolerance`, relative to the largest; infinite where it should be."""
    got = f64(found)
    assert got.shape == wanted.shape
    finite = np.isfinite(wanted)
    assert np.array_equal(got[~finite], wanted[~finite])
    assert np.isfinite(got[finite]).all()
    assert np.abs(got[finite] - wanted[finite]).max(initial=0) <= tolerance * max(
        1, np.abs(wanted[finite]).max(initial=0)
    )


def rope(
    x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, amplitude: float, interleaved: bool
) -> np.ndarray:
    """x (B, H, L, D) turned at positions (B, L, pairs), one for each pair."""
    angles = (positions * frequencies)[:, None]
    c, s, pairs, out = amplitude * np.cos(angles), amplitude * np.sin(angles), len(frequencies), x.copy()
    a = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    b = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return out
