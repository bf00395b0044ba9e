"""`mlx-tformer generate --batch`: results in order, settings of each line, and going on after an interruption."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_models import TEMPLATE, error_line, invoke, process, speaking

import mlx_tformer as mt

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "a b"},
    {"prompt": "c", "id": "third", "max_tokens": 3},
    {"ids": [1, 2, 3, 4], "temperature": 1.0, "seed": 5},
    {"prompt": "é é é", "max_tokens": 12},
    {"prompt": "z", "stop": ["e"]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("models") / "speaking")


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "asked.jsonl"
    file.write_text("\n".join(map(json.dumps, REQUESTS)) + "\n\n")
    return file


def results(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_gives_what_the_prompt_alone_gives(model: Path, asked: Path) -> None:
    found = results(invoke("generate", "-m", str(model), "-n", "7", "--batch", str(asked), "--batch-size", "2").stdout)
    lm = mt.load(model)
    assert [line["index"] for line in found] == list(range(5))
    assert [line.get("id") for line in found] == [None, "third", None, None, None]
    for line, request in zip(found, REQUESTS, strict=True):
        own = {key: value for key, value in request.items() if key not in ("prompt", "ids", "id")}
        wanted = lm.generate(request.get("prompt") or request["ids"], **{"max_tokens": 7, **own})
        assert line["text"] == "".join(step.text for step in wanted)
        assert (line["tokens"], line["finish"]) == (wanted.tokens, wanted.finish)


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    model = speaking(tmp_path / "chatting", template=TEMPLATE)
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "b"}]}) + "\n" + json.dumps({"prompt": "b"})
    )
    a, b = results(invoke("generate", "-m", str(model), "-n", "5", "--batch", str(tmp_path / "a.jsonl")).stdout)
    assert a["tokens"] == b["tokens"] and a["prompt_tokens"] == b["prompt_tokens"]
    (raw, *_) = results(
        invoke("generate", "-m", str(model), "--raw", "-n", "5", "--batch", "-", text='{"prompt": "b"}').stdout
    )
    assert raw["prompt_tokens"] < b["prompt_tokens"]


def test_an_interrupted_batch_goes_on_where_it_was(model: Path, asked: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = ("generate", "-m", str(model), "-n", "7", "--batch", str(asked), "--output", str(out))
    assert invoke(*command).exit_code == 0
    whole = out.read_bytes()
    for kept in (0, len(whole) // 2, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:kept])
        result = invoke(*command)
        assert result.exit_code == 0 and out.read_bytes() == whole
        done = whole[:kept].count(b"\n")
        assert ("going on from there" in result.stderr) == bool(done)


def test_results_of_other_requests_are_never_added_to(model: Path, asked: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = ("generate", "-m", str(model), "--batch", str(asked), "--output", str(out))
    assert invoke(*command, "-n", "7").exit_code == 0
    before = out.read_bytes()
    assert "line 1 of" in error_line(invoke(*command, "-n", "8"), 2)
    out.write_bytes(before + b"{}\n")
    assert "line 6 of" in error_line(invoke(*command, "-n", "7"), 2)
    assert out.read_bytes() == before + b"{}\n"


def test_ctrl_c_keeps_whole_lines(tmp_path: Path) -> None:
    model = speaking(tmp_path / "model", context=10**5)
    lines = [json.dumps({"prompt": "a", "max_tokens": 5 if i < 4 else 10**5}) for i in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with process("generate", "-m", str(model), "--batch", str(tmp_path / "a.jsonl"), "--batch-size", "2") as started:
        assert started.stdout is not None
        first = started.stdout.readline()
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=60)
    assert started.returncode == 130
    assert 1 <= len(results((first + out).decode())) <= 4
    assert b"of 8 done" in err and b"Traceback" not in err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "it is empty"),
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: found '[1]', expected an object with a \"prompt\""),
        ('{"prompt": "a", "ids": [1]}', "line 1: found"),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2: prompt: it is empty"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2: prompt: found 3, expected text"),
        ('{"prompt": "a", "heat": 1}', "line 1: heat: there is no such setting"),
        ('{"ids": [9999]}', "line 1: prompt: found id 9999"),
        ('{"ids": [1], "max_tokens": 0}', "line 1: max_tokens: found 0"),
        ('{"messages": "a"}', "line 1: "),
    ],
)
def test_a_line_that_cannot_be_meant_is_named(model: Path, tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    result = invoke("generate", "-m", str(model), "-n", "2", "--batch", str(tmp_path / "a.jsonl"))
    assert result.exit_code == 2 and named in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--batch", "FILE", "a"), "--batch reads its prompts from FILE"),
        (("--batch", "FILE", "--json"), "--batch reads its prompts from FILE"),
        (("--batch", "FILE", "--prompt-cache", "x"), "--batch keeps no cache in a file"),
        (("--batch", "FILE", "--kv-keep", "4"), "--kv-keep"),
        (("--output", "x", "a"), "--output is where --batch writes"),
        (("--batch", "FILE", "--batch-size", "0"), "--batch-size: found 0"),
        (("--batch", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    model: Path, asked: Path, arguments: tuple[str, ...], named: str
) -> None:
    given = [str(asked) if argument == "FILE" else argument for argument in arguments]
    result = invoke("generate", "-m", str(model), *given)
    assert result.exit_code in (2, 4) and named in result.stderr
