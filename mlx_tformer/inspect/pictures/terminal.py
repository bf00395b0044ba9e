"""Pictures in the terminal: in true colour where there is colour, else in ASCII."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from .colours import colour, ink, letter, share
from .picture import Grid, Heads, Picture, pooled, printable

LABEL, TALL = 14, 6
"""Characters of a label beside a row at most, and above a column, where it reads downwards."""
NUMBER, WORD, STUB = 7, 12, 6
"""Characters of a cell with a number, of one with a text, and of one with the least of a text."""
ROWS, SMALL = 64, 16
"""Rows of one map at most, and rows and columns of the map of one head among many."""
NARROW = 20
"""Characters of a line at least."""


def show(picture: Picture, console: Console | None = None) -> None:
    """Print a picture, as wide as the console: a grid with labels, or the heads of each layer as small maps."""
    console = Console(highlight=False) if console is None else console
    if console.width < NARROW:  # without any width, as some environments say, nothing would be printed
        console.width = NARROW
    for line in heads(picture, console) if isinstance(picture, Heads) else grid(picture, console):
        console.print(line, no_wrap=True, overflow="ignore", soft_wrap=True)


def grid(picture: Grid, console: Console) -> list[Text]:
    """The lines of a grid: its texts or numbers in coloured cells if they fit, else coloured cells alone, each the
    largest of a block if there are too many. Of texts that do not fit there are those of the last columns."""
    side = _side(picture, console)
    room = console.width - side - 1
    columns = len(picture.columns)
    if picture.text is not None:
        return [*_head(picture, console), *_texts(picture, side, room, console)]
    if columns * NUMBER <= room:
        text = [[_number(value) for value in row] for row in picture.values.tolist()]
        return [*_head(picture, console), *_written(picture, text, (side, NUMBER), console)]
    return [*_head(picture, console), *_mapped(picture, side, room, console)]


def heads(picture: Heads, console: Console) -> list[Text]:
    """The lines of small maps of all heads, as many beside each other as fit; all on a scale from 0 to 1."""
    lines = _wrapped(Text(picture.title, "bold"), console) if picture.title else []
    size = min(SMALL, console.width // 2)
    for layer, pattern in picture.patterns.items():
        maps = []
        for head, values in enumerate(pattern):
            small, _, _ = pooled(values, SMALL, size)
            name = f"{layer}.{head}"
            cells = [_cells(row, (0.0, 1.0), console) for row in small.tolist()]
            spare = " " * (len(name) - 2 * small.shape[1])
            maps.append([Text(name.ljust(2 * small.shape[1])), *(Text.assemble(line, spare) for line in cells)])
        across = max(1, (console.width + 2) // (max(cell_len(one[0].plain) for one in maps) + 2))
        for start in range(0, len(maps), across):
            lines += [Text("  ").join(row) for row in zip(*maps[start : start + across], strict=True)]
    scale = "blank is 0, @ is 1" if _plain(console) else "the stronger the colour, the nearer to 1"
    said = f"queries down: {len(picture.queries)}, keys across: {len(picture.keys)}; {scale}"
    return [*lines, *(line for text in (said, *picture.notes) for line in _wrapped(Text(text), console))]


def _side(picture: Grid, console: Console) -> int:
    """Characters of the labels beside the rows."""
    return min(LABEL, console.width // 3, max(cell_len(printable(label)) for label in picture.rows))


def _plain(console: Console) -> bool:
    """Whether there are no colours."""
    return console.color_system is None or console.no_color


def _wrapped(text: Text, console: Console) -> list[Text]:
    """A text in lines that fit."""
    return list(text.wrap(console, console.width))


def _head(picture: Grid, console: Console) -> list[Text]:
    axes = f"{picture.down} down, {picture.across} across" if picture.down and picture.across else ""
    return _wrapped(Text.assemble((picture.title, "bold"), f"  {axes}" if axes else ""), console)


def _texts(picture: Grid, side: int, room: int, console: Console) -> list[Text]:
    """The texts of a grid, or of its last columns."""
    assert picture.text is not None
    columns = len(picture.columns)
    fit = min(columns, max(1, room // STUB))
    width = min(WORD, room // fit)
    kept = replace(
        picture,
        values=picture.values[:, columns - fit :],
        columns=picture.columns[columns - fit :],
        text=[row[columns - fit :] for row in picture.text],
    )
    assert kept.text is not None
    left = f"the last {fit} of {columns} columns; there is no room for the others" if fit < columns else ""
    return [*_written(kept, kept.text, (side, width), console), *(_wrapped(Text(left), console) if left else [])]


def _written(picture: Grid, text: Sequence[Sequence[str]], widths: tuple[int, int], console: Console) -> list[Text]:
    """A line of labels, then one for each row: texts on the colour of their value. widths: of labels and of cells."""
    side, width = widths
    top = " ".join(_fit(label, width - 1, console, right=picture.text is None) for label in picture.columns)
    lines = [Text(f"{'':{side + 1}}{top}")]
    for label, row, values in zip(picture.rows, text, picture.values.tolist(), strict=True):
        line = Text(_fit(label, side, console) + " ")
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


def _mapped(picture: Grid, side: int, room: int, console: Console) -> list[Text]:
    """Labels that read downwards, then a line for each row, two characters a cell."""
    values, down, across = pooled(picture.values, ROWS, room // 2)
    labels = [_fit(label, TALL, console).rstrip() for label in picture.columns[::across]]
    lines = [
        Text(f"{'':{side + 1}}" + "".join(f"{sign}{' ' * (2 - cell_len(sign))}" for sign in signs).rstrip())
        for signs in zip_longest(*labels, fillvalue=" ")
    ]
    for label, row in zip(picture.rows[::down], values.tolist(), strict=True):
        lines.append(Text(_fit(label, side, console) + " ") + _cells(row, picture.bounds, console))
    low, high = picture.bounds
    blocks = f"each cell the largest of {down} × {across}; " if down * across > 1 else ""
    said = Text(f"{blocks}scale from {low:.3g} to {high:.3g}")
    return [*lines, *_wrapped(said, console)]


def _cells(values: Sequence[float], bounds: tuple[float, float], console: Console) -> Text:
    """Two characters a value."""
    line = Text()
    for value in values:
        at = share(value, bounds)
        line.append(letter(at) * 2 if _plain(console) else "  ", _style(at, console))
    return line


def _style(at: float, console: Console) -> Style:
    if _plain(console):
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
