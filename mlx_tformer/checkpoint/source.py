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


@dataclass(frozen=True)
class Tensor:
    """The size and kind of a tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

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
    """Modules whose `weight` is packed, with `scales` and `biases` beside it."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    """Commit on the hub, if it came from there."""
    notes: list[str] = field(default_factory=list)
    """What a user should know about the files: one that was ignored, for example."""
    config_file: str = "config.json"
    ours: bool = False
    """True if the tensors have our names already."""

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

    @abstractmethod
    def companions(self) -> dict[str, bytes]:
        """The files that go along with the weights (tokenizer, chat template, generation config): name -> content."""
