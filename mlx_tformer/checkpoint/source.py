"""What a checkpoint is to the rest of the package, whatever files it lies in: a config, named tensors, a tokenizer's
files."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import mlx.core as mx

Quantization = Mapping[str, Any]
"""How a module's weight is packed: `bits`, `group_size` and `mode`, as `mx.dequantize` wants them."""
BITS = (2, 3, 4, 5, 6, 8)
"""What MLX can pack a weight into."""
GROUPS = (32, 64, 128)
"""How many weights may share a scale and an offset."""
MODES = {"affine": (BITS, GROUPS), "mxfp4": ((4,), (32,)), "mxfp8": ((8,), (32,)), "nvfp4": ((4,), (16,))}
"""How MLX can pack: the bits of a weight and the sizes of a group. `affine` has scales and offsets that are floats; the
others have small floats for weights and scales of 8 bits alone (OCP Microscaling Formats 1.0; NVFP4)."""
STEP = 32
"""Rows are packed so many values at a time, even where groups are smaller."""

ROWS = 256
"""Rows of two tensors that are compared at a time."""


@dataclass(frozen=True)
class Tensor:
    """The size and kind of a tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    code: str | None = None
    """What bytes mean that MLX has no dtype for: F8_E4M3, F8_E5M2, F8_E8M0. None: what `dtype` says."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.size


@dataclass
class Source(ABC):
    """A checkpoint that can be read, under the names that its author gave to the tensors."""

    origin: str
    """What the user asked for: a path or a hub id."""
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    quantization: dict[str, Quantization] = field(default_factory=dict)
    """Modules whose `weight` is packed, with `scales` beside it, and `biases` if the mode is affine."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    """Commit on the hub, if it came from there."""
    notes: list[str] = field(default_factory=list)
    """What a user should know about the files: one that was ignored, for example."""
    config_file: str = "config.json"
    ours: bool = False
    """True if the tensors have our names already."""
    padding: set[str] = field(default_factory=set)
    """Biases of zeros that the format adds to every matrix: left out if the model has none there."""

    _repeated: dict[tuple[str, str], bool] = field(default_factory=dict, repr=False)
    """Modules that were compared."""

    @abstractmethod
    def read(self, name: str) -> mx.array:
        """One tensor's values, read now and checked to be complete."""

    def blocks(self, name: str, rows: int) -> Iterator[mx.array]:
        """The same values, `rows` rows of the first axis at a time, so that only these are in memory if the format
        allows that."""
        whole = self.read(name)
        if whole.ndim == 0:
            yield whole
            return
        for start in range(0, whole.shape[0], rows):
            yield whole[start : start + rows]

    def mapped(self, name: str) -> mx.array:
        """One tensor's values, read from the file when they are first used, where the format allows that."""
        return self.read(name)

    def repeats(self, module: str, of: str) -> bool:
        """True if the tensors of a module are those of another one a second time; read once."""
        if (module, of) not in self._repeated:
            leaves = [{n.removeprefix(f"{m}.") for n in self.tensors if n.startswith(f"{m}.")} for m in (module, of)]
            same = bool(leaves[0]) and leaves[0] == leaves[1]
            self._repeated[module, of] = same and all(self._equal(f"{module}.{x}", f"{of}.{x}") for x in leaves[0])
        return self._repeated[module, of]

    def _equal(self, a: str, b: str) -> bool:
        """True for two tensors of the same shape, dtype and values."""
        first, second = self.tensors[a], self.tensors[b]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        blocks = zip(self.blocks(a, ROWS), self.blocks(b, ROWS), strict=True)
        return all(mx.array_equal(x, y, equal_nan=mx.issubdtype(x.dtype, mx.floating)).item() for x, y in blocks)

    @abstractmethod
    def companions(self) -> dict[str, bytes]:
        """The files that go along with the weights (tokenizer, chat template, generation config): name -> content."""
