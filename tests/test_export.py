"""Exporting: a folder of ours as the Hugging Face folder that it came from, to the bit where nothing was rounded."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    Packed,
    Weights,
    case_weights,
    copy_case,
    files_in,
    make_folder,
    read_weights,
    refusal,
    same,
    way,
)
from cli_models import error_line, invoke
from helpers import CASES, GOLDEN, config_of, expected

import mlx_tformer as mt
from mlx_tformer.checkpoint import convert as conversion
from mlx_tformer.checkpoint import export as exporting
from mlx_tformer.checkpoint import plan as planning
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.export import export
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile
from mlx_tformer.errors import BadInput, InputOutputError, UsageError

CASE = "llama-bias"  # rows of 32 values, but for down_proj: 44
COUNTED = ("config.json", "generation_config.json", "model.safetensors")


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def equal(a: Weights, b: Weights) -> bool:
    """True if these are the same tensors, to the bit."""
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read in blocks of a few rows, as large ones are."""
    monkeypatch.setattr(planning, "VALUES", 200)


# --- there and back ---


@pytest.mark.parametrize("case", CASES)
def test_what_was_converted_is_exported_as_it_was(tmp_path: Path, case: str, small_blocks: None) -> None:
    convert(GOLDEN / case, tmp_path / "ours")
    made = export(tmp_path / "ours", tmp_path / "theirs").path
    assert made == tmp_path / "theirs"
    assert equal(read_weights(made), case_weights(case))
    assert config(made) == config_of(case)
    assert sorted(path.name for path in made.iterdir()) == sorted(COUNTED)
    assert (made / "generation_config.json").read_bytes() == (GOLDEN / case / "generation_config.json").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_without_a_record_names_are_those_that_the_family_usually_has(tmp_path: Path, case: str) -> None:
    convert(GOLDEN / case, tmp_path / "ours")
    (tmp_path / "ours" / "conversion.json").unlink()
    made = export(tmp_path / "ours", tmp_path / "theirs")
    assert equal(read_weights(made.path), case_weights(case))
    assert any("no conversion.json" in note for note in made.notes)


def test_a_conversion_of_a_conversion_is_exported_as_the_first_source_was(tmp_path: Path) -> None:
    convert(GOLDEN / "mixtral", tmp_path / "once")
    convert(tmp_path / "once", tmp_path / "twice")
    made = export(tmp_path / "twice", tmp_path / "theirs").path
    assert equal(read_weights(made), case_weights("mixtral"))


def test_the_files_that_go_along_are_the_same_bytes(tmp_path: Path) -> None:
    source = copy_case(CASE, tmp_path / "source")
    extra = {"tokenizer_config.json": b'{ "x" : "\xc3\xa9" }\n\n', "chat_template.jinja": b"{{ x }}\r\n"}
    for name, content in extra.items():
        (source / name).write_bytes(content)
    convert(source, tmp_path / "ours")
    found = files_in(export(tmp_path / "ours", tmp_path / "theirs").path)
    assert found.keys() == files_in(source).keys()
    assert all(found[name] == content for name, content in extra.items())


def test_files_say_what_transformers_wants_to_read(tmp_path: Path) -> None:
    convert(GOLDEN / CASE, tmp_path / "ours")
    made = export(tmp_path / "ours", tmp_path / "theirs").path
    assert SafetensorsFile(made / "model.safetensors").metadata == {"format": "pt"}


def test_several_files_hold_the_same_and_an_index_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(GOLDEN / "mixtral", tmp_path / "ours")
    monkeypatch.setattr(exporting, "SHARD", 20_000)
    made = export(tmp_path / "ours", tmp_path / "theirs")
    files = sorted(made.path.glob("*.safetensors"))
    assert len(files) > 3
    assert equal(read_weights(made.path), case_weights("mixtral"))
    index = json.loads((made.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.nbytes
    assert index["weight_map"] == {name: file.name for file in files for name in SafetensorsFile(file).tensors}
    ids = mx.array(expected("mixtral")["input_ids"])
    assert same(mt.load(made.path, "float32")(ids), mt.load(GOLDEN / "mixtral", "float32")(ids))


def test_no_more_than_some_rows_of_a_tensor_are_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    convert(GOLDEN / CASE, tmp_path / "ours")
    seen: list[int] = []
    values = SafetensorsFile._values

    def watched(file: SafetensorsFile, *arguments: Any) -> mx.array:
        found = values(file, *arguments)
        seen.append(found.size)
        return found

    monkeypatch.setattr(SafetensorsFile, "_values", watched)
    export(tmp_path / "ours", tmp_path / "theirs")
    assert max(seen) <= 200 and sum(seen) == sum(array.size for array in case_weights(CASE).values())


def test_progress_counts_bytes_up_to_all_of_them(tmp_path: Path, small_blocks: None) -> None:
    convert(GOLDEN / CASE, tmp_path / "ours")
    seen: list[tuple[int, int]] = []
    made = export(tmp_path / "ours", tmp_path / "theirs", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and len(seen) > 20
    assert {total for _, total in seen} == {made.nbytes} and seen[-1][0] == made.nbytes


# --- names that differ from one checkpoint to the next ---


def renamed(case: str, old: str, new: str) -> Weights:
    """The weights of a case, with names that begin otherwise."""
    return {new + n.removeprefix(old) if n.startswith(old) else n: array for n, array in case_weights(case).items()}


def stacked(case: str) -> Weights:
    """Mixtral's weights with experts stacked, as transformers 5 keeps them."""
    weights, made = case_weights(case), {}
    for name, array in weights.items():
        module, experts, rest = name.partition(".block_sparse_moe.experts.")
        if not experts:
            made[name.replace(".block_sparse_moe.gate", ".mlp.gate")] = array
        elif rest == "0.w2.weight":
            parts = {w: [weights[f"{module}{experts}{e}.{w}.weight"] for e in range(4)] for w in ("w1", "w2", "w3")}
            both = [mx.concatenate(pair, axis=0) for pair in zip(parts["w1"], parts["w3"], strict=True)]
            made[f"{module}.mlp.experts.gate_up_proj"] = mx.stack(both)
            made[f"{module}.mlp.experts.down_proj"] = mx.stack(parts["w2"])
    return made


OTHERS = {
    "gpt2 without a prefix": ("gpt2", lambda: renamed("gpt2", "transformer.", "")),
    "gpt_neox with lm_head": ("gpt_neox", lambda: renamed("gpt_neox", "embed_out", "lm_head")),
    "mixtral stacked": ("mixtral", lambda: stacked("mixtral")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_names_are_those_that_the_source_had(tmp_path: Path, name: str) -> None:
    case, make = OTHERS[name]
    weights = make()
    convert(make_folder(tmp_path / "source", case, weights), tmp_path / "ours")
    assert equal(read_weights(export(tmp_path / "ours", tmp_path / "theirs").path), weights)
    (tmp_path / "ours" / "conversion.json").unlink()
    usual = read_weights(export(tmp_path / "ours", tmp_path / "usual").path)
    assert equal(usual, case_weights(case)) and usual.keys() != weights.keys()


def test_a_record_that_names_some_tensors_is_taken_for_these(tmp_path: Path) -> None:
    weights = renamed("gpt_neox", "embed_out", "lm_head")
    convert(make_folder(tmp_path / "source", "gpt_neox", weights), tmp_path / "ours")
    file = tmp_path / "ours" / "conversion.json"
    record = json.loads(file.read_text())
    record["tensors"] = {name: entry for name, entry in record["tensors"].items() if name == "head.weight"}
    file.write_text(json.dumps(record))
    assert equal(read_weights(export(tmp_path / "ours", tmp_path / "theirs").path), weights)


STRANGE = [["lm_head.weight"], ["x"], [], ["gpt_neox.embed_in.weight"], ["embed_out.weight"] * 2]


@pytest.mark.parametrize("names", STRANGE, ids=str)
def test_a_record_that_cannot_be_is_not_believed(tmp_path: Path, names: list[str]) -> None:
    convert(GOLDEN / "gpt_neox", tmp_path / "ours")
    file = tmp_path / "ours" / "conversion.json"
    record = json.loads(file.read_text())
    record["tensors"]["decoder.norm.weight"]["from"] = names
    file.write_text(json.dumps(record))
    assert equal(read_weights(export(tmp_path / "ours", tmp_path / "theirs").path), case_weights("gpt_neox"))


def test_a_copy_is_written_where_the_source_had_one(tmp_path: Path) -> None:
    weights = case_weights("llama-gqa-tied")
    twice = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    convert(make_folder(tmp_path / "source", "llama-gqa-tied", twice), tmp_path / "ours")
    made = export(tmp_path / "ours", tmp_path / "theirs")
    assert equal(read_weights(made.path), twice) and made.left_out == {}


def test_buffers_are_not_made_again_and_that_is_said(tmp_path: Path) -> None:
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = make_folder(tmp_path / "source", CASE, case_weights(CASE) | {buffer: mx.zeros((4,))})
    convert(source, tmp_path / "ours")
    made = export(tmp_path / "ours", tmp_path / "theirs")
    assert equal(read_weights(made.path), case_weights(CASE))
    assert made.left_out == {buffer: "computed from the config"}


# --- other numbers than those of the source ---


def test_a_dtype_can_be_named_and_the_config_says_so(tmp_path: Path) -> None:
    convert(GOLDEN / CASE, tmp_path / "ours")
    made = export(tmp_path / "ours", tmp_path / "theirs", dtype="float32").path
    assert equal(read_weights(made), {name: array.astype(mx.float32) for name, array in case_weights(CASE).items()})
    assert config(made) == config_of(CASE) | {"dtype": "float32"}


def test_what_was_rounded_is_named(tmp_path: Path) -> None:
    weights = {name: array.astype(mx.float32) * 1.001 for name, array in case_weights(CASE).items()}
    convert(make_folder(tmp_path / "source", CASE, weights, dtype="float32"), tmp_path / "ours", dtype="bfloat16")
    made = export(tmp_path / "ours", tmp_path / "theirs")
    assert equal(read_weights(made.path), {name: array.astype(mx.bfloat16) for name, array in weights.items()})
    assert config(made.path)["dtype"] == "bfloat16"
    assert any("rounded when it was converted" in note and "decoder.norm.weight" in note for note in made.notes)


def test_values_that_do_not_fit_a_dtype_are_refused(tmp_path: Path) -> None:
    weights = case_weights(CASE) | {"model.norm.weight": mx.full((32,), 1e20, dtype=mx.bfloat16)}
    convert(make_folder(tmp_path / "source", CASE, weights), tmp_path / "ours")
    parts = ("model.norm.weight", "do not fit float16")
    refusal(BadInput, *parts, of=lambda: export(tmp_path / "ours", tmp_path / "theirs", dtype="float16"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "source"]


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_what_a_conversion_packed_is_unpacked(tmp_path: Path, mode: str, small_blocks: None) -> None:
    settings = {"quantize": 4, "group_size": 32} if mode == "affine" else {"mode": mode}
    convert(GOLDEN / CASE, tmp_path / "ours", **settings)
    made = export(tmp_path / "ours", tmp_path / "theirs", dtype="float32")
    found, ours, theirs = read_weights(made.path), read_weights(tmp_path / "ours"), case_weights(CASE)
    assert found.keys() == theirs.keys() and "quantization" not in config(made.path)
    how = config(tmp_path / "ours")["mlx_tformer"]["quantization"]["embed.tokens"]
    leaves = [ours[f"embed.tokens.{leaf}"] for leaf in ("weight", "scales", "biases") if f"embed.tokens.{leaf}" in ours]
    leaves = [leaf.astype(mx.float32) if leaf.dtype == mx.bfloat16 else leaf for leaf in leaves]
    assert same(found["model.embed_tokens.weight"], mx.dequantize(*leaves, dtype=mx.float32, **how))
    assert same(found["model.norm.weight"], theirs["model.norm.weight"].astype(mx.float32))
    assert any("unpacked" in note and "embed.tokens" in note for note in made.notes)
    ids = mx.array([[3, 1, 4, 1, 5]])
    gap = mx.abs(mt.load(made.path)(ids) - mt.load(tmp_path / "ours", "float32")(ids)).max().item()
    assert gap < 2e-5


def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **ways: Any) -> tuple[Packed, Path]:
    """A source that came packed, and its conversion."""
    source = Packed.of(CASE, ways)
    monkeypatch.setattr(conversion, "open_source", lambda where, revision: source)
    return source, convert("packed", tmp_path / "ours", dtype="float16").path


def test_what_came_packed_stays_packed_as_mlx_community_checkpoints_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, ours = packed(tmp_path, monkeypatch, _proj=way(4), embed_tokens=way(8))
    made = export(ours, tmp_path / "theirs")
    found = read_weights(made.path)
    assert found.keys() == source.arrays.keys()
    for name, array in source.arrays.items():
        assert same(found[name], array.astype(mx.float16) if array.dtype == mx.float32 else array)
    said = config(made.path)["quantization"]
    assert said == way(4) | {"model.embed_tokens": way(8)}
    ids = mx.array([[9, 8, 7]])
    assert same(mt.load(made.path)(ids), mt.load(ours)(ids))
    assert any("packed as in MLX community checkpoints" in note for note in made.notes)


def test_what_came_packed_is_unpacked_if_a_dtype_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, ours = packed(tmp_path, monkeypatch, _proj=way(4), embed_tokens=way(8))
    made = export(ours, tmp_path / "theirs", dtype="float32").path
    found, dense = read_weights(made), source.dense()
    assert found.keys() == dense.keys() and "quantization" not in config(made)
    half = {name: array for name, array in dense.items() if name.removesuffix(".weight") in source.quantization}
    assert all(np.abs(np.array(found[name]) - np.array(array)).max() < 1e-7 for name, array in half.items())


def test_what_came_packed_and_what_was_packed_later_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Packed.of(CASE, {"q_proj": way(4), "k_proj": way(4), "v_proj": way(4)})
    monkeypatch.setattr(conversion, "open_source", lambda where, revision: source)
    convert("packed", tmp_path / "ours", quantize=8, group_size=32)
    found = read_weights(export(tmp_path / "ours", tmp_path / "theirs").path)
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == mx.uint32
    assert found["model.embed_tokens.weight"].shape == case_weights(CASE)["model.embed_tokens.weight"].shape


# --- what is refused ---


def test_only_what_was_converted_can_be_exported(tmp_path: Path) -> None:
    parts = (str(GOLDEN / CASE / "config.json"), "has no key mlx_tformer")
    refusal(BadInput, *parts, of=lambda: export(GOLDEN / CASE, tmp_path / "theirs"))
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_cannot_be_is_refused(tmp_path: Path) -> None:
    ours = convert(GOLDEN / CASE, tmp_path / "ours").path
    refusal(InputOutputError, "is the source itself", of=lambda: export(ours, ours))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    refusal(InputOutputError, "is not empty", of=lambda: export(ours, tmp_path / "full"))
    refusal(UsageError, "dtype: found 'int4'", of=lambda: export(ours, tmp_path / "new", dtype="int4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "ours"]


def test_a_tensor_that_the_family_has_no_name_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = convert(GOLDEN / CASE, tmp_path / "ours").path
    (ours / "conversion.json").unlink()
    monkeypatch.setattr(exporting, "with_mlx_names", lambda family, names: {"model.norm": "decoder.norm"})
    parts = ("llama has no names for", "embed.tokens.weight", "decoder.layers.*.attn.op.qkv.weight (2)")
    refusal(BadInput, *parts, of=lambda: export(ours, tmp_path / "theirs"))
    assert not (tmp_path / "theirs").exists()


def test_two_tensors_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = convert(GOLDEN / CASE, tmp_path / "ours").path
    monkeypatch.setattr(exporting, "origins", lambda shapes, *_: {name: [exporting.Piece("one")] for name in shapes})
    refusal(BadInput, "one: stands for two tensors", of=lambda: export(ours, tmp_path / "theirs"))


def test_a_broken_record_is_refused(tmp_path: Path) -> None:
    ours = convert(GOLDEN / CASE, tmp_path / "ours").path
    (ours / "conversion.json").write_text('{"tensors": {}, "unquantized": [], "dropped": {"x": 1}}')
    refusal(BadInput, "conversion.json: dropped.x: found 1", of=lambda: export(ours, tmp_path / "theirs"))


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    ours = convert(GOLDEN / CASE, tmp_path / "ours").path

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(ours, tmp_path / "theirs", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


# --- the command ---


def test_export_prints_the_folder_and_a_summary(tmp_path: Path) -> None:
    invoke("convert", str(GOLDEN / "gpt2"), str(tmp_path / "ours"))
    result = invoke("export", str(tmp_path / "ours"), str(tmp_path / "theirs"))
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'theirs'}\n")
    first, *_ = result.stderr.splitlines()
    assert first == f"mlx-tformer: {len(case_weights('gpt2'))} tensors, 195 kB"
    assert "has no key mlx_tformer" in error_line(invoke("export", str(GOLDEN / "gpt2"), str(tmp_path / "x")), 3)
    assert "--dtype" in error_line(invoke("export", str(tmp_path / "ours"), str(tmp_path / "x"), "--dtype", "x"), 2)
