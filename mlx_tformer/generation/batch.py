"""Many texts at once: a step of the model gives each of them its next token, and where one ends another begins.

The texts of a batch end at the same place and have padding in front. A new one is read by itself and then joins; each
draws with a key of its own. So a text is what it would be alone.
"""

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ..errors import UsageError
from ..nn import Cache, Keeping
from ..nn.keeping import WHOLE
from .decode import CHUNK, Decoder, NotANumber
from .generate import check_logprobs
from .grammar import DeadEnd
from .sampling import Chosen, Sampler
from .scores import top_of
from .task import Prompt, Task, sampler_of, task_of
from .transcript import Step

if TYPE_CHECKING:
    from ..lm import LanguageModel

SIZE = 16
"""Texts at once, where nobody says how many."""
AHEAD = 8
"""Batches that may be done before the text that is to come first is."""
Request = Prompt | Mapping[str, Any]
"""A prompt, or a mapping with a `prompt` and settings of its own."""


@dataclass
class Result:
    """One text of a batch: the ids of its prompt, what was written, and why it ended (see `Step.finish`)."""

    index: int
    """Its place among the prompts."""
    prompt: list[int]
    steps: list[Step] = field(default_factory=list)
    error: str | None = None
    """What went wrong, if `finish` is "error": nothing may follow by its schema or regex, though that is not all."""

    @property
    def tokens(self) -> list[int]:
        """The ids that were written."""
        return [step.token for step in self.steps]

    @property
    def text(self) -> str:
        """The text that was written."""
        return "".join(step.text for step in self.steps)

    @property
    def finish(self) -> str | None:
        """Why it ended, "error" included."""
        if self.error is not None:
            return "error"
        return self.steps[-1].finish if self.steps else None


def batch(
    lm: "LanguageModel",
    prompts: Iterable[Request],
    *,
    size: int = SIZE,
    logprobs: int = 0,
    names: Sequence[str] | None = None,
    kv_bits: int | None = None,
    kv_start: int = 0,
    kv_size: int | None = None,
    kv_keep: int = 0,
    **settings: Any,
) -> Iterator[Result]:
    """Continue each of `prompts`, `size` at a time; results come in the order of the prompts, each when it is done.

    A prompt is what `generate` takes, or a mapping with a "prompt" and settings that are its own. settings: max_tokens,
    stop, stop_at_end, json_schema, regex and those of `Sampling`, as in `generate`. kv_bits, kv_start, kv_size,
    kv_keep: what the cache keeps of each text, see `Keeping`; with `kv_keep` texts are written one by one, and so are
    those that grow beyond `kv_start`. Prompts are taken as they are needed.

    Raises UsageError as `generate` does when the turn of a prompt comes, with its name if there are `names`, else with
    its number. A text that its schema or regex leads into a dead end ends there, with `Result.error`, and the others
    go on.

    >>> import mlx_tformer as mt
    >>> lm = mt.load("shakespeare")
    >>> [result.finish for result in lm.batch(["ROMEO:", {"prompt": "JULIET:", "max_tokens": 2}], max_tokens=3)]
    ['length', 'length']
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"size: found {size}, expected a whole number of 1 or more")
    check_logprobs(logprobs, lm.vocab)
    if isinstance(prompts, str | mx.array | Mapping):
        raise UsageError("prompts: found a single one, expected several, as in a list")
    how = Keeping(kv_bits, kv_start, kv_size, kv_keep)
    return _in_order(_Batch(lm, _rows(lm, prompts, settings, names), size, logprobs, how))


@dataclass
class _Row:
    """A text on its way."""

    result: Result
    task: Task

    @property
    def text(self) -> list[int]:
        return [*self.result.prompt, *self.result.tokens]

    @property
    def last(self) -> bool:
        """Whether the token that is under way is the last that may come."""
        return self.task.transcript.tokens + 1 >= self.task.transcript.limit

    def add(self, token: int, logprob: float, top: Any) -> bool:
        """Take a token; True if the text has ended."""
        if math.isnan(logprob):
            place = f"prompt {self.result.index}: the logits after token {len(self.text)}"
            raise NotANumber(f"{place} are not numbers; try another dtype")
        try:
            self.result.steps.append(self.task.transcript.add(token, logprob, top))
        except DeadEnd as error:
            self.result.error = str(error)
        return self.result.finish is not None


def _rows(
    lm: "LanguageModel", prompts: Iterable[Request], settings: Mapping[str, Any], names: Sequence[str] | None
) -> Iterator[_Row]:
    for index, request in enumerate(prompts):
        try:
            yield _row(lm, index, request, settings)
        except UsageError as error:
            raise UsageError(f"{f'prompt {index}' if names is None else names[index]}: {error}") from None


def _row(lm: "LanguageModel", index: int, request: Request, settings: Mapping[str, Any]) -> _Row:
    own = dict(request) if isinstance(request, Mapping) else {"prompt": request}
    if "prompt" not in own:
        raise UsageError("found no prompt in it")
    task = task_of(lm, own.pop("prompt"), {**settings, **own})
    if task.sampling.seed is None:  # the same in every batch that it is in
        task = replace(task, sampling=replace(task.sampling, seed=secrets.randbits(63)))
    return _Row(Result(index, task.ids), task)


def _in_order(results: Iterable[Result]) -> Iterator[Result]:
    """The results by their index."""
    early: dict[int, Result] = {}
    following = 0
    for result in results:
        early[result.index] = result
        while following in early:
            yield early.pop(following)
            following += 1


class _Batch:
    """The texts that are under way, as rows of one cache, and the token that is under way for each."""

    def __init__(self, lm: "LanguageModel", waiting: Iterator[_Row], size: int, top: int, how: Keeping = WHOLE):
        self.lm, self.size, self.top, self.how = lm, size, top, how
        self.waiting, self.next = waiting, next(waiting, None)
        self.rows: list[_Row] = []
        self.steps = 0
        self.cache: Cache
        self.sampler: Sampler | None = None
        """None when it has to be made anew, as rows have come or gone."""
        self.current: Chosen
        self._scaled = lm.model.scaled_positions()

    def __iter__(self) -> Iterator[Result]:
        """Results as they are done."""
        while self.rows or self.next is not None:
            yield from self._admit()
            if self.rows:
                yield from self._step()

    def _admit(self) -> Iterator[Result]:
        """Read the prompts of as many new texts as there is room for; those that cannot share a cache run alone."""
        new: list[tuple[Decoder, Chosen]] = []
        while self.next is not None and len(self.rows) < self.size and self._near(self.next):
            row = self.next
            sampler, planned = self._sampler([row]), row.task.planned
            decoder = Decoder(self.lm.model, row.task.ids, sampler, planned=planned, how=self.how)
            shares = decoder.steady and self._shares(row)
            if self.rows and (not shares or self._regime(row) != self._regime(self.rows[0])):
                break
            self.next = next(self.waiting, None)
            if shares:
                self.rows.append(row)
                new.append((decoder, decoder.begin()))
            else:
                yield _alone(row, decoder)
        if new:
            self._join(new)

    def _near(self, row: _Row) -> bool:
        """Whether the first text that is not done is near enough: all behind it have to wait for it."""
        return not self.rows or row.result.index < min(r.result.index for r in self.rows) + AHEAD * self.size

    def _shares(self, row: _Row) -> bool:
        """Whether a text can share a cache: not where its first tokens are kept apart, which stand elsewhere in every
        row, and not where it is packed on the way, when others are not."""
        how = self.how
        crosses = how.bits is not None and len(row.task.ids) <= how.start < row.task.planned
        return not how.keep and not crosses

    def _regime(self, row: _Row) -> list[int]:
        """How positions are scaled in a text, and whether it is packed: only texts for which that is the same can share
        a cache."""
        packed = self.how.bits is not None and row.task.planned > self.how.start
        return [packed, *(position.regime(row.task.planned) for position in self._scaled)]

    def _join(self, new: Sequence[tuple[Decoder, Chosen]]) -> None:
        caches, chosen = [decoder.cache for decoder, _ in new], [first for _, first in new]
        if len(new) < len(self.rows):
            caches, chosen = [self.cache, *caches], [self.current, *chosen]
        self.cache = caches[0]
        if len(caches) > 1:
            self.cache.join(caches[1:])
        self.current = Chosen(*(mx.concatenate(list(parts)) for parts in zip(*chosen, strict=True)))
        self.sampler = None

    def _step(self) -> Iterator[Result]:
        """One token for each row. The next ones are under way before these are read, unless rows come or go."""
        current, following = self.current, None
        if self.sampler is not None and not any(row.last for row in self.rows):
            following = self._advance(self.sampler, current)
        staying, ended = self._read(current)
        yield from ended
        if ended and self.rows:
            self.cache.take(staying)
            self.cache.compact()
        if not self.rows:
            return
        if following is None:
            self.sampler = self._sampler(self.rows)
            following = self._advance(self.sampler, _of_rows(current, staying) if ended else current)
        elif ended:
            self.sampler, following = None, _of_rows(following, staying)
        self.current = following

    def _advance(self, sampler: Sampler, current: Chosen) -> Chosen:
        """The tokens after `current`, under way."""
        chosen = sampler(self.lm.model(current.token[:, None], self.cache)[:, -1])
        mx.async_eval(*chosen)
        self.steps += 1
        if self.steps % CHUNK == 0:
            mx.clear_cache()
        return chosen

    def _read(self, chosen: Chosen) -> tuple[list[int], list[Result]]:
        """Wait for tokens and give them to their rows: the numbers of the rows that go on, and the results of those
        that have ended."""
        tokens, logprobs = cast(list[int], chosen.token.tolist()), cast(list[float], chosen.logprob.tolist())
        tops = map(top_of, chosen.top, chosen.top_logprobs)
        told = zip(self.rows, tokens, logprobs, tops, strict=True)
        ended = [row.add(token, logprob, top) for row, token, logprob, top in told]
        results = [row.result for row, end in zip(self.rows, ended, strict=True) if end]
        staying = [at for at, end in enumerate(ended) if not end]
        self.rows = [self.rows[at] for at in staying]
        return staying, results

    def _sampler(self, rows: Sequence[_Row]) -> Sampler:
        """What chooses the next tokens of rows, whose tokens have all been read."""
        return sampler_of([row.task for row in rows], [row.result.tokens for row in rows], self.top)


def _of_rows(chosen: Chosen, rows: Sequence[int]) -> Chosen:
    return Chosen(*(part[mx.array(list(rows))] for part in chosen))


def _alone(row: _Row, decoder: Decoder) -> Result:
    """The whole of a text that cannot share a cache, as when its positions change their scale on the way."""
    for step in decoder:
        if row.add(*step):
            break
    return row.result
