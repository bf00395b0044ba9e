"""Converting: the same numbers in our layout, whatever the source, and what is recorded of it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    case_weights,
    copy_case,
    files_in,
    make_folder,
    ours,
    parameters,
    read_weights,
    record,
    refusal,
    same,
)
from helpers import CASES, GOLDEN, expected, gap

import mlx_tformer as mt
from mlx_tformer.checkpoint import convert as conversion
from mlx_tformer.checkpoint import plan as planning
from mlx_tformer.checkpoint.convert import convert, default_dest
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile
from mlx_tformer.errors import BadInput

CASE = "llama-bias"  # rows of 32 values, but for down_proj: 44


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read in blocks of a few rows, as large ones are."""
    monkeypatch.setattr(planning, "VALUES", 200)


# --- the same numbers ---


@pytest.mark.parametrize("case", CASES)
def test_a_conversion_has_the_weights_of_its_source_bit_for_bit(tmp_path: Path, case: str, small_blocks: None) -> None:
    made, ids = convert(GOLDEN / case, tmp_path / "made"), mx.array(expected(case)["input_ids"])
    assert made.path == tmp_path / "made"
    found, wanted = (parameters(mt.load(path).model) for path in (made.path, GOLDEN / case))
    assert found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)
    # A transposed matrix and a stored one may be multiplied in another order.
    a, b = (mt.load(path, "float32")(ids) for path in (made.path, GOLDEN / case))
    assert gap(a, b) < 1e-5 * mx.abs(b).max().item()


@pytest.mark.parametrize("case", CASES)
def test_converting_a_conversion_changes_nothing(tmp_path: Path, case: str) -> None:
    convert(GOLDEN / case, tmp_path / "once")
    convert(tmp_path / "once", tmp_path / "twice")
    assert files_in(tmp_path / "twice") == files_in(tmp_path / "once")


SETTINGS: list[dict[str, Any]] = [
    {"dtype": "float16"},
    {"dtype": "float32"},
    {"quantize": 4, "group_size": 32},
    {"quantize": 8, "group_size": 32, "dtype": "float16"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_converting_a_conversion_changes_nothing_whatever_was_asked_for(tmp_path: Path, settings: dict) -> None:
    convert(GOLDEN / CASE, tmp_path / "once", **settings)
    convert(tmp_path / "once", tmp_path / "twice")
    assert files_in(tmp_path / "twice") == files_in(tmp_path / "once")


def test_the_files_that_go_along_are_the_same_bytes(tmp_path: Path) -> None:
    source = copy_case(CASE, tmp_path / "source")
    extra = {
        "tokenizer_config.json": b'{ "chat_template" : "\xc3\xa9" }\n\n',
        "chat_template.jinja": b"{{ x }}\r\n",
        "special_tokens_map.json": b"{}",
    }
    for name, content in extra.items():
        (source / name).write_bytes(content)
    (source / "README.md").write_text("not needed")
    found = files_in(convert(source, tmp_path / "made").path)
    assert found.keys() - {"model.safetensors", "config.json", "conversion.json"} == {*extra, "generation_config.json"}
    assert all(found[name] == content for name, content in extra.items())
    assert found["generation_config.json"] == (source / "generation_config.json").read_bytes()


def test_several_source_files_and_one_give_the_same_conversion(tmp_path: Path) -> None:
    one, many = make_folder(tmp_path / "one" / "x"), make_folder(tmp_path / "many" / "x", shards=3)
    a, b = (files_in(convert(folder, tmp_path / f"made {folder.parent.name}").path) for folder in (one, many))
    assert {name for name in a if a[name] != b[name]} == {"config.json"}  # which says where it came from


# --- several files ---


def sizes(folder: Path) -> list[int]:
    files = sorted(folder.glob("*.safetensors"))
    return [sum(tensor.nbytes for tensor in SafetensorsFile(file).tensors.values()) for file in files]


def test_a_large_conversion_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(GOLDEN / CASE, tmp_path / "whole", quantize=4, group_size=32).path
    monkeypatch.setattr(conversion, "SHARD", 6_000)
    parts = convert(GOLDEN / CASE, tmp_path / "parts", quantize=4, group_size=32).path
    names = [path.name for path in sorted(parts.glob("*.safetensors"))]
    assert names == [f"model-{i:05}-of-{len(names):05}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) >= sum(sizes(whole)) / 6_000 > 1
    assert max(sizes(parts)) <= 6_000 and sum(sizes(parts)) == sum(sizes(whole))
    a, b = read_weights(whole), read_weights(parts)
    assert a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes(parts))
    assert index["weight_map"] == {name: file for file in names for name in SafetensorsFile(parts / file).tensors}
    for file in names:
        modules = {name.rpartition(".")[0] for name in SafetensorsFile(parts / file).tensors}
        assert {name for name in b if name.rpartition(".")[0] in modules} <= SafetensorsFile(
            parts / file
        ).tensors.keys()
    assert same(mt.load(parts)(mx.array([[1, 2]])), mt.load(whole)(mx.array([[1, 2]])))
    convert(parts, tmp_path / "again")
    assert files_in(tmp_path / "again") == files_in(parts)


def test_a_module_that_is_larger_than_a_file_may_be_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "SHARD", 1)
    made = convert(GOLDEN / CASE, tmp_path / "made").path
    files = [SafetensorsFile(path) for path in made.glob("*.safetensors")]
    assert all(len({name.rpartition(".")[0] for name in file.tensors}) == 1 for file in files)
    assert same(mt.load(made)(mx.array([[1]])), mt.load(GOLDEN / CASE)(mx.array([[1]])))


# --- dtypes ---


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_weights_are_stored_in_the_dtype_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    made = convert(GOLDEN / CASE, tmp_path / "made", dtype=dtype)
    kind = getattr(mx, dtype)
    wanted = case_weights(CASE)["model.layers.1.mlp.down_proj.weight"].astype(kind)
    found = read_weights(made.path)
    assert {array.dtype for array in found.values()} == {kind}
    assert same(found["decoder.layers.1.mlp.op.down.weight"], wanted)
    assert ours(made.path)["dtype"] == dtype
    assert made.bits_per_weight == 8 * kind.size


def test_rounding_errors_are_recorded_where_a_dtype_changes(tmp_path: Path) -> None:
    weights = {name: array.astype(mx.float32) * 1.001 for name, array in case_weights(CASE).items()}
    source = make_folder(tmp_path / "source", CASE, weights, dtype="float32")
    made = convert(source, tmp_path / "made", dtype="bfloat16")
    tensors = record(made.path)["tensors"]
    for name, theirs in {
        "decoder.norm.weight": "model.norm.weight",
        "embed.tokens.weight": "model.embed_tokens.weight",
    }.items():
        exact = np.array(weights[theirs], np.float64)
        rounded = np.array(weights[theirs].astype(mx.bfloat16).astype(mx.float32), np.float64)
        assert tensors[name]["error"] == np.abs(exact - rounded).max() > 0
    assert made.largest_error == max(entry["error"] for entry in tensors.values())
    assert "error" not in json.dumps(record(convert(source, tmp_path / "plain").path)["tensors"])


# --- what is recorded ---


def test_the_record_says_what_each_tensor_came_from(tmp_path: Path) -> None:
    weights = case_weights("llama-gqa-tied")
    weights |= {"lm_head.weight": weights["model.embed_tokens.weight"]}
    weights |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": mx.ones(6) for i in range(2)}
    source = make_folder(tmp_path / "source", "llama-gqa-tied", weights)
    (source / "stray.safetensors").write_bytes(b"x")
    made = convert(source, tmp_path / "made")
    found, stored = record(made.path), read_weights(made.path)
    assert found["tensors"]["decoder.layers.1.attn.op.qkv.weight"] == {
        "from": [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"],
        "shape": list(stored["decoder.layers.1.attn.op.qkv.weight"].shape),
        "dtype": "BF16",
    }
    assert found["tensors"].keys() == stored.keys()
    named = [name for entry in found["tensors"].values() for name in entry["from"]] + list(found["dropped"])
    assert sorted(named) == sorted(weights)
    assert found["dropped"]["lm_head.weight"] == "a copy of embed.tokens.weight"
    assert found["dropped"]["model.layers.0.self_attn.rotary_emb.inv_freq"] == "computed from the config"
    assert found["bytes"] == made.nbytes == sum(array.nbytes for array in stored.values())
    assert found["parameters"] == made.parameters == sum(array.size for array in stored.values())
    assert found["bits_per_weight"] == 16 and found["largest_error"] == 0 and found["unquantized"] == []
    assert made.notes == ["ignored stray.safetensors, which no index names"]
    assert ours(made.path) == {
        "layout": 1,
        "source": str(source),
        "revision": None,
        "dtype": "bfloat16",
        "quantization": {},
    }


def test_the_record_of_a_quantized_model_counts_the_weights_that_were_there_before(tmp_path: Path) -> None:
    plain, packed = (convert(GOLDEN / CASE, tmp_path / f"{q}", quantize=q, group_size=32) for q in (None, 4))
    assert packed.parameters == plain.parameters
    assert packed.nbytes == sum(array.nbytes for array in read_weights(packed.path).values())
    assert packed.bits_per_weight == 8 * packed.nbytes / packed.parameters < 10
    tensors = record(packed.path)["tensors"]
    assert (
        tensors["embed.tokens.scales"]["from"]
        == tensors["embed.tokens.weight"]["from"]
        == ["model.embed_tokens.weight"]
    )
    assert tensors["embed.tokens.weight"]["dtype"] == "U32"


def test_the_config_is_the_source_s_and_ours_beside_it(tmp_path: Path) -> None:
    made = convert(GOLDEN / CASE, tmp_path / "made").path
    theirs = json.loads((GOLDEN / CASE / "config.json").read_text())
    assert json.loads((made / "config.json").read_text()) == theirs | {"mlx_tformer": ours(made)}


def test_text_that_is_no_utf8_survives(tmp_path: Path) -> None:
    source = make_folder(tmp_path / os.fsdecode(b"odd \xff"), CASE, _name_or_path="\ud800 é")
    made = convert(source, tmp_path / "made").path
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    assert config["_name_or_path"] == "\ud800 é" and config["mlx_tformer"]["source"] == str(source)
    assert same(mt.load(made)(mx.array([[1]])), mt.load(GOLDEN / CASE)(mx.array([[1]])))


RECORDS = ["[]", "{}", "{", '{"tensors": [], "dropped": {}, "unquantized": []}']
RECORDS += [json.dumps({"tensors": {"x": x}, "dropped": {}, "unquantized": []}) for x in (1, {}, {"from": [1]})]
RECORDS += ['{"tensors": {"x": {"from": [], "error": "large"}}, "dropped": {}, "unquantized": []}']


@pytest.mark.parametrize("text", RECORDS)
def test_a_record_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    once = convert(GOLDEN / CASE, tmp_path / "once").path
    (once / "conversion.json").write_text(text)
    refusal(BadInput, str(once / "conversion.json"), of=lambda: convert(once, tmp_path / "twice"))
    assert not (tmp_path / "twice").exists()
    (once / "conversion.json").unlink()
    assert same(mt.load(convert(once, tmp_path / "twice").path)(mx.array([[1]])), mt.load(once)(mx.array([[1]])))


def test_progress_counts_bytes_up_to_all_of_them(tmp_path: Path, small_blocks: None) -> None:
    seen: list[tuple[int, int]] = []
    made = convert(GOLDEN / CASE, tmp_path / "made", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and len(seen) > 20
    assert {total for _, total in seen} == {made.nbytes} and seen[-1][0] == made.nbytes


@pytest.mark.parametrize("settings", [{}, {"quantize": 4, "group_size": 32}], ids=str)
def test_no_more_than_some_rows_of_a_tensor_are_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None, settings: dict[str, Any]
) -> None:
    seen: list[int] = []
    values = SafetensorsFile._values

    def watched(file: SafetensorsFile, *arguments: Any) -> mx.array:
        found = values(file, *arguments)
        seen.append(found.size)
        return found

    monkeypatch.setattr(SafetensorsFile, "_values", watched)
    convert(GOLDEN / CASE, tmp_path / "made", **settings)
    assert max(seen) <= 200 and sum(seen) == sum(array.size for array in case_weights(CASE).values())


# --- row 7: values that are not finite ---

NAN, INF = float("nan"), float("inf")


def with_values(folder: Path, name: str, values: list[float]) -> Path:
    """A golden case in float32 with these values at the end of a tensor."""
    weights = {n: array.astype(mx.float32) for n, array in case_weights(CASE).items()}
    flat = np.array(weights[name]).reshape(-1)
    flat[-len(values) :] = values
    weights[name] = mx.array(flat.reshape(weights[name].shape))
    return make_folder(folder, CASE, weights, dtype="float32")


ODD = [("model.norm.weight", [NAN]), ("model.layers.1.self_attn.k_proj.weight", [INF, 0.5, NAN, -INF])]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantize": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize(("name", "values"), ODD, ids=["a norm", "a part of a join"])
def test_values_that_are_not_finite_are_refused_with_tensor_and_count(
    tmp_path: Path, small_blocks: None, settings: dict[str, Any], name: str, values: list[float]
) -> None:
    source = with_values(tmp_path / "source", name, values)
    count = sum(not np.isfinite(value) for value in values)
    parts = (str(source), name, f"found {count} values that are NaN or infinite", "--allow-nonfinite")
    refusal(BadInput, *parts, of=lambda: convert(source, tmp_path / "made", **settings))
    assert list(tmp_path.iterdir()) == [source]
    made = convert(source, tmp_path / "made", allow_nonfinite=True, **settings)
    assert "NaN" not in (made.path / "conversion.json").read_text()


def test_values_that_are_not_finite_are_kept_if_asked_for(tmp_path: Path) -> None:
    source = with_values(tmp_path / "source", "model.norm.weight", [NAN, INF, -INF, 3])
    found = read_weights(convert(source, tmp_path / "made", allow_nonfinite=True).path)["decoder.norm.weight"]
    assert np.array_equal(np.array(found)[-4:], [NAN, INF, -INF, 3], equal_nan=True)


@pytest.mark.parametrize("settings", [{}, {"quantize": 4, "group_size": 32}], ids=str)
def test_values_that_do_not_fit_a_dtype_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    name = "model.embed_tokens.weight"
    source = with_values(tmp_path / "source", name, [1e38, 65504, -7e4])
    parts = (name, "2 values do not fit float16", "choose another --dtype")
    refusal(BadInput, *parts, of=lambda: convert(source, tmp_path / "made", dtype="float16", **settings))
    assert not (tmp_path / "made").exists()
    convert(source, tmp_path / "made", dtype="bfloat16", **settings)


# --- where a conversion goes ---


def test_a_conversion_goes_below_weights_under_the_source_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "deep" / "mine", CASE)
    monkeypatch.chdir(tmp_path)
    assert convert("deep/mine").path == Path("weights/mine")
    assert same(mt.load("mine")(mx.array([[1]])), mt.load("deep/mine")(mx.array([[1]])))


NAMES = {"owner/model": "model", "a/b/c.gguf": "c", "./x/": "x", ".": "model", "/": "model", "o/m:Q4.gguf": "m"}


@pytest.mark.parametrize(("where", "name"), NAMES.items())
def test_the_default_name(where: str, name: str) -> None:
    assert default_dest(where) == Path("weights") / name


def test_a_bias_that_chooses_experts_keeps_its_precision(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "deepseek_v3", source)
    tensors = mx.load(str(source / "model.safetensors"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = tensors[name].astype(mx.float32) + 1e-4  # no bfloat16 holds this
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    made = convert(source, tmp_path / "made")
    assert made.largest_error == 0
    for folder in (source, made.path):
        router = mt.load(folder).model.decoder.layers[1].mlp.op.router
        assert mx.array_equal(router.correction, tensors[name]).item()
    again = mt.export(made.path, tmp_path / "again").path
    assert mx.array_equal(mx.load(str(again / "model.safetensors"))[name], tensors[name]).item()
