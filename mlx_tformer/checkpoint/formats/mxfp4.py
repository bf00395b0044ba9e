"""MXFP4 as gpt-oss stores it: experts of 4-bit floats in groups of 32 with a power of two each.

A tensor X is stored as `X_blocks` (E, out, groups, 16), two values in a byte with the lower half first, and `X_scales`
(E, out, groups), 2^(byte - 127). A value is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, with the sign in the highest bit (E2M1
and E8M0 of OCP Microscaling Formats 1.0). MLX's own mode `mxfp4` is the same bytes, eight values in a word: they are
carried over as they are. The rows stay in the order in which they are stored, gate and up alternating.
"""

from typing import Any

import mlx.core as mx

from ...errors import BadInput
from ..source import Source, Tensor
from .common import Derived, Settings, Understood

HOW = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
BYTES = 16


def understand(source: Source, values: dict[str, Any]) -> Understood:
    """Blocks and scales as packed modules; raises BadInput for those that do not go together."""
    said = Settings(values, source.config_file)
    said.ignore(frozenset({"dequantize"}))
    said.finish()
    made = Understood.of(source)
    for name, blocks in source.tensors.items():
        module = name.removesuffix("_blocks")
        if module == name:
            continue
        scales = source.tensors.get(f"{module}_scales")
        if scales is None:
            raise BadInput(f"stored in blocks, but there is no {module}_scales", file=source.origin, field=name)
        if blocks.dtype != mx.uint8 or scales.dtype != mx.uint8 or blocks.shape != (*scales.shape, BYTES):
            found = f"found blocks {blocks.shape} and scales {scales.shape}"
            problem = f"{found}, expected bytes, with {BYTES} in a block and a scale for each"
            raise BadInput(problem, file=source.origin, field=name)
        words = Tensor((*scales.shape[:-1], scales.shape[-1] * BYTES // 4), mx.uint32)
        packed = Derived(words, (name,), packed_words), Derived(scales, (f"{module}_scales",), lambda x: x)
        made.pack(module, HOW, *packed, None)
        made.used(name, f"{module}_scales")
    return made


def packed_words(blocks: mx.array) -> mx.array:
    """(..., groups, 16) bytes -> (..., groups * 4) words, the same bits."""
    return blocks.flatten(-2).view(mx.uint32)
