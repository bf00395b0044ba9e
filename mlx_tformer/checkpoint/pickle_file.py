"""Reading a checkpoint that PyTorch wrote, `pytorch_model.bin` or a .pt file, without PyTorch and without unpickling.

Such a file holds a pickle, which is a program for a small stack machine, and beside it the bytes of the storages that
tensors are views of. Python's own unpickler imports and calls whatever the program names. The machine here knows the
few opcodes that a state dict is written with and a table of the names that it may ask for; each stands for a function
of this module that only takes notes. Any other opcode or name is an error, so that nothing of a file ever runs.

Two containers: a zip archive (`torch.save` since 1.6), whose storages are uncompressed entries, and before that five
pickles in a row with the storages behind them. Values are read from their place in the file when they are asked for.
Layouts: `torch/serialization.py` and `torch/_utils.py` of PyTorch 2.13; opcodes: Python's `pickletools`.
"""

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from pickletools import genops
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ..errors import BadInput
from .safetensors_file import LONGEST, check_regular
from .source import Tensor

PICKLE_BYTES = 32 * 2**20
"""A tensor takes some 200 bytes of pickle."""
OPCODES = 1_000_000
"""A tensor takes some 35 opcodes: room for 28,000 tensors in a file."""
DIRECTORY_BYTES = 8 * 2**20
"""An entry of a zip archive takes some 70 bytes of its directory."""
AXES = 8
ZIP = b"PK\x03\x04"
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""What the first two pickles of the older container hold."""
WRAPPERS = ("state_dict", "model", "module")
"""Keys under which a state dict lies in what training programs save."""


@dataclass(frozen=True)
class _Kind:
    """What a storage holds: what it becomes here, and what numpy reads it as; bits that numpy has no type for are read
    as whole numbers."""

    dtype: mx.Dtype
    code: str

    @property
    def size(self) -> int:
        return np.dtype(self.code).itemsize


KINDS = {
    "float64": _Kind(mx.float32, "<f8"),  # no GPU of Apple computes in float64
    "float32": _Kind(mx.float32, "<u4"),
    "float16": _Kind(mx.float16, "<u2"),
    "bfloat16": _Kind(mx.bfloat16, "<u2"),
    "int64": _Kind(mx.int64, "<u8"),
    "int32": _Kind(mx.int32, "<u4"),
    "int16": _Kind(mx.int16, "<u2"),
    "int8": _Kind(mx.int8, "u1"),
    "uint64": _Kind(mx.uint64, "<u8"),
    "uint32": _Kind(mx.uint32, "<u4"),
    "uint16": _Kind(mx.uint16, "<u2"),
    "uint8": _Kind(mx.uint8, "u1"),
    "bool": _Kind(mx.bool_, "u1"),
}
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True)
class _StorageType:
    """A class of storages; one without a kind holds bytes, and its tensors say what they are."""

    kind: _Kind | None


@dataclass(frozen=True)
class _Storage:
    """Bytes that tensors are views of."""

    key: str
    kind: _Kind | None
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * (1 if self.kind is None else self.kind.size)


@dataclass(frozen=True)
class _View:
    """A tensor: where its values lie in a storage, counted in values."""

    storage: _Storage
    kind: _Kind
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """From its first value to behind its last."""
        return _span(self.shape, self.strides)

    @property
    def in_rows(self) -> bool:
        """True if each row of the first axis lies behind the one before, so that rows can be read apart."""
        return bool(self.shape) and prod(self.shape) > 0 and self.strides[0] >= _span(self.shape[1:], self.strides[1:])

    def rows(self, start: int, stop: int) -> "_View":
        """The rows from `start` to before `stop`."""
        offset = self.offset + start * self.strides[0]
        return _View(self.storage, self.kind, offset, (stop - start, *self.shape[1:]), self.strides)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    last = sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))
    return last + 1 if prod(shape) else 0


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
        self._views = {name: view for name, view in entries.items() if isinstance(view, _View)}
        self.tensors = {name: self._tensor(name, view) for name, view in self._views.items()}

    def _tensor(self, name: str, view: _View) -> Tensor:
        """The size and kind of a tensor, whose values must all lie in its storage."""
        if len(view.shape) > AXES or any(side > LONGEST for side in view.shape):
            problem = f"found shape {_short(view.shape)}, expected at most {AXES} sides of at most {LONGEST}"
            raise BadInput(problem, file=self.path, field=name)
        stop, end = (view.offset + view.span) * view.kind.size, view.storage.nbytes
        if stop > end:
            problem = f"found values up to byte {_short(stop)} of a storage of {end}"
            raise BadInput(problem, file=self.path, field=name)
        if prod(view.shape) * view.kind.size > end:
            problem = f"found shape {view.shape} over a storage of {end} bytes, expected no value to be repeated"
            raise BadInput(problem, file=self.path, field=name)
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

    def _values(self, name: str, view: _View) -> mx.array:
        if 0 in view.shape:
            return mx.zeros(view.shape, view.kind.dtype)
        size = view.span * view.kind.size
        with self.path.open("rb") as file:
            if _stamp(file) != self._stamp:
                raise BadInput("the file has changed since it was opened", file=self.path)
            file.seek(self._starts[view.storage.key] + view.offset * view.kind.size)
            data = file.read(size)
        if len(data) != size:
            raise BadInput(f"found {len(data)} bytes, expected {size}: the file shrank", file=self.path, field=name)
        return _array(data, view)


def _array(data: bytes, view: _View) -> mx.array:
    """The values of a view in order, from the bytes of its span."""
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


def _short(value: object) -> str:
    """What a file says, short enough for a message."""
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


# --- the state dict in what was saved ---


def _state_dict(path: Path, found: Any) -> tuple[dict[str, Any], list[str]]:
    """The state dict, and notes on what is passed over: numbers and text, and what lies beside the state dict."""
    if not isinstance(found, dict):
        raise BadInput(f"holds {_said(found)}, expected a state dict", file=path)
    if _has_tensors(found):
        return _entries(path, found)
    inner = [key for key in WRAPPERS if _has_tensors(found.get(key))]
    if len(inner) != 1:
        keys = ", ".join(_short(key) for key in list(found)[:5]) or "nothing"
        problem = f"found {keys}; expected tensors by name, or a state dict under one of {', '.join(WRAPPERS)}"
        raise BadInput(problem, file=path)
    entries, notes = _entries(path, found[inner[0]])
    beside = [_short(key) for key in found if key != inner[0]]
    return entries, notes + ([_passed_over(path, beside, f"which lies beside {inner[0]}")] if beside else [])


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(entry, _View) for entry in value.values())


def _entries(path: Path, found: dict[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    for name, value in found.items():
        if not isinstance(name, str):
            raise BadInput(f"found {_short(name)} for a name, expected text", file=path)
        if not isinstance(value, _View | _StorageType | _Kind | str | int | float | None):
            raise BadInput(f"found {_said(value)}, expected a tensor", file=path, field=name)
    plain = [name for name, value in found.items() if not isinstance(value, _View)]
    return found, [_passed_over(path, plain, "which is no tensor")] if plain else []


def _passed_over(path: Path, names: list[str], why: str) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"ignored {', '.join(names[:5])}{more} in {path.name}, {why}"


def _said(value: Any) -> str:
    """A word for what a pickle made, never its content, which may be endless."""
    names = {_View: "a tensor", _Storage: "a storage", type(None): "nothing", dict: "a dict", list: "a list"}
    return names.get(type(value), f"a value of type {type(value).__name__.strip('_')}")


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
    machine = _Machine(path)
    found = machine.run(io.BytesIO(file.read(size)))
    starts = {}
    for key, storage in machine.storages.items():
        starts[key], size = places.get(f"{home}data/{key}", (0, -1))
        if size != storage.nbytes:
            there = "is missing" if size < 0 else f"has {size} bytes"
            raise BadInput(f"{there}, expected {_short(storage.nbytes)} bytes", file=path, field=f"data/{_short(key)}")
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
        raise BadInput(f"not a sound zip archive: {_short(error)}", file=path) from None
    places: dict[str, tuple[int, int]] = {}
    for entry in entries:
        name = entry.filename
        if name in places or name.startswith("/") or "\\" in name or ".." in name.split("/"):
            problem = "stands twice" if name in places else "leads out of the archive"
            raise BadInput(f"the name of an entry {problem}", file=path, field=_short(name))
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            raise BadInput("is compressed or encrypted, expected plain bytes", file=path, field=_short(name))
        places[name] = _start(path, file, entry), entry.file_size
    end = os.fstat(file.fileno()).st_size
    in_order = sorted(places.items(), key=lambda item: item[1], reverse=True)
    for name, (start, size) in in_order:
        if start + size > end:
            problem = f"found {size} bytes, expected fewer: they reach into the next entry or beyond the file's end"
            raise BadInput(problem, file=path, field=_short(name))
        end = start
    return places


def _start(path: Path, file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes start: behind a header of its own, which is padded so that they are aligned."""
    file.seek(entry.header_offset)
    header = file.read(30)
    if len(header) != 30 or not header.startswith(ZIP):
        raise BadInput("has no header where the directory says", file=path, field=_short(entry.filename))
    name, extra = struct.unpack("<HH", header[26:])
    return entry.header_offset + 30 + name + extra


def _read_legacy(path: Path, file: BinaryIO) -> tuple[Any, dict[str, int]]:
    """What was saved, and where each storage starts, in the container of PyTorch before 1.6."""
    file.seek(0)
    head = io.BytesIO(file.read(PICKLE_BYTES))
    machine = _Machine(path)
    if head.getvalue()[:1] != b"\x80" or machine.run(head) != MAGIC:
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
            raise BadInput(problem, file=path, field=f"storage {_short(key)}")
    return found, starts


# --- what a pickle may ask for ---


def _ordered(pairs: Iterable[Any] = ()) -> dict[Any, Any]:
    """An OrderedDict; Python 2 gave it its content at once, as a list of pairs."""
    made: dict[Any, Any] = {}
    for key, value in pairs:
        _put(made, key, value)
    return made


def _put(target: Any, key: Any, value: Any) -> None:
    if not isinstance(target, dict) or not isinstance(key, str | int | float | None):
        # Python hashes a tuple by hashing what is in it, with no regard to depth.
        raise ValueError("only dicts take entries, and only text and numbers are keys")
    if key in target:
        raise ValueError(f"{_short(key)} stands twice in a dict")
    target[key] = value


def _counts(values: Any) -> tuple[int, ...]:
    """A shape or strides; the class torch.Size is a tuple as well."""
    if not isinstance(values, tuple | list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError("expected a tuple of whole numbers of 0 or more")
    return tuple(values)


def _storage(where: Any) -> _Storage:
    """A storage by what the pickle says of it: its class, key, device and number of values."""
    match where:
        case ("storage", _StorageType(kind=kind), str(key), str(), int(count)) if count >= 0:
            return _Storage(key, kind, count)
        case ("storage", _StorageType(kind=kind), str(key), str(), int(count), None) if count >= 0:
            return _Storage(key, kind, count)
    raise ValueError("expected storage, class, key, device and count")


def _view(storage: Any, kind: Any, offset: Any, shape: Any, strides: Any, metadata: Any) -> _View:
    shape, strides = _counts(shape), _counts(strides)
    (offset,) = _counts((offset,))
    if not isinstance(storage, _Storage) or not isinstance(kind, _Kind) or len(shape) != len(strides):
        raise ValueError("expected a tensor's storage, offset, shape and strides")
    if metadata:
        raise ValueError("a tensor is to be negated or conjugated")
    return _View(storage, kind, offset, shape, strides)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any = None, hooks: Any = None, metadata: Any = None
) -> _View:
    """A tensor of its storage's kind."""
    if not isinstance(storage, _Storage):
        raise ValueError("expected a tensor's storage")
    return _view(storage, storage.kind, offset, shape, strides, metadata)


def _tensor_of_kind(
    storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any, hooks: Any, kind: Any, metadata: Any = None
) -> _View:
    """A tensor of a kind that no class of storages is for."""
    return _view(storage, kind, offset, shape, strides, metadata)


def _parameter(data: Any, gradient: Any = None, hooks: Any = None) -> _View:
    if not isinstance(data, _View):
        raise ValueError("expected a parameter's tensor")
    return data


GLOBALS: dict[str, Any] = {
    "collections.OrderedDict": _ordered,
    "torch.Size": _counts,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_kind,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.storage.UntypedStorage": _StorageType(None),
    **{f"torch.{name}": _StorageType(KINDS[kind]) for name, kind in STORAGES.items()},
    **{f"torch.{name}": kind for name, kind in KINDS.items()},
}


# --- the machine ---


@dataclass
class _Machine:
    """Follows pickles without running them; it never recurses, and takes memory only as the pickles are long."""

    path: Path
    storages: dict[str, _Storage] = field(default_factory=dict)
    _steps: int = 0
    _stack: list[Any] = field(default_factory=list)
    _below: list[list[Any]] = field(default_factory=list)
    """The stacks below each mark."""
    _memo: dict[int, Any] = field(default_factory=dict)

    def run(self, data: io.BytesIO) -> Any:
        """What the next pickle in `data` makes; BadInput if that is not plain data."""
        self._stack, self._below, self._memo = [], [], {}
        try:
            for opcode, argument, _ in genops(data):
                self._step(opcode.name, argument)
            return self._stack.pop()
        except BadInput:
            raise
        except (ValueError, IndexError, KeyError, TypeError) as error:  # of an opcode's argument, or of its operands
            raise BadInput(f"not a sound pickle of a state dict: {_short(error)}", file=self.path) from None

    def _step(self, name: str, argument: Any) -> None:
        self._steps += 1
        if self._steps > OPCODES:
            raise BadInput(f"found a pickle of more than {OPCODES} opcodes", file=self.path)
        if name not in ACTIONS:
            raise BadInput(f"found the pickle opcode {name}, which no state dict needs", file=self.path)
        ACTIONS[name](self, argument)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _to_mark(self) -> list[Any]:
        """What lies above the last mark, taken off the stack."""
        above, self._stack = self._stack, self._below.pop()
        return above

    def make_tuple(self, _: Any, length: int | None = None) -> None:
        values = self._to_mark() if length is None else [self._stack.pop() for _ in range(length)][::-1]
        self.push(tuple(values))

    def append(self, _: Any, many: bool = False) -> None:
        values = self._to_mark() if many else [self._stack.pop()]
        if not isinstance(self._stack[-1], list):
            raise ValueError("only lists are appended to")
        self._stack[-1].extend(values)

    def put(self, _: Any, many: bool = False) -> None:
        values = self._to_mark() if many else [self._stack.pop() for _ in range(2)][::-1]
        for key, value in zip(values[::2], values[1::2], strict=True):
            _put(self._stack[-1], key, value)

    def memorize(self, key: int | None) -> None:
        self._memo[len(self._memo) if key is None else key] = self._stack[-1]

    def recall(self, key: int) -> None:
        self.push(self._memo[key])

    def named(self, name: str) -> None:
        """What a global name stands for; `name` is module and name."""
        self._find(".".join(name.split(" ", 1)))

    def named_on_stack(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._find(f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "something nameless")

    def _find(self, name: str) -> None:
        if name not in GLOBALS:
            kinds = ", ".join(KINDS)
            problem = f"asks for {_short(name)}, but only plain tensors ({kinds}) are read, and nothing of it was run"
            raise BadInput(problem, file=self.path)
        self.push(GLOBALS[name])

    def call(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(arguments, tuple) or not callable(function):
            raise ValueError("found a call of what is no function")
        self.push(function(*arguments))

    def build(self, _: Any) -> None:
        """Pass over the attributes of a state dict, such as the versions of its modules."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            raise ValueError("only state dicts have attributes")

    def find_storage(self, _: Any) -> None:
        storage = _storage(self._stack.pop())
        if self.storages.setdefault(storage.key, storage) != storage:
            raise ValueError(f"storage {_short(storage.key)} is of two kinds or sizes")
        self.push(storage)


def _literal(machine: _Machine, argument: Any) -> None:
    machine.push(argument)


def _constant(machine: _Machine, _: Any, value: Any) -> None:
    machine.push(value)


def _fresh(machine: _Machine, _: Any, kind: type) -> None:
    machine.push(kind())


def _nothing(machine: _Machine, _: Any) -> None:
    """The version of the pickle's language, the length of what follows, the end."""


NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
TEXTS = ("SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _nothing),
    **dict.fromkeys(NUMBERS + TEXTS, _literal),
    "NONE": partial(_constant, value=None),
    "NEWTRUE": partial(_constant, value=True),
    "NEWFALSE": partial(_constant, value=False),
    "EMPTY_TUPLE": partial(_constant, value=()),
    "EMPTY_LIST": partial(_fresh, kind=list),
    "EMPTY_DICT": partial(_fresh, kind=dict),
    "MARK": _Machine.mark,
    "TUPLE": _Machine.make_tuple,
    **{f"TUPLE{n}": partial(_Machine.make_tuple, length=n) for n in (1, 2, 3)},
    "APPEND": _Machine.append,
    "APPENDS": partial(_Machine.append, many=True),
    "SETITEM": _Machine.put,
    "SETITEMS": partial(_Machine.put, many=True),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.memorize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": _Machine.named_on_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.find_storage,
}
