"""Quantizing: MLX's own numbers, what cannot be packed listed, what is packed already kept."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    Packed,
    bits,
    case_weights,
    files_in,
    make_folder,
    ours,
    read_weights,
    record,
    refusal,
    same,
    way,
)
from helpers import GOLDEN

import mlx_tformer as mt
from mlx_tformer.checkpoint import convert as conversion
from mlx_tformer.checkpoint import plan as planning
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.errors import UsageError

CASE = "llama-bias"  # rows of 32 values, but for down_proj: 44
UNPACKABLE = [f"decoder.layers.{i}.mlp.op.down" for i in (0, 1)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read in blocks of a few rows, as large ones are."""
    monkeypatch.setattr(planning, "VALUES", 200)


# --- quantizing ---


@pytest.mark.parametrize("bits_of", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantized_weights_are_those_of_mlx(tmp_path: Path, bits_of: int, dtype: str, small_blocks: None) -> None:
    made = convert(GOLDEN / CASE, tmp_path / "made", dtype=dtype, quantize=bits_of, group_size=32)
    source, found = case_weights(CASE), read_weights(made.path)
    joined = [source[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    wanted = {
        "embed.tokens": source["model.embed_tokens.weight"],
        "decoder.layers.1.attn.op.qkv": mx.concatenate(joined),
    }
    for module, weight in wanted.items():
        weight = weight.astype(getattr(mx, dtype))
        leaves = dict(zip(("weight", "scales", "biases"), mx.quantize(weight, **way(bits_of)), strict=True))
        assert all(same(found[f"{module}.{leaf}"], array) for leaf, array in leaves.items())
        assert ours(made.path)["quantization"][module] == way(bits_of)
        spread = mx.dequantize(*leaves.values(), **way(bits_of)).astype(mx.float32)
        error = mx.abs(spread - weight.astype(mx.float32)).max().item()
        assert record(made.path)["tensors"][f"{module}.weight"]["error"] == error > 0


@pytest.mark.parametrize("bits_of", [4, 8])
def test_a_quantized_conversion_computes_with_the_unpacked_values(tmp_path: Path, bits_of: int) -> None:
    made = convert(GOLDEN / CASE, tmp_path / "made", quantize=bits_of, group_size=32, dtype="float32")
    weights, modules = read_weights(made.path), ours(made.path)["quantization"]
    ids = mx.array([[3, 1, 4, 1, 5]])
    dense = {name: array for name, array in weights.items() if name.rpartition(".")[0] not in modules}
    for module, how in modules.items():
        leaves = [weights[f"{module}.{leaf}"] for leaf in ("weight", "scales", "biases")]
        dense[f"{module}.weight"] = mx.dequantize(*leaves, **how)
    biases = {name: array for name, array in weights.items() if name.endswith(".bias")}
    plain = mt.load(GOLDEN / CASE, dtype="float32")
    plain.model.load_weights(list((dense | biases).items()))
    assert np.abs(np.array(mt.load(made.path)(ids)) - np.array(plain(ids))).max() < 2e-5


def test_what_cannot_be_quantized_is_listed_with_the_reason(tmp_path: Path) -> None:
    made = convert(GOLDEN / CASE, tmp_path / "made", quantize=4, group_size=32)
    assert sorted(made.unquantized) == [f"{path}: rows of 44 are not whole groups of 32" for path in UNPACKABLE]
    assert record(made.path)["unquantized"] == made.unquantized
    assert not set(UNPACKABLE) & ours(made.path)["quantization"].keys()
    none = convert(GOLDEN / CASE, tmp_path / "none", quantize=4, group_size=128)
    assert len(none.unquantized) == 10 and ours(none.path)["quantization"] == {}
    assert all("are not whole groups of 128" in entry for entry in none.unquantized)


def test_quantizing_a_quantized_conversion_leaves_what_is_packed(tmp_path: Path) -> None:
    once = convert(GOLDEN / CASE, tmp_path / "once", quantize=8, group_size=32).path
    twice = convert(once, tmp_path / "twice", quantize=4, group_size=32)
    assert ours(twice.path)["quantization"] == ours(once)["quantization"]
    assert (twice.path / "model.safetensors").read_bytes() == (once / "model.safetensors").read_bytes()


def test_quantizing_a_plain_conversion_is_quantizing_its_source(tmp_path: Path) -> None:
    plain = convert(GOLDEN / CASE, tmp_path / "plain").path
    a = files_in(convert(plain, tmp_path / "a", quantize=4, group_size=32).path)
    b = files_in(convert(GOLDEN / CASE, tmp_path / "b", quantize=4, group_size=32).path)
    assert a == b


def test_the_errors_of_two_conversions_one_after_the_other_add_up(tmp_path: Path) -> None:
    weights = {name: array.astype(mx.float32) * 1.001 for name, array in case_weights(CASE).items()}
    source = make_folder(tmp_path / "source", CASE, weights, dtype="float32")
    rounded = convert(source, tmp_path / "rounded", dtype="bfloat16").path
    packed = convert(rounded, tmp_path / "packed", quantize=8, group_size=32).path
    found, before = record(packed)["tensors"], record(rounded)["tensors"]
    name = "embed.tokens.weight"
    stored = read_weights(packed)
    leaves = [stored[f"embed.tokens.{leaf}"] for leaf in ("weight", "scales", "biases")]
    gap_of = [
        mx.abs(mx.dequantize(*leaves, **way(8)).astype(mx.float32) - wanted.astype(mx.float32)).max().item()
        for wanted in (weights["model.embed_tokens.weight"], read_weights(rounded)[name])
    ]
    assert found[name]["error"] == before[name]["error"] + gap_of[1] >= gap_of[0]
    assert found["embed.tokens.scales"].keys() == {"from", "shape", "dtype"}
    assert found["decoder.norm.weight"] == before["decoder.norm.weight"]


USAGE: list[tuple[dict[str, Any], str]] = [
    ({"quantize": 7}, "quantize: found 7, expected one of 2, 3, 4, 5, 6, 8 bits"),
    ({"quantize": 0}, "quantize: found 0"),
    ({"quantize": -4}, "quantize: found -4"),
    ({"quantize": 4, "group_size": 17}, "group_size: found 17, expected one of 32, 64, 128"),
    ({"quantize": 4, "group_size": 0}, "group_size: found 0"),
    ({"dtype": "int4"}, "dtype: found 'int4', expected one of float32, float16, bfloat16"),
]


@pytest.mark.parametrize(("settings", "problem"), USAGE, ids=str)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    refusal(UsageError, problem, of=lambda: convert(GOLDEN / CASE, tmp_path / "made", **settings))
    assert not (tmp_path / "made").exists()


# --- sources that are packed already ---

ALIKE = {"_proj": way(4), "embed_tokens": way(8)}
UNLIKE = {"q_proj": way(4), "k_proj": way(8), "v_proj": way(4), "gate_proj": way(8)}


def converted(source: Packed, dest: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Path:
    """A source in memory, converted."""
    monkeypatch.setattr(conversion, "open_source", lambda where, revision: source)
    return convert("packed", dest, **settings).path


@pytest.mark.parametrize("ways", [ALIKE, UNLIKE], ids=["alike", "unlike"])
def test_packed_sources_keep_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None, ways: dict[str, Any]
) -> None:
    source = Packed.of(CASE, ways)
    dense = source.dense()
    made = converted(source, tmp_path / "made", monkeypatch, dtype="float32")
    found, modules = read_weights(made), ours(made)["quantization"]
    assert ("decoder.layers.0.attn.op.qkv" in modules) == (ways is ALIKE)
    for name, parts in {"attn.op.qkv": "self_attn.{}_proj q k v", "mlp.op.gate_up": "mlp.{}_proj gate up"}.items():
        theirs, *each = parts.split()
        wanted = mx.concatenate([dense[f"model.layers.0.{theirs.format(x)}.weight"] for x in each])
        module = f"decoder.layers.0.{name}"
        leaves = [found[f"{module}.{leaf}"] for leaf in ("weight", "scales", "biases") if f"{module}.{leaf}" in found]
        value = mx.dequantize(*leaves, **modules[module]) if module in modules else leaves[0]
        assert len(leaves) == (3 if module in modules else 1)
        np.testing.assert_allclose(np.array(value), np.array(wanted), rtol=0, atol=1e-7)
        if module not in modules:
            assert bits(value) == bits(wanted)
    assert record(made)["largest_error"] < 1e-6


@pytest.mark.parametrize("ways", [ALIKE, UNLIKE], ids=["alike", "unlike"])
def test_packed_sources_convert_to_what_they_load_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ways: dict[str, Any]
) -> None:
    source, ids = Packed.of(CASE, ways), mx.array([[9, 8, 7]])
    made = converted(source, tmp_path / "made", monkeypatch, dtype="float32")
    monkeypatch.setattr("mlx_tformer.checkpoint.load.open_source", lambda *_, **__: source)
    wanted = mt.load("packed", dtype="float32")(ids)
    monkeypatch.undo()
    assert same(mt.load(made)(ids), wanted)
    assert files_in(convert(made, tmp_path / "again").path) == files_in(made)


def test_a_packed_source_can_have_the_rest_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = converted(
        Packed.of(CASE, {"q_proj": way(4), "k_proj": way(4), "v_proj": way(4)}),
        tmp_path / "made",
        monkeypatch,
        quantize=8,
        group_size=32,
    )
    modules = ours(made)["quantization"]
    assert modules["decoder.layers.0.attn.op.qkv"] == way(4)
    assert modules["embed.tokens"] == modules["decoder.layers.0.attn.op.out"] == way(8)
