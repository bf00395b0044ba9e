"""`mlx-tformer card`: what a model is made of and what it needs, without its weights."""

import sys
from typing import TYPE_CHECKING

import click

from .terminal import Writer, is_unicode, write_json

if TYPE_CHECKING:
    from mlx_tformer.card import Card


@click.command("card", short_help="Show what a model is made of and whether it fits this machine.")
@click.argument("model")
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub.")
@click.option("--context", type=int, metavar="N", help="Tokens to count the KV cache for, instead of the full context.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, sizes in bytes.")
def command(model: str, revision: str | None, context: int | None, as_json: bool) -> None:
    """Show the sizes of MODEL, its masks and positions, its parameters, what it needs in memory and whether this
    machine has that, and the shapes from ids to logits.

    A config.json is enough, so weights are not fetched from the hub; where they are there, they are counted as they
    are stored. A .gguf file has its config inside.

    \b
    Examples:
      mlx-tformer card HuggingFaceTB/SmolLM2-135M-Instruct
      mlx-tformer card model.gguf --context 4096
      mlx-tformer card weights/NAME --json
    """
    from mlx_tformer.checkpoint.describe import describe

    found = describe(model, context=context, revision=revision)
    if as_json:
        write_json(found.to_dict())
        return
    with Writer(ours=True) as out:
        out.write(drawn(found))


def drawn(card: "Card") -> str:
    """The card for standard output: in colours on a terminal that wants them, in ASCII where it must be."""
    if sys.stdout is None or not sys.stdout.isatty():
        return card.render(ascii_only=not is_unicode())
    from rich.console import Console

    console = Console(file=sys.stdout)
    with console.capture() as capture:
        console.print(card)
    return capture.get()
