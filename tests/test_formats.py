"""Checkpoints in other people's quantized formats: the values that the format's own readers give."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import case_weights, files_in, make_folder, read_weights, refusal, same, write_weights
from format_builder import (
    DATA,
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    FP8,
    PROJECTIONS,
    STORED,
    TIGHT,
    Array,
    Encoder,
    awq_values,
    by_block,
    gptq_values,
    llama,
    matrices,
    model_of,
    of_blocks,
    stored_logits,
    whole_numbers,
    whole_said,
    words_of,
    write_any,
)
from helpers import GOLDEN, expected, gap, golden, leaves

import mlx_tformer as mt
from mlx_tformer.checkpoint import plan as planning
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.describe import describe
from mlx_tformer.checkpoint.formats import fp8, mxfp4
from mlx_tformer.checkpoint.open import open_source
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile
from mlx_tformer.errors import BadInput
from mlx_tformer.nn.moe import QuantizedExpertLinear

IDS = mx.array([[3, 9, 60, 7, 41, 22, 5, 5, 13]])
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_the_decoders_of_these_tests_are_those_of_the_formats_own_readers() -> None:
    for kind, table in {"e4m3": E4M3, "e5m2": E5M2}.items():
        part = matrices(kind)
        found = by_block(part["weight"], part["scale"], (4, 8), table)
        finite = np.isfinite(found)
        assert np.array_equal(found[finite].astype(np.float32), part["expected"][finite])
    part = matrices("mxfp4")
    assert np.array_equal(of_blocks(part["blocks"], part["scales"]).swapaxes(1, 2), part["expected"])
    assert np.array_equal(awq_values(matrices("awq")).astype(np.float32), matrices("awq")["expected"])
    for bits in (2, 4, 8):
        part = matrices(f"gptq{bits}")
        assert np.array_equal(gptq_values(part, bits).astype(np.float32), part["expected"])


# --- each format against its readers, matrix by matrix ---


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_all_256_floats_of_8_bits_are_what_transformers_reads(kind: str) -> None:
    part, code = matrices(kind), f"F8_{kind.upper()}"
    found = fp8.dequantize(mx.array(part["weight"]), mx.array(part["scale"]), code=code, grid=(4, 8))
    assert found.dtype == mx.float32 and np.array_equal(np.array(found), part["expected"], equal_nan=True)
    assert np.isnan(part["expected"]).sum() == {"e4m3": 2, "e5m2": 6}[kind]


def test_all_256_scales_of_8_bits_are_powers_of_two() -> None:
    part = matrices("e8m0")
    found = np.array(fp8.power(mx.array(part["scale"])))
    assert np.array_equal(found, part["expected"], equal_nan=True)
    assert np.array_equal(found[:-1], 2.0 ** (np.arange(255) - 127.0)) and np.isnan(found[255])


def test_blocks_of_4_bit_floats_are_what_transformers_reads_and_keep_their_bits() -> None:
    part = matrices("mxfp4")
    words = mxfp4.packed_words(mx.array(part["blocks"]))
    found = mx.dequantize(words, mx.array(part["scales"]), dtype=mx.float32, **mxfp4.HOW)
    assert np.array_equal(np.array(found.swapaxes(1, 2)), part["expected"])
    assert np.array(words).tobytes() == part["blocks"].tobytes()
    assert tuple(E2M1[:8]) == FLOAT4


def packed_values(module: str, folder: Path) -> tuple[mx.array, dict[str, Any] | None]:
    """The values of a module as the source gives it, in float32, and how it is packed."""
    source = open_source(folder)
    how = source.quantization.get(module)
    parts = [source.read(name) for name in planning.packed_names(f"{module}.weight")[: 3 if how else 1]]
    return (parts[0] if how is None else planning.dequantize(parts, how)), None if how is None else dict(how)


@pytest.mark.parametrize("kind", ["awq", "gptq2", "gptq4", "gptq8"])
def test_whole_numbers_with_zero_points_are_what_their_authors_read(tmp_path: Path, kind: str) -> None:
    part = matrices(kind)
    stored = {f"some.{leaf}": mx.array(x) for leaf, x in part.items() if leaf != "expected"}
    method, bits = kind.rstrip("248"), int(kind[-1]) if kind[-1].isdigit() else 4
    said = {"quant_method": method, "bits": bits, "group_size": 32}
    folder = make_folder(tmp_path / "x", weights=stored, quantization_config=said)
    values, how = packed_values("some", folder)
    assert how == {"bits": bits, "group_size": 32, "mode": "affine"}
    assert np.array_equal(np.array(values), part["expected"])


# --- whole checkpoints of transformers and mlx-lm ---


PACKED = {
    "mlx-deepseek_v3": ("into", "q_up", "out", "gate_up", "down", "embed", "head"),
    "mlx-gpt2": ("qkv", "out", "up", "down", "embed", "positions"),
    "mlx-gpt_neox": ("qkv", "out", "up", "down", "embed", "head"),
    "mlx-gpt_oss": ("qkv", "out", "gate_up", "down", "embed", "head"),
    "mlx-granitemoe": ("qkv", "out", "gate_up", "down", "embed", "head"),
    "mlx-llama-mixed": ("qkv", "out", "gate_up", "down", "embed"),
    "mlx-mixtral": ("qkv", "out", "gate_up", "down", "embed", "head"),
    "mlx-qwen3_moe": ("qkv", "out", "gate_up", "down", "embed", "head"),
    "mxfp4-gpt_oss": ("gate_up", "down"),
}
"""Parts of a model that stay packed; the others are floats in the checkpoint, or not matrices in ours."""
QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedExpertLinear)


@pytest.mark.parametrize("case", STORED)
def test_logits_are_those_of_whoever_wrote_the_checkpoint(case: str) -> None:
    ids, wanted = stored_logits(case)
    lm = mt.load(DATA / case, dtype="float32")
    assert gap(lm(ids), wanted) < TIGHT
    packed = {path.rpartition(".")[2] for path, m in lm.model.named_modules() if isinstance(m, QUANTIZED)}
    assert packed == {part.replace("embed", "tokens").replace("positions", "table") for part in PACKED.get(case, ())}


@pytest.mark.parametrize("case", STORED)
def test_a_conversion_keeps_packed_weights_and_a_second_one_changes_nothing(tmp_path: Path, case: str) -> None:
    ids, _ = stored_logits(case)
    once = convert(DATA / case, tmp_path / "once", dtype="float32").path
    assert same(mt.load(once)(ids), mt.load(DATA / case, dtype="float32")(ids))
    config = json.loads((once / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & config.keys()
    assert bool(config["mlx_tformer"]["quantization"]) == (case in PACKED)
    convert(once, tmp_path / "twice")
    assert files_in(tmp_path / "twice") == files_in(once)


@pytest.mark.parametrize("case", STORED)
def test_a_conversion_in_the_dtype_of_the_checkpoint_computes_what_the_checkpoint_does(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "VALUES", 200)  # some rows at a time
    ids, _ = stored_logits(case)
    made = convert(DATA / case, tmp_path / "made").path
    assert same(mt.load(made)(ids), mt.load(DATA / case)(ids))


@pytest.mark.parametrize("case", STORED)
def test_blocks_of_rows_and_mapped_values_are_those_that_are_read(case: str) -> None:
    source = open_source(DATA / case)
    for name, tensor in source.tensors.items():
        whole = source.read(name)
        assert (whole.shape, whole.dtype) == (tensor.shape, tensor.dtype)
        assert same(whole, source.mapped(name)) and same(whole, mx.concatenate(list(source.blocks(name, 5))))


def test_a_packed_matrix_that_is_none_in_the_model_is_unpacked(tmp_path: Path) -> None:
    """`kv_b_proj` as mlx-lm stored it before it took it apart, and as the floats that it stands for."""
    config = json.loads((DATA / "mlx-deepseek_v3" / "config.json").read_text())
    source, weights = open_source(DATA / "mlx-deepseek_v3"), model_of("mlx-deepseek_v3")
    how = {"bits": 8, "group_size": 32, "mode": "affine"}
    packed, dense = dict(weights), dict(weights)
    for attention in [f"model.layers.{i}.self_attn" for i in (0, 1)]:
        for name in [name for name in weights if name.startswith((f"{attention}.embed_q", f"{attention}.unembed_out"))]:
            del packed[name], dense[name]
        parts = mx.quantize(source.read(f"{attention}.kv_b_proj.weight"), **how)
        packed |= dict(zip(planning.packed_names(f"{attention}.kv_b_proj.weight"), parts, strict=True))
        dense[f"{attention}.kv_b_proj.weight"] = planning.dequantize(parts, how)
    found = []
    for name, stored in (("packed", packed), ("dense", dense)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        write_weights(folder / "model.safetensors", stored)
        found.append(mt.load(folder, "float32")(stored_logits("mlx-deepseek_v3")[0]))
        convert(folder, tmp_path / f"{name} made", dtype="float32")
        found.append(mt.load(tmp_path / f"{name} made")(stored_logits("mlx-deepseek_v3")[0]))
    assert all(same(found[0], other) for other in found[1:])


@pytest.mark.parametrize("grid", [(2, 1), (1, 1), (56, 1), (7, 4)], ids=str)
def test_stacked_experts_in_floats_of_8_bits_have_scales_each(tmp_path: Path, grid: tuple[int, int]) -> None:
    random, stored = np.random.default_rng(4), dict[str, Any]()
    weights = stacked(case_weights("qwen3_moe"), "mlp", "mlp.experts")
    for name, value in weights.items():
        if ".mlp.experts." not in name:
            stored[name] = np.array(value.astype(mx.float32))
    gate = next(name for name in weights if name.endswith("gate_proj.weight"))
    count, hidden, width = weights[gate].shape
    dense = {name: mx.array(value) for name, value in stored.items()}
    for module in sorted({name.rpartition(".mlp.experts.")[0] for name in weights if ".mlp.experts." in name}):
        for leaf, rows, columns in (("gate_up_proj", 2 * hidden, width), ("down_proj", width, hidden)):
            name = f"{module}.mlp.experts.{leaf}"
            sides = grid if leaf == "gate_up_proj" else (1, 1)
            weight = random.integers(0, 120, (count, rows, columns), dtype=np.uint8)
            scale = random.uniform(0.001, 0.003, (count, *sides)).astype(np.float32)
            block = (rows // sides[0], columns // sides[1])
            stored |= {name: ("F8_E4M3", weight), f"{name}_scale_inv": scale}
            values = np.stack([by_block(w, s, block) for w, s in zip(weight, scale, strict=True)])
            dense[name] = mx.array(values.astype(np.float32))
    ids = mx.array(expected("qwen3_moe")["input_ids"])
    there = make_folder(tmp_path / "stored", "qwen3_moe", {}, quantization_config=FP8)
    write_any(there / "model.safetensors", stored)
    plain = make_folder(tmp_path / "dense", "qwen3_moe", dense)
    assert (2 * hidden) % grid[0] == width % grid[1] == 0
    assert same(mt.load(there, "float32")(ids), mt.load(plain, "float32")(ids))


# --- mlx-lm's names, where nothing is packed ---


def stacked(weights: dict[str, mx.array], where: str, to: str) -> dict[str, mx.array]:
    """Experts one by one -> stacked under mlx-lm's names."""
    found: dict[str, mx.array] = {}
    experts: dict[str, list[tuple[int, mx.array]]] = {}
    for name, value in weights.items():
        before, at, rest = name.partition(f".{where}.experts.")
        if not at:
            found[name] = value
            continue
        number, _, leaf = rest.partition(".")
        experts.setdefault(f"{before}.{to}.{leaf}", []).append((int(number), value))
    return found | {name: mx.stack([v for _, v in sorted(x, key=lambda p: p[0])]) for name, x in experts.items()}


def upright(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Llama 4's experts as mlx-lm has them: (E, out, in), gate and up apart."""
    found: dict[str, mx.array] = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = mx.split(value.swapaxes(1, 2), 2, axis=1)
            found |= {
                f"{name.removesuffix('gate_up_proj')}{x}.weight": y for x, y in (("gate_proj", gate), ("up_proj", up))
            }
        else:
            is_down = name.endswith("experts.down_proj")
            found[f"{name}.weight" if is_down else name] = value.swapaxes(1, 2) if is_down else value
    return found


RENAMED: dict[str, Callable[[dict[str, mx.array]], dict[str, mx.array]]] = {
    "deepseek_v2": lambda w: stacked(w, "mlp", "mlp.switch_mlp"),
    "deepseek_v3": lambda w: stacked(w, "mlp", "mlp.switch_mlp"),
    "olmoe": lambda w: stacked(w, "mlp", "mlp.switch_mlp"),
    "qwen2_moe": lambda w: stacked(w, "mlp", "mlp.switch_mlp"),
    "qwen3_moe": lambda w: stacked(w, "mlp", "mlp.switch_mlp"),
    "gptj": lambda w: {name.replace("transformer.", "model."): x for name, x in w.items()},
    "llama4": upright,
}


@pytest.mark.parametrize("case", RENAMED)
def test_mlx_lms_names_give_the_same_logits(tmp_path: Path, case: str) -> None:
    weights = RENAMED[case](case_weights(case))
    assert weights.keys() != case_weights(case).keys()
    folder, ids = make_folder(tmp_path / "x", case, weights), mx.array(expected(case)["input_ids"])
    (folder / "config.json").write_text((GOLDEN / case / "config.json").read_text())
    assert same(mt.load(folder, "float32")(ids), golden(case)(ids))
    assert same(mt.load(convert(folder, tmp_path / "made").path, "float32")(ids), golden(case)(ids))


# --- a small Llama in each format ---


@pytest.mark.parametrize(("encode", "said", "group"), FORMATS.values(), ids=FORMATS)
def test_a_format_gives_the_very_values_that_it_stands_for(
    tmp_path: Path, encode: Encoder, said: dict[str, Any], group: int | None
) -> None:
    stored, dense = llama(tmp_path, encode, said)
    wanted = read_weights(dense)
    for name in PROJECTIONS:
        values, how = packed_values(f"model.layers.0.{name}", stored)
        assert values.dtype == mx.float32 and gap(values, wanted[f"model.layers.0.{name}.weight"]) == 0
        if name == "mlp.down_proj":
            assert (None if how is None else how["group_size"]) == group


@pytest.mark.parametrize(("encode", "said", "group"), FORMATS.values(), ids=FORMATS)
def test_a_format_gives_the_logits_of_the_floats_that_it_stands_for(
    tmp_path: Path, encode: Encoder, said: dict[str, Any], group: int | None
) -> None:
    stored, dense = llama(tmp_path, encode, said)
    found, wanted = mt.load(stored, "float32")(IDS), mt.load(dense, "float32")(IDS)
    assert same(found, wanted) if group is None else gap(found, wanted) < TIGHT
    made = convert(stored, tmp_path / "made", dtype="float32").path
    assert same(mt.load(made)(IDS), found)
    convert(made, tmp_path / "again")
    assert files_in(tmp_path / "again") == files_in(made)


def test_q_k_and_v_stay_packed_when_they_are_joined(tmp_path: Path) -> None:
    stored, _ = llama(tmp_path, *FORMATS["gptq"][:2])
    layer = mt.load(stored, "float32").model.decoder.layers[0]
    for linear in (layer.attn.op.qkv, layer.attn.op.out, layer.mlp.op.gate_up, layer.mlp.op.down):
        assert isinstance(linear, nn.QuantizedLinear) and (linear.bits, linear.group_size) == (4, 64)


def test_float16_rounds_the_scales_and_offsets_of_packed_modules_and_no_more(tmp_path: Path) -> None:
    stored, dense = llama(tmp_path, *FORMATS["awq"][:2])
    source, wanted = open_source(stored), read_weights(dense)
    module = "model.layers.0.self_attn.o_proj"
    assert source.tensors[f"{module}.scales"].dtype == mx.float16
    assert source.tensors[f"{module}.biases"].dtype == mx.float32
    linear = mt.load(stored, "float16").model.decoder.layers[0].attn.op.out
    found = planning.dequantize((linear.weight, linear.scales, linear.biases), source.quantization[module])
    largest = float(mx.abs(source.read(f"{module}.biases")).max().item())
    assert 0 < gap(found, wanted[f"{module}.weight"]) <= largest * 2**-11


def test_zero_points_that_gptqmodel_carries_over_are_read(tmp_path: Path) -> None:
    def encode(random: np.random.Generator, rows: int, width: int) -> tuple[dict[str, Any], Array]:
        q, z, s, _ = whole_numbers(random, rows, width, 4, 64, None)
        z[:, ::3] = 0
        words = words_of(z, 4).view(np.uint32) - np.uint32(0x11111111)  # as a whole, borrowing
        values = (s.astype(np.float64)[np.arange(width) // 64] * (q - z[np.arange(width) // 64])).T
        return {"qweight": words_of(q.T, 4).T.copy(), "qzeros": words.view(np.int32), "scales": s}, values

    said = whole_said("gptq", sym=False)
    stored, dense = llama(tmp_path, encode, said | {"meta": {"quantizer": ["gptqmodel:5.0.0"]}})
    assert gap(mt.load(stored, "float32")(IDS), mt.load(dense, "float32")(IDS)) < TIGHT
    stored, _ = llama(tmp_path / "other", encode, said)
    refusal(BadInput, "q_proj.qzeros", "stored as 15, which stands for 0 or for 16", of=lambda: open_source(stored))


# --- biases that older writers add ---


def with_biases(encode: Encoder, value: float) -> Encoder:
    def biased(random: np.random.Generator, rows: int, width: int) -> tuple[dict[str, Any], Array]:
        stored, values = encode(random, rows, width)
        return {**stored, "bias": np.full(rows, value, np.float16)}, values

    return biased


def test_biases_of_zeros_are_left_out_where_the_model_has_none(tmp_path: Path) -> None:
    encode, said, _ = FORMATS["gptq"]
    plain, _ = llama(tmp_path / "plain", encode, said)
    biased, _ = llama(tmp_path / "biased", with_biases(encode, 0), said)
    assert same(mt.load(biased, "float32")(IDS), mt.load(plain, "float32")(IDS))
    made = convert(biased, tmp_path / "made")
    assert len(made.dropped) == 7 and "zeros" in made.dropped["model.layers.0.mlp.up_proj.bias"]
    other, _ = llama(tmp_path / "other", with_biases(encode, 0.25), said)
    refusal(BadInput, "no place in the model", "q_proj.bias", of=lambda: mt.load(other))


def test_biases_that_the_model_has_are_kept_zeros_or_not(tmp_path: Path) -> None:
    encode, said, _ = FORMATS["gptq"]
    for value in (0.0, 0.25):
        biased, _ = llama(tmp_path / str(value), with_biases(encode, value), said, attention_bias=True, mlp_bias=True)
        bias = leaves(mt.load(biased, "float32").model)["decoder.layers.0.attn.op.qkv.bias"]
        assert bias.shape == (256,) and (bias == value).all().item()


# --- activations, and what is read when ---


def test_scales_of_activations_are_left_out_and_named(tmp_path: Path) -> None:
    encode, said, _ = FORMATS["fp8 with one scale"]

    def static(random: np.random.Generator, rows: int, width: int) -> tuple[dict[str, Any], Array]:
        stored, values = encode(random, rows, width)
        return {**stored, "input_scale": np.float32(0.5).reshape(())}, values

    stored, dense = llama(tmp_path, static, said | {"activation_scheme": "static"})
    lm = mt.load(stored, "float32")
    assert same(lm(IDS), mt.load(dense, "float32")(IDS))
    assert any("activations" in note and "q_proj.input_scale" in note for note in lm.notes)


def test_weights_are_not_read_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []
    read = SafetensorsFile.read
    monkeypatch.setattr(SafetensorsFile, "read", lambda file, name: seen.append(name) or read(file, name))
    for case in STORED:
        planning.plan(open_source(DATA / case))
    assert seen == []
    stored, _ = llama(tmp_path, *FORMATS["gptq with its order"][:2])
    source = open_source(stored)
    assert {name.rpartition(".")[2] for name in seen} == {"g_idx", "qzeros"}
    seen.clear()
    source.read("model.layers.0.mlp.up_proj.biases")
    assert seen == [f"model.layers.0.mlp.up_proj.{leaf}" for leaf in ("scales", "qzeros")]


@pytest.mark.parametrize("case", STORED)
def test_a_card_needs_no_weights(tmp_path: Path, case: str) -> None:
    (tmp_path / "config.json").write_text((DATA / case / "config.json").read_text())
    assert describe(tmp_path).parameters == describe(DATA / case).parameters
