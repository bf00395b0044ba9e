"""Speculation: a draft guesses several tokens, and one pass of the model checks them all.

A guess is accepted as often as the model would have drawn it, and where it is not, a token is drawn from what is left
(Leviathan et al. 2022, arXiv 2211.17192, section 2.3). So texts have the distribution that they have without a draft,
and with temperature 0 they are the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from ..nn import LM, Cache
from .decode import CHUNK, Decoder
from .drafts import Draft, Proposal, Text
from .sampling import Chosen, Sampler
from .scores import Top

FIRST, MOST = 4, 16
"""Tokens that are guessed at first, and at most."""


@dataclass
class Speculation:
    """How well drafts did."""

    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    """Passes of the model after the prompt."""

    @property
    def rate(self) -> float:
        """Share of the guesses that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0


class Speculator:
    """One text that grows by several tokens at a time: gives the same tokens as the `decoder` whose place it takes, of
    the same model and sampler.

    most: tokens that are guessed at a time; fewer while guesses are wrong. The decoder is to be `steady`.
    """

    def __init__(
        self,
        decoder: Decoder,
        model: LM,
        sampler: Sampler,
        draft: Draft,
        most: int = MOST,
        counts: Speculation | None = None,
    ):
        self._decoder, self._draft, self._most = decoder, draft, most
        self._model, self._sampler, self._planned = model, sampler, decoder.planned
        self._count = min(FIRST, most)
        self.ids = decoder.ids
        self.counts = Speculation() if counts is None else counts

    @property
    def cache(self) -> Cache:
        """What the model remembers."""
        return self._decoder.cache

    def __iter__(self) -> Iterator[tuple[int, float, Top]]:
        text = Text(self._model, self.cache, self.ids[: self.cache.length])
        hidden = self._read_prompt(text)
        yield self._decoder.take(self._sampler(self._model.logits(hidden[:, -1:], hidden.shape[1] - 1)[:, 0]))
        while len(self.ids) < self._planned:
            self._draft.see(hidden, self.ids[len(self.ids) - hidden.shape[1] :])
            hidden, made = self._round(text)
            yield from made

    def _round(self, text: Text) -> tuple[mx.array, list[tuple[int, float, Top]]]:
        """Guess, read the guesses, and keep those that are right: the hidden states (1, L, C) before the L new
        tokens, and the tokens."""
        room = self._planned - len(self.ids) - 1
        proposal = self._draft.propose(self.ids, min(self._count, room)) if room else Proposal([])
        self._decoder.whole = False
        text.mark()
        hidden = text.read([self.ids[-1], *proposal.tokens])
        made = list(self._checked(self._model.logits(hidden), proposal))
        text.back(len(self.ids) - 1)
        self._decoder.cache, self._decoder.whole = text.cache, True
        self._learn(len(made) - 1, len(proposal.tokens))
        return hidden[:, : len(made)], made

    def _read_prompt(self, text: Text) -> mx.array:
        """Read what the cache does not know of the prompt; returns hidden states (1, L, C) of its last tokens."""
        known, self._decoder.whole = len(text.ids), False
        last = known + (len(self.ids) - known - 1) // CHUNK * CHUNK
        for start in range(known, last, CHUNK):
            hidden = text.read(self.ids[start : start + CHUNK])
            self._decoder.score(hidden)
            self._draft.see(hidden, self.ids[start + 1 : start + CHUNK + 1])
            mx.eval(self.cache.arrays)
            mx.clear_cache()
        hidden = text.read(self.ids[last:])
        self._decoder.score(hidden)
        self._decoder.whole = True
        return hidden

    def _checked(self, logits: mx.array, proposal: Proposal) -> Iterator[tuple[int, float, Top]]:
        """The guesses that are accepted, then one token of the model's own; logits (1, 1 + n, V)."""
        if self._sampler.settled:
            chosen = self._sampler.each(logits[0])
            tokens = cast(list[int], chosen.token.tolist())
            for at, token in enumerate(tokens):
                one = Chosen(*(part[at : at + 1] for part in chosen))
                yield self._decoder.take(one)
                if at == len(proposal.tokens) or token != proposal.tokens[at]:
                    return
        for at in range(logits.shape[1]):
            if at == len(proposal.tokens):
                yield self._decoder.take(self._sampler(logits[:, at]))
                return
            drawn = None if proposal.logprobs is None else proposal.logprobs[at : at + 1]
            chosen = self._sampler.check(logits[:, at], mx.array(proposal.tokens[at : at + 1]), drawn)
            yield self._decoder.take(chosen)
            if self.ids[-1] != proposal.tokens[at]:
                return

    def _learn(self, accepted: int, proposed: int) -> None:
        """Guess more where all guesses were right, and about as many as were right where one was wrong."""
        self.counts.passes += 1
        self.counts.proposed += proposed
        self.counts.accepted += accepted
        if proposed:
            wanted = 2 * self._count if accepted == proposed else accepted + 1
            self._count = max(1, min(wanted, self._most))
