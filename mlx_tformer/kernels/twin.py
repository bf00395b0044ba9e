"""What the attention kernel computes, in plain MLX."""

from dataclasses import dataclass

import mlx.core as mx

from .asked import Asked, Buckets, Slopes, Wanted
from .keys import Keys


@dataclass(frozen=True)
class Statistics:
    """Attention's output (B, H, L, E), and what each row of the pattern says, in float32.

    logsumexp of the scores, sink included; entropy in nats, sink included; distance, the mean number of tokens between
    query and key; peak, the key with the largest weight, -1 for a query that sees nothing: all (B, H, L). mass
    (B, H, L, spans); top_keys and top_weights (B, H, L, top), the largest weight first, -1 and 0 where there are
    fewer keys; None where they were not wanted.
    """

    out: mx.array
    logsumexp: mx.array
    entropy: mx.array
    distance: mx.array
    peak: mx.array
    mass: mx.array | None = None
    top_keys: mx.array | None = None
    top_weights: mx.array | None = None


def plain_attention(q: mx.array, keys: Keys, asked: Asked) -> mx.array:
    """softmax(scale · q kᵀ + bias) v by way of all scores: (B, H, L, D) -> (B, H, L, E)."""
    scores, v = _scores(q, keys, asked)
    weights, _ = _weights(scores, asked)
    return _out(weights, v)


def plain_statistics(q: mx.array, keys: Keys, asked: Asked, wanted: Wanted) -> Statistics:
    """The same with what the rows of the pattern say."""
    scores, v = _scores(q, keys, asked)
    weights, lse = _weights(scores, asked)
    base = mx.where(mx.isinf(lse), 0, lse)
    entropy = mx.where(weights > 0, weights * (base - scores), 0).sum(axis=-1)
    if asked.sinks is not None:
        sink = asked.sinks.astype(mx.float32)[:, None, None]
        entropy = entropy + (mx.exp(sink - base) * (base - sink))[..., 0]
    shown = weights.sum(axis=-1)
    away = mx.abs(_apart(q.shape[2], keys.length)).astype(mx.float32)
    far = mx.where(shown > 0, (weights * away).sum(axis=-1) / mx.where(shown > 0, shown, 1), 0)
    peak = mx.where(shown > 0, mx.argmax(weights, axis=-1).astype(mx.int32), -1)
    top_keys, top_weights = _top(weights, wanted.top) if wanted.top else (None, None)
    mass = mx.stack([weights[..., a:b].sum(axis=-1) for a, b in wanted.spans], axis=-1) if wanted.spans else None
    return Statistics(_out(weights, v), lse[..., 0], entropy, far, peak, mass, top_keys, top_weights)


def _scores(q: mx.array, keys: Keys, asked: Asked) -> tuple[mx.array, mx.array]:
    """Scores (B, H, L, S) in float32, -inf where hidden, and the values."""
    k, v = (x.astype(mx.float32) for x in keys.plain())
    grouped = mx.unflatten(q.astype(mx.float32) * asked.scale, 1, (keys.heads, -1))  # (B, K, H / K, L, D)
    scores = (grouped @ k[:, :, None].swapaxes(-1, -2)).flatten(1, 2)
    if asked.softcap is not None:
        scores = asked.softcap * mx.tanh(scores / asked.softcap)
    apart = _apart(q.shape[2], keys.length)
    if isinstance(asked.distances, Slopes):
        scores = scores + mx.array(asked.distances.values)[:, None, None] * apart.astype(mx.float32)
    if isinstance(asked.distances, Buckets):
        beyond = asked.distances.rows.size // 2
        rows = asked.distances.rows[mx.clip(apart + beyond, 0, 2 * beyond)]  # (L, S)
        scores = scores + asked.distances.table.astype(mx.float32)[rows].transpose(2, 0, 1)
    seen = asked.sight.booleans(q.shape[2], keys.length, asked.left)
    return mx.where(seen if asked.mask is None else seen & asked.mask, scores, -mx.inf), v


def _apart(queries: int, keys: int) -> mx.array:
    """How far behind its query each key stands, (L, S); negative in front of it."""
    return mx.arange(keys) - mx.arange(keys - queries, keys)[:, None]


def _weights(scores: mx.array, asked: Asked) -> tuple[mx.array, mx.array]:
    """The pattern (B, H, L, S), zeros in a row that sees nothing, and its logsumexp (B, H, L, 1)."""
    lse = mx.logsumexp(scores, axis=-1, keepdims=True)
    if asked.sinks is not None:
        lse = mx.logaddexp(lse, asked.sinks.astype(mx.float32)[:, None, None])
    return mx.exp(scores - mx.where(mx.isinf(lse), 0, lse)), lse


def _out(weights: mx.array, v: mx.array) -> mx.array:
    return (mx.unflatten(weights, 1, (v.shape[1], -1)) @ v[:, :, None]).flatten(1, 2)


def _top(weights: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The keys with the largest weights, the first of equals first, and the weights."""
    order = mx.argsort(-weights, axis=-1)[..., :count].astype(mx.int32)
    found = mx.take_along_axis(weights, order, axis=-1)
    room = [(0, 0)] * 3 + [(0, max(count - weights.shape[-1], 0))]
    keys = mx.pad(mx.where(found > 0, order, -1), room, constant_values=-1)
    return keys, mx.pad(found, room)
