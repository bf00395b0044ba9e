"""GGUF metadata and names become a Hugging Face config and Hugging Face names, or an error that names what is wrong."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import DIM, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, TOKENS, Gguf, Value, model, row, weights

from mlx_tformer.checkpoint.gguf.file import GgufFile
from mlx_tformer.checkpoint.gguf.rope import llama3_divisors, llama3_parameters
from mlx_tformer.errors import BadInput

SIZES = {
    "hidden_act": "silu",
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": HIDDEN,
    "max_position_embeddings": 128,
    "num_hidden_layers": LAYERS,
    "vocab_size": len(TOKENS),
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def opened(file: Gguf, tmp_path: Path) -> GgufFile:
    return GgufFile(file.write(tmp_path / "a.gguf"))


def refusal(file: Gguf, tmp_path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        opened(file, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'a.gguf'}: ") and "\n" not in message
    return message.removeprefix(f"{tmp_path / 'a.gguf'}: ")


def without(file: Gguf, *names: str) -> Gguf:
    file.rows = [r for r in file.rows if r.name not in names]
    return file


def with_rows(file: Gguf, **extra: np.ndarray) -> Gguf:
    file.rows += [row(name.replace("__", "."), values) for name, values in extra.items()]
    return file


def with_keys(file: Gguf, keys: dict[str, Any]) -> Gguf:
    file.metadata |= keys
    return file


@pytest.mark.parametrize(
    ("arch", "extra", "expected"),
    [
        ("llama", {}, {"attention_bias": False, "mlp_bias": False}),
        ("qwen2", {"biases": True}, {"use_sliding_window": False}),
        ("qwen3", {"norms": True}, {"use_sliding_window": False, "attention_bias": False}),
    ],
)
def test_the_config_is_that_of_hugging_face(
    arch: str, extra: dict[str, bool], expected: dict[str, object], tmp_path: Path
) -> None:
    file = opened(model(arch, tensors=weights(**extra)), tmp_path)
    assert file.config == {**SIZES, **expected, "model_type": arch}
    json.dumps(file.config)


def test_every_tensor_has_the_name_of_hugging_face(tmp_path: Path) -> None:
    values = weights(biases=True, norms=True)
    file = opened(model("qwen3", tensors=values), tmp_path)
    layer = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    layer += [f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    expected = {f"model.layers.{i}.{name}.weight" for i in range(LAYERS) for name in layer}
    expected |= {f"model.layers.{i}.self_attn.{x}_proj.bias" for i in range(LAYERS) for x in "qkv"}
    assert file.tensors.keys() == expected | {f"{x}.weight" for x in ("model.embed_tokens", "model.norm", "lm_head")}
    assert file.origin["model.layers.1.mlp.up_proj.weight"] == "blk.1.ffn_up.weight F32"


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_only_llama_files_have_their_rotary_rows_put_back(kind: str, tmp_path: Path) -> None:
    values = weights(biases=True)
    for arch in ("llama", "qwen2"):
        file = GgufFile(model(arch, kind, tensors=values).write(tmp_path / "a.gguf"), packed=False)
        for theirs, ours in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")):
            for leaf, tolerance in (("bias", 0.0), ("weight", 0.02 if kind == "Q8_0" else 0.0)):
                found = np.array(file.read(f"model.layers.1.self_attn.{ours}.{leaf}"))
                np.testing.assert_allclose(found, values[f"blk.1.{theirs}.{leaf}"], rtol=0, atol=tolerance)


def test_a_file_without_an_output_matrix_is_tied(tmp_path: Path) -> None:
    file = opened(model(tensors=weights(tied=True)), tmp_path)
    assert file.config["tie_word_embeddings"] is True and "lm_head.weight" not in file.tensors


def test_the_size_of_a_head_comes_from_key_length_then_rope_then_the_width(tmp_path: Path) -> None:
    assert opened(model(attention__key_length=HEAD_DIM), tmp_path).config["head_dim"] == HEAD_DIM
    assert opened(model(rope__dimension_count=None), tmp_path).config["head_dim"] == DIM // HEADS
    tall = {n: np.ones((HEADS * 8, DIM)) if "attn_q." in n or "attn_k." in n else x for n, x in weights().items()}
    changes: dict[str, Any] = {
        "attention__key_length": 8,
        "rope__dimension_count": None,
        "attention__head_count_kv": HEADS,
    }
    assert opened(model(tensors=tall, **changes), tmp_path).config["head_dim"] == 8


@pytest.mark.parametrize(
    ("changes", "where", "found"),
    [
        ({"block_count": None}, "llama.block_count", "nothing"),
        ({"block_count": 10**9}, "llama.block_count", "1000000000, expected 2"),
        ({"block_count": 1}, "llama.block_count", "1, expected 2"),
        ({"block_count": "2"}, "llama.block_count", "'2'"),
        ({"block_count": [2]}, "llama.block_count", "an array of 1"),
        ({"embedding_length": 0}, "llama.embedding_length", "0"),
        ({"attention.head_count": 0}, "llama.attention.head_count", "0"),
        ({"attention.head_count": True}, "llama.attention.head_count", "True"),
        ({"attention.head_count": 3, "rope.dimension_count": None}, "llama.attention.head_count", "3"),
        ({"attention.head_count": 8}, "blk.0.attn_q.weight", "shape (64, 64), expected 128 rows"),
        ({"attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv", "an array of 2"),
        ({"attention.key_length": 8}, "llama.rope.dimension_count", "16, expected 8"),
        ({"attention.value_length": 8}, "llama.attention.value_length", "8, expected 16"),
        ({"rope.dimension_count": 15}, "llama.attention.key_length", "nothing, expected an even number"),
        ({"feed_forward_length": [96, 96]}, "llama.feed_forward_length", "an array of 2"),
        ({"context_length": None}, "llama.context_length", "nothing"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "llama.attention.layer_norm_rms_epsilon", "0.0"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "llama.attention.layer_norm_rms_epsilon", "nan"),
        ({"rope.freq_base": math.inf}, "llama.rope.freq_base", "inf"),
        ({"rope.freq_base": 0.5}, "llama.rope.freq_base", "0.5"),
        ({"logit_scale": 0.5}, "llama.logit_scale", "0.5, expected no such key"),
        ({"attention.sliding_window": 4096}, "llama.attention.sliding_window", "4096, expected no such key"),
        ({"leading_dense_block_count": 3}, "llama.leading_dense_block_count", "3, expected no such key"),
        ({"attention.causal": False}, "llama.attention.causal", "False, expected True"),
    ],
)
def test_a_key_that_is_missing_wrong_or_not_understood_is_named(
    changes: dict[str, Any], where: str, found: str, tmp_path: Path
) -> None:
    message = refusal(model(**{key.replace(".", "__"): x for key, x in changes.items()}), tmp_path)
    assert message.startswith(f"{where}: found {found}"), message


def test_all_keys_that_are_not_understood_are_listed(tmp_path: Path) -> None:
    message = refusal(model("qwen2", expert_count=8, expert_used_count=2), tmp_path)
    assert message.startswith("qwen2.expert_count: found 8, expected 0")
    assert "could change the results (and qwen2.expert_used_count)" in message


def test_keys_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    neutral: dict[str, Any] = {
        "expert_count": 0,
        "attention__causal": True,
        "vocab_size": 9,
        "rope__scaling__finetuned": True,
    }
    keys = {"general.file_type": 3, "quantize.imatrix.entries_count": 7, "someone.note": "hello"}
    assert opened(with_keys(model(**neutral), keys), tmp_path).config["hidden_size"] == DIM


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture: found 'mamba', expected one of gemma, gemma2, gemma3",
        ),
        ({"general.architecture": 7}, "general.architecture: found 7, expected a string"),
        ({"general.type": "adapter"}, "general.type: found 'adapter', expected model"),
        ({"split.count": Value(2, 3)}, "split.count: found 3, expected 1: join the files first"),
        (
            {"tokenizer.ggml.eos_token_id": len(TOKENS)},
            "tokenizer.ggml.eos_token_id: found 12, expected a token below 12",
        ),
        ({"tokenizer.ggml.bos_token_id": Value(5, -1)}, "tokenizer.ggml.bos_token_id: found -1"),
        ({"tokenizer.ggml.eot_token_id": 2**31}, "tokenizer.ggml.eot_token_id: found 2147483648"),
        ({"tokenizer.ggml.tokens": [*TOKENS, "more"]}, "tokenizer.ggml.tokens: found 13 tokens, expected at most 12"),
    ],
)
def test_what_is_no_whole_model_of_a_known_architecture_is_refused(
    keys: dict[str, Any], found: str, tmp_path: Path
) -> None:
    assert refusal(with_keys(model(), keys), tmp_path).startswith(found)


def test_all_unknown_tensors_are_listed(tmp_path: Path) -> None:
    extra = {"blk__0__attn_sinks__weight": np.ones(4), "blk__00__attn_q__weight": np.ones(4), "v__mm": np.ones(4)}
    message = refusal(with_rows(model(), **extra), tmp_path)
    assert message == "tensors that llama does not have: blk.0.attn_sinks.weight, blk.00.attn_q.weight, v.mm"
    assert "blk.0.attn_q_norm.weight" in refusal(model(tensors=weights(norms=True)), tmp_path)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_up.weight"])
def test_a_missing_embedding_is_named_here_and_other_tensors_where_they_are_used(name: str, tmp_path: Path) -> None:
    file = without(model(), name)
    if name.startswith("blk"):
        assert "model.layers.1.mlp.up_proj.weight" not in opened(file, tmp_path).tensors
    else:
        assert refusal(file, tmp_path).startswith(f"{name}: found no such tensor")


def test_a_gap_in_the_layers_is_refused(tmp_path: Path) -> None:
    renamed = {name.replace("blk.1.", "blk.2."): x for name, x in weights().items()}
    assert refusal(model(tensors=renamed), tmp_path).startswith("llama.block_count: found 2")


def test_every_id_that_ends_a_text_is_in_the_generation_config(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.padding_token_id": 3}
    file = opened(with_keys(model(), keys), tmp_path)
    assert file.generation_config == {"bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": 3}
    assert opened(model(), tmp_path).generation_config == {"bos_token_id": 0, "eos_token_id": 1}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
AMPLITUDE = 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"type": "none", "factor": 8.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 1.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"type": "yarn"}, YARN),
        ({"type": "yarn", "attn_factor": 1.0, "yarn_ext_factor": 1.0}, YARN),
        ({"type": "yarn", "yarn_attn_factor": 1.5}, {**YARN, "attention_factor": 1.5}),
        ({"type": "yarn", "attn_factor": 0.5}, {**YARN, "attention_factor": AMPLITUDE / 2}),
        (
            {"type": "yarn", "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_rope_scaling_is_put_in_the_words_of_transformers(
    keys: dict[str, Any], expected: dict[str, object], tmp_path: Path
) -> None:
    if keys.get("type") == "yarn":
        keys = {"factor": 4.0, "original_context_length": 32, **keys}
    file = opened(model(**{f"rope__scaling__{key}": x for key, x in keys.items()}), tmp_path)
    assert file.config["rope_parameters"] == {**expected, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"type": "ntk"}, "llama.rope.scaling.type: found 'ntk', expected one of none, linear, yarn, longrope"),
        ({"type": "longrope"}, "rope_factors_long.weight: found no such tensor"),
        ({"factor": -2.0}, "llama.rope.scaling.factor: found -2.0"),
        ({"factor": 0.0}, "llama.rope.scaling.factor: found 0.0"),
        ({"attn_factor": 1.5}, "llama.rope.scaling.attn_factor: found 1.5, expected 1 without yarn or longrope"),
        ({"type": "yarn", "yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor: found 0.5, expected 1"),
        ({"type": "yarn", "yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier: found"),
        ({"alpha": 2.0}, "llama.rope.scaling.alpha: found 2.0, expected no such key"),
    ],
)
def test_a_rope_scaling_that_is_not_understood_is_refused(keys: dict[str, Any], found: str, tmp_path: Path) -> None:
    message = refusal(model(**{f"rope__scaling__{key}": x for key, x in keys.items()}), tmp_path)
    assert message.startswith(found), message


def test_longrope_comes_from_two_tensors(tmp_path: Path) -> None:
    long, short = np.linspace(1, 9, HEAD_DIM // 2), np.linspace(1, 2, HEAD_DIM // 2)
    scaling: dict[str, Any] = {"rope__scaling__original_context_length": 32, "rope__scaling__attn_factor": 1.25}
    both = {"rope_factors_long__weight": long, "rope_factors_short__weight": short}
    found = opened(with_rows(model(**scaling), **both), tmp_path).config["rope_parameters"]
    assert np.float32(found.pop("long_factor")).tolist() == np.float32(long).tolist()
    assert np.float32(found.pop("short_factor")).tolist() == np.float32(short).tolist()
    rest = {"original_max_position_embeddings": 32, "attention_factor": 1.25, "rope_theta": 10000.0}
    assert found == {"rope_type": "longrope", **rest}
    one = with_rows(model(**scaling), rope_factors_long__weight=long)
    assert refusal(one, tmp_path).startswith("rope_factors_short.weight: found no such tensor")
    assert refusal(with_rows(model(), **both), tmp_path).startswith("llama.rope.scaling.original_context_length: found")
    assert refusal(with_rows(model(rope__scaling__factor=2.0), **both), tmp_path).startswith(
        "llama.rope.scaling.factor"
    )


def converter_divisors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """Llama 3.1's divisors in float32, dimension by dimension with three cases, as they are published."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi / float(np.float32(1) / np.float32(theta) ** np.float32(i / head_dim))
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "low", "high", "original"),
    [
        (128, 500000.0, 8.0, 1.0, 4.0, 8192),  # Llama 3.1
        (64, 500000.0, 32.0, 1.0, 4.0, 8192),  # Llama 3.2 1B
        (128, 500000.0, 16.0, 1.0, 1.5, 4096),
        (16, 10000.0, 8.0, 1.0, 4.0, 64),
        (8, 500000.0, 8.0, 1.0, 4.0, 16),
        (6, 500000.0, 4.0, 1.0, 4.0, 100),  # nothing between the limits
    ],
)
def test_the_parameters_of_llama3_are_recovered_from_its_frequencies(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> None:
    divisors = converter_divisors(head_dim, theta, factor, low, high, original)
    found = llama3_parameters(divisors.astype(np.float64), theta)
    assert found is not None and found["rope_type"] == "llama3"
    again = converter_divisors(
        head_dim, theta, found["factor"], found["low_freq_factor"], found["high_freq_factor"],
        found["original_max_position_embeddings"],
    )  # fmt: skip
    np.testing.assert_allclose(again, divisors, rtol=2e-6)
    if np.sum((divisors > 1) & (divisors < factor)) > 0 and high == 4:
        expected = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        assert found == {"rope_type": "llama3", **expected, "original_max_position_embeddings": original}


def test_our_divisors_are_the_published_ones() -> None:
    ours = llama3_divisors(128, 500000.0, factor=8.0, low=1.0, high=4.0, original=8192)
    np.testing.assert_allclose(ours, converter_divisors(128, 500000.0, 8.0, 1.0, 4.0, 8192), rtol=1e-6)


def test_frequencies_of_no_known_formula_are_refused(tmp_path: Path) -> None:
    good = converter_divisors(HEAD_DIM, 10000.0, 8.0, 1.0, 4.0, 64)
    first, last, steep = good.copy(), good.copy(), np.linspace(1, 40, HEAD_DIM // 2)
    first[0] *= 1.001
    last[-1] *= 0.999
    for values in (first, last, steep, np.full(HEAD_DIM // 2, 0.5), np.full(HEAD_DIM // 2, 2.0), good[::-1]):
        message = refusal(with_rows(model(), rope_freqs__weight=values), tmp_path)
        assert message.startswith("rope_freqs.weight: found frequencies of no known formula"), message
    for values in (good[:-1], -good, good * np.nan, good.reshape(2, -1)):
        assert refusal(with_rows(model(), rope_freqs__weight=values), tmp_path).startswith("rope_freqs.weight: found")
    found = opened(with_rows(model(), rope_freqs__weight=good), tmp_path).config["rope_parameters"]
    assert found["original_max_position_embeddings"] == 64 and found["rope_type"] == "llama3"
    plain = opened(with_rows(model(), rope_freqs__weight=np.ones(HEAD_DIM // 2)), tmp_path)
    assert plain.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    twice = with_rows(model(rope__scaling__factor=2.0), rope_freqs__weight=good)
    assert "a second scaling" in refusal(twice, tmp_path)
