"""The card of a checkpoint: of its files where they are, and of its config alone where only that is."""

from pathlib import Path

from ..card import Card, card
from ..families import family
from ..nn import Model
from ..tokens import Tokenizer
from .folder import Folder
from .formats import understood
from .language_part import language_config
from .load import stored_dtype
from .open import Place, find, open_place
from .plan import build, pack, plan
from .source import Source


def describe(
    where: str | Path, *, context: int | None = None, revision: str | None = None, progress: bool = True
) -> Card:
    """What the checkpoint at `where` (a folder, a .gguf file, a name below `weights/`, a hub id) says about itself.

    context: tokens to count the cache for; the full context by default. Weights are neither read nor fetched: a
    folder with nothing but a config.json has a card as well. Raises BadInput for a config that is not understood and
    for files that do not fit it.
    """
    place = find(where, revision=revision, progress=progress, config_only=True)
    source = _opened(place)
    model = _built(source)
    tokenizer = Tokenizer.from_files(source.companions(), source.origin)
    trained, deployed = (None, None) if model.lengths is None else model.lengths
    return card(
        model,
        trained=trained,
        deployed=deployed,
        context=context,
        tokenizer_size=None if tokenizer is None else tokenizer.size,
        dtype=stored_dtype(source),
        name=source.origin,
    )


def _opened(place: Place) -> Source:
    # The weights of a model on the hub stay there, even if some of its files came earlier.
    config_only = place.revision is not None or not any(place.path.glob("*.safetensors"))
    if place.path.is_dir() and config_only:
        folder = Folder.open(place.path, origin=place.origin, revision=place.revision, config_only=True)
        return understood(folder)
    return open_place(place)


def _built(source: Source) -> Model:
    """The module tree; held against the tensors if there are any."""
    if source.tensors:
        return plan(source).model
    config = language_config(source)
    model = build(family(config.model_type, config.file), config)
    pack(model, source.quantization)
    return model
