"""The terminal program as a process: pipes, signals, encodings, and what it imports."""

import json
import os
import pty
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from cli_models import process, run, speaking
from helpers import GOLDEN
from hub_server import Hub

import mlx_tformer as mt

SLOW = """
import contextlib, time
from mlx_tformer_cli import convert, main
@contextlib.contextmanager
def slow():
    def show(done, total):
        if done > total / 2:
            print("half", flush=True)
            time.sleep(60)
    yield show
convert.progress_bar = slow
main.main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(speaking(tmp_path_factory.mktemp("models") / "speaking"))


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from mlx_tformer_cli.main import main
try:
    main()
except SystemExit as end:
    heavy = {"mlx", "mlx_tformer", "numpy", "rich", "huggingface_hub", "tokenizers", "jinja2"}
    print(end.code, *(heavy & sys.modules.keys()), file=sys.stderr)
"""
    for command in ([], ["generate"], ["convert"], ["card"]):
        with process(*command, "--help", code=code) as started:
            out, err = started.communicate(timeout=60)
        assert out.startswith(b"Usage: mlx-tformer")
        assert err == b"0\n"


def test_no_command_shows_help_and_is_a_usage_error() -> None:
    code, out, err = run()
    assert (code, out) == (2, b"")
    assert err.startswith(b"Usage: mlx-tformer")


def test_a_reader_that_stops_reading_is_no_error(model: str) -> None:
    with process("generate", "-m", model, "-n", "100", "a") as started:
        assert started.stdin is not None and started.stdout is not None and started.stderr is not None
        started.stdin.close()
        assert started.stdout.read(5)
        started.stdout.close()
        assert started.stderr.read() == b""
    assert started.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("command", ["--help", "generate", "card"])
def test_a_reader_that_never_reads_is_no_error(model: str, command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    arguments = {"generate": ["-m", model, "-n", "4", "a"], "card": [model]}.get(command, [])
    code, _, err = run(command, *arguments, stdout=write)
    os.close(write)
    assert (code, err) == (128 + signal.SIGPIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["--help", "generate", "card"])
def test_a_full_disk_behind_standard_output_is_one_line(model: str, command: str) -> None:
    arguments = {"generate": ["-m", model, "-n", "4", "a"], "card": [model]}.get(command, [])
    with Path("/dev/full").open("wb") as full:
        code, _, err = run(command, *arguments, stdout=full)
    assert code == 4
    assert err.startswith(b"mlx-tformer: error: ")
    assert err.count(b"\n") == 1 and b"No space left" in err


def test_notes_that_nobody_can_read_do_not_end_the_work(model: str) -> None:
    read, write = os.pipe()
    os.close(read)
    code, out, _ = run("generate", "-m", model, "-n", "4", "--stats", "a", stderr=write)
    os.close(write)
    assert code == 0 and out.endswith(b"\n")


def test_standard_output_that_is_closed_is_an_error(model: str) -> None:
    code = f"""
import os, sys
os.close(1)
os.execv(sys.executable, [sys.executable, "-m", "mlx_tformer_cli", "generate", "-m", {model!r}, "-n", "2", "a"])
"""
    with process(code=code) as started:
        _, err = started.communicate(b"", timeout=60)
    assert started.returncode == 4
    assert err == b"mlx-tformer: error: standard output is closed\n"


def on_terminal(stream: str, *arguments: str, **environment: str) -> str:
    """What `mlx-tformer` shows on a terminal that is one of its streams."""
    ours, its = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "80", **environment}
    with process(*arguments, env=environment, **{stream: its}) as started:
        os.close(its)
        if started.stdin is not None:
            started.stdin.close()
        shown = bytearray()
        with suppress(OSError):  # how Linux says that nobody has the terminal open any more
            while piece := os.read(ours, 1 << 16):
                shown += piece
    os.close(ours)
    assert started.returncode == 0
    return shown.decode().replace("\r\n", "\n")


def test_a_card_has_colours_on_a_terminal_and_only_there(model: str) -> None:
    plain = run("card", model)[1].decode()
    shown = on_terminal("stdout", "card", model)
    assert "\x1b[1m" in shown and "\\x1b" not in shown
    without = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()]
    assert without[:10] == plain.splitlines()[:10]
    assert "\x1b" not in on_terminal("stdout", "card", model, TERM="dumb")


def test_text_on_a_terminal_is_text(model: str) -> None:
    arguments = ("generate", "-m", model, "-n", "30", "a")
    assert on_terminal("stdout", *arguments) == run(*arguments)[1].decode()


def test_a_conversion_has_a_progress_bar_on_a_terminal_and_only_there(tmp_path: Path) -> None:
    shown = on_terminal("stderr", "convert", str(GOLDEN / "qwen3"), str(tmp_path / "a"))
    assert "converting" in shown
    assert b"converting" not in run("convert", str(GOLDEN / "qwen3"), str(tmp_path / "b"))[2]


def test_an_encoding_without_a_character_gets_a_replacement(model: str) -> None:
    def text(encoding: str, *options: str) -> bytes:
        code, out, err = run(
            "generate", "-m", model, "-n", "30", *options, "a", env={"PYTHONIOENCODING": encoding, "LC_ALL": "C"}
        )
        assert (code, err) == (0, b"")
        return out

    whole = text("utf-8").decode()
    assert not whole.isascii()
    assert text("ascii") == whole.encode("ascii", "replace")
    assert json.loads(text("ascii", "--json").decode("ascii"))["text"] == whole[:-1]
    assert json.loads(text("utf-8", "--json").decode("utf-8"))["text"] == whole[:-1]


def test_a_card_in_ascii_is_ascii(model: str) -> None:
    code, out, err = run("card", model, env={"PYTHONIOENCODING": "ascii"})
    assert (code, err) == (0, b"")
    assert out.isascii() and b"?" not in out


def test_bytes_of_an_argument_that_are_no_utf_8_are_refused() -> None:
    code, out, err = run("generate", b"abc\xff")
    assert (code, out) == (2, b"")
    assert b"argument 2: found byte 0xff at position 3" in err and err.count(b"\n") == 1


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_an_argument_in_utf_8_is_understood_whatever_the_locale(model: str, locale: dict[str, str]) -> None:
    arguments = ["generate", "-m", model, "-n", "5", "--json", "é 中"]
    results = [json.loads(run(*arguments, env=env)[1]) for env in ({"LC_ALL": "C.UTF-8"}, locale)]
    assert results[0]["tokens"] == results[1]["tokens"]


@pytest.mark.parametrize(("sent", "wanted"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_generating_keeps_the_text_so_far(tmp_path: Path, sent: signal.Signals, wanted: int) -> None:
    model = speaking(tmp_path / "model", context=10**5)
    with process("generate", "-m", str(model), "-n", str(10**5), "a") as started:
        assert started.stdout is not None
        begun = b""
        while len(begun) < 20:
            begun += (piece := started.stdout.read(20))
            assert piece, "it ended early"
        started.send_signal(sent)
        out, err = started.communicate(timeout=60)
    text = (begun + out).decode()
    assert (started.returncode, err, text[-1]) == (wanted, b"", "\n")
    whole = ""
    for step in mt.load(model).generate("a", max_tokens=10**5):
        whole += step.text
        if len(whole) >= len(text):
            break
    assert whole.startswith(text[:-1])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_converting_leaves_nothing_behind(tmp_path: Path, sent: signal.Signals) -> None:
    dest = tmp_path / "weights" / "new"
    with process("convert", str(GOLDEN / "qwen3"), str(dest), code=SLOW) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"half\n"
        assert [path.name for path in dest.parent.iterdir()] == [".new.partial"]
        started.send_signal(sent)
        out, err = started.communicate(timeout=60)
    assert (started.returncode, out, err) == (128 + sent, b"", b"")
    assert not list(tmp_path.iterdir())
    assert run("convert", str(GOLDEN / "qwen3"), str(dest))[0] == 0


def test_nohup_is_respected(tmp_path: Path) -> None:
    arguments = ["convert", str(GOLDEN / "qwen3"), str(tmp_path / "new")]
    with process(*arguments, code=f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN){SLOW}") as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"half\n"
        started.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(timeout=0.5)
        started.send_signal(signal.SIGINT)
        assert started.wait(timeout=60) == 130


def test_a_card_of_a_model_on_the_hub_leaves_the_weights_there(tmp_path: Path) -> None:
    model = speaking(tmp_path / "model")
    with Hub() as hub:
        hub.add("owner/tiny", {path.name: path.read_bytes() for path in model.iterdir()})
        code, out, err = run("card", "owner/tiny", "--json", env=hub.environment(tmp_path / "cache"))
        assert (code, err) == (0, b"")
        assert "model.safetensors" not in hub.fetched()
        generated = run("generate", "-m", "owner/tiny", "-n", "3", "a", env=hub.environment(tmp_path / "cache"))
        assert "model.safetensors" in hub.fetched()
    assert json.loads(out)["tokenizer_size"] == 67
    assert generated == run("generate", "-m", str(model), "-n", "3", "a")


def test_looking_inside_has_colours_and_a_bar_on_a_terminal_and_only_there() -> None:
    arguments = ("inspect", "--layer", "0", "--head", "0", "to be")
    _, plain, told = run(*arguments)
    shown = on_terminal("stdout", *arguments, COLORTERM="truecolor")
    assert re.search(r"48;2;\d+;\d+;\d+m", shown) and b"\x1b" not in plain + told
    without = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()]
    assert without == [line.rstrip() for line in plain.decode().splitlines()]
    bar = on_terminal("stderr", *arguments)
    assert "looking" in bar and "/100" not in bar  # it never counts to what it cannot know


def test_looking_inside_without_colours_or_utf_8_shows_and_writes_all(tmp_path: Path) -> None:
    arguments = ("inspect", "--layer", "0", "to be é")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    _, plain, _ = run(*arguments)
    bare = re.sub(r"\x1b\[[\d;]*m", "", on_terminal("stdout", *arguments, NO_COLOR="1"))
    assert bare == plain.decode() and "@@" in bare
    for name, environment in (("a", {"LC_ALL": "C.UTF-8"}), ("b", locale)):
        code, _, told = run(*arguments, "--html", str(tmp_path / name), env=environment)
        assert code == 0, told
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_where_a_prompt_is_missing_the_command_that_wants_one_is_named() -> None:
    for command in ("generate", "inspect"):
        ours, its = pty.openpty()
        with process(command, stdin=its) as started:
            _, told = started.communicate(timeout=60)
        os.close(ours)
        os.close(its)
        assert started.returncode == 2 and f'as in mlx-tformer {command} "ROMEO:"' in told.decode()
