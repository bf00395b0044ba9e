"""`mlx-tformer generate` with --json-schema, --regex and --draft: alone, in a batch, and what is refused."""

import json
from pathlib import Path

import pytest
from cli_models import error_line, invoke, speaking
from helpers import GOLDEN
from test_draft import folder_of

import mlx_tformer as mt
from mlx_tformer import memory
from mlx_tformer.memory import Memory

SCHEMA = {"type": "array", "items": {"enum": [1, 20]}, "minItems": 1, "maxItems": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("models") / "speaking")


def test_text_has_the_shape_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    found = invoke("generate", "-m", str(model), "--regex", "(ab|cd){4}", "a")
    assert (found.exit_code, len(found.stdout), found.stderr) == (0, 9, "")
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for schema in (str(file), json.dumps(SCHEMA)):
        result = invoke("generate", "--json-schema", schema, "--temperature", "1", "--seed", "1", "--json", "ROMEO:")
        told = json.loads(result.stdout)
        assert set(json.loads(told["text"])) <= {1, 20} and told["finish"] == "end"


def test_a_text_that_is_cut_off_is_said_to_be(model: Path) -> None:
    found = invoke("generate", "-m", str(model), "--regex", "[ab]{40}", "-n", "5", "a")
    (line,) = found.stderr.splitlines()
    assert "stopped after 5 tokens, so it may be short of its --regex; --max-tokens allows more" in line


def test_lines_of_a_batch_have_the_shape_of_all_or_their_own(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"prompt": "b", "regex": "zz"}, {"prompt": "a"}]
    file, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    given = ("generate", "-m", str(model), "--batch", str(file), "--output", str(out))
    assert invoke(*given, "--regex", "[xy]{6}").exit_code == 0
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert texts[1] == "zz" and len(texts[0]) == 6 and set(texts[0]) <= {*"xy"} and texts[0] == texts[2]
    assert "is not the result of this request" in error_line(invoke(*given, "--regex", "[xy]{7}"), 2)
    file.write_text(json.dumps({"prompt": "a", "regex": "("}))
    assert "line 1: regex: unclosed group in '('" in error_line(
        invoke("generate", "-m", str(model), "--batch", str(file)), 2
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--regex", "("], "regex: unclosed group in '('"),
        (["--json-schema", '{"type": "foo"}'], "--json-schema: Invalid type: foo"),
        (["--json-schema", "{"], "--json-schema: not JSON"),
        (["--json-schema", "{}", "--regex", "a"], "give one of them"),
        (["--draft-tokens", "3"], "--draft-tokens needs --draft"),
        (["--draft", "lookup", "--draft-tokens", "0"], "--draft-tokens: found 0"),
        (["--draft", "ahead"], "draft: the model has no module that looks further ahead"),
        (["--draft", "shakespeare"], "draft: it knows 2048 ids, and the model 67; they must be the same tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_line(model: Path, options: list[str], problem: str) -> None:
    assert problem in error_line(invoke("generate", "-m", str(model), *options, "a"), 2)


def test_files_that_are_not_there_are_one_line(model: Path, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.json")
    assert gone in error_line(invoke("generate", "-m", str(model), "--json-schema", gone, "a"), 4)
    result = invoke("generate", "-m", str(model), "--draft", str(tmp_path / "gone"), "a")
    assert error_line(result, result.exit_code) and result.exit_code in (2, 3)


def test_a_line_that_runs_into_a_dead_end_says_so_and_the_others_go_on(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"prompt": "b", "regex": "zzQ"}, {"prompt": "c"}]
    file, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    result = invoke("generate", "-m", str(model), "-n", "5", "--batch", str(file), "--output", str(out))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    dead = f"regex: after {len(found[1]['tokens'])} tokens, no token of the vocabulary may follow"
    assert [line.get("error") for line in found] == [None, dead, None]
    assert [line["finish"] for line in found] == ["length", "error", "length"] and set(found[1]["text"]) == {"z"}
    assert result.exit_code == 0 and result.stderr.strip().endswith(f"{file}: line 2: {dead}")


def test_an_encoder_is_no_draft_and_a_batch_takes_none(model: Path, tmp_path: Path) -> None:
    assert "--draft is for models that continue a text" in error_line(
        invoke("generate", "-m", str(model), "--draft", str(GOLDEN / "t5"), "a"), 2
    )
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}')
    given = ("generate", "-m", str(model), "--batch", str(tmp_path / "a.jsonl"), "--draft", "lookup")
    assert "--batch checks no guesses" in error_line(invoke(*given), 2)


@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_guesses_change_no_text_and_stats_tell_how_many_were_right(model: Path, draft: str) -> None:
    draft = str(model) if draft == "model" else draft
    plain = invoke("generate", "-m", str(model), "-n", "30", "a b a b a b")
    found = invoke(
        "generate", "-m", str(model), "-n", "30", "--draft", draft, "--draft-tokens", "3", "--stats", "a b a b a b"
    )
    assert found.stdout == plain.stdout
    (line,) = [line for line in found.stderr.splitlines() if "guesses right" in line]
    counts = mt.load(model).generate("a b a b a b", max_tokens=30, draft="lookup", draft_tokens=3)
    list(counts)
    speculation = counts.stats.speculation
    if draft == "lookup":
        right = f"{speculation.accepted} of {speculation.proposed} guesses right"
        assert right in line and f"{29 / speculation.passes:.2f} tokens per pass" in line
    else:
        assert "(100%), 3.62 tokens per pass" in line  # three guesses and one token of its own, the last pass apart
    assert "guesses" not in plain.stderr


def test_a_models_own_module_can_look_ahead(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "ahead")
    (folder / "tokenizer.json").write_bytes((speaking(tmp_path / "speaking") / "tokenizer.json").read_bytes())
    options = ("generate", "-m", str(folder), "-n", "12", "--dtype", "float32", "a b")
    assert invoke(*options, "--draft", "ahead").stdout == invoke(*options).stdout


def test_a_draft_that_does_not_fit_beside_the_model_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = mt.load(model)
    one = memory.weights_bytes(lm.model, lm.dtype) + memory.kv_bytes(lm.model, 11, lm.dtype)
    monkeypatch.setattr(memory, "of_device", lambda: Memory(10 * one, 2 * one - 1, "allowed"))
    result = invoke("generate", "-m", str(model), "-n", "10", "--draft", str(model), "a")
    assert "for the model + " in error_line(result, result.exit_code) and "take a smaller draft" in result.stderr
    monkeypatch.setattr(memory, "of_device", lambda: Memory(10 * one, 2 * one, "allowed"))
    assert invoke("generate", "-m", str(model), "-n", "10", "--draft", str(model), "a").exit_code == 0
