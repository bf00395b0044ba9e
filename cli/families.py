"""`mlx-tformer families`: what kinds of models there are, from the code."""

import click

from .terminal import Writer, write_json


@click.command("families", short_help="List the kinds of models that are supported.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List the families of models that are supported: what config.json calls `model_type`, and what is special in each.

    \b
    Examples:
      mlx-tformer families
      mlx-tformer families --json
    """
    found = about()
    if as_json:
        write_json(found)
        return
    width = max(len(name) for name in found)
    with Writer() as out:
        out.write("\n".join(f"{name:{width}}  {text}" for name, text in found.items()))


def about() -> dict[str, str]:
    """What each family says about itself, in alphabetical order, and then whose language part can be used."""
    from mlx_tformer.checkpoint.language_part import FAMILIES, KINDS
    from mlx_tformer.families import family, known

    found = {name: " ".join(family(name).about.split()) for name in known()}
    parts = {kind: FAMILIES.get(text, text) for kind, text in KINDS.items() if kind not in found}
    return found | {kind: f"The language part, which is {text}; images are left out." for kind, text in parts.items()}


def table() -> str:
    """The families as Markdown, for README.

    >>> table().splitlines()[0]
    '| `model_type` | what is special in it |'
    """
    rows = [f"| `{name}` | {text} |" for name, text in about().items()]
    return "\n".join(["| `model_type` | what is special in it |", "| --- | --- |", *rows])
