"""Generation as callers see it: a prompt and settings in, steps of text out."""

import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from ..errors import UsageError
from ..memory import check_fits
from ..nn import Cache, Keeping
from .decode import Decoder
from .drafts import draft_for
from .sampling import Sampler
from .scores import PromptScores, TokenScore, Top
from .speculate import MOST, Speculation, Speculator
from .task import Prompt, sampler_of, task_of
from .transcript import Step, Transcript

if TYPE_CHECKING:
    from ..lm import LanguageModel
    from .prompt_cache import PromptCache


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
    **settings: Any,
) -> Generation:
    """Continue `prompt` (text, ids, or an array of shape (L,) or (1, L)) by up to `max_tokens` tokens (100).

    settings: what the text may be (max_tokens, stop, stop_at_end, json_schema, regex), see `task.transcript_of`, and
    how tokens are chosen (temperature, top_k, seed and others), see `Sampling`; without any, the best one each time.

    logprobs: how many of the likeliest tokens to tell in `Step.top`. prompt_logprobs: tell in
    `Generation.prompt_scores` what the model thought of the prompt. watch: what to look with while the model runs, and
    only then, such as `inspect.stats()`; it is entered for each step. The model is one token ahead, so that what it did
    with a token is seen by the time the token comes, unless it is the last. draft, draft_tokens: guess tokens, see
    `guessing`. kv_bits, kv_start, kv_size, kv_keep: what the cache keeps, see `Keeping`. memory: what earlier
    generations have read, of which the common beginning is not read again, and which learns this one.

    Raises UsageError for settings that cannot be meant, an empty prompt, ids that the model does not have, and a
    prompt that leaves no room in the model's context; MemoryRefusal, before anything is read, where the cache does not
    fit this machine.

    >>> import mlx_tformer as mt
    >>> generation = mt.load("shakespeare").generate("ROMEO:", max_tokens=5)
    >>> len(list(generation)), generation.finish
    (5, 'length')
    """
    check_logprobs(logprobs, lm.vocab)
    task, how = task_of(lm, prompt, settings), Keeping(kv_bits, kv_start, kv_size, kv_keep)
    task.transcript.check()
    check_fits(lm.model, tokens=task.planned, dtype=lm.dtype, how=how)
    ids, sampler = task.ids, sampler_of([task], top=logprobs)
    scores = PromptScores(ids, logprobs) if prompt_logprobs else None
    given = None if memory is None or prompt_logprobs else memory.matching(lm, ids, how)
    decoder = Decoder(lm.model, ids, sampler, planned=task.planned, scores=scores, how=how, given=given)
    stats = Stats(prompt_tokens=len(ids), known_tokens=decoder.cache.length)
    made = decoder if draft is None else guessing(lm, decoder, sampler, draft, draft_tokens, stats.speculation)
    return Generation(_learning(steps(made, task.transcript, stats, watch), decoder, memory), ids, stats, scores)


def guessing(
    lm: "LanguageModel",
    decoder: Decoder,
    sampler: Sampler,
    draft: "str | LanguageModel",
    count: int,
    counts: Speculation,
) -> "Chosen":
    """What writes as `decoder` does, but guesses tokens that the model then checks several at a time; `counts` learns
    how many were right.

    draft: guess "lookup" in the text itself, "ahead" with the model's own module for that, or with another model with
    the same tokens; up to `count` at a time. The text is as likely as without, and the same at temperature 0. Raises
    UsageError for a draft that is none of these, or does not go with the model.
    """
    guesses = draft_for(draft if isinstance(draft, str) else draft.model, lm.model, sampler, decoder.planned, count)
    return Speculator(decoder, lm.model, sampler, guesses, count, counts) if decoder.steady else decoder


def check_logprobs(count: int, vocab: int) -> None:
    """Raise UsageError for a number of likeliest tokens that there cannot be."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= vocab:
        raise UsageError(f"logprobs: found {count}, expected a whole number from 0 to {vocab}")


class Chosen(Protocol):
    """What gives ids, their log-probabilities and the likeliest ids in their place one by one, and has a cache."""

    @property
    def cache(self) -> Cache: ...

    def __iter__(self) -> Iterator[tuple[int, float, Top]]: ...


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
