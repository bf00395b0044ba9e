"""Rotary positions of queries and keys in one launch (Su et al. 2021, arXiv 2104.09864).

`mx.fast.rope` takes one array at a time, positions that count up from an offset, and no amplitude; it copies what
does not turn. This kernel does it all in one launch, and reduces angles so exactly that late positions lose nothing.
"""

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from .launch import Kernel, Place, place, with_gradient

KERNEL = Kernel("rope", ("q", "k", "positions", "frequencies", "axes", "amplitude"), ("q_out", "k_out"))
HEADS = 4
"""Heads that one thread turns: they share a sine and a cosine."""
LAUNCH_BOUND = 8
"""Tokens up to which one launch instead of two is what counts."""


def chosen(where: Place, length: int, *, plain: bool) -> bool:
    """True if the kernel turns `length` tokens; `plain` if MLX needs no more than its two launches for it.

    >>> [chosen(place, 1, plain=True) for place in ("metal", "cpu", "trial")]
    [True, False, True]
    >>> chosen("metal", 512, plain=True), chosen("metal", 512, plain=False)
    (False, True)
    """
    return length > 0 and (where == "trial" or (where == "metal" and (not plain or length <= LAUNCH_BOUND)))


def worth_turning(length: int, *, plain: bool) -> bool:
    """`chosen`, here and now."""
    return chosen(place(), length, plain=plain)


def rope(
    q: mx.array,
    k: mx.array,
    positions: int | mx.array,
    frequencies: mx.array,
    *,
    amplitude: float = 1.0,
    interleaved: bool = False,
    axes: Sequence[int] | None = None,
) -> tuple[mx.array, mx.array]:
    """Turn q (B, H, L, D) and k (B, K, L, D), which keep their dtype.

    positions: where the first token stands, for all rows or for each (B,); or where each token stands, (B, L) or
    (1, L), or with `axes` one such table for each of R axes, (R, B, L). frequencies: radians per position of each
    pair, (pairs,) in float32; the features beyond 2 · pairs stay. axes: for each pair the axis that turns it (M-RoPE,
    Wang et al. 2024, arXiv 2409.12191). amplitude: what the turned features are multiplied with. Pairs are i and
    i + pairs, or 2i and 2i + 1 if `interleaved`.
    """
    at, explicit = _positions(positions, q.shape[0])
    (batch, heads, length, width), kv_heads = q.shape, k.shape[1]
    pairs, blocks = frequencies.size, -(-(heads + kv_heads) // HEADS)
    columns = width - pairs

    def fused(q: mx.array, k: mx.array) -> list[mx.array]:
        return KERNEL(
            [q, k, at, frequencies, _axes(tuple(axes or ())), _scalar(amplitude)],
            template={
                "T": q.dtype,
                "WIDTH": width,
                "PAIRS": pairs,
                "HEADS": HEADS,
                "INTERLEAVED": interleaved,
                "EXPLICIT": explicit,
                "AXES": axes is not None,
            },
            grid=(columns, length, batch * blocks),
            group=(min(32, columns), min(8, length), 1),
            outputs=[(q.shape, q.dtype), (k.shape, k.dtype)],
        )

    def twin(q: mx.array, k: mx.array) -> list[mx.array]:
        return list(plain_rope(q, k, positions, frequencies, amplitude=amplitude, interleaved=interleaved, axes=axes))

    turned_q, turned_k = with_gradient(fused, twin, [q, k])
    return turned_q, turned_k


def plain_rope(
    q: mx.array,
    k: mx.array,
    positions: int | mx.array,
    frequencies: mx.array,
    *,
    amplitude: float = 1.0,
    interleaved: bool = False,
    axes: Sequence[int] | None = None,
) -> tuple[mx.array, mx.array]:
    """The same as `rope`, in plain operations."""
    at, explicit = _positions(positions, q.shape[0])
    at = at if explicit else at + mx.arange(q.shape[2])  # (R, B, L)
    axis = mx.array(list(axes or [0] * frequencies.size))
    angles = at.astype(mx.float32)[axis].transpose(1, 2, 0) * frequencies  # (B, L, pairs)
    c, s = (amplitude * f(angles)[:, None] for f in (mx.cos, mx.sin))
    return _turned(q, c, s, interleaved), _turned(k, c, s, interleaved)


def _turned(x: mx.array, c: mx.array, s: mx.array, interleaved: bool) -> mx.array:
    """x (B, H, L, D) turned by angles whose cosines and sines are (B, 1, L, pairs)."""
    pairs = c.shape[-1]
    turned, rest = mx.split(x, [2 * pairs], axis=-1)
    wide = turned.astype(mx.float32)
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else mx.split(wide, 2, axis=-1)
    halves = [a * c - b * s, a * s + b * c]
    both = mx.stack(halves, axis=-1).flatten(-2) if interleaved else mx.concatenate(halves, axis=-1)
    return mx.concatenate([both.astype(x.dtype), rest], axis=-1)


def _positions(given: int | mx.array, batch: int) -> tuple[mx.array, bool]:
    """Positions as (R, B, L), or (R, B, 1) of the first tokens; True if each token has its own."""
    if isinstance(given, int):
        return mx.broadcast_to(_start(given), (1, batch, 1)), False
    given = given.astype(mx.int32)
    if given.ndim == 1:
        return given[None, :, None], False
    table = given[None] if given.ndim == 2 else given
    return mx.broadcast_to(table, (table.shape[0], batch, table.shape[2])), True


@lru_cache(maxsize=8)
def _start(position: int) -> mx.array:
    return mx.array([[[position]]], mx.int32)


@lru_cache(maxsize=64)
def _axes(axes: tuple[int, ...]) -> mx.array:
    return mx.array(axes or (0,), mx.int32)


@lru_cache(maxsize=64)
def _scalar(value: float) -> mx.array:
    return mx.array(value, mx.float32)
