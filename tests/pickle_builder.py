"""Pickles and PyTorch files put together opcode by opcode, right or wrong, without PyTorch."""

import struct
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import mlx.core as mx
from checkpoints import bits, refusal

from mlx_tformer.checkpoint.pickle_file import PickleFile
from mlx_tformer.errors import BadInput

MADE = Path(__file__).parent / "data" / "pickles"
FILES = sorted(path.relative_to(MADE).as_posix() for path in MADE.rglob("*.bin"))

CLASSES = {
    mx.float32: "FloatStorage",
    mx.float16: "HalfStorage",
    mx.bfloat16: "BFloat16Storage",
    mx.int64: "LongStorage",
    mx.int32: "IntStorage",
    mx.int16: "ShortStorage",
    mx.int8: "CharStorage",
    mx.uint8: "ByteStorage",
    mx.bool_: "BoolStorage",
}
MAGIC = b"\x8a\x0a" + bytes.fromhex("6cfc9c46f9206aa85019")


def text(value: str) -> bytes:
    """A string."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    """A whole number of any size."""
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def series(*items: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(items) + b"t"


def named(name: str) -> bytes:
    """What stands under a name in a module."""
    module, _, name = name.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def call(name: str, *arguments: bytes) -> bytes:
    """What a function returns."""
    return named(name) + series(*arguments) + b"R"


def table(entries: Mapping[str, bytes]) -> bytes:
    """A dict."""
    return b"}(" + b"".join(text(name) + value for name, value in entries.items()) + b"u"


def storage(count: int, *, key: str = "0", kind: str = "torch.FloatStorage") -> bytes:
    """A storage in a zip archive."""
    return series(text("storage"), named(kind), text(key), text("cpu"), number(count)) + b"Q"


def tensor(held: bytes, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> bytes:
    """A tensor over a storage."""
    sides = (series(*map(number, shape)), series(*map(number, strides)))
    return call(
        "torch._utils._rebuild_tensor_v2", held, number(offset), *sides, b"\x89", call("collections.OrderedDict")
    )


def pickled(content: bytes) -> bytes:
    """A whole pickle."""
    return b"\x80\x02" + content + b"."


Entries = Mapping[str, bytes]


def write_zip(path: Path, program: bytes, storages: Entries | None = None, others: Entries | None = None) -> Path:
    """A zip archive with this pickle, these storages and other entries."""
    entries = {"data.pkl": program, "version": b"3\n", "byteorder": b"little", **(others or {})}
    entries |= {f"data/{key}": data for key, data in (storages or {}).items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data)
    return path


def legacy_head(program: bytes, *keys: str) -> bytes:
    """The five pickles of the older container."""
    system = table({"little_endian": b"\x88"})
    return (
        b"".join(map(pickled, (MAGIC, number(1001), system)))
        + program
        + pickled(b"](" + b"".join(map(text, keys)) + b"e")
    )


def write_bin(path: Path, weights: Mapping[str, mx.array]) -> Path:
    """A file as PyTorch writes it, with these arrays."""
    entries, storages = {}, {}
    for key, (name, array) in enumerate(weights.items()):
        held = storage(array.size, key=str(key), kind=f"torch.{CLASSES[array.dtype]}")
        strides = [prod(array.shape[i + 1 :]) for i in range(array.ndim)]
        entries[name], storages[str(key)] = tensor(held, array.shape, strides), bits(array)
    return write_zip(path, pickled(table(entries)), storages)


FOUR = struct.pack("<4f", 1, 2, 3, 4)
SOUND = table({"a": tensor(storage(4), [2, 2], [2, 1])})
"""A state dict of one tensor over the storage `FOUR`."""
ONE = {"a": tensor(storage(4), [4], [1])}


def refused(path: Path, *parts: str) -> str:
    """The message that opening a file ends with, in which the file is named."""
    return refusal(BadInput, path.name, *parts, of=lambda: PickleFile(path))


def write(path: Path, content: bytes, data: bytes = FOUR) -> Path:
    """A zip archive with a pickle of this content and one storage."""
    return write_zip(path, pickled(content), {"0": data})
