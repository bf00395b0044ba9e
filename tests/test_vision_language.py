"""The language part of checkpoints that also see: against transformers, given a text alone, and against itself.

The cases were made by data/vision_language/make.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import Weights, files_in, parameters, refusal, same, write_weights
from helpers import gap, tensors

import mlx_tformer as mt
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.describe import describe
from mlx_tformer.checkpoint.export import export
from mlx_tformer.checkpoint.folder import Folder
from mlx_tformer.checkpoint.language_part import SPARSE, language_config
from mlx_tformer.errors import BadInput
from mlx_tformer.families import family

DATA = Path(__file__).parent / "data" / "vision_language"
CASES = sorted(path.parent.name for path in DATA.glob("*/config.json"))
DEFAULTS: dict[str, dict[str, Any]] = json.loads((DATA / "defaults.json").read_text())
OTHERS = ("vision_tower", "vision_model", "visual", "model.visual", "multi_modal_projector")
TIGHT = 2e-5  # twice what was seen; the logits spread by 1.2 to 2.6


def weights_of(case: str) -> Weights:
    return tensors(DATA / case / "model.safetensors")


def config_of(case: str) -> dict[str, Any]:
    return json.loads((DATA / case / "config.json").read_text())


def checkpoint(folder: Path, case: str, weights: Weights | None = None, **settings: Any) -> Path:
    """A case in a folder of its own, with other weights or other settings; one that is None goes out."""
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in (config_of(case) | settings).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", weights_of(case) if weights is None else weights)
    return folder


def text_of(case: str, **settings: Any) -> dict[str, Any]:
    """The `text_config` of a case with other settings; one that is None goes out."""
    return {k: v for k, v in (config_of(case)["text_config"] | settings).items() if v is not None}


def error_of(folder: Path) -> float:
    """How far the logits are from those of transformers; `folder` is the case, or named after it."""
    wanted = tensors(DATA / folder.name / "expected.safetensors")
    return gap(mt.load(folder, dtype="float32")(wanted["input_ids"]), np.array(wanted["logits"]))


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_text_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    assert error_of(checkpoint(tmp_path / case, case)) < TIGHT


@pytest.mark.parametrize("case", CASES)
def test_one_line_names_what_was_left_out(case: str, tmp_path: Path) -> None:
    (line,) = mt.load(checkpoint(tmp_path / case, case)).notes
    counts = {part: sum(name.startswith(f"{part}.") for name in weights_of(case)) for part in OTHERS}
    named = [f"{part} ({count} tensors)" if count > 1 else part for part, count in sorted(counts.items()) if count]
    assert line == f"the language part alone is used; left out: {', '.join(named)}"


@pytest.mark.parametrize("case", CASES)
def test_a_conversion_keeps_the_config_and_records_what_was_dropped(case: str, tmp_path: Path) -> None:
    made = convert(checkpoint(tmp_path / "theirs", case), tmp_path / case)
    config, record = (json.loads((made.path / name).read_text()) for name in ("config.json", "conversion.json"))
    assert {key: config[key] for key in config if key != "mlx_tformer"} == config_of(case)
    assert set(record["dropped"]) == {name for name in weights_of(case) if name.startswith(OTHERS)}
    assert set(record["dropped"].values()) == {"not part of the language model"}
    assert error_of(made.path) < TIGHT and mt.load(made.path).notes == []


@pytest.mark.parametrize("case", CASES)
def test_converting_a_conversion_changes_nothing(case: str, tmp_path: Path) -> None:
    first = convert(checkpoint(tmp_path / "theirs", case), tmp_path / "first").path
    assert files_in(convert(first, tmp_path / "second").path) == files_in(first)


@pytest.mark.parametrize("case", CASES)
def test_an_export_has_the_language_part_as_it_was(case: str, tmp_path: Path) -> None:
    made = convert(checkpoint(tmp_path / "theirs", case), tmp_path / "made").path
    back = export(made, tmp_path / case).path
    found, wanted = tensors(back / "model.safetensors"), weights_of(case)
    assert found.keys() == {name for name in wanted if not name.startswith(OTHERS)}
    assert all(same(found[name], wanted[name]) for name in found)
    assert json.loads((back / "config.json").read_text()) == config_of(case)
    assert error_of(back) < TIGHT


def refused(folder: Path, *parts: str) -> None:
    refusal(BadInput, *parts, of=lambda: mt.load(folder))


def test_modules_can_be_kept_by_the_names_of_the_part(tmp_path: Path) -> None:
    theirs, keep = checkpoint(tmp_path / "theirs", "llava"), "language_model.model.layers.0.*"
    made = convert(theirs, tmp_path / "made", quantize=8, group_size=32, keep=keep)
    ways = json.loads((made.path / "config.json").read_text())["mlx_tformer"]["quantization"]
    assert {path.split(".")[2] for path in ways if path.startswith("decoder")} == {"1"}


PREFIXES: dict[str, Callable[[str], str]] = {
    "of a part that has a model": lambda name: f"language_model.{name}",
    "of a part of the model": lambda name: name.replace("model.", "model.language_model."),
    "of a model alone": lambda name: name,
}


@pytest.mark.parametrize("style", PREFIXES)
@pytest.mark.parametrize("case", ["llama4", "llava", "gemma3"])
def test_names_may_begin_in_each_of_three_ways(case: str, style: str, tmp_path: Path) -> None:
    known = {k.removeprefix("language_model."): v for k, v in weights_of(case).items() if not k.startswith(OTHERS)}
    renamed = {PREFIXES[style](name): value for name, value in known.items()}
    assert error_of(checkpoint(tmp_path / case, case, renamed)) < TIGHT


@pytest.mark.parametrize("name", ["model.colour.weight", "language_model.model.layers.0.colour.weight", "tower.weight"])
def test_a_tensor_of_no_known_part_is_an_error(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "x", "gemma3", {**weights_of("gemma3"), name: mx.zeros((2,))})
    refused(folder, "no place in the model", name)


def test_a_missing_weight_is_named_as_the_checkpoint_would(tmp_path: Path) -> None:
    name = "language_model.model.layers.1.mlp.down_proj.weight"
    lacking = {k: v for k, v in weights_of("gemma3").items() if k != name}
    refused(checkpoint(tmp_path, "gemma3", lacking), f"no weights for {name}")


def test_a_text_model_has_no_other_parts(tmp_path: Path) -> None:
    """What is left out of a vision-language checkpoint is an error elsewhere."""
    settings = dict.fromkeys(config_of("llava"), None) | text_of("llava")
    names = {name.removeprefix("language_model."): value for name, value in weights_of("llava").items()}
    refused(checkpoint(tmp_path, "llava", names, **settings), "multi_modal_projector")


# --- configs ---


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("way", ["mrope", "default"])
def test_a_config_without_nesting_is_read_as_a_nested_one(kind: str, way: str, tmp_path: Path) -> None:
    """As Qwen's first vision models have it; a text moves along all three axes at once, whatever their shares are."""
    scaling = {"type": way, "rope_type": way, "mrope_section": [2, 1, 1]}
    text = text_of(kind, rope_parameters=None, layer_types=None, model_type=None)
    outside = {"rope_theta": 500.0, "rope_scaling": scaling, "max_window_layers": 1, "vision_token_id": 5}
    folder = checkpoint(tmp_path / kind, kind, **{**text, **outside, "text_config": None})
    tied = config_of(kind)["tie_word_embeddings"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    assert error_of(folder) < TIGHT


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_text_config_may_leave_out_all_that_its_class_takes(kind: str) -> None:
    """Nested configs are written without what equals the defaults, unlike those that stand alone."""
    config = language_config(Folder(origin="x", config={"model_type": kind, "text_config": {}}, tensors={}))
    chosen = family(config.model_type)
    found = chosen.absent | config.values
    for key, wanted in DEFAULTS[kind].items():
        if key == "rope_parameters":
            table = wanted.get("full_attention", wanted)
            assert found.get("rope_theta", 10000.0) == table["rope_theta"]
        elif key == "rms_norm_eps":
            assert found.get(key, 1e-6) == wanted
        elif key == "head_dim":
            assert found.get(key, found["hidden_size"] // found["num_attention_heads"]) == wanted
        elif key == "num_key_value_heads":
            assert found.get(key, found["num_attention_heads"]) == wanted
        elif key != "sliding_window" or wanted is not None:  # Qwen's class has a window that is not used
            assert found[key] == wanted, key
    assert config.values["model_type"] == chosen.name and chosen.model(config).vocab == DEFAULTS[kind]["vocab_size"]


def test_every_kind_with_sizes_of_its_own_is_held_against_its_class() -> None:
    named = {"gemma3": "gemma3_text", "llama4": "llama4_text", "llava": "llama", "llava_onevision": "qwen2"}
    named |= {"mistral3": "mistral"} | {kind: f"{kind}_text" for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}
    assert set(named) == set(DEFAULTS) and set(named.values()) == set(SPARSE)


def test_a_sparse_gemma_3_of_4_billion_has_a_card(tmp_path: Path) -> None:
    """The config of the published model: 34 layers, and otherwise little but what differs from the class."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {}, "mm_tokens_per_image": 256}))
    card = describe(tmp_path)
    assert (card.dim, card.layers) == (2560, 34)
    assert card.parameters == 3_880_263_168  # 671 million of them in the embedding


def test_settings_outside_hold_for_the_language_part(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "llava", "llava", eos_token_id=[7, 8], text_config=text_of("llava", dtype=None))
    lm = mt.load(folder)
    assert lm.end_ids == {7, 8} and lm.dtype == mx.bfloat16


def test_a_dtype_that_only_the_language_part_names_counts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "llava", "llava", dtype=None, text_config=text_of("llava", dtype="float16"))
    assert mt.load(folder).dtype == mx.float16


@pytest.mark.parametrize(("outside", "inside"), [(None, False), (None, None), (True, False), (None, True)])
def test_what_is_stored_decides_where_configs_do_not_agree_on_the_head(
    outside: bool | None, inside: bool | None, tmp_path: Path
) -> None:
    text = text_of("mistral3", tie_word_embeddings=None) | ({} if inside is None else {"tie_word_embeddings": inside})
    weights = weights_of("mistral3")
    settings = {"tie_word_embeddings": outside, "text_config": text}
    assert error_of(checkpoint(tmp_path / "mistral3", "mistral3", weights, **settings)) < TIGHT
    head = "language_model.lm_head.weight"
    weights |= {head: -weights["language_model.model.embed_tokens.weight"]}
    lm = mt.load(checkpoint(tmp_path / "mistral3", "mistral3", weights, **settings))
    assert same(parameters(lm.model)["head.weight"], weights[head])


def test_a_head_that_the_config_ties_and_that_differs_is_refused(tmp_path: Path) -> None:
    weights = weights_of("qwen2_vl")
    weights |= {"lm_head.weight": -weights["model.embed_tokens.weight"]}
    text = text_of("qwen2_vl", tie_word_embeddings=None)
    refused(checkpoint(tmp_path, "qwen2_vl", weights, text_config=text), "lm_head.weight", "differs")


def test_settings_that_are_repeated_outside_must_agree(tmp_path: Path) -> None:
    assert error_of(checkpoint(tmp_path / "llava", "llava", hidden_size=32, vocab_size=97)) < TIGHT
    folder = checkpoint(tmp_path / "llava", "llava", vocab_size=96)
    refused(folder, "vocab_size", "found 96", "what text_config says")


WRONG: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "no text_config": ("gemma3", {"text_config": None}, ["text_config", "missing"]),
    "a list": ("llava", {"text_config": [1]}, ["text_config", "found [1]", "expected an object"]),
    "another family": ("gemma3", {"text_config": text_of("llava")}, ["text_config", "'llama'", "'gemma3_text'"]),
    "no family": ("llava", {"text_config": {"model_type": "hal"}}, ["text_config: model_type", "'hal'", "mistral"]),
    "nested twice": ("llava", {"text_config": config_of("gemma3")}, ["text_config: model_type", "'gemma3'"]),
    "no name": ("llava", {"text_config": {"model_type": 3}}, ["text_config: model_type", "found 3"]),
    "a kind unknown": ("llava", {"model_type": "paligemma"}, ["model_type", "'paligemma'", "llava", "qwen2_vl"]),
    "a family with a part": ("llava", {**text_of("llava"), "model_type": "llama"}, ["image_seq_length", "llama does"]),
    "unknown outside": ("llava", {"colour": 1}, ["colour", "found 1", "outside text_config"]),
    "unknown inside": ("llava", {"text_config": text_of("llava", colour=1)}, ["text_config: colour", "found 1"]),
    "a wrong size inside": ("llava", {"text_config": text_of("llava", hidden_size=-1)}, ["text_config: hidden_size"]),
    "two axes": (
        "qwen2_vl",
        {"text_config": text_of("qwen2_vl", rope_parameters={"mrope_section": [2, 2]})},
        ["text_config: rope_parameters: mrope_section", "found [2, 2]", "three whole numbers"],
    ),
    "axes of a text model": (
        "llava",
        {"text_config": text_of("llava", rope_parameters={"mrope_section": [2, 1, 1]})},
        ["mrope_section"],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_nestings_are_refused_by_name(wrong: str, tmp_path: Path) -> None:
    case, settings, parts = WRONG[wrong]
    refused(checkpoint(tmp_path, case, **settings), *parts)
