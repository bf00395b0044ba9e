"""What a caller asks for: after which prompt a text is to be written, what it may be, and how its tokens are chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import mlx.core as mx

from ..errors import UsageError
from ..tokens import Tokenizer, Tokens
from .grammar import Schema, grammar_for
from .rules import Rules, rules_for
from .sampling import Sampler
from .settings import Encode, Sampling, sampling_of
from .transcript import Transcript

if TYPE_CHECKING:
    from ..lm import LanguageModel

Prompt = str | Sequence[int] | mx.array
TEXT = ("max_tokens", "stop", "stop_at_end", "json_schema", "regex")
"""Settings that say what a text may be."""


@dataclass(frozen=True)
class Task:
    """One text that is to be written by a decoder."""

    ids: list[int]
    """Of the prompt."""
    transcript: Transcript
    sampling: Sampling
    """In ids."""
    rules: Rules | None
    ends: list[int]
    """Ids that end a text, those alone that the model can write."""

    @property
    def planned(self) -> int:
        """The length that prompt and text may reach together."""
        return len(self.ids) + self.transcript.limit


def task_of(lm: "LanguageModel", prompt: Prompt, settings: Mapping[str, Any]) -> Task:
    """The text that is to follow `prompt` (text, ids, or an array of shape (L,) or (1, L)).

    settings: how tokens are chosen, see `Sampling`, and what the text may be, see `transcript_of`. Raises UsageError
    for settings that cannot be meant, and for a prompt as `prompt_ids` does.
    """
    ids, asked = prompt_ids(lm, prompt), dict(settings)
    transcript = transcript_of(lm, ids, **{name: asked.pop(name) for name in TEXT if name in asked})
    sampling = sampling_of(asked).in_ids(encoder(lm.tokenizer), lm.vocab)
    ends = sorted(i for i in lm.end_ids if 0 <= i < lm.vocab)
    # No end is forced on a text that does not stop at ends.
    ruled = sampling if transcript.ends else replace(sampling, forced_eos_token_id=None)
    return Task(ids, transcript, sampling, rules_for(ruled, len(ids), transcript.limit, ends), ends)


def sampler_of(tasks: Sequence[Task], written: Sequence[Sequence[int]] | None = None, top: int = 0) -> Sampler:
    """What chooses the next tokens of texts of one model, where so much is `written` (None: nothing), and tells the
    `top` likeliest in place of each."""
    return Sampler(
        [task.sampling for task in tasks],
        [task.ids for task in tasks],
        written=written,
        end_ids=tasks[0].ends,
        top=top,
        grammars=[task.transcript.grammar for task in tasks],
        rules=[task.rules for task in tasks],
    )


def transcript_of(
    lm: "LanguageModel",
    ids: Sequence[int],
    max_tokens: int = 100,
    stop: Sequence[str] = (),
    stop_at_end: bool = True,
    json_schema: Schema | None = None,
    regex: str | None = None,
) -> Transcript:
    """What may follow a prompt of `ids`.

    max_tokens: how many tokens at most. stop: strings at which the text ends, not shown themselves. stop_at_end: end at
    the model's end tokens. json_schema, regex: write nothing but JSON of this schema, or text that this expression
    matches as a whole (with `llguidance`); where `max_tokens`, the context or a stop string end it before, it is a
    beginning of such a text, and `Step.finish` is "length" or "stop".

    Raises UsageError for settings that cannot be meant.
    """
    check_max_tokens(max_tokens)
    end_ids = lm.end_ids if stop_at_end else frozenset()
    grammar = grammar_for(lm, json_schema, regex, sorted(end_ids))
    # Spaces that are removed later are none that a grammar knows of.
    stream = None if lm.tokenizer is None else lm.tokenizer.stream(clean=grammar is None)
    return Transcript(stream, min(max_tokens, lm.context - len(ids)), end_ids, stop, grammar)


def check_max_tokens(max_tokens: int) -> None:
    """Raise UsageError for a number of tokens that cannot be meant."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise UsageError(f"max_tokens: found {max_tokens}, expected a whole number of 1 or more")


def encoder(tokenizer: Tokenizer | None) -> Encode | None:
    """Ids of texts as they occur inside of others, if there is a tokenizer."""
    return None if tokenizer is None else lambda text: tokenizer.encode(text, special=True, add_bos=False)


def prompt_ids(lm: "LanguageModel", prompt: Prompt) -> list[int]:
    """The ids of a prompt in any form, checked against the model's vocabulary and context."""
    ids = checked_ids(lm, prompt)
    if len(ids) >= lm.context:
        problem = f"prompt: it has {len(ids)} tokens, and the model's context of {lm.context} leaves no room"
        raise UsageError(problem)
    return ids


class Reader(Protocol):
    """A model that knows ids up to `vocab`, and those of a text."""

    @property
    def vocab(self) -> int: ...

    def tokens(self, text: str) -> Tokens: ...


def checked_ids(lm: Reader, prompt: Prompt) -> list[int]:
    """The ids of a text in any form, of which there must be some, and only those that the model has."""
    if isinstance(prompt, str):
        ids = list(lm.tokens(prompt))
    elif isinstance(prompt, mx.array):
        if prompt.ndim == 2 and prompt.shape[0] != 1:
            raise UsageError(f"prompt: found a batch of {prompt.shape[0]}, expected one text")
        ids = cast(list[int], prompt.flatten().tolist())
    else:
        ids = list(prompt)
    if not ids:
        raise UsageError("prompt: it is empty")
    wrong = next((i for i in ids if not isinstance(i, int) or not 0 <= i < lm.vocab), None)
    if wrong is not None:
        raise UsageError(f"prompt: found id {wrong}, expected 0 to {lm.vocab - 1}")
    return ids
