"""What the commands that read texts share: the texts, the model that reads them, and how far it is."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from .terminal import note, one_line, read_input

if TYPE_CHECKING:
    from mlx_tformer import EncoderModel
    from mlx_tformer.batches import Progress

FREED = 2**29
"""Bytes of freed buffers that MLX may keep for reuse."""
SHOWN = 60
"""Characters of a text that are shown beside what is said about it."""


def given(texts: Sequence[str]) -> list[str]:
    """The texts as arguments; `-` among them, or none at all, stands for the lines of standard input."""
    if not texts and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("no text: give one or more, or pipe them in, one a line")
    found: list[str] = []
    for text in texts or ("-",):
        found += lines() if text == "-" else [text]
    return found


def lines() -> list[str]:
    """The lines of standard input."""
    text = "" if sys.stdin is None else read_input(sys.stdin.buffer)
    if not text:
        raise click.UsageError("no text: standard input is empty")
    return [line.removesuffix("\r") for line in text.split("\n")]


def named(model: str | None, example: str) -> str:
    """The model that `--model` names; raises click.UsageError with an example if it names none."""
    if model is None:
        raise click.UsageError(f"no model: name one, for example --model {example}")
    return model


def encoder(model: str, revision: str | None, dtype: str | None) -> "EncoderModel":
    """An encoder of texts, what there is to say about it said."""
    from mlx_tformer.checkpoint.load import load_encoder

    found = load_encoder(model, dtype, revision=revision)
    for line in found.notes:
        note(line)
    return found


def short(text: str) -> str:
    """A text in a line of its own, not too long.

    >>> short("one" + chr(10) + "two"), len(short("x" * 100))
    ('one\\\\ntwo', 60)
    """
    line = one_line(text)
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


@contextmanager
def counted(doing: str) -> "Iterator[Progress | None]":
    """A progress bar of texts on standard error if that is a terminal; it appears when the first batch is done."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn(doing), progress.BarColumn(), progress.MofNCompleteColumn())
    bar = progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task(doing)

    def show(done: int, total: int) -> None:
        if not bar.live.is_started and done < total:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()
