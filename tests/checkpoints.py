"""For the tests of reading and writing checkpoints: files byte by byte, and folders that differ from a golden case."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import GOLDEN, config_of
from mlx.utils import tree_flatten

import mlx_tformer as mt
from mlx_tformer.checkpoint.plan import packed_names
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile, SafetensorsWriter
from mlx_tformer.checkpoint.source import Quantization, Source, Tensor
from mlx_tformer.errors import MlxTformerError

Weights = dict[str, mx.array]
IDS = mx.array([[5, 11, 2, 7, 40, 3]])


def file_bytes(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file with this header and this data, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any, shape: list[Any], start: Any, stop: Any) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def bits(array: mx.array) -> bytes:
    """An array's bytes, to compare NaN and -0 as well."""
    return np.array(array.flatten().view(mx.uint8)).tobytes()


def same(a: mx.array, b: mx.array) -> bool:
    """True if two arrays are the same in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


def write_weights(path: Path, weights: Mapping[str, mx.array]) -> None:
    """A safetensors file with these arrays."""
    writer = SafetensorsWriter(path, {name: Tensor(array.shape, array.dtype) for name, array in weights.items()})
    for name, array in weights.items():
        writer.write(name, array)
    writer.close()


def read_weights(folder: Path) -> Weights:
    """All tensors of a folder's safetensors files."""
    files = [SafetensorsFile(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: file.read(name) for file in files for name in file.tensors}


def case_weights(case: str) -> Weights:
    """The weights of a golden case, in bfloat16."""
    file = SafetensorsFile(GOLDEN / case / "model.safetensors")
    return {name: file.read(name) for name in file.tensors}


def make_folder(
    folder: Path, case: str = "llama-mha", weights: Weights | None = None, shards: int = 1, **settings: Any
) -> Path:
    """A golden case in a folder of its own, with other weights, in several files, or with other settings.

    A setting that is None goes out of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (config_of(case) | settings).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    weights = case_weights(case) if weights is None else weights
    if shards == 1:
        write_weights(folder / "model.safetensors", weights)
        return folder
    index = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[i::shards])
        write_weights(folder / name, part)
        index |= dict.fromkeys(part, name)
    write_index(folder, index)
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    """The index of a checkpoint in several files."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def parameters(model: nn.Module) -> Weights:
    """All weights of a model, by path."""
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def record(folder: Path) -> dict[str, Any]:
    """The `conversion.json` of a conversion."""
    return json.loads((folder / "conversion.json").read_text())


def ours(folder: Path) -> dict[str, Any]:
    """What the config of a conversion has from us."""
    return json.loads((folder / "config.json").read_text())["mlx_tformer"]


def logits(where: Path, **settings: Any) -> mx.array:
    """What a loaded model makes of `IDS`, computed now, since the files may change afterwards."""
    found = mt.load(where, **settings)(IDS)
    mx.eval(found)
    return found


def copy_case(case: str, folder: Path) -> Path:
    """All files of a golden case but the expected values."""
    shutil.copytree(GOLDEN / case, folder, ignore=shutil.ignore_patterns("expected.safetensors", "case.json"))
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(kind: type[MlxTformerError], *parts: str, of: Any) -> str:
    """The message that calling `of` ends with: an error of this kind, one line, with all the parts in it."""
    with pytest.raises(kind) as caught:
        of()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
    return message


@dataclass
class Packed(Source):
    """A checkpoint in memory, some of whose modules are packed, as those of a .gguf file are."""

    arrays: Weights = field(default_factory=dict)

    @classmethod
    def of(cls, case: str, ways: Mapping[str, Quantization]) -> "Packed":
        """The weights of a golden case in float32; matrices of whole groups whose names end with a key of `ways` are
        packed so."""
        arrays: Weights = {}
        packed: dict[str, Quantization] = {}
        for name, array in case_weights(case).items():
            module = name.removesuffix(".weight")
            how = next((how for end, how in ways.items() if module.endswith(end)), None)
            if how is None or array.ndim < 2 or array.shape[-1] % how["group_size"]:
                arrays[name] = array.astype(mx.float32)
                continue
            packed[module] = how
            weight, scales, biases = mx.quantize(array.astype(mx.float32), **how)
            arrays |= {name: weight, f"{module}.scales": half(scales), f"{module}.biases": half(biases)}
        tensors = {name: Tensor(array.shape, array.dtype) for name, array in arrays.items()}
        return cls(origin=f"packed {case}", config=config_of(case), tensors=tensors, quantization=packed, arrays=arrays)

    def read(self, name: str) -> mx.array:
        return self.arrays[name]

    def companions(self) -> dict[str, bytes]:
        return {}

    def dense(self) -> Weights:
        """The same weights, all unpacked: in float64, and then rounded to float32 once."""
        packed = {name for module in self.quantization for name in packed_names(f"{module}.weight")}
        dense = {name: array for name, array in self.arrays.items() if name not in packed}
        return dense | {f"{module}.weight": self._unpacked(module, how) for module, how in self.quantization.items()}

    def _unpacked(self, module: str, how: Quantization) -> mx.array:
        words, bits = np.array(self.arrays[f"{module}.weight"]), how["bits"]
        numbers = words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & (2**bits - 1)
        groups = numbers.reshape(words.shape[0], -1, how["group_size"]).astype(np.float64)
        scales, biases = (
            np.array(self.arrays[f"{module}.{leaf}"], np.float64)[..., None] for leaf in ("scales", "biases")
        )
        return mx.array((groups * scales + biases).reshape(words.shape[0], -1).astype(np.float32))


def half(array: mx.array) -> mx.array:
    """Rounded to float16, as the scales of a .gguf file are."""
    return array.astype(mx.float16)


def way(bits: int, group_size: int = 32) -> Quantization:
    """How a module is packed."""
    return {"bits": bits, "group_size": group_size, "mode": "affine"}
