"""Quantized checkpoints that are not understood or contradict themselves: one line says what was found, and where."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import make_folder, refusal, write_weights
from format_builder import DATA, FORMATS, FP8, TIGHT, Array, llama, model_of, stored_logits, whole_said
from helpers import GOLDEN, gap

import mlx_tformer as mt
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.describe import describe
from mlx_tformer.errors import BadInput

# --- settings ---

UNKNOWN = [
    *("bitsandbytes", "compressed-tensors", "hqq", "eetq", "quark", "torchao", "aqlm", "bitnet", "auto-round"),
    *("fbgemm_fp8", "modelopt", "FP8", 4, ["fp8"], None),
]


@pytest.mark.parametrize("method", UNKNOWN, ids=str)
def test_another_format_is_refused_by_its_name_with_those_that_can_be_read(tmp_path: Path, method: Any) -> None:
    said = {"quant_method": method, "bits": 4, "group_size": 64}
    folder = make_folder(tmp_path / "x", quantization_config=said)
    found = "missing" if method is None else f"found {method!r}"
    field = f"{folder / 'config.json'}: quantization_config.quant_method: {found}"
    refusal(BadInput, field, "awq, fp8, gptq, mxfp4, or the packed modules of mlx-lm", of=lambda: mt.load(folder))
    (folder / "model.safetensors").unlink()
    refusal(BadInput, field, of=lambda: describe(folder))


WRONG_SETTINGS = {
    "a list": ([], "quantization_config: found [], expected an object"),
    "awq: the version gemv": (whole_said("awq", version="gemv"), "version: found 'gemv', expected"),
    "awq: of another tool": (whole_said("awq", backend="llm-awq"), "backend: found 'llm-awq'"),
    "awq: 3 bits": (whole_said("awq", bits=3), "bits: found 3, expected 4"),
    "awq: true bits": (whole_said("awq", bits=True), "bits: found True"),
    "awq: no zero points": (whole_said("awq", zero_point=False), "zero_point: found False, expected True"),
    "awq: a setting of the future": (whole_said("awq", rotation="hadamard"), "rotation: found 'hadamard', a setting"),
    "gptq: 3 bits": (whole_said("gptq", bits=3), "bits: found 3, expected one of 2, 4, 8"),
    "gptq: no bits": ({"quant_method": "gptq"}, "bits: missing, expected one of 2, 4, 8"),
    "gptq: another layout": (whole_said("gptq", checkpoint_format="marlin"), "checkpoint_format: found 'marlin'"),
    "gptq: two formats": (whole_said("gptq", checkpoint_format="gptq", format="gptq_v2"), "format: found 'gptq_v2'"),
    "gptq: marlin": (whole_said("gptq", is_marlin_format=True), "is_marlin_format: found True"),
    "gptq: other words": (whole_said("gptq", pack_dtype="int8"), "pack_dtype: found 'int8'"),
    "gptq: modules that differ": (whole_said("gptq", dynamic={"x": {"bits": 8}}), "dynamic: found {'x'"),
    "gptq: group 0": (whole_said("gptq", group_size=0), "group_size: found 0, expected a number of 1 or more, or -1"),
    "gptq: group in quotes": (whole_said("gptq", group_size="64"), "group_size: found '64'"),
    "fp8: a block of one side": (FP8 | {"weight_block_size": [128]}, "weight_block_size: found [128]"),
    "fp8: a block of nothing": (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size: found [128, 0]"),
    "fp8: other scales": (FP8 | {"scale_fmt": "e4m3"}, "scale_fmt: found 'e4m3'"),
    "fp8: experts of 4 bits": (FP8 | {"expert_dtype": "fp4"}, "expert_dtype: found 'fp4'"),
    "fp8: other activations": (FP8 | {"activation_scheme": "none"}, "activation_scheme: found 'none'"),
    "mxfp4: a setting of the future": ({"quant_method": "mxfp4", "rotation": 1}, "rotation: found 1, a setting"),
    **{
        f"{m}: plain weights": (s, f"says {m}, but no tensor")
        for m, s in (
            ("fp8", FP8),
            ("mxfp4", {"quant_method": "mxfp4"}),
            ("awq", whole_said("awq")),
            ("gptq", whole_said("gptq")),
        )
    },
}


@pytest.mark.parametrize(("said", "problem"), WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
def test_settings_that_are_not_understood_are_refused(tmp_path: Path, said: Any, problem: str) -> None:
    folder = make_folder(tmp_path / "x", quantization_config=said)
    refusal(BadInput, str(folder / "config.json"), problem, of=lambda: mt.load(folder))


# --- tensors ---

Q = "model.layers.0.self_attn.q_proj"
GONE = object()
TOGETHER = "do not go together with 4 bits in groups of 64"
WRONG_TENSORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no scales": ("awq", {"scales": GONE}, f"{Q}: has a qweight, but no scales"),
    "neither": ("gptq", {"scales": GONE, "qzeros": GONE}, f"{Q}: has a qweight, but no qzeros and no scales"),
    "no words": ("gptq", {"qweight": GONE}, "no place in the model"),
    "an order that AWQ does not have": ("awq", {"g_idx": np.zeros(128, np.int32)}, "q_proj.g_idx"),
    "too few scales": ("awq", {"scales": np.ones((1, 128), np.float16)}, TOGETHER),
    "another group": ("gptq", {"scales": np.ones((4, 128), np.float16)}, TOGETHER),
    "scales of whole numbers": ("gptq", {"scales": np.ones((2, 128), np.int32)}, "do not go together"),
    "words of floats": ("gptq", {"qweight": np.ones((16, 128), np.float32)}, "do not go together"),
    "a list of words": ("gptq", {"qweight": np.ones(16, np.int32)}, "expected matrices"),
    "no inputs": ("gptq", {"qweight": np.ones((0, 128), np.int32)}, "expected matrices"),
    "a short order": (
        "gptq",
        {"g_idx": np.zeros(64, np.int32)},
        "g_idx: found (64,), expected the group of each of 128",
    ),
    "a group that is not there": ("gptq", {"g_idx": np.full(128, 2, np.int32)}, "0 to 1"),
    "a group below 0": ("gptq", {"g_idx": np.full(128, -1, np.int32)}, "0 to 1"),
    "an order of floats": ("gptq", {"g_idx": np.zeros(128, np.float32)}, "g_idx: found"),
    "the weight as well": ("gptq", {"weight": np.ones((128, 128), np.float32)}, "stored twice"),
    "8 bits for 4": (
        "gptq",
        {
            "qweight": np.ones((32, 128), np.int32),
            "scales": np.ones((4, 128), np.float16),
            "qzeros": np.ones((4, 16), np.int32),
        },
        "q_proj.weight: found shape (128, 32), expected (128, 16)",
    ),
    "zero points that are not those of sym": (
        "gptq that is symmetric",
        {"qzeros": np.full((2, 16), 5, np.int32)},
        "q_proj.qzeros: found zero points that are not all 8",
    ),
    "no scale": ("fp8 in blocks", {"weight_scale_inv": GONE}, f"without {Q}.weight_scale_inv or {Q}.weight_scale"),
    "two scales": ("fp8 in blocks", {"weight_scale": np.ones((2, 2), np.float32)}, "with both"),
    "scales of another block": (
        "fp8 in blocks",
        {"weight_scale_inv": np.ones((4, 2), np.float32)},
        "with scales (4, 2), expected scales of shape (2, 2) for blocks of (64, 64)",
    ),
    "one scale for blocks": ("fp8 in blocks", {"weight_scale_inv": np.ones((), np.float32)}, "with scales ()"),
    "scales that are bytes": (
        "fp8 in blocks",
        {"weight_scale_inv": np.ones((2, 2), np.uint8)},
        "weight_scale_inv: found uint8, expected floats or F8_E8M0",
    ),
    "scales that are small floats": (
        "fp8 in blocks",
        {"weight_scale_inv": ("F8_E4M3", np.ones((2, 2), np.uint8))},
        "weight_scale_inv: found F8_E4M3",
    ),
    "a scale of plain floats": (
        "fp8 in blocks",
        {"weight": np.ones((128, 128), np.float32)},
        f"{Q}.weight_scale_inv: is a scale, but {Q}.weight is no float of 8 bits",
    ),
    "bytes": ("fp8 in blocks", {"weight": np.ones((128, 128), np.uint8)}, "is no float of 8 bits"),
    "a list of 8-bit floats": ("fp8 in blocks", {"weight": ("F8_E4M3", np.ones(128, np.uint8))}, "expected a matrix"),
    "scales for half of the rows": (
        "fp8 with one scale",
        {"weight_scale": np.ones((3,), np.float32)},
        "with scales (3,)",
    ),
    "no scale at all": ("fp8 with one scale", {"weight_scale": np.ones((0, 1), np.float32)}, "with scales (0, 1)"),
}


@pytest.mark.parametrize(("kind", "changes", "problem"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_tensors_that_do_not_fit_the_format_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], problem: str
) -> None:
    encode, said, _ = FORMATS[kind]
    first = True

    def spoilt(random: np.random.Generator, rows: int, width: int) -> tuple[dict[str, Any], Array]:
        nonlocal first
        stored, values = encode(random, rows, width)
        if first:
            stored = {leaf: value for leaf, value in (stored | changes).items() if value is not GONE}
        first = False
        return stored, values

    folder, _ = llama(tmp_path, spoilt, said)
    refusal(BadInput, problem, of=lambda: mt.load(folder))


def test_floats_of_8_bits_without_a_word_about_them_are_refused(tmp_path: Path) -> None:
    stored, _ = llama(tmp_path, FORMATS["fp8 in blocks"][0], None)
    refusal(BadInput, "no place in the model", "q_proj.weight_scale_inv", of=lambda: mt.load(stored))
    stored, _ = llama(
        tmp_path / "bare",
        lambda *sizes: ({"weight": ("F8_E4M3", np.ones(sizes[1:], np.uint8))}, np.ones(sizes[1:])),
        None,
    )
    refusal(BadInput, "q_proj.weight", "found F8_E4M3, expected floats", of=lambda: mt.load(stored))


def gpt_oss(folder: Path, changes: Mapping[str, Any]) -> Path:
    """The stored gpt-oss with other tensors in its first layer."""
    weights = model_of("mxfp4-gpt_oss")
    for leaf, value in changes.items():
        weights.pop(f"model.layers.0.mlp.experts.{leaf}", None)
        if value is not GONE:
            weights[f"model.layers.0.mlp.experts.{leaf}"] = value
    folder.mkdir()
    (folder / "config.json").write_text((DATA / "mxfp4-gpt_oss" / "config.json").read_text())
    write_weights(folder / "model.safetensors", weights)
    return folder


WRONG_BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({"down_proj_scales": GONE}, "down_proj_blocks: stored in blocks, but there is no"),
    "no blocks": ({"down_proj_blocks": GONE}, "down_proj_scales"),
    "short blocks": ({"down_proj_blocks": mx.zeros((4, 64, 3, 15), mx.uint8)}, "expected bytes, with 16 in a block"),
    "too few scales": ({"down_proj_scales": mx.zeros((4, 64, 2), mx.uint8)}, "found blocks (4, 64, 3, 16) and scales"),
    "scales of floats": ({"down_proj_scales": mx.zeros((4, 64, 3))}, "expected bytes"),
    "another width": (
        {"down_proj_scales": mx.zeros((4, 64, 2), mx.uint8), "down_proj_blocks": mx.zeros((4, 64, 2, 16), mx.uint8)},
        "down_proj.weight: found shape (4, 64, 8), expected (4, 64, 12)",
    ),
    "the floats as well": ({"down_proj": mx.zeros((4, 96, 64))}, "no place in the model"),
}


@pytest.mark.parametrize(("changes", "problem"), WRONG_BLOCKS.values(), ids=WRONG_BLOCKS)
def test_blocks_that_do_not_go_together_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    refusal(BadInput, problem, of=lambda: mt.load(gpt_oss(tmp_path / "x", changes)))


def mlx_case(folder: Path, said: Callable[[dict[str, Any]], Any], **changes: Any) -> Path:
    """The stored Llama of mlx-lm's with other settings; a change is of the whole config."""
    folder.mkdir()
    config = json.loads((DATA / "mlx-llama-mixed" / "config.json").read_text())
    config["quantization"] = config["quantization_config"] = said(config["quantization"])
    (folder / "config.json").write_text(json.dumps(config | changes))
    write_weights(folder / "model.safetensors", model_of("mlx-llama-mixed"))
    return folder


DOWN = "model.layers.0.mlp.down_proj"
WRONG_PACKING: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any], str]] = {
    "a number": (lambda q: 4, {}, "quantization: found 4, expected an object"),
    "no bits": (lambda q: {"group_size": 32}, {}, "quantization: found {'mode': 'affine', 'group_size': 32}"),
    "7 bits": (lambda q: q | {"bits": 7}, {}, "expected bits of"),
    "another mode": (lambda q: q | {"mode": "ternary"}, {}, "'mode': 'ternary'"),
    "a setting of the future": (lambda q: q | {"rotation": "hadamard"}, {}, "quantization.rotation: found 'hadamard'"),
    "one that is not packed": (
        lambda q: q | {DOWN: False},
        {},
        f"quantization.{DOWN}: found false, but the module has",
    ),
    "other bits": (lambda q: q | {DOWN: {"bits": 4, "group_size": 32}}, {}, f"{DOWN}: found weight"),
    "a scale for all": (lambda q: q | {DOWN: q[DOWN] | {"global_scale": True}}, {}, f"quantization.{DOWN}: found"),
    "two that differ": (lambda q: q, {"quantization_config": FP8}, "quantization_config: differs from quantization"),
    "one without a method": (lambda q: q, {"quantization": None}, "quant_method: missing"),
}


@pytest.mark.parametrize(("said", "changes", "problem"), WRONG_PACKING.values(), ids=WRONG_PACKING)
def test_packing_that_contradicts_itself_is_refused(
    tmp_path: Path, said: Callable[[dict[str, Any]], Any], changes: dict[str, Any], problem: str
) -> None:
    refusal(BadInput, problem, of=lambda: mt.load(mlx_case(tmp_path / "x", said, **changes)))


def test_what_is_true_anyway_may_be_said_of_a_module(tmp_path: Path) -> None:
    ids, wanted = stored_logits("mlx-llama-mixed")
    for i, said in enumerate([{"lm_head": False}, {"model.layers.0.mlp.up_proj": True}, {"vision.proj": {"bits": 8}}]):
        folder = mlx_case(tmp_path / str(i), lambda q, said=said: q | said)
        assert gap(mt.load(folder, "float32")(ids), wanted) < TIGHT
    only = mlx_case(tmp_path / "only", lambda q: q, quantization_config=None)
    assert gap(mt.load(only, "float32")(ids), wanted) < TIGHT


def test_settings_without_a_packed_tensor_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "x", quantization={"bits": 4, "group_size": 32})
    refusal(BadInput, "quantization: found settings, but no tensor is packed", of=lambda: mt.load(folder))


def test_halves_of_latent_attention_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    weights = model_of("mlx-deepseek_v3")
    half = "model.layers.0.self_attn.unembed_out"
    parts = [f"{half}.{leaf}" for leaf in ("weight", "scales", "biases")]
    (tmp_path / "config.json").write_text((DATA / "mlx-deepseek_v3" / "config.json").read_text())
    for changes, problem in (
        ({name: weights[name][:3] for name in parts}, "no keys and values of the same heads"),
        ({parts[1]: weights[parts[1]][:3]}, f"{half}: found weight (4, 64, 8), scales (3, 64, 1)"),
        ({parts[2]: None}, f"{half}: is packed, but there is no {half}.biases"),
    ):
        stored = {name: value for name, value in (weights | changes).items() if value is not None}
        write_weights(tmp_path / "model.safetensors", stored)
        refusal(BadInput, problem, of=lambda: mt.load(tmp_path))


def test_our_own_folders_are_left_alone(tmp_path: Path) -> None:
    made = convert(GOLDEN / "llama-mha", tmp_path / "made").path
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    refusal(BadInput, "quantization_config: found", "a setting that llama does not know", of=lambda: mt.load(made))
