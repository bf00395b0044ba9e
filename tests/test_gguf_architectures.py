"""GGUF files of every architecture give the logits that transformers gives from the checkpoints they were made of."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf_builder import Gguf, Row, Value, row
from gguf_converter import converted
from helpers import config_of, expected, gap, ids_of, leaves, limit, load

from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.gguf.architectures import ARCHITECTURES
from mlx_tformer.checkpoint.gguf.blocks import dequantize
from mlx_tformer.checkpoint.gguf.file import GgufFile
from mlx_tformer.errors import BadInput

CASES = [
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3-linear",
    "mixtral",
    "phi3",
    "phi3-longrope",
    "qwen2_moe",
    "qwen3_moe",
    "starcoder2",
]
UNSAID = {"_sliding_window_pattern", "sliding_window_pattern", "attn_logit_softcapping", "query_pre_attn_scalar"}
"""Settings of Gemma 3 that say nothing more, are not used, or are not in files."""


def path(file: Gguf, folder: Path) -> Path:
    return file.write(folder / "a.gguf")


def opened(file: Gguf, folder: Path) -> GgufFile:
    return GgufFile(path(file, folder))


def refusal(file: Gguf, folder: Path) -> str:
    with pytest.raises(BadInput) as caught:
        load(path(file, folder))
    return str(caught.value)


def error(file: Gguf, case: str, folder: Path) -> float:
    """The largest error of a file's logits against transformers'."""
    return gap(load(path(file, folder))(ids_of(case)), expected(case)["logits"])


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    assert error(converted(case), case, tmp_path) < min(5e-5, limit(expected(case)["logits"]))


def test_one_tensor_for_each_expert_gives_the_same_as_stacked_experts(tmp_path: Path) -> None:
    apart, stacked = (converted("mixtral", one_by_one=x) for x in (True, False))
    assert len(apart.rows) > len(stacked.rows)
    one, other = (leaves(load(path(file, tmp_path))) for file in (apart, stacked))
    assert one.keys() == other.keys()
    assert all(mx.array_equal(one[name], other[name]).item() for name in one)
    assert error(apart, "mixtral", tmp_path) < limit(expected("mixtral")["logits"])


@pytest.mark.parametrize("case", CASES)
def test_weights_come_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Gemma's norms too, from which 1 is subtracted; but for the queries' that the converter here has to scale."""
    scaled = () if config_of(case).get("query_pre_attn_scalar") is None else ("q_norm.weight", "qkv.weight")
    golden = leaves(load(Path(__file__).parent / "golden" / case))
    found = leaves(load(path(converted(case), tmp_path)))
    assert found.keys() == golden.keys()
    exact = [name for name in golden if not name.endswith(scaled)] if scaled else list(golden)
    assert all(mx.array_equal(found[name], golden[name]).item() for name in exact)


def test_a_norm_that_was_stored_with_1_added_loses_it_again_exactly(tmp_path: Path) -> None:
    file = converted("gemma")
    values = np.array([-0.9921875, -0.5, -(2.0**-10), 0, 2.0**-23, 0.3, 0.99, 1, 1.5, 7.25, 100], np.float32)
    norm = np.resize(values, 48)
    file.rows = [row(r.name, norm + np.float32(1)) if r.name == "output_norm.weight" else r for r in file.rows]
    found = opened(file, tmp_path).read("model.norm.weight")
    assert found.dtype == mx.float32
    # 0.3 + 1 was rounded by whoever added; what counts is the sum, which is as it was.
    assert np.array_equal(np.array(found), (norm + np.float32(1)) - np.float32(1))
    assert np.array_equal(np.array(found) + np.float32(1), norm + np.float32(1))
    rounded = (norm + np.float32(1)).astype(np.float64) - 1 != norm
    assert np.array_equal(np.array(found)[~rounded], norm[~rounded])


@pytest.mark.parametrize("case", CASES)
def test_the_config_says_what_the_checkpoint_said(case: str, tmp_path: Path) -> None:
    config, found = config_of(case), opened(converted(case), tmp_path).config
    known = {key: value for key, value in config.items() if key in found and key not in UNSAID and value is not None}
    assert len(known) > 10
    for key, value in known.items():
        if key == "rope_parameters":
            assert_close(found[key], value)
        elif key == "sliding_window" and case in ("qwen2_moe", "starcoder2"):
            assert not value  # a file cannot say so
        else:
            assert found[key] == value, key


def assert_close(found: Any, wanted: Any) -> None:
    """Equal, as far as a float32 can be; what is left out counts as the usual."""
    usual = {"partial_rotary_factor": 1.0}
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_close(found[key], value)
        elif isinstance(value, str):
            assert found[key] == value
        else:
            np.testing.assert_allclose(found.get(key, usual.get(key)), value, rtol=1e-7, err_msg=key)


# --- what files leave out ---


def test_gemma_3_takes_the_usual_pattern_and_theta_where_a_file_has_none(tmp_path: Path) -> None:
    """As Google's own files are, and those of 2025."""
    old = converted("gemma3", rope__freq_base_swa=None, attention__sliding_window_pattern=None)
    assert opened(old, tmp_path).config == opened(converted("gemma3"), tmp_path).config
    linear: dict[str, Any] = {"rope__freq_base_swa": None, "attention__sliding_window_pattern": None}
    config = opened(converted("gemma3-linear", **linear), tmp_path).config
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["layer_types"] == ["sliding_attention"] * 3


def test_a_pattern_may_be_a_number_and_no_window_is_none(tmp_path: Path) -> None:
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    for pattern, text in ((1, "ffffff"), (2, "sfsfsf"), (4, "sssfss"), (9, "ssssss")):
        config = opened(converted("gemma3", attention__sliding_window_pattern=pattern), tmp_path).config
        assert config["layer_types"] == [kinds[x] for x in text]
    config = opened(
        converted("gemma3", attention__sliding_window=None, attention__sliding_window_pattern=None), tmp_path
    ).config
    assert set(config["layer_types"]) == {"full_attention"} and "sliding_window" not in config


def test_gemma_2_takes_its_usual_window_and_caps_where_a_file_has_none(tmp_path: Path) -> None:
    bare: dict[str, Any] = {
        "attention__sliding_window": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    config = opened(converted("gemma2", **bare), tmp_path).config
    assert (config["sliding_window"], config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (
        4096,
        50,
        30,
    )
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(("case", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_only_the_largest_gemma_divides_scores_by_another_width(case: str, layers: int, tmp_path: Path) -> None:
    assert opened(converted(case), tmp_path).config["query_pre_attn_scalar"] == config_of(case)["head_dim"]
    large = converted(case, block_count=layers, attention__sliding_window_pattern=None)
    last = config_of(case)["num_hidden_layers"] - 1
    copies = [r for r in large.rows if str(r.name).startswith(f"blk.{last}.")]
    for layer in range(last + 1, layers):
        large.rows += [Row(str(r.name).replace(f".{last}.", f".{layer}.", 1), r.dims, r.kind, r.data) for r in copies]
    assert opened(large, tmp_path).config["query_pre_attn_scalar"] == 48 // 6


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"attention__sliding_window": 7}, 7),
        ({"attention__sliding_window": None}, None),
        ({"attention__sliding_window": None, "context_length": 4096}, 2047),
        ({"context_length": 4096}, None),
    ],
)
def test_phi_3_has_a_window_where_a_file_says_so_or_is_older_than_the_key(
    changes: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    assert opened(converted("phi3", **changes), tmp_path).config["sliding_window"] == window


def test_the_share_that_turns_survives_its_division(tmp_path: Path) -> None:
    """1 / 49 * 49 is less than 1: for every size, cutting off after the multiplication has to give the number back."""
    file = converted("phi3", attention__key_length=98, rope__dimension_count=2)
    config = opened(file, tmp_path).config
    assert config["head_dim"] == 98 and int(98 * config["rope_parameters"]["partial_rotary_factor"]) == 2
    for turning in range(2, 98, 2):
        file = converted("phi3", attention__key_length=98, rope__dimension_count=turning)
        assert int(98 * opened(file, tmp_path).config["rope_parameters"]["partial_rotary_factor"]) == turning


def test_qwens_experts_have_the_sizes_and_the_norm_of_the_file_or_the_usual_ones(tmp_path: Path) -> None:
    bare: dict[str, Any] = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    config = opened(converted("qwen2_moe", **bare), tmp_path).config
    assert (config["moe_intermediate_size"], config["shared_expert_intermediate_size"]) == (28, 56)
    assert config["norm_topk_prob"] is False
    assert opened(converted("qwen2_moe", expert_weights_norm=True), tmp_path).config["norm_topk_prob"] is True
    assert opened(converted("qwen3_moe"), tmp_path).config["norm_topk_prob"] is True


# --- what is refused ---


@pytest.mark.parametrize(
    ("case", "changes", "found"),
    [
        ("gemma3", {"attention__sliding_window_pattern": Value(9, [1, 0], 4)}, "found an array of 2"),
        ("gemma3", {"attention__sliding_window_pattern": Value(9, [1] * 6, 4)}, "expected truth values"),
        ("gemma3", {"attention__sliding_window_pattern": 0}, "found 0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "expected no such key"),
        ("gemma2", {"rope__freq_base_swa": 500.0}, "expected no such key"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "expected a number above 0"),
        ("phi3", {"rope__dimension_count": 7}, "expected an even number up to 8"),
        ("phi3", {"rope__dimension_count": 10}, "expected an even number up to 8"),
        ("phi3", {"attention__value_length": 4}, "expected 8"),
        ("phi3", {"attention__head_count": 5}, "expected a divisor of embedding_length (48)"),
        ("phi3", {"rope__scaling__attn_factor": 1.2}, "expected 1 without yarn or longrope"),
        ("mixtral", {"expert_used_count": 5}, "found 5, expected at most 4"),
        ("mixtral", {"expert_used_count": None}, "expert_used_count: found nothing"),
        ("mixtral", {"expert_count": 3}, "expected (3, "),
        ("mixtral", {"expert_gating_func": 2}, "found 2, expected 1"),
        ("mixtral", {"expert_weights_scale": 2.5}, "found 2.5, expected 1.0"),
        ("mixtral", {"expert_count": None, "expert_used_count": None}, "tensors that llama does not have"),
        ("qwen3_moe", {"expert_count": 9}, "expected (9, "),
        ("qwen2_moe", {"expert_shared_feed_forward_length": 55}, "expected (55, 48)"),
        ("starcoder2", {"attention__layer_norm_epsilon": None}, "layer_norm_epsilon: found nothing"),
    ],
)
def test_what_does_not_go_together_is_refused(case: str, changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    message = refusal(converted(case, **changes), tmp_path)
    assert found in message and "\n" not in message, message


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    file = converted("mixtral", one_by_one=True)
    file.rows = [r for r in file.rows if r.name != "blk.1.ffn_down.2.weight"]
    assert "model.layers.1.block_sparse_moe.experts.2.w2.weight" in refusal(file, tmp_path)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate.00.weight", "blk.0.ffn_gate.{}.weight", "blk.{}.attn_q.weight"])
def test_a_name_that_only_looks_like_one_is_unknown(name: str, tmp_path: Path) -> None:
    file = converted("mixtral", one_by_one=True)
    file.rows.append(row(name, np.ones((40, 48), np.float32)))
    assert f"tensors that mixtral does not have: {name}" in refusal(file, tmp_path)


# --- packed experts ---

PACKED = ("Q4_0", "Q4_1", "Q8_0")


def mixture(kinds: dict[str, str]) -> tuple[Gguf, dict[str, np.ndarray]]:
    """A small Mixtral whose experts are of these types, and what these hold."""
    rng, file = np.random.default_rng(3), converted("mixtral", embedding_length=64, feed_forward_length=96)
    shapes = {"gate": (4, 96, 64), "up": (4, 96, 64), "down": (4, 64, 96)}
    held = {}
    file.rows = [widened(r, rng) for r in file.rows if "_exps" not in str(r.name)]
    for layer in range(3):
        for x, shape in shapes.items():
            made = row(f"blk.{layer}.ffn_{x}_exps.weight", rng.standard_normal(shape), kinds[x])
            raw = np.frombuffer(made.data, np.uint8).reshape(shape[0] * shape[1], -1)
            plain = raw.view("<f4") if kinds[x] == "F32" else dequantize(raw, kinds[x])
            held[f"{x}.{layer}"] = plain.reshape(shape)
            file.rows.append(made)
    file.metadata["llama.rope.dimension_count"] = 16
    file.metadata["llama.attention.head_count"], file.metadata["llama.attention.head_count_kv"] = 4, 2
    return file, held


def widened(r: Row, rng: np.random.Generator) -> Row:
    """A row of the case for 64 features, with other numbers."""
    wider = {"attn_q.": (64, 64), "attn_k.": (32, 64), "attn_v.": (32, 64), "attn_output.": (64, 64)}
    shape = next((wider[x] for x in wider if x in str(r.name)), (*r.dims[::-1][:-1], 64))
    return row(str(r.name), 0.3 * rng.standard_normal(shape))


@pytest.mark.parametrize("kind", PACKED)
def test_stacked_experts_stay_packed_without_a_change_of_a_value(kind: str, tmp_path: Path) -> None:
    file, held = mixture(dict.fromkeys(("gate", "up", "down"), kind))
    model = load(path(file, tmp_path))
    for layer in range(3):
        experts = model.decoder.layers[layer].mlp.op.experts
        both = np.concatenate([held[f"gate.{layer}"], held[f"up.{layer}"]], axis=1)
        for module, wanted in ((experts.gate_up, both), (experts.down, held[f"down.{layer}"])):
            assert module.weight.dtype == mx.uint32
            how = {"bits": module.bits, "group_size": module.group_size}
            values = mx.dequantize(module.weight, module.scales, module.biases, **how)
            assert np.array_equal(np.array(values), wanted)


def test_gate_and_up_of_different_types_become_plain_numbers(tmp_path: Path) -> None:
    file, held = mixture({"gate": "Q4_0", "up": "Q8_0", "down": "F32"})
    experts = load(path(file, tmp_path)).decoder.layers[1].mlp.op.experts
    assert np.array_equal(np.array(experts.gate_up.weight), np.concatenate([held["gate.1"], held["up.1"]], axis=1))
    assert np.array_equal(np.array(experts.down.weight), held["down.1"])


def test_packed_experts_survive_a_conversion(tmp_path: Path) -> None:
    file, _ = mixture(dict.fromkeys(("gate", "up", "down"), "Q8_0"))
    ids = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    before = load(path(file, tmp_path))(ids)
    done = convert(tmp_path / "a.gguf", tmp_path / "ours", dtype="float32")
    assert mx.array_equal(load(done.path)(ids), before).item()


def test_every_architecture_is_held_against_transformers() -> None:
    """Llama, Qwen 2 and Qwen 3 by SmolLM2 and by the tests of the config."""
    known = {config_of(case)["model_type"] for case in CASES} | {"llama", "qwen2", "qwen3"}
    assert {arch.model_type for arch in ARCHITECTURES.values()} <= known


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_rows_at_a_time_are_the_rows_of_the_whole(name: str, tmp_path: Path) -> None:
    file = GgufFile(converted(name).write(tmp_path / "model.gguf"))
    for tensor, described in file.tensors.items():
        rows = list(file.blocks(tensor, 3))
        assert all(part.shape[0] <= 3 for part in rows)
        assert mx.concatenate(rows).shape == described.shape
        assert mx.array_equal(mx.concatenate(rows), file.read(tensor)).item()
