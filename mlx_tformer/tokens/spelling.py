"""What each token of a vocabulary adds to a text, in bytes: what a grammar has to know."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .stream import flat, is_byte, is_byte_level, token_bytes

SEPARATE = frozenset(("Metaspace", "Replace", "ByteFallback", "Strip", "WordPiece", "Fuse"))
"""Decoders for which a token's text depends on nothing but whether it is the first."""
BATCH = 4096
"""Tokens that are decoded at a time."""


@dataclass(frozen=True)
class Spelling:
    """The bytes of each id, empty where it has no text: at the beginning of a text, and after other tokens."""

    first: list[bytes]
    later: list[bytes]


def spelling(
    decoder: Any, tokens: Sequence[str | None], decode: Callable[[list[list[int]]], list[str]]
) -> Spelling | None:
    """The bytes of `tokens`, by id, under a decoder that is given as its JSON; None where a token's text depends on
    more of its neighbours than that there is one in front of it.

    decode: the texts of several lists of ids.

    >>> words = ["▁to", "▁", "be"]
    >>> spelling({"type": "Metaspace"}, words, lambda rows: ["".join(words[i] for i in row) for row in rows]).later
    [b'\\xe2\\x96\\x81to', b'\\xe2\\x96\\x81', b'be']
    """
    if is_byte_level(decoder):
        spelled = [b"" if token is None else token_bytes(token) for token in tokens]
        return Spelling(spelled, spelled)
    steps = flat(decoder)
    strips = [step for step in steps if step["type"] == "Strip"]
    if not SEPARATE.issuperset(step["type"] for step in steps) or any(s["stop"] or s["start"] > 1 for s in strips):
        return None
    alone = _decoded(decode, tokens, [])
    # A token in front that is a word of its own, so that what is dropped at a beginning is not dropped after it.
    head = next((i for i, text in enumerate(alone) if text.isalnum()), None)
    if head is None:
        return None
    after = [text[len(alone[head]) :] for text in _decoded(decode, tokens, [head])]
    single = {i: _byte(token) for i, token in enumerate(tokens) if token is not None and _falls_back(steps, token)}
    return Spelling(*([single.get(i, text.encode()) for i, text in enumerate(texts)] for texts in (alone, after)))


def _decoded(
    decode: Callable[[list[list[int]]], list[str]], tokens: Sequence[str | None], before: list[int]
) -> list[str]:
    """The text of each token after those `before`; that of ids without a token is theirs alone."""
    rows = [before if token is None else [*before, i] for i, token in enumerate(tokens)]
    return [text for at in range(0, len(rows), BATCH) for text in decode(rows[at : at + BATCH])]


def _falls_back(steps: Sequence[dict[str, Any]], token: str) -> bool:
    return is_byte(token) and any(step["type"] == "ByteFallback" for step in steps)


def _byte(token: str) -> bytes:
    return bytes([int(token[3:5], 16)])
