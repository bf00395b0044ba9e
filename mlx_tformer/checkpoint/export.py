"""A folder of ours as a Hugging Face folder again: the names, the orders and the files that the source had.

What was not rounded comes out as it went in, bit for bit. Some rows of a tensor are in memory at a time; the folder is
written beside its destination and renamed when it is complete.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import BadInput, UsageError
from ..names import Names, Piece, assign, summary
from .atomic import check_target, new_folder
from .convert import SHARD, recorded, source_path
from .language_part import language_names
from .load import FLOATS, as_float, stored_dtype
from .mlx_names import with_mlx_names
from .open import open_source
from .output import Progress, write_files, write_json, write_weights
from .plan import Plan, Recipe, dtype_name, plan, unpacked
from .source import Quantization, Source, Tensor
from .undo import origins, piece_shape, taken_apart

COPY = "a copy of "
"""How the record of a conversion begins to say why a tensor was left out that the source had twice."""
OTHERS = ("mlx_tformer", "quantization", "quantization_config")
"""Keys of the config that are about how weights are stored, which is another way now."""


@dataclass
class Export:
    """What was done."""

    path: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What was written, by the checkpoint's names."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What the source had and this has not, and why."""
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def export(
    where: str | Path, dest: str | Path, *, dtype: str | None = None, progress: Progress | None = None
) -> Export:
    """Write a folder that `convert` made as a Hugging Face folder: config.json, weights and index, the other files.

    where: the folder, or its name below `weights/`. dest: a folder that does not exist or is empty. dtype: "float32",
    "float16" or "bfloat16", in which all weights are then (None: as they are stored).

    Names are those that the source had, which conversion.json says; without it, those of the family's newest
    checkpoints. What a conversion packed is unpacked. Modules that were packed in the source already stay packed, as
    MLX community checkpoints are, unless a `dtype` is named. Buffers that a conversion dropped are not made again.

    Raises UsageError for a dtype that is none, BadInput for a folder that is not ours or is broken, and
    InputOutputError for a destination that cannot be written; in every case nothing is left behind.
    """
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(f"dtype: found {dtype!r}, expected one of {', '.join(FLOATS)}")
    source, target = open_source(where), Path(dest)
    if not source.ours:
        raise BadInput("has no key mlx_tformer: only what convert wrote can be exported", file=source.config_file)
    check_target(target, source_path(source))
    todo = _Work(plan(source), source, None if dtype is None else FLOATS[dtype])
    with new_folder(target, source_path(source), todo.result.nbytes) as folder:
        todo.write(folder, progress)
    todo.result.path = target
    return todo.result


@dataclass(frozen=True)
class _Ours:
    """One of our tensors: how it is read, its shape then, what it becomes, and the tensors that are taken out of it."""

    recipe: Recipe
    shape: tuple[int, ...]
    dtype: mx.Dtype
    pieces: list[Piece]


class _Work:
    """One export: what is to be written, worked out beforehand, and the writing."""

    def __init__(self, made: Plan, source: Source, dtype: mx.Dtype | None):
        self.made, self.source, self.dtype = made, source, dtype
        self.record = recorded(source)
        table = with_mlx_names(made.family.name, made.family.names(made.config))
        called = chain(*(entry["from"] for entry in self.record.tensors.values()))
        self.names: Names = language_names(table, source.config, called)
        stay = made.quantization if dtype is None else {}
        self.packed = {path: how for path, how in stay.items() if self._came_packed(path)}
        self.ours = self._ours()
        self.copies = self._copies()
        self.result = Export(Path(), tensors=self._tensors(), left_out=self._left_out(), notes=self._notes())

    def _came_packed(self, path: str) -> bool:
        """True if a module was packed in the source of the conversion."""
        scales = self.record.tensors.get(f"{path}.scales", {"from": []})["from"]
        return bool(scales) and all(name.endswith(".scales") for name in scales)

    def _ours(self) -> dict[str, _Ours]:
        """Our tensors, those of modules that do not stay packed unpacked; raises BadInput for those that the family
        has no name for."""
        found: dict[str, tuple[Recipe, Tensor]] = {}
        for name, tensor in self.source.tensors.items():
            module, _, leaf = name.rpartition(".")
            how = None if module in self.packed else self.made.quantization.get(module)
            if how is None or leaf not in ("weight", "scales", "biases"):
                found[name] = Recipe((Piece(name),), {}), Tensor(tensor.shape, self._dtype(tensor.dtype))
            elif leaf == "weight":
                kind = self._dtype(stored_dtype(self.source))
                found[name] = Recipe((Piece(name),), {name: how}), Tensor(unpacked(tensor, how).shape, kind)
        sources = {name: entry["from"] for name, entry in self.record.tensors.items()}
        pieces = origins({name: tensor.shape for name, (_, tensor) in found.items()}, self.names, sources)
        nameless = [name for name in found if not pieces[name]]
        if nameless:
            problem = f"{self.made.family.name} has no names for {summary(nameless)}"
            raise BadInput(problem, file=self.source.origin)
        return {name: _Ours(how, to.shape, to.dtype, pieces[name]) for name, (how, to) in found.items()}

    def _dtype(self, stored: mx.Dtype) -> mx.Dtype:
        """What a tensor becomes."""
        return stored if self.dtype is None or not mx.issubdtype(stored, mx.floating) else self.dtype

    def _copies(self) -> dict[str, str]:
        """Tensors that the source had twice, and ours that they are equal to."""
        names = [name for name, reason in self.record.dropped.items() if reason.startswith(COPY)]
        return {name: to for name, to in assign(names, self.names).copies.items() if to in self.ours}

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for ours in self.ours.values():
            for piece in ours.pieces:
                if piece.source in found:
                    raise BadInput("stands for two tensors", file=self.source.origin, field=piece.source)
                found[piece.source] = Tensor(piece_shape(piece, ours.shape), ours.dtype)
        for name, to in self.copies.items():
            found[name] = Tensor(self.ours[to].shape, self.ours[to].dtype)
        return found

    def _left_out(self) -> dict[str, str]:
        return {name: reason for name, reason in self.record.dropped.items() if name not in self.copies}

    def _notes(self) -> list[str]:
        """What a user should know: what is not as it was in the source."""
        notes, record = list(self.source.notes), self.record.tensors
        loose = sorted(self.made.quantization.keys() - self.packed.keys())
        if loose:
            notes.append(f"unpacked, with the values that rounding left: {summary(loose)}")
        if self.packed:
            notes.append(f"packed as in MLX community checkpoints, as it came: {summary(sorted(self.packed))}")
        rounded = [n for n, entry in record.items() if entry.get("error") and n.rpartition(".")[0] not in loose]
        if rounded:
            notes.append(f"rounded when it was converted: {summary(sorted(rounded))}")
        if not record:
            notes.append("no conversion.json says what the source called its tensors: named as the family usually does")
        return notes

    def write(self, folder: Path, progress: Progress | None) -> None:
        """Put the whole checkpoint into an empty folder."""
        write_weights(
            folder,
            self.result.tensors,
            self._values(),
            largest=SHARD,
            unit=str,  # each by itself: what was a module of theirs comes out in several places
            metadata={"format": "pt"},  # without which transformers refuses a file
            progress=progress,
        )
        write_files(folder, self.source.companions())
        write_json(folder / "config.json", self._config())

    def _values(self) -> Iterator[tuple[str, mx.array]]:
        """The rows of all tensors in order."""
        copies = ((to, [Piece(name)]) for name, to in self.copies.items())
        for name, pieces in chain(((name, ours.pieces) for name, ours in self.ours.items()), copies):
            ours = self.ours[name]
            blocks = partial(ours.recipe.blocks, self.source)
            for theirs, rows in taken_apart(blocks, ours.shape, pieces):
                yield theirs, self._cast(rows, ours.dtype, theirs)

    def _cast(self, rows: mx.array, dtype: mx.Dtype, name: str) -> mx.array:
        """Rows in the dtype that they are to have; raises BadInput if that has no room for a value."""
        value = as_float(rows, dtype)
        if value.dtype != rows.dtype and mx.any(mx.isfinite(rows) & ~mx.isfinite(value)).item():
            raise BadInput(f"has values that do not fit {dtype_name(dtype)}", file=self.source.origin, field=name)
        return value

    def _config(self) -> dict[str, Any]:
        """The source's config, with the dtype and the packing that the weights have now."""
        config = {key: value for key, value in self.source.config.items() if key not in OTHERS}
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = dtype_name(self._dtype(stored_dtype(self.source)))
        if self.packed:
            config["quantization"] = self._quantization()
        return config

    def _quantization(self) -> dict[str, Any]:
        """How modules are packed, as MLX community checkpoints say it."""
        ways: dict[str, Mapping[str, Any]] = {
            piece.source.removesuffix(".weight"): dict(how)
            for path, how in self.packed.items()
            for piece in self.ours[f"{path}.weight"].pieces
        }
        usual: Quantization = max(ways.values(), key=list(ways.values()).count)
        return {**usual, **{name: how for name, how in ways.items() if how != usual}}
