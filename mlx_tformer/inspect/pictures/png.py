"""Pictures as PNG, through matplotlib (the extra `plot`)."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from ...errors import InputOutputError, UsageError
from .colours import LIGHT, LIGHT_BELOW
from .picture import Grid, Heads, Picture, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELLED = 64
"""Rows or columns up to which each has its label."""
WRITTEN = 400
"""Cells up to which their values are written into them."""
NUMBER, WORD, LETTER, BESIDE = 0.28, 0.62, 0.053, 2.5
"""Inches: a cell at least, one with a text, a letter in it, and what stands beside the cells."""
ACROSS, TALL = 32, 200.0
"""Heads beside each other, and inches of all maps: matplotlib draws no more than 65,535 points of a side."""


def png(picture: Picture, path: str | Path, *, dpi: int = 150) -> None:
    """Write a picture to a file; raises UsageError without matplotlib, InputOutputError where it cannot be written."""
    made = figure(picture)
    try:
        with warnings.catch_warnings():
            # A script that the fonts of this machine lack becomes boxes.
            warnings.filterwarnings("ignore", "Glyph .* missing")
            made.savefig(path, dpi=dpi, format="png")
    except OSError as error:
        raise InputOutputError(f"{path}: {error.strerror or error}") from None


def needs_matplotlib() -> None:
    """Raise UsageError without matplotlib: for those who would know before they compute what is to be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("a PNG needs matplotlib: pip install 'mlx-tformer[plot]'") from None


def figure(picture: Picture) -> "Figure":
    """The picture as a matplotlib figure, to be changed further: a grid, or a small map for each head, a row or more
    for each layer."""
    needs_matplotlib()
    from matplotlib.figure import Figure

    return _heads(picture, Figure) if isinstance(picture, Heads) else _grid(picture, Figure)


def _grid(picture: Grid, make: Any) -> "Figure":
    rows, columns = picture.values.shape
    text = _texts(picture)
    cell = max(NUMBER, LETTER * _longest(text)) if picture.text is None else WORD
    width = min(16.0, max(4.5, cell * columns + BESIDE))
    drawn: Figure = make(figsize=(width, min(16.0, max(3.0, 0.26 * rows + 1.8))), layout="constrained")
    axes = drawn.add_subplot()
    low, high = picture.bounds
    image = axes.imshow(picture.values, cmap=_colours(low < 0), vmin=low, vmax=high, aspect="auto")
    axes.set_title(picture.title, fontsize=9)
    axes.set(xlabel=picture.across, ylabel=picture.down)
    _ticks(axes, picture.rows, picture.columns)
    room = int((width - BESIDE) / columns / LETTER + 1e-6)
    if text and (room >= _longest(text) if picture.text is None else room > 1):
        _write(axes, picture, text, room)
    drawn.colorbar(image, ax=axes)
    return drawn


def _texts(picture: Grid) -> list[list[str]]:
    """What stands in the cells: their texts, or their values if they are few."""
    if picture.text is not None:
        return [[printable(cell) for cell in row] for row in picture.text]
    digits = ".2f" if 0.1 < picture.bounds[1] <= 10 else ".2g"  # what the scale tells apart
    few = picture.values.size <= WRITTEN
    return [[f"{value:{digits}}" for value in row] for row in picture.values.tolist()] if few else []


def _longest(text: list[list[str]]) -> int:
    return max((len(cell) for row in text for cell in row), default=0)


def _write(axes: "Axes", picture: Grid, text: list[list[str]], room: int) -> None:
    """Texts of at most `room` letters in their cells, in an ink that shows on their colour."""
    low, high = picture.bounds
    for row, values in enumerate(picture.values.tolist()):
        for column, value in enumerate(values):
            cell = _plain(_cut(text[row][column], room))
            strong = abs(value) > 0.55 * max(-low, high)
            axes.text(column, row, cell, ha="center", va="center", fontsize=6, color="white" if strong else "black")


def _cut(text: str, room: int) -> str:
    """A text that is no wider than so many letters."""
    return text if cell_len(text) <= room else set_cell_size(text, room - 1).rstrip() + "…"


def _heads(picture: Heads, make: Any) -> "Figure":
    """All maps on the same axes: axes of their own take a tenth of a second each."""
    from matplotlib.patches import Rectangle

    across = min(ACROSS, max(len(pattern) for pattern in picture.patterns.values()))
    lines = [-(-len(pattern) // across) for pattern in picture.patterns.values()]
    size = min(1.0, TALL / (1.75 * sum(lines)))
    drawn: Figure = make(figsize=(1.6 * size * across + 1.0, 1.75 * size * sum(lines) + 0.6), layout="constrained")
    axes, line, colours = drawn.add_subplot(), 0, _colours(False)
    for (layer, pattern), used in zip(picture.patterns.items(), lines, strict=True):
        for head, values in enumerate(pattern):
            left, top = head % across + 0.03, line + head // across + 0.14
            place = (left, left + 0.94, top + 0.84, top)
            image = axes.imshow(values, cmap=colours, vmin=0, vmax=1, aspect="auto", extent=place)
            axes.add_patch(Rectangle((left, top), 0.94, 0.84, fill=False, linewidth=0.8))
            axes.text(left + 0.47, top - 0.02, f"{layer}.{head}", ha="center", va="bottom", fontsize=8 * size)
        line += used
    axes.set_axis_off()
    axes.set(xlim=(0, across), ylim=(line, 0))
    title = f"{picture.title}{': ' if picture.title else ''}queries down, keys across"
    drawn.suptitle("\n".join([title, *picture.notes]), fontsize=9)
    drawn.colorbar(image, ax=axes, aspect=40, label="attention")
    return drawn


def _ticks(axes: "Axes", rows: Sequence[str], columns: Sequence[str]) -> None:
    """Labels at every row and column, or at some where there are too many."""
    for set_ticks, labels, turned in ((axes.set_yticks, rows, 0), (axes.set_xticks, columns, 90)):
        step = -(-len(labels) // LABELLED)
        shown = [_plain(label) for label in labels[::step]]
        set_ticks(range(0, len(labels), step), shown, fontsize=7, rotation=turned)


def _plain(label: str) -> str:
    """A label without what matplotlib would take for a formula."""
    return printable(label).replace("$", r"\$")


def _colours(signed: bool) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    stops = [*LIGHT_BELOW[:0:-1], *LIGHT] if signed else LIGHT
    return LinearSegmentedColormap.from_list("ours", [tuple(part / 255 for part in stop) for stop in stops])
