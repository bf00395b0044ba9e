"""Loading: transformers' logits from files of any kind, and one line that lists all that is wrong with the others."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    IDS,
    Weights,
    case_weights,
    logits,
    make_folder,
    parameters,
    refusal,
    same,
)
from helpers import CASES, GOLDEN, expected, gap, limit

import mlx_tformer as mt
from mlx_tformer import memory
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.load import stored_dtype
from mlx_tformer.checkpoint.open import open_source
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile
from mlx_tformer.errors import BadInput, MlxTformerError, UsageError

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


def test_values_that_are_no_numbers_are_equal_where_both_have_them(tmp_path: Path) -> None:
    odd = case_weights("llama-gqa-tied")["model.embed_tokens.weight"]
    odd[3, 4] = float("nan")
    weights = case_weights("llama-gqa-tied") | {"model.embed_tokens.weight": odd, "lm_head.weight": odd}
    mt.load(make_folder(tmp_path / "model", "llama-gqa-tied", weights))


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
    (folder / "model.safetensors").rename(folder / "weights.bin")
    refusal(BadInput, str(folder), "no weights", "model.safetensors", of=lambda: mt.load(folder))
    file = folder / "weights.bin"
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


@pytest.mark.parametrize("case", ["llama-mha", "mamba", "bert", "t5"])
def test_what_are_no_ids_is_refused_in_a_line(case: str) -> None:
    found: Any = mt.load(GOLDEN / case)
    more = {"decoder_input_ids": [1]} if case == "t5" else {}
    for ids in (None, 7, [1, "a"], [1.5], [[1, 2]], [10**30]):
        refusal(UsageError, "expected a list of whole numbers", of=lambda ids=ids: found(ids, **more))
    for ids in ([], mx.zeros((1, 0), mx.int32)):
        refusal(UsageError, "ids: found none", of=lambda ids=ids: found(ids, **more))
    refusal(UsageError, "ids: found a text; `tokens` makes ids", of=lambda: found("to be", **more))
    assert found(np.array([1, 2]), **more).shape == found([1, 2], **more).shape


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
