"""Batches: each text is what it would be alone, whoever stands beside it and whenever it came."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from helpers import CASES, GOLDEN, gap, golden
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_tformer as mt
from mlx_tformer.generation import Result, decode
from mlx_tformer.nn import Cache

KINDS = ["llama-gqa-tied", "mistral-window", "mixtral", "deepseek_v3", "mamba", "jamba"]
"""Dense, window, mixture of experts, latent attention, state space, hybrid."""


@pytest.fixture(scope="module")
def models() -> dict[str, mt.LanguageModel]:
    """The models of all golden cases, loaded when they are needed."""

    class Loaded(dict[str, mt.LanguageModel]):
        def __missing__(self, case: str) -> mt.LanguageModel:
            self[case] = mt.load(GOLDEN / case, dtype="float32")
            return self[case]

    return Loaded()


def prompt(lm: mt.LanguageModel, seed: int, length: int) -> list[int]:
    return mx.random.randint(0, lm.vocab, (length,), key=mx.random.key(seed)).tolist()


def alone(lm: mt.LanguageModel, ids: list[int], **asked: Any) -> list[int]:
    return [step.token for step in lm.generate(ids, **asked)]


@pytest.mark.parametrize("case", CASES)
def test_texts_of_many_lengths_are_what_they_are_alone(case: str, models: dict[str, mt.LanguageModel]) -> None:
    lm = models[case]
    requests = [
        {"prompt": prompt(lm, seed, length), "max_tokens": tokens}
        for seed, (length, tokens) in enumerate([(5, 9), (19, 2), (1, 12), (11, 5), (30, 4), (3, 1), (8, 7)])
    ]
    found = list(lm.batch([dict(r) for r in requests], size=3, stop_at_end=False))
    assert [result.index for result in found] == list(range(len(requests)))
    for result, request in zip(found, requests, strict=True):
        ids, tokens = request["prompt"], request["max_tokens"]
        assert result.tokens == alone(lm, ids, max_tokens=tokens, stop_at_end=False)
        assert (result.prompt, result.finish) == (ids, "length")


@given(
    case=st.sampled_from(KINDS),
    texts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=7),
    size=st.integers(1, 5),
)
@settings(max_examples=40)
def test_any_batch_gives_the_greedy_ids_of_the_plain_loop(
    case: str, texts: list[tuple[int, int]], size: int, models: dict[str, mt.LanguageModel]
) -> None:
    lm = models[case]
    asked = [{"prompt": prompt(lm, i, length), "max_tokens": tokens} for i, (length, tokens) in enumerate(texts)]
    found = [result.tokens for result in lm.batch([dict(one) for one in asked], size=size, stop_at_end=False)]
    assert found == [alone(lm, one["prompt"], max_tokens=one["max_tokens"], stop_at_end=False) for one in asked]


@given(case=st.sampled_from(KINDS), chunk=st.integers(1, 9), length=st.integers(1, 40))
@settings(max_examples=30)
def test_any_split_of_a_prompt_gives_the_same_ids(
    case: str, chunk: int, length: int, models: dict[str, mt.LanguageModel]
) -> None:
    lm = models[case]
    ids = prompt(lm, length, length)
    wanted = alone(lm, ids, max_tokens=8, stop_at_end=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "CHUNK", chunk)
        assert alone(lm, ids, max_tokens=8, stop_at_end=False) == wanted


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("keeping", [{"kv_bits": 8}, {"kv_size": 6}])
def test_texts_with_caches_that_keep_less_are_what_they_are_alone(
    case: str, keeping: dict[str, int], models: dict[str, mt.LanguageModel]
) -> None:
    lm = models[case]
    asked = [{"prompt": prompt(lm, i, length), "max_tokens": 6 + i} for i, length in enumerate([4, 15, 9, 2, 11])]
    found = [result.tokens for result in lm.batch([dict(one) for one in asked], size=2, stop_at_end=False, **keeping)]
    for tokens, one in zip(found, asked, strict=True):
        assert tokens == alone(lm, one["prompt"], max_tokens=one["max_tokens"], stop_at_end=False, **keeping)


@pytest.mark.parametrize("keeping", [{"kv_size": 6, "kv_keep": 2}, {"kv_bits": 4, "kv_start": 24}])
def test_texts_that_keep_their_beginning_or_are_packed_late_are_what_they_are_alone(
    keeping: dict[str, int], models: dict[str, mt.LanguageModel]
) -> None:
    lm = models["llama-gqa-tied"]
    lengths = [10, 30, 6, 12, 26, 20, 8, 35, 14, 3]  # of 24 tokens at most, of more, and those that grow beyond
    prompts = [prompt(lm, i, length) for i, length in enumerate(lengths)]
    asked = {"max_tokens": 12, "stop_at_end": False}
    wanted = [alone(lm, ids, **asked, **keeping) for ids in prompts]
    for size in (1, 4):
        assert [result.tokens for result in lm.batch(prompts, size=size, **asked, **keeping)] == wanted
    assert wanted != [alone(lm, ids, **asked) for ids in prompts]


@pytest.mark.parametrize("case", ["llama-gqa-tied", "jamba"])
def test_a_seed_gives_the_same_text_alone_and_in_any_batch(case: str, models: dict[str, mt.LanguageModel]) -> None:
    lm = models[case]
    own = {"temperature": 1.0, "top_k": 20, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.3}
    shared: dict[str, Any] = {"max_tokens": 10, "stop_at_end": False, "dry_multiplier": 0.8}
    ids = prompt(lm, 1, 6)
    wanted = alone(lm, ids, **own, **shared)
    for others in (0, 1, 4):
        crowd = [{"prompt": prompt(lm, 9 + i, 3 + 4 * i), "temperature": 2.0, "seed": i} for i in range(others)]
        found = list(lm.batch([*crowd, {"prompt": ids, **own}, *crowd], size=3, **shared))
        assert found[others].tokens == wanted


def test_log_probabilities_are_those_of_the_text_alone(models: dict[str, mt.LanguageModel]) -> None:
    lm = models["llama-gqa-tied"]
    prompts = [prompt(lm, i, 4 + i) for i in range(3)]
    for result, ids in zip(lm.batch(prompts, max_tokens=5, logprobs=3), prompts, strict=True):
        for step, wanted in zip(result.steps, lm.generate(ids, max_tokens=5, logprobs=3), strict=True):
            assert step.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert [i for i, _ in step.top] == [i for i, _ in wanted.top]


def test_texts_end_as_they_do_alone(shakespeare: mt.LanguageModel) -> None:
    prompts = ["ROMEO:", "JULIET:\nO", "First Citizen:", "HAMLET: To"]
    asked: dict[str, Any] = {"max_tokens": 40, "stop": [".", "the"], "temperature": 0.8, "seed": 3}
    found = list(shakespeare.batch(prompts, size=2, **asked))
    for result, text in zip(found, prompts, strict=True):
        wanted = shakespeare.generate(text, **asked)
        assert result.text == "".join(step.text for step in wanted)
        assert result.finish == wanted.finish
    assert {"stop"} <= {result.finish for result in found}


def test_a_text_that_ends_makes_room_for_the_next(models: dict[str, mt.LanguageModel]) -> None:
    lm = models["llama-gqa-tied"]
    taken = []

    def requests() -> Iterator[dict[str, Any]]:
        for index, tokens in enumerate([30, 2, 2, 2, 2]):
            taken.append(index)
            yield {"prompt": prompt(lm, index, 4), "max_tokens": tokens}

    calls = []
    model = lm.model
    original = type(model).hidden

    def counted(self: Any, ids: mx.array, *rest: Any, **more: Any) -> mx.array:
        calls.append(ids.shape)
        return original(self, ids, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "hidden", counted)
        assert len(list(lm.batch(requests(), size=2, stop_at_end=False))) == 5
    steps = [rows for rows, length in calls if length == 1]
    assert max(steps) == 2 and len(steps) <= 31  # beside the longest text there was room for the four others
    assert taken == [0, 1, 2, 3, 4]


def test_results_wait_for_the_first_and_no_prompt_is_read_too_early(models: dict[str, mt.LanguageModel]) -> None:
    lm = models["llama-gqa-tied"]
    taken = 0

    def requests() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for index in range(200):
            taken += 1
            yield {"prompt": prompt(lm, index, 2), "max_tokens": 60 if index == 0 else 1}

    results = lm.batch(requests(), size=2, stop_at_end=False)
    assert isinstance(first := next(results), Result) and first.index == 0
    assert taken <= 2 * 8 + 3


@pytest.mark.parametrize("case", ["llama-yarn", "phi3"])
def test_texts_whose_positions_change_their_scale_are_what_they_are_alone(
    case: str, models: dict[str, mt.LanguageModel]
) -> None:
    lm = models[case]
    asked = [{"prompt": prompt(lm, i, length), "max_tokens": 12} for i, length in enumerate([4, 40, 28, 10, 60])]
    found = [result.tokens for result in lm.batch([dict(one) for one in asked], size=4, stop_at_end=False)]
    assert found == [alone(lm, one["prompt"], max_tokens=12, stop_at_end=False) for one in asked]


@pytest.mark.parametrize("case", KINDS)
def test_caches_that_join_and_part_give_the_logits_of_each_text(case: str) -> None:
    model = golden(case)
    texts = [mx.random.randint(0, model.vocab, (1, n), key=mx.random.key(n)) for n in (3, 20, 9, 14)]
    caches: list[Cache] = []
    for text in texts:
        caches.append(model.new_cache())
        model(text, caches[-1])
    joined, step = caches[0], mx.array([[1], [2], [3], [4]])
    joined.join(caches[1:])
    found = model(step, joined)
    joined.take([2, 0])
    joined.compact()
    assert joined.left is not None and joined.left.tolist() == [0, 6]
    again = model(step[:2], joined)
    for row, at in ((2, 0), (0, 1)):
        own = model.new_cache()
        model(texts[row], own)
        assert gap(model(step[row : row + 1], own), found[row : row + 1]) < 1e-5
        assert gap(model(step[at : at + 1], own), again[at : at + 1]) < 1e-5


@pytest.mark.parametrize(
    ("prompts", "asked", "named"),
    [
        ([[1], []], {}, "prompt 1: prompt: it is empty"),
        ([{"max_tokens": 3}], {}, "prompt 0: found no prompt"),
        ([[1]], {"size": 0}, "size: found 0"),
        ([[1]], {"logprobs": -1}, "logprobs: found -1"),
        ([[1]], {"heat": 1}, "prompt 0: heat: there is no such setting"),
        ([{"prompt": [1], "max_tokens": 0}], {}, "prompt 0: max_tokens: found 0"),
        ([[1]], {"kv_keep": 2}, "kv_keep: it needs kv_size"),
        ("one", {}, "prompts: found a single one"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    prompts: Any, asked: dict[str, Any], named: str, models: dict[str, mt.LanguageModel]
) -> None:
    with pytest.raises(mt.UsageError, match=named):
        list(models["llama-gqa-tied"].batch(prompts, **asked))
