"""The ways in which keys and values are kept, and what each is as plain keys and values."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import mlx.core as mx


class Keys(ABC):
    """Keys and values of S tokens in K heads, (B, K, S, ...)."""

    names: ClassVar[tuple[str, ...]]
    """What the kernel calls the arrays."""
    flag: ClassVar[str | None]
    """The macro that chooses the kernel's variant."""

    @property
    @abstractmethod
    def arrays(self) -> tuple[mx.array, ...]:
        """What they are made of, in the order of `names`."""

    @abstractmethod
    def of(self, arrays: Sequence[mx.array]) -> Self:
        """The same made of other `arrays`."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Features of a key."""

    @property
    @abstractmethod
    def value(self) -> int:
        """Features of a value."""

    @abstractmethod
    def plain(self) -> tuple[mx.array, mx.array]:
        """Keys (B, K, S, D) and values (B, K, S, E)."""

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.arrays[0].shape[0]

    @property
    def heads(self) -> int:
        """Key heads."""
        return self.arrays[0].shape[1]

    @property
    def length(self) -> int:
        """Keys in each head."""
        return self.arrays[0].shape[2]


@dataclass(frozen=True)
class Plain(Keys):
    """Keys (B, K, S, D) and values (B, K, S, E)."""

    names = ("k", "v")
    flag = None
    k: mx.array
    v: mx.array

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.k, self.v

    def of(self, arrays: Sequence[mx.array]) -> Self:
        return type(self)(*arrays)

    @property
    def width(self) -> int:
        return self.k.shape[3]

    @property
    def value(self) -> int:
        return self.v.shape[3]

    def plain(self) -> tuple[mx.array, mx.array]:
        return self.k, self.v


@dataclass(frozen=True)
class Latent(Keys):
    """DeepSeek's latents (B, 1, S, R), which are values and the first features of keys, and the features of keys that
    turn (B, 1, S, D - R) (arXiv 2405.04434)."""

    names = ("k", "turning")
    flag = "LATENT"
    latent: mx.array
    turning: mx.array

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.latent, self.turning

    def of(self, arrays: Sequence[mx.array]) -> Self:
        return type(self)(*arrays)

    @property
    def width(self) -> int:
        return self.latent.shape[3] + self.turning.shape[3]

    @property
    def value(self) -> int:
        return self.latent.shape[3]

    def plain(self) -> tuple[mx.array, mx.array]:
        return mx.concatenate([self.latent, self.turning], axis=-1), self.latent


@dataclass(frozen=True)
class Packed(Keys):
    """Keys and values as `mx.quantize` packs them: words (B, K, S, D · bits / 32), scales and biases
    (B, K, S, D / group) of each."""

    names = ("k", "k_scales", "k_biases", "v", "v_scales", "v_biases")
    flag = "PACKED"
    k: tuple[mx.array, mx.array, mx.array]
    v: tuple[mx.array, mx.array, mx.array]
    group: int = 64
    bits: int = 4

    @classmethod
    def pack(cls, k: mx.array, v: mx.array, group: int = 64, bits: int = 4) -> "Packed":
        """Keys (B, K, S, D) and values (B, K, S, E), packed."""
        words, scales, biases = mx.quantize(k, group, bits)
        v_words, v_scales, v_biases = mx.quantize(v, group, bits)
        return cls((words, scales, biases), (v_words, v_scales, v_biases), group, bits)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self.k, *self.v)

    def of(self, arrays: Sequence[mx.array]) -> Self:
        k, ks, kb, v, vs, vb = arrays
        return type(self)((k, ks, kb), (v, vs, vb), self.group, self.bits)

    @property
    def width(self) -> int:
        return self.k[1].shape[3] * self.group

    @property
    def value(self) -> int:
        return self.v[1].shape[3] * self.group

    def plain(self) -> tuple[mx.array, mx.array]:
        return mx.dequantize(*self.k, self.group, self.bits), mx.dequantize(*self.v, self.group, self.bits)
