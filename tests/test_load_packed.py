"""Loading packed weights: they stay packed where they can, keep their values, and are refused where they do not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import (
    IDS,
    Packed,
    bits,
    copy_case,
    logits,
    make_folder,
    parameters,
    read_weights,
    refusal,
    same,
    way,
    write_weights,
)
from helpers import GOLDEN, gap

import mlx_tformer as mt
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.load import fill
from mlx_tformer.checkpoint.plan import Plan, plan
from mlx_tformer.checkpoint.source import Source, Tensor
from mlx_tformer.errors import BadInput


def filled(source: Source) -> Plan:
    """A model with the weights of a source, in float32."""
    made = plan(source)
    fill(made, source, mx.float32)
    return made


# --- packed weights ---

CASE = "llama-bias"  # rows of 32 values, but for down_proj
LAYER = "decoder.layers.0.attn.op.qkv"


def test_parts_that_are_packed_alike_stay_packed_and_keep_their_values() -> None:
    source = Packed.of(CASE, {"_proj": way(4), "embed_tokens": way(8)})
    made = filled(source)
    assert isinstance(made.model.decoder.layers[0].attn.op.qkv, nn.QuantizedLinear)
    assert made.quantization.keys() == {
        "embed.tokens",
        *(f"decoder.layers.{i}.{part}" for i in (0, 1) for part in ("attn.op.qkv", "attn.op.out", "mlp.op.gate_up")),
    }
    found = parameters(made.model)
    parts = [source.arrays[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert same(found[f"{LAYER}.weight"], mx.concatenate(parts))
    assert same(
        found[f"{LAYER}.scales"][:32], source.arrays["model.layers.0.self_attn.q_proj.scales"].astype(mx.float32)
    )


UNLIKE = {
    "bits differ": {"q_proj": way(4), "k_proj": way(8), "v_proj": way(4)},
    "one is packed": {"q_proj": way(4)},
    "the last is packed": {"v_proj": way(8)},
    "one is not packed": {"q_proj": way(4), "k_proj": way(4)},
    "all differ": {"q_proj": way(2), "k_proj": way(4), "v_proj": way(8)},
}


@pytest.mark.parametrize("ways", UNLIKE.values(), ids=UNLIKE)
def test_parts_that_are_packed_unlike_are_unpacked_and_keep_their_values(ways: dict[str, Any]) -> None:
    source = Packed.of(CASE, ways)
    made = filled(source)
    assert made.quantization == {}
    dense, found = source.dense(), parameters(made.model)
    parts = [dense[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert bits(found[f"{LAYER}.weight"]) == bits(mx.concatenate(parts))
    blocks = list(made.recipes[f"{LAYER}.weight"].blocks(source))
    assert same(mx.concatenate(blocks), mx.concatenate(parts))


@pytest.mark.parametrize("ways", [*UNLIKE.values(), {"_proj": way(4), "embed_tokens": way(8)}])
def test_a_packed_model_gives_the_logits_of_the_unpacked_one(tmp_path: Path, ways: dict[str, Any]) -> None:
    source = Packed.of(CASE, ways)
    folder = make_folder(tmp_path / "dense", CASE, source.dense())
    assert gap(filled(source).model(IDS), logits(folder, dtype="float32")) < 2e-5


BROKEN_PACKS = {
    "no scales": ({"q_proj.scales": None}, "is packed, but there is no model.layers.0.self_attn.q_proj.scales"),
    "no weight": ({"q_proj.weight": None}, "is packed, but there is no model.layers.0.self_attn.q_proj.weight"),
    "too few scales": ({"q_proj.scales": mx.zeros((16, 1))}, "do not go together with 4 bits in groups of 32"),
    "biases of another width": ({"q_proj.biases": mx.zeros((32, 2))}, "do not go together"),
    "a weight without axes": ({"q_proj.weight": mx.array(3, mx.uint32)}, "do not go together"),
    "a weight that is empty": ({"q_proj.weight": mx.zeros((32, 0), mx.uint32)}, "do not go together"),
    "floats for a weight": ({"q_proj.weight": mx.zeros((32, 4))}, "found float32, expected uint32"),
    "integers for scales": ({"q_proj.scales": mx.zeros((32, 1), mx.int32)}, "found int32, expected floats"),
}


@pytest.mark.parametrize(("changes", "problem"), BROKEN_PACKS.values(), ids=BROKEN_PACKS)
def test_packed_tensors_that_do_not_go_together_are_refused(changes: Any, problem: str) -> None:
    source = Packed.of(CASE, {"q_proj": way(4), "k_proj": way(4), "v_proj": way(4)})
    for name, array in changes.items():
        name = f"model.layers.0.self_attn.{name}"
        del source.arrays[name]
        if array is not None:
            source.arrays[name] = array
    source.tensors = {name: Tensor(array.shape, array.dtype) for name, array in source.arrays.items()}
    refusal(BadInput, problem, of=lambda: plan(source))


# --- folders of ours ---


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden case in our layout, quantized where that can be."""
    return convert(GOLDEN / CASE, tmp_path_factory.mktemp("ours") / "q", quantize=4, group_size=32).path


def tampered(quantized: Path, folder: Path, ours: Any) -> Path:
    """The quantized folder with other words under `mlx_tformer`; a function changes those that are there."""
    shutil.copytree(quantized, folder)
    config = json.loads((folder / "config.json").read_text())
    config["mlx_tformer"] = ours(config["mlx_tformer"]) if callable(ours) else ours
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def packed_as(how: Any, module: str = "embed.tokens") -> Any:
    return lambda ours: ours | {"quantization": ours["quantization"] | {module: how}}


TAMPERED = {
    "a number": (7, "mlx_tformer.layout: found 7, expected 1"),
    "a list": ([], "mlx_tformer.layout: found [], expected 1"),
    "a layout of the future": (lambda ours: ours | {"layout": 2}, "mlx_tformer.layout: found 2, expected 1"),
    "a list of modules": (lambda ours: ours | {"quantization": ["x"]}, "mlx_tformer.quantization: found ['x']"),
    "no modules": (lambda ours: ours | {"quantization": {}}, "no place in the model"),
    "no bits": (packed_as({"group_size": 32, "mode": "affine"}), "mlx_tformer.quantization.embed.tokens: found"),
    "bits 0": (packed_as(way(0)), "mlx_tformer.quantization.embed.tokens: found {'bits': 0"),
    "bits 7": (packed_as(way(7)), "expected bits of (2, 3, 4, 5, 6, 8)"),
    "bits in quotes": (packed_as({**way(4), "bits": "4"}), "found {'bits': '4'"),
    "groups of 17": (packed_as(way(4, 17)), "found {'bits': 4, 'group_size': 17"),
    "another mode": (packed_as({**way(4), "mode": "mxfp5"}), "'mode': 'mxfp5'"),
    "a list as the mode": (packed_as({**way(4), "mode": ["affine"]}), "'mode': ['affine']"),
    "a mode with other scales": (packed_as({**way(4), "mode": "mxfp4"}), "embed.tokens: found scales of bfloat16"),
    "bits of another mode": (packed_as({**way(4), "mode": "mxfp8"}), "expected bits of (8,)"),
    "not an object": (packed_as("4 bits"), "found '4 bits'"),
    "other bits": (packed_as(way(8)), "embed.tokens: found weight (67, 4), scales (67, 1)"),
    "other groups": (packed_as(way(4, 64)), "embed.tokens: found weight (67, 4)"),
    "a norm": (packed_as(way(4), "decoder.norm"), "decoder.norm: is packed, but there is no decoder.norm.scales"),
    "a module that is not there": (packed_as(way(4), "nowhere"), "nowhere: is packed, but there is no nowhere.*"),
}


@pytest.mark.parametrize(("ours", "problem"), TAMPERED.values(), ids=TAMPERED)
def test_a_folder_of_ours_that_says_something_wrong_is_refused(
    tmp_path: Path, quantized: Path, ours: Any, problem: str
) -> None:
    folder = tampered(quantized, tmp_path / "model", ours)
    refusal(BadInput, str(folder), problem.replace("nowhere.*", "nowhere."), of=lambda: mt.load(folder))


def test_a_norm_that_is_stored_as_if_it_were_packed_is_refused(tmp_path: Path, quantized: Path) -> None:
    folder = tampered(quantized, tmp_path / "model", packed_as(way(4), "decoder.norm"))
    weights = read_weights(folder)
    weights["decoder.norm.weight"] = mx.zeros(4, mx.uint32)
    weights |= {f"decoder.norm.{leaf}": mx.zeros(1, mx.bfloat16) for leaf in ("scales", "biases")}
    write_weights(folder / "model.safetensors", weights)
    refusal(BadInput, "decoder.norm: is packed, but is no matrix of the model", of=lambda: mt.load(folder))


def test_a_folder_of_ours_is_stored_in_the_dtype_that_it_was_converted_to(tmp_path: Path) -> None:
    source = copy_case("qwen3", tmp_path / "theirs")
    for dtype in ("float16", "float32"):
        made = convert(source, tmp_path / dtype, dtype=dtype)
        assert json.loads((made.path / "config.json").read_text())["dtype"] == "bfloat16"
        assert mt.load(made.path).dtype == getattr(mx, dtype)
