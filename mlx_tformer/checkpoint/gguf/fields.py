"""Typed reading of a GGUF file's metadata, which remembers what was read so that the rest can be refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BadInput
from .container import brief, shown


class Fields:
    """The metadata under one prefix: `Fields(path, metadata, "llama.").whole("block_count")`.

    A default makes a key optional; without one, a key that is missing raises BadInput.

    >>> fields = Fields(Path("m.gguf"), {"llama.block_count": 2, "llama.colour": "red"}, "llama.")
    >>> fields.whole("block_count"), fields.unread()
    (2, ['llama.colour'])
    >>> fields.number("scale")
    Traceback (most recent call last):
    mlx_tformer.errors.BadInput: m.gguf: llama.scale: found nothing, expected a number above 0
    """

    def __init__(self, path: Path, metadata: dict[str, Any], prefix: str = ""):
        self.path, self.prefix, self._metadata = path, prefix, metadata
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """True if the file has the key."""
        return self.prefix + key in self._metadata

    def get(self, key: str) -> Any:
        """The value as it is, None where there is none."""
        self._read.add(self.prefix + key)
        return self._metadata.get(self.prefix + key)

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of `least` or more."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < least:
            raise self.wrong(key, f"a whole number of {least} or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; a float32 becomes the shortest decimal that is the same float32, as 1e-05."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a number above 0")
        is_float32 = value < 3e38 and float(np.float32(value)) == value
        return float(str(np.float32(value))) if is_float32 else float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "a truth value")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings."""
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "an array of strings")
        return value

    def numbers(self, key: str, count: int, default: float | None = None) -> np.ndarray:
        """`count` numbers."""
        value = self.get(key)
        if value is None and default is not None:
            return np.full(count, default)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.wrong(key, f"an array of {count} numbers")
        return value

    def unread(self) -> list[str]:
        """The keys under the prefix that nobody asked for, in full, in the file's order."""
        return [key for key in self._metadata if key.startswith(self.prefix) and key not in self._read]

    def wrong(self, key: str, expected: str) -> BadInput:
        """The error for a key whose value is not as expected."""
        full = self.prefix + key
        found = brief(self._metadata[full]) if full in self._metadata else "nothing"
        return BadInput(f"found {found}, expected {expected}", file=self.path, field=shown(full))

    def wrong_tensor(self, name: str, found: str, expected: str) -> BadInput:
        """The error for a tensor that is not as expected."""
        return BadInput(f"found {found}, expected {expected}", file=self.path, field=shown(name))
