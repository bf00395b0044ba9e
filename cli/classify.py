"""`mlx-tformer classify`: the labels of texts or of pictures, or texts in the order of a query."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .terminal import Writer, is_unicode, note
from .texts import FREED, counted, given, named, short

if TYPE_CHECKING:
    from mlx_tformer import EncoderModel, Label

EXAMPLE = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"


@click.command("classify", short_help="Label texts or pictures, or rank texts for a query.")
@click.argument("inputs", nargs=-1)
@click.option("-m", "--model", metavar="MODEL", help="A folder, a name in ./weights, or a name on the hub.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub.")
@click.option("--query", metavar="TEXT", help="Read each text as the second of a pair, after TEXT.")
@click.option("--top", type=int, default=5, show_default=True, metavar="K", help="The K likeliest labels.")
@click.option("--truncate", is_flag=True, help="Cut off what is longer than the model's positions.")
@click.option("--dtype", metavar="TYPE", help="Compute in float32, float16 or bfloat16 instead of the stored type.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each input, a line each.")
def command(
    inputs: tuple[str, ...],
    model: str | None,
    revision: str | None,
    query: str | None,
    top: int,
    truncate: bool,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Say what INPUTS are, by a model with a head for labels: texts, or files of pictures for one that looks at images.

    In place of an input - stands for the lines of standard input, as does no input at all. With --query, texts are the
    second of a pair; a cross-encoder with a single label puts them in order, the best first.

    \b
    Examples:
      mlx-tformer classify -m distilbert/distilbert-base-uncased-finetuned-sst-2-english "What a film!"
      mlx-tformer classify -m google/vit-base-patch16-224 cat.jpg dog.png
      mlx-tformer classify -m cross-encoder/ms-marco-MiniLM-L6-v2 --query "When?" "At noon." "In Rome."
    """
    from mlx_tformer import VisionModel, load
    from mlx_tformer.checkpoint.load import as_encoder
    from mlx_tformer.memory import bounded_cache

    found, loaded = given(inputs), load(named(model, EXAMPLE), dtype, revision=revision)
    lm = loaded if isinstance(loaded, VisionModel) else as_encoder(loaded)
    if query is not None and isinstance(lm, VisionModel):
        raise click.UsageError("--query: a model of images reads no texts")
    for line in lm.notes:
        note(line)
    with bounded_cache(FREED), counted("classifying") as progress, Writer() as out:
        if isinstance(lm, VisionModel):
            answers = ((path, lm.classify(path, top=top)) for path in found)
            lines = shown(answers, len(found), as_json)
        else:
            lines = of_texts(lm, found, query, top, as_json, {"truncate": truncate, "progress": progress})
        for line in lines:
            out.write(f"{line}\n")


def of_texts(
    lm: "EncoderModel", texts: Sequence[str], query: str | None, top: int, as_json: bool, settings: dict[str, Any]
) -> Iterator[str]:
    """What is printed about texts: their labels, or their order."""
    if query is not None and len(lm.labels) == 1:
        for ranked in lm.rank(query, texts, **settings):
            yield written(asdict(ranked)) if as_json else f"{ranked.score:8.4f}  {short(ranked.text)}"
        return
    pairs = texts if query is None else [(query, text) for text in texts]
    answers = zip(texts, lm.classify(pairs, top=top, **settings), strict=True)
    yield from shown(answers, len(texts), as_json)


def shown(answers: "Iterator[tuple[str, list[Label]]]", count: int, as_json: bool) -> Iterator[str]:
    """Inputs with their labels; titles where there are several inputs."""
    for name, labels in answers:
        if as_json:
            yield written({"input": name, "labels": [asdict(label) for label in labels]})
            continue
        if count > 1:
            yield short(name)
        for label in labels:
            yield f"{100 * label.probability:6.2f} %  {short(label.label)}"


def written(value: dict[str, Any]) -> str:
    """An object as a line of JSON."""
    return json.dumps(value, ensure_ascii=not is_unicode())
