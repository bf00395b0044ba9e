"""Floats of 8 bits with a scale for each block, as DeepSeek V3 has them, or for each row or matrix.

A matrix `weight` (out, in) of E4M3 or E5M2 has its scales beside it: `weight_scale_inv` or `weight_scale`. Despite the
first name both are multiplied by: w = float(byte) * scale. Of `weight_block_size` [128, 128], scale (i, j) is for rows
128 i and columns 128 j and those after them; the blocks at the edges may be cut. Scales are floats, or bytes that are
powers of two, 2^(byte - 127). Formats: OCP 8-bit Floating Point Specification 1.0; E8M0 from OCP Microscaling 1.0.

The values become float32, in which the product is rounded once; a model that computes in bfloat16 rounds it a second
time, as DeepSeek's own conversion does.
"""

from functools import partial
from typing import Any

import mlx.core as mx

from ...errors import BadInput
from ...names import summary
from ..source import Source, Tensor
from .common import Settings, Understood

FLOATS = ("F8_E4M3", "F8_E5M2")
POWERS = "F8_E8M0"
ACTIVATIONS = (".input_scale", ".activation_scale")
"""Scales for the input of a matrix, which is not rounded to 8 bits here."""


def understand(source: Source, values: dict[str, Any]) -> Understood:
    """Every 8-bit float times its scale; raises BadInput for scales that are missing or do not fit."""
    said = Settings(values, source.config_file)
    block = _block(said)
    said.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    said.one_of("fmt", ("e4m3", "e5m2"), "e4m3")
    said.one_of("expert_dtype", ("fp8",), "fp8")
    powers = said.one_of("scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    said.ignore(frozenset({"dequantize", "modules_to_convert", "ignored_layers"}))
    said.finish()
    made = Understood.of(source)
    _without_scale(source)
    for name, tensor in source.tensors.items():
        if tensor.code in FLOATS:
            scale = _scale_of(name, source)
            grid = _grid(name, tensor, source.tensors[scale], block, source)
            _check_kind(scale, source, powers)
            read = partial(dequantize, code=tensor.code, grid=grid)
            made.derive(name, Tensor(tensor.shape, mx.float32), (name, scale), read)
            made.used(scale)
    left_out = [name for name in source.tensors if name.endswith(ACTIVATIONS)]
    made.used(*left_out)
    if left_out:
        made.notes.append(f"left out {summary(left_out)}: activations are not rounded to 8 bits here")
    return made


def _block(said: Settings) -> tuple[int, int] | None:
    """Rows and columns that share a scale, or None if the config does not say."""
    found = said.get("weight_block_size")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or any(type(side) is not int or side < 1 for side in found):
        raise said.wrong("weight_block_size", "two numbers of 1 or more, or null")
    return found[0], found[1]


def _scale_of(name: str, source: Source) -> str:
    """The tensor that holds the scales of another."""
    found = [scale for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in source.tensors]
    if len(found) != 1:
        problem = "floats of 8 bits without" if not found else "floats of 8 bits with both"
        raise BadInput(f"{problem} {name}_scale_inv {'or' if not found else 'and'} {name}_scale", file=source.origin)
    return found[0]


def _without_scale(source: Source) -> None:
    """Raise BadInput for scales of what is no 8-bit float: multiplying would be wrong, and so would leaving them."""
    for ending in ("_scale_inv", "_scale"):
        for name in source.tensors:
            of = source.tensors.get(name.removesuffix(ending)) if name.endswith(ending) else None
            if of is not None and of.code not in FLOATS:
                problem = f"is a scale, but {name.removesuffix(ending)} is no float of 8 bits"
                raise BadInput(problem, file=source.origin, field=name)


def _check_kind(name: str, source: Source, powers: bool) -> None:
    """Scales must be floats, or bytes that are known to be powers of two."""
    tensor = source.tensors[name]
    if tensor.code == POWERS or (powers and tensor.dtype == mx.uint8 and tensor.code is None):
        return
    if tensor.code is not None or not mx.issubdtype(tensor.dtype, mx.floating):
        found = tensor.code or str(tensor.dtype).removeprefix("mlx.core.")
        raise BadInput(f"found {found}, expected floats or {POWERS}", file=source.origin, field=name)


def _grid(name: str, tensor: Tensor, scale: Tensor, block: tuple[int, int] | None, source: Source) -> tuple[int, int]:
    """Rows and columns for each scale of a matrix; raises BadInput if the scales are not as many as there must be."""
    if len(tensor.shape) < 2 or 0 in tensor.shape:
        raise BadInput(f"found shape {tensor.shape}, expected a matrix", file=source.origin, field=name)
    *stack, rows, columns = tensor.shape
    if block is not None:
        wanted = (*stack, -(-rows // block[0]), -(-columns // block[1]))
        if scale.shape == wanted:
            return block
        expected = f"scales of shape {wanted} for blocks of {block}"
    else:
        full = {(): (*stack, 1, 1), (1,): (*stack, 1, 1), (rows,): (rows, 1)}.get(scale.shape, scale.shape)
        if full[:-2] == tuple(stack) and len(full) == len(tensor.shape) and 0 not in full:
            down, across = full[-2:]
            if rows % down == 0 and columns % across == 0:
                return rows // down, columns // across
        expected = "one scale, or one for each row"
    problem = f"found shape {tensor.shape} with scales {scale.shape}, expected {expected}"
    raise BadInput(problem, file=source.origin, field=name)


def dequantize(weight: mx.array, scale: mx.array, *, code: str, grid: tuple[int, int]) -> mx.array:
    """Bytes (..., out, in) and the scales of their blocks -> float32 (..., out, in).

    >>> dequantize(mx.array([[0x38, 0xC0]], mx.uint8), mx.array(0.5), code="F8_E4M3", grid=(1, 2))
    array([[0.5, -1]], dtype=float32)
    """
    rows, columns = weight.shape[-2:]
    scale = power(scale) if scale.dtype == mx.uint8 else scale.astype(mx.float32)
    scale = scale.reshape(*scale.shape[:-2], -(-rows // grid[0]), -(-columns // grid[1]))
    scale = mx.repeat(mx.repeat(scale, grid[0], axis=-2), grid[1], axis=-1)
    return floats(weight, code) * scale[..., :rows, :columns]


def floats(weight: mx.array, code: str) -> mx.array:
    """8-bit floats as float32. E5M2 is the upper half of a float16."""
    if code == "F8_E5M2":
        return (weight.astype(mx.uint16) << 8).view(mx.float16).astype(mx.float32)
    return mx.from_fp8(weight, dtype=mx.float32)


def power(byte: mx.array) -> mx.array:
    """2^(byte - 127) in float32, which is the byte as an exponent; 0 is below the normal floats, 255 is NaN."""
    bits = mx.where(byte == 0, mx.array(1 << 22, mx.uint32), byte.astype(mx.uint32) << 23)
    return mx.where(byte == 255, mx.nan, bits.view(mx.float32))
