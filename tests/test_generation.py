"""The token loop against one pass of the model, and what a caller may and may not ask of it."""

import json
import math
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import CASES, GOLDEN, expected

import mlx_tformer as mt
from mlx_tformer.errors import UsageError
from mlx_tformer.generation import decode
from mlx_tformer.generation.decode import Decoder, NotANumber
from mlx_tformer.generation.sampling import Sampler
from mlx_tformer.generation.settings import Sampling


def loaded(case: str) -> mt.LanguageModel:
    return mt.load(GOLDEN / case, dtype="float32")


def one_pass(lm: mt.LanguageModel, ids: list[int], count: int) -> list[int]:
    """Greedy decoding without a cache: the whole text again for every token."""
    text = list(ids)
    for _ in range(count):
        text.append(int(lm(mx.array([text]))[0, -1].argmax().item()))
    return text[len(ids) :]


def greedy(lm: mt.LanguageModel, ids: list[int], count: int) -> list[int]:
    return [step.token for step in lm.generate(ids, max_tokens=count, stop_at_end=False)]


@pytest.mark.parametrize("case", CASES)
def test_greedy_ids_equal_transformers(case):
    e = expected(case)
    assert greedy(loaded(case), e["prompt_ids"][0].tolist(), 12) == e["greedy_ids"][0].tolist()


# Dynamic NTK has other frequencies for every length, so that a text read anew for each token is another text.
@pytest.mark.parametrize("case", [case for case in CASES if case != "llama-dynamic"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 512])
def test_any_chunk_of_the_prompt_gives_the_ids_of_one_pass(case, chunk, monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", chunk)
    lm, ids = loaded(case), expected(case)["input_ids"][0, :17].tolist()
    assert greedy(lm, ids, 12) == one_pass(lm, ids, 12)


def test_log_probabilities_are_those_of_one_pass():
    lm, ids = loaded("qwen3"), [5, 6, 7]
    steps = list(lm.generate(ids, max_tokens=8, temperature=1.0, seed=3, stop_at_end=False))
    text = mx.array([ids + [step.token for step in steps]])
    logits = np.array(lm(text)[0, 2:-1], np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    got = [step.logprob for step in steps]
    np.testing.assert_allclose(got, [want[i, step.token] for i, step in enumerate(steps)], atol=1e-5)


def test_the_likeliest_tokens_and_the_prompt_are_scored_as_in_one_pass(monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", 3)
    lm, ids = loaded("qwen3"), [5, 6, 7, 8, 9, 10, 11]
    settings = {"temperature": 1.0, "seed": 3, "logit_bias": {4: 5.0}, "stop_at_end": False}
    generation = lm.generate(ids, max_tokens=4, logprobs=3, prompt_logprobs=True, **settings)
    steps = list(generation)
    logits = np.array(lm(mx.array([ids + generation.tokens]))[0], np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scores = generation.prompt_scores
    assert (scores[0].logprob, [score.token for score in scores]) == (None, ids)
    for at, score in enumerate([*scores[1:], *steps]):
        assert score.logprob == pytest.approx(want[at, score.token], abs=1e-5)
        assert [index for index, _ in score.top] == np.argsort(-want[at])[:3].tolist()
        np.testing.assert_allclose([logprob for _, logprob in score.top], np.sort(want[at])[::-1][:3], atol=1e-5)


def test_bad_words_never_come_and_a_minimum_length_is_kept(shakespeare):
    plain = shakespeare.generate("ROMEO:\n", max_tokens=60)
    list(plain)
    words = [word for word in plain.text.split() if word.isalpha()][:4]
    generation = shakespeare.generate("ROMEO:\n", max_tokens=60, bad_words=words, min_tokens=60)
    list(generation)
    assert len(generation.tokens) == 60
    banned = [shakespeare.tokenizer.encode(f, add_bos=False) for w in words for f in (w, f" {w}")]
    text = generation.tokens
    assert not any(text[i : i + len(ids)] == ids for ids in banned for i in range(len(text)))


def test_a_text_that_outgrows_its_rotary_range_is_read_again_and_keys_are_never_mixed():
    lm = loaded("llama-longrope")
    trained = lm.model.scaled_positions()[0].scaling.trained
    prompt = [7] * (trained - 4)
    decoder = Decoder(lm.model, prompt, Sampler(Sampling()), planned=trained + 8)
    contexts = []
    got = []
    for token, *_ in decoder:
        got.append(token)
        contexts.append(decoder.cache.context)
    assert got == one_pass(lm, prompt, 12)
    assert set(contexts) == {len(prompt), trained + 8}


@pytest.mark.parametrize("form", [list, tuple, mx.array, lambda ids: mx.array([ids])])
def test_a_prompt_may_be_ids_in_any_form(form):
    lm = loaded("llama-mha")
    assert greedy(lm, form([3, 4, 5]), 4) == one_pass(lm, [3, 4, 5], 4)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "it is empty"),
        ([200], {}, "found id 200, expected 0 to 130"),
        ([-1], {}, "found id -1, expected 0 to 130"),
        ([2_000_000_000], {}, "found id 2000000000"),
        ([1] * 128, {}, "it has 128 tokens, and the model's context of 128"),
        (mx.array([[1], [2]]), {}, "found a batch of 2, expected one text"),
        ("text", {}, "no tokenizer"),
        ([1], {"max_tokens": -1}, "max_tokens: found -1"),
        ([1], {"max_tokens": 0}, "max_tokens: found 0"),
        ([1], {"temperature": -1}, "temperature: found -1"),
        ([1], {"temprature": 1}, "temprature: there is no such setting"),
        ([1], {"logprobs": -1}, "logprobs: found -1, expected a whole number from 0 to 131"),
        ([1], {"bad_words": ["text"]}, "bad_words: found 'text', but the model has no tokenizer"),
        ([1], {"logit_bias": {131: 1.0}}, "logit_bias: found id 131, expected 0 to 130"),
        ([1], {"stop": [""]}, "stop: found an empty string"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(prompt, settings, message):
    with pytest.raises(UsageError, match=message):
        loaded("llama-mha").generate(prompt, **settings)


def test_the_context_caps_the_tokens():
    steps = list(loaded("llama-mha").generate([1] * 120, max_tokens=10**12, stop_at_end=False))
    assert len(steps) == 8
    assert [step.finish for step in steps] == [None] * 7 + ["length"]


def test_ids_out_of_range_never_reach_the_embedding():
    with pytest.raises(UsageError, match="ids: found 131, expected 0 to 130"):
        loaded("llama-mha")(mx.array([[0, 131]]))


def test_logits_that_are_not_numbers_stop_the_text():
    lm = loaded("llama-mha")
    lm.model.decoder.norm.weight = lm.model.decoder.norm.weight * math.nan
    with pytest.raises(NotANumber, match="not numbers"):
        list(lm.generate([1, 2], max_tokens=5))


def test_an_end_token_ends_the_text_and_is_not_shown(shakespeare):
    lm = shakespeare
    generation = lm.generate("ROMEO:\n", max_tokens=12)
    whole = list(generation)
    third = whole[3].token
    lm.generation_config = {**lm.generation_config, "eos_token_id": [third]}
    try:
        steps = list(lm.generate("ROMEO:\n", max_tokens=12))
    finally:
        lm.generation_config = {k: v for k, v in lm.generation_config.items() if k != "eos_token_id"}
    first = [step.token for step in whole].index(third)
    assert [step.token for step in steps] == [step.token for step in whole[: first + 1]]
    assert steps[-1].finish == "end"
    assert "".join(step.text for step in steps) == lm.tokenizer.decode([step.token for step in whole[:first]])


def test_streamed_text_is_the_decoded_ids_and_stops_at_a_string_across_tokens(shakespeare):
    steps = list(shakespeare.generate("ROMEO:\n", max_tokens=40, stop_at_end=False))
    text = "".join(step.text for step in steps)
    assert text == shakespeare.tokenizer.decode([step.token for step in steps])
    stop = text[11:19]  # cut anywhere, whatever the tokens are
    generation = shakespeare.generate("ROMEO:\n", max_tokens=40, stop=[stop], stop_at_end=False)
    assert "".join(step.text for step in generation) == text[: text.index(stop)]
    assert generation.finish == "stop"


def test_the_same_seed_gives_the_same_text(shakespeare):
    def sampled(seed: int) -> str:
        return "".join(s.text for s in shakespeare.generate("KING:", max_tokens=30, temperature=0.9, seed=seed))

    assert sampled(5) == sampled(5)
    assert sampled(5) != sampled(6)


def test_statistics_count_what_happened(shakespeare):
    generation = shakespeare.generate("ROMEO:\n", max_tokens=9, stop_at_end=False)
    list(generation)
    stats = generation.stats
    assert (stats.prompt_tokens, stats.tokens) == (len(generation.prompt), 9)
    assert 0 < stats.first_token_seconds <= stats.seconds
    assert stats.cache_bytes > 0
    assert stats.peak_bytes >= stats.cache_bytes


@pytest.mark.parametrize("case", ["llama-longrope", "llama-dynamic"])
def test_a_text_is_read_again_once_at_most(case):
    lm = loaded(case)
    trained = lm.model.scaled_positions()[0].scaling.trained
    decoder = Decoder(lm.model, [7] * (trained - 4), Sampler(Sampling()), planned=trained + 8)
    contexts = [decoder.cache.context for _ in decoder]
    assert contexts == sorted(contexts)
    assert set(contexts) == {trained - 4, trained + 8}


def test_a_generation_config_that_is_not_followed_is_told(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "llama-gqa-tied", tmp_path / "model")
    for settings, told in (({"no_repeat_ngram_size": 3, "num_beams": 1}, 0), ({"num_beams": 3}, 1)):
        (folder / "generation_config.json").write_text(json.dumps(settings))
        notes = [note for note in mt.load(folder).notes if "generation_config.json asks for" in note]
        assert len(notes) == told and all("num_beams" in note for note in notes)
