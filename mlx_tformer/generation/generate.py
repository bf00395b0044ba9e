"""Generation as callers see it: a prompt and settings in, steps of text out."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from ..errors import UsageError
from ..nn import Cache
from .decode import Decoder
from .sampling import Sampler, Sampling
from .stopping import StopStrings

if TYPE_CHECKING:
    from ..lm import LanguageModel

Prompt = str | Sequence[int] | mx.array


@dataclass(frozen=True)
class Step:
    """One token: its text as far as it is safe to show, its id, its log-probability, and in the last step why it is
    the last."""

    text: str
    token: int
    logprob: float
    finish: str | None = None
    """None, or "end" (an end token), "stop" (a stop string), "length" (max_tokens or the context)."""


@dataclass
class Stats:
    """Counts and times of one generation; times in seconds, sizes in bytes."""

    prompt_tokens: int = 0
    tokens: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    cache_bytes: int = 0
    peak_bytes: int = 0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second, up to the first token."""
        return self.prompt_tokens / self.first_token_seconds if self.first_token_seconds else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        span = self.seconds - self.first_token_seconds
        return (self.tokens - 1) / span if self.tokens > 1 and span > 0 else 0.0

    def to_dict(self) -> dict[str, float | int]:
        """All of it, for JSON."""
        return {**asdict(self), "prompt_rate": self.prompt_rate, "rate": self.rate}


class Generation(Iterator[Step]):
    """The steps of one generation, made as they are asked for; `stats`, `text` and `tokens` tell what came so far."""

    def __init__(self, steps: Iterator[Step], prompt: list[int], stats: Stats):
        self.prompt, self.stats = prompt, stats
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self._steps = steps

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
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: Sequence[str] = (),
    stop_at_end: bool = True,
    watch: AbstractContextManager[object] | None = None,
) -> Generation:
    """Continue `prompt` (text, ids, or an array of shape (L,) or (1, L)) by up to `max_tokens` tokens.

    temperature, top_k, top_p, min_p, seed: see `Sampling`; temperature 0 takes the best token each time. stop:
    strings at which the text ends, not shown themselves. stop_at_end: end at the model's end tokens. watch: what to
    look with while the model runs, and only then, such as `inspect.stats()`; it is entered for each step. The model is
    one token ahead, so that what it did with a token is seen by the time the token comes, unless it is the last.

    Raises UsageError for settings that cannot be meant, an empty prompt, ids that the model does not have, and a
    prompt that leaves no room in the model's context.

    >>> import mlx_tformer as mt
    >>> lm = mt.load("shakespeare")
    >>> steps = list(lm.generate("ROMEO:", max_tokens=5))
    >>> len(steps), steps[-1].finish
    (5, 'length')
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise UsageError(f"max_tokens: found {max_tokens}, expected a whole number of 1 or more")
    ids = prompt_ids(lm, prompt)
    sampler = Sampler(Sampling(temperature, top_k, top_p, min_p, seed))
    limit = min(max_tokens, lm.context - len(ids))
    stats = Stats(prompt_tokens=len(ids))
    decoder = Decoder(lm.model, ids, sampler, planned=len(ids) + limit)
    end_ids = lm.end_ids if stop_at_end else frozenset()
    chosen = decoder if watch is None else Watched(decoder, watch)
    return Generation(_steps(lm, chosen, limit, StopStrings(stop), end_ids, stats), ids, stats)


def prompt_ids(lm: "LanguageModel", prompt: Prompt) -> list[int]:
    """The ids of a prompt in any form, checked against the model's vocabulary and context."""
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
    if len(ids) >= lm.context:
        problem = f"prompt: it has {len(ids)} tokens, and the model's context of {lm.context} leaves no room"
        raise UsageError(problem)
    return ids


@dataclass(frozen=True)
class Watched:
    """A decoder with a `watch` that is entered while a token is made, and left while the caller has it."""

    decoder: Decoder
    watch: AbstractContextManager[object]

    @property
    def cache(self) -> Cache:
        """What the decoder remembers."""
        return self.decoder.cache

    def __iter__(self) -> Iterator[tuple[int, float]]:
        tokens = iter(self.decoder)
        while True:
            with self.watch:
                made = next(tokens, None)
            if made is None:
                return
            yield made


def _steps(
    lm: "LanguageModel",
    decoder: "Decoder | Watched",
    limit: int,
    stop: StopStrings,
    end_ids: frozenset[int],
    stats: Stats,
) -> Iterator[Step]:
    stream = None if lm.tokenizer is None else lm.tokenizer.stream()
    mx.reset_peak_memory()
    begun = time.perf_counter()
    for token, logprob in decoder:
        stats.tokens += 1
        stats.seconds = time.perf_counter() - begun
        if stats.tokens == 1:
            stats.first_token_seconds = stats.seconds
        stats.cache_bytes, stats.peak_bytes = decoder.cache.nbytes, mx.get_peak_memory()
        ended = token in end_ids
        text = "" if stream is None or ended else stop.add(stream.add(token))
        finish = "end" if ended else "stop" if stop.found else "length" if stats.tokens == limit else None
        if finish in ("end", "length") and stream is not None:
            text += stop.add(stream.finish())
            finish = "stop" if stop.found else finish
            text += "" if stop.found else stop.finish()
        yield Step(text, token, logprob, finish)
        if finish is not None:
            return
