"""Reading a checkpoint that PyTorch wrote, `pytorch_model.bin` or a .pt file, without PyTorch and without unpickling.

Such a file holds a pickle, which pickle_machine.py follows, and beside it the bytes of the storages that tensors are
views of. Two containers: a zip archive (`torch.save` since 1.6), whose storages are uncompressed entries, and before
that five pickles in a row with the storages behind them. Values are read from their place in the file when they are
asked for. Layouts: `torch/serialization.py` of PyTorch 2.13.
"""

import io
import os
import struct
import zipfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from ..errors import BadInput
from .pickle_machine import Kind, Machine, Storage, StorageType, View, short
from .safetensors_file import LONGEST, check_regular
from .source import Tensor

PICKLE_BYTES = 16 * 2**20
"""A tensor takes some 200 bytes of pickle."""
DIRECTORY_BYTES = 8 * 2**20
"""An entry of a zip archive takes some 70 bytes of its directory."""
LAST_OFFSET = 2**62
"""Beyond, the system itself refuses to seek."""
ZIP = b"PK\x03\x04"
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""What the first two pickles of the older container hold."""
WRAPPERS = ("state_dict", "model", "module")
"""Keys under which a state dict lies in what training programs save."""


class PickleFile:
    """One file: the tensors of the state dict in it, and their values on demand.

    The state dict is all that was saved, or lies under one of `WRAPPERS` in it. Raises BadInput if the file is not
    sound, or holds or asks for anything else than plain tensors, numbers and text.
    """

    def __init__(self, path: Path):
        self.path = path
        check_regular(path)
        with path.open("rb") as file:
            self._stamp = _stamp(file)
            is_zip = file.read(len(ZIP)) == ZIP
            found, self._starts = _read_zip(path, file) if is_zip else _read_legacy(path, file)
        entries, self.notes = _state_dict(path, found)
        self._views = {name: view for name, view in entries.items() if isinstance(view, View)}
        self.tensors = {name: self._tensor(name, view) for name, view in self._views.items()}

    def _tensor(self, name: str, view: View) -> Tensor:
        """The size and kind of a tensor, whose values must all lie in its storage."""
        if any(side > LONGEST for side in view.shape):
            problem = f"found shape {short(view.shape)}, expected sides of at most {LONGEST}"
            raise BadInput(problem, file=self.path, field=short(name))
        stop, end = (view.offset + view.span) * view.kind.size, view.storage.nbytes
        if stop > end:
            problem = f"found values up to byte {short(stop)} of a storage of {end}"
            raise BadInput(problem, file=self.path, field=short(name))
        if prod(view.shape) * view.kind.size > end:
            problem = f"found shape {view.shape} over a storage of {end} bytes, expected no value to be repeated"
            raise BadInput(problem, file=self.path, field=short(name))
        return Tensor(view.shape, view.kind.dtype)

    def read(self, name: str) -> mx.array:
        """The values of a tensor, read now; BadInput if the file has changed since it was opened."""
        return self._values(name, self._views[name])

    def mapped(self, name: str) -> mx.array:
        """The values of a tensor, read now: MLX maps no such files."""
        return self.read(name)

    def blocks(self, name: str, rows: int) -> Iterator[mx.array]:
        """The values of a tensor, `rows` rows of its first axis at a time; one that lies transposed is read whole."""
        view = self._views[name]
        if not view.shape or 0 in view.shape:
            yield self.read(name)
            return
        whole = None if view.in_rows else self.read(name)
        for start in range(0, view.shape[0], rows):
            stop = min(start + rows, view.shape[0])
            yield self._values(name, view.rows(start, stop)) if whole is None else whole[start:stop]

    def _values(self, name: str, view: View) -> mx.array:
        if 0 in view.shape:
            return mx.zeros(view.shape, view.kind.dtype)
        size = view.span * view.kind.size
        with self.path.open("rb") as file:
            if _stamp(file) != self._stamp:
                raise BadInput("the file has changed since it was opened", file=self.path)
            file.seek(self._starts[view.storage.key] + view.offset * view.kind.size)
            data = file.read(size)
        if len(data) != size:
            problem = f"found {len(data)} bytes, expected {size}: the file shrank"
            raise BadInput(problem, file=self.path, field=short(name))
        return _array(data, view)


def _array(data: bytes, view: View) -> mx.array:
    """The values of a view in order, from the bytes of its span."""
    import numpy as np  # a third of the time that the package needs to be imported

    # The stride of an axis of one means nothing, and can be too large for numpy.
    strides = [0 if side == 1 else s * view.kind.size for side, s in zip(view.shape, view.strides, strict=True)]
    values = np.lib.stride_tricks.as_strided(np.frombuffer(data, view.kind.code), view.shape, strides)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return mx.array(values.astype(np.float32))
    return mx.array(values).view(view.kind.dtype)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    """What changes when a file does: its size and the time of the last change, in nanoseconds."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


# --- the state dict in what was saved ---


def _state_dict(path: Path, found: Any) -> tuple[dict[str, Any], list[str]]:
    """The state dict, and notes on what is passed over: numbers and text, and what lies beside the state dict."""
    if not isinstance(found, dict):
        raise BadInput(f"holds {_said(found)}, expected a state dict", file=path)
    if _has_tensors(found):
        return _entries(path, found)
    inner = [key for key in WRAPPERS if _has_tensors(found.get(key))]
    if len(inner) != 1:
        keys = ", ".join(short(key) for key in list(found)[:5]) or "nothing"
        problem = f"found {keys}; expected tensors by name, or a state dict under one of {', '.join(WRAPPERS)}"
        raise BadInput(problem, file=path)
    entries, notes = _entries(path, found[inner[0]])
    beside = [str(key) for key in found if key != inner[0]]
    return entries, notes + ([_passed_over(path, beside, f"which lies beside {inner[0]}")] if beside else [])


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(entry, View) for entry in value.values())


def _entries(path: Path, found: dict[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    for name, value in found.items():
        if not isinstance(name, str):
            raise BadInput(f"found {short(name)} for a name, expected text", file=path)
        if not isinstance(value, View | StorageType | Kind | str | int | float | None):
            raise BadInput(f"found {_said(value)}, expected a tensor", file=path, field=short(name))
    plain = [name for name, value in found.items() if not isinstance(value, View)]
    return found, [_passed_over(path, plain, "which is no tensor")] if plain else []


def _passed_over(path: Path, names: list[str], why: str) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"ignored {', '.join(map(short, names[:5]))}{more} in {path.name}, {why}"


def _said(value: Any) -> str:
    """A word for what a pickle made, never its content, which may be endless."""
    names = {View: "a tensor", Storage: "a storage", type(None): "nothing", dict: "a dict", list: "a list"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


# --- the containers ---


def _read_zip(path: Path, file: BinaryIO) -> tuple[Any, dict[str, int]]:
    """What was saved, and where each storage starts."""
    places = _places(path, file)
    programs = [name for name in places if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(programs) != 1:
        raise BadInput(f"found {len(programs)} entries data.pkl, expected one: not a PyTorch checkpoint", file=path)
    home = programs[0].removesuffix("data.pkl")
    _check_little_endian(path, file, places.get(f"{home}byteorder"))
    start, size = places[programs[0]]
    if size > PICKLE_BYTES:
        raise BadInput(f"found {size} bytes, expected at most {PICKLE_BYTES}", file=path, field="data.pkl")
    file.seek(start)
    machine = Machine(path)
    found = machine.run(io.BytesIO(file.read(size)))
    starts = {}
    for key, storage in machine.storages.items():
        starts[key], size = places.get(f"{home}data/{key}", (0, -1))
        if size != storage.nbytes:
            there = "is missing" if size < 0 else f"has {size} bytes"
            raise BadInput(f"{there}, expected {short(storage.nbytes)} bytes", file=path, field=f"data/{short(key)}")
    return found, starts


def _check_little_endian(path: Path, file: BinaryIO, place: tuple[int, int] | None) -> None:
    """Files from before PyTorch 2.1 do not say, and are."""
    if place is None:
        return
    file.seek(place[0])
    order = file.read(min(place[1], 8))
    if order != b"little":
        raise BadInput(f"found {order!r}, expected b'little'", file=path, field="byteorder")


class _Careful(io.FileIO):
    """A file that reads only so much at once: zipfile takes a file's word for the size of its directory."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, os.fstat(self.fileno()).st_size - self.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > DIRECTORY_BYTES:
            raise ValueError(f"found a directory of {wanted} bytes, expected at most {DIRECTORY_BYTES}")
        return super().read(wanted) or b""


def _places(path: Path, file: BinaryIO) -> dict[str, tuple[int, int]]:
    """Where each entry of a zip archive starts, and its size; entries that are packed, overlap or have names that lead
    elsewhere are refused."""
    try:
        with _Careful(path) as careful, zipfile.ZipFile(careful) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, OverflowError, OSError, ValueError) as error:
        raise BadInput(f"not a sound zip archive: {short(error)}", file=path) from None
    places: dict[str, tuple[int, int]] = {}
    for entry in entries:
        name = entry.filename
        if name in places or name.startswith("/") or "\\" in name or ".." in name.split("/"):
            problem = "stands twice" if name in places else "leads out of the archive"
            raise BadInput(f"the name of an entry {problem}", file=path, field=short(name))
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            raise BadInput("is compressed or encrypted, expected plain bytes", file=path, field=short(name))
        places[name] = _start(path, file, entry), entry.file_size
    end = os.fstat(file.fileno()).st_size
    in_order = sorted(places.items(), key=lambda item: item[1], reverse=True)
    for name, (start, size) in in_order:
        if start + size > end:
            problem = f"found {size} bytes, expected fewer: they reach into the next entry or beyond the file's end"
            raise BadInput(problem, file=path, field=short(name))
        end = start
    return places


def _start(path: Path, file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes start: behind a header of its own, which is padded so that they are aligned."""
    header = b""
    if 0 <= entry.header_offset <= LAST_OFFSET:
        file.seek(entry.header_offset)
        header = file.read(30)
    if len(header) != 30 or not header.startswith(ZIP):
        raise BadInput("has no header where the directory says", file=path, field=short(entry.filename))
    name, extra = struct.unpack("<HH", header[26:])
    return entry.header_offset + 30 + name + extra


def _read_legacy(path: Path, file: BinaryIO) -> tuple[Any, dict[str, int]]:
    """What was saved, and where each storage starts, in the container of PyTorch before 1.6."""
    file.seek(0)
    data = file.read(PICKLE_BYTES)
    head, machine = io.BytesIO(data), Machine(path)
    if not data.startswith(b"\x80") or machine.run(head) != MAGIC:
        raise BadInput("not a PyTorch checkpoint: neither a zip archive nor the magic number", file=path)
    if machine.run(head) != PROTOCOL:
        raise BadInput(f"found another version of the container than {PROTOCOL}", file=path)
    machine.run(head)  # the sizes of C's types on the machine that wrote it
    found, keys = machine.run(head), machine.run(head)
    if not isinstance(keys, list) or any(not isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
        raise BadInput("found something else than keys of storages behind the state dict", file=path)
    if set(keys) != machine.storages.keys():
        raise BadInput(f"found {len(keys)} storages, expected those of {len(machine.storages)} tensors", file=path)
    starts, place, end = {}, head.tell(), os.fstat(file.fileno()).st_size
    for key in keys:
        storage = machine.storages[key]
        file.seek(place)
        count = int.from_bytes(file.read(8), "little")
        starts[key] = place + 8
        place += 8 + storage.nbytes
        if count != storage.count or place > end:
            problem = f"found {count} values and {max(0, end - starts[key])} bytes, expected {storage.nbytes} bytes"
            raise BadInput(problem, file=path, field=f"storage {short(key)}")
    return found, starts
