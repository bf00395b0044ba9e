"""Scores of texts: against one pass in float64, however a text is cut into chunks and windows."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cli_models import error_line, invoke, speaking
from helpers import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

import mlx_tformer as mt
from mlx_tformer.errors import MlxTformerError, UsageError
from mlx_tformer.generation import compare, decode, perplexity
from mlx_tformer.generation.scoring import windows

IDS = [5, 11, 2, 7, 40, 3, 9, 1, 22, 8, 30, 4, 17]


@pytest.fixture(scope="module")
def lm() -> mt.LanguageModel:
    return mt.load(GOLDEN / "qwen3", dtype="float32")


def log_softmax(lm: mt.LanguageModel, ids: list[int]) -> np.ndarray:
    """What the model predicts, (L, V), from its logits in one pass."""
    logits = np.array(lm(mx.array([ids]))[0], np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def surprise(lm: mt.LanguageModel, ids: list[int], since: int = 1) -> list[float]:
    """The log-probabilities of the tokens of a text, from one on."""
    found = log_softmax(lm, ids)
    return [found[i - 1, ids[i]] for i in range(since, len(ids))]


@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_scores_are_those_of_one_pass(lm: mt.LanguageModel, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(decode, "CHUNK", chunk)
    found, other = lm.score([IDS, IDS[:1]], top=2)
    np.testing.assert_allclose(found.logprobs, surprise(lm, IDS), atol=1e-5)
    assert found.logprob == pytest.approx(sum(surprise(lm, IDS)), abs=1e-4)
    assert found.perplexity == pytest.approx(math.exp(-sum(surprise(lm, IDS)) / (len(IDS) - 1)), rel=1e-5)
    assert [token.token for token in found.tokens] == IDS
    best = np.argsort(-log_softmax(lm, IDS), axis=-1)[:, :2]
    assert [[index for index, _ in token.top] for token in found.tokens[1:]] == best[:-1].tolist()
    assert (other.logprobs, other.logprob) == ([], 0) and math.isnan(other.perplexity)


@pytest.mark.parametrize("form", [list, mx.array, lambda ids: [ids], lambda ids: [mx.array(ids)]])
def test_one_text_is_a_list_of_one(lm: mt.LanguageModel, form: Any) -> None:
    (found,) = lm.score(form(IDS))
    assert [token.token for token in found.tokens] == IDS


@pytest.mark.parametrize(
    ("text", "message"),
    [([[]], "it is empty"), ([[999]], "found id 999"), ([[1] * 129], "it has 129 tokens"), ("a", "no tokenizer")],
)
def test_what_cannot_be_scored_is_refused(lm: mt.LanguageModel, text: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lm.score(text)


@given(st.integers(2, 60), st.integers(2, 20), st.integers(1, 19))
def test_each_token_but_the_first_counts_in_one_window_with_enough_before_it(
    length: int, size: int, stride: int
) -> None:
    stride = min(stride, size - 1)
    counted = []
    for part in windows(length, size, stride):
        assert part.stop - part.start <= size
        counted += range(part.scored, part.stop)
        assert all(i - part.start >= size - stride or part.start == 0 for i in range(part.scored, part.stop))
    assert counted == list(range(1, length))


def test_perplexity_is_that_of_its_windows(lm: mt.LanguageModel) -> None:
    found = perplexity(lm, IDS, window=6, stride=4)
    # windows [0, 6), [4, 10), [8, 13)
    total = sum(surprise(lm, IDS[:6])) + sum(surprise(lm, IDS[4:10], 2)) + sum(surprise(lm, IDS[8:], 2))
    assert (found.tokens, found.bytes, found.bits_per_byte) == (len(IDS) - 1, None, None)
    assert found.logprob == pytest.approx(total, abs=1e-4)
    whole = perplexity(lm, IDS)
    assert whole.logprob == pytest.approx(sum(surprise(lm, IDS)), abs=1e-4)


def test_bits_per_byte_do_not_depend_on_the_tokens(shakespeare: mt.LanguageModel) -> None:
    text = "To be, or not to be: that is the question."
    found = perplexity(shakespeare, text)
    ids = list(shakespeare.tokens(text))
    assert found.bytes == len(text.encode()) - len(shakespeare.tokenizer.decode(ids[:1]).encode())
    assert found.bits_per_byte == pytest.approx(-sum(surprise(shakespeare, ids)) / math.log(2) / found.bytes, rel=1e-5)


def test_the_perplexity_of_a_known_model_on_a_known_text_is_the_known_one(
    smollm2_dense: mt.LanguageModel, hamlet: str
) -> None:
    ids = list(smollm2_dense.tokens(hamlet[6000:7500]))[:256]
    assert perplexity(smollm2_dense, ids).perplexity == pytest.approx(71.07, abs=0.1)


@pytest.mark.parametrize("settings", [{"window": 1}, {"window": 129}, {"stride": 0}, {"window": 4, "stride": 4}])
def test_windows_that_cannot_be_are_refused(lm: mt.LanguageModel, settings: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"^(window|stride): found"):
        perplexity(lm, IDS, **settings)


@pytest.mark.parametrize("chunk", [3, 512])
def test_a_comparison_is_that_of_one_pass(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(decode, "CHUNK", chunk)
    a, b = (mt.load(GOLDEN / case, dtype="float32") for case in ("llama-mha", "olmo2"))
    assert a.vocab == b.vocab
    p, q = log_softmax(a, IDS)[:-1], log_softmax(b, IDS)[:-1]
    kl = (np.exp(p) * (p - q)).sum(-1)
    found = compare(a, b, IDS)
    assert found.tokens == len(IDS) - 1
    assert found.mean_kl == pytest.approx(kl.mean(), rel=1e-4)
    assert found.largest_kl == pytest.approx(kl.max(), rel=1e-4)
    assert found.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert found.perplexity_b == pytest.approx(math.exp(-np.mean(surprise(b, IDS))), rel=1e-5)
    same = compare(a, a, IDS, window=6)
    assert (same.mean_kl, same.top1) == (0, 1)


def test_models_with_other_vocabularies_cannot_be_compared(lm: mt.LanguageModel, shakespeare: mt.LanguageModel) -> None:
    with pytest.raises(UsageError, match="cannot be compared"):
        compare(lm, shakespeare, IDS)


# --- the command line ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("models") / "speaking")


def text_file(folder: Path, text: bytes = b"a b c d e f g h i j") -> str:
    (folder / "text.txt").write_bytes(text)
    return str(folder / "text.txt")


def test_the_command_prints_what_the_library_finds(model: Path, tmp_path: Path) -> None:
    file = text_file(tmp_path)
    found = perplexity(mt.load(model), "a b c d e f g h i j", window=4)
    result = invoke("perplexity", str(model), file, "--window", "4", "--json")
    told = json.loads(result.stdout)
    assert told["perplexity"] == pytest.approx(found.perplexity) and told["bits_per_byte"] > 0
    assert (told["tokens"], told["window"], told["stride"]) == (9, 4, 2)
    assert f"perplexity: {found.perplexity:.4f}\n" in invoke("perplexity", str(model), file, "--window", "4").stdout
    piped = invoke("perplexity", str(model), "-", "--tokens", "5", "--json", text="a b c d e f")
    assert json.loads(piped.stdout)["tokens"] == 4


def test_a_quantization_has_a_price(model: Path, tmp_path: Path) -> None:
    mt.convert(model, tmp_path / "small", quantize=4, group_size=32)
    result = invoke("compare", str(model), str(tmp_path / "small"), text_file(tmp_path), "--json")
    told = json.loads(result.stdout)
    assert 0 < told["mean_kl"] < 0.5 and told["tokens"] == 9
    shown = invoke("compare", str(model), str(model), text_file(tmp_path)).stdout
    assert "mean KL divergence: 0 nats" in shown and "same most likely token: 100.0 %" in shown


@pytest.mark.parametrize(
    ("text", "options", "part"),
    [
        (b"a \xe9", [], "found byte 0xe9"),
        (b"a \x81", ["--encoding", "cp1252"], "text.txt"),
        (b"a", ["--encoding", "klingon"], "klingon"),
        (b"a", [], "found 1 tokens, expected two or more"),
        (b"a b", ["--window", "1"], "--window: found 1"),
        (b"a b", ["--tokens", "1"], "--tokens: found 1"),
    ],
)
def test_a_text_that_cannot_be_measured_is_one_line(
    model: Path, tmp_path: Path, text: bytes, options: list[str], part: str
) -> None:
    assert part in error_line(invoke("perplexity", str(model), text_file(tmp_path, text), *options), 2)


def test_a_file_that_is_not_there_is_named(model: Path) -> None:
    assert "nowhere.txt" in error_line(invoke("perplexity", str(model), "nowhere.txt"), 4)


def test_two_models_that_do_not_fit_together_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = mt.memory.weights_bytes(mt.load(model).model)
    monkeypatch.setattr(mt.memory, "check_fits", lambda *_, **__: None)
    monkeypatch.setattr(mt.memory, "of_device", lambda: mt.memory.Memory(4 * size, 2 * size - 1, "for this test"))
    line = error_line(invoke("compare", str(model), str(model), text_file(tmp_path)), 4)
    assert "both models need" in line and "for this test" in line
    assert issubclass(mt.memory.MemoryRefusal, MlxTformerError)
