"""Filters: which tokens may still be drawn, as scores (B, V) in float32 that are -inf for those that may not.

A setting is one number for all rows, or an array (B, 1) with one for each; `OFF` has a value of each that changes
nothing.
"""

import math

import mlx.core as mx

Setting = float | int | mx.array
OFF = {"top_k": 2**31 - 1, "top_p": math.inf, "min_p": 0.0, "typical_p": math.inf, "xtc_probability": 0.0}
"""What leaves the scores as they are. A top_p of 1 would not: probabilities add up to 1 before the last of them."""


def keep_top_k(scores: mx.array, k: int | mx.array) -> mx.array:
    """The k largest of each row, and those equal to the k-th."""
    vocab = scores.shape[-1]
    if isinstance(k, int):
        kth = mx.topk(scores, min(k, vocab), axis=-1).min(axis=-1, keepdims=True)
    else:
        kth = mx.take_along_axis(mx.sort(scores, axis=-1), mx.maximum(vocab - k, 0), axis=-1)
    return mx.where(scores < kth, -mx.inf, scores)


def keep_top_p(scores: mx.array, p: Setting) -> mx.array:
    """The most likely tokens of each row until their probabilities reach p; the one that crosses it stays, so one
    always does (Holtzman et al. 2020, arXiv 1904.09751)."""
    order = mx.argsort(-scores, axis=-1)
    probs = mx.softmax(mx.take_along_axis(scores, order, axis=-1), axis=-1, precise=True)
    before = mx.cumsum(probs, axis=-1, inclusive=False)
    kept = mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), order, before < p, axis=-1)
    return mx.where(kept, scores, -mx.inf)


def keep_min_p(scores: mx.array, p: Setting) -> mx.array:
    """Tokens whose probability is at least p times that of the best (Nguyen et al. 2024, arXiv 2407.01082)."""
    return mx.where(scores < scores.max(axis=-1, keepdims=True) + mx.log(mx.array(p)), -mx.inf, scores)


def keep_typical(scores: mx.array, p: Setting) -> mx.array:
    """The tokens whose surprise is nearest to the expected one, until their probabilities reach p (Meister et al. 2023,
    arXiv 2202.00666). The best token may be too predictable to stay."""
    logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    probs = mx.exp(logprobs)
    entropy = -mx.where(probs > 0, probs * logprobs, 0).sum(axis=-1, keepdims=True)
    distance = mx.abs(logprobs + entropy)
    order = mx.argsort(distance, axis=-1)
    ordered = mx.take_along_axis(probs, order, axis=-1)
    last = (mx.cumsum(ordered, axis=-1) < p).sum(axis=-1, keepdims=True)
    last = mx.minimum(last, scores.shape[-1] - 1)
    limit = mx.take_along_axis(mx.take_along_axis(distance, order, axis=-1), last, axis=-1)
    return mx.where(distance > limit, -mx.inf, scores)


def exclude_top(scores: mx.array, threshold: Setting, now: mx.array, spared: mx.array | None = None) -> mx.array:
    """Exclude top choices (XTC, by p-e-w): where `now` (B, 1) is True and two tokens or more have at least `threshold`
    of the probability, all of these but the least likely are removed; ids in `spared` never are."""
    probs = mx.softmax(scores, axis=-1, precise=True)
    above = probs >= threshold
    least = mx.where(above, probs, mx.inf).min(axis=-1, keepdims=True)
    removed = above & (probs > least) & now
    if spared is not None:
        removed[:, spared] = False
    return mx.where(removed, -mx.inf, scores)
