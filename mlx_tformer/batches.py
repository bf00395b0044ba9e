"""Many texts through an encoder: in batches of texts that are about as long, none of which is huge."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

TOKENS = 8192
"""Tokens of a batch at most, padding among them."""
Progress = Callable[[int, int], None]
"""Told how many texts of how many are done."""


@dataclass(frozen=True)
class Row:
    """A text, or a pair of texts: its ids, and the type of each."""

    ids: list[int]
    types: list[int]


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right, as a model takes them."""

    ids: mx.array
    """(B, L)"""
    mask: mx.array
    """(B, L), True for text"""
    types: mx.array
    """(B, L)"""


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """The numbers of rows of these lengths, the longest first, in groups that have at most `most` tokens when they are
    padded; a longer row is alone.

    >>> list(batches([3, 9, 4, 2], most=12))
    [[1], [2, 0, 3]]
    """
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and lengths[group[0]] * (len(group) + 1) > most:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def padded(rows: Sequence[Row]) -> Batch:
    """Rows as one batch."""
    longest = max(len(row.ids) for row in rows)
    ids, types = (
        mx.array([part + [0] * (longest - len(part)) for part in parts])
        for parts in ([row.ids for row in rows], [row.types for row in rows])
    )
    return Batch(ids, mx.arange(longest) < mx.array([[len(row.ids)] for row in rows]), types)


def over(rows: Sequence[Row], compute: Callable[[Batch], mx.array], progress: Progress | None = None) -> mx.array:
    """What `compute` makes of each row, (N, ...), in the order of the rows; it gets them batch by batch."""
    parts, order = [], list[int]()
    for numbers in batches([len(row.ids) for row in rows], TOKENS):
        parts.append(compute(padded([rows[i] for i in numbers])))
        mx.eval(parts[-1])
        order += numbers
        if progress is not None:
            progress(len(order), len(rows))
    return mx.concatenate(parts)[mx.argsort(mx.array(order))]
