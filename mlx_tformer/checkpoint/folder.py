"""A checkpoint folder: one that `save_pretrained` wrote, a snapshot of the hub, or one of ours.

An index decides which files count. Ours have the key `mlx_tformer` in config.json, and there the names are ours
already.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import sentences
from ..errors import BadInput
from ..names import summary
from .pickle_file import PickleFile
from .safetensors_file import SafetensorsFile, check_regular
from .source import MODES, Quantization, Source

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAFETENSORS = (INDEX, SINGLE, "*.safetensors")
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model*.bin")
"""Index, single file and pattern of each kind of weight files; training programs leave other .bin files around."""
LAYOUT = 1
WeightFile = SafetensorsFile | PickleFile
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "source.spm",
    "target.spm",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    *sentences.FILES,
)


@dataclass
class Folder(Source):
    """The weight files and the config of one folder: safetensors, or PyTorch's where there are none of those."""

    path: Path = field(default_factory=Path)
    files: dict[str, WeightFile] = field(default_factory=dict)
    """Which file each tensor lies in."""

    @classmethod
    def open(
        cls, path: Path, *, origin: str | None = None, revision: str | None = None, config_only: bool = False
    ) -> "Folder":
        """Check the folder's config, index and headers; raises BadInput that names what is wrong. Reads no weights, and
        with `config_only` does not even look for them."""
        config = read_config(path)
        files, notes = ([], []) if config_only else _weight_files(path)
        opened = [_open(file) for file in files]
        placed = _placed(opened)
        if not config_only:
            _check_index(path, placed)
        ours = config.get("mlx_tformer")
        folder = cls(
            origin=str(path) if origin is None else origin,
            config=config,
            tensors={name: file.tensors[name] for name, file in placed.items()},
            generation_config=read_json(path / "generation_config.json", missing={}),
            revision=revision,
            notes=notes + [note for file in opened if isinstance(file, PickleFile) for note in file.notes],
            config_file=str(path / "config.json"),
            ours=ours is not None,
            path=path,
            files=placed,
        )
        if ours is not None:
            folder.quantization = _our_quantization(folder.config_file, ours)
        return folder

    def read(self, name: str) -> mx.array:
        return self.files[name].read(name)

    def blocks(self, name: str, rows: int) -> Iterator[mx.array]:
        return self.files[name].blocks(name, rows)

    def mapped(self, name: str) -> mx.array:
        return self.files[name].mapped(name)

    def companions(self) -> dict[str, bytes]:
        present = [name for name in COMPANIONS if (self.path / name).is_file()]
        return {name: _inside(self.path, name).read_bytes() for name in present}


def read_config(path: Path) -> dict[str, Any]:
    """The `config.json` of a folder; raises BadInput if there is none or it is not an object."""
    if not path.is_dir():
        raise BadInput("no such folder" if not path.exists() else "is not a folder", file=path)
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        found = f"found {config['model_type']!r}" if "model_type" in config else "missing"
        raise BadInput(f"{found}, expected the name of a family", file=path / "config.json", field="model_type")
    return config


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON file that holds an object; `missing` is what a file that is not there stands for (None: an error)."""
    if not path.exists() and missing is not None:
        return missing
    check_regular(_inside(path.parent, path.name))
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}", file=path) from None
    if not isinstance(value, dict):
        raise BadInput(f"found a {type(value).__name__}, expected an object", file=path)
    return value


def _open(path: Path) -> WeightFile:
    return PickleFile(path) if path.suffix == ".bin" else SafetensorsFile(path)


def _kind(path: Path) -> tuple[str, str, str]:
    """Which kind of weight files counts; PyTorch's only where there are no others."""
    index, _, pattern = SAFETENSORS
    others = (path / index).exists() or any(path.glob(pattern))
    return PICKLES if not others and ((path / PICKLES[0]).exists() or any(path.glob(PICKLES[2]))) else SAFETENSORS


def _weight_files(path: Path) -> tuple[list[Path], list[str]]:
    """The files that hold the weights, and a note on those that do not count."""
    index, single, pattern = _kind(path)
    present = sorted(file.name for file in path.glob(pattern))
    if (path / index).exists():
        named = sorted(set(_weight_map(path / index).values()))
    elif single in present or len(present) == 1:
        named = [single] if single in present else present
    elif present:
        suffix = pattern.rpartition(".")[2]
        raise BadInput(f"{len(present)} {suffix} files and no {index} that says which count", file=path)
    else:
        raise BadInput(f"no weights: expected {SINGLE} or {INDEX}, or else {PICKLES[1]} or {PICKLES[0]}", file=path)
    missing = [name for name in named if not (path / name).exists()]
    if missing:
        raise BadInput(f"named by {index} but not there: {', '.join(missing)}", file=path)
    stray = [name for name in present if name not in named]
    return [_inside(path, name) for name in named], [f"ignored {name}, which no index names" for name in stray]


def _weight_map(index: Path) -> dict[str, str]:
    """Which file the index says that each tensor lies in; the names must be bare."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise BadInput("missing or empty, expected tensor names and files", file=index, field="weight_map")
    for tensor, name in found.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            problem = f"found {name!r}, expected the bare name of a file in this folder"
            raise BadInput(problem, file=index, field=tensor)
    return found


def _inside(path: Path, name: str) -> Path:
    """The path of a file, refused if a link leads out of the folder; in a hub cache links are how files are stored."""
    file = path / name
    target, home = file.resolve(), path.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(place) for place in allowed):
        raise BadInput(f"is a link out of the folder, to {target}", file=file)
    return file


def _placed(files: list[WeightFile]) -> dict[str, WeightFile]:
    """The file of each tensor; raises BadInput for tensors that lie in two, which need not be equal."""
    placed: dict[str, WeightFile] = {}
    for file in files:
        twice = sorted(file.tensors.keys() & placed.keys())
        if twice:
            raise BadInput(f"also in {placed[twice[0]].path.name}: {summary(twice)}", file=file.path)
        placed |= dict.fromkeys(file.tensors, file)
    return placed


def _check_index(path: Path, placed: dict[str, WeightFile]) -> None:
    """Every tensor that the index names must lie in the file that it names."""
    index = path / _kind(path)[0]
    if not index.exists():
        return
    wrong = [t for t, name in _weight_map(index).items() if t not in placed or placed[t].path.name != name]
    if wrong:
        raise BadInput(f"tensors that are not in the file named for them: {summary(wrong)}", file=index)


def _our_quantization(file: str, ours: Any) -> dict[str, Quantization]:
    """How the modules of one of our folders are packed; raises BadInput for a layout from the future."""
    if not isinstance(ours, dict) or ours.get("layout") != LAYOUT:
        found = ours.get("layout") if isinstance(ours, dict) else ours
        raise BadInput(f"found {found!r}, expected {LAYOUT}", file=file, field="mlx_tformer.layout")
    modules = ours.get("quantization") or {}
    if not isinstance(modules, dict):
        raise BadInput(f"found {modules!r}, expected an object", file=file, field="mlx_tformer.quantization")
    for name, how in modules.items():
        problem = wrong_packing(how)
        if problem is not None:
            raise BadInput(problem, file=file, field=f"mlx_tformer.quantization.{name}")
    return modules


def wrong_packing(how: Any) -> str | None:
    """What is wrong with a description of how a module is packed, or None if MLX can unpack it."""
    mode = how.get("mode") if isinstance(how, dict) else None
    if not isinstance(mode, str) or mode not in MODES:
        return f"found {how!r}, expected bits, group_size and a mode of {', '.join(MODES)}"
    bits, sizes = MODES[mode]
    ways = [{"bits": number, "group_size": size, "mode": mode} for number in bits for size in sizes]
    return None if how in ways else f"found {how!r}, expected bits of {bits} and group_size of {sizes} for {mode}"
