"""Errors that a user can act on: one line, naming the file, the field, what was found and what was expected.

Every error that the library raises on purpose is an `MlxTformerError`. Its `exit_code` is what the
terminal program ends with, so the command line needs one `except` and no table of its own.
"""

from pathlib import Path


class MlxTformerError(Exception):
    """Base of all errors that are meant for the user; its text is one complete line."""

    exit_code = 1


class UsageError(MlxTformerError, ValueError):
    """An argument that cannot be meant: a negative length, a top-p of 2, an empty prompt."""

    exit_code = 2


class BadInput(MlxTformerError, ValueError):
    """A file, tensor, config or template that is broken or not understood.

    >>> raise BadInput("found -64, expected a whole number of 1 or more", file="config.json", field="hidden_size")
    Traceback (most recent call last):
    mlx_tformer.errors.BadInput: config.json: hidden_size: found -64, expected a whole number of 1 or more
    """

    exit_code = 3

    def __init__(self, problem: str, *, file: str | Path | None = None, field: str | None = None):
        where = [str(part) for part in (file, field) if part is not None]
        # What a file says may hold line breaks and terminal codes.
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in ": ".join([*where, problem])))


class Mismatch(MlxTformerError):
    """Two checkpoints that should compute the same do not."""

    exit_code = 3


class InputOutputError(MlxTformerError, OSError):
    """The disk, the network or the hub did not do what was asked."""

    exit_code = 4
