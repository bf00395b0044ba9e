"""Any checkpoint into our own layout, some rows of a tensor at a time, so that far less memory is needed than the
model has.

The folder is written beside its destination and renamed when it is complete and on the disk: it exists whole or not
at all.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import BadInput, UsageError
from .atomic import check_target, new_folder
from .folder import INDEX, LAYOUT, SINGLE, read_json
from .load import FLOATS, as_float, check_copies, stored_dtype
from .open import open_source
from .plan import PACKABLE, Plan, dtype_name, pack, plan, shapes
from .safetensors_file import CODES, SafetensorsWriter
from .source import BITS, GROUPS, Quantization, Source, Tensor

SHARD = 5_000_000_000
"""Bytes of weights in one file at most, unless a single module has more."""

Progress = Callable[[int, int], None]
"""Told the bytes written so far and in all."""


@dataclass(frozen=True)
class Settings:
    """What a conversion is asked to do."""

    dtype: mx.Dtype
    bits: int | None = None
    group_size: int = 64
    allow_nonfinite: bool = False

    @property
    def quantization(self) -> Quantization | None:
        """How modules are to be packed, or None."""
        return None if self.bits is None else {"bits": self.bits, "group_size": self.group_size, "mode": "affine"}


@dataclass
class Conversion:
    """What was done: the folder, and the record that lies in it as `conversion.json`."""

    path: Path
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each tensor of ours: what it came from, its shape and dtype, and the largest error if values changed."""
    dropped: dict[str, str] = field(default_factory=dict)
    unquantized: list[str] = field(default_factory=list)
    """Modules that were asked to be quantized and could not be, with the reason."""
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
    group_size: int = 64,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write the checkpoint at `where` (a folder, a .gguf file, a hub id) to the folder `dest` in our layout.

    dest: a folder that does not exist or is empty; `weights/NAME` by default. dtype: "float32", "float16" or
    "bfloat16" (None: as stored). quantize: bits of a weight (2, 3, 4, 5, 6 or 8), for every matrix whose rows are
    whole groups of `group_size` (32, 64 or 128). What the source has quantized already keeps its values.

    Raises UsageError for settings that cannot be, BadInput for a source that is broken, not understood or not
    finite, and InputOutputError for a destination that cannot be written; in every case nothing is left behind.
    """
    _check_settings(dtype, quantize, group_size)
    target = default_dest(where) if dest is None else Path(dest)
    check_target(target, Path(where) if Path(where).exists() else None)  # before anything is fetched
    source = open_source(where, revision=revision)
    kind = stored_dtype(source) if dtype is None else FLOATS[dtype]
    settings = Settings(kind, quantize, group_size, allow_nonfinite)
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


def _check_settings(dtype: str | None, quantize: int | None, group_size: int) -> None:
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(f"dtype: found {dtype!r}, expected one of {', '.join(FLOATS)}")
    if quantize is not None and quantize not in BITS:
        raise UsageError(f"quantize: found {quantize}, expected one of {', '.join(map(str, BITS))} bits")
    if group_size not in GROUPS:
        raise UsageError(f"group_size: found {group_size}, expected one of {', '.join(map(str, GROUPS))}")


class _Work:
    """One conversion: what is to be written, worked out beforehand, and the writing."""

    def __init__(self, made: Plan, source: Source, settings: Settings):
        self.made, self.source, self.settings = made, source, settings
        self.result = Conversion(Path(), dropped=dict(made.assignment.dropped), notes=list(source.notes))
        self.result.dropped |= {name: f"a copy of {to}" for name, to in made.assignment.copies.items()}
        self.parameters = {name: _logical(shape, name, made) for name, shape in shapes(made.model).items()}
        self.quantized = self._choose()
        pack(made.model, {name: settings.quantization or {} for name in self.quantized})
        self.tensors = {name: Tensor(shape, self._dtype(name)) for name, shape in shapes(made.model).items()}
        self.result.parameters = sum(self.parameters.values())
        self.result.nbytes = self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the weights to be written."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def _choose(self) -> list[str]:
        """The modules to quantize; those that cannot be are put into the result with the reason."""
        if self.settings.bits is None:
            return []
        chosen = []
        for path, module in self.made.model.named_modules():
            if not isinstance(module, PACKABLE):
                continue
            width = module.weight.shape[-1]
            if width % self.settings.group_size:
                problem = f"rows of {width} are not whole groups of {self.settings.group_size}"
                self.result.unquantized.append(f"{path}: {problem}")
            else:
                chosen.append(path)
        return chosen

    def _dtype(self, name: str) -> mx.Dtype:
        """What a tensor of ours is stored as."""
        module, _, leaf = name.rpartition(".")
        packed = module in self.made.quantization or module in self.quantized
        if leaf == "weight" and packed:
            return mx.uint32
        return self.settings.dtype

    def write(self, folder: Path, progress: Progress | None) -> None:
        """Put the whole layout into an empty folder."""
        done, shards = 0, self._shards()
        for file, names in shards.items():
            with _writing(folder / file, {name: self.tensors[name] for name in names}) as writer:
                for name, rows in self._values(names):
                    writer.write(name, rows)
                    done += rows.nbytes
                    if progress is not None:
                        progress(done, self.nbytes)
                    mx.clear_cache()
        if len(shards) > 1:
            _write_index(folder, shards, self.nbytes)
        for file, content in self.source.companions().items():
            (folder / file).write_bytes(content)
        _write_json(folder / "config.json", self._config())
        _write_json(folder / "conversion.json", self._record())

    def _shards(self) -> dict[str, list[str]]:
        """The tensors of each file, in the order in which they are written; the parts of a module stay together."""
        modules: dict[str, list[str]] = {}
        for name in self.tensors:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        groups: list[list[str]] = [[]]
        size = 0
        for names in modules.values():
            nbytes = sum(self.tensors[name].nbytes for name in names)
            if groups[-1] and size + nbytes > SHARD:
                groups.append([])
                size = 0
            groups[-1] += names
            size += nbytes
        if len(groups) == 1:
            return {SINGLE: groups[0]}
        return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}

    def _values(self, names: list[str]) -> Iterator[tuple[str, mx.array]]:
        """The rows of these tensors in order, made when they are asked for and not kept."""
        ready: dict[str, mx.array] = {}
        for name in names:
            if name in ready:
                yield name, ready.pop(name)
            elif name.endswith(".weight") and name.removesuffix(".weight") in self.quantized:
                ready |= yield from self._quantize(name)
            else:
                yield from self._cast(name)

    def _cast(self, name: str) -> Iterator[tuple[str, mx.array]]:
        """The rows of a tensor in the dtype that was asked for."""
        made = _Made()
        for raw in self.made.recipes[name].blocks(self.source):
            value = as_float(raw, self.settings.dtype)
            made.add(raw, value, value)
            yield name, value
        self._finish(name, made)

    def _quantize(self, name: str) -> Generator[tuple[str, mx.array], None, dict[str, mx.array]]:
        """The rows of a weight, packed; returns the scales and biases, which are few."""
        made, module, how = _Made(rounded=True), name.removesuffix(".weight"), dict(self.settings.quantization or {})
        rest: dict[str, list[mx.array]] = {f"{module}.scales": [], f"{module}.biases": []}
        for raw in self.made.recipes[name].blocks(self.source):
            value = as_float(raw, self.settings.dtype)
            weight, scales, biases = mx.quantize(value, **how)
            made.add(raw, value, mx.dequantize(weight, scales, biases, **how))
            mx.eval(weight, scales, biases)
            for parts, part in zip(rest.values(), (scales, biases), strict=True):
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
        packed = {name: dict(how) for name, how in self.made.quantization.items()}
        packed |= {name: dict(self.settings.quantization or {}) for name in self.quantized}
        ours = {"layout": LAYOUT, **{key: earlier.get(key) for key in source}}
        ours |= {"dtype": dtype_name(self.settings.dtype), "quantization": dict(sorted(packed.items()))}
        return {**self.source.config, "mlx_tformer": ours}

    def _record(self) -> dict[str, Any]:
        """What `conversion.json` says; for a conversion of a conversion, where things came from in the first place."""
        result, earlier = self.result, _earlier(self.source)
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
    error: float = 0.0
    nonfinite_before: int = 0
    nonfinite: int = 0

    def add(self, raw: mx.array, cast: mx.array, stored: mx.array) -> None:
        """Compare some rows: as they were, in the dtype that was asked for, and as they will be read back."""
        if not mx.issubdtype(raw.dtype, mx.floating):
            return
        nonfinite = _nonfinite(cast)
        self.nonfinite += nonfinite
        self.nonfinite_before += _nonfinite(raw) if nonfinite else 0
        self.rounded = self.rounded or raw.dtype != cast.dtype
        if self.rounded:
            gap = mx.abs(raw.astype(mx.float32) - stored.astype(mx.float32))
            largest = (mx.where(mx.isfinite(gap), gap, 0) if nonfinite else gap).max().item()
            assert isinstance(largest, float)
            self.error = max(self.error, largest)


def _nonfinite(values: mx.array) -> int:
    """How many values are NaN or infinite."""
    finite = mx.isfinite(values).sum().item()
    assert isinstance(finite, int)
    return values.size - finite


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


def _earlier(source: Source) -> Conversion:
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
    earlier.tensors, earlier.dropped, earlier.unquantized = found["tensors"], found["dropped"], found["unquantized"]
    return earlier


def _is_entry(entry: Any) -> bool:
    """True for what is recorded of a tensor."""
    if not isinstance(entry, dict) or not isinstance(entry.get("error", 0.0), int | float):
        return False
    sources = entry.get("from")
    return isinstance(sources, list) and all(isinstance(source, str) for source in sources)


@contextmanager
def _writing(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[SafetensorsWriter]:
    writer = SafetensorsWriter(path, tensors)
    try:
        yield writer
        writer.close()
    finally:
        writer.abandon()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    # In ASCII, since a name may hold what is no UTF-8.
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")


def _write_index(folder: Path, shards: Mapping[str, list[str]], nbytes: int) -> None:
    """The index of a checkpoint in several files."""
    where = {name: file for file, names in shards.items() for name in names}
    _write_json(folder / INDEX, {"metadata": {"total_size": nbytes}, "weight_map": where})
