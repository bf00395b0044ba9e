"""What mlx-lm writes, which is what MLX-community checkpoints are: MLX's packed modules, carried over as they are.

`quantization` in the config has `group_size`, `bits` and `mode` for all modules that have `scales`, and under the path
of a module what differs for it. Names that are mlx-lm's own are in `mlx_names`; but DeepSeek's `kv_b_proj`, which
mlx-lm stores as two, is put together again here. Layout: `mlx_lm/utils.py` and `mlx_lm/models/mla.py` of mlx-lm 0.32.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...errors import BadInput
from ..folder import wrong_packing
from ..plan import check_packing, dequantize, packed_names, unpacked
from ..source import Quantization, Source, Tensor
from .common import Understood, shortened

HOW = ("bits", "group_size", "mode")
KEYS, VALUES = ".embed_q", ".unembed_out"
"""The halves of `kv_b_proj`: (heads, rank, features of a key), and (heads, features of a value, rank)."""


def understand(source: Source, values: Mapping[str, Any] | None) -> Understood:
    """Modules with `scales` as packed ones; raises BadInput for what MLX cannot unpack, or what contradicts itself.

    values: the config's `quantization`; None if it has none, as for weights in bfloat16.
    """
    made = Understood.of(source)
    if values is not None:
        made.quantization = _packed(source, values)
        check_packing(made)
    for name in source.tensors:
        module = name.removesuffix(f"{KEYS}.weight")
        if module != name and f"{module}{VALUES}.weight" in source.tensors:
            _join(made, module)
    return made


def split(source: Source) -> bool:
    """True if a checkpoint has tensors that `understand` puts together."""
    return any(name.endswith(f"{KEYS}.weight") for name in source.tensors)


def _packed(source: Source, values: Mapping[str, Any]) -> dict[str, Quantization]:
    """How each module is packed."""
    file, found = source.config_file, dict[str, Quantization]()
    usual = {key: values[key] for key in HOW if key in values}
    for key, value in values.items():
        if key not in HOW and not isinstance(value, bool | dict):
            problem = f"found {shortened(value)}, a setting that mlx-lm does not know"
            raise BadInput(problem, file=file, field=f"quantization.{key}")
    for name in source.tensors:
        module = name.removesuffix(".scales")
        if module == name:
            continue
        own = values.get(module, True)
        how = {"mode": "affine", **(own if isinstance(own, dict) else usual)}
        wrong = "found false, but the module has scales" if own is False else wrong_packing(how)
        if wrong is not None:
            raise BadInput(wrong, file=file, field=f"quantization.{module}" if module in values else "quantization")
        found[module] = how
    if source.tensors and not found:
        raise BadInput("found settings, but no tensor is packed", file=file, field="quantization")
    return found


def _join(made: Understood, module: str) -> None:
    """Have `kv_b_proj` (heads * (key + value), rank), unpacked, instead of its halves."""
    halves, shapes, parts = (f"{module}{KEYS}", f"{module}{VALUES}"), list[Tensor](), list[tuple[str, ...]]()
    ways = [made.quantization.pop(half, None) for half in halves]
    for half, how in zip(halves, ways, strict=True):
        weight = f"{half}.weight"
        parts.append((weight,) if how is None else packed_names(weight, how["mode"]))
        shapes.append(unpacked(made.tensors[weight], how))
    shape = _joined_shape(*(tensor.shape for tensor in shapes))
    if shape is None or any(name not in made.tensors for name in (*parts[0], *parts[1])):
        problem = f"found {shapes[0].shape} and {shapes[1].shape}, which are no keys and values of the same heads"
        raise BadInput(problem, file=made.origin, field=module)

    def values(*read: mx.array) -> mx.array:
        count = len(parts[0])
        key, value = (
            leaves[0] if how is None else dequantize(leaves, how)
            for leaves, how in zip((read[:count], read[count:]), ways, strict=True)
        )
        return mx.concatenate([key.swapaxes(1, 2), value], axis=1).flatten(0, 1)

    made.derive(f"{module}.kv_b_proj.weight", Tensor(shape, shapes[0].dtype), (*parts[0], *parts[1]), values)
    made.used(*parts[0], *parts[1])


def _joined_shape(keys: tuple[int, ...], values: tuple[int, ...]) -> tuple[int, int] | None:
    """The shape of the whole, or None if the halves do not fit."""
    fit = len(keys) == len(values) == 3 and keys[0] == values[0] and keys[1] == values[2]
    return (keys[0] * (keys[2] + values[1]), keys[1]) if fit else None
