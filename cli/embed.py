"""`mlx-tformer embed`: a vector for each text, or how alike texts are."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import click

from .terminal import Writer, is_unicode
from .texts import FREED, counted, encoder, given, named, short

if TYPE_CHECKING:
    import mlx.core as mx

EXAMPLE = "sentence-transformers/all-MiniLM-L6-v2"
MOST = 40
"""Texts that a table is drawn for; of more there are vectors."""


@click.command("embed", short_help="Turn texts into vectors, or show how alike they are.")
@click.argument("texts", nargs=-1)
@click.option("-m", "--model", metavar="MODEL", help="A folder, a name in ./weights, or a name on the hub.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub.")
@click.option("--pool", metavar="HOW", help="A text's vector: mean, cls or last, instead of what MODEL says.")
@click.option("--truncate", is_flag=True, help="Cut off what is longer than the model's positions.")
@click.option("--dtype", metavar="TYPE", help="Compute in float32, float16 or bfloat16 instead of the stored type.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each text, a line each.")
def command(
    texts: tuple[str, ...],
    model: str | None,
    revision: str | None,
    pool: str | None,
    truncate: bool,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Turn TEXTS into vectors of length 1, with an encoder such as BERT.

    One text gives its vector, as JSON; two to forty give a table of their cosines; more give a vector a line. In place
    of a text - stands for the lines of standard input, as does no text at all.

    \b
    Examples:
      mlx-tformer embed -m sentence-transformers/all-MiniLM-L6-v2 "A man is eating food."
      mlx-tformer embed -m weights/NAME "A man is eating food." "A man is eating bread." "It rains."
      mlx-tformer embed -m weights/NAME --json - < lines.txt > vectors.jsonl

    --json gives an object with the text and its vector for each text, however many there are. A vector is what the
    model's authors say for sentence-transformers, or with --pool mean the mean of the hidden states of the text's
    tokens, with cls that of its first token, and with last that of its last. Texts of like lengths run together,
    whatever their order, so that all vectors come at the end; on a terminal a bar shows how far it is.
    """
    found = given(texts)
    lm = encoder(named(model, EXAMPLE), revision, dtype)
    from mlx_tformer.memory import bounded_cache

    with bounded_cache(FREED), counted("embedding") as progress:
        vectors = lm.embed(found, pool=pool, truncate=truncate, progress=progress)
    with Writer() as out:
        for line in shown(found, vectors, as_json):
            out.write(f"{line}\n")


def shown(texts: Sequence[str], vectors: "mx.array", as_json: bool) -> Iterator[str]:
    """What is printed: objects, vectors or a table."""
    if 1 < len(texts) <= MOST and not as_json:
        yield from table(texts, cast(list[list[float]], (vectors @ vectors.T).tolist()))
        return
    for i, text in enumerate(texts):
        row = cast(list[float], vectors[i].tolist())
        vector = [float(f"{x:.7g}") for x in row]  # float32 has no more digits
        value: Any = {"text": text, "vector": vector} if as_json else vector
        yield json.dumps(value, ensure_ascii=not is_unicode())


def table(texts: Sequence[str], cosines: Sequence[Sequence[float]]) -> Iterator[str]:
    """Cosines in columns, and which text each row is of.

    >>> print(*table(["a", "b"], [[1.0, 0.25], [0.25, 1.0]]), sep=chr(10))
            1      2
     1  1.000  0.250  a
     2  0.250  1.000  b
    """
    yield "  " + "".join(f"{i:7}" for i in range(1, len(texts) + 1))
    for i, (text, row) in enumerate(zip(texts, cosines, strict=True), 1):
        yield f"{i:2}" + "".join(f"{x:7.3f}" for x in row) + f"  {short(text)}"
