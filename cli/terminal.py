"""Standard input, output and error: text in UTF-8 that comes in whole and goes out as it comes.

Only results go to standard output. Notes, errors and figures go to standard error, one line each.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import click

MOST_INPUT = 64 * 2**20
"""Bytes that are read from standard input: more text than any model's context holds."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""What a terminal would obey instead of show, spelled out."""
SHOWN = {code: text for code, text in CONTROLS.items() if chr(code) not in "\n\t"}


def prepare() -> None:
    """Characters that standard output cannot write become `?` instead of an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def note(text: str) -> None:
    """One line for the reader, on standard error; if nobody can read it, the work goes on."""
    with contextlib.suppress(OSError):
        click.echo(f"mlx-tformer: {one_line(text)}", err=True)


def one_line(text: str) -> str:
    """A text without line ends and without anything else that a terminal would obey.

    >>> one_line("found\\n\\x1b[2J")
    'found\\\\n\\\\x1b[2J'
    """
    return text.replace("\n", "\\n").translate(CONTROLS)


def is_unicode() -> bool:
    """Whether standard output can write any character."""
    encoding = None if sys.stdout is None else sys.stdout.encoding
    return encoding is None or encoding.lower().startswith("utf")


class Writer:
    """Standard output as a block: what is written in it is there when `write` returns, and ends with a line end.

    A terminal gets no control characters but line ends and tabs, since a model can make any, unless they are `ours`.
    """

    def __init__(self, *, ours: bool = False) -> None:
        self._terminal = sys.stdout is not None and sys.stdout.isatty()
        self._ours = ours
        self._last = "\n"

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After Ctrl-C on a terminal `end_line` does it, so that there is one line end and not two.
        if self._last != "\n" and not (self._terminal and kind is KeyboardInterrupt):
            self.write("\n")

    def write(self, text: str) -> None:
        """Write a piece of text."""
        if not text:
            return
        if sys.stdout is None:
            raise OSError("standard output is closed")
        self._last = text[-1]  # before it is written: a signal may come in between
        try:
            sys.stdout.write(text.translate(SHOWN) if self._terminal and not self._ours else text)
            sys.stdout.flush()
        except OSError as error:
            error.filename = "standard output"
            raise


def write_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line of standard output, in ASCII if that is all it can write."""
    with Writer() as out:
        out.write(json.dumps(value, ensure_ascii=not is_unicode()))


def end_line() -> None:
    """Leave the line in which a terminal showed `^C`."""
    if sys.stderr is not None and sys.stderr.isatty():
        click.echo(err=True)


def read_input(source: BinaryIO) -> str:
    """All text of standard input, without a line end at its end; raises click.UsageError for what is no UTF-8."""
    data = source.read(MOST_INPUT + 1)
    if len(data) > MOST_INPUT:
        raise click.UsageError(f"standard input: found more than {MOST_INPUT:,} bytes, expected a prompt")
    return decoded(data, "standard input").removesuffix("\n").removesuffix("\r")


def argument(text: str, index: int) -> str:
    """A command-line argument as it was typed; raises click.UsageError for bytes that are no UTF-8."""
    if not any("\udc80" <= character <= "\udcff" for character in text):
        return text
    return decoded(os.fsencode(text), f"argument {index}")


def decoded(data: bytes, where: str) -> str:
    """UTF-8 as text; raises click.UsageError that says where it is broken."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"found byte 0x{data[error.start]:02x} at position {error.start}"
        raise click.UsageError(f"{where}: {found}, expected text in UTF-8") from None
