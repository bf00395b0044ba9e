"""What PyTorch's pickles say, found out without unpickling.

A pickle is a program for a small stack machine, and Python's own unpickler imports and calls whatever the program
names. The machine here knows the few opcodes that a state dict is written with and a table of the names that it may
ask for; each stands for a function of this module that only takes notes. Any other opcode or name is an error, so that
nothing of a file ever runs. Opcodes: Python's `pickletools`; names: `torch/_utils.py` and `torch/serialization.py` of
PyTorch 2.13.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from pickletools import opcodes
from typing import IO, Any

import mlx.core as mx

from ..errors import BadInput

OPCODES = 1_000_000
"""A tensor takes some 35 opcodes: room for 28,000 tensors in a file."""
AXES = 8
"""Nothing that a pickle can ask for takes longer for longer arguments, so that all of it takes as long as it is."""


@dataclass(frozen=True)
class Kind:
    """What a storage holds: what it becomes here, and what numpy reads it as; bits that numpy has no type for are read
    as whole numbers."""

    dtype: mx.Dtype
    code: str

    @property
    def size(self) -> int:
        """Bytes of a value."""
        return int(self.code[-1])


KINDS = {
    "float64": Kind(mx.float32, "<f8"),  # no GPU of Apple computes in float64
    "float32": Kind(mx.float32, "<u4"),
    "float16": Kind(mx.float16, "<u2"),
    "bfloat16": Kind(mx.bfloat16, "<u2"),
    "int64": Kind(mx.int64, "<u8"),
    "int32": Kind(mx.int32, "<u4"),
    "int16": Kind(mx.int16, "<u2"),
    "int8": Kind(mx.int8, "u1"),
    "uint64": Kind(mx.uint64, "<u8"),
    "uint32": Kind(mx.uint32, "<u4"),
    "uint16": Kind(mx.uint16, "<u2"),
    "uint8": Kind(mx.uint8, "u1"),
    "bool": Kind(mx.bool_, "u1"),
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
class StorageType:
    """A class of storages; one without a kind holds bytes, and its tensors say what they are."""

    kind: Kind | None


@dataclass(frozen=True)
class Storage:
    """Bytes that tensors are views of."""

    key: str
    kind: Kind | None
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * (1 if self.kind is None else self.kind.size)


@dataclass(frozen=True)
class View:
    """A tensor: where its values lie in a storage, counted in values."""

    storage: Storage
    kind: Kind
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

    def rows(self, start: int, stop: int) -> "View":
        """The rows from `start` to before `stop`."""
        offset = self.offset + start * self.strides[0]
        return View(self.storage, self.kind, offset, (stop - start, *self.shape[1:]), self.strides)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    last = sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))
    return last + 1 if prod(shape) else 0


# --- what a pickle may ask for ---


def short(value: object) -> str:
    """What a file says, fit for a message: not too long, and without line breaks and terminal codes."""
    text = str(value)
    text = text if len(text) <= 100 else f"{text[:100]}..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _ordered() -> dict[Any, Any]:
    """An OrderedDict, which is filled afterwards."""
    return {}


def _put(target: Any, key: Any, value: Any) -> None:
    # Tuples are hashed with no regard to their depth, and large numbers can be chosen so that all have one hash.
    if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < 2**31):
        raise ValueError("only text and small whole numbers are keys")
    if not isinstance(target, dict):
        raise ValueError("only dicts take entries")
    if key in target:
        raise ValueError(f"{short(key)} stands twice in a dict")
    target[key] = value


def _counts(values: Any) -> tuple[int, ...]:
    """A shape or strides; the class torch.Size is a tuple as well."""
    if not isinstance(values, tuple | list) or len(values) > AXES:
        raise ValueError(f"expected a tuple of at most {AXES} numbers for a shape")
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError("expected whole numbers of 0 or more for a shape")
    return tuple(values)


def _storage(where: Any) -> Storage:
    """A storage by what the pickle says of it: its class, key, device and number of values."""
    match where:
        case ("storage", StorageType(kind=kind), str(key), str(), int(count)) if count >= 0:
            return Storage(key, kind, count)
        case ("storage", StorageType(kind=kind), str(key), str(), int(count), None) if count >= 0:
            return Storage(key, kind, count)
    raise ValueError("expected storage, class, key, device and count")


def _view(storage: Any, kind: Any, offset: Any, shape: Any, strides: Any, metadata: Any) -> View:
    shape, strides = _counts(shape), _counts(strides)
    (offset,) = _counts((offset,))
    if not isinstance(storage, Storage) or not isinstance(kind, Kind) or len(shape) != len(strides):
        raise ValueError("expected a tensor's storage, offset, shape and strides")
    if metadata:
        raise ValueError("a tensor is to be negated or conjugated")
    return View(storage, kind, offset, shape, strides)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any = None, hooks: Any = None, metadata: Any = None
) -> View:
    """A tensor of its storage's kind."""
    if not isinstance(storage, Storage):
        raise ValueError("expected a tensor's storage")
    return _view(storage, storage.kind, offset, shape, strides, metadata)


def _tensor_of_kind(
    storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any, hooks: Any, kind: Any, metadata: Any = None
) -> View:
    """A tensor of a kind that no class of storages is for."""
    return _view(storage, kind, offset, shape, strides, metadata)


def _parameter(data: Any, gradient: Any = None, hooks: Any = None) -> View:
    if not isinstance(data, View):
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
    "torch.storage.UntypedStorage": StorageType(None),
    **{f"torch.{name}": StorageType(KINDS[kind]) for name, kind in STORAGES.items()},
    **{f"torch.{name}": kind for name, kind in KINDS.items()},
}


# --- the machine ---


@dataclass
class Machine:
    """Follows pickles without running them; it never recurses, and takes memory only as the pickles are long."""

    path: Path
    storages: dict[str, Storage] = field(default_factory=dict)
    _steps: int = 0
    _stack: list[Any] = field(default_factory=list)
    _below: list[list[Any]] = field(default_factory=list)
    """The stacks below each mark."""
    _memo: dict[int, Any] = field(default_factory=dict)

    def run(self, data: io.BytesIO) -> Any:
        """What the next pickle in `data` makes; BadInput if that is not plain data."""
        self._stack, self._below, self._memo = [], [], {}
        try:
            while (code := data.read(1)) != STOP:
                self._step(code, data)
            return self._stack.pop()
        except BadInput:
            raise
        except (ValueError, IndexError, KeyError, TypeError) as error:  # of an opcode's argument, or of its operands
            raise BadInput(f"not a sound pickle of a state dict: {short(error)}", file=self.path) from None

    def _step(self, code: bytes, data: io.BytesIO) -> None:
        """Does what one opcode says; only those that are known have their argument read."""
        self._steps += 1
        if self._steps > OPCODES:
            raise BadInput(f"found a pickle of more than {OPCODES} opcodes", file=self.path)
        if code not in NAMES:
            raise ValueError("it ends too early" if code == b"" else f"found {code!r} for an opcode")
        name = NAMES[code]
        if name not in ACTIONS:
            raise BadInput(f"found the pickle opcode {name}, which no state dict needs", file=self.path)
        ACTIONS[name](self, READERS[name](data) if name in READERS else None)

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

    def named_on_stack(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.find(f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "something nameless")

    def find(self, name: str) -> None:
        """What a global name stands for; `name` is module and name."""
        if name not in GLOBALS:
            kinds = ", ".join(KINDS)
            problem = f"asks for {short(name)}, but only plain tensors ({kinds}) are read, and nothing of it was run"
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
            raise ValueError(f"storage {short(storage.key)} is of two kinds or sizes")
        self.push(storage)


def _global_name(data: IO[bytes]) -> str:
    """A module and a name in it, each on a line; Python's reader of lines warns about what looks like an escape."""
    lines = [data.readline(), data.readline()]
    if not all(line.endswith(b"\n") for line in lines):
        raise ValueError("a name has no end")
    return ".".join(line[:-1].decode() for line in lines)


def _literal(machine: Machine, argument: Any) -> None:
    machine.push(argument)


def _constant(machine: Machine, _: Any, value: Any) -> None:
    machine.push(value)


def _fresh(machine: Machine, _: Any, kind: type) -> None:
    machine.push(kind())


def _nothing(machine: Machine, _: Any) -> None:
    """The version of the pickle's language, or the length of what follows."""


STOP = b"."
NAMES = {opcode.code.encode("latin-1"): opcode.name for opcode in opcodes}
READERS = {opcode.name: opcode.arg.reader for opcode in opcodes if opcode.arg is not None} | {"GLOBAL": _global_name}
NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
TEXTS = ("SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
ACTIONS: dict[str, Callable[[Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _nothing),
    **dict.fromkeys(NUMBERS + TEXTS, _literal),
    "NONE": partial(_constant, value=None),
    "NEWTRUE": partial(_constant, value=True),
    "NEWFALSE": partial(_constant, value=False),
    "EMPTY_TUPLE": partial(_constant, value=()),
    "EMPTY_LIST": partial(_fresh, kind=list),
    "EMPTY_DICT": partial(_fresh, kind=dict),
    "MARK": Machine.mark,
    "TUPLE": Machine.make_tuple,
    **{f"TUPLE{n}": partial(Machine.make_tuple, length=n) for n in (1, 2, 3)},
    "APPEND": Machine.append,
    "APPENDS": partial(Machine.append, many=True),
    "SETITEM": Machine.put,
    "SETITEMS": partial(Machine.put, many=True),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), Machine.memorize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), Machine.recall),
    "GLOBAL": Machine.find,
    "STACK_GLOBAL": Machine.named_on_stack,
    "REDUCE": Machine.call,
    "NEWOBJ": Machine.call,
    "BUILD": Machine.build,
    "BINPERSID": Machine.find_storage,
}
