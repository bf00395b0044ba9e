"""Which way attention goes: MLX's own kernel, ours, or the plain twin. A pure function, so that a table can test it.

Ours is for what MLX leaves unfused, and only where it must pay: with few queries, where scores, masks and copies are
launches of their own and a key is read once for all heads that share it; and with so many scores that plain operations
would not fit in memory. With many queries, matrix products of plain operations are the better choice.
"""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from .asked import Asked
from .attention import refusal
from .keys import Keys, Latent, Packed
from .launch import Place, place

Answer = Literal["mlx", "ours", "twin"]
Bias = Literal["none", "distances", "array"]
MaskKind = Literal["none", "causal", "array"]

FEW, FEW_ROWS = 8, 32
"""Queries, and queries times heads that share a key head, up to which MLX calls it decoding; so do we."""
SCORES = 2**30
"""Bytes of float32 scores that plain operations may need."""

DECODED = {(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (96, 64), (192, 128)}
PREFILLED = {(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (96, 64)}
"""Widths of keys and values for which MLX 0.32 has a kernel or prefers its plain operations to the one that it has."""


@dataclass(frozen=True)
class Case:
    """What the choice depends on, besides the place."""

    queries: int
    keys: int
    width: int
    value: int
    heads: int = 8
    kv_heads: int = 8
    batch: int = 1
    dtype: mx.Dtype = mx.float16
    mask: MaskKind = "none"
    bias: Bias = "none"
    softcap: bool = False
    kept: Literal["plain", "packed", "latent"] = "plain"

    @property
    def share(self) -> int:
        """Heads that share a key head."""
        return self.heads // self.kv_heads


def choose(where: Place, case: Case) -> Answer:
    """Which way attention goes.

    >>> choose("metal", Case(1, 4096, 128, 128)), choose("metal", Case(1, 4096, 256, 256, softcap=True))
    ('mlx', 'ours')
    >>> choose("metal", Case(512, 512, 112, 112)), choose("cpu", Case(1, 9, 112, 112))
    ('mlx', 'mlx')
    """
    plainly: Answer = "mlx" if case.kept == "plain" and not case.softcap else "twin"
    if where == "cpu" or not _possible(case):
        return plainly
    if where == "trial":
        return "ours"
    special = case.softcap or case.bias == "distances" or case.kept != "plain"
    if not special and fused_by_mlx(case):
        return "mlx"
    few = case.queries <= FEW and case.queries * case.share <= FEW_ROWS
    scores = 4 * case.batch * case.heads * case.queries * case.keys
    return "ours" if few or scores > SCORES else plainly


def fused_by_mlx(case: Case) -> bool:
    """True if attention without cap and bias is best left to MLX 0.32, as its own rule has it."""
    widths = (case.width, case.value)
    if widths == (512, 512):
        if case.queries == 1:
            return case.share == 8 and case.mask != "array" and case.keys >= 1024
        return case.mask == "causal" and case.queries >= 1024
    if case.queries > FEW:
        return widths in PREFILLED
    return widths in DECODED and case.queries * case.share <= FEW_ROWS


def _possible(case: Case) -> bool:
    """True if our kernel has an answer at all."""
    sizes = case.dtype in (mx.float16, mx.bfloat16, mx.float32) and max(case.width, case.value) <= 576
    ahead = case.queries > case.keys and (case.mask == "causal" or case.bias == "distances")
    return sizes and case.bias != "array" and not ahead


def case_of(q: mx.array, keys: Keys, asked: Asked) -> Case:
    """The case that these arguments of `attention` are."""
    batch, heads, queries, width = q.shape
    return Case(
        queries,
        keys.length,
        width,
        keys.value,
        heads,
        keys.heads,
        batch,
        q.dtype,
        "array" if asked.mask is not None or asked.left is not None else "causal" if asked.sight.relative else "none",
        "none" if asked.distances is None else "distances",
        asked.softcap is not None,
        "packed" if isinstance(keys, Packed) else "latent" if isinstance(keys, Latent) else "plain",
    )


def chosen_for(q: mx.array, keys: Keys, asked: Asked) -> bool:
    """True if our kernel is to answer this, here and now."""
    where = place()
    if where == "cpu":
        return False
    one = all(x.dtype == q.dtype for x in keys.arrays if x.dtype != mx.uint32)
    return one and choose(where, case_of(q, keys, asked)) == "ours" and refusal(q, keys, asked) is None
