"""Telling what a model thinks from what it answers, while the text is still coming."""

from collections.abc import Iterator
from typing import NamedTuple

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""What stands around a thought: Qwen, DeepSeek, SmolLM 3; Mistral."""


class Part(NamedTuple):
    """A piece of text, and whether it is a thought."""

    text: str
    thought: bool = False


class Reasoning:
    """Cuts a text at its tags, which it leaves out; what could be the beginning of a tag waits.

    >>> reading = Reasoning()
    >>> [*reading.add("<thi"), *reading.add("nk>Hm.</think>"), *reading.add("Yes"), *reading.finish()]
    [Part(text='Hm.', thought=True), Part(text='Yes', thought=False)]
    """

    def __init__(self, prompt: str = ""):
        """`prompt`: what the text follows; a thought may have begun in it."""
        self._close = next((close for start, close in TAGS if prompt.rstrip().endswith(start)), None)
        self._held = ""

    def add(self, text: str) -> Iterator[Part]:
        """The parts that are settled now that `text` has come."""
        self._held += text
        while True:
            wanted: dict[str, str | None] = dict(TAGS) if self._close is None else {self._close: None}
            found = min(((at, tag) for tag in wanted if (at := self._held.find(tag)) >= 0), default=None)
            if found is None:
                break
            at, tag = found
            yield from self._part(self._held[:at])
            self._held = self._held[at + len(tag) :]
            self._close = wanted[tag]
        keep = max(_overlap(self._held, tag) for tag in wanted)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield from self._part(ready)

    def finish(self) -> Iterator[Part]:
        """The rest, now that no more comes."""
        rest, self._held = self._held, ""
        yield from self._part(rest)

    def _part(self, text: str) -> Iterator[Part]:
        if text:
            yield Part(text, self._close is not None)


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that `tag` begins with."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
