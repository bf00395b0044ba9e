"""A conversation with a model, of which only what is new is read."""

import json
import os
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput, InputOutputError, UsageError
from .generate import Stats
from .prompt_cache import PromptCache, common_length
from .reasoning import Part, Reasoning

if TYPE_CHECKING:
    from ..lm import LanguageModel

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
SLACK = 16
"""Characters by which a text of other tokens may be longer, since a character can be in the making."""


class Conversation:
    """Messages, and the cache that has read them.

    The template may write the history anew for every question. What the ids of the last prompt and of the new one have
    in common is not read again.
    """

    def __init__(self, lm: "LanguageModel", system: str | None = None):
        """Raises UsageError for a model without a chat template."""
        if not lm.has_chat_template:
            raise UsageError(f"{lm.origin} has no chat template; a conversation needs one")
        self.lm = lm
        self.messages: list[Message] = []
        self.memory = PromptCache()
        self.stats: Stats | None = None
        """Of the last answer."""
        self.finish: str | None = None
        """Why the last answer ended; None if it was broken off."""
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = rest if text is None else [{"role": "system", "content": text}, *rest]

    def ask(self, text: str, **settings: Any) -> Generator[Part]:
        """The answer to a message, part by part, by the settings of `generate`; what came of it when the iterator is
        closed is kept as the answer."""
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._answer(settings)
        finally:
            if self.messages[-1]["role"] == "user":  # not answered, so not asked
                self.messages.pop()

    def retry(self, **settings: Any) -> Generator[Part]:
        """Another answer to the last message; raises UsageError if there is none."""
        if not any(message["role"] == "user" for message in self.messages):
            raise UsageError("there is nothing to answer again")
        while self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        yield from self._answer(settings)

    def undo(self) -> None:
        """Forget the last message and its answer; raises UsageError if there is none."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if last is None:
            raise UsageError("there is nothing to undo")
        del self.messages[last:]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def prompt(self) -> list[int]:
        """The ids of the messages, with the ids of answers as the model wrote them where they spell the same text."""
        ids = list(self.lm.chat(self.messages))
        return self._as_written(ids)

    def save(self, file: str | Path) -> None:
        """Write the messages as JSON; the file is there whole or not at all. Raises InputOutputError."""
        path = Path(file)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1), encoding="utf-8")
            partial.rename(path)
        except OSError as error:
            raise InputOutputError(f"{path}: cannot be written: {error.strerror}") from None
        finally:
            with suppress(OSError):
                partial.unlink()

    def load(self, file: str | Path) -> None:
        """Go on with messages that `save` wrote; raises BadInput or InputOutputError and changes nothing."""
        path = Path(file)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputOutputError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise BadInput("found no JSON, expected a saved conversation", file=path) from None
        messages = found.get("messages") if isinstance(found, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            problem = f'found no list of objects with "role" ({", ".join(ROLES)}) and "content"'
            raise BadInput(problem, file=path, field="messages")
        self.messages = messages

    def _answer(self, settings: dict[str, Any]) -> Generator[Part]:
        ids = self.prompt()
        generation = self.lm.generate(ids, memory=self.memory, **settings)
        self.stats, self.finish = generation.stats, None
        tokenizer = self.lm.tokenizer
        reading = Reasoning("" if tokenizer is None else tokenizer.render(self.messages))
        parts: list[Part] = []
        try:
            for step in generation:
                for part in reading.add(step.text):
                    parts.append(part)
                    yield part
            for part in reading.finish():
                parts.append(part)
                yield part
        finally:
            generation.close()
            self.finish = generation.finish
            self._take(parts)

    def _take(self, parts: Sequence[Part]) -> None:
        """Put an answer among the messages; a thought is told apart, and the template says what becomes of it."""
        answer = {"role": "assistant", "content": "".join(part.text for part in parts if not part.thought).lstrip("\n")}
        thought = "".join(part.text for part in parts if part.thought).strip("\n")
        if not any(part.thought for part in parts):
            answer["content"] = "".join(part.text for part in parts)
        if parts or self.finish is not None:
            self.messages.append({**answer, "reasoning_content": thought} if thought else answer)

    def _as_written(self, ids: list[int]) -> list[int]:
        """A prompt whose beginning is, where the text is the same, as it was read and written before."""
        known, tokenizer = self.memory.ids, self.lm.tokenizer
        common = common_length(known, ids)
        if common == len(known) or tokenizer is None:
            return ids
        text = tokenizer.decode(known[common:])
        for end in range(common + 1, len(ids)):
            spelled = tokenizer.decode(ids[common:end])
            if spelled == text:
                return [*known, *ids[end:]]
            if len(spelled) > len(text) + SLACK:
                break
        return ids


def _is_message(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and {"role", "content"} <= found.keys()
        and found["role"] in ROLES
        and all(isinstance(value, str) for value in found.values())
    )
