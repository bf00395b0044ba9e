"""The terminal program: its help, how it takes a prompt, and how it ends when something is wrong."""

import doctest
import io
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from cli_models import CONTEXT, error_line, invoke, speaking, written
from helpers import GOLDEN
from mlx_tformer_cli import convert, generate, main, reference, terminal
from mlx_tformer_cli.main import program

import mlx_tformer as mt
from mlx_tformer.checkpoint import open as places

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("models") / "speaking")


@pytest.mark.parametrize("command", [[], *([name] for name in program.commands)], ids=str)
def test_help_shows_examples_that_name_the_program(command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert re.search(r"Examples:\n +mlx-tformer " + "".join(command), result.stdout)
    assert result.stdout.isascii()
    assert invoke(*command, "-h").stdout == result.stdout


def test_every_option_has_help() -> None:
    options = [option for command in program.commands.values() for option in command.params if option.opts[0][0] == "-"]
    assert len(options) > 20
    assert [option.name for option in options if not option.help] == []


def test_readme_has_the_commands_own_help() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert reference.updated(page) == page, "run: python -m mlx_tformer_cli.reference README.md"


def test_the_reference_names_every_option() -> None:
    text = reference.reference()
    names = {name for command in program.commands.values() for option in command.params for name in option.opts}
    assert {name for name in names if name.startswith("-")} <= set(re.findall(r"--?[a-z][a-z-]*", text))


def test_the_models_that_help_names_are_those_of_the_library() -> None:
    assert places.EXAMPLE in invoke("--help").stdout
    assert places.BUNDLED in invoke("generate", "--help").stdout.lower()


def test_the_version_is_the_librarys() -> None:
    assert invoke("--version").stdout == f"mlx-tformer {mt.__version__}\n"


@pytest.mark.parametrize("module", [main, terminal, convert, reference])
def test_examples_in_docstrings_hold(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert (found.failed, found.attempted > 0) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["a b"], None), (["a b"], "c"), ([], "a b\n"), (["-"], "a b\n"), (["-"], "a b\r\n"), (["--", "a b"], None)],
)
def test_a_prompt_comes_from_the_argument_or_else_from_standard_input(
    model: Path, arguments: list[str], text: str | None
) -> None:
    result = invoke("generate", "--model", str(model), "-n", "8", *arguments, text=text)
    assert (result.exit_code, result.stdout) == (0, written(model, "a b", max_tokens=8) + "\n")
    assert result.stderr == ""


def test_only_one_line_end_is_taken_off_standard_input() -> None:
    result = invoke("generate", "--json", "-n", "1", text="a\n\n")
    assert json.loads(result.stdout)["prompt_tokens"] == len(mt.load("shakespeare").tokens("a\n"))


def test_a_dash_at_the_start_of_a_prompt_needs_two_dashes_before(model: Path) -> None:
    assert "no such option" in error_line(invoke("generate", "--model", str(model), "-q"), 2)
    assert invoke("generate", "--model", str(model), "-n", "2", "--", "-q").exit_code == 0


@pytest.mark.parametrize(("arguments", "text"), [([""], None), ([], ""), ([], "\n"), (["-"], "")])
def test_an_empty_prompt_is_refused(arguments: list[str], text: str | None) -> None:
    assert re.search("prompt.*empty", error_line(invoke("generate", *arguments, text=text), 2)) or text is not None


def test_no_prompt_on_a_terminal_teaches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(generate.sys, "stdin", Terminal())
    asked = generate.click.Context(generate.command, info_name="mlx-tformer generate").scope()
    with asked, pytest.raises(generate.click.UsageError, match=r'mlx-tformer generate "ROMEO:"'):
        generate.prompt_text(None)


def test_a_prompt_that_is_too_long_is_refused_with_both_counts(model: Path) -> None:
    fits = invoke("generate", "-m", str(model), " ".join("a" * (CONTEXT - 1)))
    assert fits.exit_code == 0
    assert fits.stderr == f"mlx-tformer: stopped, because the context of {CONTEXT} tokens is full\n"
    line = error_line(invoke("generate", "-m", str(model), " ".join("a" * 200)), 2)
    assert "200" in line and str(CONTEXT) in line


def test_bytes_that_are_no_utf_8_are_refused_with_their_position() -> None:
    assert "0xff at position 3" in error_line(invoke("generate", text=b"abc\xff"), 2)
    assert "argument 2: found byte 0xff at position 1" in error_line(invoke("generate", "a\udcff"), 2)


def test_an_argument_in_utf_8_that_an_ascii_locale_did_not_understand_is_read() -> None:
    assert terminal.argument("caf\udcc3\udca9", 1) == "café"
    assert terminal.argument("中", 1) == "中"


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    for command in ("generate", "card", "convert"):
        model = ["-m", str(tmp_path / "nowhere"), "a"] if command == "generate" else [str(tmp_path / "nowhere")]
        assert "nowhere" in error_line(invoke(command, *model), 3)


def test_a_folder_without_weights_is_one_line(tmp_path: Path) -> None:
    model = speaking(tmp_path / "model")
    (model / "model.safetensors").unlink()
    assert "no weights" in error_line(invoke("generate", "-m", str(model), "a"), 3)
    assert "no weights" in error_line(invoke("convert", str(model), str(tmp_path / "new")), 3)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["generate", "card", "convert"])
def test_an_unknown_model_type_is_one_line(tmp_path: Path, command: str) -> None:
    model = speaking(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"model_type": "lama"}))
    arguments = ["-m", str(model), "a"] if command == "generate" else [str(model)]
    assert re.search("model_type.*lama.*llama", error_line(invoke(command, *arguments), 3))


def test_a_model_without_a_tokenizer_cannot_read_a_prompt() -> None:
    assert "no tokenizer" in error_line(invoke("generate", "-m", str(GOLDEN / "llama-mha"), "a"), 2)


def test_what_the_weights_folder_lacks_is_said_on_standard_error(tmp_path: Path) -> None:
    model = speaking(tmp_path / "model")
    (model / "stray.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    result = invoke("generate", "-m", str(model), "-n", "1", "a")
    assert result.exit_code == 0
    assert "stray.safetensors" in result.stderr


def test_a_fault_of_the_program_is_one_line_and_a_traceback_only_on_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("over\nthere")

    monkeypatch.setattr(generate, "sampling_settings", broken)
    monkeypatch.delenv("MLX_TFORMER_DEBUG", raising=False)
    line = error_line(invoke("generate", "-m", str(model), "a"), 1)
    assert "KeyError" in line and "report" in line
    monkeypatch.setenv("MLX_TFORMER_DEBUG", "1")
    assert "Traceback" in invoke("generate", "-m", str(model), "a").stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError(), 4), (PermissionError(13, "Permission denied", "file"), 4), (ImportError("no mlx"), 1)],
)
def test_errors_of_the_system_are_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(generate, "loaded", broken)
    assert error_line(invoke("generate", "a"), code)


def test_a_terminal_gets_no_control_characters_from_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.Writer() as out:
        out.write("a\x1b[2Jb\n")
    assert capsys.readouterr().out == "a\x1b[2Jb\n"
    with pytest.MonkeyPatch.context() as patch, terminal.Writer() as out:
        patch.setattr(out, "_terminal", True)
        out.write("a\x1b[2J\x9b\x7fé\tb\n")
    assert capsys.readouterr().out == "a\\x1b[2J\\x9b\\x7fé\tb\n"


def test_each_piece_of_text_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(arrived, encoding="utf-8"))
    with terminal.Writer() as out:
        out.write("é")
        assert arrived.getvalue().decode() == "é"
    assert arrived.getvalue().decode() == "é\n"


def test_an_error_with_line_ends_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.note("error: a\nb\x1b[31m")
    assert capsys.readouterr().err == "mlx-tformer: error: a\\nb\\x1b[31m\n"
