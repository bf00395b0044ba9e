"""AWQ and GPTQ: whole numbers of 4 bits (GPTQ: of 2 and 8 as well) with a scale and a zero point for each group.

A value is w = s * (q - z), where s and z belong to an output and a group of inputs; that is MLX's affine form with the
bias -s * z, so the numbers are carried over without a rounding. Both formats store the matrix (in, out), in words of 32
bits; the lowest bits come first.

| | AWQ, version gemm | GPTQ |
| --- | --- | --- |
| `qweight` | (in, out / 8), outputs of a word in the order 0 2 4 6 1 3 5 7 | (in * bits / 32, out), inputs in order |
| `qzeros` | (groups, out / 8), in the same order | (groups, out * bits / 32), in order, one too low |
| `scales` | (groups, out) | (groups, out) |
| `g_idx` | none | (in,) the group of each input |

In GPTQ's format `gptq_v2` zero points are stored as they are; in `gptq` a whole word of them is one too low in each
number, so that adding must carry where a zero point is 0. Layouts: `WQLinear_GEMM` of AutoAWQ 0.2, `QuantLinear` of
AutoGPTQ 0.7 and GPTQModel 7.

MLX has the groups 32, 64 and 128. A larger group becomes several with the same scale; a matrix with smaller groups, or
whose inputs of one group do not stand together (`desc_act`), is unpacked into float32. Biases are float32, because
float16 does not hold every -s * z: what loads or converts a model in float16 rounds them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import BadInput
from ..source import GROUPS, Source, Tensor
from .common import Derived, Settings, Understood

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ's each of eight outputs stands."""
# fmt: off
OTHER_SETTINGS = frozenset(
    {
        "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
        "damp_auto_increment", "damp_percent", "dataset", "desc_act", "disable_exllama", "do_fuse", "exllama_config",
        "fuse_max_seq_len", "lm_head", "max_input_length", "model_file_base_name", "model_name_or_path",
        "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse",
        "pad_token_id", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
    }
)
# fmt: on
"""How the numbers were found and which kernels the authors had in mind. `desc_act` shows in `g_idx`."""


@dataclass(frozen=True)
class Layout:
    """How one checkpoint stores its matrices."""

    bits: int
    group: int | None
    """Inputs that share a scale; None for all."""
    inputs: Callable[[mx.array], mx.array]
    """`qweight` as words (out, in * bits / 32), inputs in order."""
    zeros: Callable[[mx.array], mx.array]
    """`qzeros` as zero points (groups, out)."""
    along_outputs: bool
    """Whether the words of `qweight` hold outputs."""
    has_order: bool = False
    """Whether there may be a `g_idx`."""


@dataclass(frozen=True)
class Module:
    """One matrix: its sizes, and whether MLX can hold it packed."""

    name: str
    inputs: int
    outputs: int
    group: int
    """Inputs of one group; the last may have fewer."""
    order: np.ndarray | None = None
    """The group of each input, where those of a group do not stand together."""

    def part(self, leaf: str) -> str:
        """The name of one of its tensors in the checkpoint."""
        return f"{self.name}.{leaf}"


def understand_awq(source: Source, values: dict[str, Any]) -> Understood:
    """The matrices of an AWQ checkpoint; raises BadInput for other versions than gemm and for what does not fit."""
    said = Settings(values, source.config_file)
    bits = said.one_of("w_bit" if "w_bit" in values else "bits", (4,), 4)
    group = said.size("q_group_size" if "q_group_size" in values else "group_size", 128)
    said.one_of("zero_point", (True,), True)
    for key in ("version", "format"):
        said.one_of(key, ("gemm", "GEMM"), "gemm")
    if said.get("backend") == "llm-awq":
        raise said.wrong("backend", "a checkpoint of AutoAWQ's")
    said.ignore(OTHER_SETTINGS | {"sym", "checkpoint_format", "meta"})
    said.finish()
    return _understand(source, Layout(bits, group, awq_words, awq_numbers, along_outputs=True))


def understand_gptq(source: Source, values: dict[str, Any]) -> Understood:
    """The matrices of a GPTQ checkpoint; raises BadInput for formats that are not known and for what does not fit."""
    said = Settings(values, source.config_file)
    bits, group = said.one_of("bits", (2, 4, 8)), said.size("group_size", 128)
    symmetric = said.one_of("sym", (True, False), False)
    stored = said.one_of("checkpoint_format", ("gptq", "gptq_v2"), said.get("format", "gptq"))
    said.one_of("format", (stored,), stored)
    said.one_of("is_marlin_format", (False,), False)
    said.one_of("pack_dtype", ("int32",), "int32")
    said.one_of("dynamic", ({},), {})
    carried = "gptqmodel" in repr(said.get("meta"))
    said.ignore(OTHER_SETTINGS)
    said.finish()
    zeros = partial(gptq_zeros, bits=bits, too_low=stored == "gptq", known=2 ** (bits - 1) if symmetric else None)
    layout = Layout(bits, group, gptq_words, zeros, along_outputs=False, has_order=True)
    made = _understand(source, layout)
    _check_zeros(source, bits, symmetric, ambiguous=stored == "gptq" and not carried)
    made.padding = {name for name in made.tensors if _is_zero_bias(name, source, made)}
    return made


def _understand(source: Source, layout: Layout) -> Understood:
    made = Understood.of(source)
    for name in source.tensors:
        if not name.endswith(".qweight"):
            continue
        module = _module(name.removesuffix(".qweight"), source, layout)
        size = _size_for_mlx(module)
        if size is None:
            _unpack(made, module, layout)
        else:
            _pack(made, module, layout, size, source.tensors[module.part("scales")].dtype)
        made.used(*(module.part(leaf) for leaf in ("qweight", "qzeros", "scales")))
        if layout.has_order:
            made.used(module.part("g_idx"))
    return made


def _module(name: str, source: Source, layout: Layout) -> Module:
    """A matrix whose tensors fit each other and the settings; raises BadInput if they do not."""
    missing = [leaf for leaf in ("qzeros", "scales") if f"{name}.{leaf}" not in source.tensors]
    if missing:
        raise BadInput(f"has a qweight, but no {' and no '.join(missing)}", file=source.origin, field=name)
    words, zeros, scales = (source.tensors[f"{name}.{leaf}"] for leaf in ("qweight", "qzeros", "scales"))
    if any(len(tensor.shape) != 2 or 0 in tensor.shape for tensor in (words, zeros, scales)):
        raise BadInput(f"found shapes {words.shape}, {zeros.shape}, {scales.shape}, expected matrices", field=name)
    per_word = 32 // layout.bits
    rows, columns = words.shape
    inputs, outputs = (rows, columns * per_word) if layout.along_outputs else (rows * per_word, columns)
    group = inputs if layout.group is None else layout.group
    groups = -(-inputs // group)
    fits = scales.shape == (groups, outputs) and zeros.shape == (groups, outputs // per_word)
    if not fits or words.dtype != mx.int32 or zeros.dtype != mx.int32 or not mx.issubdtype(scales.dtype, mx.floating):
        found = f"found qweight {words.shape}, qzeros {zeros.shape} and scales {scales.shape}"
        problem = f"{found}, which do not go together with {layout.bits} bits in groups of {group}"
        raise BadInput(problem, file=source.origin, field=name)
    order = _order(f"{name}.g_idx", inputs, group, source) if layout.has_order else None
    return Module(name, inputs, outputs, group, order)


def _order(order: str, inputs: int, group: int, source: Source) -> np.ndarray | None:
    """The group of each input, or None if those of a group stand together, in order."""
    if order not in source.tensors:
        return None
    groups = -(-inputs // group)
    found = np.array(source.read(order))
    if found.shape != (inputs,) or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= groups:
        problem = f"found {found.shape}, expected the group of each of {inputs} inputs, 0 to {groups - 1}"
        raise BadInput(problem, file=source.origin, field=order)
    return None if np.array_equal(found, np.arange(inputs) // group) else found


def _size_for_mlx(module: Module) -> int | None:
    """The largest group of MLX's that is a part of the matrix's own groups; None if there is none."""
    fitting = [size for size in GROUPS if module.group % size == 0 and module.inputs % module.group == 0]
    return max(fitting) if fitting and module.order is None else None


def _pack(made: Understood, module: Module, layout: Layout, size: int, dtype: mx.Dtype) -> None:
    """Carry a matrix over into MLX's affine form."""
    groups = module.inputs // size
    again = module.group // size

    def scales(stored: mx.array) -> mx.array:
        return mx.repeat(stored.T, again, axis=1)  # (out, groups)

    def biases(stored: mx.array, zeros: mx.array) -> mx.array:
        zero = layout.zeros(zeros).astype(mx.float32)
        return scales(0 - stored.astype(mx.float32) * zero)  # not -x, which makes -0 of a zero

    words = Tensor((module.outputs, module.inputs * layout.bits // 32), mx.uint32)
    shape, parts = (module.outputs, groups), (module.part("scales"), module.part("qzeros"))
    made.pack(
        module.name,
        {"bits": layout.bits, "group_size": size, "mode": "affine"},
        Derived(words, (module.part("qweight"),), layout.inputs),
        Derived(Tensor(shape, dtype), parts[:1], scales),
        Derived(Tensor(shape, mx.float32), parts, biases),
    )


def _unpack(made: Understood, module: Module, layout: Layout) -> None:
    """Have a matrix as float32, in which s * (q - z) is exact for a float16 s."""
    order = mx.array(np.arange(module.inputs) // module.group if module.order is None else module.order)

    def values(words: mx.array, zeros: mx.array, scales: mx.array) -> mx.array:
        numbers = unpacked(layout.inputs(words), layout.bits).astype(mx.float32)  # (out, in)
        zero = layout.zeros(zeros).astype(mx.float32).T[:, order]
        return scales.astype(mx.float32).T[:, order] * (numbers - zero)

    parts = tuple(module.part(leaf) for leaf in ("qweight", "qzeros", "scales"))
    made.derive(module.part("weight"), Tensor((module.outputs, module.inputs), mx.float32), parts, values)


def unpacked(words: mx.array, bits: int) -> mx.array:
    """(rows, words) -> the numbers in them, (rows, words * 32 / bits), those of the lowest bits first.

    >>> unpacked(mx.array([[0x87654321]], mx.uint32), 4)
    array([[1, 2, 3, ..., 6, 7, 8]], dtype=uint32)
    """
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    return (words.view(mx.uint32)[..., None] >> shifts & (2**bits - 1)).flatten(-2)


def gptq_words(qweight: mx.array) -> mx.array:
    """(in * bits / 32, out) -> (out, in * bits / 32): MLX has the same words."""
    return qweight.view(mx.uint32).T


def gptq_zeros(qzeros: mx.array, *, bits: int, too_low: bool, known: int | None) -> mx.array:
    """Zero points (groups, out) from words (groups, out * bits / 32); `known` is what symmetric ones are."""
    words = qzeros.view(mx.uint32)
    if too_low:
        words = words + sum(1 << at for at in range(0, 32, bits))
    numbers = unpacked(words, bits)
    return numbers if known is None else mx.full(numbers.shape, known, mx.uint32)


def awq_numbers(words: mx.array) -> mx.array:
    """(rows, out / 8) -> the 4-bit numbers (rows, out), outputs in order."""
    shifts = 4 * mx.array(AWQ_ORDER, mx.uint32)
    return (words.view(mx.uint32)[..., None] >> shifts & 15).flatten(-2)


def awq_words(qweight: mx.array) -> mx.array:
    """(in, out / 8) -> words (out, in / 8), inputs in order."""
    numbers = mx.unflatten(awq_numbers(qweight).T, -1, (-1, 8))  # (out, in / 8, 8)
    return (numbers << mx.arange(0, 32, 4, dtype=mx.uint32)).sum(axis=-1).astype(mx.uint32)


def _check_zeros(source: Source, bits: int, symmetric: bool, ambiguous: bool) -> None:
    """Raise BadInput for zero points that readers disagree about.

    Symmetric ones are half of the range. They are stored as that or as one less, and some writers name the wrong
    format, which does no harm. Others are one too low in the older format; a zero point of 0 spoils its neighbours
    there unless GPTQModel wrote it.
    """
    half, ones = 2 ** (bits - 1), 2**bits - 1
    for name in source.tensors:
        if not name.endswith(".qzeros"):
            continue
        numbers = np.array(unpacked(source.read(name), bits))
        if symmetric and not ((numbers == half).all() or (numbers == half - 1).all()):
            problem = f"found zero points that are not all {half}, although quantization_config says sym"
            raise BadInput(problem, file=source.origin, field=name)
        if not symmetric and ambiguous and (numbers == ones).any():
            problem = (
                f"found a zero point stored as {ones}, which stands for 0 or for {ones + 1}, depending on the reader"
            )
            raise BadInput(problem, file=source.origin, field=name)


def _is_zero_bias(name: str, source: Source, made: Understood) -> bool:
    """True for a bias of zeros beside a quantized matrix: older writers add one to every matrix."""
    module = name.removesuffix(".bias")
    if module == name or f"{module}.qweight" not in source.tensors:
        return False
    return not mx.any(source.read(name)).item()
