"""Checkpoints whose weights are stored in somebody's quantized format: which it is, and one file for each.

What a config says about the format is read as a model's config is: a method or a setting that is not known, and one
that the tensors contradict, is an error. Nothing is guessed from bits.
"""

from collections.abc import Callable
from typing import Any

from ...errors import BadInput
from ..source import Source
from . import fp8, integers, mlx_lm, mxfp4
from .common import Understood, shortened

METHODS: dict[str, Callable[[Source, dict[str, Any]], Understood]] = {
    "awq": integers.understand_awq,
    "fp8": fp8.understand,
    "gptq": integers.understand_gptq,
    "mxfp4": mxfp4.understand,
}
"""`quant_method` -> what reads a checkpoint of this kind."""


def understood(source: Source) -> Source:
    """The checkpoint as plain tensors and as modules that MLX has packed, whatever its config says they are stored as.

    Raises BadInput for a format that is not known, for one that contradicts itself or the tensors, and for tensors
    that do not fit it. Values are read when they are asked for, those that decide about a format apart (the order and
    the zero points of GPTQ).
    """
    ours, theirs = source.config.get("quantization"), source.config.get("quantization_config")
    if source.ours or (ours is None and theirs is None and not mlx_lm.split(source)):
        return source
    for key, value in (("quantization", ours), ("quantization_config", theirs)):
        if value is not None and not isinstance(value, dict):
            raise BadInput(f"found {shortened(value)}, expected an object", file=source.config_file, field=key)
    if ours is not None and theirs not in (None, ours):
        problem = "differs from quantization, which says how mlx-lm has packed the weights; expected one of them"
        raise BadInput(problem, file=source.config_file, field="quantization_config")
    if ours is not None or theirs is None:
        return mlx_lm.understand(source, ours)
    return _of_method(source, theirs)


def _of_method(source: Source, values: dict[str, Any]) -> Source:
    """A checkpoint that `quantization_config` describes."""
    method, field = values.get("quant_method"), "quantization_config"
    if not isinstance(method, str) or method not in METHODS:
        known = f"{', '.join(METHODS)}, or the packed modules of mlx-lm (`quantization`)"
        found = "missing" if method is None else f"found {shortened(method)}"
        problem = f"{found}, expected a format that can be read: {known}"
        raise BadInput(problem, file=source.config_file, field=f"{field}.quant_method")
    made = METHODS[method](source, values)
    if source.tensors and not made.derived:
        problem = f"says {method}, but no tensor is stored so; expected none for plain weights"
        raise BadInput(problem, file=source.config_file, field=field)
    return made
