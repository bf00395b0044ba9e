"""Broken checkpoints of encoders, encoder-decoders and vision models: one line that names file, tensor or setting."""

import json
from functools import reduce
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers import GOLDEN, config_of, tensors
from test_encoder_configs import paths_in

import mlx_tformer as mt
import mlx_tformer.config
from mlx_tformer.checkpoint.plan import build
from mlx_tformer.errors import BadInput
from mlx_tformer.families import family

WEIGHTS = {
    "vit": ("vit.encoder.layer.0.attention.attention.query.weight", "classifier.weight"),
    "bert": ("bert.encoder.layer.0.attention.self.value.weight", "cls.predictions.transform.dense.weight"),
    "bert-classes": ("bert.embeddings.LayerNorm.weight", "classifier.weight"),
    "t5": ("shared.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    "t5-untied": ("decoder.block.0.layer.1.EncDecAttention.k.weight", "lm_head.weight"),
    "bart": ("model.decoder.layers.0.encoder_attn.v_proj.weight", "final_logits_bias"),
    "switch": ("encoder.block.1.layer.1.mlp.experts.expert_0.wi.weight", "decoder.final_layer_norm.weight"),
}
"""Tensors of each case that are spoiled in turn."""
SPOILED = [(case, name) for case, names in WEIGHTS.items() for name in names]


def written(folder: Path, case: str, weights: dict[str, mx.array]) -> Path:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config_of(case)))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(BadInput) as error:
        mt.load(folder)
    found = str(error.value)
    assert "\n" not in found and str(folder) in found
    return found


@pytest.mark.parametrize(("case", "name"), SPOILED)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(case: str, name: str, tmp_path: Path) -> None:
    weights = tensors(GOLDEN / case / "model.safetensors")
    wrong = mx.concatenate([weights[name], weights[name][:1]])
    found = refusal(written(tmp_path, case, weights | {name: wrong}))
    assert f"{name}: found shape {wrong.shape}, expected {weights[name].shape}" in found


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_missing_and_a_superfluous_tensor_are_named(case: str, tmp_path: Path) -> None:
    weights, name = tensors(GOLDEN / case / "model.safetensors"), WEIGHTS[case][0]
    found = refusal(written(tmp_path, case, {k: v for k, v in weights.items() if k != name}))
    assert "missing" in found, found
    assert "surplus.weight" in refusal(written(tmp_path, case, weights | {"surplus.weight": mx.ones((2,))}))


@pytest.mark.parametrize("case", ["t5", "bart", "switch", "marian", "m2m_100", "pegasus", "vit"])
@pytest.mark.parametrize("value", [-1, 0, 3, 2**24, 2**70, 0.5, "x", [2, 3], None], ids=str)
def test_a_setting_of_any_value_makes_a_model_or_is_refused_in_one_line(case: str, value: Any) -> None:
    kind = config_of(case)["model_type"]
    for path in paths_in(config_of(case)):
        if path[-1] == "model_type" or "layers" in path[-1]:
            continue  # a great many layers take their time
        config = config_of(case)
        reduce(lambda table, key: table[key], path[:-1], config)[path[-1]] = value
        try:
            build(family(kind), mlx_tformer.config.Config(config))
        except BadInput as error:
            assert str(error).startswith("config.json: ") and "\n" not in str(error), path
