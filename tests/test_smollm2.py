"""A real model, SmolLM2-135M-Instruct from a package, held against answers that are known of it."""

from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_tformer as mt
from mlx_tformer.checkpoint.convert import convert

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
CONTINUATION = [
    *(7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33),
    *(40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33),
]
BEST = {7042: 17.371, 260: 14.889, 4528: 13.245}
TEXT = "héllo wörld 👩\u200d👩\u200d👧 naïve — 中文 \x00 end"
TEXT_IDS = [
    *(88, 2756, 31394, 267, 29989, 400, 15107, 235, 119, 321, 231, 10813, 235, 119, 321, 231),
    *(10813, 235, 117, 15486, 46494, 1841, 216, 28589, 29184, 216, 190, 1112),
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def greedy(lm: mt.LanguageModel, ids: list[int], count: int) -> list[int]:
    return [step.token for step in lm.generate(ids, max_tokens=count, stop_at_end=False)]


def test_the_greedy_continuation_is_the_known_one(smollm2):
    assert greedy(smollm2, PROMPT, len(CONTINUATION)) == CONTINUATION


def test_the_best_logits_are_the_known_ones(smollm2):
    logits = np.array(smollm2(mx.array([PROMPT]))[0, -1])
    assert np.argsort(-logits)[:3].tolist() == list(BEST)
    np.testing.assert_allclose(logits[list(BEST)], list(BEST.values()), atol=0.01)


def test_text_becomes_the_known_ids_and_comes_back(smollm2):
    assert list(smollm2.tokens("The capital of France is")) == PROMPT
    assert list(smollm2.tokens(TEXT)) == TEXT_IDS
    assert smollm2.tokenizer.decode(TEXT_IDS) == TEXT


def test_the_chat_template_gives_37_ids_and_the_known_answer(smollm2):
    prompt = smollm2.chat(QUESTION)
    assert len(prompt) == 37
    steps = list(smollm2.generate(prompt, max_tokens=40))
    assert "".join(step.text for step in steps) == "The capital of France is Paris."
    assert smollm2.tokenizer.token_text(steps[-1].token) == "<|im_end|>"
    assert steps[-1].finish == "end"


def test_chunks_and_steps_equal_one_pass(smollm2):
    ids = smollm2.chat(QUESTION).array
    whole = smollm2(ids)
    cache = smollm2.new_cache()
    cuts = [0, 1, 20, 33, *range(34, ids.shape[1] + 1)]
    parts = [smollm2(ids[:, a:b], cache) for a, b in pairwise(cuts)]
    gap = mx.abs(mx.concatenate(parts, axis=1) - whole).max().item()
    assert gap < 1e-4 * whole.std().item()  # logits reach 30, and float32 has seven digits


@pytest.fixture(scope="module")
def converted(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(smollm2_gguf, tmp_path_factory.mktemp("weights") / "smollm2").path


def test_the_conversion_gives_the_same_logits_bit_for_bit(smollm2, converted):
    again = mt.load(converted, dtype="float32")
    assert mx.array_equal(again(mx.array([PROMPT])), smollm2(mx.array([PROMPT]))).item()
    assert greedy(again, PROMPT, len(CONTINUATION)) == CONTINUATION
    assert list(again.chat(QUESTION)) == list(smollm2.chat(QUESTION))


def test_a_hugging_face_folder_of_it_gives_the_same(smollm2, converted, tmp_path):
    folder = mt.export(converted, tmp_path / "plain", dtype="float32").path
    plain = mt.load(folder, dtype="float32")
    assert not (folder / "conversion.json").exists()
    logits = np.array(plain(mx.array([PROMPT]))[0, -1])
    np.testing.assert_allclose(logits[list(BEST)], list(BEST.values()), atol=0.01)
    assert greedy(plain, PROMPT, len(CONTINUATION)) == CONTINUATION
    assert list(plain.chat(QUESTION)) == list(smollm2.chat(QUESTION))


def test_converting_the_conversion_changes_nothing(converted, tmp_path):
    again = convert(converted, tmp_path / "again").path
    names = sorted(file.name for file in converted.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    assert all((converted / name).read_bytes() == (again / name).read_bytes() for name in names)
