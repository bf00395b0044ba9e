"""Any checkpoint into our own layout, some rows of a tensor at a time, so that far less memory is needed than the
model has.

The folder is written beside its destination and renamed when it is complete and on the disk: it exists whole or not
at all.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import BadInput, UsageError
from .atomic import check_target, new_folder
from .folder import LAYOUT, read_json
from .load import FLOATS, as_float, check_copies, stored_dtype
from .mixed import LARGEST, Packing, choose, packed, packing
from .open import open_source
from .output import Progress, write_files, write_json, write_weights
from .plan import Plan, dtype_name, pack, packed_dtype, packed_names, plan, shapes
from .safetensors_file import CODES
from .source import Quantization, Source, Tensor

SHARD = 5_000_000_000
"""Bytes of weights in one file at most, unless a single module has more."""


@dataclass(frozen=True)
class Settings:
    """What a conversion is asked to do."""

    dtype: mx.Dtype
    packing: Packing | None = None
    allow_nonfinite: bool = False


@dataclass
class Conversion:
    """What was done: the folder, and the record that lies in it as `conversion.json`."""

    path: Path
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each tensor of ours: what it came from, its shape and dtype, and the largest error if values changed."""
    dropped: dict[str, str] = field(default_factory=dict)
    unquantized: list[str] = field(default_factory=list)
    """What was not quantized although that was asked for, with the reason."""
    parameters: int = 0
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk for each weight of the model."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0

    @property
    def largest_error(self) -> float:
        """The largest difference between a value of the source and what became of it."""
        return max((entry.get("error", 0.0) for entry in self.tensors.values()), default=0.0)


def convert(
    where: str | Path,
    dest: str | Path | None = None,
    *,
    dtype: str | None = None,
    quantize: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    recipe: str | None = None,
    keep: str | Iterable[str] = (),
    revision: str | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write the checkpoint at `where` (a folder, a .gguf file, a hub id) to the folder `dest` in our layout.

    dest: a folder that does not exist or is empty; `weights/NAME` by default. dtype: "float32", "float16" or
    "bfloat16" (None: as stored). quantize: bits of a weight (2, 3, 4, 5, 6 or 8), for every matrix whose rows are
    whole groups of `group_size` (32, 64 or 128; None: 64). mode: "affine", or "mxfp4", "mxfp8" and "nvfp4", which
    have bits and groups of their own (`MODES`). recipe: instead of bits, a name in `RECIPES`, such as "mixed-4-6".
    keep: modules that stay as they are, as globs over our paths and the checkpoint's, or as words of them, such as
    "head" or "layers.0"; separated by commas or one by one. Routers, gates of shared experts, rates of the delta rule,
    norms and positions are never quantized. What the source has quantized already keeps its values.

    Raises UsageError for settings that cannot be, BadInput for a source that is broken, not understood or not
    finite, and InputOutputError for a destination that cannot be written; in every case nothing is left behind.
    """
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(f"dtype: found {dtype!r}, expected one of {', '.join(FLOATS)}")
    asked = packing(quantize, group_size, mode, recipe, keep)
    target = default_dest(where) if dest is None else Path(dest)
    check_target(target, Path(where) if Path(where).exists() else None)  # before anything is fetched
    source = open_source(where, revision=revision)
    kind = stored_dtype(source) if dtype is None else FLOATS[dtype]
    settings = Settings(kind, asked, allow_nonfinite)
    made = plan(source)
    check_copies(made, source)
    todo = _Work(made, source, settings)
    with new_folder(target, source_path(source), todo.nbytes) as folder:
        todo.write(folder, progress)
    todo.result.path = target
    return todo.result


def default_dest(where: str | Path) -> Path:
    """Where a conversion goes if nothing is said: `weights/NAME` in the current folder."""
    name = Path(str(where).rpartition(":")[0] or str(where)).name
    return Path("weights") / (name.removesuffix(".gguf") or "model")


def source_path(source: Source) -> Path | None:
    """The source's own folder or file, which must not be written over."""
    path = Path(source.config_file)
    return path.parent if path.exists() else None


class _Work:
    """One conversion: what is to be written, worked out beforehand, and the writing."""

    def __init__(self, made: Plan, source: Source, settings: Settings):
        self.made, self.source, self.settings = made, source, settings
        self.result = Conversion(Path(), dropped=dict(made.assignment.dropped), notes=[*source.notes, *made.notes])
        self.result.dropped |= {name: f"a copy of {to}" for name, to in made.assignment.copies.items()}
        self.parameters = {name: _logical(shape, name, made) for name, shape in shapes(made.model).items()}
        self.ways: dict[str, Quantization] = {}
        if settings.packing is not None:
            choice = choose(made, settings.packing)
            self.ways, self.result.unquantized = choice.ways, choice.left
        pack(made.model, self.ways)
        self.tensors = {name: Tensor(shape, self._dtype(name)) for name, shape in shapes(made.model).items()}
        self.result.parameters = sum(self.parameters.values())
        self.result.nbytes = self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the weights to be written."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def _dtype(self, name: str) -> mx.Dtype:
        """What a tensor of ours is stored as."""
        kind = packed_dtype(name, {**self.made.quantization, **self.ways})
        return self.made.float_dtype(name, self.settings.dtype, self.source) if kind is None else kind

    def write(self, folder: Path, progress: Progress | None) -> None:
        """Put the whole layout into an empty folder."""
        write_weights(folder, self.tensors, self._values(), largest=SHARD, progress=progress)
        write_files(folder, self.source.companions())
        write_json(folder / "config.json", self._config())
        write_json(folder / "conversion.json", self._record())

    def _values(self) -> Iterator[tuple[str, mx.array]]:
        """The rows of all tensors in order, made when they are asked for and not kept."""
        ready: dict[str, mx.array] = {}
        for name in self.tensors:
            if name in ready:
                yield name, ready.pop(name)
            elif name.endswith(".weight") and name.removesuffix(".weight") in self.ways:
                ready |= yield from self._quantize(name)
            else:
                yield from self._cast(name)

    def _cast(self, name: str) -> Iterator[tuple[str, mx.array]]:
        """The rows of a tensor in the dtype that was asked for."""
        made = _Made()
        for raw in self.made.recipes[name].blocks(self.source):
            value = as_float(raw, self.tensors[name].dtype)
            made.add(raw, value, value)
            yield name, value
        self._finish(name, made)

    def _quantize(self, name: str) -> Generator[tuple[str, mx.array], None, dict[str, mx.array]]:
        """The rows of a weight, packed; returns the scales and biases, which are few."""
        how = self.ways[name.removesuffix(".weight")]
        made = _Made(rounded=True, mode=how["mode"])
        rest: dict[str, list[mx.array]] = {leaf: [] for leaf in packed_names(name, how["mode"])[1:]}
        for raw in self.made.recipes[name].blocks(self.source):
            value = as_float(raw, self.settings.dtype)
            weight, *others = packed(value, how)
            scales, *biases = others
            made.add(raw, value, mx.dequantize(weight, scales, biases[0] if biases else None, **how))
            mx.eval(weight, others)
            for parts, part in zip(rest.values(), others, strict=True):
                parts.append(part)
            yield name, weight
        self._finish(name, made)
        for leaf in rest:
            self._record_tensor(leaf, name)
        return {leaf: mx.concatenate(parts) for leaf, parts in rest.items()}

    def _finish(self, name: str, made: "_Made") -> None:
        """Record a tensor that is written; raises BadInput if it has values that are not finite."""
        self._record_tensor(name, name)
        if made.rounded:
            self.result.tensors[name]["error"] = made.error
        if self.settings.allow_nonfinite or made.nonfinite == 0:
            return
        if made.nonfinite_before:
            count = made.nonfinite_before
            problem = f"found {count} values that are NaN or infinite; --allow-nonfinite converts them as they are"
        elif made.limit is not None:
            most = f"{made.mode}, which ends at {made.limit:g}"
            problem = f"{made.nonfinite} values do not fit {most}; choose another --mode"
        else:
            problem = f"{made.nonfinite} values do not fit {dtype_name(self.settings.dtype)}; choose another --dtype"
        sources = ", ".join(piece.source for piece in self.made.recipes[name].pieces)
        raise BadInput(problem, file=self.source.origin, field=sources)

    def _record_tensor(self, name: str, weight: str) -> None:
        """Put into the result what a tensor is and what it was made of, which is what `weight` was made of."""
        tensor, pieces = self.tensors[name], self.made.recipes[weight].pieces
        entry = {"from": [piece.source for piece in pieces], "shape": list(tensor.shape), "dtype": CODES[tensor.dtype]}
        self.result.tensors[name] = entry

    def _config(self) -> dict[str, Any]:
        """The source's config, and under `mlx_tformer` what is ours."""
        source = {"source": self.source.origin, "revision": self.source.revision}
        earlier = self.source.config.get("mlx_tformer") or source
        ways = {name: dict(how) for name, how in sorted({**self.made.quantization, **self.ways}.items())}
        ours = {"layout": LAYOUT, **{key: earlier.get(key) for key in source}}
        ours |= {"dtype": dtype_name(self.settings.dtype), "quantization": ways}
        return {**self.source.config, "mlx_tformer": ours}

    def _record(self) -> dict[str, Any]:
        """What `conversion.json` says; for a conversion of a conversion, where things came from in the first place."""
        result, earlier = self.result, recorded(self.source)
        for name, entry in result.tensors.items():
            source = entry["from"][0]  # the only one, if there is an earlier record: the names were ours already
            before = earlier.tensors.get(source, entry)
            entry["from"] = before["from"]
            if source == name and "error" in before and before is not entry:
                entry["error"] = entry.get("error", 0.0) + before["error"]  # of two roundings, at most
        return {
            "layout": LAYOUT,
            "parameters": result.parameters,
            "bytes": result.nbytes,
            "bits_per_weight": round(result.bits_per_weight, 4),
            "largest_error": result.largest_error,
            "unquantized": result.unquantized or earlier.unquantized,
            "dropped": earlier.dropped | result.dropped,
            "tensors": result.tensors,
        }


@dataclass
class _Made:
    """What became of the values of a tensor, added up block by block."""

    rounded: bool = False
    mode: str = "affine"
    """How they are packed."""
    error: float = 0.0
    nonfinite_before: int = 0
    nonfinite: int = 0

    @property
    def limit(self) -> float | None:
        """The largest value that the mode can hold, if it has one."""
        return LARGEST.get(self.mode)

    def add(self, raw: mx.array, cast: mx.array, stored: mx.array) -> None:
        """Compare some rows: as they were, in the dtype that was asked for, and as they will be read back."""
        if not mx.issubdtype(raw.dtype, mx.floating):
            return
        nonfinite = _nonfinite(cast, self.limit)
        self.nonfinite += nonfinite
        self.nonfinite_before += _nonfinite(raw) if nonfinite else 0
        self.rounded = self.rounded or raw.dtype != cast.dtype
        if self.rounded:
            gap = mx.abs(raw.astype(mx.float32) - stored.astype(mx.float32))
            largest = (mx.where(mx.isfinite(gap), gap, 0) if nonfinite else gap).max().item()
            assert isinstance(largest, float)
            self.error = max(self.error, largest)


def _nonfinite(values: mx.array, limit: float | None = None) -> int:
    """How many values are NaN or infinite, or beyond a limit."""
    good = mx.isfinite(values) if limit is None else mx.abs(values) <= limit
    count = good.sum().item()
    assert isinstance(count, int)
    return values.size - count


def _logical(shape: tuple[int, ...], name: str, made: Plan) -> int:
    """How many weights of the model a tensor stands for: packed ones hold several in a word, scales none."""
    module, _, leaf = name.rpartition(".")
    how = made.quantization.get(module)
    if how is not None and leaf in ("scales", "biases"):
        return 0
    count = 1
    for side in shape:
        count *= side
    return count if how is None or leaf != "weight" else count * 32 // how["bits"]


def recorded(source: Source) -> Conversion:
    """The record of the conversion that made the source, as far as it is one of ours; raises BadInput if it is none."""
    earlier = Conversion(Path())
    path = Path(source.config_file).with_name("conversion.json")
    if not source.ours or not path.exists():
        return earlier
    found = read_json(path)
    for key, kind in {"tensors": dict, "dropped": dict, "unquantized": list}.items():
        if not isinstance(found.get(key), kind):
            raise BadInput("found something else than the record of a conversion; remove it", file=path, field=key)
    for name, entry in found["tensors"].items():
        if not _is_entry(entry):
            raise BadInput("found something else than the record of a tensor", file=path, field=f"tensors.{name}")
    for name, reason in found["dropped"].items():
        if not isinstance(reason, str):
            raise BadInput(f"found {reason!r}, expected why it was dropped", file=path, field=f"dropped.{name}")
    earlier.tensors, earlier.dropped, earlier.unquantized = found["tensors"], found["dropped"], found["unquantized"]
    return earlier


def _is_entry(entry: Any) -> bool:
    """True for what is recorded of a tensor."""
    if not isinstance(entry, dict) or not isinstance(entry.get("error", 0.0), int | float):
        return False
    sources = entry.get("from")
    return isinstance(sources, list) and all(isinstance(source, str) for source in sources)
