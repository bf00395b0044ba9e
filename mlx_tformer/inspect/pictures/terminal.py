"""Pictures in the terminal: in true colour where there is colour, else in ASCII."""

import os
from collections.abc import Sequence
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from .colours import colour, ink, letter, share
from .picture import Grid, Heads, Picture, pooled, printable

LABEL, TALL = 14, 6
"""Characters of a label beside a row, and above a column, where it reads downwards."""
NUMBER, WORD = 7, 12
"""Characters of a cell with a number or a text in it."""
ROWS, SMALL = 64, 16
"""Rows of one map at most, and rows and columns of the map of one head among many."""


def show(picture: Picture, console: Console | None = None) -> None:
    """Print a picture, as wide as the console: a grid with labels, or the heads of each layer as small maps."""
    console = Console(highlight=False) if console is None else console
    for line in heads(picture, console) if isinstance(picture, Heads) else grid(picture, console):
        console.print(line, no_wrap=True, overflow="crop", soft_wrap=True)


def grid(picture: Grid, console: Console) -> list[Text]:
    """The lines of a grid: its texts or numbers in coloured cells if they fit, else coloured cells alone, each the
    largest of a block if there are too many."""
    room = console.width - LABEL - 1
    columns = len(picture.columns)
    if picture.text is not None:
        return [*_head(picture), *_written(picture, picture.text, max(4, min(WORD, room // columns)), console)]
    if columns * NUMBER <= room:
        text = [[_number(value) for value in row] for row in picture.values.tolist()]
        return [*_head(picture), *_written(picture, text, NUMBER, console)]
    return [*_head(picture), *_mapped(picture, max(1, room // 2), console)]


def heads(picture: Heads, console: Console) -> list[Text]:
    """The lines of small maps of all heads, as many beside each other as fit; all on a scale from 0 to 1."""
    lines = [Text(picture.title, "bold")] if picture.title else []
    for layer, pattern in picture.patterns.items():
        maps = []
        for head, values in enumerate(pattern):
            small, _, _ = pooled(values, SMALL, SMALL)
            cells = [_cells(row, (0.0, 1.0), console) for row in small.tolist()]
            maps.append([Text(f"{layer}.{head}".ljust(2 * small.shape[1])), *cells])
        across = max(1, (console.width + 2) // (cell_len(maps[0][0].plain) + 2))
        for start in range(0, len(maps), across):
            lines += [Text("  ").join(row) for row in zip(*maps[start : start + across], strict=True)]
    size = f"{len(picture.queries)} queries down, {len(picture.keys)} keys across"
    scale = "blank is 0, @ is 1" if console.color_system is None else "the stronger the colour, the nearer to 1"
    return [*lines, Text(f"{size}; {scale}"), *(Text(note) for note in picture.notes)]


def _head(picture: Grid) -> list[Text]:
    axes = f"{picture.down} down, {picture.across} across" if picture.down and picture.across else ""
    return [Text.assemble((picture.title, "bold"), f"  {axes}" if axes else "")]


def _written(picture: Grid, text: Sequence[Sequence[str]], width: int, console: Console) -> list[Text]:
    """A line of labels, then one for each row: texts on the colour of their value."""
    top = " ".join(_fit(label, width - 1, console, right=picture.text is None) for label in picture.columns)
    lines = [Text(f"{'':{LABEL + 1}}{top}")]
    for label, row, values in zip(picture.rows, text, picture.values.tolist(), strict=True):
        line = Text(_fit(label, LABEL, console) + " ")
        for cell, value in zip(row, values, strict=True):
            shown = _fit(cell, width - 1, console, right=picture.text is None)
            line.append(shown, _style(share(value, picture.bounds), console))
            line.append(" ")
        lines.append(line)
    return lines


def _number(value: float) -> str:
    """Three digits of a value, or as many as fit into a cell."""
    texts = [f"{value:{digits}}" for digits in (".3g", ".2g", ".4f", ".3f", ".0e")]
    return next((text for text in texts if len(text) < NUMBER), texts[-1])


def _mapped(picture: Grid, most: int, console: Console) -> list[Text]:
    """Labels that read downwards, then a line for each row, two characters a cell."""
    values, down, across = pooled(picture.values, ROWS, most)
    labels = [_fit(label, TALL, console).rstrip() for label in picture.columns[::across]]
    lines = [
        Text(f"{'':{LABEL + 1}}" + "".join(f"{sign}{' ' * (2 - cell_len(sign))}" for sign in signs).rstrip())
        for signs in zip_longest(*labels, fillvalue=" ")
    ]
    for label, row in zip(picture.rows[::down], values.tolist(), strict=True):
        lines.append(Text(_fit(label, LABEL, console) + " ") + _cells(row, picture.bounds, console))
    low, high = picture.bounds
    blocks = f"each cell the largest of {down} × {across}; " if down * across > 1 else ""
    return [*lines, Text(f"{blocks}scale from {max(low, -high) if low else 0:g} to {high:.3g}")]


def _cells(values: Sequence[float], bounds: tuple[float, float], console: Console) -> Text:
    """Two characters a value."""
    line = Text()
    for value in values:
        at = share(value, bounds)
        line.append("  " if console.color_system is not None else letter(at) * 2, _style(at, console))
    return line


def _style(at: float, console: Console) -> Style:
    if console.color_system is None:
        return Style.null()
    background = colour(at, dark=_dark() is not False)
    return Style(color=Color.from_rgb(*ink(background)), bgcolor=Color.from_rgb(*background))


def _dark() -> bool | None:
    """Whether the terminal says that its background is dark; None where it says nothing."""
    said = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return int(said) < 7 if said.isdecimal() else None


def _fit(label: str, width: int, console: Console, *, right: bool = False) -> str:
    """A label on one line of just this width, in ASCII if the console can write nothing else."""
    text = printable(label)
    if console.options.ascii_only:
        text = text.encode("ascii", "replace").decode()
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + ("." if console.options.ascii_only else "…")
    return " " * (width - cell_len(text)) + text if right else set_cell_size(text, width)
