"""Parts of a text to count attention by: stretches of tokens, lines, sentences, or kinds of token."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from ..errors import UsageError

AFTER = "(after)"
"""What comes after the text that was divided, such as tokens that a model writes."""
KINDS = ("first", "special", "word", "number", "punctuation", "space")
WAYS = ("line", "sentence", "kind")
NAMED = 24
"""Characters of a line or sentence that its name shows."""
ENDS = {"line": re.compile(r"\n\s*$"), "sentence": re.compile(r"([.!?…]['\"”’)\]]*|\n)\s*$")}
"""How a text looks that a line or a sentence ends."""
TAIL = 16
"""Characters from the end at which that is looked for."""


@dataclass(frozen=True)
class Spans:
    """A name for each span, and for each token of a text the number of its span.

    Further tokens belong to one more span, the last of `columns`.

    >>> spans = Spans(("question", "answer"), (0, 0, 0, 1, 1))
    >>> spans.columns
    ('question', 'answer', '(after)')
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.labels or not all(0 <= label < len(self.names) for label in self.labels):
            raise UsageError(f"spans: expected a label from 0 to {len(self.names) - 1} for each token of a text")

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all spans, with that of what comes after the text."""
        return (*self.names, AFTER)

    @cached_property
    def _table(self) -> mx.array:
        return mx.array([*self.labels, len(self.names)])

    def one_hot(self, positions: mx.array) -> mx.array:
        """1.0 in the column of the span of each position, 0.0 elsewhere: (..., S) -> (..., S, columns)."""
        labels = self._table[mx.clip(positions, 0, len(self.labels))]
        return (labels[..., None] == mx.arange(len(self.columns))).astype(mx.float32)


def stretches(length: int, size: int) -> Spans:
    """Stretches of `size` tokens.

    >>> stretches(5, 2)
    Spans(names=('0-1', '2-3', '4-4'), labels=(0, 0, 1, 1, 2))
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"every: found {size}, expected a whole number of 1 or more")
    names = tuple(f"{start}-{min(start + size, length) - 1}" for start in range(0, length, size))
    return Spans(names, tuple(place // size for place in range(length)))


def by_ends(pieces: Sequence[str], way: str) -> Spans:
    """Lines or sentences of a text whose tokens are `pieces`; each takes the token that ends it.

    >>> by_ends(["Go", ".", " I", " stay", "."], "sentence").names
    ('Go.', 'I stay.')
    """
    labels: list[int] = []
    texts, waiting = [""], 0
    for piece in pieces:
        waiting += 1  # a token without a text begins a character, and goes where that goes
        if piece:
            if ENDS[way].search(texts[-1][-TAIL:]) and piece.strip():
                texts.append("")
            labels += [len(texts) - 1] * waiting
            texts[-1], waiting = texts[-1] + piece, 0
    labels += [len(texts) - 1] * waiting
    return Spans(tuple(_name(text) for text in texts), tuple(labels))


def _name(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= NAMED else f"{words[: NAMED - 1]}…"


def by_kind(ids: Sequence[int], pieces: Sequence[str], special: Collection[int]) -> Spans:
    """The first token, special ones, words, numbers, punctuation, space.

    >>> by_kind([7, 8, 9], ["Go", " 12", "!"], special=()).labels
    (0, 3, 4)
    """
    kinds, piece = [], ""
    for index, own in zip(reversed(ids), reversed(pieces), strict=True):
        piece = own or piece  # a token without a text begins a character, and is of its kind
        kinds.append(_kind(index, piece, special))
    kinds = ["first", *kinds[::-1][1:]]
    return Spans(KINDS, tuple(map(KINDS.index, kinds)))


def _kind(index: int, piece: str, special: Collection[int]) -> str:
    if index in special:
        return "special"
    if any(character.isalpha() for character in piece):
        return "word"
    if any(character.isdigit() for character in piece):
        return "number"
    return "punctuation" if piece.strip() else "space"
