"""The largest weights of a row, found without sorting it."""

import mlx.core as mx

from ..nn import Places
from ..nn.spectator import slot_array

TILE = 64


def largest(weights: mx.array, count: int, at: Places) -> tuple[mx.array, mx.array]:
    """The places in the text, and the weights, of the `count` largest of weights (B, H, L, S): both (B, H, L, count).

    The largest comes first. Where fewer keys have any weight, the place is -1 and the weight 0.
    """
    index = mx.argmax(weights, axis=-1, keepdims=True) if count == 1 else _sorted(weights, count)
    found = mx.take_along_axis(weights, index, axis=-1)
    places = places_of(index, at)
    missing = count - index.shape[-1]
    padding = [(0, 0)] * 3 + [(0, missing)]
    places, found = mx.where(found > 0, places, -1), mx.pad(found, padding)
    return mx.pad(places, padding, constant_values=-1), found


def places_of(index: mx.array, at: Places) -> mx.array:
    """The places in the text of keys that are told by number, (B, H, L, N); negative in padding."""
    places = mx.take(slot_array(at.keys), mx.maximum(index, 0))
    return places if at.keys_left is None else places - at.keys_left[:, None, None, None]


def _sorted(weights: mx.array, count: int) -> mx.array:
    """Indices of the `count` largest, or of all if there are no more.

    The `count` largest lie in the tiles with the `count` largest maxima, so that only these are searched.
    """
    tiles = -(-weights.shape[-1] // TILE)
    if tiles <= 2 * count:
        return _partitioned(weights, count)
    padded = mx.pad(weights, [(0, 0)] * 3 + [(0, tiles * TILE - weights.shape[-1])], constant_values=-1)
    tiled = mx.unflatten(padded, -1, (tiles, TILE))  # (B, H, L, tiles, TILE)
    best = _partitioned(tiled.max(axis=-1), count)  # (B, H, L, count)
    some = mx.take_along_axis(tiled, best[..., None], axis=-2).flatten(-2)  # (B, H, L, count * TILE)
    inside = _partitioned(some, count)
    return mx.take_along_axis(best, inside // TILE, axis=-1) * TILE + inside % TILE


def _partitioned(x: mx.array, count: int) -> mx.array:
    """Indices of the `count` largest values, the largest first; of all if there are no more."""
    if count < x.shape[-1]:
        some = mx.argpartition(-x, count - 1, axis=-1)[..., :count]
        order = mx.argsort(-mx.take_along_axis(x, some, axis=-1), axis=-1)
        return mx.take_along_axis(some, order, axis=-1)
    return mx.argsort(-x, axis=-1)
