"""Loading: transformers' logits from files of any kind, and one line that lists all that is wrong with the others."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import (
    Packed,
    Weights,
    bits,
    case_weights,
    copy_case,
    make_folder,
    read_weights,
    refusal,
    same,
    way,
    write_weights,
)
from helpers import CASES, GOLDEN, expected, gap, limit
from mlx.utils import tree_flatten

import mlx_tformer as mt
from mlx_tformer import memory
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.load import fill, stored_dtype
from mlx_tformer.checkpoint.open import open_source
from mlx_tformer.checkpoint.plan import Plan, plan
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile
from mlx_tformer.checkpoint.source import Source, Tensor
from mlx_tformer.errors import BadInput, MlxTformerError, UsageError

IDS = mx.array([[5, 11, 2, 7, 40, 3]])


def logits(where: Path, **settings: Any) -> mx.array:
    """What a loaded model makes of `IDS`, computed now, since the files may change afterwards."""
    found = mt.load(where, **settings)(IDS)
    mx.eval(found)
    return found


def parameters(model: nn.Module) -> Weights:
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def filled(source: Source) -> Plan:
    """A model with the weights of a source, in float32."""
    made = plan(source)
    fill(made, source, mx.float32)
    return made


# --- the right numbers, from files of any kind ---


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_model_gives_the_logits_and_the_text_of_transformers(case: str) -> None:
    lm, wanted = mt.load(GOLDEN / case, dtype="float32"), expected(case)
    assert gap(lm(mx.array(wanted["input_ids"])), wanted["logits"]) < limit(wanted["logits"])
    steps = lm.generate(mx.array(wanted["prompt_ids"]), max_tokens=12, stop_at_end=False)
    assert [step.token for step in steps] == wanted["greedy_ids"][0].tolist()


@pytest.mark.parametrize("shards", [2, 5])
def test_a_checkpoint_in_several_files_is_the_same_as_in_one(tmp_path: Path, shards: int) -> None:
    one, many = make_folder(tmp_path / "one"), make_folder(tmp_path / "many", shards=shards)
    assert same(logits(many), logits(one))


def test_a_path_may_be_text_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "weights" / "mine")
    monkeypatch.chdir(tmp_path)
    wanted = logits(tmp_path / "weights" / "mine")
    assert all(same(mt.load(where)(IDS), wanted) for where in ("weights/mine", "./weights/mine", "mine"))


@pytest.mark.parametrize(("dtype", "kind"), [("float32", mx.float32), ("float16", mx.float16), (None, mx.bfloat16)])
def test_weights_have_the_dtype_that_was_asked_for_or_that_they_are_stored_in(dtype: str | None, kind: Any) -> None:
    lm = mt.load(GOLDEN / "qwen3", dtype=dtype)
    assert {array.dtype for array in parameters(lm.model).values()} == {kind}
    assert lm.dtype == lm(IDS).dtype == kind


def test_a_dtype_that_is_none_is_refused() -> None:
    for dtype in ("float64", "int8", "BF16", ""):
        refusal(UsageError, "dtype", repr(dtype), "bfloat16", of=lambda dtype=dtype: mt.load(GOLDEN / "qwen3", dtype))


DTYPES = [
    ({"dtype": "float16"}, mx.float16),
    ({"dtype": None, "torch_dtype": "float32"}, mx.float32),
    ({"dtype": None}, mx.bfloat16),
    ({"dtype": "float8_e4m3fn"}, mx.bfloat16),
    ({"dtype": ["float16"]}, mx.bfloat16),
    ({"dtype": {"float16": 1}}, mx.bfloat16),
]


@pytest.mark.parametrize(("settings", "kind"), DTYPES, ids=str)
def test_the_stored_dtype_is_what_the_config_says_or_else_that_of_most_bytes(
    tmp_path: Path, settings: dict[str, Any], kind: mx.Dtype
) -> None:
    weights = case_weights("llama-mha")
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(mx.float32)
    source = open_source(make_folder(tmp_path / "model", weights=weights, **settings))
    assert stored_dtype(source) == kind


def test_doubles_load_as_floats(tmp_path: Path) -> None:
    folder, path = make_folder(tmp_path / "model"), tmp_path / "model" / "model.safetensors"
    wanted = logits(folder, dtype="float32")
    file = SafetensorsFile(path)
    arrays = {name: np.array(file.read(name).astype(mx.float32), np.float64) for name in file.tensors}
    header, start = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F64", "shape": array.shape, "data_offsets": [start, start := start + array.nbytes]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values()))
    assert same(logits(folder, dtype="float32"), wanted)


# --- weights are mapped ---


def test_loading_reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(file: SafetensorsFile, name: str) -> mx.array:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(SafetensorsFile, "read", read)
    before = mx.get_active_memory()
    lm = mt.load(GOLDEN / "llama-mha")
    assert mx.get_active_memory() - before < 10_000 < memory.weights_bytes(lm.model)


# --- weights that are tied ---


def tied_twice(folder: Path, head: mx.array | None = None) -> Path:
    weights = case_weights("llama-gqa-tied")
    head = weights["model.embed_tokens.weight"] if head is None else head
    return make_folder(folder, "llama-gqa-tied", weights | {"lm_head.weight": head})


def test_a_tied_head_that_is_stored_again_is_fine_if_it_is_equal(tmp_path: Path) -> None:
    wanted = logits(GOLDEN / "llama-gqa-tied")
    assert same(logits(tied_twice(tmp_path / "model")), wanted)
    embedding = case_weights("llama-gqa-tied")["model.embed_tokens.weight"]
    assert same(logits(tied_twice(tmp_path / "float32", embedding.astype(mx.float32))), wanted)


def test_a_tied_head_that_differs_by_one_bit_is_refused(tmp_path: Path) -> None:
    embedding = case_weights("llama-gqa-tied")["model.embed_tokens.weight"]
    words = np.array(embedding.view(mx.uint16))
    words[-1, -1] ^= 1
    folder = tied_twice(tmp_path / "model", mx.array(words).view(mx.bfloat16))
    refusal(BadInput, str(folder), "lm_head.weight", "tie_word_embeddings", of=lambda: mt.load(folder))
    refusal(BadInput, "lm_head.weight", of=lambda: convert(folder, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = tied_twice(tmp_path / "model", mx.zeros((3, 4)))
    refusal(BadInput, "lm_head.weight: found shape (3, 4), expected", of=lambda: mt.load(folder))


def test_a_tied_head_with_a_bias_has_no_place(tmp_path: Path) -> None:
    weights = case_weights("llama-gqa-tied") | {"lm_head.bias": mx.ones(131)}
    folder = make_folder(tmp_path / "model", "llama-gqa-tied", weights)
    refusal(BadInput, "no place in the model: lm_head.bias", of=lambda: mt.load(folder))


def test_a_head_is_missed_where_the_config_ties_none(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "llama-gqa-tied", tie_word_embeddings=False)
    refusal(BadInput, "no weights for lm_head.weight", of=lambda: mt.load(folder))


# --- weights that are not what the model needs ---


def loads(folder: Path, weights: Weights, case: str = "llama-mha") -> mt.LanguageModel:
    return mt.load(make_folder(folder, case, weights))


def test_everything_that_is_wrong_with_the_weights_is_listed_at_once(tmp_path: Path) -> None:
    weights = case_weights("llama-mha")
    for layer in range(3):
        weights[f"model.layers.{layer}.self_attn.magic.weight"] = mx.zeros(3)
        weights[f"model.layers.{layer}.mlp.down_proj.weight"] = mx.zeros((48, 81))
    weights["other"] = mx.zeros(1)
    weights["model.norm.weight"] = mx.zeros(48, mx.int32)
    del weights["model.layers.1.input_layernorm.weight"], weights["model.layers.0.self_attn.v_proj.weight"]
    del weights["lm_head.weight"]
    parts = [
        "no place in the model: model.layers.*.self_attn.magic.weight (3), other",
        "no weights for model.layers.1.input_layernorm.weight, lm_head.weight, model.layers.0.self_attn.v_proj.weight",
        "model.layers.*.mlp.down_proj.weight (3): found shape (48, 81), expected (48, 80)",
        "model.norm.weight: found int32, expected floats",
    ]
    refusal(BadInput, *parts, of=lambda: loads(tmp_path / "model", weights))


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_missing_part_of_a_joined_matrix_is_named(tmp_path: Path, part: str) -> None:
    weights, name = case_weights("qwen2"), f"model.layers.1.self_attn.{part}_proj"
    del weights[f"{name}.bias"]
    refusal(BadInput, f"no weights for {name}.bias", of=lambda: loads(tmp_path / "model", weights, "qwen2"))


def test_all_parts_of_a_joined_matrix_are_named_if_none_is_there(tmp_path: Path) -> None:
    weights, name = case_weights("llama-mha"), "model.layers.2.mlp"
    del weights[f"{name}.gate_proj.weight"], weights[f"{name}.up_proj.weight"]
    parts = f"no weights for {name}.gate_proj.weight, {name}.up_proj.weight"
    refusal(BadInput, parts, of=lambda: loads(tmp_path / "model", weights))


def test_parts_that_only_together_have_the_right_size_are_refused(tmp_path: Path) -> None:
    weights, name = case_weights("llama-gqa-tied"), "model.layers.0.self_attn"
    q, k = (f"{name}.{x}_proj.weight" for x in "qk")
    assert weights[q].shape != weights[k].shape
    weights[q], weights[k] = weights[k], weights[q]
    parts = (f"{q}: found shape {weights[q].shape}, expected {weights[k].shape}", f"{k}: found shape")
    refusal(BadInput, *parts, of=lambda: loads(tmp_path / "model", weights, "llama-gqa-tied"))


def test_parts_of_different_width_or_rank_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    for i, value in enumerate(
        (mx.zeros((48, 40)), mx.zeros(48), mx.array(0.0), mx.zeros((48, 48, 1)), mx.zeros((0, 48)))
    ):
        weights = case_weights("llama-mha") | {name: value}
        problem = f"{name}: found shape {value.shape}, expected (48, 48)"
        refusal(BadInput, problem, of=lambda i=i, weights=weights: loads(tmp_path / f"{i}", weights))


@pytest.mark.parametrize("dtype", [mx.int8, mx.int32, mx.uint32, mx.uint8, mx.bool_], ids=str)
def test_integers_where_floats_are_due_are_refused(tmp_path: Path, dtype: mx.Dtype) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    weights = case_weights("llama-mha")
    weights[name] = weights[name].astype(dtype)
    refusal(BadInput, f"{name}: found", "expected floats", of=lambda: loads(tmp_path / "model", weights))


def test_weights_that_are_computed_anyway_are_not_needed(tmp_path: Path) -> None:
    weights = case_weights("llama-mha") | {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": mx.ones(6) for i in (0, 2)
    }
    assert same(loads(tmp_path / "model", weights)(IDS), logits(GOLDEN / "llama-mha"))


def test_weights_that_are_not_numbers_load_and_end_generation(tmp_path: Path) -> None:
    weights = case_weights("llama-mha")
    weights["model.norm.weight"] = weights["model.norm.weight"] * mx.array(float("nan"), mx.bfloat16)
    lm = loads(tmp_path / "model", weights)
    assert mx.isnan(lm(IDS)).all().item()
    refusal(MlxTformerError, "not numbers", of=lambda: list(lm.generate([1, 2], max_tokens=3)))


# --- folders that are no checkpoint ---


def test_an_unknown_model_type_lists_the_known_ones_nearest_first(tmp_path: Path) -> None:
    for name, nearest in {"qwen33": "qwen3", "lama": "llama", "ministral": "mistral"}.items():
        folder = make_folder(tmp_path / name, model_type=name)
        refusal(BadInput, "model_type", f"found {name!r}, expected one of {nearest}, ", of=lambda f=folder: mt.load(f))


CONFIGS = {
    "missing": (None, "config.json: not found"),
    "a list": ("[]", "config.json: found a list, expected an object"),
    "empty": ("", "config.json: not JSON"),
    "broken": ('{"model_type": "llama"', "config.json: not JSON"),
    "nested deep": ('{"a": ' * 200_000, "config.json: not JSON"),
    "a number with a million digits": ('{"a": ' + "9" * 1_000_000 + "}", "config.json: not JSON"),
    "no UTF-8": ('{"model_type": "\udcff"}', "config.json: not JSON"),
    "without model_type": ("{}", "config.json: model_type: missing"),
    "a model_type that is a number": ('{"model_type": 7}', "config.json: model_type: found 7"),
    "a model_type that is null": ('{"model_type": null}', "config.json: model_type: found None"),
}


@pytest.mark.parametrize(("config", "problem"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_is_none_is_refused(tmp_path: Path, config: str | None, problem: str) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config, errors="surrogateescape")
    refusal(BadInput, str(folder), problem, of=lambda: mt.load(folder))


def test_what_is_no_folder_with_weights_is_refused(tmp_path: Path) -> None:
    refusal(BadInput, str(tmp_path / "nowhere"), "no such file", of=lambda: mt.load(tmp_path / "nowhere"))
    refusal(BadInput, str(tmp_path), "config.json: not found", of=lambda: mt.load(tmp_path))
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refusal(BadInput, str(folder), "no weights", "model.safetensors", of=lambda: mt.load(folder))
    file = folder / "pytorch_model.bin"
    refusal(BadInput, str(file), "is a file", of=lambda: mt.load(file))


def test_a_file_without_tensors_lacks_all_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", weights={})
    refusal(BadInput, "no weights for model.embed_tokens.weight", "lm_head.weight", of=lambda: mt.load(folder))


# --- ids ---


def test_a_model_without_a_tokenizer_works_on_ids() -> None:
    lm = mt.load(GOLDEN / "llama-mha")
    steps = list(lm.generate([1, 2, 3], max_tokens=3, stop_at_end=False))
    assert len(steps) == 3 and {step.text for step in steps} == {""}
    refusal(UsageError, "has no tokenizer; give ids", of=lambda: lm.tokens("text"))
    refusal(UsageError, "has no tokenizer; give ids", of=lambda: lm.generate("text"))


@pytest.mark.parametrize("wrong", [131, -1, 2_000_000_000, -(2**31)])
def test_ids_that_the_model_does_not_have_are_refused(wrong: int) -> None:
    lm = mt.load(GOLDEN / "llama-mha")
    assert lm(mx.array([[130, 0]])).shape == (1, 2, 131)
    for ids in (mx.array([[1, wrong]]), mx.array([[1, wrong]], mx.int64)):
        refusal(UsageError, f"found {wrong}, expected 0 to 130", of=lambda ids=ids: lm(ids))
    for prompt in ([1, wrong], mx.array([1, wrong])):
        refusal(UsageError, f"found id {wrong}, expected 0 to 130", of=lambda prompt=prompt: lm.generate(prompt))


def test_ids_that_are_no_batch_of_integers_are_refused() -> None:
    lm = mt.load(GOLDEN / "llama-mha")
    for ids in (mx.array([1, 2]), mx.array([[1.0]]), mx.array(3), mx.array([[[1]]])):
        refusal(UsageError, "expected integers of shape (B, L)", of=lambda ids=ids: lm(ids))


# --- memory ---


def test_a_model_that_cannot_fit_is_refused_with_both_figures_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mapped(file: SafetensorsFile, name: str) -> mx.array:
        raise AssertionError(f"{name} was read")

    lm = mt.load(GOLDEN / "llama-mha")
    weights = memory.weights_bytes(lm.model)
    needed = weights + memory.kv_bytes(lm.model, 128, mx.bfloat16)

    def room(size: int) -> None:
        monkeypatch.setattr(memory, "of_device", lambda: memory.Memory(2 * size, size, "free"))

    room(needed)
    mt.load(GOLDEN / "llama-mha")
    room(needed - 1)
    monkeypatch.setattr(SafetensorsFile, "mapped", mapped)
    figures = (f"needs {needed:,} bytes", f"{needed - 1:,} bytes free on this machine", memory.human(weights))
    refusal(memory.MemoryRefusal, *figures, of=lambda: mt.load(GOLDEN / "llama-mha"))
    room(2**40)
    refusal(memory.MemoryRefusal, "TB", of=lambda: mt.load(GOLDEN / "llama-mha", context=2**40))


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
    "another mode": (packed_as({**way(4), "mode": "mxfp4"}), "'mode': 'mxfp4'"),
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
