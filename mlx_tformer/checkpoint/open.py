"""From what a user types to a checkpoint that can be read: a folder, a .gguf file, a name, or a hub id."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import BadInput, InputOutputError
from .folder import Folder
from .source import Source

BUNDLED = "shakespeare"
"""The model that comes with the package."""
EXAMPLE = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""A small real model, for messages that name one to try."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies on this disk, and where it came from."""

    path: Path
    origin: str
    revision: str | None = None


def open_source(where: str | Path, *, revision: str | None = None, progress: bool = True) -> Source:
    """The checkpoint at a path, under a name in `weights/`, or on the hub.

    Downloads what is needed from the hub, with a progress bar if `progress`; reads no weights. Raises BadInput for
    what is not a checkpoint, InputOutputError for what the network or the disk refuse.
    """
    return open_place(find(where, revision=revision, progress=progress))


def open_place(place: Place) -> Source:
    """The checkpoint that lies at a place."""
    if place.path.suffix == ".gguf":
        from .gguf.source import GgufSource

        return GgufSource.open(place.path, origin=place.origin, revision=place.revision)
    if place.path.is_file():
        raise BadInput("is a file; expected a folder with a config.json, or a .gguf file", file=place.path)
    from .formats import understood  # numpy, which it needs, is slow to import

    return understood(Folder.open(place.path, origin=place.origin, revision=place.revision))


def find(where: str | Path, *, revision: str | None = None, progress: bool = True, config_only: bool = False) -> Place:
    """Where a checkpoint lies: a path comes first, then `weights/NAME` here and in the package, then the hub.

    With `config_only` the weights of a model on the hub stay there.
    """
    path = Path(where).expanduser()
    if path.exists():
        return Place(path, str(where))
    for folder in (Path("weights"), bundled_folder()):
        if folder is not None and path.name == str(where) and (folder / path).is_dir():
            return Place(folder / path, str(where))
    from .hub import fetch, is_hub_id

    if isinstance(where, Path) or not is_hub_id(where):
        raise BadInput("no such file or folder, and not a name on the hub", file=where)
    snapshot = fetch(where, revision=revision, config_only=config_only, progress=progress)
    return Place(snapshot.path, where, snapshot.revision)


def bundled() -> Path:
    """Where the model lies that comes with the package; raises InputOutputError if it was not installed."""
    folder = bundled_folder()
    if folder is None or not (folder / BUNDLED).is_dir():
        raise InputOutputError(f"the bundled model {BUNDLED} is not installed; name a model, for example {EXAMPLE}")
    return folder / BUNDLED


def bundled_folder() -> Path | None:
    """Where the checkpoints lie that ship with the package, or None if they were not installed."""
    spec = find_spec("mlx_tformer_weights")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None
