"""`mlx-tformer fill`: what may stand at a missing word."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .terminal import Writer, one_line, write_json
from .texts import encoder, given, named

if TYPE_CHECKING:
    from mlx_tformer.encoder import Candidate

EXAMPLE = "google-bert/bert-base-uncased"


@click.command("fill", short_help="Say which words may stand at the masks of a text.")
@click.argument("text", required=False)
@click.option("-m", "--model", metavar="MODEL", help="A folder, a name in ./weights, or a name on the hub.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub.")
@click.option("--top", type=int, default=5, show_default=True, metavar="K", help="The K likeliest for each mask.")
@click.option("--dtype", metavar="TYPE", help="Compute in float32, float16 or bfloat16 instead of the stored type.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    text: str | None, model: str | None, revision: str | None, top: int, dtype: str | None, as_json: bool
) -> None:
    """Say which tokens may stand at each mask in TEXT, and how likely they are, with an encoder such as BERT.

    Models call the mask [MASK] (BERT, DistilBERT, ModernBERT) or <mask> (RoBERTa, XLM-RoBERTa). Without TEXT, or if it
    is -, the text is read from standard input.

    \b
    Examples:
      mlx-tformer fill -m google-bert/bert-base-uncased "Paris is the [MASK] of France."
      mlx-tformer fill -m FacebookAI/roberta-base --top 3 --json "Paris is the <mask> of France."
    """
    whole = text if text not in (None, "-") else "\n".join(given(()))
    lm = encoder(named(model, EXAMPLE), revision, dtype)
    found = lm.fill(whole, top=top)
    if as_json:
        masks = [[asdict(candidate) for candidate in candidates] for candidates in found]
        write_json({"model": lm.origin, "text": whole, "masks": masks})
        return
    with Writer() as out:
        out.write("\n".join(shown(found)))


def shown(found: "Sequence[Sequence[Candidate]]") -> Iterator[str]:
    """The candidates line by line; titles where there are several masks."""
    width = max(len(one_line(candidate.token.strip())) for candidates in found for candidate in candidates)
    for number, candidates in enumerate(found, 1):
        if len(found) > 1:
            yield f"mask {number}"
        for candidate in candidates:
            yield f"{one_line(candidate.token.strip()):{width}}  {100 * candidate.probability:6.2f} %"
