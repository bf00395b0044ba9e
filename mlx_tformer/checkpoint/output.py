"""Writing a folder of weights: which tensors go into which file, the files one after the other, the index."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx

from .folder import INDEX, SINGLE
from .safetensors_file import SafetensorsWriter
from .source import Tensor

Progress = Callable[[int, int], None]
"""Told the bytes written so far and in all."""
Unit = Callable[[str], str]
"""Says of a tensor what it belongs to."""


def module_of(tensor: str) -> str:
    """The module that a tensor belongs to."""
    return tensor.rpartition(".")[0]


def shards(tensors: Mapping[str, Tensor], largest: int, unit: Unit = module_of) -> dict[str, list[str]]:
    """The tensors of each file, in their order; neighbours of which `unit` says the same stay together.

    A file has at most `largest` bytes of values, unless a single unit has more.

    >>> vector = Tensor((4,), mx.float32)
    >>> shards({"a.weight": vector, "a.bias": vector, "b.weight": vector}, 32)
    {'model-00001-of-00002.safetensors': ['a.weight', 'a.bias'], 'model-00002-of-00002.safetensors': ['b.weight']}
    """
    groups: list[list[str]] = [[]]
    size = 0
    for _, unit_names in groupby(tensors, key=unit):
        names = list(unit_names)
        nbytes = sum(tensors[name].nbytes for name in names)
        if groups[-1] and size + nbytes > largest:
            groups.append([])
            size = 0
        groups[-1] += names
        size += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    values: Iterable[tuple[str, mx.array]],
    *,
    largest: int,
    unit: Unit = module_of,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write these tensors, in one file or in several with an index; `values` gives them in order, some rows at a
    time."""
    files, done, total = shards(tensors, largest, unit), 0, sum(tensor.nbytes for tensor in tensors.values())
    place = {name: file for file, names in files.items() for name in names}
    for file, parts in groupby(values, key=lambda part: place[part[0]]):
        with _writing(folder / file, {name: tensors[name] for name in files[file]}, metadata) as writer:
            for name, rows in parts:
                writer.write(name, rows)
                done += rows.nbytes
                if progress is not None:
                    progress(done, total)
                mx.clear_cache()
    if len(files) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": place})


@contextmanager
def _writing(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[SafetensorsWriter]:
    writer = SafetensorsWriter(path, tensors, metadata)
    try:
        yield writer
        writer.close()
    finally:
        writer.abandon()


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Files by their names in a folder, in folders of their own where a name says so."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file, in ASCII, since a name may hold what is no UTF-8."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")
