"""PyTorch's files: read bit by bit without PyTorch, and a container that lies about itself is refused."""

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import refusal, same
from helpers import tensors
from hypothesis import given
from hypothesis import strategies as st
from pickle_builder import (
    CLASSES,
    FILES,
    FOUR,
    MADE,
    SOUND,
    call,
    legacy_head,
    named,
    number,
    pickled,
    refused,
    series,
    storage,
    table,
    tensor,
    write,
    write_bin,
    write_zip,
)

from mlx_tformer.checkpoint.pickle_file import PickleFile
from mlx_tformer.errors import BadInput

EXPECTED = tensors(MADE / "expected.safetensors")

# --- what PyTorch wrote ---


@pytest.mark.parametrize("name", FILES)
def test_what_pytorch_saved_is_read_bit_by_bit(name: str) -> None:
    file = PickleFile(MADE / name)
    wanted = {key.removeprefix(f"{name}/"): value for key, value in EXPECTED.items() if key.startswith(f"{name}/")}
    assert file.tensors.keys() == wanted.keys()
    for key, value in wanted.items():
        found = file.tensors[key]
        assert (found.shape, found.dtype, found.nbytes) == (value.shape, value.dtype, value.nbytes)
        assert same(file.read(key), value) and same(file.mapped(key), value), key


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("name", FILES)
def test_blocks_of_rows_are_the_whole_tensor(name: str, rows: int) -> None:
    file = PickleFile(MADE / name)
    for key in file.tensors:
        whole, blocks = file.read(key), list(file.blocks(key, rows))
        assert whole.ndim == 0 or all(block.shape[0] <= rows for block in blocks)
        assert same(mx.concatenate(blocks) if whole.ndim else blocks[0], whole), key


@pytest.mark.parametrize(("name", "opened"), [("transposed", 1), ("columns", 6)])
def test_only_what_does_not_lie_in_rows_is_read_whole(monkeypatch: pytest.MonkeyPatch, name: str, opened: int) -> None:
    file, opens, real = PickleFile(MADE / "views.bin"), [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: opens.append(path) or real(path, mode))
    assert len(list(file.blocks(name, 1))) == file.tensors[name].shape[0]
    assert len(opens) == opened


NOTES = {
    "module.bin": [],
    "mixed.bin": ["ignored version, steps, rate, none in mixed.bin, which is no tensor"],
    "training.bin": ["ignored optimizer, epoch in training.bin, which lies beside model"],
}


@pytest.mark.parametrize("name", NOTES)
def test_what_is_passed_over_is_noted(name: str) -> None:
    assert PickleFile(MADE / name).notes == NOTES[name]


def test_the_shards_hold_what_the_index_says() -> None:
    index = json.loads((MADE / "sharded" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert {t: name for name in set(index.values()) for t in PickleFile(MADE / "sharded" / name).tensors} == index


def test_neither_torch_nor_an_unpickler_takes_part(tmp_path: Path) -> None:
    program = """
import builtins, pickle, sys
from pathlib import Path
import numpy  # whose own import compiles code
from mlx_tformer.checkpoint.pickle_file import PickleFile
sys.modules["torch"] = None
def forbidden(*_, **__): raise SystemExit("an unpickler was used")
pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = builtins.eval = builtins.exec = forbidden
for path in map(Path, sys.argv[1:]):
    file = PickleFile(path)
    assert [file.read(name) for name in file.tensors]
"""
    subprocess.run([sys.executable, "-c", program, *(str(MADE / name) for name in FILES)], check=True, timeout=60)


@pytest.mark.parametrize("dtype", CLASSES, ids=CLASSES.values())
def test_files_built_by_hand_are_read_as_well(tmp_path: Path, dtype: mx.Dtype) -> None:
    numbers = mx.array([0, 1, 3, 117, 0, 5])
    arrays = {"a": (numbers > 2 if dtype == mx.bool_ else numbers).astype(dtype).reshape(2, 3), "b": mx.array(2.5)}
    file = PickleFile(write_bin(tmp_path / "x.bin", arrays))
    assert all(same(file.read(name), array) for name, array in arrays.items())


def test_tensors_and_parameters_of_the_first_versions_are_read(tmp_path: Path) -> None:
    first = call("torch._utils._rebuild_tensor", storage(4), number(1), series(number(3)), series(number(1)))
    sizes = call("torch.Size", series(number(2), number(2)))
    parameter = call("torch.nn.parameter.Parameter", tensor(storage(4), [4], [1]), b"\x88")
    sized = named("torch._utils._rebuild_tensor_v2") + b"(" + storage(4) + number(0) + sizes
    sized += series(number(2), number(1)) + b"\x89" + call("collections.OrderedDict") + b"tR"
    file = PickleFile(write(tmp_path / "x.bin", table({"first": first, "parameter": parameter, "sized": sized})))
    assert file.read("first").tolist() == [2, 3, 4]
    assert file.read("parameter").tolist() == [1, 2, 3, 4]
    assert file.read("sized").tolist() == [[1, 2], [3, 4]]


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    strides=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    offset=st.integers(0, 30),
    rows=st.integers(1, 5),
)
def test_a_view_is_what_numpy_takes_it_for_or_is_refused(tmp_path_factory, shape, strides, offset, rows) -> None:
    path, strides = tmp_path_factory.mktemp("view") / "x.bin", strides[: len(shape)]
    base = np.arange(60, dtype=np.float32)
    write(path, table({"x": tensor(storage(60), shape, strides, offset)}), base.tobytes())
    count = int(np.prod(shape))
    places = offset + sum(np.indices(shape)[i] * strides[i] for i in range(len(shape)))
    if offset > 60 or (count and (np.max(places) >= 60 or count > 60)):
        refused(path, "x: found")
        return
    wanted = mx.array(base[places] if count else np.zeros(shape, np.float32)).reshape(shape)
    file = PickleFile(path)
    blocks = list(file.blocks("x", rows))
    assert same(file.read("x"), wanted)
    assert same(mx.concatenate(blocks) if shape else blocks[0], wanted)


# --- the containers ---


def test_a_file_cut_at_any_byte_is_refused_and_the_whole_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    for name in ("sharded/pytorch_model-00002-of-00002.bin", "legacy-module.bin"):
        whole = (MADE / name).read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            refused(path)
        path.write_bytes(whole)
        assert PickleFile(path).tensors


def zipped(path: Path, **changed: Callable[[zipfile.ZipFile], None]) -> Path:
    """A sound archive to which something was added."""
    write(path, SOUND)
    with zipfile.ZipFile(path, "a") as archive:
        for change in changed.values():
            change(archive)
    return path


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "archive/../../x", "archive\\..\\x", ".."])
def test_an_entry_whose_name_leads_out_of_the_archive_is_refused(tmp_path: Path, name: str) -> None:
    refused(zipped(tmp_path / "x.bin", add=lambda z: z.writestr(name, b"")), name[:2], "leads out of the archive")
    assert PickleFile(zipped(tmp_path / "x.bin", add=lambda z: z.writestr("archive/..x", b""))).tensors


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_stands_twice_is_refused(tmp_path: Path) -> None:
    refused(zipped(tmp_path / "x.bin", add=lambda z: z.writestr("archive/data/0", FOUR)), "data/0", "stands twice")
    refused(zipped(tmp_path / "x.bin", add=lambda z: z.writestr("b/data.pkl", FOUR)), "found 2 entries data.pkl")


@pytest.mark.parametrize("name", ["data.pkl", "data/0", "byteorder", "bomb"])
def test_compressed_entries_are_refused_before_they_are_unpacked(tmp_path: Path, name: str) -> None:
    path, entries = tmp_path / "x.bin", {"data.pkl": pickled(SOUND), "data/0": FOUR, "byteorder": b"little"}
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in (entries | {name: bytes(10**7)}).items():
            how = zipfile.ZIP_DEFLATED if entry == name else zipfile.ZIP_STORED
            archive.writestr(f"archive/{entry}", data, how)
    refused(path, f"archive/{name}", "is compressed or encrypted")


def test_storages_that_are_missing_or_of_another_size_are_named(tmp_path: Path) -> None:
    refused(write(tmp_path / "x.bin", SOUND, FOUR[:12]), "data/0: has 12 bytes, expected 16 bytes")
    refused(write(tmp_path / "x.bin", SOUND, bytes(20)), "data/0: has 20 bytes, expected 16 bytes")
    refused(write_zip(tmp_path / "x.bin", pickled(SOUND)), "data/0: is missing, expected 16 bytes")
    elsewhere = table({"a": tensor(storage(4, key="../../x"), [4], [1])})
    refused(write(tmp_path / "x.bin", elsewhere), "data/../../x: is missing")


def test_an_archive_without_a_pickle_or_of_other_byte_order_is_refused(tmp_path: Path) -> None:
    refused(
        write_zip(tmp_path / "x.bin", pickled(SOUND), {"0": FOUR}, {"byteorder": b"big"}), "byteorder: found b'big'"
    )
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("word/document.xml", "")
    refused(tmp_path / "x.bin", "found 0 entries data.pkl", "not a PyTorch checkpoint")


DIRECTORY = {
    "an offset of another entry": ({42: lambda places: places[0]}, "reach into the next entry"),
    "an offset that is no header": ({42: lambda places: places[0] + 1}, "has no header where the directory says"),
    "an offset beyond the end": ({42: lambda places: 2**31}, "has no header where the directory says"),
    "a size beyond the end": ({20: lambda places: 10**9, 24: lambda places: 10**9}, "beyond the file's end"),
    "another size than it is packed to": ({24: lambda places: 17}, "is compressed or encrypted"),
    "a way of packing": ({10: lambda places: 8}, "is compressed or encrypted"),
    "a password": ({8: lambda places: 1}, "is compressed or encrypted"),
}
"""Numbers of 32 bits at places of an entry in the directory."""


@pytest.mark.parametrize("case", DIRECTORY)
def test_a_directory_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    changes, problem = DIRECTORY[case]
    path = write(tmp_path / "x.bin", SOUND)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        places = [entry.header_offset for entry in archive.infolist()]
    last = content.rindex(b"PK\x01\x02")
    for at, value in changes.items():
        content[last + at : last + at + 4] = struct.pack("<I", value(places))
    path.write_bytes(content)
    refused(path, problem)


LEGACY = {
    "whole": (legacy_head(pickled(SOUND), "0") + struct.pack("<q", 4) + FOUR, ""),
    "another count": (legacy_head(pickled(SOUND), "0") + struct.pack("<q", 3) + FOUR, "storage 0: found 3 values"),
    "too short": (legacy_head(pickled(SOUND), "0") + struct.pack("<q", 4) + FOUR[:-1], "expected 16 bytes"),
    "no keys": (legacy_head(pickled(SOUND)), "found 0 storages, expected those of 1"),
    "another key": (legacy_head(pickled(SOUND), "1"), "found 1 storages"),
    "a key twice": (legacy_head(pickled(SOUND), "0", "0"), "found something else than keys"),
    "another version": (pickled(number(1)) + bytes(9), "not a PyTorch checkpoint"),
    "no pickle": (b"not weights at all", "neither a zip archive nor the magic number"),
    "empty": (b"", "neither a zip archive nor the magic number"),
    "only a pickle": (pickled(SOUND), "neither a zip archive nor the magic number"),
    "what Python pickled": (pickle.dumps({"a": [1, 2, 3]}), "neither a zip archive nor the magic number"),
}


@pytest.mark.parametrize("case", LEGACY)
def test_the_older_container_is_checked_as_well(tmp_path: Path, case: str) -> None:
    content, problem = LEGACY[case]
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    if problem:
        refused(path, problem)
    else:
        assert PickleFile(path).read("a").tolist() == [[1, 2], [3, 4]]


def test_a_pipe_a_folder_and_a_git_lfs_pointer_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    refused(path, "not found")
    os.mkfifo(path)
    refused(path, "is not a regular file")
    path.unlink()
    path.mkdir()
    refused(path, "is not a regular file")
    path.rmdir()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")
    refused(path, "Git LFS pointer, not weights")


@pytest.mark.parametrize("way", ["shrinks", "is written anew"])
def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path, way: str) -> None:
    path = write(tmp_path / "x.bin", SOUND)
    file = PickleFile(path)
    if way == "shrinks":
        os.truncate(path, 100)
    else:
        os.utime(path, ns=(1, 1))
    for read in (file.read, file.mapped, lambda name: list(file.blocks(name, 1))):
        refusal(BadInput, str(path), "changed", of=lambda read=read: read("a"))
