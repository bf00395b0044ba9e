"""Every setting of every encoder: wrong, left out, of any value; and the configs of well-known checkpoints."""

import json
import shutil
from functools import cache, reduce
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import GOLDEN, cases_of, config_of, expected, leaves, limit
from test_family_configs import Config, Read, description, few_layers, paths_in, wrong

import mlx_tformer as mt
import mlx_tformer.config
from mlx_tformer.checkpoint.plan import build
from mlx_tformer.errors import BadInput
from mlx_tformer.families import family

CASES = [*cases_of("mlm"), *cases_of("classes"), *cases_of("vision")]
KINDS = sorted({config_of(case)["model_type"] for case in CASES})
DEFAULTS: dict[str, Config] = json.loads((GOLDEN / "defaults.json").read_text())
PUBLISHED: list[dict[str, Any]] = json.loads((GOLDEN / "published_encoders.json").read_text())
ELSEWHERE = {"hidden_dropout_prob", "image_size", "global_attn_every_n_layers"}
"""Settings that say nothing about the numbers, or nothing where others say it in full (see below), or not always:
another size of the image need not change how many patches there are."""
SIZES = {"hidden_size", "num_attention_heads", "dim", "n_heads"}


@cache
def right(case: str) -> np.ndarray:
    return outputs(case, GOLDEN / case)


def outputs(case: str, folder: Path) -> np.ndarray:
    """What a model makes of the inputs of a case, where that is no padding."""
    model, given = mt.load(folder, dtype="float32"), expected(case)
    if "pixel_values" in given:
        return np.array(model(mx.array(given["pixel_values"])))
    extra = {"token_types": mx.array(given["token_type_ids"])} if "token_type_ids" in given else {}
    found = model(mx.array(given["input_ids"]), attention_mask=mx.array(given["attention_mask"]), **extra)
    values = np.array(found)
    return values[given["attention_mask"].astype(bool)] if values.ndim == 3 else values


def under(case: str, config: Config, folder: Path) -> np.ndarray:
    """The outputs under another config."""
    shutil.copy(GOLDEN / case / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(config))
    return outputs(case, folder)


def shows(case: str, config: Config, folder: Path) -> bool:
    """True if a case under this config gives something else, or is refused."""
    try:
        found = under(case, config, folder)
    except BadInput:
        return True
    same = found.shape == right(case).shape
    return not same or bool(np.abs(found - right(case)).max() > limit(expected(case)["logits"]))


def settings_of(case: str) -> list[tuple[str, ...]]:
    """The settings of a case that its family reads, as paths."""
    values = Read(config_of(case))
    family(values["model_type"]).model(mlx_tformer.config.Config(values))
    asked = {key: value for key, value in values.items() if key in values.asked and key not in ELSEWHERE}
    return [path for path in paths_in(asked) if path[0] not in ("architectures", "model_type")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_setting_moves_the_outputs_or_does_not_load(kind: str, tmp_path: Path) -> None:
    """Of each setting that a family reads, in at least one of its cases."""
    readers: dict[tuple[str, ...], list[str]] = {}
    for case in (case for case in CASES if config_of(case)["model_type"] == kind):
        for path in settings_of(case):
            readers.setdefault(path, []).append(case)
    assert len(readers) >= 6
    unseen = [p for p, of in readers.items() if not any(shows(c, changed(config_of(c), p), tmp_path) for c in of)]
    assert unseen == []


OTHER: dict[str, Any] = {
    "classifier_activation": "silu",
    "classifier_pooling": {"cls": "mean", "mean": "cls"},
    "local_attention": 2,
    "norm_eps": 0.1,
    "patch_size": 16,
    "max_position_embeddings": 10,
}
"""Other values, where an eighth more is none or does not matter."""


def changed(config: Config, path: tuple[str, ...]) -> Config:
    """The config with a wrong value for one setting."""
    key = path[-1]
    if key not in OTHER:
        return wrong(config, path)
    other = OTHER[key]
    holder = reduce(lambda table, name: table[name], path[:-1], config)
    holder[key] = other[holder[key]] if isinstance(other, dict) else other
    return config


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("modernbert")])
def test_the_words_of_transformers_4_for_the_layers_of_modernbert_give_the_same(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    rope = config.pop("rope_parameters")
    config |= {"global_rope_theta": rope["full_attention"]["rope_theta"]}
    config |= {"local_rope_theta": rope["sliding_attention"]["rope_theta"], "layer_types": None}
    assert np.array_equal(under(case, config, tmp_path), right(case))
    every = config["global_attn_every_n_layers"]
    wrongs = {"global_attn_every_n_layers": every - 1, "global_rope_theta": 30.0, "local_rope_theta": 30.0}
    for key, value in wrongs.items():
        assert shows(case, config | {key: value}, tmp_path), key


@pytest.mark.parametrize("case", CASES)
def test_settings_that_the_class_takes_anyway_may_be_left_out(case: str, tmp_path: Path) -> None:
    config, usual = config_of(case), DEFAULTS[config_of(case)["model_type"].replace("-", "_")]
    needed = {"model_type", "architectures", "id2label", *SIZES}
    spare = {k: v for k, v in config.items() if k in needed or k not in usual or v != usual[k]}
    assert len(spare) < len(config)
    assert np.array_equal(under(case, spare, tmp_path), right(case))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0, 3, 2**24, 0.5, [2, 3]], ids=str)
def test_a_setting_of_any_value_is_refused_or_makes_a_model_that_runs(kind: str, value: Any) -> None:
    case = next(case for case in CASES if config_of(case)["model_type"] == kind)
    image = expected(case).get("pixel_values")
    ids = mx.array(expected(case)["input_ids"]) if image is None else None
    for path in [*settings_of(case), *([("image_size",)] if ids is None else [])]:
        config = config_of(case)
        reduce(lambda table, key: table[key], path[:-1], config)[path[-1]] = value
        if path[-1] in ("num_hidden_layers", "n_layers"):
            continue
        try:
            model = build(family(kind), mlx_tformer.config.Config(config))
            # shapes alone: nothing is computed
            model(mx.zeros((1, model.embed.channels, *model.embed.size)) if ids is None else ids)
        except BadInput as error:
            assert str(error).startswith("config.json: ")
        except mt.UsageError as error:
            assert "positions" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_left_out_means_what_it_means_to_transformers_or_is_missed(kind: str) -> None:
    whole = few_layers(DEFAULTS[kind.replace("-", "_")])
    wanted = description(whole)
    for key in whole:
        if key == "model_type":
            continue
        try:
            found = description({k: v for k, v in whole.items() if k != key})
        except BadInput as error:
            assert f"{key}: missing" in str(error)
        else:
            assert found == wanted, key


@pytest.mark.parametrize("row", PUBLISHED, ids=[row["name"] for row in PUBLISHED])
def test_the_config_of_a_well_known_encoder_is_understood_whole(row: dict[str, Any]) -> None:
    values = mlx_tformer.config.Config(row["config"])
    model = build(family(values.model_type), values)
    assert sum(prod(value.shape) for value in leaves(model).values()) == row["parameters"]


@pytest.mark.parametrize("case", CASES)
def test_a_forgotten_norm_or_bias_moves_the_outputs(case: str) -> None:
    model, given = mt.load(GOLDEN / case, dtype="float32"), expected(case)
    single = "pixel_values" not in given
    inputs = mx.array(given["input_ids"][:1] if single else given["pixel_values"])
    wanted, stored = model(inputs), leaves(model.model)
    for name, value in stored.items():
        if value.ndim > 1:
            continue
        left_out = mx.full(value.shape, float(name.endswith(".weight")))
        if name.endswith("qkv.bias"):  # the same for all keys, it shifts all scores of a query alike
            left_out[value.size // 3 : 2 * value.size // 3] = value[value.size // 3 : 2 * value.size // 3]
        model.model.load_weights([(name, left_out)], strict=False)
        assert mx.abs(model(inputs) - wanted).max().item() > 1e-3, name
        model.model.load_weights([(name, value)], strict=False)
