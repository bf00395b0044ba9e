"""safetensors files: what is broken is refused and never ends the process, what is written is read by everybody."""

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest
import safetensors
from checkpoints import bits, entry, file_bytes, refusal, same, write_weights
from hypothesis import given
from hypothesis import strategies as st

from mlx_tformer.checkpoint.safetensors_file import CODES, SafetensorsFile, SafetensorsWriter
from mlx_tformer.checkpoint.source import Tensor
from mlx_tformer.errors import BadInput

HEADER = {"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}
DATA = bytes(range(32))
SOUND = file_bytes(HEADER, DATA)

PROBE = """
import json, resource, sys
import mlx_tformer, mlx.core as mx
from pathlib import Path
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile
from mlx_tformer.errors import BadInput

def outcome(path):
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            mx.eval(file.read(name), file.mapped(name), *file.blocks(name, 1))
            file.mapped(name).sum().item()
        return "read"
    except BadInput as error:
        return f"refused: {error}"

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

folder = Path(sys.argv[1])
outcome(folder / "first")
for path in sorted(folder.glob("*.safetensors")):
    before = peak()
    print(json.dumps([outcome(path), peak() - before]), flush=True)
"""
"""Reads a file to be warm, then every file of a folder in every way, in a process that may well end."""

SLACK = 20_000_000
"""Bytes that refusing a small file may take."""


@dataclass
class Outcome:
    """What became of a file, and by how many bytes the process grew."""

    what: str
    grown: int

    @property
    def read(self) -> bool:
        """True if it was read, False if it was refused as it should."""
        assert self.what == "read" or self.what.startswith("refused: "), self.what
        return self.what == "read"


def outcomes(folder: Path, files: Iterable[bytes] = ()) -> list[Outcome]:
    """What becomes of each of these files, or of those that are in the folder already, in a process of their own."""
    folder.mkdir(exist_ok=True)
    (folder / "first").write_bytes(SOUND)
    for i, content in enumerate(files):
        (folder / f"{i:05}.safetensors").write_bytes(content)
    run = subprocess.run([sys.executable, "-c", PROBE, str(folder)], capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, f"after {len(lines)} files: exit {run.returncode}, {run.stderr[-500:]}"
    return [Outcome(*line) for line in lines]


def header_with(**changed: object) -> bytes:
    """The sound header with some fields of tensor `a` changed, as bytes."""
    return json.dumps(HEADER | {"a": HEADER["a"] | changed}).encode()


# --- rows 1 to 6: broken files, and sound ones like them ---


def test_a_file_cut_at_any_byte_is_refused_and_the_whole_one_is_read(tmp_path: Path) -> None:
    cut = [SOUND[:size] for size in range(len(SOUND))]
    results = outcomes(tmp_path / "files", [*cut, SOUND])
    assert [result.read for result in results] == [False] * len(cut) + [True]


LENGTHS = [0, 1, 5, 10**6, 99_000_000, 100_000_001, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]


def test_a_header_length_that_the_file_does_not_have_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    results = outcomes(tmp_path / "files", [length.to_bytes(8, "little") + SOUND[8:] for length in LENGTHS])
    assert [result.read for result in results] == [False] * len(LENGTHS)
    assert max(result.grown for result in results) < SLACK


BROKEN_HEADERS = {
    "no JSON": b"not JSON at all",
    "an array": b"[]",
    "a number": b"17",
    "two objects": b"{}{}",
    "bad UTF-8 in a name": SOUND[8:-32].replace(b'"a"', b'"\xff"'),
    "half a surrogate": SOUND[8:-32].replace(b'"a"', b'"\\ud800"'),
    "no dtype": b'{"a": {"shape": [2], "data_offsets": [0, 8]}}',
    "no offsets": b'{"a": {"shape": [2], "dtype": "F32"}}',
    "a string for a tensor": b'{"a": "F32"}',
    "metadata that is no text": b'{"__metadata__": {"a": 1}}',
    "five million arrays": b"[" * 5_000_000,
    "five million objects": b'{"a":' * 1_000_000,
    "five million arrays in a tensor": b'{"a": {"dtype": "F32", "shape": ' + b"[" * 5_000_000,
    "a thousand closed arrays in a field": header_with(more=json.loads("[" * 900 + "]" * 900)),
}


def test_a_header_that_says_nothing_sensible_is_refused(tmp_path: Path) -> None:
    files = [file_bytes(header, DATA) for header in BROKEN_HEADERS.values()]
    for name, file, result in zip(BROKEN_HEADERS, files, outcomes(tmp_path / "files", files), strict=True):
        assert not result.read, name
        assert result.grown < SLACK + 3 * len(file), name


SOUND_HEADERS = {
    "spaces around it": b"  " + SOUND[8:-32] + b"   ",
    "names in other scripts": SOUND[8:-32].replace(b'"a"', '"ä 中 👩"'.encode()),
    "NUL and a line break in a name": SOUND[8:-32].replace(b'"a"', b'"\\u0000\\n"'),
    "a field that nobody knows": header_with(more={"x": [1]}),
    "no metadata": json.dumps({k: v for k, v in HEADER.items() if k in "ab"}).encode(),
    "metadata that is null": SOUND[8:-32].replace(b'{"format": "pt"}', b"null"),
    "seventy axes": header_with(shape=[1] * 68 + [2, 3]),
}


def test_an_unusual_header_that_is_sound_is_read(tmp_path: Path) -> None:
    results = outcomes(tmp_path / "files", [file_bytes(header, DATA) for header in SOUND_HEADERS.values()])
    assert {name: result.what for name, result in zip(SOUND_HEADERS, results, strict=True)} == dict.fromkeys(
        SOUND_HEADERS, "read"
    )


F32 = ("F32", [2])
BROKEN_PLACES = {
    "two tensors in one place": ({"a": entry(*F32, 0, 8), "b": entry(*F32, 0, 8)}, 8),
    "tensors that overlap": ({"a": entry(*F32, 0, 8), "b": entry(*F32, 4, 12)}, 12),
    "a hole": ({"a": entry(*F32, 0, 8), "b": entry(*F32, 12, 20)}, 20),
    "a hole in front": ({"a": entry(*F32, 4, 12)}, 12),
    "bytes after the end": ({"a": entry(*F32, 0, 8)}, 9),
    "no tensors but bytes": ({}, 8),
    "too few bytes": ({"a": entry(*F32, 0, 8)}, 7),
    "a place that is too small": ({"a": entry(*F32, 0, 4)}, 4),
    "a place that is too large": ({"a": entry(*F32, 0, 12)}, 12),
    "a place that runs backwards": ({"a": entry(*F32, 8, 0)}, 8),
    "a negative start": ({"a": entry(*F32, -40, -32)}, 8),
    "a start beyond 2^64": ({"a": entry(*F32, 2**64 - 40, 2**64 - 32)}, 8),
    "a start beyond any number": ({"a": entry(*F32, 2**80, 2**80 + 8)}, 8),
    "offsets with a fraction": ({"a": entry(*F32, 0, 8.5)}, 8),
    "negative sides": ({"a": entry("F32", [-2, -8], 0, 64)}, 64),
    "a side with a fraction": ({"a": entry("F32", [15.9], 0, 60)}, 60),
    "a side in quotes": ({"a": entry("F32", ["2"], 0, 8)}, 8),
    "a product of 2^64 and 2 more": ({"a": entry("F32", [2**32, 2**32, 2], 0, 8)}, 8),
    "a product that wraps to the right size": ({"a": entry("U8", [2**32 + 1, 2**32 - 1, 8], 0, 8)}, 8),
    "a side of 2^32 + 16 that wraps to 16": ({"a": entry("U8", [2**32 + 16], 0, 16)}, 16),
    "a side of 2^40 in an empty tensor": ({"a": entry("F32", [2**40, 0], 0, 0)}, 0),
    "a side of 2^31 in an empty tensor": ({"a": entry("F32", [0, 2**31], 0, 0)}, 0),
    "an unknown dtype": ({"a": entry("F31", [2], 0, 8)}, 8),
    "a dtype that is a number": ({"a": entry(7, [2], 0, 8)}, 8),
    "a dtype that MLX does not have": ({"a": entry("F8_E4M3FNUZ", [8], 0, 8)}, 8),
    "complex numbers": ({"a": entry("C64", [1], 0, 8)}, 8),
}


def test_tensors_that_cannot_lie_where_they_should_are_refused(tmp_path: Path) -> None:
    files = [file_bytes(header, bytes(size)) for header, size in BROKEN_PLACES.values()]
    for name, result in zip(BROKEN_PLACES, outcomes(tmp_path / "files", files), strict=True):
        assert not result.read, name
        assert result.grown < SLACK, name


SOUND_PLACES = {
    "tensors in another order": ({"b": entry(*F32, 8, 16), "a": entry(*F32, 0, 8)}, 16),
    "no tensors": ({}, 0),
    "an empty tensor": ({"a": entry("F32", [3, 0], 0, 0), "b": entry(*F32, 0, 8)}, 8),
    "a scalar": ({"a": entry("F32", [], 0, 4)}, 4),
    "a side of 2^31 - 1 in an empty tensor": ({"a": entry("U8", [0, 2**31 - 1], 0, 0)}, 0),
    "doubles": ({"a": entry("F64", [2], 0, 16), "b": entry("F64", [], 16, 24), "c": entry("F64", [0], 24, 24)}, 24),
}


def test_sound_tensors_of_unusual_kinds_are_read(tmp_path: Path) -> None:
    files = [file_bytes(header, bytes(size)) for header, size in SOUND_PLACES.values()]
    results = outcomes(tmp_path / "files", files)
    assert {name: result.what for name, result in zip(SOUND_PLACES, results, strict=True)} == dict.fromkeys(
        SOUND_PLACES, "read"
    )


TWICE = {
    "another tensor": file_bytes(SOUND[8:-32].replace(b'"b"', b'"a"'), DATA),
    "the same tensor": file_bytes(b'{"a": ' + json.dumps(HEADER["a"]).encode() + b", " + SOUND[9:-32], DATA),
    "metadata": file_bytes(b'{"__metadata__": {"x": "1", "x": "2"}}'),
}


@pytest.mark.parametrize("content", TWICE.values(), ids=TWICE)
def test_a_name_that_stands_twice_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    refusal(BadInput, str(path), of=lambda: SafetensorsFile(path))


def test_a_name_that_stands_twice_is_named_where_nothing_else_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(TWICE["the same tensor"])
    refusal(BadInput, "a: stands twice in the header", of=lambda: SafetensorsFile(path))


def test_a_huge_sparse_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    size = 2**32 + 16
    folder = tmp_path / "files"
    folder.mkdir()
    with (folder / "huge.safetensors").open("wb") as file:
        file.write(file_bytes({"a": entry("U8", [size], 0, size)}))
        file.truncate(file.tell() + size)
    (result,) = outcomes(folder)
    assert not result.read and "a: found shape [4294967312]" in result.what
    assert result.grown < SLACK


def test_the_refusal_names_file_tensor_and_dtype(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"some.weight": entry("F8_E4M3FNUZ", [8], 0, 8)}, bytes(8)))
    refusal(BadInput, str(path), "some.weight", "found dtype F8_E4M3FNUZ", "BF16", of=lambda: SafetensorsFile(path))


NUMBERS = [0, 1, -1, 7, 2**31, 2**32 + 16, 2**53 + 1, 2**63, 2**64 - 40, 2**64, 2**70, 15.9, 1e308, "7", None, [], {}]


def mutated(rng: random.Random) -> bytes:
    """The sound file with one to three random changes; in half of them the header's length is made right again."""
    content = bytearray(SOUND)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(0 if rng.random() < 0.7 else max(0, len(content) - len(DATA)), len(content))
        match rng.randrange(6):
            case 0:
                content[at] = rng.randrange(256)
            case 1:
                content[at] ^= 1 << rng.randrange(8)
            case 2:
                del content[at : at + rng.randint(1, 9)]
            case 3:
                content[at:at] = rng.randbytes(rng.randint(1, 9))
            case 4:
                content[at:at] = content[rng.randrange(len(content)) :][: rng.randint(1, 30)]
            case 5:
                digits = [i for i in range(8, len(content) - 32) if chr(content[i]).isdigit()]
                if digits:
                    place = rng.choice(digits)
                    content[place : place + 1] = json.dumps(rng.choice(NUMBERS)).encode()
    if rng.random() < 0.5 and len(content) > 40:
        content[:8] = (len(content) - 8 - len(DATA)).to_bytes(8, "little")
    return bytes(content)


def test_two_thousand_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(2)
    results = outcomes(tmp_path / "files", [mutated(rng) for _ in range(2000)])
    read = sum(result.read for result in results)
    assert 100 < read < 1900, read
    assert sum(result.grown for result in results) < 2 * SLACK


# --- reading what is sound ---


@pytest.mark.parametrize("way", ["shrinks", "grows", "is written anew"])
def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path, way: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(SOUND)
    file = SafetensorsFile(path)
    assert file.read("a").shape == (2, 3)
    if way == "shrinks":
        os.truncate(path, len(SOUND) - 5)
    else:
        path.write_bytes(SOUND + b" " * (way == "grows"))
        os.utime(path, ns=(1, 1))
    for read in (file.read, file.mapped, lambda name: list(file.blocks(name, 1))):
        refusal(BadInput, str(path), "changed", of=lambda read=read: read("b"))


@given(rows=st.integers(1, 9), height=st.integers(0, 7), width=st.integers(0, 3))
def test_blocks_of_rows_are_the_whole_tensor(tmp_path_factory, rows: int, height: int, width: int) -> None:
    path = tmp_path_factory.mktemp("blocks") / "x.safetensors"
    value = mx.arange(height * width).astype(mx.bfloat16).reshape(height, width)
    write_weights(path, {"before": mx.ones(5), "x": value, "scalar": mx.array(7)})
    file = SafetensorsFile(path)
    blocks = list(file.blocks("x", rows))
    assert all(block.shape[0] <= rows for block in blocks) or not value.size
    assert same(mx.concatenate(blocks), value)
    assert [block.tolist() for block in file.blocks("scalar", rows)] == [7]


def test_doubles_are_read_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    numbers = [0.1, 1e-300, -3.5, 1e300]
    data = struct.pack("<4d", *numbers)
    path.write_bytes(file_bytes({"a": entry("F64", [2, 2], 0, 32), "b": entry("F32", [1], 32, 36)}, data + bytes(4)))
    file = SafetensorsFile(path)
    assert file.tensors["a"] == Tensor((2, 2), mx.float32)
    assert same(file.read("a"), mx.array(numbers, mx.float32).reshape(2, 2))
    assert same(file.mapped("a"), file.read("a")) and same(file.mapped("b"), mx.zeros(1))
    assert same(mx.concatenate(list(file.blocks("a", 1))), file.read("a"))


# --- writing ---

SHAPES = [(), (1,), (7,), (3, 5), (2, 1, 3), (0,), (0, 4), (4, 0)]


def examples(dtype: mx.Dtype) -> dict[str, mx.array]:
    """Arrays of every shape and of this dtype, whose bytes differ."""
    mx.random.seed(1)
    made = {}
    for shape in SHAPES:
        numbers = mx.random.randint(0, 100, shape)
        made[f"x{list(shape)}"] = numbers.astype(dtype) if dtype != mx.bool_ else numbers > 50
    return made


@pytest.mark.parametrize("dtype", CODES, ids=CODES.values())
def test_what_is_written_is_read_back_by_the_package_by_mlx_and_by_us(tmp_path: Path, dtype: mx.Dtype) -> None:
    path, arrays = tmp_path / "x.safetensors", examples(dtype)
    write_weights(path, arrays)
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    loaded, file = mx.load(str(path)), SafetensorsFile(path)
    assert theirs.keys() == loaded.keys() == file.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert theirs[name]["dtype"] == CODES[dtype] and tuple(theirs[name]["shape"]) == array.shape
        assert bytes(theirs[name]["data"]) == bits(array)
        assert same(loaded[name], array) and same(file.read(name), array) and same(file.mapped(name), array)


def test_values_that_compare_oddly_are_written_bit_by_bit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    odd = mx.array([0x7FC1, 0x8000, 0x7F80, 0xFF81, 0x0001], mx.uint16).view(mx.bfloat16)
    write_weights(path, {"x": odd})
    assert bits(SafetensorsFile(path).read("x")) == bits(odd)


def test_rows_of_transposed_and_sliced_arrays_are_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {"t": mx.arange(12.0).reshape(3, 4).T, "s": mx.arange(20.0).reshape(4, 5)[1:3, ::2]}
    write_weights(path, arrays)
    assert all(same(SafetensorsFile(path).read(name), array) for name, array in arrays.items())


def test_writing_row_by_row_gives_the_same_file(tmp_path: Path) -> None:
    arrays = {"a": mx.arange(30.0).reshape(10, 3), "b": mx.array(2.0), "c": mx.arange(5)}
    write_weights(tmp_path / "whole", arrays)
    announced = {name: Tensor(array.shape, array.dtype) for name, array in arrays.items()}
    writer = SafetensorsWriter(tmp_path / "rows", announced)
    for start in range(0, 10, 4):
        writer.write("a", arrays["a"][start : start + 4])
    writer.write("b", arrays["b"])
    writer.write("c", arrays["c"])
    writer.close()
    assert (tmp_path / "rows").read_bytes() == (tmp_path / "whole").read_bytes()


def test_data_begins_at_a_multiple_of_eight_bytes_and_metadata_says_who_wrote_it(tmp_path: Path) -> None:
    for length in range(1, 10):
        path = tmp_path / f"{length}.safetensors"
        write_weights(path, {"n" * length: mx.ones(3)})
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
        assert SafetensorsFile(path).metadata == {"format": "mlx"}


def test_the_writer_takes_nothing_but_what_was_announced(tmp_path: Path) -> None:
    announced = {"a": Tensor((2, 3), mx.float32), "b": Tensor((1,), mx.int32)}
    wrong = {
        "b": mx.zeros(1, mx.int32),  # too early
        "a": mx.zeros((2, 2)),
    }
    for name, value in [*wrong.items(), ("a", mx.zeros((3, 3))), ("a", mx.zeros((2, 3), mx.float16))]:
        writer = SafetensorsWriter(tmp_path / "x", announced)
        with pytest.raises(AssertionError):
            writer.write(name, value)
        writer.abandon()
    writer = SafetensorsWriter(tmp_path / "x", announced)
    writer.write("a", mx.zeros((1, 3)))
    with pytest.raises(AssertionError, match="announced but not written: a"):
        writer.close()
    writer.abandon()
