"""Sampling: which tokens the filters leave, how often each is drawn, and what cannot be asked for."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tformer.errors import UsageError
from mlx_tformer.generation.sampling import Sampler, Sampling, filtered, keep_min_p, keep_top_k, keep_top_p

SCORES = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15]))


def kept(scores: mx.array) -> list[int]:
    return np.flatnonzero(np.isfinite(np.array(scores)[0])).tolist()


def row(values: np.ndarray) -> mx.array:
    return mx.array(values[None].astype(np.float32))


def reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution in float64, token by token, in the order that transformers documents."""
    scores = logits.astype(np.float64) / sampling.temperature
    keep = np.ones(len(scores), bool)
    if sampling.top_k:
        keep &= scores >= np.sort(scores)[-min(sampling.top_k, len(scores))]
    order = np.argsort(-np.where(keep, scores, -np.inf), kind="stable")
    probs = np.where(keep, np.exp(scores - scores.max()), 0)
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    keep[order[before >= sampling.top_p]] = False
    probs = np.where(keep, probs, 0)
    keep &= probs >= sampling.min_p * probs.max()
    probs = np.where(keep, probs, 0)
    return probs / probs.sum()


def test_top_k_keeps_the_k_best():
    assert kept(keep_top_k(row(SCORES), 2)) == [1, 3]


@pytest.mark.parametrize(("p", "left"), [(0.39, [1]), (0.41, [1, 3]), (0.71, [1, 3, 4]), (1e-9, [1])])
def test_top_p_keeps_the_token_that_crosses_p_and_always_one(p, left):
    assert kept(keep_top_p(row(SCORES), p)) == left


@pytest.mark.parametrize(("p", "left"), [(0.2, [1, 2, 3, 4]), (0.3, [1, 3, 4]), (1.0, [1])])
def test_min_p_compares_with_the_best(p, left):
    assert kept(keep_min_p(row(SCORES), p)) == left


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12, unique=True),
    st.floats(0.2, 3), st.integers(0, 12), st.floats(0.05, 1), st.floats(0, 0.9),
)  # fmt: skip
def test_filters_leave_the_reference_distribution(logits, temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature, top_k, top_p, min_p)
    want = reference(np.array(logits), sampling)
    if np.any(np.abs(want[want > 0] / want.max() - min_p) < 1e-4):
        return  # on the very edge, where float32 and float64 may differ
    got = np.array(mx.softmax(filtered(row(np.array(logits)), sampling), axis=-1))[0]
    borderline = np.abs(got - want).max() > 1e-4 and top_p < 1
    if borderline:  # a cumulative sum that equals top_p to float32's last digit
        lower, upper = (reference(np.array(logits), Sampling(temperature, top_k, p, min_p)) for p in edges(top_p))
        assert min(np.abs(got - lower).max(), np.abs(got - upper).max()) < 1e-4
    else:
        np.testing.assert_allclose(got, want, atol=1e-4)


def edges(top_p: float) -> tuple[float, float]:
    return top_p - 1e-5, min(top_p + 1e-5, 1.0)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.5), Sampling(1.0, top_k=3), Sampling(1.3, top_p=0.8), Sampling(1.0, min_p=0.3)],
    ids=str,
)
def test_drawn_frequencies_match_the_distribution(sampling):
    draws = 20_000
    sampler = Sampler(Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed=7))
    token, _ = sampler(mx.broadcast_to(row(SCORES), (draws, len(SCORES))))
    counts = np.bincount(np.array(token), minlength=len(SCORES))
    want = reference(SCORES, sampling) * draws
    assert counts[want == 0].sum() == 0
    chi_square = ((counts - want)[want > 0] ** 2 / want[want > 0]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: one in a thousand


def test_greedy_takes_the_best_and_reports_the_unfiltered_log_probability():
    token, logprob = Sampler(Sampling())(row(SCORES * 3 + 5))
    assert token.item() == 1
    weights = np.exp(SCORES * 3)
    assert logprob.item() == pytest.approx(math.log(weights[1] / weights.sum()), abs=1e-6)
    assert logprob.dtype == mx.float32


def test_a_tiny_temperature_is_greedy():
    assert Sampler(Sampling(temperature=1e-40))(row(SCORES))[0].item() == 1


def test_a_seed_repeats_and_another_differs():
    scores = mx.zeros((1, 1000))

    def drawn(seed: int) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed))
        return [sampler(scores)[0].item() for _ in range(5)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 2}, {"top_p": -1},
        {"top_p": 0}, {"top_p": math.nan}, {"top_k": -3}, {"top_k": 1.5}, {"min_p": 1.1}, {"seed": -1},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused_by_name(wrong):
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: found"):
        Sampling(**wrong)
