"""Reading one safetensors file without trusting it, and writing one without holding it in memory.

The header is checked by the `safetensors` package before anything else looks at the file, because MLX crashes on
files which that package rejects. Writing is our own for one reason: both packages want all tensors in memory at
once, and a conversion must need far less than the model.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from ..errors import BadInput
from .source import Tensor

CODES: dict[mx.Dtype, str] = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
}
DOUBLE = "F64"
"""Read as float32: no GPU of Apple computes in float64."""
BYTES = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
"""Floats of 8 bits, read as bytes: MLX has no dtype for them."""
DTYPES = {code: dtype for dtype, code in CODES.items()} | {DOUBLE: mx.float32} | dict.fromkeys(BYTES, mx.uint8)
UNMAPPED = (DOUBLE, "F8_E5M2")
"""MLX does not read a file with such a tensor in it."""
LONGEST = 2**31 - 1
"""MLX counts the length of an axis in 32 bits."""
LFS = b"version https://git-lfs.github.com"


class SafetensorsFile:
    """One file: the tensors in it, and their values on demand. Raises BadInput if the file is not sound."""

    def __init__(self, path: Path):
        self.path = path
        check_regular(path)
        _check(path)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size), object_pairs_hook=self._without_repeats)
            self._stamp = _stamp(file)
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._start = 8 + size
        self._entries: dict[str, dict[str, Any]] = header
        self.tensors = {name: self._tensor(name, entry) for name, entry in header.items()}
        self._mapped: dict[str, mx.array] | None = None

    def _without_repeats(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object of the header; readers disagree about which of two equal keys counts."""
        found = dict(pairs)
        if len(found) < len(pairs):
            repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise BadInput("stands twice in the header", file=self.path, field=repeated)
        return found

    def _tensor(self, name: str, entry: Mapping[str, Any]) -> Tensor:
        if entry["dtype"] not in DTYPES:
            problem = f"found dtype {entry['dtype']}, expected one of {', '.join(DTYPES)}"
            raise BadInput(problem, file=self.path, field=name)
        if any(side > LONGEST for side in entry["shape"]):
            problem = f"found shape {entry['shape']}, expected sides of at most {LONGEST}"
            raise BadInput(problem, file=self.path, field=name)
        code = entry["dtype"]
        return Tensor(tuple(entry["shape"]), DTYPES[code], code if code in BYTES else None)

    def read(self, name: str) -> mx.array:
        """The values of a tensor, read now; BadInput if the file has changed since it was opened."""
        start, stop = self._entries[name]["data_offsets"]
        return self._values(name, start, stop, self.tensors[name].shape)

    def blocks(self, name: str, rows: int) -> Iterator[mx.array]:
        """The values of a tensor, `rows` rows of its first axis at a time."""
        shape, (start, stop) = self.tensors[name].shape, self._entries[name]["data_offsets"]
        if not shape or start == stop:
            yield self.read(name)
            return
        width = (stop - start) // shape[0]
        for first in range(0, shape[0], rows):
            last = min(first + rows, shape[0])
            yield self._values(name, start + first * width, start + last * width, (last - first, *shape[1:]))

    def _values(self, name: str, start: int, stop: int, shape: tuple[int, ...]) -> mx.array:
        """The values that lie in these bytes of the file's data."""
        with self.path.open("rb") as file:
            self._check_unchanged(file)
            file.seek(self._start + start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            problem = f"found {len(data)} bytes, expected {stop - start}: the file shrank"
            raise BadInput(problem, file=self.path, field=name)
        return _array(data, self._entries[name]["dtype"], shape)

    def _check_unchanged(self, file: BinaryIO) -> None:
        if _stamp(file) != self._stamp:
            raise BadInput("the file has changed since it was opened", file=self.path)

    def mapped(self, name: str) -> mx.array:
        """The values of a tensor, which MLX reads when they are first used."""
        if any(entry["dtype"] in UNMAPPED for entry in self._entries.values()):
            return self.read(name)
        if self._mapped is None:
            with self.path.open("rb") as file:
                self._check_unchanged(file)
            self._mapped = _mx_load(self.path)
        return self._mapped[name]


def check_regular(path: Path) -> None:
    """Refuse what is not a plain file with content: a folder, a pipe, a dangling link, a Git LFS pointer."""
    if not path.exists():
        raise BadInput("not found", file=path)
    if not path.is_file():
        raise BadInput("is not a regular file", file=path)
    with path.open("rb") as file:
        if file.read(len(LFS)) == LFS:
            raise BadInput("Git LFS pointer, not weights; fetch the file itself with `git lfs pull`", file=path)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    """What changes when a file does: its size and the time of the last change, in nanoseconds."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _check(path: Path) -> None:
    """Let the safetensors package judge the header, which is what it is good at."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise BadInput(f"not a sound safetensors file: {error}", file=path) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot be read: {error}", file=path) from None


def _mx_load(path: Path) -> dict[str, mx.array]:
    try:
        loaded = mx.load(str(path), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"MLX cannot read it: {error}", file=path) from None
    assert isinstance(loaded, dict)
    return loaded


def _array(data: bytes, code: str, shape: tuple[int, ...]) -> mx.array:
    """Little-endian bytes as an array."""
    if not data:
        return mx.zeros(shape, DTYPES[code])
    if code == DOUBLE:
        return _from_doubles(data).reshape(shape)
    dtype = DTYPES[code]
    # Words of the right size, since MLX counts in 32 bits and a tensor may have more bytes than that.
    code_of_size: Any = {1: "B", 2: "H", 4: "I", 8: "Q"}
    words: Any = memoryview(data).cast(code_of_size[dtype.size], [len(data) // dtype.size])
    return mx.array(words).view(dtype).reshape(shape)


def _from_doubles(data: bytes) -> mx.array:
    import numpy as np  # a third of the time that the package needs to be imported, for a dtype that is rare

    with np.errstate(over="ignore"):
        return mx.array(np.frombuffer(data, "<f8").astype(np.float32))


class SafetensorsWriter:
    """Writes a file whose tensors are announced first and then given one after the other, in that order."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None):
        self._pending = dict(tensors)
        self._missing = {name: tensor.nbytes for name, tensor in tensors.items()}
        self._file: BinaryIO = path.open("wb")
        header = json.dumps(_header(tensors, {"format": "mlx", **(metadata or {})}), separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # data begins at a multiple of 8 bytes
        self._file.write(len(header).to_bytes(8, "little") + header)

    def write(self, name: str, value: mx.array) -> None:
        """The values of the next tensor, all of them or the next rows."""
        tensor = self._pending[name]
        assert name == next(iter(self._pending)), f"{name} is given too early"
        assert value.dtype == tensor.dtype and value.shape[1:] == tensor.shape[1:], f"{name} is not as announced"
        assert value.nbytes <= self._missing[name], f"{name} has too many rows"
        rows: Any = value.flatten().view(mx.uint8)
        self._file.write(memoryview(rows))
        self._missing[name] -= value.nbytes
        if self._missing[name] == 0:
            del self._pending[name]

    def close(self) -> None:
        """Finish the file and see it on the disk."""
        assert not self._pending, f"announced but not written: {next(iter(self._pending))}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is, after an error."""
        self._file.close()


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        place = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        offset += tensor.nbytes
    return header
