"""A new folder that exists whole or not at all, and that one process at a time may write."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import InputOutputError


def check_target(target: Path, source: Path | None) -> None:
    """Raise InputOutputError unless a new folder can be put at `target`: nothing is there, or an empty folder, and the
    folder above may be written."""
    with _plainly(target):
        target = target.resolve()
        if source is not None and target == source.resolve():
            raise InputOutputError(f"{target}: is the source itself; choose another destination")
        if target.is_dir():
            if any(target.iterdir()):
                raise InputOutputError(f"{target}: is not empty; choose another destination or remove it first")
            if target.is_mount():
                raise InputOutputError(f"{target}: is the root of a disk; choose a folder in it")
        above = next(path for path in (target, *target.parents) if path.exists())
        if not above.is_dir():
            raise InputOutputError(f"{above}: is a file; choose another destination")
        if not os.access(above, os.W_OK | os.X_OK):
            raise InputOutputError(f"{above}: may not be written; choose another destination")


@contextmanager
def new_folder(target: Path, source: Path | None, nbytes: int) -> Iterator[Path]:
    """Gives an empty folder beside `target`; when the block ends well, it is put on the disk and renamed to `target`.

    Checked before anything is written: `target` does not exist or is empty, is not `source`, can be made, and
    `nbytes` fit on the disk. If the block fails nothing is left behind. Of two processes that write the same target
    the later one fails. Raises InputOutputError with the reason.
    """
    check_target(target, source)
    with _plainly(target), _parents(target.resolve()):
        target = target.resolve()
        partial = target.with_name(f".{target.name}.partial")
        with _locked(partial, target):
            _empty(partial)
            check_target(target, source)  # again: it may have been made before the lock was ours
            _check_room(target.parent, nbytes)
            yield partial
            _sync(partial)
            partial.rename(target)
            _sync_folder(target.parent)


@contextmanager
def _parents(target: Path) -> Iterator[None]:
    """Make the folders above `target`; those that were not there before go again if the block fails."""
    new = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in new:
            with suppress(OSError):  # not empty: somebody else writes there
                folder.rmdir()
        raise


def _check_room(parent: Path, nbytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise InputOutputError(f"{parent}: needs {nbytes:,} bytes, {free:,} are free")


@contextmanager
def _locked(partial: Path, target: Path) -> Iterator[None]:
    """Make the partial folder and hold a lock on it; if the block fails it is removed.

    The lock goes with the process, so that a killed one blocks nobody.
    """
    lock = _lock(partial, target)
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(partial: Path, target: Path) -> int:
    try:
        partial.mkdir(exist_ok=True)
        with ExitStack() as opened:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if partial.stat().st_ino == os.fstat(lock).st_ino:
                opened.pop_all()
                return lock
    except (BlockingIOError, FileNotFoundError):
        pass  # somebody else writes there, or has just finished
    except BaseException:
        with suppress(OSError):  # not empty, or not a folder: not ours
            partial.rmdir()
        raise
    raise InputOutputError(f"{target}: another conversion is writing it")


def _empty(folder: Path) -> None:
    """Remove what a killed process left."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _sync(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            _sync(entry)
            continue
        with entry.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _plainly(target: Path) -> Iterator[None]:
    """What the operating system refuses, in one line."""
    try:
        yield
    except InputOutputError:
        raise
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise InputOutputError(f"{error.filename or target}: {reason}") from None
