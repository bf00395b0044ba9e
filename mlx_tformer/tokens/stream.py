"""Text while its tokens are still coming: the pieces, put together, are what decoding all of them at once gives.

One token can be half a character, the space before a word can depend on what went before, and a run of byte tokens is
text only if all of it is. Each stream keeps just the tokens whose text is not settled yet, so that a token costs the
same however long the text is.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

Piece = Callable[[int], str | None]
"""The token of an id, as the vocabulary spells it."""
Decode = Callable[[list[int]], str]
"""The text of ids, special tokens included."""
SEPARATE = frozenset(("Metaspace", "Replace", "ByteFallback", "Strip", "WordPiece", "BPEDecoder", "Fuse"))
"""Decoders that treat tokens one by one, apart from the first, the last, and runs of byte tokens."""
CLEAN_UP = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m"}
CLEAN_UP |= {" 's": "'s", " 've": "'ve", " 're": "'re"}
"""What transformers does to text of WordPiece tokens if `clean_up_tokenization_spaces` says so, in this order."""
UNSETTLED = re.compile(r"(?: ++(?:n'?|'[vr]?)?)+\Z")
"""The end of a text that a replacement can still reach: beginnings of the above in a row, each after all its spaces."""


class Detokenizer(ABC):
    """One stream of text, by one way of decoding."""

    @abstractmethod
    def add(self, index: int) -> str:
        """Take a token; return the text that is settled by now and was not returned before."""

    @abstractmethod
    def finish(self) -> str:
        """The rest of the text."""


class ByteStream(Detokenizer):
    """Byte-level vocabularies: every token is some bytes of UTF-8, and only a character in the making has to wait."""

    def __init__(self, piece: Piece):
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, index: int) -> str:
        token = self._piece(index)
        return "" if token is None else self._decoder.decode(token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceStream(Detokenizer):
    """Vocabularies of text pieces, and of tokens for single bytes, where a run of the latter waits for its end.

    A token's text is what decoding gives more with it than without it. That needs not all the tokens before: `head`,
    which is there to be the beginning, where a space may be dropped, and which decodes to something, so that nothing
    more is dropped; and the last token, since the end of a word may depend on what follows.
    """

    def __init__(self, piece: Piece, decode: Decode, *, bytes_wait: bool):
        self._piece = piece
        self._decode = decode
        self._bytes_wait = bytes_wait
        self._head: list[int] = []
        self._last: list[int] = []
        self._run: list[int] = []

    def add(self, index: int) -> str:
        token = self._piece(index)
        if token is None:
            return ""
        self._run.append(index)
        return "" if self._bytes_wait and is_byte(token) else self.finish()

    def finish(self) -> str:
        if not self._run:
            return ""
        before = self._decode(self._head + self._last)
        text = self._decode(self._head + self._last + self._run)
        last, run = self._run[-1:], self._run
        self._run = []
        if self._decode(last):
            self._head, self._last = last, []
        elif before:
            self._last = last
        else:  # nothing but spaces that are dropped at the beginning
            self._head += run
        return text[len(before) :]


class WholeStream(Detokenizer):
    """Any other way of decoding: the text comes at the end."""

    def __init__(self, decode: Decode):
        self._decode = decode
        self._ids: list[int] = []

    def add(self, index: int) -> str:
        self._ids.append(index)
        return ""

    def finish(self) -> str:
        return self._decode(self._ids)


class TextStream:
    """Turns ids into text as they come; `add` returns what is safe to print now, `finish` the rest.

    No character is returned before it is complete, and U+FFFD only where the decoded text has it. An id that no token
    has, as a model with spare rows in its embedding may choose, has no text.
    """

    def __init__(self, detokenizer: Detokenizer, *, skip: Iterable[int] = (), clean: bool = False):
        """`skip`: ids to pass over. `clean`: do what `clean_up` does."""
        self._detokenizer = detokenizer
        self._skip = frozenset(skip)
        self._clean = clean
        self._held = ""

    def add(self, index: int) -> str:
        """Take a token's id; return the text that is settled by now and was not returned before."""
        return "" if index in self._skip else self._settled(self._detokenizer.add(index))

    def finish(self) -> str:
        """The rest of the text; the stream is at its end."""
        text = self._settled(self._detokenizer.finish())
        rest, self._held = self._held, ""
        return text + clean_up(rest)

    def _settled(self, text: str) -> str:
        if not self._clean:
            return text
        self._held += text
        match = UNSETTLED.search(self._held)
        cut = len(self._held) if match is None else match.start()
        ready, self._held = self._held[:cut], self._held[cut:]
        return clean_up(ready)


def clean_up(text: str) -> str:
    """Remove the spaces that WordPiece tokens leave before punctuation, as transformers does.

    >>> clean_up("do n't stop , please !")
    "don't stop, please!"
    """
    for before, after in CLEAN_UP.items():
        text = text.replace(before, after)
    return text


def detokenizer(decoder: Any, piece: Piece, decode: Decode, vocabulary: Callable[[], Iterable[str]]) -> Detokenizer:
    """A stream for what the tokenizer's decoder, given as its JSON, does."""
    steps = flat(decoder)
    kinds = [step["type"] for step in steps]
    if is_byte_level(decoder):
        return ByteStream(piece)
    after_fuse = kinds[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    if not SEPARATE.issuperset(kinds) or set(after_fuse) - {"Strip"}:
        return WholeStream(decode)
    if any(step["type"] == "Strip" and step["stop"] for step in steps):
        return WholeStream(decode)
    replaced = [step for step in steps if step["type"] == "Replace"]
    if any("String" not in step["pattern"] or "<" in step["content"] for step in replaced):
        return WholeStream(decode)  # it could make a byte token
    ends = [step["suffix"] for step in steps if step["type"] == "BPEDecoder"]
    if any(end in token[: -len(end)] for end in ends for token in vocabulary()):
        return WholeStream(decode)  # a token would change, and not only at its end, when another one follows
    return PieceStream(piece, decode, bytes_wait="ByteFallback" in kinds)


def flat(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder, one after the other."""
    if decoder is None:
        return []
    return [step for part in decoder["decoders"] for step in flat(part)] if decoder["type"] == "Sequence" else [decoder]


def is_byte_level(decoder: Any) -> bool:
    """True if tokens spell bytes, each as a character of its own, as GPT-2's do."""
    return [step["type"] for step in flat(decoder)] == ["ByteLevel"]


def is_byte(token: str) -> bool:
    """True for the tokens of single bytes, `<0x0A>`, that SentencePiece falls back to."""
    return token.startswith("<0x") and token.endswith(">") and len(token.encode()) == 6


@cache
def _byte_alphabet() -> dict[str, int]:
    """Which byte a character of a byte-level token stands for: itself if it is visible, the others from U+0100 on.

    Source: `bytes_to_unicode` of GPT-2 (openai/gpt-2, src/encoder.py).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; an added token is written in plain text, and stands for its UTF-8.

    >>> token_bytes("Ġcaf"), token_bytes("Ã©").decode(), token_bytes("<｜end｜>").decode()
    (b' caf', 'é', '<｜end｜>')
    """
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()
