"""The text of tokens as they come: step by step, as far as it is safe to show, up to where it ends."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..tokens import TextStream
from .grammar import Grammar
from .scores import Top
from .stopping import StopStrings


@dataclass(frozen=True)
class Step:
    """One token: its text as far as it is safe to show, its id, its log-probability, and in the last step why it is
    the last."""

    text: str
    token: int
    logprob: float
    finish: str | None = None
    """None, or "end" (an end token, or all that a schema or regex allows is written), "stop" (a stop string), "length"
    (max_tokens or the context). What a schema or regex allows is whole after "end"; else it is a beginning of that."""
    top: Top = ()
    """The likeliest tokens in its place, (id, log-probability), the best first: as many as were asked for."""


class Transcript:
    """The text of one generation: takes its tokens, tells what of the text is safe to show, and when it ends.

    stream: makes text of tokens, if there is a tokenizer. limit: tokens that may come at most. end_ids: tokens that end
    the text. stop: strings at which it ends. grammar: what it may be.
    """

    def __init__(
        self,
        stream: TextStream | None,
        limit: int,
        end_ids: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self.limit, self.written, self.grammar = limit, list[int](), grammar
        self._stop, self.ends, self._stream = StopStrings(stop), end_ids, stream

    @property
    def tokens(self) -> int:
        """How many have come."""
        return len(self.written)

    def check(self) -> None:
        """Raise DeadEnd if the grammar allows no token to come."""
        if self.grammar is not None:
            self.grammar.check()

    def add(self, token: int, logprob: float, top: Top = ()) -> Step:
        """The step that a token makes; raises DeadEnd for one that came though the grammar allows none."""
        self.written.append(token)
        if self.grammar is not None:
            self.grammar.follow(self.written)
        stream, stop, ended = self._stream, self._stop, token in self.ends
        text = "" if stream is None or ended else stop.add(stream.add(token))
        finish = "end" if ended else "stop" if stop.found else self._full()
        if finish in ("end", "length") and stream is not None:
            text += stop.add(self._rest(stream, finish))
            finish = "stop" if stop.found else finish
            text += "" if stop.found else stop.finish()
        return Step(text, token, logprob, finish, top)

    def _full(self) -> str | None:
        """Why nothing more may come: everything that the grammar allows is there, or the limit is reached."""
        last, grammar = self.tokens == self.limit, self.grammar
        if grammar is not None and (last or not self.ends) and grammar.complete:
            return "end"
        return "length" if last else None

    def _rest(self, stream: TextStream, finish: str) -> str:
        """The text that was not settled; half a character is no beginning of what a grammar allows."""
        text = stream.finish()
        return text.rstrip("\ufffd") if finish == "length" and self.grammar is not None else text
