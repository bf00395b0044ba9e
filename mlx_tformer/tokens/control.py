"""Special tokens as text: what a user writes never becomes a control token, what a chat template writes does.

A tokenizer finds `<|im_end|>` wherever it stands. So the strings of a conversation are marked before a template sees
them, with private-use characters around each special token, and the marks tell afterwards who wrote it. The prompt
is then encoded by a second tokenizer, which takes special tokens for plain text but has a stand-in for each of them, a
private-use character with the same flags. So a user's text is cut exactly as it would be between control tokens.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as Backend

PRIVATE = (0xF0000, 0x10FFFD)
"""The two supplementary private-use planes, which no text needs to hold."""
DEEP = 50
"""Groups within groups that a pattern may have; Python's `re` is recursive."""


class ControlTokens:
    """The special tokens of a tokenizer, and the means to keep them out of a text."""

    def __init__(self, backend: "Backend", copy: "Callable[[], Backend]"):
        self.backend, self._copy = backend, copy
        added = backend.get_added_tokens_decoder()
        self.tokens: list[tuple[int, AddedToken]] = [(i, t) for i, t in added.items() if t.special and t.content]
        self.numbers = {token.content: number for number, (_, token) in enumerate(self.tokens)}
        self.ids = frozenset(index for index, _ in self.tokens)
        self.pattern = re.compile(any_of(self.numbers) or "(?!)")
        # A normalizer can make a special token out of a text that holds none, if the token is looked for after it.
        self.hidden = backend.normalizer is not None and any(token.normalized for _, token in self.tokens)
        self.beginnings = frozenset(token[:end] for token in self.numbers for end in range(1, len(token)))
        self.longest = max(map(len, self.beginnings), default=0)
        self._plain: dict[int, Backend] = {}
        self._lock = threading.Lock()

    def encode_plain(self, text: str) -> "Encoding":
        """The tokens of a text in which no special token counts."""
        return self._plain_backend(self._base(text)).encode(text, add_special_tokens=False)

    def marker(self, texts: Iterator[str]) -> "Marker":
        """What marks the strings of a conversation that consists of `texts`."""
        return Marker(self, self._base("".join(texts)))

    def encode_marked(self, rendered: str, marker: "Marker") -> list[int]:
        """The ids of what a template made of marked strings."""
        backend, base = self._plain_backend(marker.base), marker.base
        ids = backend.encode(marker.with_stand_ins(rendered), add_special_tokens=False).ids
        real = {backend.token_to_id(chr(base + number)): index for number, (index, _) in enumerate(self.tokens)}
        return [real.get(index, index) for index in ids]

    def _base(self, text: str) -> int:
        """The first of as many private characters as there are special tokens, and one; none of them is in `text`."""
        width = len(self.tokens) + 1
        used = {ord(c) for c in set(text) if PRIVATE[0] <= ord(c) <= PRIVATE[1]}
        for base in range(PRIVATE[0], PRIVATE[1] - width, width):
            if not any(base <= code < base + width for code in used):
                return base
        raise UsageError("the text holds characters from everywhere in Unicode's private-use planes")

    def _plain_backend(self, base: int) -> "Backend":
        """The second tokenizer, made when it is first needed."""
        with self._lock:
            if base not in self._plain:
                plain = self._copy()
                plain.encode_special_tokens = True
                plain.add_tokens([self._stand_in(token, chr(base + n)) for n, (_, token) in enumerate(self.tokens)])
                self._plain = {base: plain}
            return self._plain[base]

    def _stand_in(self, token: "AddedToken", character: str) -> "AddedToken":
        from tokenizers import AddedToken

        normalizer = self.backend.normalizer
        survives = normalizer is None or character in normalizer.normalize_str(character)
        return AddedToken(
            character,
            special=False,
            normalized=token.normalized and survives,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
        )


class Marker:
    """Marks special tokens in strings, and finds out later which of them were marked.

    The mark of a token is its stand-in, before and after it. A string that ends in the beginning of a token gets one
    more character at its end, so that two strings which a template puts together cannot make a token.
    """

    def __init__(self, control: ControlTokens, base: int):
        self.control = control
        self.base = base
        self.used = False
        self.marks = re.compile(f"[{chr(base)}-{chr(base + len(control.tokens))}]|{control.pattern.pattern}")

    def mark(self, text: str) -> str:
        """`text` with its special tokens marked."""
        marked = self.control.pattern.sub(self._around, text)
        control = self.control
        if any(text[-size:] in control.beginnings for size in range(1, min(control.longest, len(text)) + 1)):
            marked += chr(self.base + len(control.tokens))
        self.used |= marked != text
        return marked

    def _around(self, match: re.Match[str]) -> str:
        stand_in = chr(self.base + self.control.numbers[match.group()])
        return f"{stand_in}{match.group()}{stand_in}"

    def with_stand_ins(self, rendered: str) -> str:
        """`rendered` without marks: marked tokens as they are, and stand-ins for the others."""
        parts, start = [], 0
        while (match := self.marks.search(rendered, start)) is not None:
            parts.append(rendered[start : match.start()])
            start = match.end()
            if (number := self.control.numbers.get(match.group())) is not None:
                parts.append(chr(self.base + number))
                continue
            number = ord(match.group()) - self.base
            token = self.control.tokens[number][1].content if number < len(self.control.tokens) else ""
            if token and rendered.startswith(token + match.group(), start):
                parts.append(token)
                start += len(token) + 1
        return "".join([*parts, rendered[start:]])


def any_of(texts: Iterable[str], depth: int = 0) -> str:
    """A pattern for the longest of `texts` that fits, with common beginnings taken together: some vocabularies have
    thousands of special tokens, and a text thousands of places where one of them could begin.

    >>> any_of(["<pad>", "<s>", "</s>", "<s>x"])
    '<(?:/s>|pad>|s>(?:x)?)'
    """
    if depth > DEEP:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    parts = []
    for _, group in groupby(sorted(texts), key=itemgetter(0)):
        same = list(group)
        first, last = same[0], same[-1]  # in order, so what these two share, all share
        start = first[: next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]
        rest = [text[len(start) :] for text in same if text != start]
        optional = "?" if len(rest) < len(same) else ""
        parts.append(re.escape(start) + (f"(?:{any_of(rest, depth + 1)}){optional}" if rest else ""))
    return "|".join(parts)


def plain_data(value: object, mark: Callable[[str], str] = str) -> object:
    """A copy of a conversation in plain types only, with `mark` applied to its strings (not to the keys of its dicts).

    A template could call methods of anything else. Raises UsageError for what is no JSON.
    """
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return mark(str(value))
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item, mark) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, mark) for item in value]
    raise UsageError(f"found a {type(value).__name__} in a conversation, expected strings, numbers, lists and dicts")


def strings(value: object) -> Iterator[str]:
    """All strings in plain data, keys apart."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
