"""Speculation: whatever a draft guesses, the model writes what it would write alone."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import CASES, GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from test_draft import folder_of

import mlx_tformer as mt
from mlx_tformer.generation import Sampler, Sampling
from mlx_tformer.generation.decode import Decoder
from mlx_tformer.generation.drafts import Draft, LookAhead, Lookup, Proposal, Smaller
from mlx_tformer.generation.speculate import Speculation, Speculator

KINDS = ["llama-gqa-tied", "mistral-window", "mixtral", "deepseek_v3", "mamba", "jamba"]
"""Dense, window, mixture of experts, latent attention, state space, hybrid."""


class Loaded(dict[str, mt.LanguageModel]):
    """The models of golden cases, loaded when they are needed."""

    def __missing__(self, case: str) -> mt.LanguageModel:
        self[case] = mt.load(GOLDEN / case, dtype="float32")
        return self[case]


MODELS = Loaded()


class Oracle(Draft):
    """Guesses what is given to it: right where `right` says so, and something else where not."""

    def __init__(self, truth: Sequence[int], right: Sequence[bool], vocab: int):
        self.truth, self.right, self.vocab, self.at = truth, list(right), vocab, 0

    def propose(self, ids: Sequence[int], count: int) -> Proposal:
        wanted = self.truth[len(ids) : len(ids) + count]
        marks = [self.right[(self.at + i) % len(self.right)] for i in range(len(wanted))]
        self.at += len(wanted)
        return Proposal([t if ok else (t + 1) % self.vocab for t, ok in zip(wanted, marks, strict=True)])


def plain(lm: mt.LanguageModel, ids: list[int], tokens: int, **asked: Any) -> list[int]:
    return [step.token for step in lm.generate(ids, max_tokens=tokens, stop_at_end=False, **asked)]


def ids_for(lm: mt.LanguageModel, length: int) -> list[int]:
    return mx.random.randint(0, lm.vocab, (length,), key=mx.random.key(length)).tolist()


def with_oracle(
    lm: mt.LanguageModel,
    ids: list[int],
    wanted: list[int],
    right: Sequence[bool],
    most: int,
    counts: Speculation | None = None,
) -> list[int]:
    sampler = Sampler(Sampling(), [ids])
    decoder = Decoder(lm.model, ids, sampler, planned=len(ids) + len(wanted))
    draft = Oracle([*ids, *wanted], right, lm.vocab)
    return [token for token, *_ in Speculator(decoder, lm.model, sampler, draft, most, counts)]


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_the_plain_loop_past_every_window(case: str) -> None:
    lm = MODELS[case]
    ids = ids_for(lm, 9)
    decoder = Decoder(lm.model, ids, Sampler(Sampling(), [ids]), planned=len(ids) + 25)
    if not decoder.steady:
        pytest.skip("positions change their scale on the way, so nothing is guessed")
    wanted = plain(lm, ids, 25)
    for right in ([True], [False], [True, True, False]):
        assert with_oracle(lm, ids, wanted, right, 5) == wanted


@given(case=st.sampled_from(KINDS), right=st.lists(st.booleans(), min_size=1, max_size=9), most=st.integers(1, 8),
       length=st.integers(1, 20), tokens=st.integers(1, 20))  # fmt: skip
@settings(max_examples=30)
def test_any_guesses_give_the_greedy_ids_of_the_plain_loop(
    case: str, right: list[bool], most: int, length: int, tokens: int
) -> None:
    lm = MODELS[case]
    ids = ids_for(lm, length)
    wanted = plain(lm, ids, tokens)
    assert with_oracle(lm, ids, wanted, right, most) == wanted


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("draft", ["lookup", "itself", "other"])
def test_each_draft_gives_the_greedy_ids(case: str, draft: str) -> None:
    lm = MODELS[case]
    other = mt.load(GOLDEN / case, dtype="float32")
    if draft == "other":
        other.model.apply(lambda x: x + 0.05 * mx.random.normal(x.shape, key=mx.random.key(1)) if x.ndim > 1 else x)
    ids = ids_for(lm, 12) * 2
    generation = lm.generate(ids, max_tokens=30, stop_at_end=False, draft="lookup" if draft == "lookup" else other)
    assert [step.token for step in generation] == plain(lm, ids, 30)
    counts = generation.stats.speculation
    if draft == "itself":
        assert counts.accepted == counts.proposed > 0 and counts.passes < 15
    assert counts.accepted <= counts.proposed


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.9, "presence_penalty": 0.3},
        {"dry_multiplier": 2.0},
        {"min_tokens": 10},
        {"logit_bias": {3: 2.0}},
        {"bad_words": [[5], [7, 8]]},
    ],
)
def test_penalties_see_guesses_only_when_they_are_accepted(asked: dict[str, Any]) -> None:
    lm = MODELS["llama-gqa-tied"]
    ids = [*ids_for(lm, 6), 5, 6, 7, 5, 6]
    generation = lm.generate(ids, max_tokens=30, stop_at_end=False, draft="lookup", **asked)
    assert [step.token for step in generation] == plain(lm, ids, 30, **asked)


def test_log_probabilities_are_those_of_the_plain_loop() -> None:
    lm = MODELS["llama-gqa-tied"]
    ids = ids_for(lm, 6) * 3
    asked: dict[str, Any] = {"max_tokens": 20, "stop_at_end": False, "logprobs": 2, "prompt_logprobs": True}
    a, b = lm.generate(ids, draft="lookup", **asked), lm.generate(ids, **asked)
    for found, wanted in zip(a, b, strict=True):
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        assert [i for i, _ in found.top] == [i for i, _ in wanted.top]
    assert [s.logprob for s in a.prompt_scores[1:]] == pytest.approx([s.logprob for s in b.prompt_scores[1:]], abs=1e-5)


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("asked", [{}, {"top_k": 4}, {"top_p": 0.7, "temperature": 1.5}])
def test_tokens_come_as_often_as_without_a_bad_draft(drawn: bool, asked: dict[str, Any]) -> None:
    count, vocab = 20_000, 8
    logits = mx.array([1.0, 0.5, 0.0, -0.5, 2.0, 1.5, -1.0, 0.2])
    bad = mx.array([0.0, 2.0, 0.0, 3.0, -2.0, 0.0, 2.5, 0.0])
    rows = [Sampling(**{"temperature": 1.0, **asked, "seed": seed}) for seed in range(count)]
    sampler = Sampler(rows, [()] * count)
    logprobs = mx.broadcast_to(bad - mx.logsumexp(bad), (count, vocab))
    guess = mx.random.categorical(logprobs, key=mx.random.key(99)) if drawn else mx.full((count,), 3, mx.int32)
    found = sampler.check(mx.broadcast_to(logits, (count, vocab)), guess, logprobs if drawn else None).token
    seen = np.bincount(np.array(found), minlength=vocab)
    scores = np.array(logits, np.float64) / asked.get("temperature", 1.0)
    wanted = np.exp(scores) / np.exp(scores).sum()
    order = np.argsort(-wanted)
    kept = order[: asked["top_k"]] if "top_k" in asked else order
    if "top_p" in asked:
        kept = order[: int(np.searchsorted(np.cumsum(wanted[order]), asked["top_p"])) + 1]
    expected = np.zeros(vocab)
    expected[kept] = wanted[kept] / wanted[kept].sum() * count
    assert seen[expected == 0].sum() == 0
    chi = float((np.square(seen - expected)[kept] / expected[kept]).sum())
    assert chi < 24.3  # the 0.1 % point for 7 degrees of freedom


def test_a_seed_gives_the_same_text_again() -> None:
    lm = MODELS["llama-gqa-tied"]
    ids = ids_for(lm, 8) * 2
    asked: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 4, "stop_at_end": False}
    for draft in ("lookup", MODELS["llama-gqa-tied"]):
        texts = [[step.token for step in lm.generate(ids, draft=draft, **asked)] for _ in range(2)]
        assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> mt.LanguageModel:
    """DeepSeek V3 with its module of multi-token prediction."""
    return mt.load(folder_of(tmp_path_factory.mktemp("ahead") / "model"), dtype="float32")


def test_the_module_that_looks_ahead_guesses_one_token_and_changes_nothing(ahead: mt.LanguageModel) -> None:
    lm = ahead
    ids = ids_for(lm, 11)
    generation = lm.generate(ids, max_tokens=20, stop_at_end=False, draft="ahead")
    assert [step.token for step in generation] == plain(lm, ids, 20)
    counts = generation.stats.speculation
    assert counts.proposed and counts.proposed <= counts.passes


def test_what_the_module_looks_ahead_at_is_what_it_sees_in_one_pass(ahead: mt.LanguageModel) -> None:
    model, ids = ahead.model, ids_for(ahead, 12)
    hidden = model.hidden(mx.array([ids[:-1]]))
    wanted = model.draft(hidden, mx.array([ids[1:]]))
    draft = LookAhead(model, 20)
    for start, stop in ((0, 5), (5, 6), (6, 11)):
        draft.see(hidden[:, start:stop], ids[start + 1 : stop + 1])
        assert draft.propose(ids, 4).tokens == [int(mx.argmax(wanted[0, stop - 1]).item())]


def test_a_lookup_takes_the_longest_and_latest_match() -> None:
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert Lookup().propose(text, 3).tokens == [9, 2, 3]
    assert Lookup().propose([2, 3, 9, 2, 3, 8, 2, 3], 1).tokens == [8]
    assert Lookup().propose([1, 2, 3], 4).tokens == []
    grown = Lookup()
    for end in range(1, len(text) + 1):
        assert grown.propose(text[:end], 5) == Lookup().propose(text[:end], 5)


def test_drafts_are_longer_after_success_and_shorter_after_failure() -> None:
    lm = MODELS["llama-gqa-tied"]
    ids = ids_for(lm, 9)
    wanted = plain(lm, ids, 60)
    for right, passes in (([True], range(4, 9)), ([False], range(58, 61))):
        counts = Speculation()
        assert with_oracle(lm, ids, wanted, right, 16, counts) == wanted and counts.passes in passes
        assert counts.rate == (1.0 if right[0] else 0.0)


def test_a_smaller_model_guesses_by_its_own_distribution() -> None:
    lm = MODELS["llama-gqa-tied"]
    ids = ids_for(lm, 7)
    proposal = Smaller(lm.model, Sampling(temperature=0.8, top_k=5, seed=1), 30).propose(ids, 3)
    assert proposal.logprobs is not None and proposal.logprobs.shape == (3, lm.vocab)
    logits = lm.model(mx.array([[*ids, *proposal.tokens]]))[0, len(ids) - 1 : -1]
    for row, token, wanted in zip(proposal.logprobs, proposal.tokens, logits, strict=True):
        kept = [i for i in range(lm.vocab) if row[i].item() > -float("inf")]
        assert sorted(kept) == sorted(mx.argsort(-wanted)[:5].tolist()) and token in kept
        scores = wanted[mx.array(kept)] / 0.8
        assert mx.allclose(row[mx.array(kept)], scores - mx.logsumexp(scores), atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"draft": "guess"}, "draft: found 'guess', expected \"lookup\""),
        ({"draft": "ahead"}, "draft: the model has no module"),
        ({"draft": "lookup", "draft_tokens": 0}, "draft_tokens: found 0"),
    ],
)
def test_drafts_that_there_are_not_are_refused(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(mt.UsageError, match=named):
        MODELS["llama-gqa-tied"].generate([1, 2], **asked)


def test_a_model_with_other_tokens_is_refused() -> None:
    lm = MODELS["llama-gqa-tied"]
    other = next(MODELS[c] for c in CASES if MODELS[c].vocab != lm.vocab)
    with pytest.raises(mt.UsageError, match="they must be the same tokens"):
        lm.generate([1, 2], draft=other)


COPIED = """The harbour office opens at seven in the morning and closes at four in the afternoon. Visitors who arrive \
by boat should report to the office before they unload anything. A small fee is charged for each night, and the money \
is used to repair the pier, the lamps and the old crane."""


def test_lookup_needs_few_passes_to_copy_a_text(smollm2_dense: mt.LanguageModel) -> None:
    lm = smollm2_dense
    question = f"Repeat this text exactly, word for word, but correct any spelling mistakes:\n\n{COPIED}"
    ids = lm.chat([{"role": "user", "content": question}])
    generation = lm.generate(ids, max_tokens=60, draft="lookup")
    list(generation)
    assert generation.text.startswith(COPIED[:60])
    assert generation.stats.speculation.passes <= 0.6 * (len(generation.tokens) - 1)
