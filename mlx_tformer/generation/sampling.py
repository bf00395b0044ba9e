"""Choosing the next token. Filters apply in the order that transformers uses: temperature, top-k, top-p, min-p."""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import BadInput, UsageError

COLDEST = 1e-6
"""Below this temperature nothing but the best token has a chance that float32 can tell from 0."""


@dataclass(frozen=True)
class Sampling:
    """How to choose: always the best token (temperature 0), or by chance among those that the filters leave.

    top_k: keep so many of the best tokens (0: all). top_p: keep the best tokens that together have this probability
    (Holtzman et al. 2020, arXiv 1904.09751). min_p: keep tokens at least so likely as this share of the best one
    (Nguyen et al. 2024, arXiv 2407.01082). seed: the same seed gives the same choices (None: a new one each time).

    >>> Sampling(top_p=2)
    Traceback (most recent call last):
    mlx_tformer.errors.UsageError: top_p: found 2, expected a number above 0, at most 1
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _expect(self.temperature, "temperature", "a number of 0 or more", lambda v: 0 <= v < math.inf)
        _expect(self.top_p, "top_p", "a number above 0, at most 1", lambda v: 0 < v <= 1)
        _expect(self.min_p, "min_p", "a number from 0 to 1", lambda v: 0 <= v <= 1)
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise UsageError(f"top_k: found {self.top_k}, expected a whole number of 0 or more")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"seed: found {self.seed}, expected a whole number from 0 to 2^64 - 1")


def recommended(settings: Mapping[str, Any], origin: str) -> dict[str, float | int]:
    """The arguments of `Sampling` that a `generation_config.json` recommends: none if it says `do_sample: false`.

    Raises BadInput for a recommendation that cannot be followed.

    >>> recommended({"do_sample": True, "top_k": 20, "top_p": None, "eos_token_id": 2}, "a model")
    {'temperature': 1.0, 'top_k': 20}
    """
    if settings.get("do_sample") is False:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p")
    found = {name: settings[name] for name in names if settings.get(name) is not None}
    if settings.get("do_sample") is True:
        found = {"temperature": 1.0, **found}
    try:
        Sampling(**found)
    except UsageError as error:
        raise BadInput(str(error), file=f"{origin}/generation_config.json") from None
    return found


def _expect(value: float, name: str, expected: str, holds: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise UsageError(f"{name}: found {value}, expected {expected}")


class Sampler:
    """Chooses tokens by a `Sampling`, lazily, on the device."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._key = mx.random.key(secrets.randbits(63) if sampling.seed is None else sampling.seed)

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """logits (B, V) -> the chosen ids (B,), and their log-probabilities (B,) under the unfiltered model, in
        float32."""
        logprobs = logits.astype(mx.float32)
        logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
        token = self._choose(logprobs)
        return token, mx.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]

    def _choose(self, logprobs: mx.array) -> mx.array:
        if self.sampling.temperature < COLDEST:
            return mx.argmax(logprobs, axis=-1)
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(filtered(logprobs, self.sampling), key=key)


def filtered(logprobs: mx.array, sampling: Sampling) -> mx.array:
    """The log-weights (B, V) that a token is drawn by: -inf for those that the filters remove."""
    scores = logprobs / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = keep_top_k(scores, sampling.top_k)
    if sampling.top_p < 1:
        scores = keep_top_p(scores, sampling.top_p)
    if sampling.min_p > 0:
        scores = keep_min_p(scores, sampling.min_p)
    return scores


def keep_top_k(scores: mx.array, k: int) -> mx.array:
    """The k largest of each row, and those equal to the k-th."""
    kth = mx.topk(scores, k, axis=-1).min(axis=-1, keepdims=True)
    return mx.where(scores < kth, -mx.inf, scores)


def keep_top_p(scores: mx.array, p: float) -> mx.array:
    """The most likely tokens of each row until their probabilities reach p; the one that crosses it stays, so one
    always does."""
    order = mx.argsort(-scores, axis=-1)
    probs = mx.softmax(mx.take_along_axis(scores, order, axis=-1), axis=-1, precise=True)
    before = mx.cumsum(probs, axis=-1, inclusive=False)
    kept = mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), order, before < p, axis=-1)
    return mx.where(kept, scores, -mx.inf)


def keep_min_p(scores: mx.array, p: float) -> mx.array:
    """Tokens whose probability is at least p times that of the best."""
    return mx.where(scores < scores.max(axis=-1, keepdims=True) + math.log(p), -mx.inf, scores)
