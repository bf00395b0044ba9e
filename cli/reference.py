"""What README says of the program that the program knows better: its commands' own help, and the table of families.

`python -m mlx_tformer_cli.reference README.md` brings it up to date.
"""

import sys
from pathlib import Path

import click

from . import families
from .main import program

WIDTH = 100


def reference() -> str:
    """What each command says to `--help`, as Markdown."""
    top = click.Context(program, info_name="mlx-tformer", terminal_width=WIDTH, **program.context_settings)
    parts = [("mlx-tformer", program.get_help(top))]
    for name, command in program.commands.items():
        context = click.Context(command, parent=top, info_name=name, terminal_width=WIDTH)
        parts.append((context.command_path, command.get_help(context)))
    return "\n\n".join(f"### `{title}`\n\n```text\n{text}\n```" for title, text in parts)


def updated(page: str) -> str:
    """A page with the reference and the table of families, each between its two marks; raises ValueError for a page
    without these.

    >>> page = "a <!-- commands: begin --> b <!-- commands: end --> c <!-- families: begin --><!-- families: end -->"
    >>> updated(page).startswith("a <!-- commands: begin -->\\n\\n### `mlx-tformer`")
    True
    """
    for name, made in {"commands": reference(), "families": families.table()}.items():
        begin, end = (f"<!-- {name}: {side} -->" for side in ("begin", "end"))
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"expected {begin} and {end}")
        page = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
