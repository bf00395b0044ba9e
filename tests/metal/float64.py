"""What the kernels compute, written out in float64 numpy, and how far a kernel may be from it."""

import mlx.core as mx
import numpy as np

from mlx_tformer.kernels import Asked, Buckets, Slopes, Wanted

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


def sees(asked: Asked, batch: int, queries: int, keys: int) -> np.ndarray:
    """Who sees whom, (B, 1, L, S), from the rules one by one and in absolute places."""
    left = np.zeros(batch, int) if asked.left is None else np.array(asked.left)
    sight, seen = asked.sight, np.ones((batch, 1, queries, keys), bool)
    for b, i, j in np.ndindex(batch, queries, keys):
        query, key = (sight.first - left[b] + n for n in (keys - queries + i, j))
        rules = [
            not sight.causal or key <= query,
            sight.window is None or query - key < sight.window,
            sight.reach is None or abs(query - key) <= sight.reach,
            sight.chunk is None or query // sight.chunk == key // sight.chunk,
            asked.left is None or (query >= 0 and key >= 0),
        ]
        seen[b, 0, i, j] = all(rules)
    return seen if asked.mask is None else seen & np.array(asked.mask)


def scores(q: np.ndarray, k: np.ndarray, asked: Asked) -> np.ndarray:
    """Scores (B, H, L, S), hidden keys included."""
    (_, heads, queries, _), (_, kv_heads, keys, _) = q.shape, k.shape
    found = asked.scale * q @ np.repeat(k, heads // kv_heads, 1).swapaxes(-1, -2)
    if asked.softcap is not None:
        found = asked.softcap * np.tanh(found / asked.softcap)
    apart = np.arange(keys) - np.arange(keys - queries, keys)[:, None]
    if isinstance(asked.distances, Slopes):
        found = found + np.float32(asked.distances.values).astype(np.float64)[:, None, None] * apart
    if isinstance(asked.distances, Buckets):
        beyond = asked.distances.rows.size // 2
        rows = np.array(asked.distances.rows)[np.clip(apart + beyond, 0, 2 * beyond)]
        found = found + f64(asked.distances.table)[rows].transpose(2, 0, 1)
    return found


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, asked: Asked, wanted: Wanted) -> dict[str, np.ndarray]:
    """What `attention_statistics` gives, by field."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    raw, seen = scores(q, k, asked), np.broadcast_to(sees(asked, batch, queries, keys), (batch, heads, queries, keys))
    sink = np.full(heads, -np.inf) if asked.sinks is None else f64(asked.sinks)
    sink = np.broadcast_to(sink[:, None], (batch, heads, queries))
    every = np.concatenate([np.where(seen, raw, -np.inf), sink[..., None]], axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.where(np.isfinite(every.max(-1)), every.max(-1), 0)
        lse = np.log(np.exp(every - top[..., None]).sum(-1)) + top
        p = np.nan_to_num(np.exp(every - np.where(np.isfinite(lse), lse, 0)[..., None]))
        entropy = -np.nan_to_num(p * np.log(p)).sum(-1)
    p = p[..., :-1]
    shown = p.sum(-1)
    away = np.abs(np.arange(keys) - np.arange(keys - queries, keys)[:, None])
    order = np.argsort(-p, axis=-1, kind="stable")[..., : wanted.top]
    weights = np.take_along_axis(p, order, axis=-1)
    room = [(0, 0)] * 3 + [(0, max(wanted.top - keys, 0))]
    return {
        "out": p @ np.repeat(v, heads // v.shape[1], 1),
        "logsumexp": lse,
        "entropy": entropy,
        "distance": np.where(shown > 0, (p * away).sum(-1) / np.where(shown > 0, shown, 1), 0),
        "peak": np.where(shown > 0, p.argmax(-1), -1),
        "mass": np.stack([p[..., a:b].sum(-1) for a, b in wanted.spans], -1) if wanted.spans else np.empty(0),
        "top_keys": np.pad(np.where(weights > 0, order, -1), room, constant_values=-1),
        "top_weights": np.pad(weights, room),
    }
