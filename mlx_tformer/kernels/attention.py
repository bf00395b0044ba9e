"""Attention for what MLX leaves unfused: soft caps, biases, odd head widths, statistics, packed and latent caches.

One Metal body serves all: keys may be plain, packed by `mx.quantize`, or DeepSeek's latents, which are keys and values
at once. It goes over the keys with a running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) and never holds
scores. `twin` says in plain MLX what it computes.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..errors import UsageError
from .asked import Asked, Wanted
from .keys import Keys, Packed
from .launch import Kernel, with_gradient
from .twin import Statistics, plain_attention

PLENTY = 64
"""Threadgroups from which a GPU has enough to do, so that keys need no splitting."""
STRETCH = 256
"""Keys at least in each split."""
NUMBERS = 72
"""Floats that a lane may hold for the queries and sums of its rows, so that they stay in registers with a key and a
value beside them."""
MOST_TOP, MOST_SPANS = 8, 32

_OPTIONS = ("mask", "left", "bias", "buckets", "sinks", "numbers", "rules")
_STATISTICS = ("lse", "entropy", "distance", "peak_out", "mass_out", "top_key_out", "top_weight_out")
MERGE = Kernel("merge", ("part", "lse"), ("out",))


@dataclass(frozen=True)
class Plan:
    """How the work is cut: rows that share a threadgroup, simdgroups in it, and splits of the keys."""

    rows: int
    groups: int
    splits: int


def plan(batch: int, kv_heads: int, rows: int, keys: int, width: int, value: int, *, statistics: bool = False) -> Plan:
    """The plan for `rows` queries of each key head, all heads that share it counted.

    >>> plan(1, 8, 4, 20, 128, 128)
    Plan(rows=4, groups=4, splits=1)
    >>> plan(1, 8, 4, 32768, 128, 128)
    Plan(rows=4, groups=8, splits=8)
    """
    held = -(-width // 32) + -(-value // 32)
    together = 1
    while together < min(rows, 8) and 2 * together * held <= NUMBERS:
        together *= 2
    groups = 4 if keys < 256 else 8
    tiles = batch * kv_heads * -(-rows // together)
    splits = 1 if statistics else max(1, min(-(-PLENTY // tiles), keys // STRETCH))
    return Plan(together, groups, splits)


def attention(q: mx.array, keys: Keys, asked: Asked, how: Plan | None = None) -> mx.array:
    """softmax(scale · q kᵀ + bias) v over what each query sees; q (B, H, L, D) -> (B, H, L, E), with the gradient of
    the twin where `keys` are not packed.

    Raises UsageError for what the kernel has no answer to: see `refusal`.
    """
    how = _checked(q, keys, asked, None, how)

    def fused(q: mx.array, *rest: mx.array) -> mx.array:
        given, others = keys.of(rest[: len(keys.arrays)]), asked.of(rest[len(keys.arrays) :])
        return _launch(q, given, others, how, None)[0] if how.splits == 1 else _split(q, given, others, how)

    def twin(q: mx.array, *rest: mx.array) -> mx.array:
        given, others = keys.of(rest[: len(keys.arrays)]), asked.of(rest[len(keys.arrays) :])
        return plain_attention(q, given, others).astype(q.dtype)

    backward = _no_gradient if isinstance(keys, Packed) else twin
    return with_gradient(fused, backward, [q, *keys.arrays, *asked.arrays])


def attention_statistics(
    q: mx.array, keys: Keys, asked: Asked, wanted: Wanted | None = None, how: Plan | None = None
) -> Statistics:
    """The same with what the rows of the pattern say; no gradient. Raises UsageError as `attention` does."""
    wanted = Wanted() if wanted is None else wanted
    how = _checked(q, keys, asked, wanted, how)
    found = _launch(q, keys, asked, replace(how, splits=1), wanted)
    out, lse, entropy, distance, peak, mass, top_keys, top_weights = found
    top = wanted.top > 0
    return Statistics(
        out,
        lse,
        entropy,
        distance,
        peak,
        mass if wanted.spans else None,
        top_keys if top else None,
        top_weights if top else None,
    )


def refusal(q: mx.array, keys: Keys, asked: Asked, wanted: Wanted | None = None) -> str | None:
    """Why the kernel cannot do this, or None."""
    batch, heads, queries, width = q.shape
    if not queries or not keys.length:
        return f"q: found {queries} queries and {keys.length} keys, expected some of each"
    if heads % keys.heads:
        return f"heads: found {heads}, expected a multiple of the {keys.heads} key heads"
    if width != keys.width or batch != keys.batch:
        return f"q: found shape {q.shape}, expected a batch of {keys.batch} and {keys.width} features, as keys have"
    if queries > keys.length and (asked.sight.relative or asked.distances is not None):
        return f"q: found {queries} queries, expected {keys.length} or fewer, since places are counted from the end"
    if isinstance(keys, Packed) and wanted is not None:
        return "statistics: packed keys have none; unpack them first"
    if wanted is not None and wanted.top > MOST_TOP:
        return f"top: found {wanted.top}, expected {MOST_TOP} or fewer"
    if wanted is not None and len(wanted.spans) > MOST_SPANS:
        return f"spans: found {len(wanted.spans)}, expected {MOST_SPANS} or fewer"
    return None


def _checked(q: mx.array, keys: Keys, asked: Asked, wanted: Wanted | None, how: Plan | None) -> Plan:
    if problem := refusal(q, keys, asked, wanted):
        raise UsageError(problem)
    if how is not None:
        return how
    rows = q.shape[1] // keys.heads * q.shape[2]
    return plan(keys.batch, keys.heads, rows, keys.length, keys.width, keys.value, statistics=wanted is not None)


def _no_gradient(*_: mx.array) -> mx.array:
    raise UsageError("gradient: packed keys have none; unpack them first")


def _launch(q: mx.array, keys: Keys, asked: Asked, how: Plan, wanted: Wanted | None) -> list[mx.array]:
    """The outputs of one launch; with splits, sums of each in float32 and their logsumexp."""
    batch, heads, queries, width = q.shape
    rows, split = heads // keys.heads * queries, how.splits > 1
    kernel = _kernel(type(keys), wanted is not None, split)
    row, first = (batch, heads, queries), (how.splits,) if split else ()
    dtype = mx.float32 if split else q.dtype
    outputs = [((*first, *row, keys.value), dtype)]
    template: dict[str, Any] = {"T": q.dtype, "OUT": dtype, "WIDTH": width, "VALUE": keys.value}
    template |= {"ROWS": how.rows, "GROUPS": how.groups}
    inputs = [q, *keys.arrays, *asked.inputs(q.shape, keys.length, how.splits)]
    if isinstance(keys, Packed):
        template |= {"BITS": keys.bits, "PACK": keys.group}
    if split:
        outputs.append(((*first, *row), mx.float32))
    if wanted is not None:
        spans, top = max(len(wanted.spans), 1), max(wanted.top, 1)
        template |= {"SPANS": len(wanted.spans), "TOP": top}
        inputs.append(_spans(wanted.spans))
        outputs += [(row, mx.float32)] * 3 + [(row, mx.int32), ((*row, spans), mx.float32)]
        outputs += [((*row, top), mx.int32), ((*row, top), mx.float32)]
    tiles = -(-rows // how.rows)
    grid = (32 * how.groups, tiles * how.splits, batch * keys.heads)
    return kernel(inputs, template=template, grid=grid, group=(32 * how.groups, 1, 1), outputs=outputs)


def _split(q: mx.array, keys: Keys, asked: Asked, how: Plan) -> mx.array:
    """Two passes: the splits of the keys side by side, then their results as one."""
    part, lse = _launch(q, keys, asked, how, None)
    shape = part.shape[1:]
    rows = lse[0].size
    (out,) = MERGE(
        [part.reshape(how.splits, rows, -1), lse.reshape(how.splits, rows)],
        template={"T": q.dtype, "VALUE": shape[-1]},
        grid=(shape[-1], rows, 1),
        group=(min(shape[-1], 256), 1, 1),
        outputs=[(shape, q.dtype)],
    )
    return out


@lru_cache(maxsize=32)
def _kernel(kind: type[Keys], statistics: bool, split: bool) -> Kernel:
    flags = {kind.flag: kind.flag is not None, "STATS": statistics, "SPLIT": split}
    outputs = ("out", *(_STATISTICS if statistics else ("lse",) if split else ()))
    inputs = ("q", *kind.names, *_OPTIONS, *(("spans",) if statistics else ()))
    return Kernel("attention", inputs, outputs, tuple(flag for flag, on in flags.items() if flag is not None and on))


@lru_cache(maxsize=64)
def _spans(spans: tuple[tuple[int, int], ...]) -> mx.array:
    return mx.array(spans or ((0, 0),), mx.int32)
