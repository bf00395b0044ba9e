"""Generation as callers see it: a prompt and settings in, steps of text out."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import mlx.core as mx

from ..errors import UsageError
from ..memory import check_fits
from ..nn import Cache, Keeping
from ..tokens import TextStream, Tokenizer, Tokens
from .decode import Decoder
from .drafts import draft_for
from .grammar import Grammar, Schema, grammar_for
from .rules import Rules, rules_for
from .sampling import Sampler
from .scores import PromptScores, TokenScore, Top
from .settings import Encode, Sampling, sampling_of
from .speculate import MOST, Speculation, Speculator
from .stopping import StopStrings

if TYPE_CHECKING:
    from ..lm import LanguageModel
    from .prompt_cache import PromptCache

Prompt = str | Sequence[int] | mx.array


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


@dataclass
class Stats:
    """Counts and times of one generation; times in seconds, sizes in bytes."""

    prompt_tokens: int = 0
    known_tokens: int = 0
    """Tokens of the prompt that were remembered from before."""
    tokens: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    cache_bytes: int = 0
    peak_bytes: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    """How well guesses did, if there were any."""

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens that were read per second, up to the first token."""
        read = self.prompt_tokens - self.known_tokens
        return read / self.first_token_seconds if self.first_token_seconds else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        span = self.seconds - self.first_token_seconds
        return (self.tokens - 1) / span if self.tokens > 1 and span > 0 else 0.0

    def to_dict(self) -> dict[str, float | int]:
        """All of it, for JSON."""
        return {**asdict(self), "prompt_rate": self.prompt_rate, "rate": self.rate}


class Generation(Iterator[Step]):
    """The steps of one generation, made as they are asked for; `stats`, `text` and `tokens` tell what came so far, and
    after the first step `prompt_scores` what the model thought of the prompt, if that was asked for."""

    def __init__(self, steps: Generator[Step], prompt: list[int], stats: Stats, scores: PromptScores | None = None):
        self.prompt, self.stats = prompt, stats
        self._scores = scores
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self._steps = steps

    @property
    def prompt_scores(self) -> list[TokenScore]:
        """The prompt's tokens with their log-probabilities; the first has none."""
        return [] if self._scores is None else self._scores.found

    def close(self) -> None:
        """End here; what was read is there for the next generation with the same `memory`."""
        self._steps.close()

    def __next__(self) -> Step:
        step = next(self._steps)
        self.tokens.append(step.token)
        self.text += step.text
        self.finish = step.finish
        return step


def generate(
    lm: "LanguageModel",
    prompt: Prompt,
    *,
    max_tokens: int = 100,
    stop: Sequence[str] = (),
    stop_at_end: bool = True,
    logprobs: int = 0,
    prompt_logprobs: bool = False,
    watch: AbstractContextManager[object] | None = None,
    draft: "str | LanguageModel | None" = None,
    draft_tokens: int = MOST,
    kv_bits: int | None = None,
    kv_start: int = 0,
    kv_size: int | None = None,
    kv_keep: int = 0,
    memory: "PromptCache | None" = None,
    json_schema: Schema | None = None,
    regex: str | None = None,
    **sampling: Any,
) -> Generation:
    """Continue `prompt` (text, ids, or an array of shape (L,) or (1, L)) by up to `max_tokens` tokens.

    sampling: temperature, top_k, seed and the others, see `Sampling`; without any, the best token is taken each time.
    stop: strings at which the text ends, not shown themselves. stop_at_end: end at the model's end tokens. logprobs:
    how many of the likeliest tokens to tell in `Step.top`. prompt_logprobs: tell in `Generation.prompt_scores` what the
    model thought of the prompt. watch: what to look with while the model runs, and only then, such as
    `inspect.stats()`; it is entered for each step. The model is one token ahead, so that what it did with a token is
    seen by the time the token comes, unless it is the last. draft: guess tokens that the model then checks several at a
    time: "lookup" in the text itself, "ahead" with the model's own module for that, or another model with the same
    tokens; up to `draft_tokens` at a time. The text is as likely as without, and the same at temperature 0. kv_bits,
    kv_start, kv_size, kv_keep: what the cache keeps, see `Keeping`. memory: what earlier generations have read, of
    which the common beginning is not read again, and which learns this one. json_schema, regex: write nothing but JSON
    of this schema, or text that this expression matches as a whole (with `llguidance`); where `max_tokens`, the context
    or a stop string end it before, it is a beginning of such a text, and `Step.finish` is "length" or "stop".

    Raises UsageError for settings that cannot be meant, an empty prompt, ids that the model does not have, and a
    prompt that leaves no room in the model's context; MemoryRefusal, before anything is read, where the cache does not
    fit this machine.

    >>> import mlx_tformer as mt
    >>> lm = mt.load("shakespeare")
    >>> steps = list(lm.generate("ROMEO:", max_tokens=5))
    >>> len(steps), steps[-1].finish
    (5, 'length')
    """
    check_logprobs(logprobs, lm.vocab)
    ids = prompt_ids(lm, prompt)
    transcript = transcript_of(lm, ids, max_tokens, stop, stop_at_end, json_schema, regex)
    transcript.check()
    how = Keeping(kv_bits, kv_start, kv_size, kv_keep)
    check_fits(lm.model, tokens=len(ids) + transcript.limit, dtype=lm.dtype, how=how)
    scores = PromptScores(ids, logprobs) if prompt_logprobs else None
    sampler = sampler_for(lm, ids, sampling, transcript, logprobs)
    given = None if memory is None or prompt_logprobs else memory.matching(lm, ids, how)
    planned = len(ids) + transcript.limit
    decoder = Decoder(lm.model, ids, sampler, planned=planned, scores=scores, how=how, given=given)
    stats = Stats(prompt_tokens=len(ids), known_tokens=decoder.cache.length)
    chosen: Chosen = decoder
    if draft is not None:
        guesses = draft_for(draft if isinstance(draft, str) else draft.model, lm.model, sampler, planned, draft_tokens)
        if decoder.steady:
            chosen = Speculator(decoder, lm.model, sampler, guesses, draft_tokens, stats.speculation)
    return Generation(_learning(steps(chosen, transcript, stats, watch), decoder, memory), ids, stats, scores)


def check_logprobs(count: int, vocab: int) -> None:
    """Raise UsageError for a number of likeliest tokens that there cannot be."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= vocab:
        raise UsageError(f"logprobs: found {count}, expected a whole number from 0 to {vocab}")


def transcript_of(
    lm: "LanguageModel",
    ids: Sequence[int],
    max_tokens: int = 100,
    stop: Sequence[str] = (),
    stop_at_end: bool = True,
    json_schema: Schema | None = None,
    regex: str | None = None,
) -> "Transcript":
    """The text that may follow a prompt of `ids`; raises UsageError for settings that cannot be meant."""
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


def sampler_for(
    lm: "LanguageModel", ids: Sequence[int], settings: Mapping[str, Any], transcript: "Transcript", top: int = 0
) -> Sampler:
    """What chooses the tokens after a prompt of `ids`, by these settings of `Sampling`."""
    sampling = sampling_of(settings).in_ids(encoder(lm.tokenizer), lm.vocab)
    rules = rules_after(lm, ids, sampling, transcript)
    return Sampler(sampling, [ids], end_ids=ends_of(lm), top=top, grammars=[transcript.grammar], rules=[rules])


def ends_of(lm: "LanguageModel") -> list[int]:
    """The ids that end a text, in order, those alone that the model can write."""
    return sorted(i for i in lm.end_ids if 0 <= i < lm.vocab)


def rules_after(lm: "LanguageModel", ids: Sequence[int], sampling: Sampling, transcript: "Transcript") -> Rules | None:
    """The rules of the text that follows a prompt of `ids`, by settings in ids; no end is forced on a text that does
    not stop at ends."""
    settings = sampling if transcript.ends else replace(sampling, forced_eos_token_id=None)
    return rules_for(settings, len(ids), transcript.limit, ends_of(lm))


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


class Chosen(Protocol):
    """What gives ids, their log-probabilities and the likeliest ids in their place one by one, and has a cache."""

    @property
    def cache(self) -> Cache: ...

    def __iter__(self) -> Iterator[tuple[int, float, Top]]: ...


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


def _learning(made: Generator[Step], decoder: Decoder, memory: "PromptCache | None") -> Generator[Step]:
    """The steps; when they end, or when nobody wants more, the memory learns what was read."""
    try:
        yield from made
    finally:
        if memory is not None:
            memory.learn(decoder.ids, decoder.cache if decoder.whole else None)


def steps(
    decoder: Chosen, transcript: Transcript, stats: Stats, watch: AbstractContextManager[object] | None = None
) -> Generator[Step]:
    """The tokens of a decoder as steps with their text, up to where it ends."""
    mx.reset_peak_memory()
    begun = time.perf_counter()
    for token, logprob, top in _inside(nullcontext() if watch is None else watch, decoder):
        stats.tokens += 1
        stats.seconds = time.perf_counter() - begun
        if stats.tokens == 1:
            stats.first_token_seconds = stats.seconds
        stats.cache_bytes, stats.peak_bytes = decoder.cache.nbytes, mx.get_peak_memory()
        step = transcript.add(token, logprob, top)
        yield step
        if step.finish is not None:
            return


def _inside(watch: AbstractContextManager[object], decoder: Chosen) -> Iterator[tuple[int, float, Top]]:
    """The decoder's tokens, with `watch` entered while they are made and left while the caller has them."""
    tokens = iter(decoder)
    while True:
        with watch:
            made = next(tokens, None)
        if made is None:
            return
        yield made
