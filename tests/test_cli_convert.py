"""`mlx-tformer convert` and `mlx-tformer card`: what they print, and where."""

import json
import re
from pathlib import Path

import pytest
from cli_models import CONTEXT, error_line, invoke, speaking, written
from helpers import GOLDEN

import mlx_tformer as mt
from mlx_tformer.checkpoint.describe import describe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("models") / "speaking")


def test_convert_prints_the_folder_and_a_summary(tmp_path: Path) -> None:
    result = invoke("convert", str(GOLDEN / "llama-gqa-tied"), str(tmp_path / "new"), "--dtype", "float32")
    record = json.loads((tmp_path / "new" / "conversion.json").read_text())
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'new'}\n")
    first, second, *_ = result.stderr.splitlines()
    assert f"{len(record['tensors'])} tensors, {record['parameters']:,} weights" in first
    assert "32.00 bits per weight" in first
    assert second == "mlx-tformer: largest error of a value: 0"
    assert mt.load(tmp_path / "new").dtype == mt.load(GOLDEN / "llama-mha", "float32").dtype


def test_convert_names_every_module_that_stays_unquantized(tmp_path: Path) -> None:
    result = invoke("convert", str(GOLDEN / "qwen3"), str(tmp_path / "new"), "--quantize", "8", "--group-size", "32")
    unquantized = json.loads((tmp_path / "new" / "conversion.json").read_text())["unquantized"]
    lines = [line.split(": ", 2)[2] for line in result.stderr.splitlines() if "not quantized" in line]
    assert unquantized
    named = {re.sub(r"\.(\d+)\.", ".N.", entry) for entry in unquantized}
    assert {re.sub(r"\.[\d, -]+\.", ".N.", line) for line in lines} == named
    assert re.search(r"largest error of a value: 0\.\d+", result.stderr)


def test_convert_goes_to_weights_by_default_where_generate_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = speaking(tmp_path / "from" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert invoke("convert", "from/tiny").stdout == "weights/tiny\n"
    assert invoke("generate", "-m", "tiny", "-n", "5", "a").stdout == written(model, "a", max_tokens=5) + "\n"


def test_convert_leaves_a_folder_alone_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    assert "not empty" in error_line(invoke("convert", str(GOLDEN / "qwen2"), str(tmp_path / "full")), 4)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "mine"]


@pytest.mark.parametrize(("option", "value"), [("--quantize", "7"), ("--group-size", "17"), ("--dtype", "int8")])
def test_a_conversion_that_cannot_be_meant_names_its_option(tmp_path: Path, option: str, value: str) -> None:
    assert option in error_line(invoke("convert", str(GOLDEN / "qwen2"), str(tmp_path / "new"), option, value), 2)


def test_card_prints_the_librarys_card(model: Path) -> None:
    result = invoke("card", str(model), "--context", "64")
    assert result.exit_code == 0
    figures = re.compile(r"memory .*")  # what is free changes from call to call
    assert figures.sub("", result.stdout) == figures.sub("", describe(model, context=64).render())
    assert "for 64 tokens" in result.stdout


def test_card_as_json_is_the_librarys(model: Path) -> None:
    found, wanted = json.loads(invoke("card", str(model), "--json").stdout), describe(model).to_dict()
    assert {**found, "device": 0} == {**wanted, "device": 0}
    assert (found["layers"], found["vocabulary"], found["tokenizer_size"], found["deployed"]) == (2, 67, 67, CONTEXT)


def test_a_card_needs_no_more_than_a_config(tmp_path: Path) -> None:
    whole = describe(GOLDEN / "qwen3").to_dict()
    (tmp_path / "config.json").write_bytes((GOLDEN / "qwen3" / "config.json").read_bytes())
    alone = json.loads(invoke("card", str(tmp_path), "--json").stdout)
    assert {**alone, "device": 0, "name": ""} == {**whole, "device": 0, "name": ""}


def test_a_card_of_the_config_of_a_quantized_model_counts_packed_weights(tmp_path: Path) -> None:
    made = mt.convert(GOLDEN / "llama-gqa-tied", tmp_path / "packed", quantize=4, group_size=32)
    whole = describe(tmp_path / "packed")
    (tmp_path / "packed" / "model.safetensors").unlink()
    alone = describe(tmp_path / "packed")
    assert alone.weights_bytes == whole.weights_bytes == made.nbytes


@pytest.mark.parametrize("dialect", ["rope_parameters", "rope_scaling"])
def test_a_card_tells_trained_from_deployed_length(tmp_path: Path, dialect: str) -> None:
    config = json.loads((GOLDEN / "llama-llama3rope" / "config.json").read_text())
    table = config.pop("rope_parameters")
    trained = table["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config | {dialect: table}))
    found = describe(tmp_path)
    assert (found.trained, found.deployed) == (trained, config["max_position_embeddings"])
    assert trained < config["max_position_embeddings"]


def test_a_context_that_cannot_be_meant_names_its_option(model: Path) -> None:
    assert "--context" in error_line(invoke("card", str(model), "--context", "0"), 2)
