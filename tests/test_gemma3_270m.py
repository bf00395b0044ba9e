"""A real Gemma 3, the 270M base model in Q4_K_M, held against what transformers computes from the same file."""

from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlx_tformer as mt
from mlx_tformer.checkpoint.gguf.file import GgufFile

PROMPT = [2, 818, 5279, 529, 7001, 563]  # <bos>, "The capital of France is"
CONTINUATION = [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 7488]
BEST = {506: 19.0915, 496: 18.5476, 9079: 18.2686, 886: 18.1130, 3224: 17.7839}
TEXTS = {
    "héllo wörld 👩\u200d👩\u200d👧 naïve — 中文 \x00 end": [
        *(2, 236754, 7869, 844, 515, 4010, 671, 236743, 243767, 237243, 243767, 237243, 244814),
        *(120362, 2192, 17346, 237364, 236743, 238, 1345),
    ],
    "def f(x):\n    return x**2\n\n\n<table>  <b>": [
        *(2, 2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 1018, 236778, 109, 168, 138, 200),
    ],
}
"""Ids as the sentencepiece package gives them from the file's vocabulary, behind the <bos>."""
LONG = [2, *(1000 + 7919 * i % 200000 for i in range(599))]
"""More tokens than the 512 that most layers see."""
LONG_BEST = {236743: -11.8851, 568: -11.9769, 236765: -12.0844, 616: -12.9422}


def test_the_greedy_continuation_is_the_known_one(gemma3: mt.LanguageModel) -> None:
    steps = gemma3.generate(PROMPT, max_tokens=len(CONTINUATION), stop_at_end=False)
    assert [step.token for step in steps] == CONTINUATION


def test_the_best_logits_are_those_of_transformers(gemma3: mt.LanguageModel) -> None:
    logits = np.array(gemma3(mx.array([PROMPT]))[0, -1])
    assert np.argsort(-logits)[: len(BEST)].tolist() == list(BEST)
    np.testing.assert_allclose(logits[list(BEST)], list(BEST.values()), atol=2e-4)


def test_the_best_logits_behind_more_than_a_window_are_those_of_transformers(gemma3: mt.LanguageModel) -> None:
    """In one pass, and in chunks and steps with a cache."""
    model, cache = gemma3.model, gemma3.new_cache()
    whole = model.hidden(mx.array([LONG]))[:, -1]
    parts = [model.hidden(mx.array([LONG[a:b]]), cache)[:, -1] for a, b in pairwise([0, 100, 515, 598, 599, 600])]
    for hidden in (whole, parts[-1]):
        logits = np.array(model.logits(hidden))[0]
        assert np.argsort(-logits)[: len(LONG_BEST)].tolist() == list(LONG_BEST)
        np.testing.assert_allclose(logits[list(LONG_BEST)], list(LONG_BEST.values()), atol=2e-3)


def test_text_becomes_the_known_ids_and_comes_back(gemma3: mt.LanguageModel) -> None:
    assert list(gemma3.tokens("The capital of France is")) == PROMPT
    tokenizer = gemma3.tokenizer
    assert tokenizer is not None
    for text, ids in TEXTS.items():
        assert list(gemma3.tokens(text)) == ids
        assert tokenizer.decode(ids[1:]) == text


def test_the_config_is_that_of_the_model(gemma3_gguf: Path) -> None:
    config = GgufFile(gemma3_gguf).config
    layers = [*["sliding_attention"] * 5, "full_attention"] * 3
    known = {"model_type": "gemma3_text", "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512}
    assert {key: config[key] for key in known} == known
    assert config["layer_types"] == layers and config["tie_word_embeddings"] is True
    thetas = {kind: table["rope_theta"] for kind, table in config["rope_parameters"].items()}
    assert thetas == {"full_attention": 1000000.0, "sliding_attention": 10000.0}
    assert config["eos_token_id"] == 1 and config["bos_token_id"] == 2


def test_only_what_is_exact_stays_packed(gemma3_gguf: Path) -> None:
    """The embedding and a few more are Q8_0; the types with blocks of 256 become float32."""
    file = GgufFile(gemma3_gguf)
    kinds = {module: file.origin[f"{module}.weight"].split()[1] for module in file.quantization}
    assert kinds["model.embed_tokens"] == "Q8_0" and set(kinds.values()) <= {"Q4_0", "Q4_1", "Q8_0"}
    assert file.tensors["model.layers.0.mlp.down_proj.weight"].dtype == mx.float32
