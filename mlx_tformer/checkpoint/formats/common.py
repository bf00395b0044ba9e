"""What the formats share: a source some of whose tensors are made of others, and settings that are all understood."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...errors import BadInput
from ..source import Quantization, Source, Tensor

HARMLESS = frozenset({"_load_in_4bit", "_load_in_8bit", "modules_to_not_convert", "quant_method", "quantize_method"})
"""Keys of any quantization config that what is stored shows anyway."""


FIELDS = ("quantization", "quantization_config")
"""Keys of a config under which formats are described."""


@dataclass(frozen=True)
class Derived:
    """A tensor that is made of others when it is read."""

    tensor: Tensor
    parts: tuple[str, ...]
    """The tensors of the checkpoint that `make` is given."""
    make: Callable[..., mx.array]


@dataclass
class Understood(Source):
    """A checkpoint in somebody's format as one of plain tensors and of modules that MLX has packed."""

    base: Source = field(kw_only=True)
    derived: dict[str, Derived] = field(default_factory=dict)

    @classmethod
    def of(cls, base: Source) -> "Understood":
        """The same checkpoint, of which nothing is derived yet, without what its config says about the format."""
        config = {key: value for key, value in base.config.items() if key not in FIELDS}
        return cls(
            origin=base.origin,
            config=config,
            tensors=dict(base.tensors),
            quantization=dict(base.quantization),
            generation_config=base.generation_config,
            revision=base.revision,
            notes=list(base.notes),
            config_file=base.config_file,
            base=base,
        )

    def derive(self, name: str, tensor: Tensor, parts: tuple[str, ...], make: Callable[..., mx.array]) -> None:
        """Have a tensor of this name, made of `parts` of the checkpoint; raises BadInput if there is one already."""
        if name in self.base.tensors and name not in parts:
            raise BadInput(f"stored twice: as it is, and in {', '.join(parts)}", file=self.origin, field=name)
        self.tensors[name] = tensor
        self.derived[name] = Derived(tensor, parts, make)

    def pack(self, module: str, how: Quantization, words: Derived, scales: Derived, biases: Derived | None) -> None:
        """Have a module that is packed `how`, with these tensors."""
        self.quantization[module] = how
        for leaf, made in (("weight", words), ("scales", scales), ("biases", biases)):
            if made is not None:
                self.derive(f"{module}.{leaf}", made.tensor, made.parts, made.make)

    def used(self, *names: str) -> None:
        """Take tensors of the checkpoint away that others are made of; one that is derived stays."""
        for name in names:
            if name not in self.derived:
                self.tensors.pop(name, None)

    def read(self, name: str) -> mx.array:
        value = self._value(name, self.base.read)
        mx.eval(value)  # once, and not for every block of its rows
        return value

    def mapped(self, name: str) -> mx.array:
        return self._value(name, self.base.mapped)

    def _value(self, name: str, read: Callable[[str], mx.array]) -> mx.array:
        made = self.derived.get(name)
        return read(name) if made is None else made.make(*map(read, made.parts))

    def blocks(self, name: str, rows: int) -> Iterator[mx.array]:
        return super().blocks(name, rows) if name in self.derived else self.base.blocks(name, rows)

    def companions(self) -> dict[str, bytes]:
        return self.base.companions()


class Settings:
    """What a config says about a format, read key by key: a key that nobody knows is an error, as in a model's config.

    >>> said = Settings({"quant_method": "awq", "bits": 4, "colour": "red"}, "config.json")
    >>> said.one_of("bits", (4, 8))
    4
    >>> said.finish()
    Traceback (most recent call last):
    mlx_tformer.errors.BadInput: config.json: quantization_config.colour: found 'red', a setting that awq does not know
    """

    def __init__(self, values: dict[str, Any], file: str, key: str = "quantization_config"):
        self.values, self.file, self.key = values, file, key
        self._read: set[str] = set(HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; a null is the same as a key that is not there."""
        self._read.add(key)
        found = self.values.get(key)
        return default if found is None else found

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """The value of a key, refused if it is none of these; True and 1 differ."""
        found = self.get(key, default)
        if not any(type(found) is type(value) and found == value for value in allowed):
            raise self.wrong(key, f"one of {', '.join(map(repr, allowed))}" if len(allowed) > 1 else repr(allowed[0]))
        return found

    def size(self, key: str, default: int | None = None) -> int | None:
        """A number of values, or None for -1, which stands for all of a row."""
        found = self.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or (found < 1 and found != -1):
            raise self.wrong(key, "a number of 1 or more, or -1")
        return None if found == -1 else found

    def ignore(self, keys: frozenset[str]) -> None:
        """Pass over settings that cannot change what is stored."""
        self._read |= keys

    def wrong(self, key: str, expected: str) -> BadInput:
        """The error for a value that is not as expected."""
        found = f"found {shortened(self.values[key])}" if self.values.get(key) is not None else "missing"
        return BadInput(f"{found}, expected {expected}", file=self.file, field=f"{self.key}.{key}")

    def finish(self) -> None:
        """Raise BadInput for a setting that nobody read."""
        for key, value in self.values.items():
            if key not in self._read and value is not None:
                problem = f"found {shortened(value)}, a setting that {self.values.get('quant_method')} does not know"
                raise BadInput(problem, file=self.file, field=f"{self.key}.{key}")


def shortened(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
