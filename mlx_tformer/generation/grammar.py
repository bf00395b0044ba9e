"""Text that a JSON schema or a regular expression allows, and no other: `llguidance` tells, after each token, which
may follow.

What it is told of the vocabulary are the bytes that each token adds to the text, so that it sees what a reader will.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..errors import UsageError
from ..tokens import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from ..lm import LanguageModel

SPACE = r"[ ]|\n[ ]{0,16}"
"""Space between the parts of JSON: as people write it, and never without end, which small models are prone to."""
FREELY = '%llguidance {"no_forcing": true}\n'
"""Ask for every token that may follow, where the library would name one way to write what has to follow."""
Schema = Mapping[str, Any] | bool


@dataclass(frozen=True)
class Words:
    """A vocabulary as the library knows it. Where tokens have another text at a beginning (SentencePiece drops a space
    there, WordPiece writes none), they have a second number for that, `first` higher."""

    known: "LLTokenizer"
    first: int
    size: int


_WORDS: "WeakKeyDictionary[Tokenizer, Words]" = WeakKeyDictionary()


class DeadEnd(UsageError):
    """A text that is not complete and that no token may follow."""


class Grammar:
    """What one text may be: follows its tokens, and tells which may come next.

    name: how errors call it. vocab: ids of the model, those that no token has included, which never come. end_ids: ids
    that end the text; they may come where the text is complete, and must where nothing else may. Without any, the text
    ends where nothing may come.

    What chooses tokens is ahead of those who read them, and chooses for several texts at once. So behind a dead end it
    may choose anything, and who follows the text is told when what was chosen comes.
    """

    def __init__(
        self, name: str, matcher: "LLMatcher", words: Words, vocab: int, never: Sequence[int], end_ids: Sequence[int]
    ) -> None:
        self.name, self._matcher, self._words, self._vocab = name, matcher, words, vocab
        self._end_ids, self._never = list(end_ids), sorted({*never, *end_ids})
        self._taken, self._ended = 0, False
        self._found: mx.array | None = None
        self._empty = False
        self._problem: str | None = None  # of a dead end behind the tokens that were taken
        self.allowed()
        if self.complete and not self._end_ids:
            raise UsageError(f"{name}: nothing but the empty text matches, and the text cannot be empty")

    def follow(self, written: Sequence[int]) -> None:
        """Take the tokens of the text; raises DeadEnd where one of them was chosen though none may come."""
        self.take(written)
        if len(written) > self._taken:
            self.check()

    def take(self, written: Sequence[int]) -> None:
        """Take the tokens of the text that were not taken yet, up to a dead end."""
        for token in written[self._taken :]:
            if not self._ended:
                self._take(token)
            if self._problem is not None:
                return
            self._taken += 1

    def check(self) -> None:
        """Raise DeadEnd if no token may follow those that were taken."""
        if self._problem is not None:
            raise DeadEnd(f"{self.name}: after {self._taken} tokens, {self._problem}")

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return self._ended or self._matcher.is_accepting()

    @property
    def complete(self) -> bool:
        """Whether the text may end here, and nothing else may come."""
        return self._ended or (self.accepting and self._continued()[1])

    def allowed(self) -> mx.array:
        """The ids that may come next, (V,), True for these; in a dead end, as after the end, whatever is chosen is not
        shown."""
        if self._ended or self._problem is not None or (self.complete and not self._end_ids):
            return mx.ones((self._vocab,), mx.bool_)
        allowed, empty = self._continued()
        if empty and not self.accepting:
            self._problem = "no token of the vocabulary may follow"
        return allowed

    def _take(self, token: int) -> None:
        """Take a token, or find that there was none to choose, which is so where other settings forbid all."""
        self._found = None
        if token in self._end_ids:
            self._ended = self._matcher.is_accepting()
        elif token not in self._never and self._matcher.consume_token(token + self._offset):
            return
        if not self._ended and self._problem is None:
            self._problem = "the other settings forbid every token that may follow"

    @property
    def _offset(self) -> int:
        """What is added to an id to get the library's number for it here."""
        return 0 if self._taken else self._words.first

    def _continued(self) -> tuple[mx.array, bool]:
        """The ids that may come next, (V,), and whether none of them continues the text."""
        import numpy as np

        if self._found is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            stuck = "NoExtensionBias" in self._matcher.get_error()  # an error only where the text may not end
            if self._matcher.is_error() and not stuck:
                self._problem = _line(self._matcher.get_error())
                return mx.ones((self._vocab,), mx.bool_), False
            listed = np.unpackbits(bits, bitorder="little")[self._offset :][: min(self._words.size, self._vocab)]
            marks = np.zeros(self._vocab, bool)
            marks[: len(listed)] = 0 if stuck else listed
            marks[self._never] = False
            self._empty = not marks.any()
            marks[self._end_ids] = self._matcher.is_accepting()
            self._found = mx.array(marks)
        return self._found, self._empty


def grammar_for(
    lm: "LanguageModel",
    json_schema: Schema | None,
    regex: str | None,
    end_ids: Sequence[int],
) -> Grammar | None:
    """What a text of the model may be, by one of these, or None if it may be anything.

    Raises UsageError for what is no schema and no expression, naming what is wrong, for both at once, for a model
    without a tokenizer or with one that does not decode token by token, and where llguidance is not installed.
    """
    if json_schema is None and regex is None:
        return None
    if json_schema is not None and regex is not None:
        raise UsageError("json_schema, regex: found both, expected one of them")
    name = "regex" if json_schema is None else "json_schema"
    if lm.tokenizer is None:
        raise UsageError(f"{name}: {lm.origin} has no tokenizer, so its ids have no text")
    try:
        import llguidance
    except ImportError:
        raise UsageError(f"{name} needs llguidance: pip install 'mlx-tformer[grammar]'") from None
    rules = _of_regex(regex) if json_schema is None else _of_schema(json_schema)
    words = _words(name, lm.tokenizer)
    matcher = llguidance.LLMatcher(words.known, FREELY + rules, log_level=0)
    if matcher.is_error():
        raise UsageError(f"{name}: {_line(matcher.get_error())}")
    never = [i for i in lm.tokenizer.special_ids if i < lm.vocab]
    return Grammar(name, matcher, words, lm.vocab, never, [i for i in end_ids if 0 <= i < lm.vocab])


def _of_regex(regex: Any) -> str:
    from llguidance import LLMatcher, regex_to_lark

    if not isinstance(regex, str):
        raise UsageError(f"regex: found a {type(regex).__name__}, expected text")
    _check("regex", lambda: LLMatcher.grammar_from_regex(regex), f" in {regex[:60]!r}")
    return f"start: /{regex_to_lark(regex)}/"


def _of_schema(schema: Any) -> str:
    from llguidance import LLMatcher

    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"json_schema: found {str(schema)[:40]!r}, expected a JSON schema, as in {{'type': 'object'}}")
    if schema is False:
        raise UsageError("json_schema: false allows no text")
    whole = {} if schema is True else dict(schema)
    try:
        text = json.dumps({**whole, "x-guidance": {"whitespace_pattern": SPACE}}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"json_schema: not JSON: {error}") from None
    _check("json_schema", lambda: LLMatcher.grammar_from_json_schema(text))
    return f"start: %json {text}"


def _check(name: str, made: Callable[[], str], where: str = "") -> None:
    from llguidance import LLMatcher

    try:
        wrong, told = LLMatcher.validate_grammar_with_warnings(made())
    except ValueError as error:
        wrong, told = True, [str(error)]
    if wrong:
        raise UsageError(f"{name}: {_line(told[0])}{where}")


def _line(problem: str) -> str:
    """The line of a message that says what is wrong; of one that draws the place, that is the one after it."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["it cannot be followed"]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


def _words(name: str, tokenizer: Tokenizer) -> Words:
    """The vocabulary of a tokenizer, made once."""
    if tokenizer not in _WORDS:
        _WORDS[tokenizer] = _known(name, tokenizer)
    return _WORDS[tokenizer]


def _known(name: str, tokenizer: Tokenizer) -> Words:
    from llguidance import LLTokenizer, TokenizerWrapper

    found = tokenizer.spelling()
    if found is None:
        raise UsageError(f"{name}: the tokenizer does not decode token by token, so no token can be told to fit")
    same = found.first == found.later
    spelled = found.later if same else found.later + found.first
    special = [i + start for start in range(0, len(spelled), tokenizer.size) for i in tokenizer.special_ids]
    known = LLTokenizer(TokenizerWrapper(_Spelled(spelled, special)))
    return Words(known, 0 if same else tokenizer.size, tokenizer.size)


class _Spelled:
    """What the library asks a tokenizer for; the text itself is never cut into tokens by it."""

    eos_token_id = None
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]):
        self.tokens, self.special_token_ids = tokens, special

    def __call__(self, text: bytes) -> list[int]:
        return []
