"""Folders: the files that count, links and indexes that lead elsewhere, and what is no weights at all."""

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import make_folder, refusal, write_index, write_weights

from mlx_tformer.checkpoint.folder import Folder
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile
from mlx_tformer.errors import BadInput

# --- row 9: files that are something else ---


def test_a_pipe_a_folder_and_a_git_lfs_pointer_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    refusal(BadInput, str(path), "not found", of=lambda: SafetensorsFile(path))
    os.mkfifo(path)
    refusal(BadInput, str(path), "is not a regular file", of=lambda: SafetensorsFile(path))
    path.unlink()
    path.mkdir()
    refusal(BadInput, "is not a regular file", of=lambda: SafetensorsFile(path))
    path.rmdir()
    path.symlink_to(tmp_path / "nowhere")
    refusal(BadInput, "not found", of=lambda: SafetensorsFile(path))
    path.unlink()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")
    refusal(BadInput, "Git LFS pointer, not weights", of=lambda: SafetensorsFile(path))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused_and_one_within_it_is_followed(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "model")
    for file in ("generation_config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    (tmp_path / "outside").write_bytes((folder / name).read_bytes())
    (folder / name).rename(folder / "kept")
    (folder / name).symlink_to("kept")
    assert Folder.open(folder).companions().keys() == {"generation_config.json", "tokenizer.json"}
    (folder / name).unlink()
    (folder / name).symlink_to("../outside")
    refusal(BadInput, name, "is a link out of the folder", of=lambda: Folder.open(folder).companions())


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1234", tmp_path / "models--a--b" / "blobs"
    whole = make_folder(tmp_path / "whole", shards=2)
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(whole.iterdir())):
        file.rename(blobs / f"{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert Folder.open(snapshot).tensors
    (tmp_path / "secret").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../../secret")
    refusal(BadInput, "tokenizer.json", "link out of the folder", of=lambda: Folder.open(snapshot).companions())


# --- rows 8 and 9: the index ---

FOREIGN_NAMES = ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 7, None, ["x"], {"x": 1}]


@pytest.mark.parametrize("name", FOREIGN_NAMES, ids=map(str, FOREIGN_NAMES))
def test_an_index_that_names_what_is_no_bare_name_is_refused(tmp_path: Path, name: object) -> None:
    folder = make_folder(tmp_path / "model", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(folder, index | {"model.norm.weight": name})
    parts = ("model.safetensors.index.json", "model.norm.weight", repr(name), "expected the bare name of a file")
    refusal(BadInput, *parts, of=lambda: Folder.open(folder))


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null}'])
def test_an_index_that_names_nothing_is_refused(tmp_path: Path, index: str) -> None:
    folder = make_folder(tmp_path / "model", shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    refusal(BadInput, "weight_map", "missing or empty", of=lambda: Folder.open(folder))


@pytest.mark.parametrize("index", ["", "[]", "17", "{", '{"weight_map": ' * 100_000, "\ufeff{}"])
def test_an_index_that_is_no_object_is_refused(tmp_path: Path, index: str) -> None:
    folder = make_folder(tmp_path / "model", shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    refusal(BadInput, "model.safetensors.index.json", of=lambda: Folder.open(folder))


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", shards=4)
    for i in (2, 3):
        (folder / f"model-0000{i}-of-00004.safetensors").unlink()
    names = "model-00002-of-00004.safetensors, model-00003-of-00004.safetensors"
    refusal(BadInput, "not there", names, of=lambda: Folder.open(folder))


def test_tensors_that_are_not_where_the_index_says_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    wrong = {name: file.replace("00001-of", "00002-of") for name, file in index.items() if "layers.0" in name}
    moved = next(name for name in wrong if wrong[name] != index[name])
    write_index(folder, index | wrong | {"model.nowhere.weight": "model-00001-of-00002.safetensors"})
    refusal(BadInput, "not in the file named for them", "model.nowhere.weight", moved, of=lambda: Folder.open(folder))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    file = SafetensorsFile(second)
    name = next(iter(SafetensorsFile(first).tensors))
    write_weights(second, {name: mx.zeros(3), **{name: file.read(name) for name in file.tensors}})
    refusal(BadInput, second.name, f"also in {first.name}: {name}", of=lambda: Folder.open(folder))


def test_a_stray_file_is_ignored_with_a_note(tmp_path: Path) -> None:
    single, sharded = make_folder(tmp_path / "single"), make_folder(tmp_path / "sharded", shards=2)
    for folder in (single, sharded):
        assert Folder.open(folder).notes == []
        (folder / "stray.safetensors").write_bytes(b"not even weights")
        assert Folder.open(folder).notes == ["ignored stray.safetensors, which no index names"]


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", shards=2)
    (folder / "model.safetensors.index.json").unlink()
    refusal(BadInput, "2 safetensors files and no model.safetensors.index.json", of=lambda: Folder.open(folder))


def test_a_single_file_of_any_name_is_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert Folder.open(folder).notes == []
