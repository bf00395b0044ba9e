"""Quantizing with exceptions: modes, recipes, what is kept, and what is never quantized."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import files_in, make_folder, read_weights, refusal, same
from cli_models import error_line, invoke
from helpers import GOLDEN
from widened import SIZES, widened, widened_weights

import mlx_tformer as mt
from mlx_tformer import memory
from mlx_tformer.checkpoint import plan as planning
from mlx_tformer.checkpoint.convert import Conversion, convert
from mlx_tformer.checkpoint.describe import describe
from mlx_tformer.checkpoint.mixed import NEVER, RECIPES, TINY, matches
from mlx_tformer.checkpoint.plan import dequantize, packed_names
from mlx_tformer.checkpoint.source import MODES
from mlx_tformer.errors import BadInput, UsageError

WAYS: dict[str, dict[str, Any]] = {
    "affine": {"bits": 4, "group_size": 32, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}
ASKED: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in WAYS} | {
    "affine": {"quantize": 4, "group_size": 32}
}
IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {case: widened(tmp_path_factory.mktemp("wide") / case, case) for case in SIZES}


def quantization(made: Conversion) -> dict[str, dict[str, Any]]:
    return json.loads((made.path / "config.json").read_text())["mlx_tformer"]["quantization"]


# --- what MLX can do ---


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_are_those_of_mlx(mode: str) -> None:
    found = set()
    for bits in range(2, 9):  # one bit, which MLX has as well, is not offered
        for size in (8, 16, 32, 64, 128, 256):
            try:
                mx.eval(mx.quantize(mx.ones((2, 256)), group_size=size, bits=bits, mode=mode))
                found.add((bits, size))
            except ValueError:
                continue
    assert found == {(bits, size) for bits in MODES[mode][0] for size in MODES[mode][1]}


# --- modes ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["llama-gqa-tied", "qwen2_moe"])
def test_quantized_weights_are_those_of_mlx_whatever_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: dict[str, Path], case: str, mode: str
) -> None:
    monkeypatch.setattr(planning, "VALUES", 500)
    whole = read_weights(convert(sources[case], tmp_path / "whole").path)
    made = convert(sources[case], tmp_path / "made", **ASKED[mode])
    found, table = read_weights(made.path), quantization(made)
    assert {"decoder.layers.0.attn.op.qkv", "embed.tokens"} <= table.keys()
    assert case != "qwen2_moe" or {f"decoder.layers.2.mlp.op.experts.{x}" for x in ("gate_up", "down")} <= table.keys()
    for module, how in table.items():
        assert how == WAYS[mode]
        names = packed_names(f"{module}.weight", mode)
        wanted = mx.quantize(whole[names[0]], **how)
        assert all(same(found[name], array) for name, array in zip(names, wanted, strict=True))
        spread = mx.dequantize(*wanted, **how).astype(mx.float32)
        assert made.tensors[names[0]]["error"] == mx.abs(spread - whole[names[0]].astype(mx.float32)).max().item() > 0
    rest = found.keys() - {name for module in table for name in packed_names(f"{module}.weight", mode)}
    assert rest and all(same(found[name], whole[name]) for name in rest)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", SIZES)
def test_a_quantized_conversion_computes_with_the_unpacked_values(
    tmp_path: Path, sources: dict[str, Path], case: str, mode: str
) -> None:
    made = convert(sources[case], tmp_path / "made", dtype="float32", **ASKED[mode])
    weights, table = read_weights(made.path), quantization(made)
    packed = {name for module in table for name in packed_names(f"{module}.weight", mode)}
    dense = {name: array for name, array in weights.items() if name not in packed}
    for module, how in table.items():
        dense[f"{module}.weight"] = dequantize([weights[n] for n in packed_names(f"{module}.weight", mode)], how)
    whole = mt.load(sources[case], "float32")
    whole.model.load_weights(list(dense.items()))
    found, wanted = (np.array(lm(IDS)) for lm in (mt.load(made.path), whole))
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max() + 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["llama-gqa-tied", "gpt2", "qwen2_moe"])
def test_a_model_computes_in_its_dtype_whatever_it_is_packed_in(
    tmp_path: Path, sources: dict[str, Path], case: str, mode: str, dtype: str
) -> None:
    made = convert(sources[case], tmp_path / "made", dtype=dtype, **ASKED[mode])
    lm = mt.load(made.path)
    hidden = lm.model.hidden(IDS)
    assert hidden.dtype == lm(IDS).dtype == lm.dtype == getattr(mx, dtype)


@pytest.mark.parametrize("settings", [*ASKED.values(), {"recipe": "mixed-4-6", "group_size": 32}], ids=str)
def test_converting_such_a_conversion_changes_nothing(
    tmp_path: Path, sources: dict[str, Path], settings: dict[str, Any]
) -> None:
    convert(sources["qwen2_moe"], tmp_path / "once", **settings)
    convert(tmp_path / "once", tmp_path / "twice")
    assert files_in(tmp_path / "twice") == files_in(tmp_path / "once")


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_counted_as_they_were_before(tmp_path: Path, sources: dict[str, Path], mode: str) -> None:
    whole, made = (convert(sources["qwen2_moe"], tmp_path / str(i), **s) for i, s in enumerate(({}, ASKED[mode])))
    assert made.parameters == whole.parameters == memory.parameter_count(mt.load(made.path).model)
    assert made.nbytes == sum(array.nbytes for array in read_weights(made.path).values())
    card = describe(made.path).to_dict()
    assert (card["parameters"], card["weights_bytes"]) == (whole.parameters, made.nbytes)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_groups_of_tiny_values_become_zero_and_not_infinite(tmp_path: Path, mode: str) -> None:
    weights = widened_weights("llama-gqa-tied")
    name = "model.layers.0.mlp.down_proj.weight"
    tiny = [1e-38, -1e-40, 1e-36, 3e-37]
    rows = np.array(weights[name].astype(mx.float32))
    rows[: len(tiny), :32] = np.array(tiny)[:, None]
    weights[name] = mx.array(rows).astype(mx.bfloat16)
    made = convert(
        make_folder(tmp_path / "source", "llama-gqa-tied", weights, **SIZES["llama-gqa-tied"]),
        tmp_path / "m",
        mode=mode,
    )
    stored, module = read_weights(made.path), "decoder.layers.0.mlp.op.down"
    found = np.array(dequantize([stored[n] for n in packed_names(f"{module}.weight", mode)], WAYS[mode]))
    assert np.isfinite(found).all() and (found[: len(tiny), :32] == 0).all() and max(tiny) < TINY
    assert made.largest_error < 1


@pytest.mark.parametrize(("mode", "value"), [("mxfp4", 3e38), ("mxfp8", 2e38), ("nvfp4", 2700.0), ("nvfp4", -1e30)])
def test_values_that_a_mode_cannot_hold_are_refused(tmp_path: Path, mode: str, value: float) -> None:
    case, name = "llama-gqa-tied", "model.embed_tokens.weight"
    weights = widened_weights(case)
    rows = np.array(weights[name].astype(mx.float32))
    rows[3, 5:7] = value
    weights[name] = mx.array(rows)
    source = make_folder(tmp_path / "source", case, weights, **SIZES[case])
    parts = (name, f"2 values do not fit {mode}", "choose another --mode")
    refusal(BadInput, *parts, of=lambda: convert(source, tmp_path / "made", dtype="float32", mode=mode))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("mode", MODES)
def test_values_that_are_not_finite_are_refused_in_every_mode(tmp_path: Path, mode: str) -> None:
    case, name = "llama-gqa-tied", "model.embed_tokens.weight"
    weights = widened_weights(case)
    rows = np.array(weights[name].astype(mx.float32))
    rows[3, 5:7] = float("nan"), float("inf")
    weights[name] = mx.array(rows).astype(mx.bfloat16)
    source = make_folder(tmp_path / "source", case, weights, **SIZES[case])
    parts = (name, "found 2 values that are NaN or infinite")
    refusal(BadInput, *parts, of=lambda: convert(source, tmp_path / "made", **ASKED[mode]))


def test_rows_that_mlx_cannot_pack_as_nvfp4_are_left(tmp_path: Path) -> None:
    made = convert(GOLDEN / "llama-gqa-tied", tmp_path / "made", mode="nvfp4")  # rows of 48: three groups of 16
    assert "embed.tokens: rows of 48 are not whole groups of 32" in made.unquantized and quantization(made) == {}


def test_a_folder_that_says_so_of_such_rows_is_refused(tmp_path: Path) -> None:
    made = convert(GOLDEN / "llama-gqa-tied", tmp_path / "made").path
    config = json.loads((made / "config.json").read_text())
    config["mlx_tformer"]["quantization"] = {"embed.tokens": WAYS["nvfp4"]}
    (made / "config.json").write_text(json.dumps(config))
    refusal(BadInput, "embed.tokens", of=lambda: mt.load(made))


# --- recipes ---


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", SIZES)
def test_recipes_give_down_projections_and_what_makes_the_logits_more_bits(
    tmp_path: Path, sources: dict[str, Path], case: str, recipe: str
) -> None:
    made = convert(sources[case], tmp_path / "made", recipe=recipe, group_size=32)
    usual, more = (int(bits) for bits in recipe.split("-")[1:])
    table = quantization(made)
    head = "embed.tokens" if mt.load(made.path).model.tied else "head"
    downs = {path for path in table if path.endswith(".down")}
    assert head in table and len(downs) >= 2
    assert {path for path, how in table.items() if how["bits"] == more} == {*downs, head}
    assert {how["bits"] for path, how in table.items() if path not in {*downs, head}} == {usual}
    assert {(how["group_size"], how["mode"]) for how in table.values()} == {(32, "affine")}


def test_more_bits_where_they_matter_cost_less_than_they_gain(tmp_path: Path) -> None:
    from mlx_tformer.checkpoint.verify import verify

    four = convert("shakespeare", tmp_path / "four", quantize=4)
    mixed = convert("shakespeare", tmp_path / "mixed", recipe="mixed-4-6")
    assert four.bits_per_weight < mixed.bits_per_weight < 6
    kl = [verify("shakespeare", made.path, limit=1).mean_kl for made in (four, mixed)]
    assert kl[1] < 0.7 * kl[0]


# --- exceptions ---

KEEP = {
    "head": {"head"},
    "lm_head": {"head"},
    "layers.1": {
        f"decoder.layers.1.{path}" for path in ("attn.op.qkv", "attn.op.out", "mlp.op.gate_up", "mlp.op.down")
    },
    "*.layers.0.attn.*": {"decoder.layers.0.attn.op.qkv", "decoder.layers.0.attn.op.out"},
    "embed": {"embed.tokens"},
    "embed_tokens": {"embed.tokens"},
    "gate_proj": {f"decoder.layers.{i}.mlp.op.gate_up" for i in (0, 1)},
    "model.layers.?.mlp.down_proj": {f"decoder.layers.{i}.mlp.op.down" for i in (0, 1)},
    "op.down, head": {f"decoder.layers.{i}.mlp.op.down" for i in (0, 1)} | {"head"},
    "router,norm": set(),
}


@pytest.mark.parametrize("patterns", KEEP)
def test_what_is_to_be_kept_is_kept_and_listed(tmp_path: Path, sources: dict[str, Path], patterns: str) -> None:
    everything = convert(sources["llama-bias"], tmp_path / "all", quantize=4, group_size=32)
    made = convert(sources["llama-bias"], tmp_path / "made", quantize=4, group_size=32, keep=patterns)
    kept = KEEP[patterns]
    assert quantization(everything).keys() - quantization(made).keys() == kept
    assert {entry.partition(":")[0] for entry in made.unquantized} == kept
    assert all("kept, as" in entry for entry in made.unquantized)
    whole, found = read_weights(convert(sources["llama-bias"], tmp_path / "plain").path), read_weights(made.path)
    assert all(same(found[f"{path}.weight"], whole[f"{path}.weight"]) for path in kept)


def test_patterns_can_be_given_one_by_one(tmp_path: Path, sources: dict[str, Path]) -> None:
    a = convert(sources["llama-bias"], tmp_path / "a", quantize=4, group_size=32, keep="head,layers.0")
    b = convert(sources["llama-bias"], tmp_path / "b", quantize=4, group_size=32, keep=["head", "layers.0"])
    assert files_in(a.path) == files_in(b.path)


def test_the_head_of_a_tied_model_is_its_embedding(tmp_path: Path, sources: dict[str, Path]) -> None:
    for word in ("head", "lm_head", "embed"):
        made = convert(sources["llama-gqa-tied"], tmp_path / word, mode="mxfp4", keep=word)
        assert made.unquantized == [f"embed.tokens: kept, as {word} asks"]


def test_exceptions_hold_for_recipes_too(tmp_path: Path, sources: dict[str, Path]) -> None:
    made = convert(sources["qwen2_moe"], tmp_path / "made", recipe="mixed-4-8", group_size=32, keep="experts")
    assert not any("experts" in path for path in quantization(made))
    assert quantization(made)["head"]["bits"] == 8


@pytest.mark.parametrize("word", ["lm_hed", "layers.9", "*.x"])
def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path, sources: dict[str, Path], word: str) -> None:
    of = lambda: convert(sources["llama-bias"], tmp_path / "made", quantize=4, group_size=32, keep=word)  # noqa: E731
    refusal(UsageError, f"keep: {word!r} names no module", "decoder.layers.*.mlp.op.down (2)", of=of)
    assert not (tmp_path / "made").exists()


def test_words_are_whole_parts_of_a_path() -> None:
    path = "decoder.layers.1.mlp.op.gate_up"
    assert all(matches(word, [path]) for word in ("gate_up", "op.gate_up", "decoder", path, "*gate*", "*[0-9].mlp*"))
    assert not any(matches(word, [path]) for word in ("gate", "layers.11", "op gate_up", "", ".", "*.down", "mlp*"))


# --- what is never quantized ---


@pytest.mark.parametrize("settings", [*ASKED.values(), {"recipe": "mixed-3-6", "group_size": 32}], ids=str)
@pytest.mark.parametrize("case", SIZES)
def test_routers_gates_norms_positions_and_latents_stay_as_they_are(
    tmp_path: Path, sources: dict[str, Path], case: str, settings: dict[str, Any]
) -> None:
    whole = read_weights(convert(sources[case], tmp_path / "whole").path)
    made = convert(sources[case], tmp_path / "made", **settings)
    found, table = read_weights(made.path), quantization(made)
    stay = {name for name in whole if name.removesuffix(".weight") not in table}
    assert all(same(found[name], whole[name]) for name in stay)
    listed = {entry.partition(":")[0] for entry in made.unquantized}
    matrices = {name for name in stay if whole[name].ndim > 1 and not name.endswith(".bias")}
    assert listed == {name.removesuffix(".weight") for name in matrices if name != "embed.positions.table.weight"} | (
        {"embed.positions.table"} if case == "gpt2" else set()
    )
    parts = {"qwen2_moe": ("router", "shared_gate"), "deepseek_v3": ("router", "kv_up"), "gpt2": ("positions",)}
    for part in parts.get(case, ()):
        assert any(matches(part, [name]) for name in listed)
    assert all(any(why in entry for why in (*NEVER.values(), "no matrix of a linear")) for entry in made.unquantized)


# --- what cannot be meant ---

USAGE: list[tuple[dict[str, Any], str]] = [
    ({"mode": "fp4"}, "mode: found 'fp4', expected one of affine, mxfp4, mxfp8, nvfp4"),
    ({"mode": "affine"}, "quantize: missing, expected one of 2, 3, 4, 5, 6, 8 bits for mode affine"),
    ({"mode": "mxfp8", "quantize": 4}, "quantize: found 4, expected 8 bits for mode mxfp8"),
    ({"mode": "mxfp4", "group_size": 64}, "group_size: found 64, expected 32 for mode mxfp4"),
    ({"mode": "nvfp4", "group_size": 32}, "group_size: found 32, expected 16 for mode nvfp4"),
    ({"recipe": "mixed"}, "recipe: found 'mixed', expected one of mixed-3-6, mixed-4-6, mixed-4-8"),
    ({"recipe": "mixed-4-6", "quantize": 4}, "recipe: mixed-4-6 says bits and mode itself"),
    ({"recipe": "mixed-4-6", "mode": "mxfp4"}, "recipe: mixed-4-6 says bits and mode itself"),
    ({"keep": "head"}, "keep: nothing is quantized"),
]


@pytest.mark.parametrize(("settings", "problem"), USAGE, ids=str)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    refusal(UsageError, problem, of=lambda: convert(GOLDEN / "qwen2", tmp_path / "made", **settings))
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert f"--{problem.replace('_', '-')}" in error_line(
        invoke("convert", str(GOLDEN / "qwen2"), str(tmp_path / "made"), *words), 2
    ).replace("_", "-")
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_what_the_library_takes(tmp_path: Path, sources: dict[str, Path]) -> None:
    options = ("--mode", "mxfp4", "--keep", "lm_head, layers.0")
    result = invoke("convert", str(sources["llama-bias"]), str(tmp_path / "a"), *options)
    assert result.exit_code == 0
    assert "not quantized: head: kept, as lm_head asks" in result.stderr
    convert(sources["llama-bias"], tmp_path / "b", mode="mxfp4", keep="lm_head,layers.0")
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")
