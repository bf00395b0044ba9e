"""The command reference in README, made of the commands' own help.

`python -m mlx_tformer_cli.reference README.md` brings it up to date.
"""

import sys
from pathlib import Path

import click

from .main import program

BEGIN, END = "<!-- commands: begin -->", "<!-- commands: end -->"

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
    """A page with the reference between the two marks; raises ValueError for a page without them.

    >>> updated(f"a {BEGIN} b {END} c").startswith(f"a {BEGIN}\\n\\n### `mlx-tformer`")
    True
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
