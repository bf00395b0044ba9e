"""A conversion is there whole or not at all, whatever happens on the way: full disks, signals, races."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from checkpoints import copy_case, files_in, make_folder, read_weights, refusal, same
from helpers import GOLDEN

import mlx_tformer as mt
from mlx_tformer.checkpoint import atomic
from mlx_tformer.checkpoint.atomic import new_folder
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.errors import BadInput, InputOutputError

CASE = "llama-bias"
NO_SIGNAL = 0


def names_in(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


def partial(target: Path) -> Path:
    """Where a conversion is until it is complete."""
    return target.with_name(f".{target.name}.partial")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a complete conversion of `CASE`."""
    return files_in(convert(GOLDEN / CASE, tmp_path_factory.mktemp("whole") / "made").path)


# --- a destination that will not do is refused before anything is read ---


@pytest.fixture
def nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening the source, which may mean downloading it, fails the test."""

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("the source was opened")

    monkeypatch.setattr("mlx_tformer.checkpoint.convert.open_source", opened)


def test_a_destination_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path, nothing_is_opened: None) -> None:
    dest = tmp_path / "made"
    dest.mkdir()
    (dest / "mine.txt").write_text("mine")
    refusal(InputOutputError, str(dest), "is not empty", of=lambda: convert(GOLDEN / CASE, dest))
    assert files_in(tmp_path) == {"made/mine.txt": b"mine"}


def test_a_file_at_the_destination_is_refused_and_left_alone(tmp_path: Path, nothing_is_opened: None) -> None:
    dest = tmp_path / "made"
    dest.write_text("mine")
    refusal(InputOutputError, str(dest), "is a file", of=lambda: convert(GOLDEN / CASE, dest))
    below = dest / "deeper" / "made"
    refusal(InputOutputError, str(dest), "is a file", of=lambda: convert(GOLDEN / CASE, below))
    assert files_in(tmp_path) == {"made": b"mine"}


def test_the_source_is_refused_as_its_own_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_opened: None
) -> None:
    source = copy_case(CASE, tmp_path / "model")
    before = files_in(tmp_path)
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(source)
    for dest in (source, tmp_path / "link", Path(), source / ".." / "model"):
        refusal(InputOutputError, "is the source itself", of=lambda dest=dest: convert(source, dest))
    refusal(
        InputOutputError,
        "is the source itself",
        of=lambda: convert(source / "model.safetensors", source / "model.safetensors"),
    )
    (tmp_path / "link").unlink()
    assert files_in(tmp_path) == before


def test_the_root_of_a_disk_is_refused(tmp_path: Path, nothing_is_opened: None) -> None:
    refusal(InputOutputError, "/", of=lambda: convert(GOLDEN / CASE, "/"))


def test_an_empty_folder_and_missing_parents_will_do(tmp_path: Path, whole: dict[str, bytes]) -> None:
    (tmp_path / "empty").mkdir()
    for dest in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        assert files_in(convert(GOLDEN / CASE, dest).path) == whole
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert files_in(convert(GOLDEN / CASE, tmp_path / "link").path) == whole == files_in(tmp_path / "target")


def test_folders_that_were_made_for_a_failed_conversion_go_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    source = make_folder(tmp_path / "source", CASE, {})
    refusal(BadInput, "no weights", of=lambda: convert(source, tmp_path / "a" / "b" / "c"))
    source = copy_case(CASE, tmp_path / "other")
    with pytest.raises(ZeroDivisionError):
        convert(source, tmp_path / "a" / "b" / "c", progress=lambda done, total: 1 // 0)
    assert list((tmp_path / "a").iterdir()) == []


# --- disks ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 250 KB; skips where this process may not make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=250k", "tmpfs", str(disk)]
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount a small disk")
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process may not mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_it_is_full(small_disk: Path, whole: dict[str, bytes]) -> None:
    parts = (str(small_disk), "needs 300,480 bytes", "are free")
    refusal(InputOutputError, *parts, of=lambda: convert(GOLDEN / "llama-mha", small_disk / "made", dtype="float32"))
    assert list(small_disk.iterdir()) == []
    assert files_in(convert(GOLDEN / CASE, small_disk / "made").path) == whole


def test_a_disk_that_becomes_full_leaves_nothing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_check_room", lambda parent, nbytes: None)
    problem = "the disk is full"
    refusal(InputOutputError, problem, of=lambda: convert(GOLDEN / "llama-mha", small_disk / "made", dtype="float32"))
    assert list(small_disk.iterdir()) == []


def test_what_a_killed_conversion_left_does_not_count_as_taken(small_disk: Path, whole: dict[str, bytes]) -> None:
    partial(small_disk / "made").mkdir()
    (partial(small_disk / "made") / "model.safetensors").write_bytes(bytes(230_000))
    assert files_in(convert(GOLDEN / CASE, small_disk / "made").path) == whole


def test_the_root_of_a_small_disk_is_refused(small_disk: Path, nothing_is_opened: None) -> None:
    refusal(InputOutputError, "is the root of a disk; choose a folder in it", of=lambda: convert("x", small_disk))


def test_a_folder_that_may_not_be_written_is_refused(small_disk: Path, nothing_is_opened: None) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for dest in (small_disk / "made", small_disk / "a" / "made"):
        refusal(InputOutputError, f"{small_disk}: may not be written", of=lambda dest=dest: convert("x", dest))


# --- two at once ---


def test_of_two_conversions_into_one_folder_the_later_one_fails(tmp_path: Path, whole: dict[str, bytes]) -> None:
    tried = []

    def meanwhile(done: int, total: int) -> None:
        if not tried:
            tried.append(done)
            busy = "another conversion is writing it"
            refusal(
                InputOutputError, str(tmp_path / "made"), busy, of=lambda: convert(GOLDEN / CASE, tmp_path / "made")
            )

    assert files_in(convert(GOLDEN / CASE, tmp_path / "made", progress=meanwhile).path) == whole
    assert tried and names_in(tmp_path) == ["made"]


def test_two_conversions_into_one_folder_that_start_together_give_one_whole_result(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    command = [sys.executable, "-c", CHILD, str(GOLDEN / CASE), str(tmp_path / "made"), "-1", str(NO_SIGNAL)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [(process.communicate(timeout=100), process.returncode) for process in running]
    assert sorted(code for _, code in ended) == [0, 4, 4], ended
    assert files_in(tmp_path / "made") == whole and names_in(tmp_path) == ["made"]


def test_a_destination_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    def meanwhile(done: int, total: int) -> None:
        (tmp_path / "made").mkdir(exist_ok=True)
        (tmp_path / "made" / "theirs").write_text("theirs")

    refusal(InputOutputError, "made", of=lambda: convert(GOLDEN / CASE, tmp_path / "made", progress=meanwhile))
    assert files_in(tmp_path) == {"made/theirs": b"theirs"}


def test_a_link_in_place_of_the_partial_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    partial(tmp_path / "made").symlink_to(tmp_path / "precious")
    refusal(InputOutputError, ".made.partial", of=lambda: convert(GOLDEN / CASE, tmp_path / "made"))
    assert (tmp_path / "precious" / "file").read_text() == "mine"


# --- a source that changes ---


@pytest.mark.parametrize("settings", [{}, {"quantize": 4, "group_size": 32}], ids=str)
def test_a_source_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    source = copy_case(CASE, tmp_path / "source")

    def meanwhile(done: int, total: int) -> None:
        os.truncate(source / "model.safetensors", 20_000)

    parts = (str(source / "model.safetensors"), "has changed since it was opened")
    refusal(BadInput, *parts, of=lambda: convert(source, tmp_path / "made", progress=meanwhile, **settings))
    assert names_in(tmp_path) == ["source"]


def test_a_source_that_vanishes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = copy_case(CASE, tmp_path / "source")

    def meanwhile(done: int, total: int) -> None:
        (source / "model.safetensors").unlink(missing_ok=True)

    parts = (str(source / "model.safetensors"), "No such file")
    refusal(InputOutputError, *parts, of=lambda: convert(source, tmp_path / "made", progress=meanwhile))
    assert names_in(tmp_path) == ["source"]


# --- signals at every step ---

CHILD = """
import os, signal, sys
import mlx_tformer
from mlx_tformer.checkpoint.convert import convert

source, target, moment, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
steps = 0

def step(event="progress", arguments=()):
    # One more thing done to the files of the conversion; the signal comes at the chosen one.
    global steps
    named = event.partition(".")[0] in ("open", "os", "shutil") and target in str(arguments)
    if not (named or event in ("progress", "fcntl.flock")):
        return
    if steps == moment:
        os.kill(os.getpid(), number)
    steps += 1

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as the command line does
sys.addaudithook(step)
try:
    convert(source, target, progress=lambda done, total: step())
except KeyboardInterrupt:
    sys.exit(130)
except mlx_tformer.MlxTformerError as error:
    sys.exit(error.exit_code)
print(steps)
"""
"""Converts, and sends itself a signal at a chosen step."""

EVERY_STEP = """
import json, os, shutil, sys
from pathlib import Path
import mlx_tformer
from mlx_tformer.checkpoint.convert import convert

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
target, moment, error, steps, seen = folder / "made", None, None, 0, set()

def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()} if path.exists() else None

def step(event="progress", arguments=()):
    # Nothing here may call what is watched.
    global steps, moment
    named = event.partition(".")[0] in ("open", "os", "shutil") and folder.name in str(arguments)
    if error is None or not (named or event in ("progress", "fcntl.flock")):
        return
    steps += 1
    if steps == moment:
        moment = None
        seen.add(event)
        raise error

os.fsync = lambda handle: None  # slow, and this is not about power cuts
sys.addaudithook(step)
whole = files(convert(source, folder / "reference").path)
shutil.rmtree(folder / "reference")
outcomes = []
at, done = 1, False
while not done:
    steps, moment, error = 0, at, KeyboardInterrupt()
    try:
        convert(source, target, progress=lambda d, t: step())
        done = True
    except KeyboardInterrupt:
        pass
    error = None
    found, left = files(target), sorted(p.name for p in folder.iterdir())
    outcomes.append([at, "absent" if found is None else "whole" if found == whole else "broken", left])
    shutil.rmtree(target, ignore_errors=True)
    if files(convert(source, target).path) != whole:
        outcomes.append([at, "broken retry", []])
    shutil.rmtree(target)
    at += 1
print(json.dumps([outcomes, sorted(seen)]))
"""
"""Converts again and again, interrupted at each step in turn, and says what was left."""


def test_an_interrupt_at_any_step_leaves_nothing_or_all_and_a_retry_works(tmp_path: Path) -> None:
    folder = tmp_path / "watched-folder"
    folder.mkdir()
    command = [sys.executable, "-c", EVERY_STEP, str(GOLDEN / CASE), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    outcomes, seen = json.loads(run.stdout)
    assert {"open", "os.rename", "os.mkdir", "fcntl.flock", "progress"} <= set(seen)
    assert len(outcomes) > 30
    assert {(state, *left) for _, state, left in outcomes} == {("absent",), ("whole", "made")}


def run_child(target: Path, moment: int, number: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(GOLDEN / CASE), str(target), str(moment), str(number)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> int:
    """In how many steps a conversion can be interrupted."""
    return int(run_child(tmp_path_factory.mktemp("steps") / "made", -1, NO_SIGNAL).stdout)


SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_leaves_nothing_or_all_and_a_retry_works(
    tmp_path: Path, whole: dict[str, bytes], steps: int, number: signal.Signals
) -> None:
    assert steps > 30
    for moment in (2, steps // 3, steps - 4, steps - 2):
        target = tmp_path / f"{moment}" / "made"
        ended = run_child(target, moment, number)
        assert ended.returncode == SIGNALS[number], (moment, ended)
        assert not target.exists() or files_in(target) == whole
        if number != signal.SIGKILL:
            assert not partial(target).exists()
        if not target.exists():
            assert files_in(convert(GOLDEN / CASE, target).path) == whole
        assert names_in(target.parent) == ["made"]


# --- the order of things ---


def test_every_file_is_on_the_disk_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    at_rename: list[set[int]] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(handle: int) -> None:
        fsync(handle)
        synced.add(os.fstat(handle).st_ino)

    def watched_rename(path: Path, target: Path) -> Path:
        at_rename.append({entry.stat().st_ino for entry in (path, *path.iterdir())} - synced)
        synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    convert(GOLDEN / CASE, tmp_path / "made")
    assert at_rename == [set()]
    assert synced == {tmp_path.stat().st_ino}


def test_a_block_that_ends_well_gives_the_folder_and_one_that_does_not_nothing(tmp_path: Path) -> None:
    with new_folder(tmp_path / "good", None, 0) as folder:
        (folder / "x").write_text("x")
        assert not (tmp_path / "good").exists()
    assert files_in(tmp_path) == {"good/x": b"x"}
    with pytest.raises(KeyError), new_folder(tmp_path / "bad", None, 0) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "x").write_text("x")
        raise KeyError
    assert names_in(tmp_path) == ["good"]


def test_what_a_killed_conversion_left_is_cleared_away(tmp_path: Path, whole: dict[str, bytes]) -> None:
    left = partial(tmp_path / "made")
    (left / "deep").mkdir(parents=True)
    (left / "deep" / "x").write_text("x")
    (left / "stray.safetensors").write_text("x")
    made = convert(GOLDEN / CASE, tmp_path / "made").path
    assert files_in(made) == whole and names_in(tmp_path) == ["made"]
    assert same(mt.load(made)(mx.array([[1]])), mt.load(GOLDEN / CASE)(mx.array([[1]])))
    assert read_weights(made)
