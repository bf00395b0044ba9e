"""Texts of encoder-decoder models: a source is read once, and the decoder writes while it looks at that."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import UsageError
from ..nn import WHOLE, Cache, Keeping, Position, Seq2Seq
from .beam import BeamDecoder, Search
from .decode import Decoder
from .generate import Generation, Stats, steps
from .rules import RULED, Started
from .sampling import Sampler
from .settings import Sampling, sampling_of
from .task import Prompt, check_max_tokens, checked_ids, encoder
from .transcript import Step, Transcript

if TYPE_CHECKING:
    from ..seq2seq import Seq2SeqModel

LENGTH = 100
"""Tokens of a text where neither the caller nor the configs say how many."""


@dataclass
class Conditioned:
    """The decoder of a model for one source, which is read before the first token, as a model that continues ids."""

    model: Seq2Seq
    source: mx.array
    """(1, S)"""
    attention_mask: mx.array | None = None
    memory: mx.array = field(init=False)

    def __post_init__(self) -> None:
        self.memory = self.model.encode(self.source, attention_mask=self.attention_mask)  # computed when it is needed

    def new_cache(self, context: int = 0, how: Keeping = WHOLE) -> Cache:
        """An empty cache of the decoder; `how` much of it is kept."""
        return self.model.new_cache(context, how)

    def hidden(self, ids: mx.array, cache: Cache) -> mx.array:
        """The residual stream (B, L, C) for ids that follow what the cache remembers."""
        if cache.length:
            return self.model.decode(ids, cache=cache)
        return self.model.decode(ids, self.memory, cache, attention_mask=self.attention_mask)

    def logits(self, x: mx.array) -> mx.array:
        """(B, L, C) -> (B, L, V)"""
        return self.model.logits(x)

    def __call__(self, ids: mx.array, cache: Cache) -> mx.array:
        return self.logits(self.hidden(ids, cache))

    def scaled_positions(self) -> list[Position]:
        """None: the positions of these decoders do not depend on the length of the text."""
        return []


def generate(
    lm: "Seq2SeqModel",
    prompt: Prompt,
    *,
    attention_mask: mx.array | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    stop_at_end: bool = True,
    beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    first: int | str | None = None,
    logprobs: int = 0,
    **sampling: Any,
) -> Generation:
    """What the model writes for a source: text, ids, or an array of shape (L,) or (1, L), with an `attention_mask` of
    that shape if there is padding in it.

    The sampling settings, stop, stop_at_end and logprobs are those of a decoder's `generate`. max_tokens: None is what
    the configs say (`max_new_tokens`, else `max_length` less the start), and 100 where they say nothing. beams,
    length_penalty, early_stopping: see `Search`; with more than one beam the most likely text is searched for, and
    all steps come at the end. first: the token that the text begins with, an id or a special token such as the code
    of a language (None: what the configs say).

    The configs also say what the decoder begins with, which token is the last where `max_tokens` cuts a text off (not
    without `stop_at_end`), which tokens never come and what may not be repeated, see `Rules`. What of this is a setting
    too (`no_repeat_ngram_size`, `repetition_penalty`, `suppress_tokens` and others, see `RULED`) can be given instead.

    Raises UsageError for settings that cannot be meant, an empty source, ids that the model does not have, and a source
    that is longer than its positions; BadInput for configs that cannot be followed.
    """
    ids, search = checked_ids(lm, prompt), Search(beams, length_penalty, early_stopping)
    if len(ids) > lm.context:
        raise UsageError(f"prompt: it has {len(ids)} tokens, and the model has positions for {lm.context}")
    _check_beams(beams, {**sampling, "logprobs": logprobs})
    settings, rules = _divided(lm, sampling, {} if first is None else {"first": first_id(lm, first)})
    rules = replace(rules, source=tuple(ids), limit=_limit(lm, max_tokens), last=rules.last if stop_at_end else ())
    model = Conditioned(lm.model, mx.array([ids]), _mask(attention_mask, len(ids)))
    stats, end_ids = Stats(prompt_tokens=len(ids)), lm.end_ids if stop_at_end else frozenset()
    stream = None if lm.tokenizer is None else lm.tokenizer.stream(skip_special=True)
    transcript = Transcript(stream, rules.limit, end_ids, stop)
    if beams > 1:
        searching = BeamDecoder(model, rules, search, end_ids)
        return Found(steps(searching, transcript, stats), ids, stats, searching)
    sampler = Sampler(settings, [[rules.start]], end_ids=rules.ends, top=logprobs, rules=[rules])
    decoder = Decoder(model, [rules.start], sampler, planned=1 + rules.limit)
    return Generation(steps(decoder, transcript, stats), ids, stats)


class Found(Generation):
    """The steps of what a beam search found, all of which come at its end."""

    def __init__(self, found: Generator[Step], prompt: list[int], stats: Stats, decoder: BeamDecoder):
        super().__init__(found, prompt, stats)
        self._decoder = decoder

    @property
    def score(self) -> float | None:
        """The log-probability of the text, divided as `length_penalty` says; None before the first step."""
        return self._decoder.score

    def __next__(self) -> Step:
        step = super().__next__()
        self.stats.first_token_seconds = self._decoder.first_seconds
        return step


def first_id(lm: "Seq2SeqModel", first: int | str) -> int:
    """The id of a token that is named by its id or its text; raises UsageError for one that there is not."""
    found = first if not isinstance(first, str) else None if lm.tokenizer is None else lm.tokenizer.id_of(first)
    if found is None or isinstance(found, bool) or not 0 <= found < lm.model.target_vocab:
        raise UsageError(f"first: found {first!r}, which is no token of {lm.origin}")
    return found


def _limit(lm: "Seq2SeqModel", max_tokens: int | None) -> int:
    """Tokens that a text may have."""
    max_tokens = (lm.recommended_length or LENGTH) if max_tokens is None else max_tokens
    check_max_tokens(max_tokens)
    return min(max_tokens, lm.context)


def _check_beams(beams: int, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for settings that leave something to chance, which a search does not."""
    chance = [name for name, value in settings.items() if value and name not in RULED]
    if beams > 1 and chance:
        raise UsageError(f"{chance[0]}: found with {beams} beams, expected one or the other")


def _divided(lm: "Seq2SeqModel", given: Mapping[str, Any], forced: Mapping[str, Any]) -> tuple[Sampling, Started]:
    """What is left to the sampler, in ids, and the rules: those of the configs, with what the caller says instead."""
    said = {name: value for name, value in given.items() if value is not None or name not in RULED}
    settings = sampling_of(said).in_ids(encoder(lm.tokenizer), lm.model.target_vocab)
    ends = tuple(sorted(i for i in lm.end_ids if 0 <= i < lm.model.target_vocab))
    rules = replace(lm.rules, ends=ends).changed(settings, said.keys() & RULED.keys())
    return replace(settings, repetition_penalty=1.0), replace(rules, **forced)


def _mask(attention_mask: mx.array | None, length: int) -> mx.array | None:
    """The mask as (1, S)."""
    if attention_mask is None:
        return None
    if attention_mask.size != length or not mx.any(attention_mask).item():
        found = f"found shape {attention_mask.shape}" if attention_mask.size != length else "found zeros alone"
        raise UsageError(f"attention_mask: {found}, expected 1 for text and 0 for padding, for {length} tokens")
    return attention_mask.reshape(1, length)
