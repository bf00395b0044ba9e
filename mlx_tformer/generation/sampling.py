"""Choosing the next token: what was said before changes the logits, filters remove tokens, a key draws one.

The order is that of transformers: bias, penalties, forbidden words, rules, then temperature, top-k, top-p, min-p,
typical, and XTC. Everything is lazy and stays on the device, so that a step is under way before the token of the last
one is read.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from . import filters, penalties
from .grammar import Grammar
from .rules import RowRules, Rules, rules_for
from .settings import NO_LIMIT, Sampling, Word

COLDEST = 1e-6
"""Below this temperature nothing but the best token has a chance that float32 can tell from 0."""


class Chosen(NamedTuple):
    """A token for each row of a batch, (B,), and what the model thought of it before any setting changed that."""

    token: mx.array
    logprob: mx.array
    """Log-probability under the model, (B,), float32."""
    top: mx.array
    """Ids of the most likely tokens, (B, n), the best first."""
    top_logprobs: mx.array
    """Their log-probabilities, (B, n), float32."""


class Sampler:
    """Chooses a token for each row of a batch, by a `Sampling` for each, in ids; lazily, on the device.

    Row r draws with a key of its own, from its seed and from the number of tokens that it has chosen, so that what
    stands in the other rows makes no difference. prompts: the ids of each row's prompt. written: the ids that have
    been chosen since, by another sampler (None: none). end_ids: tokens that end a text. top: how many of the most
    likely tokens to tell. grammars: what each row's text may be (None: anything); what it may not be is as if the model
    had ruled it out, before all other settings. rules: what depends on the ids of each row's text (None: what its
    settings say of a text without a limit), see `rules_for`.
    """

    def __init__(
        self,
        rows: Sampling | Sequence[Sampling],
        prompts: Sequence[Sequence[int]] = ((),),
        *,
        written: Sequence[Sequence[int]] | None = None,
        end_ids: Sequence[int] = (),
        top: int = 0,
        grammars: Sequence[Grammar | None] = (),
        rules: Sequence[Rules | None] | None = None,
    ):
        self.rows = [rows] if isinstance(rows, Sampling) else list(rows)
        self.top = top
        self._prompts = [list(ids) for ids in prompts]
        self._written = [[] for _ in prompts] if written is None else [list(ids) for ids in written]
        self.chosen = [len(ids) for ids in self._written]
        """Tokens that each row has chosen."""
        self._end_ids = mx.array(sorted(end_ids), dtype=mx.int32)
        self._keys = mx.stack([row_key(row.seed) for row in self.rows])
        self._history: _History | None = None
        self._grammars = list(grammars) if any(grammar is not None for grammar in grammars) else []
        told = zip(self.rows, self._prompts, strict=True)
        found = [rules_for(row, len(ids), NO_LIMIT, end_ids) for row, ids in told] if rules is None else list(rules)
        self._rules = found if any(rule is not None for rule in found) else []
        self._last: mx.array | None = None

    def __call__(self, logits: mx.array) -> Chosen:
        """logits (B, V) -> a token for each row."""
        return self._chosen(logits, None, None)

    def check(self, logits: mx.array, guess: mx.array, drawn: mx.array | None = None) -> Chosen:
        """A token for each row, which has been guessed, (B,): the guess is taken so often that tokens come as often as
        without it (Leviathan et al. 2022, arXiv 2211.17192, section 2.3).

        drawn: the log-probabilities (B, V) that the guess was drawn by; None if it was not left to chance.
        """
        return self._chosen(logits, guess, drawn)

    @property
    def settled(self) -> bool:
        """Whether a token depends on its own logits alone: always the best one, whatever was written before."""
        if self._grammars or self._rules:
            return False
        plain = Sampling()
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "min_tokens")
        return all(
            row.temperature < COLDEST
            and not row.bad_words
            and not row.sequence_bias
            and all(vars(row)[name] == vars(plain)[name] for name in names)
            for row in self.rows
        )

    def each(self, logits: mx.array) -> Chosen:
        """logits (n, V) of n places in a single row's text -> a token for each, where that is `settled`."""
        logits = logits.astype(mx.float32)
        return self._told(logits, mx.argmax(self._changed(logits), axis=-1))

    def _chosen(self, logits: mx.array, guess: mx.array | None, drawn: mx.array | None) -> Chosen:
        logits = logits.astype(mx.float32)
        token = self._choose(self._changed(self._possible(logits)), guess, drawn)
        self._past(logits).add(token)
        self._last = token
        self.chosen = [count + 1 for count in self.chosen]
        return self._told(logits, token)

    def _possible(self, logits: mx.array) -> mx.array:
        """The logits with -inf for what the grammars rule out; they see the last tokens while the device is at work on
        the logits."""
        if not self._grammars:
            return logits
        mx.async_eval(logits)
        if self._last is not None:
            for written, token in zip(self._written, cast(list[int], self._last.tolist()), strict=True):
                written.append(token)
            self._last = None
        masks = []
        for grammar, written in zip(self._grammars, self._written, strict=True):
            if grammar is not None:
                grammar.take(written)
            masks.append(mx.ones(logits.shape[-1:], mx.bool_) if grammar is None else grammar.allowed())
        return mx.where(mx.stack(masks), logits, -mx.inf)

    def _changed(self, logits: mx.array) -> mx.array:
        return self._past(logits).changed(logits, self.chosen)

    def _past(self, logits: mx.array) -> "_History":
        if self._history is None:
            known = (self._prompts, self._end_ids, logits.shape[-1], self._written)
            self._history = _History(self.rows, *known, self._rules)
        return self._history

    def _told(self, logits: mx.array, token: mx.array) -> Chosen:
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        logprob = mx.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
        return Chosen(token, logprob, *best(logprobs, self.top))

    def _choose(self, logits: mx.array, guess: mx.array | None, guessed_by: mx.array | None) -> mx.array:
        greedy = [row.temperature < COLDEST for row in self.rows]
        if all(greedy):
            return mx.argmax(logits, axis=-1)
        keys = mx.stack([self._keys[:, 0], self._keys[:, 1] ^ mx.array(self.chosen, dtype=mx.uint32)], axis=1)
        # Two draws of one key would not be independent, so those for XTC and for guesses have keys that no step has.
        rare = mx.stack([~keys[:, 0], keys[:, 1]], axis=1)
        scores, noise = filtered(logits, self.rows, rare, self._end_ids), _for_rows(gumbel, keys, logits.shape[-1])
        if guess is None:
            drawn = mx.argmax(scores + noise, axis=-1)
        else:
            chance = _for_rows(uniform, ~keys, 1)
            drawn = accepted(scores, guess, guessed_by, chance, noise)
        return mx.where(mx.array(greedy), mx.argmax(logits, axis=-1), drawn) if any(greedy) else drawn


class _History:
    """What the tokens before do to the logits; holds nothing that no row asked for."""

    def __init__(
        self,
        rows: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        end_ids: mx.array,
        vocab: int,
        written: Sequence[Sequence[int]] | None = None,
        rules: Sequence[Rules | None] = (),
    ) -> None:
        written = [[] for _ in prompts] if written is None else written
        self._rows = rows
        self._ends = mx.zeros((vocab,), mx.bool_)
        self._ends[end_ids] = True
        counted = any(r.repetition_penalty != 1 or r.presence_penalty or r.frequency_penalty for r in rows)
        self._counts = penalties.Counts(prompts, vocab, written) if counted else None
        texts = [[*before, *since] for before, since in zip(prompts, written, strict=True)]
        dry = any(r.dry_multiplier for r in rows)
        breakers = [[i for i in r.dry_breakers if isinstance(i, int)] for r in rows]
        self._repeats = penalties.Repeats(texts, breakers) if dry else None
        bad_words = [{_as_ids(word): -math.inf for word in r.bad_words} for r in rows]
        self._forbidden = penalties.Sequences(texts, bad_words, vocab) if any(bad_words) else None
        biased = [{_as_ids(word): bias for word, bias in r.sequence_bias} for r in rows]
        self._biased = penalties.Sequences(texts, biased, vocab) if any(biased) else None
        self._bias = _biases(rows, vocab) if any(r.logit_bias for r in rows) else None
        self._rules = RowRules(rules, texts) if rules else None

    def changed(self, logits: mx.array, chosen: Sequence[int]) -> mx.array:
        """Logits (B, V) after bias, penalties, what must not come and rules; rows have chosen so many tokens."""
        if self._bias is not None:
            logits = logits + self._bias
        if self._biased is not None:
            logits = self._biased(logits)
        if self._counts is not None:
            logits = penalties.repeated(logits, self._counts.seen, _column(self._rows, "repetition_penalty"))
            written = self._counts.written
            logits = logits - _column(self._rows, "presence_penalty") * (written > 0)
            logits = logits - _column(self._rows, "frequency_penalty") * written
        if self._repeats is not None:
            names = ("dry_multiplier", "dry_base", "dry_allowed_length")
            dry = penalties.Dry(*(_column(self._rows, name) for name in names))
            logits = logits - self._repeats.penalty(dry, logits.shape[-1])
        if self._forbidden is not None:
            logits = self._forbidden(logits)
        early = [count < row.min_tokens for count, row in zip(chosen, self._rows, strict=True)]
        if any(early):
            logits = mx.where(mx.array(early)[:, None] & self._ends, -mx.inf, logits)
        return logits if self._rules is None else self._rules(logits)

    def add(self, token: mx.array) -> None:
        """Go on by the tokens (B,) that were chosen."""
        for part in (self._counts, self._repeats, self._forbidden, self._biased, self._rules):
            if part is not None:
                part.add(token)


def filtered(
    logits: mx.array, rows: Sequence[Sampling], keys: mx.array | None = None, end_ids: mx.array | None = None
) -> mx.array:
    """The log-weights (B, V) that a token is drawn by: -inf for those that the filters remove. `keys` (B, 2) are for
    the chance in XTC, whose filter is left out without them."""
    scores = logits / mx.array([[max(row.temperature, COLDEST)] for row in rows])
    if any(row.top_k for row in rows):
        counts = [row.top_k or filters.OFF["top_k"] for row in rows]
        same = len(set(counts)) == 1
        scores = filters.keep_top_k(scores, int(counts[0]) if same else mx.array(counts, dtype=mx.int32)[:, None])
    if any(row.top_p < 1 for row in rows):
        scores = filters.keep_top_p(scores, _probabilities(rows, "top_p"))
    if any(row.min_p > 0 for row in rows):
        scores = filters.keep_min_p(scores, _column(rows, "min_p"))
    if any(row.typical_p < 1 for row in rows):
        scores = filters.keep_typical(scores, _probabilities(rows, "typical_p"))
    if keys is not None and any(row.xtc_probability > 0 for row in rows):
        now = _for_rows(uniform, keys, 1) < _column(rows, "xtc_probability")
        scores = filters.exclude_top(scores, _column(rows, "xtc_threshold"), now, end_ids)
    return scores


def accepted(
    scores: mx.array, guess: mx.array, guessed_by: mx.array | None, chance: mx.array, noise: mx.array
) -> mx.array:
    """Guesses (B,) that are taken with probability p / q, where p is by the log-weights `scores` (B, V) and q by the
    log-probabilities `guessed_by`; else what is drawn by max(p - q, 0).

    chance: numbers (B, 1) from 0 to 1. noise: what `gumbel` gives, (B, V).
    """
    at = guess[:, None]
    wanted = mx.softmax(scores, axis=-1, precise=True)
    sure = mx.zeros(wanted.shape)
    had = mx.put_along_axis(sure, at, mx.array(1.0), axis=-1) if guessed_by is None else mx.exp(guessed_by)
    taken = chance * mx.take_along_axis(had, at, axis=-1) < mx.take_along_axis(wanted, at, axis=-1)  # (B, 1)
    instead = mx.argmax(mx.log(mx.maximum(wanted - had, 0)) + noise, axis=-1)
    return mx.where(taken[:, 0], guess, instead)


def best(logprobs: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The ids of the `count` best in (..., V) and their values, both (..., count), the best first."""
    count = min(count, logprobs.shape[-1])
    if count == 0:
        none = mx.zeros((*logprobs.shape[:-1], 0))
        return none.astype(mx.int32), none
    ids = mx.argpartition(-logprobs, count - 1, axis=-1)[..., :count]
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def row_key(seed: int | None) -> mx.array:
    """A key (2,) whose words look like chance, so that keys that are made of it by changing a word do not meet."""
    return mx.random.split(mx.random.key(secrets.randbits(63) if seed is None else seed))[0]


def gumbel(size: int, key: mx.array) -> mx.array:
    """Noise (size,) that makes the largest of log-weights plus noise a draw by these weights (Gumbel 1954)."""
    return mx.random.gumbel((size,), key=key)


def uniform(size: int, key: mx.array) -> mx.array:
    """Numbers (size,) from 0 to 1."""
    return mx.random.uniform(shape=(size,), key=key)


def _for_rows(make: Callable[[int, mx.array], mx.array], keys: mx.array, size: int) -> mx.array:
    """(B, size) of keys (B, 2), each row as if it were alone."""

    def one(key: mx.array) -> mx.array:
        return make(size, key)

    vectorised: Callable[[mx.array], mx.array] = mx.vmap(one)
    return vectorised(keys)


def _as_ids(word: Word) -> tuple[int, ...]:
    return tuple(i for i in word if isinstance(i, int))


def _column(rows: Sequence[Sampling], name: str) -> mx.array:
    """A setting of each row, (B, 1)."""
    return mx.array([[vars(row)[name]] for row in rows])


def _probabilities(rows: Sequence[Sampling], name: str) -> mx.array:
    return mx.array([[vars(row)[name] if vars(row)[name] < 1 else filters.OFF[name]] for row in rows])


def _biases(rows: Sequence[Sampling], vocab: int) -> mx.array:
    """(B, V)"""
    found = mx.zeros((len(rows), vocab))
    for row, settings in enumerate(rows):
        for index, bias in settings.logit_bias.items():
            found[row, int(index)] = bias
    return found
