"""`verify` on models that give something else than the next token: other logits, labels, hidden states, scores."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cli_models import invoke
from helpers import GOLDEN, expected, tensors
from test_encoders import bare
from test_encoders import written as bert
from test_vision import written as vit
from text_models import reading

import mlx_tformer as mt
from mlx_tformer.checkpoint.verify import EXACT, QUANTIZED, ROUNDED
from mlx_tformer.errors import BadInput, Mismatch, UsageError


def hidden(folder: Path) -> Path:
    """A BERT that has no head."""
    return bert(folder, bare(tensors(GOLDEN / "bert" / "model.safetensors"), "bert."), "bert")


CASES = {"bert": 64, "modernbert": 64, "bert-classes": 1, "bert-tokens": 64, "vit": 2, "xlm_roberta-ranks": 1}
"""Golden cases, and how many outputs of theirs are compared."""


@pytest.mark.parametrize(("case", "count"), CASES.items())
def test_a_conversion_computes_the_same_and_one_that_is_rounded_nearly(case: str, count: int, tmp_path: Path) -> None:
    same = mt.verify(GOLDEN / case, mt.convert(GOLDEN / case, tmp_path / "same").path)
    assert (same.distance, same.largest_error, same.top1, same.limit) == (0, 0, 1, EXACT)
    assert (same.tokens, same.are_logits) == (count, case != "xlm_roberta-ranks")
    rounded = mt.verify(GOLDEN / case, mt.convert(GOLDEN / case, tmp_path / "half", dtype="float16").path)
    assert rounded.passed and rounded.limit == ROUNDED


@pytest.mark.parametrize("case", ["vit-oblong", "bert-classes", "modernbert-tokens", "roberta-classes"])
def test_a_quantized_encoder_computes_nearly_the_same(case: str, tmp_path: Path) -> None:
    made = mt.convert(GOLDEN / case, tmp_path / "small", quantize=8, group_size=32)
    found = mt.verify(GOLDEN / case, made.path)
    assert found.passed and 0 < found.mean_kl < found.limit == QUANTIZED
    assert not any("positions" in name or "embed.first" in name for name in made.tensors if name.endswith(".scales"))


def test_hidden_states_and_scores_are_held_by_their_relative_error(tmp_path: Path) -> None:
    a = hidden(tmp_path / "a")
    weights = {name: value.astype(mx.float32) for name, value in tensors(a / "model.safetensors").items()}
    key = "encoder.layer.0.output.dense.weight"
    weights[key] = weights[key] * 1.5
    b = bert(tmp_path / "b", weights, "bert")
    ids = list(range(3, 40))
    found = mt.verify(a, b, ids=ids)
    x, y = (np.array(mt.load(f, dtype="float32")(mx.array([ids]))[0], np.float64) for f in (a, b))
    assert found.mean_square == pytest.approx(np.square(x - y).sum() / np.square(x).sum(), rel=1e-4)
    assert not found.are_logits and not found.passed and found.to_dict()["mean_kl"] is None
    with pytest.raises(Mismatch, match=r"mean square of the relative error .* worst module encoder\.layers\.0\.mlp"):
        found.check()
    ranks = tensors(GOLDEN / "xlm_roberta-ranks" / "model.safetensors")
    ranks["classifier.out_proj.weight"] = -ranks["classifier.out_proj.weight"]
    other = bert(tmp_path / "ranks", ranks, "xlm_roberta-ranks")
    assert not mt.verify(GOLDEN / "xlm_roberta-ranks", other).passed  # the softmax of one number is always 1


def test_the_labels_of_a_worse_classifier_differ(tmp_path: Path) -> None:
    weights = tensors(GOLDEN / "vit" / "model.safetensors")
    weights["classifier.weight"] = -weights["classifier.weight"]
    found = mt.verify(GOLDEN / "vit", vit(tmp_path, weights=weights))
    logits = [mt.load(f, dtype="float32").model for f in (GOLDEN / "vit", tmp_path)]
    pixels = mx.array(expected("vit")["pixel_values"])
    assert not mx.allclose(logits[0](pixels), logits[1](pixels)).item()
    assert found.mean_kl > 0.1 and not found.passed and found.are_logits


def test_models_of_different_kinds_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be compared"):
        mt.verify(GOLDEN / "bert", GOLDEN / "vit")
    with pytest.raises(BadInput, match="is another model"):
        mt.verify(GOLDEN / "bert", hidden(tmp_path))
    with pytest.raises(UsageError, match=r"ids: .* looks at images"):
        mt.verify(GOLDEN / "vit", GOLDEN / "vit", ids=[1])


def test_the_command_says_what_it_compared_and_convert_verifies(tmp_path: Path) -> None:
    folder = reading(tmp_path / "model", "bert-classes").origin
    done = invoke("convert", folder, str(tmp_path / "made"), "--verify")
    assert done.exit_code == 0 and "mean KL divergence: 0 nats" in done.stderr
    lines = invoke("verify", str(hidden(tmp_path / "bare")), str(tmp_path / "bare")).stdout.splitlines()
    assert lines[0].startswith("64 outputs: largest error 0")
    assert lines[1] == "mean square of the relative error: 0, limit 1e-08"
    picture = invoke("convert", str(vit(tmp_path / "vit")), str(tmp_path / "seen"), "--verify")
    assert picture.exit_code == 0 and "logits at 2 positions" in picture.stderr
