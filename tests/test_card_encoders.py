"""Cards of encoders of texts and of images: whole, true, and free."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from cli_models import invoke
from helpers import GOLDEN, cases_of, leaves

import mlx_tformer as mt
from mlx_tformer.anatomy import anatomy
from mlx_tformer.checkpoint.describe import describe
from mlx_tformer.errors import UsageError

CASES = [*cases_of("mlm"), *cases_of("classes"), *cases_of("vision")]
HEADS = {
    "bert": "for masked tokens, its last matrix tied to the embedding",
    "bert-classes": "3 labels, by the first token",
    "bert-tokens": "5 labels, token by token",
    "modernbert-classes": "3 labels, by the mean of all tokens",
    "vit": "7 labels, by the first token",
}


@pytest.mark.parametrize("case", CASES)
def test_the_ledger_counts_every_parameter_once_and_the_shapes_are_those_of_the_model(case: str) -> None:
    found, model = describe(GOLDEN / case), mt.load(GOLDEN / case)
    total = sum(value.size for value in leaves(model.model).values())
    assert found.parameters == total
    assert sum(line.parameters * part.times for part in found.ledger for line in part.lines) == total
    assert found.layers == len(model.model.encoder.layers)
    last = found.ledger[-1].lines[-1]
    first = found.ledger[0].lines[0]
    example = mx.ones((2, 9), dtype=mx.int32) if found.images is None else mx.zeros((2, *first.shape[1:]))
    sizes = {"B": 2, "L": 9}
    assert model(example).shape == tuple(sizes.get(axis, axis) for axis in last.shape)


@pytest.mark.parametrize(("case", "head"), HEADS.items())
def test_a_card_says_what_the_head_is_for_from_the_config_alone_too(case: str, head: str, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / case / "config.json", tmp_path)
    whole, alone = describe(GOLDEN / case), describe(tmp_path)
    assert whole.head == alone.head == head
    assert (whole.parameters, whole.ledger) == (alone.parameters, alone.ledger)
    assert f"head            {head}" in whole.render()


@pytest.mark.parametrize("case", CASES)
def test_an_encoder_remembers_nothing_and_needs_its_weights(case: str) -> None:
    found = describe(GOLDEN / case)
    assert (found.kv_bytes_per_token, found.kv_bytes, found.context) == (0, None, None)
    assert found.needed_bytes == found.weights_bytes and found.fits
    text = found.render()
    assert "none: nothing is remembered between calls" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert ("N labels" in text) == ("labels" in found.head)


def test_a_card_of_a_model_of_images_speaks_of_images() -> None:
    found = describe(GOLDEN / "vit-oblong")
    assert found.images == "20 × 27 with 2 channels, in 9 patches of 6 × 9"
    assert found.vocabulary is None and "vocabulary" not in found.render()
    assert found.render(ascii_only=True).isascii()


def test_the_command_prints_it_and_gives_json() -> None:
    found = json.loads(invoke("card", str(GOLDEN / "vit"), "--json").stdout)
    assert found["head"] == "7 labels, by the first token" and found["kinds"][0]["stack"] == "encoder"
    assert "images" in invoke("card", str(GOLDEN / "vit")).stdout


def test_a_kind_of_model_that_has_not_registered_is_refused() -> None:
    with pytest.raises(UsageError, match="no card of a Linear"):
        anatomy(nn.Linear(2, 2))
