"""Several texts in one row, so that a batch holds little padding (Krell et al. 2021, arXiv 2107.02027).

The texts of a row do not see each other, and the positions of each begin at 0: a model that is told the `segments`
computes for every text what it computes for that text alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..errors import UsageError


@dataclass(frozen=True)
class Packed:
    """Rows of texts: `model(packed.ids, segments=packed.segments)`, and for `next_token_loss` the `loss_mask`."""

    ids: mx.array
    """(B, L)"""
    segments: mx.array
    """For each token which of the texts it belongs to, counted from 0, and -1 for padding, (B, L)."""
    loss_mask: mx.array
    """True for the tokens to be predicted: neither padding, nor the first of a text, nor before where its loss begins,
    (B, L)."""
    places: tuple[tuple[int, int, int], ...]
    """Of each text its row, and where in the row it begins and ends."""

    def apart(self, values: mx.array) -> list[mx.array]:
        """What rows (B, L, ...) hold for each text, in the order in which the texts were given: (length, ...) each."""
        return [values[row, start:stop] for row, start, stop in self.places]


def pack(texts: Sequence[Sequence[int]], length: int, *, loss_from: Sequence[int] = (), pad: int = 0) -> Packed:
    """Texts, given as ids, in as few rows of `length` tokens as first-fit finds, the longest first.

    loss_from: for each text the number of tokens at its beginning that are read and not predicted, such as a prompt;
    by default every token but the first is predicted. pad: the id of padding. Raises UsageError for no texts, an empty
    one, one that is longer than a row, and a `loss_from` of another length.

    >>> packed = pack([[1, 2], [3, 4, 5], [6, 7]], 5)
    >>> packed.ids.tolist(), packed.segments.tolist()
    ([[3, 4, 5, 1, 2], [6, 7, 0, 0, 0]], [[1, 1, 1, 0, 0], [2, 2, -1, -1, -1]])
    """
    lengths = [len(text) for text in texts]
    if not lengths or not all(0 < size <= length for size in lengths):
        raise UsageError(f"texts: found {lengths or 'none'} tokens, expected texts of 1 to {length}")
    if loss_from and len(loss_from) != len(texts):
        raise UsageError(f"loss_from: found {len(loss_from)} numbers, expected one for each of {len(texts)} texts")
    places, count = _places(lengths, length)
    ids, segments, counts = ([[value] * length for _ in range(count)] for value in (pad, -1, 0))
    for number, (row, start, stop) in enumerate(places):
        ids[row][start:stop] = texts[number]
        segments[row][start:stop] = [number] * (stop - start)
        unlearned = max(loss_from[number] if loss_from else 0, 1)  # nothing predicts the first
        counts[row][start + unlearned : stop] = [1] * max(stop - start - unlearned, 0)
    return Packed(mx.array(ids), mx.array(segments), mx.array(counts).astype(mx.bool_), tuple(places))


def _places(lengths: Sequence[int], length: int) -> tuple[list[tuple[int, int, int]], int]:
    """Row, start and stop of each text, and the number of rows."""
    places, filled = [(0, 0, 0)] * len(lengths), list[int]()
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, used in enumerate(filled) if used + lengths[number] <= length), len(filled))
        if row == len(filled):
            filled.append(0)
        places[number] = (row, filled[row], filled[row] + lengths[number])
        filled[row] += lengths[number]
    return places, len(filled)
