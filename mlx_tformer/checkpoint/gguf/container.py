"""The GGUF container: header, metadata and table of tensors, every count held against the size of the file before use.

The layout is the one that the ggml project documents (`docs/gguf.md` in its repository), versions 2 and 3,
little-endian: magic, version, two counts, the metadata, the table of tensors, then from the next multiple of the
alignment the data, each tensor padded to the alignment. Everything is read with bounded reads and not through a
memory map: a map of a file that shrinks ends the process with SIGBUS, a read that comes back short is an error like
any other.
"""

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BadInput, InputOutputError

VERSIONS = (2, 3)
LFS_POINTER = b"version https://git-lfs"
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = tuple(8 << power for power in range(14))  # 8 to 65536
KEY_LIMIT, NAME_LIMIT = 65_535, 64  # bytes, by the format
# Real files stay far below these; they bound the time and memory that a hostile table can cost.
MOST_KEYS, MOST_TENSORS, MOST_STRINGS, LONGEST_STRING = 1 << 16, 1 << 16, 1_500_000, 1 << 25

NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True)
class TensorType:
    """How ggml stores values: blocks of `elements` numbers in `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    30: TensorType("BF16", 1, 2),
}


@dataclass(frozen=True)
class TensorInfo:
    """One row of the table of tensors; `shape` is outermost first, as in numpy (the file has it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # from the start of the file, in bytes

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) // self.type.elements * self.type.nbytes


@dataclass(frozen=True)
class Container:
    """A checked GGUF file: its metadata and where its tensors are.

    Arrays of numbers in the metadata are numpy arrays, arrays of strings are lists.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    stamp: tuple[int, int]  # size in bytes and time of change, in ns

    def raw(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The stored bytes of a tensor's rows from `start` to `stop`, uint8 (rows, bytes a row); a vector is one row.

        Raises BadInput if the file has changed since it was opened.
        """
        every = prod(info.shape[:-1])
        rows, row_bytes = (every if stop is None else min(stop, every)) - start, info.nbytes // every
        data = np.empty((rows, row_bytes), np.uint8)
        with _opened(self.path) as stream:
            if _stamp(stream) == self.stamp:
                stream.seek(info.offset + start * row_bytes)
                if stream.readinto(data.data) == data.nbytes:
                    return data
        raise BadInput("the file changed while it was read", file=self.path, field=info.name)


def read_container(path: Path) -> Container:
    """Read and check everything but the data of the tensors.

    Raises BadInput, naming the key or the tensor, for whatever is not as the format says, and InputOutputError if the
    file cannot be read.
    """
    with _opened(path) as stream:
        stamp = _stamp(stream)
        cursor = _Cursor(stream, path, stamp[0])
        version = _version(cursor)
        tensors, keys = _count(cursor, "tensors", 24, MOST_TENSORS), _count(cursor, "metadata keys", 13, MOST_KEYS)
        if tensors == 0:
            raise cursor.wrong("0 tensors", "1 or more", "number of tensors")
        metadata = _metadata(cursor, keys)
        table = [_tensor_row(cursor, index) for index in range(tensors)]
        placed = _place(cursor, table, _alignment(cursor, metadata))
        return Container(path, version, metadata, placed, stamp)


def shown(name: str) -> str:
    """A name from a file, fit for one line of an error: escaped if it does not print, and cut if it is long.

    >>> shown("two\\nlines")
    'two\\\\nlines'
    """
    text = name if name.isprintable() else name.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else f"{text[:77]}..."


def brief(value: object) -> str:
    """A value from a file as an error shows it: never longer than a line can bear.

    >>> brief(np.zeros(3)), brief("x" * 100)
    ('an array of 3', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...")
    """
    if isinstance(value, np.ndarray | list):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        # A FIFO would block for ever and a folder cannot be read, so neither is opened.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput("not a regular file", file=path)
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise InputOutputError(f"{path}: {error.strerror or error}") from error


def _stamp(stream: BufferedReader) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


class _Cursor:
    """Reads forward and never past the end of the file; `field` is what is being read, for the errors."""

    def __init__(self, stream: BufferedReader, path: Path, size: int):
        self.stream, self.path, self.left, self.size = stream, path, size, size
        self.strings_left = MOST_STRINGS
        self.field = "header"

    @property
    def position(self) -> int:
        return self.size - self.left

    def wrong(self, found: object, expected: object, field: str | None = None) -> BadInput:
        return BadInput(f"found {found}, expected {expected}", file=self.path, field=field or self.field)

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self.wrong(f"{self.left} bytes up to the end of the file", f"{count} bytes: {what}")
        self.left -= count
        data = self.stream.read(count)
        if len(data) != count:
            raise BadInput("the file changed while it was read", file=self.path, field=self.field)
        return data

    def number(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def text(self, what: str, limit: int = LONGEST_STRING) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > limit:
            raise self.wrong(f"{what} of {length} bytes", f"at most {limit}")
        data = self.take(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} with the byte 0x{data[error.start]:02x} at {error.start}", "UTF-8") from None


def _version(cursor: _Cursor) -> int:
    magic = cursor.take(min(4, cursor.left), "the letters GGUF")
    if magic == LFS_POINTER[:4] and cursor.take(min(len(LFS_POINTER) - 4, cursor.left), "text") == LFS_POINTER[4:]:
        raise cursor.wrong("a Git LFS pointer", "the weights themselves (git lfs pull)", "magic")
    if magic != b"GGUF":
        raise cursor.wrong(f"the bytes {magic.hex(' ') or '(none)'}", "47 47 55 46 (GGUF)", "magic")
    version = cursor.number("<I", "the version")
    if version in VERSIONS:
        return int(version)
    # A small version with its bytes the other way round.
    found = f"a big-endian file ({version:#010x})" if version & 0xFFFF == 0 and version else f"version {version}"
    raise cursor.wrong(found, "version 2 or 3, little-endian", "version")


def _count(cursor: _Cursor, what: str, least: int, most: int) -> int:
    """A number of things that take at least `least` bytes each."""
    found = cursor.number("<Q", f"the number of {what}")
    limit = min(most, cursor.left // least)
    if found > limit:
        raise cursor.wrong(found, f"at most {limit} in a file of {cursor.size} bytes", f"number of {what}")
    return int(found)


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.field = f"metadata key {index}"
        key = cursor.text("a key", KEY_LIMIT)
        cursor.field = shown(key)
        if not key or key in metadata:
            raise cursor.wrong("a key that is empty or was there before", "each key once", f"metadata key {index}")
        metadata[key] = _value(cursor, cursor.number("<I", "the type of the value"))
    return metadata


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind == STRING:
        return cursor.text("a string")
    if kind == ARRAY:
        return _array(cursor)
    if kind not in NUMBERS:
        raise cursor.wrong(f"value type {kind}", "a type from 0 to 12")
    return _numbers(cursor, kind, 1)[0].item()


def _array(cursor: _Cursor) -> Any:
    kind = cursor.number("<I", "the type of the elements")
    count = cursor.number("<Q", "the number of elements")
    if kind == STRING:
        return _strings(cursor, count)
    if kind not in NUMBERS:
        raise cursor.wrong(f"elements of type {kind}", "numbers or strings")
    return _numbers(cursor, kind, count)


def _numbers(cursor: _Cursor, kind: int, count: int) -> np.ndarray:
    dtype = np.dtype(NUMBERS[kind])
    values = np.frombuffer(cursor.take(count * dtype.itemsize, f"{count} of type {dtype.name}"), dtype)
    if kind != BOOL:
        return values
    if np.any(values > 1):
        raise cursor.wrong("a truth value above 1", "0 or 1")
    return values == 1


def _strings(cursor: _Cursor, count: int) -> list[str]:
    limit = min(cursor.strings_left, cursor.left // 8)
    if count > limit:
        raise cursor.wrong(f"{count} strings", f"at most {limit}")
    cursor.strings_left -= count
    field, strings = cursor.field, []
    for index in range(count):
        cursor.field = f"{field}[{index}]"
        strings.append(cursor.text("a string"))
    cursor.field = field
    return strings


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    found = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(found) is not int or found not in ALIGNMENTS:
        raise cursor.wrong(brief(found), "a power of two from 8 to 65536", "general.alignment")
    return found


def _tensor_row(cursor: _Cursor, index: int) -> TensorInfo:
    """One row of the table; its offset is still counted from the start of the data."""
    cursor.field = f"tensor {index}"
    name = cursor.text("a name", NAME_LIMIT)
    cursor.field = shown(name) or cursor.field
    dims = cursor.number("<I", "the number of dimensions")
    if not 1 <= dims <= 4:
        raise cursor.wrong(f"{dims} dimensions", "1 to 4")
    shape = tuple(cursor.number("<Q", "a dimension") for _ in range(dims))[::-1]
    kind = _tensor_type(cursor, cursor.number("<I", "the type of the tensor"))
    if 0 in shape or shape[-1] % kind.elements:
        raise cursor.wrong(f"shape {shape} of type {kind.name}", f"sizes above 0, rows a multiple of {kind.elements}")
    return TensorInfo(name, shape, kind, cursor.number("<Q", "the offset of the tensor"))


def _tensor_type(cursor: _Cursor, number: int) -> TensorType:
    if number in TENSOR_TYPES:
        return TENSOR_TYPES[number]
    from gguf import GGMLQuantizationType

    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    known = ", ".join(kind.name for kind in TENSOR_TYPES.values())
    raise cursor.wrong(f"tensor type {names.get(number, number)}", f"one of {known}")


def _place(cursor: _Cursor, table: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """Tensors by name, at offsets from the start of the file; each has to begin where the one before ends, padded."""
    start = cursor.position + -cursor.position % alignment
    end, placed = 0, {}
    for info in table:
        cursor.field = shown(info.name) or "name of a tensor"
        if not info.name or info.name in placed:
            raise cursor.wrong("a tensor without a name or with one that was there before", "each name once")
        expected = end + -end % alignment
        if info.offset != expected:
            raise cursor.wrong(
                f"offset {info.offset}", f"{expected}: after the tensor before, on a multiple of {alignment}"
            )
        end = info.offset + info.nbytes
        if start + end > cursor.size:
            raise cursor.wrong(
                f"a file of {cursor.size} bytes", f"{start + end} or more: the data of this tensor end there"
            )
        placed[info.name] = TensorInfo(info.name, info.shape, info.type, start + info.offset)
    return placed
