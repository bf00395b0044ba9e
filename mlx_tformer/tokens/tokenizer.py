"""Text to ids and back, and conversations to prompts, on the `tokenizers` package.

Three rules beside what the package does. Special tokens in a user's text are plain text. Streamed text is, piece by
piece, what decoding all ids gives. A broken or hostile tokenizer ends in one clear line.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import mlx.core as mx

from ..errors import UsageError
from .control import ControlTokens, plain_data, strings
from .files import Loaded, load, read_folder, understood
from .spans import WAYS, Spans, by_ends, by_kind, stretches
from .spelling import Spelling, spelling
from .stream import TextStream, clean_up, detokenizer, flat, is_byte_level, token_bytes
from .template import ChatTemplate, choose

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

END_NAMES = ("eos_token", "eot_token", "eom_token")
"""Keys of tokenizer_config.json whose tokens end a text, a turn or a message."""
SHOWN = 60
"""Characters of a text that `repr` shows."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message may hold what the model thought; templates read the first, or the second."""


class Tokenizer:
    """Text to ids and back. Safe to use from several threads.

    chat_template: the source of the default chat template, or None. bos_id, eos_id, pad_id, mask_id: the ids of the
    tokens that the config names, or None. mask_token: what stands for a missing word, or None. end_ids: ids
    that end a text or a turn. size: the highest id, plus one.
    """

    def __init__(self, loaded: Loaded):
        self.files: dict[str, bytes] = {}
        """What stands beside the weights, with the tokenizer's own files, name -> content."""
        self._backend: Backend = loaded.backend
        self._copy = loaded.copy
        self._where = loaded.where
        self.size = loaded.size
        self._names = loaded.names
        self._clean = loaded.clean_up
        self._sources = loaded.templates
        self._template_file = loaded.template_file
        self._templates: dict[str, ChatTemplate] = {}
        self._decoder = None if self._backend.decoder is None else json.loads(self._backend.decoder.__getstate__())
        # Decoding does not fail, except with these two: a `Strip` of what is not there, and a regex that gives up.
        self._wary = any(step.get("stop") or "Regex" in step.get("pattern", ()) for step in flat(self._decoder))
        self.chat_template = loaded.templates.get("default")
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        self.pad_id = self._id("pad_token")
        self.mask_id, self.mask_token = self._id("mask_token"), loaded.names.get("mask_token")
        self.end_ids = {index for index in map(self._id, END_NAMES) if index is not None}

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a checkpoint's folder; raises BadInput if it is broken, UsageError if there is none."""
        found = cls.find(folder)
        if found is None:
            raise UsageError(f"{folder} has no tokenizer; expected tokenizer.json")
        return found

    @classmethod
    def find(cls, folder: str | Path) -> "Tokenizer | None":
        """The tokenizer of a checkpoint's folder; None if it has no tokenizer files, so that only ids can be used."""
        return cls.from_files(read_folder(Path(folder)), str(folder))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], origin: str) -> "Tokenizer | None":
        """The tokenizer of files in memory, name -> content; `origin` is where errors say that they come from."""
        loaded = load(files, origin)
        if loaded is None:
            return None
        found = cls(loaded)
        found.files = dict(files)
        return found

    def __repr__(self) -> str:
        return f"Tokenizer({self.size} ids, {self._where})"

    def encode(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        """The ids of a text.

        special: let special tokens that are spelled out in it be what they say; else they are text like any other.
        add_bos: with the tokens that go around a text: those of tokenizer.json's post-processor, as in transformers.
        Raises UsageError for what is no text, BadInput if the tokenizer turns out to be broken.
        """
        found = self._encoding(text, special)
        with understood(self._where, quiet=True):
            return (self._backend.post_process(found) if add_bos else found).ids

    def read(self, first: str, second: str | None = None, *, most: int | None = None) -> tuple[list[int], list[int]]:
        """The ids of a text or of a pair, with the tokens that go around them, and the type of each: 0 or 1, which of
        the two it belongs to.

        most: so many ids at most; what is too long loses its end, of a pair the longer text first. Special tokens in
        the texts are text. Raises UsageError for what is no text, for a tokenizer that has no way to write a pair, and
        if what goes around a text has no room; BadInput if the tokenizer turns out to be broken.
        """
        texts = [first] if second is None else [first, second]
        parts: list[Any] = [self._encoding(text) for text in texts]
        with understood(self._where, quiet=True):
            around = self._backend.num_special_tokens_to_add(len(texts) == 2)
        if most is not None and sum(map(len, parts)) + around > most:
            if most <= around:
                raise UsageError(f"most: found {most} ids, but {around} go around a text")
            for part, size in zip(parts, _shares([len(part) for part in parts], most - around), strict=True):
                part.truncate(size)
        with understood(self._where, quiet=True):
            found = self._backend.post_process(*parts)
        return found.ids, found.type_ids

    def _encoding(self, text: str, special: bool = False) -> "Encoding":
        """A text without what goes around it; `special`: special tokens that are spelled out in it are real."""
        _check_text(text)
        with understood(self._where, quiet=True):
            found = self._backend.encode(text, add_special_tokens=False)
            plain = special or self._control.ids.isdisjoint(found.ids)
            return found if plain else self._control.encode_plain(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids; skip_special: leave special tokens out. Raises UsageError for an id that is out of range."""
        listed = [self._checked_id(index) for index in ids]
        text = self._decode(listed, skip_special)
        return clean_up(text) if self._clean else text

    def _decode(self, ids: list[int], skip_special: bool = False) -> str:
        with understood(self._where, quiet=self._wary):
            return self._backend.decode(ids, skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = False, clean: bool = True) -> TextStream:
        """Text for ids that come one by one; its pieces, put together, are what `decode` gives. `clean`: with what the
        config's `clean_up_tokenization_spaces` asks for."""
        skip = (index for index, _ in self._control.tokens) if skip_special else ()
        made = detokenizer(self._decoder, self._backend.id_to_token, self._decode, self._backend.get_vocab)
        return TextStream(made, skip=skip, clean=clean and self._clean)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id adds to the text; a character that several ids make up stands at the last of them."""
        stream = self.stream()
        found = [stream.add(self._checked_id(index)) for index in ids]
        return [*found[:-1], found[-1] + stream.finish()] if found else []

    def spelling(self) -> Spelling | None:
        """The bytes that each id adds to a text; None for a tokenizer that does not decode token by token."""
        tokens = [self._backend.id_to_token(index) for index in range(self.size)]
        with understood(self._where, quiet=self._wary):
            return spelling(
                self._decoder, tokens, lambda rows: self._backend.decode_batch(rows, skip_special_tokens=False)
            )

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        return self._control.ids

    def token_text(self, index: int) -> str:
        """One token, readable in a table: spaces as such, line breaks and bytes that are no text as escapes."""
        token = self._backend.id_to_token(self._checked_id(index))
        if token is None:
            return ""
        if is_byte_level(self._decoder):
            return _visible(token_bytes(token))
        spaced = any(step["type"] in ("Metaspace", "Replace") for step in flat(self._decoder))
        return _visible((token.replace("▁", " ") if spaced else token).encode())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """The ids of a conversation, written by the model's chat template.

        messages: dicts with "role" and "content". tools: JSON schemas of functions. template: the name of one, where
        there are several. variables: whatever else the template reads, such as `enable_thinking`. Special tokens in
        any of these are encoded as text; those that the template writes are real.

        Raises UsageError without a template or messages, BadInput for a template that fails or refuses.
        """
        given = _conversation(messages, tools, variables)
        marker = self._control.marker(strings(given))
        text = self._rendered(plain_data(given, marker.mark), add_generation_prompt, template)
        if marker.used or self._control.hidden:
            with understood(self._where, quiet=True):
                return self._control.encode_marked(text, marker)
        return self.encode(text, special=True, add_bos=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text that the chat template makes of a conversation; the arguments are those of `chat`."""
        return self._rendered(_conversation(messages, tools, variables), add_generation_prompt, template)

    def _rendered(self, given: Any, add_generation_prompt: bool, template: str | None) -> str:
        name = choose(self._sources, template, tools=given["tools"] is not None)
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._sources[name], file=self._template_file)
        variables = {**self._names, **given, "add_generation_prompt": add_generation_prompt}
        return self._templates[name].render(variables)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._backend, self._copy)

    def id_of(self, token: str) -> int | None:
        """The id of a token that is written so in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def _id(self, name: str) -> int | None:
        return self._backend.token_to_id(self._names[name]) if name in self._names else None

    def _checked_id(self, index: Any) -> int:
        number = int(index)
        if not 0 <= number < self.size:
            raise UsageError(f"found id {number}, expected 0 to {self.size - 1}")
        return number


class Tokens(Sequence[int]):
    """The ids of a text, with the tokenizer that made them; usable wherever a list of ids is."""

    def __init__(self, ids: Iterable[int], tokenizer: Tokenizer | None = None):
        self.ids = [int(index) for index in ids]
        self.tokenizer = tokenizer

    @property
    def text(self) -> str:
        """What the ids decode to; raises UsageError without a tokenizer."""
        if self.tokenizer is None:
            raise UsageError("there is no tokenizer, so these ids have no text")
        return self.tokenizer.decode(self.ids)

    @property
    def array(self) -> mx.array:
        """The ids as a model takes them: int32, (1, L)."""
        return mx.array([self.ids], dtype=mx.int32)

    def table(self) -> str:
        """One line a token: its place, its id and its text.

        >>> print(Tokens([504, 3575]).table())
        index    id  text
            0   504
            1  3575
        """
        texts = ["" if self.tokenizer is None else f'"{self.tokenizer.token_text(index)}"' for index in self.ids]
        rows = [
            ("index", "id", "text"),
            *((str(n), str(i), t) for n, (i, t) in enumerate(zip(self.ids, texts, strict=True))),
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{a:>{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows)

    def spans(self, by: str | None = None, *, every: int | None = None) -> Spans:
        """The parts of the text that attention may be counted by: stretches of `every` tokens, or by "line",
        "sentence" or "kind" (the first token, special tokens, words, numbers, punctuation, space).

        Raises UsageError for anything else, for an empty text, and for all but `every` without a tokenizer.

        >>> Tokens(range(1200)).spans(every=512).names
        ('0-511', '512-1023', '1024-1199')
        """
        if not self.ids:
            raise UsageError("spans: the text is empty")
        if every is not None and by is None:
            return stretches(len(self), every)
        if by not in WAYS or every is not None:
            raise UsageError(f"spans: found {by!r}, expected every=N or one of {', '.join(WAYS)}")
        if self.tokenizer is None:
            raise UsageError("there is no tokenizer, so these ids have no text")
        pieces = self.tokenizer.pieces(self.ids)
        return by_kind(self.ids, pieces, self.tokenizer.special_ids) if by == "kind" else by_ends(pieces, by)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "Tokens": ...
    def __getitem__(self, index: int | slice) -> "int | Tokens":
        return Tokens(self.ids[index], self.tokenizer) if isinstance(index, slice) else self.ids[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Tokens, list, tuple)) and self.ids == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self.ids))

    def __repr__(self) -> str:
        shown = self.ids if self.tokenizer is None else self.text
        words = repr(shown) if len(repr(shown)) <= SHOWN else f"{repr(shown)[:SHOWN]}..."
        return f"Tokens({len(self)} ids: {words})"


def _conversation(messages: Any, tools: Any, variables: Mapping[str, Any]) -> Any:
    """What a template is given, in plain types, with the messages as transformers passes them on."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(f"messages: found {_short(messages)}, expected a list of dicts with role and content")
    for message in messages:
        if not isinstance(message, Mapping):
            raise UsageError(f"messages: found {_short(message)}, expected a dict with role and content")
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise UsageError(f"tools: found {_short(tools)}, expected a list of JSON schemas")
    given = {"messages": [_message(message) for message in messages], "tools": tools, "documents": None, **variables}
    return plain_data(given)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the keys that are None, and with the model's thoughts under the names that templates read."""
    found = {key: value for key, value in message.items() if value is not None}
    thought = next((found[name] for name in REASONING if name in found), None)
    return found if thought is None else {"thinking": thought, **found, "reasoning_content": thought}


def _check_text(text: str) -> None:
    """A text that can be encoded is a string, and has no halves of surrogate pairs."""
    if not isinstance(text, str):
        raise UsageError(f"text: found a {type(text).__name__}, expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"text: no character at position {error.start}, but half of a surrogate pair") from None


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """How much of each of one or two texts has room: the longer one loses, until both are as long.

    >>> _shares([9, 3], 8), _shares([9, 7], 8), _shares([9], 8)
    ([5, 3], [4, 4], [8])
    """
    if len(lengths) == 1:
        return [room]
    shorter = min(*lengths, room // 2)
    first, second = lengths
    return [shorter, min(second, room - shorter)] if first <= second else [min(first, room - shorter), shorter]


def _short(value: object) -> str:
    return repr(value)[:40]


def _visible(text: bytes) -> str:
    """Text for a table: escapes, as in Python, for what has no shape and for bytes that are not UTF-8."""
    decoded = text.decode("utf-8", "surrogateescape").replace("\\", "\\\\")
    return "".join(c if c.isprintable() else _escape(c) for c in decoded)


def _escape(character: str) -> str:
    byte = character.encode("utf-8", "surrogateescape")
    return f"\\x{byte[0]:02x}" if len(byte) == 1 and byte[0] >= 0x80 else character.encode("unicode_escape").decode()
