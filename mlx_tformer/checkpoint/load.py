"""A model in memory from a checkpoint, whatever files it lies in."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..config import Config
from ..encoder import EncoderModel
from ..errors import BadInput, UsageError
from ..lm import LanguageModel
from ..memory import check_fits
from ..names import Piece
from ..nn import Encoder, Model, Seq2Seq, VisionEncoder
from ..pixels import FILE as PREPROCESSOR
from ..seq2seq import Seq2SeqModel
from ..tokens import Tokenizer
from ..vision import VisionModel
from .open import open_source
from .plan import Plan, Recipe, plan
from .source import Source

FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
Loaded = LanguageModel | EncoderModel | VisionModel | Seq2SeqModel
ROOM = 4096
"""Tokens of context that a model must fit with, where the caller names no length."""


def load(
    where: str | Path,
    dtype: str | None = None,
    *,
    context: int | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> Loaded:
    """A model that is ready to use, and its tokenizer if there is one: a language model, an encoder of texts (BERT) or
    of images (ViT), or an encoder with a decoder (T5).

    where: a folder of ours, a Hugging Face folder, a .gguf file, a name below `weights/`, or an id on the hub.
    dtype: "float32", "float16" or "bfloat16"; None keeps what the checkpoint is stored in. Packed weights stay packed.
    context: the number of tokens that the memory has to suffice for (4096, or all that the model was trained for if
    fewer). revision: a branch, tag or commit on the hub.

    Weights are mapped and read when they are first used. Raises BadInput for a checkpoint that is broken or not
    understood, UsageError for a dtype that is none, InputOutputError for network and disk, and MemoryRefusal for a
    model that cannot fit.

    >>> lm = load("shakespeare")
    >>> lm(mx.array([[1, 2, 3]])).shape
    (1, 3, 2048)
    """
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(f"dtype: found {dtype!r}, expected one of {', '.join(FLOATS)}")
    source = open_source(where, revision=revision, progress=progress)
    made = plan(source)
    kind = stored_dtype(source) if dtype is None else FLOATS[dtype]
    notes = [*source.notes, *made.notes]
    found = wrapped(made.model, made.config, kind, source.origin, notes, source)
    remembered = 0  # encoders remember nothing
    if isinstance(found, LanguageModel | Seq2SeqModel):
        remembered = min(found.context, ROOM) if context is None else context
    check_fits(made.model, tokens=remembered, dtype=kind)
    fill(made, source, kind)
    return found


def wrapped(
    model: Model, config: Config, dtype: mx.Dtype, origin: str, notes: list[str], source: Source | None = None
) -> Loaded:
    """What users hold of a model of any kind, with the tokenizer and the settings that a checkpoint has beside it."""
    if isinstance(model, VisionEncoder):
        pixels = None if source is None else preprocessing(source)
        return VisionModel(model, config, pixels, dtype, origin, notes)
    tokenizer = None if source is None else Tokenizer.from_files(source.companions(), source.origin)
    if isinstance(model, Encoder):
        return EncoderModel(model, config, tokenizer, dtype, origin, notes)
    settings = {} if source is None else source.generation_config
    if isinstance(model, Seq2Seq):
        return Seq2SeqModel(model, config, tokenizer, settings, dtype, origin, notes)
    return LanguageModel(model, config, tokenizer, settings, dtype, origin, notes)


def load_decoder(
    where: str | Path, dtype: str | None = None, *, context: int | None = None, revision: str | None = None
) -> LanguageModel:
    """What `load` gives, for those who need the next token of a text; raises UsageError for other models."""
    found = load(where, dtype, context=context, revision=revision)
    return found if isinstance(found, LanguageModel) else found.refuse()


def load_encoder(where: str | Path, dtype: str | None = None, *, revision: str | None = None) -> EncoderModel:
    """What `load` gives, for those who need an encoder of texts; raises UsageError for another model."""
    return as_encoder(load(where, dtype, context=0, revision=revision))


def as_encoder(found: Any) -> EncoderModel:
    """A model that `load` gave, which is to be an encoder of texts; raises UsageError for another."""
    if isinstance(found, EncoderModel):
        return found
    what = "looks at images" if isinstance(found, VisionModel) else "writes texts"
    problem = f"is a {found.config.model_type}, which {what}; this needs an encoder of texts, such as BERT"
    raise UsageError(f"{found.origin} {problem}")


def preprocessing(source: Source) -> dict[str, Any] | None:
    """How pictures become numbers, by the checkpoint; None if it does not say. Raises BadInput for a broken file."""
    content = source.companions().get(PREPROCESSOR)
    if content is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}", file=f"{source.origin}: {PREPROCESSOR}") from None
    if not isinstance(found, dict):
        problem = f"found a {type(found).__name__}, expected an object"
        raise BadInput(problem, file=f"{source.origin}: {PREPROCESSOR}")
    return found


def load_writer(
    where: str | Path, dtype: str | None = None, *, context: int | None = None, revision: str | None = None
) -> LanguageModel | Seq2SeqModel:
    """What `load` gives, for those who need a text; raises UsageError for other models."""
    found = load(where, dtype, context=context, revision=revision)
    return found if isinstance(found, LanguageModel | Seq2SeqModel) else found.refuse()


def fill(made: Plan, source: Source, dtype: mx.Dtype) -> None:
    """Give the planned model its weights, in `dtype`; nothing is read before it is used, copies apart."""
    kinds = {name: made.float_dtype(name, dtype, source) for name in made.recipes}
    weights = [(name, as_float(recipe.make(source.mapped), kinds[name])) for name, recipe in made.recipes.items()]
    made.model.load_weights(weights)
    if made.quantization.get("embed.tokens", {"mode": "affine"})["mode"] != "affine":
        made.model.embed.dtype = dtype
    check_copies(made, source)


def check_copies(made: Plan, source: Source) -> None:
    """Weights that are stored twice, as a tied head may be, must be equal; raises BadInput for those that differ."""
    for copy, target in made.assignment.copies.items():
        if not _equal(Recipe((Piece(copy),), {}), made.recipes[target], source):
            problem = f"differs from {target}, which the config says it is tied to (tie_word_embeddings)"
            raise BadInput(problem, file=source.origin, field=copy)


def _equal(a: Recipe, b: Recipe, source: Source) -> bool:
    """True if two recipes of the same shape make the same values, NaN at the same places among them."""
    pairs = zip(a.blocks(source), b.blocks(source), strict=True)
    return all(mx.array_equal(x, y, equal_nan=True).item() for x, y in pairs)


def as_float(value: mx.array, dtype: mx.Dtype) -> mx.array:
    """Floats in `dtype`; packed weights as they are."""
    return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value


def stored_dtype(source: Source) -> mx.Dtype:
    """What a checkpoint's floats are stored in: what the config says, or what most of its bytes are."""
    ours = source.config["mlx_tformer"] if source.ours else {}
    text = source.config.get("text_config")  # of a checkpoint that also sees
    said = [ours, source.config, text if isinstance(text, dict) else {}]
    named = next((values[key] for values in said for key in ("dtype", "torch_dtype") if values.get(key)), None)
    if isinstance(named, str) and named in FLOATS:
        return FLOATS[named]
    sizes: Counter[mx.Dtype] = Counter()
    for tensor in source.tensors.values():
        if tensor.dtype in FLOATS.values():
            sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else mx.float32
