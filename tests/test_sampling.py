"""Sampling: what settings do to logits, how often each token is drawn, and what cannot be asked for."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.generation.filters import (
    OFF,
    exclude_top,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
)
from mlx_tformer.generation.rules import rules_for
from mlx_tformer.generation.sampling import Sampler, _History, best, filtered
from mlx_tformer.generation.settings import Sampling, recommended, sampling_of

SCORES = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15]))
REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "sampling" / "expected.json").read_text())


def kept(scores: mx.array) -> list[int]:
    return np.flatnonzero(np.isfinite(np.array(scores)[0])).tolist()


def row(values: Any) -> mx.array:
    return mx.array(np.asarray(values)[None].astype(np.float32))


# --- transformers ---


def ours(settings: dict[str, Any]) -> Sampling:
    """What a generation config with the settings of a reference case recommends, in ids."""
    config, vocab = {"do_sample": True, **settings}, len(REFERENCE["logits"][0])
    return Sampling(**recommended(config, "a model", vocab, [REFERENCE["end"]])).in_ids(None, vocab)


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: ", ".join(case["settings"]))
def test_scores_are_those_of_transformers(case: dict[str, Any]) -> None:
    logits, rows = mx.array(REFERENCE["logits"]), [ours(case["settings"])] * len(REFERENCE["logits"])
    before, since = case["settings"].get("at", (4, 2))
    limit, ends = case["settings"].get("max_new_tokens", 99), [REFERENCE["end"]]
    prompts, rules = [ids[:before] for ids in REFERENCE["prompt"]], rules_for(rows[0], before, limit, ends)
    history = _History(rows, prompts, mx.array(ends), logits.shape[1], rules=[rules] * len(rows))
    for at in range(since):
        history.add(mx.array(REFERENCE["written"])[:, at])
    found = filtered(history.changed(logits, [since] * len(rows)), rows)
    wanted = np.array([[-np.inf if x is None else x for x in scores] for scores in case["scores"]])
    np.testing.assert_allclose(np.array(found), wanted, atol=2e-5)


def test_what_is_chosen_changes_what_is_chosen_next() -> None:
    rows = [ours({"repetition_penalty": 3.0, "bad_words_ids": [[1, 2]]})]
    rows = [replace(rows[0], temperature=0.0)]
    sampler = Sampler(rows, [[9]])
    logits = row([0.0, 3.0, 2.9, 1.2, *[0.5] * 36])
    assert [sampler(logits).token.item() for _ in range(4)] == [1, 3, 2, 1]  # 2 must not come after 1


# --- filters, by definition ---


def reference(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """The distribution in float64, token by token, in the order that transformers documents; XTC without its chance."""
    scores = logits.astype(np.float64) / s.temperature
    keep = np.ones(len(scores), bool)
    if s.top_k:
        keep &= scores >= np.sort(scores)[-min(s.top_k, len(scores))]
    probs = normal(scores, keep)
    order = np.argsort(-np.where(keep, scores, -np.inf), kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    keep[order[before >= s.top_p]] = False
    probs = normal(scores, keep)
    keep &= probs >= s.min_p * probs.max()
    probs = normal(scores, keep)
    if s.typical_p < 1:
        surprise = -np.log(np.where(keep, probs, 1e-300))
        gaps = np.where(keep, np.abs(surprise - (probs * surprise)[keep].sum()), np.inf)
        order = np.argsort(gaps, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        keep[order[before >= s.typical_p]] = False
        probs = normal(scores, keep)
    if s.xtc_probability:
        above = probs >= s.xtc_threshold
        if above.sum() > 1:
            keep &= ~(above & (probs > probs[above].min()))
    return normal(scores, keep)


def normal(scores: np.ndarray, keep: np.ndarray) -> np.ndarray:
    probs = np.where(keep, np.exp(scores - scores.max()), 0)
    return probs / probs.sum()


@pytest.mark.parametrize("k", [2, mx.array([[2]])], ids=["number", "array"])
def test_top_k_keeps_the_k_best(k: int | mx.array) -> None:
    assert kept(keep_top_k(row(SCORES), k)) == [1, 3]


@pytest.mark.parametrize(("p", "left"), [(0.39, [1]), (0.41, [1, 3]), (0.71, [1, 3, 4]), (1e-9, [1])])
def test_top_p_keeps_the_token_that_crosses_p_and_always_one(p: float, left: list[int]) -> None:
    assert kept(keep_top_p(row(SCORES), p)) == left


@pytest.mark.parametrize(("p", "left"), [(0.2, [1, 2, 3, 4]), (0.3, [1, 3, 4]), (1.0, [1])])
def test_min_p_compares_with_the_best(p: float, left: list[int]) -> None:
    assert kept(keep_min_p(row(SCORES), p)) == left


def test_typical_keeps_what_is_as_surprising_as_expected() -> None:
    # The entropy is 1.39 nats; 0.3 has 1.20, 0.15 has 1.90, 0.4 has 0.92.
    assert kept(keep_typical(row(SCORES), 0.29)) == [3]
    assert kept(keep_typical(row(SCORES), 0.31)) == [1, 3]


@pytest.mark.parametrize(
    ("threshold", "spared", "left"),
    [(0.12, [], [0, 2, 4]), (0.35, [], [0, 1, 2, 3, 4]), (0.5, [], [0, 1, 2, 3, 4]), (0.12, [1], [0, 1, 2, 4])],
)
def test_xtc_keeps_the_least_likely_of_the_top_choices(threshold: float, spared: list[int], left: list[int]) -> None:
    now = mx.array([[True]])
    assert kept(exclude_top(row(SCORES), threshold, now, mx.array(spared, dtype=mx.int32))) == left
    assert kept(exclude_top(row(SCORES), threshold, ~now)) == [0, 1, 2, 3, 4]


# A hundredth apart, which float32 can tell in a softmax.
logit_rows = st.lists(st.integers(-800, 800).map(lambda i: i / 100), min_size=2, max_size=12, unique=True)


@given(logit_rows, st.floats(0.2, 3), st.integers(0, 12), st.floats(0.05, 1), st.floats(0, 0.9), st.floats(0.05, 1))
def test_filters_leave_the_reference_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, typical: float
) -> None:
    settings = Sampling(temperature, top_k, top_p, min_p, typical_p=typical)
    # On the very edge of a filter float32 and float64 may differ.
    edges = [(p, t, m) for p in _edges(top_p) for t in _edges(typical) for m in (max(min_p - 1e-5, 0), min_p + 1e-5)]
    wanted = [reference(np.array(logits), replace(settings, top_p=p, typical_p=t, min_p=m)) for p, t, m in edges]
    got = np.array(mx.softmax(filtered(row(logits), [settings]), axis=-1))[0]
    assert min(np.abs(got - want).max() for want in wanted) < 1e-4


def _edges(p: float) -> list[float]:
    return [p - 1e-5, min(p + 1e-5, 1.0)]


@given(logit_rows, st.integers(1, 12), st.floats(0.001, 1), st.floats(0.001, 1))
def test_no_filter_removes_everything_and_most_keep_the_best(
    logits: list[float], top_k: int, p: float, threshold: float
) -> None:
    scores, best_id = row(logits), int(np.argmax(np.array(logits, np.float32)))
    for left in (keep_top_k(scores, top_k), keep_top_p(scores, p), keep_min_p(scores, p)):
        assert best_id in kept(left)
    for left in (keep_typical(scores, p), exclude_top(scores, threshold, mx.array([[True]]))):
        assert kept(left)


@given(logit_rows)
def test_a_setting_that_is_off_removes_nothing(logits: list[float]) -> None:
    scores = row(logits)
    column = {name: mx.array([[value]]) for name, value in OFF.items()}
    for left in (
        keep_top_k(scores, column["top_k"]), keep_top_p(scores, column["top_p"]),
        keep_min_p(scores, column["min_p"]), keep_typical(scores, column["typical_p"]),
    ):  # fmt: skip
        assert mx.array_equal(left, scores).item()


# --- penalties, by definition ---


def slow_dry(ids: list[int], breakers: set[int], s: Sampling, vocab: int) -> np.ndarray:
    """For every earlier place, how far what ends there and what ends the text agree."""
    found = np.zeros(vocab)
    for i in range(len(ids) - 1):
        length = 0
        while length <= i and ids[i - length] == ids[len(ids) - 1 - length] and ids[i - length] not in breakers:
            length += 1
        if length >= s.dry_allowed_length and ids[i + 1] not in breakers:
            cost = s.dry_multiplier * s.dry_base ** (length - s.dry_allowed_length)
            found[ids[i + 1]] = max(found[ids[i + 1]], cost)
    return found


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=14), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=6),
    st.integers(1, 3),
    st.sampled_from([(), (2,), (0, 3)]),
)
def test_dry_costs_what_its_definition_says(
    prompts: list[list[int]], written: list[int], allowed: int, breakers: tuple[int, ...]
) -> None:
    settings = Sampling(dry_multiplier=0.7, dry_base=1.5, dry_allowed_length=allowed, dry_breakers=breakers)
    history = _History([settings] * len(prompts), prompts, mx.array([], dtype=mx.int32), 4)
    for token in written:
        history.add(mx.array([token] * len(prompts)))
    found = -np.array(history.changed(mx.zeros((len(prompts), 4)), [0] * len(prompts)))
    wanted = [slow_dry([*ids, *written], set(breakers), settings, 4) for ids in prompts]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_repetition_without_end_costs_a_number() -> None:
    history = _History([Sampling(dry_multiplier=1.0, dry_breakers=())], [[1] * 500], mx.array([0]), 4)
    assert 1e30 < -history.changed(mx.zeros((1, 4)), [0])[0, 1].item() < math.inf


def test_presence_and_frequency_count_what_was_written_and_not_the_prompt() -> None:
    history = _History([Sampling(presence_penalty=0.5, frequency_penalty=0.25)], [[3, 3]], mx.array([0]), 4)
    for token in (1, 2, 1):
        history.add(mx.array([token]))
    assert history.changed(mx.zeros((1, 4)), [0]).tolist() == [[0, -1.0, -0.75, 0]]


def test_an_end_may_not_come_before_the_minimum() -> None:
    sampler = Sampler(Sampling(min_tokens=2), [[1]], end_ids=[0])
    assert [sampler(row([9.0, 1.0, 2.0])).token.item() for _ in range(3)] == [2, 2, 0]


# --- chance ---

DRAWN = [
    Sampling(1.0),
    Sampling(0.5),
    Sampling(1.0, top_k=3),
    Sampling(1.3, top_p=0.8),
    Sampling(1.0, min_p=0.3),
    Sampling(1.0, typical_p=0.6),
    Sampling(1.0, xtc_probability=1.0, xtc_threshold=0.12),
]


@pytest.mark.parametrize("settings", DRAWN, ids=["plain", "cold", "top-k", "top-p", "min-p", "typical", "xtc"])
def test_drawn_frequencies_match_the_distribution(settings: Sampling) -> None:
    rows, steps = 2000, 10
    sampler = Sampler([replace(settings, seed=seed) for seed in range(rows)], [[]] * rows)
    logits = mx.broadcast_to(row(SCORES), (rows, len(SCORES)))
    check_frequencies(np.concatenate([np.array(sampler(logits).token) for _ in range(steps)]), settings)


def check_frequencies(drawn: np.ndarray, settings: Sampling) -> None:
    counts, wanted = np.bincount(drawn, minlength=len(SCORES)), reference(SCORES, settings) * len(drawn)
    assert counts[wanted == 0].sum() == 0
    chi_square = ((counts - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: one in a thousand


def test_steps_of_one_row_are_independent_of_each_other() -> None:
    sampler = Sampler(Sampling(1.0, seed=11), [[]])
    drawn = [sampler(row(SCORES)).token for _ in range(4_000)]
    mx.eval(drawn)
    found = np.array([token.item() for token in drawn])
    check_frequencies(found, Sampling(1.0))
    pairs = np.bincount(found[:-1] * 5 + found[1:], minlength=25).reshape(5, 5)
    wanted = np.outer(np.exp(SCORES), np.exp(SCORES)) * (len(found) - 1)
    assert ((pairs - wanted) ** 2 / wanted).sum() < 51.2  # 24 degrees of freedom: one in a thousand


def test_xtc_strikes_as_often_as_it_is_asked_to() -> None:
    settings = Sampling(1.0, xtc_probability=0.25, xtc_threshold=0.2)
    sampler = Sampler([replace(settings, seed=seed) for seed in range(2000)], [[]] * 2000)
    logits = mx.broadcast_to(row(SCORES), (2000, len(SCORES)))
    drawn = np.concatenate([np.array(sampler(logits).token) for _ in range(10)])
    struck = reference(SCORES, settings)  # without token 1
    wanted = (0.75 * np.exp(SCORES) + 0.25 * struck) * len(drawn)
    assert ((np.bincount(drawn, minlength=5) - wanted) ** 2 / wanted).sum() < 18.5


MIXED = [
    Sampling(0.9, seed=1),
    Sampling(),
    Sampling(1.1, top_k=4, seed=2, repetition_penalty=1.5),
    Sampling(1.4, top_p=0.7, seed=1),
    Sampling(1.0, typical_p=0.5, seed=3, bad_words=[[2]], min_tokens=4),
    Sampling(1.0, min_p=0.2, xtc_probability=0.5, seed=9, dry_multiplier=0.8, dry_breakers=(1,), logit_bias={5: 1.0}),
    Sampling(0.8, seed=4, presence_penalty=0.5, frequency_penalty=-0.2),
]


def test_a_row_of_a_batch_gets_the_tokens_that_it_gets_alone() -> None:
    prompts = [[1, 2, 3][: at % 4] for at in range(len(MIXED))]
    logits = [mx.random.normal((len(MIXED), 9), key=mx.random.key(step)) * 2 for step in range(12)]
    together = Sampler(MIXED, prompts, end_ids=[0])
    found = [np.array(together(x).token) for x in logits]
    for at, settings in enumerate(MIXED):
        alone = Sampler(settings, [prompts[at]], end_ids=[0])
        assert [alone(x[at : at + 1]).token.item() for x in logits] == [tokens[at] for tokens in found]


def test_a_seed_repeats_and_another_differs() -> None:
    scores = mx.zeros((1, 1000))

    def drawn(seed: int) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed))
        return [sampler(scores).token.item() for _ in range(5)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(set(drawn(1))) > 1


def test_greedy_takes_the_best_and_reports_the_unfiltered_log_probability() -> None:
    chosen = Sampler(Sampling(logit_bias={1: 1.0}), top=2)(row(SCORES * 3 + 5))
    assert chosen.token.item() == 1
    weights = np.exp(SCORES * 3)
    wanted = np.log(weights / weights.sum())
    assert chosen.logprob.item() == pytest.approx(wanted[1], abs=1e-6)
    assert (chosen.top.tolist(), chosen.logprob.dtype) == ([[1, 3]], mx.float32)
    np.testing.assert_allclose(np.array(chosen.top_logprobs)[0], wanted[[1, 3]], atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 3, 5, 9])
def test_the_best_come_first(count: int) -> None:
    ids, values = best(row(SCORES), count)
    assert ids.tolist() == [[1, 3, 4, 2, 0][:count]]
    np.testing.assert_allclose(np.array(values)[0], np.sort(SCORES)[::-1][:count], rtol=1e-6)


def test_a_tiny_temperature_is_greedy() -> None:
    assert Sampler(Sampling(temperature=1e-40))(row(SCORES)).token.item() == 1


# --- settings ---


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 2}, {"top_p": -1},
        {"top_p": 0}, {"top_p": math.nan}, {"top_k": -3}, {"top_k": 1.5}, {"min_p": 1.1}, {"seed": -1}, {"seed": 0.5},
        {"typical_p": 0}, {"xtc_probability": 2}, {"xtc_threshold": 0}, {"repetition_penalty": 0},
        {"presence_penalty": math.inf}, {"frequency_penalty": "high"}, {"dry_multiplier": -1}, {"dry_base": 0.5},
        {"dry_allowed_length": 0}, {"logit_bias": {3: math.nan}}, {"bad_words": "word"}, {"bad_words": [""]},
        {"min_tokens": -1},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: .*found"):
        Sampling(**wrong)


def test_a_setting_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match=r"^temprature: there is no such setting"):
        sampling_of({"temprature": 1})


def letters(text: str) -> list[int]:
    return [ord(c) - ord("a") for c in text.strip()]


def test_texts_become_ids() -> None:
    asked = Sampling(logit_bias={"c": -1.0, 5: 2.0}, bad_words=["ab", [3]], dry_multiplier=1.0, dry_breakers=["b", 4])
    found = asked.in_ids(letters, 26)
    assert found.logit_bias == {2: -1.0, 5: 2.0}
    assert (list(found.bad_words), list(found.dry_breakers)) == ([[0, 1], [3]], [1, 4])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": {"ab": 1.0}}, "logit_bias: found 'ab', which is 2 tokens, expected one"),
        ({"logit_bias": {99: 1.0}}, "logit_bias: found id 99, expected 0 to 25"),
        ({"bad_words": [[1, -2]]}, "bad_words: found id -2"),
        ({"bad_words": [[1.5]]}, "bad_words: found id 1.5"),
    ],
)
def test_what_is_no_id_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**asked).in_ids(letters, 26)


def test_texts_need_a_tokenizer_and_usual_breakers_do_not() -> None:
    with pytest.raises(UsageError, match="bad_words: found 'no', but the model has no tokenizer"):
        Sampling(bad_words=["no"]).in_ids(None, 26)
    assert Sampling(dry_multiplier=1.0).in_ids(None, 26).dry_breakers == []


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"do_sample": True, "typical_p": 0.9, "repetition_penalty": 1.05},
         {"temperature": 1.0, "typical_p": 0.9, "repetition_penalty": 1.05}),
        ({"do_sample": False, "typical_p": 0.9, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"repetition_penalty": 1.0, "min_new_tokens": 0}, {}),
        ({"bad_words_ids": [[4, 5]], "min_new_tokens": 3}, {"bad_words": [[4, 5]], "min_tokens": 3}),
    ],
)  # fmt: skip
def test_what_the_authors_recommend_is_found(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert recommended(config, "a model") == wanted


@pytest.mark.parametrize("config", [{"repetition_penalty": -1}, {"bad_words_ids": 7}, {"min_new_tokens": "few"}])
def test_what_they_cannot_mean_is_bad_input(config: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"a model/generation_config\.json"):
        recommended(config, "a model")
