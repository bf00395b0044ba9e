"""A GGUF file as if it were a Hugging Face folder: config, tensors under Hugging Face's names, tokenizer files.

`mx.load` is not used: it ends the process on many broken files. The parts: `container` checks the file,
`blocks` decodes numbers, `config` and `rope` translate the metadata by the rows of `architectures`, `tokenizer`
writes a tokenizer.json.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import BadInput
from ..source import Quantization, Tensor
from . import blocks
from . import config as settings
from .container import TensorInfo, read_container
from .rope import FREQUENCY_TENSORS
from .tokenizer import tokenizer_files

_SCAN_ROWS = 1 << 14


@dataclass(frozen=True)
class _Source:
    """Where a tensor comes from: a tensor of the file, the part of it, and what has to be done to its values."""

    info: TensorInfo
    part: str = "dense"
    order: tuple[int, int] | None = None
    """Heads and head_dim, if the rows are in another order."""
    shifted: bool = False
    """True for a norm that is stored as what it multiplies by; what counts here is one less."""
    single: bool = False
    """True for a matrix of one row that is stored as a vector."""


class GgufFile:
    """A GGUF file, checked; nothing of its weights is read before `tensors` or `read` is used.

    Matrices in Q4_0, Q4_1 and Q8_0 come as MLX's packed form, `X.weight` (uint32), `X.scales` and `X.biases`
    (float16), without any change of a value; a matrix whose biases would overflow float16 is dense. Everything else
    is dense: F32, F16 and BF16 in their own dtype, all other types as float32, which is what ggml defines them to be.
    Gemma's norms have 1 subtracted again, in float32. Stacked experts, (E, out, in), are as any matrix.
    `packed=False` makes every tensor dense.

    Raises BadInput, one line that names the key or the tensor, for a file that is broken or not understood, and
    InputOutputError if it cannot be read.
    """

    def __init__(self, path: str | Path, *, packed: bool = True):
        self.path, self._packed = Path(path), packed
        self._container = read_container(self.path)
        self.metadata: dict[str, Any] = self._container.metadata
        """All keys; arrays of numbers are numpy arrays."""
        infos = self._container.tensors
        self._arch = settings.architecture(self.path, self.metadata)
        self._names = settings.hugging_face_names(self.path, self._arch, infos)
        divisors = {name: self._vector(infos[name]) for name in FREQUENCY_TENSORS if name in infos}
        self.config = settings.config(self.path, self.metadata, self._arch, infos, divisors)
        """As `config.json`, in the dialect of transformers 5."""
        self.generation_config = settings.generation_config(self.path, self.metadata, self.config["vocab_size"])
        """As `generation_config.json`; `eos_token_id` is a list where several ids end a text."""
        self._dense = {ours: self._source(infos[theirs], ours) for theirs, ours in self._names.items()}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Hugging Face name -> shape and dtype. The first use reads the scales in Q4_0 and Q8_0 matrices."""
        return {name: self._describe(source) for name, source in self._sources.items()}

    @cached_property
    def quantization(self) -> dict[str, Quantization]:
        """Module name -> how its packed weight is quantized: bits, group_size and mode, as MLX calls them."""
        return {
            name.removesuffix(".weight"): {
                "bits": blocks.PACKED_BITS[source.info.type.name],
                "group_size": blocks.GROUP_SIZE,
                "mode": "affine",
            }
            for name, source in self._sources.items()
            if source.part == "weight"
        }

    @cached_property
    def origin(self) -> dict[str, str]:
        """Hugging Face name -> the tensor that it comes from and its type, as `blk.0.attn_q.weight Q4_1`."""
        return {name: f"{source.info.name} {source.info.type.name}" for name, source in self._sources.items()}

    def read(self, name: str) -> mx.array:
        """One tensor, read from the file now, of the shape and dtype that `tensors` says.

        Raises BadInput if there is none of that name or if the file has changed since it was opened.
        """
        if name not in self._sources:
            raise BadInput("found no such tensor", file=self.path, field=name)
        source = self._sources[name]
        raw, kind, shape = self._container.raw(source.info), source.info.type.name, self.tensors[name].shape
        if source.part != "dense":
            return blocks.PARTS[source.part](_reorder(raw, source.order), kind).reshape(shape)
        if len(shape) > 1:
            return blocks.to_dense(_reorder(raw, source.order), kind).reshape(shape)
        values = blocks.to_dense(raw, kind).reshape(shape)
        if source.shifted:
            values = values.astype(mx.float32) - 1
        return values if source.order is None else values[mx.array(settings.rotary_rows(*source.order))]

    def blocks(self, name: str, rows: int) -> Iterator[mx.array]:
        """The same values, `rows` rows of the first axis at a time; a matrix whose rows move is read whole."""
        source, shape = self._sources[name], self.tensors[name].shape
        if source.order is not None or len(source.info.shape) < 2:
            whole = self.read(name)
            yield from (whole[start : start + rows] for start in range(0, shape[0], rows))
            return
        decode = blocks.to_dense if source.part == "dense" else blocks.PARTS[source.part]
        inner = prod(shape[1:-1])  # rows of the file for one of ours, where experts are stacked
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            raw = self._container.raw(source.info, start * inner, stop * inner)
            yield decode(raw, source.info.type.name).reshape((stop - start, *shape[1:]))

    def tokenizer_files(self) -> dict[str, str]:
        """Names and texts of the tokenizer's files; empty where the file has no tokenizer.

        Raises BadInput for a tokenizer that is broken or of an unknown kind.
        """
        return tokenizer_files(self.path, self.metadata)

    @cached_property
    def _sources(self) -> dict[str, _Source]:
        sources: dict[str, _Source] = {}
        for name, source in self._dense.items():
            if not self._packs(source.info):
                sources[name] = source
                continue
            for part in blocks.PARTS:
                sources[f"{name.removesuffix('.weight')}.{part}"] = _Source(source.info, part, source.order)
        return sources

    def _packs(self, info: TensorInfo) -> bool:
        kind = info.type.name
        if not self._packed or len(info.shape) < 2 or kind not in blocks.PACKED_BITS:
            return False
        if not info.name.endswith(".weight"):
            return False
        if kind == "Q4_1":
            return True
        starts = range(0, prod(info.shape[:-1]), _SCAN_ROWS)
        return all(blocks.packs_exactly(self._container.raw(info, i, i + _SCAN_ROWS), kind) for i in starts)

    def _source(self, info: TensorInfo, name: str) -> _Source:
        module = name.rsplit(".", 2)[-2]
        counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        if not self._arch.interleaved or module not in counts:
            shifted = self._arch.shifted and name.endswith("norm.weight")
            return _Source(info, shifted=shifted, single=module in self._arch.single)
        heads, head_dim = self.config[counts[module]], self.config["head_dim"]
        settings.check_rotary_rows(self.path, info, heads, head_dim)
        return _Source(info, order=(heads, head_dim))

    def _describe(self, source: _Source) -> Tensor:
        shape, kind = source.info.shape, source.info.type.name
        match source.part:
            case "dense":
                whole = (1, *shape) if source.single and len(shape) == 1 else shape
                return Tensor(whole, mx.float32 if source.shifted else blocks.dense_dtype(kind))
            case "weight":
                return Tensor((*shape[:-1], shape[-1] * blocks.PACKED_BITS[kind] // 32), mx.uint32)
        return Tensor((*shape[:-1], shape[-1] // blocks.GROUP_SIZE), mx.float16)

    def _vector(self, info: TensorInfo) -> np.ndarray:
        # A real one has half as many numbers as a head has features.
        if len(info.shape) != 1 or info.nbytes > 1 << 16:
            raise BadInput(f"found shape {info.shape}, expected a short vector", file=self.path, field=info.name)
        return np.array(blocks.to_dense(self._container.raw(info), info.type.name).astype(mx.float32))[0]


def _reorder(raw: np.ndarray, order: tuple[int, int] | None) -> np.ndarray:
    """Rows in Hugging Face's order; blocks lie along the rows, so that even packed ones move whole."""
    return raw if order is None else raw[settings.rotary_rows(*order)]
