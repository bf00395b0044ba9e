"""Qwen 3 Next where the other tests do not reach: the module that predicts a further token, and what may not be.

transformers passes over the module's weights. It is a layer that attends, so its reference is a model of one layer.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from checkpoints import Weights, case_weights, make_folder, refusal, same
from helpers import config_of, gap, golden, ids_of, variant
from reference import f64

import mlx_tformer as mt
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.export import export
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile
from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.nn import LM, Context

CASE, ATTENDS = "qwen3_next-mixed", "model.layers.1."
CONFIG = config_of(CASE)
DIM = CONFIG["hidden_size"]


def noise(name: str, shape: tuple[int, ...], scale: float) -> mx.array:
    return (scale * mx.random.normal(shape, key=mx.random.key(sum(map(ord, name))))).astype(mx.bfloat16)


def module() -> Weights:
    """A layer like the one that attends, and what joins a token to a state."""
    theirs, found = case_weights(CASE), {}
    for name in [name for name in theirs if name.startswith(ATTENDS)]:
        new = name.replace(ATTENDS, "mtp.layers.0.")
        found[new] = theirs[name] + noise(new, theirs[name].shape, 0.1)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        found[f"mtp.{name}.weight"] = noise(name, (DIM,), 0.3)
    return found | {"mtp.fc.weight": noise("fc", (DIM, 2 * DIM), 0.2)}


def with_module(folder: Path) -> Path:
    return make_folder(folder, CASE, case_weights(CASE) | module())


def model_of(folder: Path) -> LM:
    return mt.load(folder, dtype="float32").model


def one_layer(folder: Path) -> LM:
    """A whole model that is nothing but the module's layer and its norm."""
    layer = {name.replace("mtp.layers", "model.layers"): value for name, value in module().items()}
    weights = {"model.embed_tokens.weight": case_weights(CASE)["model.embed_tokens.weight"]}
    weights |= {name: value for name, value in layer.items() if name.startswith("model.")}
    weights["model.norm.weight"] = module()["mtp.norm.weight"]
    return model_of(make_folder(folder, CASE, weights, num_hidden_layers=1, layer_types=["full_attention"]))


def normed(x: Any, weight: mx.array) -> Any:
    return x / ((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) ** 0.5 * (1 + f64(weight))


def test_a_draft_is_a_layer_that_reads_a_token_and_the_state_before_it(tmp_path: Path) -> None:
    model, w = model_of(with_module(tmp_path / "theirs")), module()
    ids = ids_of(CASE)[:, 1:]
    hidden = model.hidden(ids_of(CASE))[:, :-1]
    token, state = w["mtp.pre_fc_norm_embedding.weight"], w["mtp.pre_fc_norm_hidden.weight"]
    fc = f64(w["mtp.fc.weight"])
    x = normed(f64(model.embed.tokens(ids)), token) @ fc[:, :DIM].T + normed(f64(hidden), state) @ fc[:, DIM:].T
    layer, read = one_layer(tmp_path / "one"), mx.array(x.astype("float32"))
    assert model.depth == 1
    wanted = layer.logits(layer.decoder(read, Context.alone(read)))
    assert gap(model.draft(hidden, ids), wanted) < 5e-5
    assert same(model(ids_of(CASE)), golden(CASE)(ids_of(CASE)))


def test_conversions_and_exports_keep_the_module(tmp_path: Path) -> None:
    made = convert(with_module(tmp_path / "theirs"), tmp_path / "made").path
    assert model_of(made).depth == 1
    back = SafetensorsFile(export(made, tmp_path / "back").path / "model.safetensors")
    wanted = case_weights(CASE) | module()
    assert back.tensors.keys() == wanted.keys() and all(same(back.read(name), wanted[name]) for name in wanted)


def test_what_decides_on_keeping_and_correcting_is_never_packed(tmp_path: Path) -> None:
    made = convert(with_module(tmp_path / "theirs"), tmp_path / "made", quantize=8, group_size=32)
    packed = json.loads((made.path / "config.json").read_text())["mlx_tformer"]["quantization"]
    assert {"decoder.layers.0.mixer.op.into", "drafts.0.join"} <= packed.keys()
    assert not any(name.endswith((".rates", ".router", ".shared_gate")) for name in packed)
    assert any(note.startswith("decoder.layers.0.mixer.op.rates: stays as it is") for note in made.unquantized)
    found, wanted = model_of(made.path)(ids_of(CASE)), golden(CASE)(ids_of(CASE))
    off = mx.abs(found - wanted).flatten()  # a token or two go to another expert
    assert 0 < mx.median(off).item() < 0.05 * mx.std(wanted).item()


def test_a_cache_forgets_nothing_and_goes_on_as_before() -> None:
    model, ids = golden(CASE), ids_of(CASE)
    cache = model.new_cache()
    first = model(ids[:, :9], cache)
    refusal(UsageError, "cannot forget 2 tokens: a state space", of=lambda: cache.trim(2))
    assert gap(mx.concatenate([first, model(ids[:, 9:], cache)], axis=1), model(ids)) < 5e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_num_key_heads": 4}, "expected a divisor of linear_num_value_heads (6)"),
        (
            {"layer_types": ["linear_attention", "sliding_attention", "linear_attention"]},
            "3 entries of linear_attention",
        ),
        ({"layer_types": ["linear_attention"]}, "3 entries of linear_attention"),
        ({"use_sliding_window": True}, "use_sliding_window: found True"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    refusal(BadInput, said, of=lambda: variant(CASE, CONFIG | changes, tmp_path))


def test_other_families_have_no_layers_of_it(tmp_path: Path) -> None:
    config = config_of("qwen3") | {"layer_types": ["linear_attention"] * 3}
    refusal(BadInput, "layer_types", of=lambda: variant("qwen3", config, tmp_path))
