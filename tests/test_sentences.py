"""How the authors of an encoder say that a text becomes a vector."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cli_models import invoke
from helpers import gap
from text_models import loaded, reading

import mlx_tformer as mt
from mlx_tformer.errors import BadInput
from mlx_tformer.sentences import length_of, pool_of

MODULES = [
    {"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(["Transformer", "Pooling"])
]
OFF = dict.fromkeys((f"pooling_mode_{kind}_tokens" for kind in ("mean", "max", "mean_sqrt_len", "weightedmean")), False)


def files(pooling: Any = None, modules: Any = MODULES, **bert: Any) -> dict[str, bytes]:
    found = {"modules.json": modules, "1_Pooling/config.json": pooling, "sentence_bert_config.json": bert or None}
    return {name: json.dumps(value).encode() for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        (None, "mean"),
        ({}, "mean"),
        ({**OFF, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({**OFF, "pooling_mode_cls_token": True}, "cls"),
        ({**OFF, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 8}, "last"),
    ],
)
def test_what_authors_say_is_understood(pooling: Any, pool: str) -> None:
    assert pool_of(files(pooling), "x") == pool


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (files({"pooling_mode_cls_token": True}), "x/1_Pooling/config.json: pooling_mode: found 'mean+cls'"),
        (files({**OFF, "pooling_mode_max_tokens": True}), "found 'max', expected one of mean, cls, lasttoken"),
        (files(OFF), "found '', expected"),
        (files({"pooling_mode": "weightedmean"}), "found 'weightedmean'"),
        (files({}, [*MODULES, {"type": "sentence_transformers.models.Dense"}]), "x/modules.json: type: found Dense"),
        (files({}, {"a": 1}), "x/modules.json: found a dict, expected a list"),
        (files([1]), "x/1_Pooling/config.json: found a list, expected an object"),
        ({"modules.json": b"{"}, "x/modules.json: not JSON"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(given: dict[str, bytes], problem: str) -> None:
    with pytest.raises(BadInput) as error:
        pool_of(given, "x")
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_the_length_that_authors_read_is_where_texts_are_cut_off() -> None:
    assert length_of(files(), "x") is None and length_of(files(max_seq_length=9), "x") == 9
    with pytest.raises(BadInput, match="max_seq_length: found 0, expected a whole number of 1 or more"):
        length_of(files(max_seq_length=0), "x")


def test_a_checkpoint_pools_as_it_says_and_so_do_its_copies(tmp_path: Path) -> None:
    folder = tmp_path / "sentences"
    silent = reading(folder, "bert")
    for name, content in files({**OFF, "pooling_mode_cls_token": True}, max_seq_length=6).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    model = loaded(folder)
    assert mx.array_equal(silent.embed("a b"), model.embed("a b", pool="mean")).item()
    assert gap(model.embed("a b"), silent.embed("a b")) > 1e-3
    short, long = "a b a b", "a b a b b b b b"
    assert mx.array_equal(model.embed(long, truncate=True), model.embed(short)).item()
    assert gap(model.embed(long), model.embed(short)) > 1e-4  # it is cut off only if asked for
    made = mt.convert(folder, tmp_path / "ours").path
    kept = [made, mt.export(made, tmp_path / "theirs").path, mt.save(model, tmp_path / "saved")]
    for copy in kept:
        assert mx.array_equal(loaded(copy).embed("a b"), model.embed("a b")).item()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**OFF, "pooling_mode_max_tokens": True}))
    assert mx.array_equal(loaded(folder).embed("a b", pool="cls"), model.embed("a b")).item()
    refused = invoke("embed", "-m", str(folder), "a b")
    assert refused.exit_code == 3 and "found 'max'" in refused.stderr
