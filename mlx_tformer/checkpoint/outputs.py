"""What a model of any kind computes of one input, so that two can be compared.

A new kind of model registers with `outputs`.
"""

from dataclasses import dataclass, replace
from functools import singledispatch

import mlx.core as mx

from ..encoder import EncoderModel
from ..errors import UsageError
from ..lm import LanguageModel
from ..seq2seq import Seq2SeqModel
from ..vision import VisionModel

TEXT = (
    "In the year 1687 Isaac Newton wrote that every body attracts every other with a force that falls as the square of "
    "the distance between them. Does it hold for light? def f(x): return x**2 + 3*x - 1  # Ça dépend, 光も曲がる."
)
"""The prompt, if nothing is said: prose, numbers, code, and letters of several scripts."""
TOKENS = 64
"""How long a prompt is that is made up for want of a tokenizer."""
IMAGES = 2


@dataclass(frozen=True)
class Given:
    """The input: a text or its ids, or neither, for what suits the model."""

    text: str | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Outputs:
    """What a model gave."""

    values: mx.array
    """(N, V): so many outputs of so many numbers, as logits at each position."""
    are_logits: bool
    """Whether a softmax over them is a distribution; over hidden states it is none."""
    given: Given
    """What it was given, so that another model can be given the same."""


@singledispatch
def outputs(model: object, given: Given) -> Outputs:
    """What a loaded model computes; raises UsageError for an input that it cannot have."""
    raise UsageError(f"there is no way to compare what a {type(model).__name__} computes")


@outputs.register
def _(model: LanguageModel, given: Given) -> Outputs:
    given = prompt(model, given)
    return Outputs(model(mx.array([given.ids]))[0], True, given)


@outputs.register
def _(model: EncoderModel, given: Given) -> Outputs:
    given = prompt(model, given)
    found = model(mx.array([given.ids]))
    return Outputs(*_rows(found, model.has_head or model.model.has_classifier), given)


@outputs.register
def _(model: Seq2SeqModel, given: Given) -> Outputs:
    given = prompt(model, given)
    return Outputs(model.echoed(given.ids or ())[0], True, given)


@outputs.register
def _(model: VisionModel, given: Given) -> Outputs:
    if given.text is not None or given.ids is not None:
        raise UsageError(f"ids: {model.origin} looks at images, and reads neither texts nor ids")
    embed = model.model.embed
    found = model(mx.random.normal((IMAGES, embed.channels, *embed.size), key=mx.random.key(0)))
    return Outputs(*_rows(found, model.model.has_head), given)


def _rows(found: mx.array, are_logits: bool) -> tuple[mx.array, bool]:
    """Outputs (..., V) as (N, V), and whether they are logits: a single one is no distribution."""
    return found.reshape(-1, found.shape[-1]), are_logits and found.shape[-1] > 1


def prompt(model: LanguageModel | EncoderModel | Seq2SeqModel, given: Given) -> Given:
    """The ids of a text, or of the usual one; from all over the vocabulary where there is no tokenizer. No more than
    the model has positions for."""
    ids = _ids(model, given.text) if given.ids is None else list(given.ids)
    if not ids:
        raise UsageError("ids: found none, expected a prompt")
    return replace(given, ids=tuple(ids[: model.context]))


def _ids(model: LanguageModel | EncoderModel | Seq2SeqModel, text: str | None) -> list[int]:
    if text is not None:
        return list(model.tokens(text))
    found = [] if model.tokenizer is None else [i for i in model.tokens(TEXT) if i < model.vocab]
    return found or [(i * 2654435761 % 2**32) * model.vocab >> 32 for i in range(1, TOKENS + 1)]
