"""Vocabularies of SentencePiece (.spm, .model), read without running anything.

A file is a protocol buffer, `ModelProto` of SentencePiece's sentencepiece_model.proto: pieces with their scores, how
they were trained, and how a text is normalised before it is cut. A text is cut into the pieces whose scores sum to most
(Kudo 2018, arXiv 1804.10959).
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from ..errors import BadInput

if TYPE_CHECKING:
    from tokenizers import PreTokenizedString
    from tokenizers import Tokenizer as Backend
    from tokenizers.normalizers import Normalizer

SPACE = "▁"
PIECE, TRAINER, NORMALIZER = 1, 2, 3
"""Fields of a `ModelProto`."""
NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5
"""Kinds of pieces; a text holds none but the first."""
UNIGRAM = 1
CODE = re.compile(f"{SPACE}?>>.*?<<", re.DOTALL)
"""What tells Marian into which language: ">>fra<<"."""


@dataclass(frozen=True)
class Pieces:
    """What a file says. charsmap: what characters become, as SentencePiece has compiled it; empty for nothing."""

    scores: dict[str, float]
    charsmap: bytes
    prefixed: bool
    """A space is put in front of a text."""
    trimmed: bool
    """Spaces around a text, and more than one between words, are left out."""

    def cutter(self) -> "Backend":
        """What cuts a normalised text; its ids mean nothing."""
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import Unigram

        return Backend(Unigram([("<unk>", 0.0), *self.scores.items()], 0, False))

    def normalizer(self) -> "Normalizer":
        """What a text goes through before it is cut."""
        from tokenizers import Regex
        from tokenizers.normalizers import Normalizer, Precompiled, Prepend, Replace, Sequence

        steps: list[Normalizer] = [Precompiled(self.charsmap)] if self.charsmap else []
        steps += [Replace(Regex(r"\A +| +\z"), ""), Replace(Regex(" {2,}"), " ")] if self.trimmed else []
        steps += [Replace(" ", SPACE), *([Prepend(SPACE)] if self.prefixed else [])]
        return Sequence(steps)


class Cut:
    """Cuts texts as another tokenizer does, for one whose ids are not those of the pieces."""

    def __init__(self, cutter: "Backend"):
        self._cutter = cutter

    def pre_tokenize(self, text: "PreTokenizedString") -> None:
        """What `tokenizers` asks of such a step."""
        text.split(lambda _, part: [part[start:end] for start, end in self._places(str(part))])

    def _places(self, text: str) -> list[tuple[int, int]]:
        """Where the pieces of a text begin and end; a code of a language in front of it is whole."""
        code = CODE.match(text)
        first = 0 if code is None else code.end()
        rest = [(first + start, first + end) for start, end in self._cutter.encode(text[first:]).offsets]
        return [(0, first), *rest] if first else rest


def read_pieces(content: bytes, where: str) -> Pieces:
    """The pieces of a file; `where` is its name for errors. Raises BadInput for one that is broken, or cuts otherwise
    than by scores."""
    scores: dict[str, float] = {}
    trainer, normalizer = dict[int, int | bytes](), dict[int, int | bytes]()
    for number, value in fields(content, where):
        if number == PIECE and isinstance(value, bytes):
            text, score, kind = _piece(value, where)
            if kind not in (NORMAL, UNKNOWN, CONTROL, UNUSED):
                raise BadInput(
                    f"found {text!r} of kind {kind}, expected pieces of a text and control tokens", file=where
                )
            scores |= {text: score} if kind == NORMAL else {}
        elif number == TRAINER and isinstance(value, bytes):
            trainer |= dict(fields(value, where))
        elif number == NORMALIZER and isinstance(value, bytes):
            normalizer |= dict(fields(value, where))
    if trainer.get(3, UNIGRAM) != UNIGRAM or trainer.get(24, 0) != 0:
        raise BadInput("found another way to cut texts than by scores, with spaces in front of words", file=where)
    if not scores:
        raise BadInput("found no pieces, expected a SentencePiece model", file=where)
    charsmap = normalizer.get(2, b"")
    if not isinstance(charsmap, bytes) or normalizer.get(5, 1) != 1:
        raise BadInput("found a way to normalise that is not read", file=where)
    return Pieces(scores, charsmap, normalizer.get(3, 1) == 1, normalizer.get(4, 1) == 1)


def _piece(content: bytes, where: str) -> tuple[str, float, int]:
    """The text of a piece, its score and its kind."""
    found = dict(fields(content, where))
    text, score, kind = found.get(1, b""), found.get(2, b"\0" * 4), found.get(3, NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4 or not isinstance(kind, int):
        raise BadInput("found a piece without a text or score", file=where)
    value: float = struct.unpack("<f", score)[0]
    if not isfinite(value):
        raise BadInput(f"found {value} as the score of {text!r}, expected a number", file=where)
    try:
        return text.decode("utf-8"), value, kind
    except UnicodeDecodeError:
        raise BadInput(f"found a piece that is not UTF-8: {text!r}", file=where) from None


def fields(content: bytes, where: str) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer: numbers as such, everything else as bytes.

    >>> list(fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69]), "x"))
    [(1, 150), (2, b'hi')]
    """
    at = 0
    while at < len(content):
        key, at = _varint(content, at, where)
        kind = key & 7
        if kind == 0:
            value, at = _varint(content, at, where)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(content, at, where)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise BadInput(f"not a SentencePiece model: found wire type {kind} at byte {at}", file=where)
        if at + size > len(content):
            raise BadInput(
                f"not a SentencePiece model: a field of {size} bytes at byte {at} ends behind it", file=where
            )
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int, where: str) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            break
        byte = content[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise BadInput(f"not a SentencePiece model: found no end of the number before byte {at}", file=where)
