"""`mlx-tformer generate`: settings, the bundled model, chat templates; what it prints and where."""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from cli_models import TEMPLATE, error_line, invoke, speaking, written
from mlx_tformer_cli import generate, options

import mlx_tformer as mt
from mlx_tformer.checkpoint import open as places
from mlx_tformer.generation import Generation, Step
from mlx_tformer.generation.settings import recommended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("models") / "speaking")


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("models") / "chatting", template=TEMPLATE)


def test_text_is_what_the_library_writes_with_the_same_settings(model: Path) -> None:
    options = ["--temperature", "1.5", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3", "-n", "20"]
    settings = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3, "max_tokens": 20}
    wanted = written(model, "a", **settings)
    assert invoke("generate", "-m", str(model), *options, "a").stdout == wanted + "\n"
    assert written(model, "a", **{**settings, "seed": 4}) != wanted


def test_json_is_what_the_library_gives(model: Path) -> None:
    result = invoke("generate", "-m", str(model), "-n", "5", "--json", "a b c")
    found = json.loads(result.stdout)
    steps = list(generation := mt.load(model).generate("a b c", max_tokens=5))
    assert (found["text"], found["tokens"], found["finish"]) == (generation.text, generation.tokens, "length")
    assert found["logprobs"] == pytest.approx([step.logprob for step in steps], abs=1e-5)
    assert (found["model"], found["prompt_tokens"], found["sampling"]) == (str(model), 3, {})
    assert found["stats"].keys() == generation.stats.to_dict().keys()
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--json", "--stats"]])
def test_ctrl_c_keeps_what_there_was(model: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    def impatient(self: Generation) -> Step:
        if len(self.tokens) == 3:
            raise KeyboardInterrupt
        return go_on(self)

    go_on = Generation.__next__
    monkeypatch.setattr(Generation, "__next__", impatient)
    result = invoke("generate", "-m", str(model), *options, "a")
    monkeypatch.undo()
    assert result.exit_code == 130
    wanted = mt.load(model).generate("a", max_tokens=3)
    text = "".join(step.text for step in wanted)
    if not options:
        assert (result.stdout, result.stderr) == (text + "\n", "")
        return
    found = json.loads(result.stdout)
    assert (found["text"], found["tokens"], found["finish"]) == (text, wanted.tokens, None)
    assert "generation: 3 tokens" in result.stderr


@pytest.mark.parametrize(
    ("generation", "options", "wanted"),
    [
        (None, [], {}),
        (None, ["--seed", "1"], {"seed": 1}),
        (None, ["--top-p", "0.9"], {"top_p": 0.9, "temperature": 1.0}),
        (None, ["--top-p", "0.9", "--temperature", "0"], {"top_p": 0.9, "temperature": 0.0}),
        ({"do_sample": True}, [], {"temperature": 1.0}),
        ({"temperature": 0.7, "top_k": 20, "top_p": None}, [], {"temperature": 0.7, "top_k": 20}),
        ({"do_sample": False, "temperature": 0.7}, [], {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, ["--top-p", "1"], {"temperature": 0.6, "top_p": 1.0}),
        ({"do_sample": True, "temperature": 0.6}, ["--temperature", "0"], {"temperature": 0.0}),
    ],
)
def test_settings_that_are_not_given_are_those_that_the_authors_recommend(
    tmp_path: Path, generation: dict[str, Any] | None, options: list[str], wanted: dict[str, float]
) -> None:
    model = speaking(tmp_path / "model", generation=generation)
    result = invoke("generate", "-m", str(model), "-n", "2", "--json", *options, "a")
    assert json.loads(result.stdout)["sampling"] == wanted


def test_a_recommendation_that_cannot_be_followed_is_bad_input(tmp_path: Path) -> None:
    model = speaking(tmp_path / "model", generation={"do_sample": True, "top_p": 7})
    assert "generation_config.json: top_p: found 7" in error_line(invoke("generate", "-m", str(model), "a"), 3)
    with pytest.raises(mt.BadInput, match="temperature: found hot"):
        recommended({"temperature": "hot"}, "somewhere")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "-1"),
        ("--max-tokens", "0"),
        ("--max-tokens", "many"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "2"),
        ("--top-p", "nan"),
        ("--top-k", "-3"),
        ("--min-p", "-0.1"),
        ("--seed", "-1"),
        ("--seed", str(10**30)),
        ("--stop", ""),
        ("--typical-p", "0"),
        ("--xtc-probability", "1.5"),
        ("--repetition-penalty", "0"),
        ("--dry-base", "2"),
        ("--xtc-threshold", "0.2"),
        ("--logit-bias", "a"),
        ("--logit-bias", "a=nan"),
        ("--bad-word", ""),
        ("--min-tokens", "-1"),
        ("--logprobs", "3"),
        ("--dtype", "int8"),
        ("--modle", "x"),
    ],
)
def test_an_option_that_cannot_be_meant_is_a_usage_error_that_names_it(model: Path, option: str, value: str) -> None:
    assert option in error_line(invoke("generate", "-m", str(model), option, value, "a"), 2)


def test_penalties_and_words_are_what_the_library_takes(model: Path) -> None:
    given = ["--repetition-penalty", "1.4", "--presence-penalty", "0.3", "--frequency-penalty", "0.1"]
    given += ["--dry-multiplier", "0.8", "--dry-base", "2", "--dry-allowed-length", "1", "--min-tokens", "3"]
    given += ["--logit-bias", "b=-2", "--logit-bias", "4=1.5", "--bad-word", "c", "--typical-p", "0.9", "--seed", "2"]
    given += ["--xtc-probability", "0.5", "--xtc-threshold", "0.05"]
    settings = {
        "repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.1, "dry_multiplier": 0.8,
        "dry_base": 2.0, "dry_allowed_length": 1, "min_tokens": 3, "typical_p": 0.9, "seed": 2, "temperature": 1.0,
        "xtc_probability": 0.5, "xtc_threshold": 0.05, "logit_bias": {"b": -2.0, 4: 1.5}, "bad_words": ["c"],
    }  # fmt: skip
    result = invoke("generate", "-m", str(model), "-n", "20", "--json", *given, "a")
    found = json.loads(result.stdout)
    assert found["text"] == written(model, "a", max_tokens=20, **settings)
    assert found["sampling"] == {**settings, "logit_bias": {"b": -2.0, "4": 1.5}}


def test_json_tells_the_likeliest_tokens_and_the_prompt(model: Path) -> None:
    result = invoke("generate", "-m", str(model), "-n", "3", "--json", "--logprobs", "2", "--prompt-logprobs", "a b")
    found = json.loads(result.stdout)
    generation = mt.load(model).generate("a b", max_tokens=3, logprobs=2, prompt_logprobs=True)
    assert [[index for index, _ in top] for top in found["top"]] == [[i for i, _ in s.top] for s in generation]
    assert [p["token"] for p in found["prompt"]] == [score.token for score in generation.prompt_scores]
    assert found["prompt"][0]["logprob"] is None
    assert found["prompt"][1]["logprob"] == pytest.approx(generation.prompt_scores[1].logprob, abs=1e-5)


def test_help_shows_options_in_groups() -> None:
    lines = invoke("generate", "--help").stdout.splitlines()
    at = [lines.index(f"{heading}:") for heading in ("Options", "Sampling", options.PENALTIES)]
    assert at == sorted(at)
    assert any("--top-p" in line for line in lines[at[1] : at[2]])


@pytest.mark.parametrize("options", [["-n", str(10**12)], ["--temperature", "1e-40", "-n", "3"]])
def test_what_is_extreme_but_can_be_meant_works(model: Path, options: list[str]) -> None:
    assert invoke("generate", "-m", str(model), *options, "a").exit_code == 0


def test_text_ends_before_a_stop_string(model: Path) -> None:
    whole = written(model, "a", max_tokens=30)
    stop = whole[10:13]
    result = invoke("generate", "-m", str(model), "-n", "30", "--stop", "never", "--stop", stop, "a")
    assert result.stdout == whole[: whole.index(stop)] + "\n"


def test_figures_are_on_standard_error(model: Path) -> None:
    result = invoke("generate", "-m", str(model), "-n", "4", "--stats", "a b")
    assert result.stdout == written(model, "a b", max_tokens=4) + "\n"
    assert re.fullmatch(
        r"mlx-tformer: prompt: 2 tokens, [\d.]+ tokens/s, first token after [\d.]+ s\n"
        r"mlx-tformer: generation: 4 tokens, [\d.]+ tokens/s\n"
        r"mlx-tformer: memory: peak [\d.]+ \w+, KV cache [\d.]+ \w+\n",
        result.stderr,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtype_is_passed_on(model: Path, dtype: str) -> None:
    result = invoke("generate", "-m", str(model), "-n", "4", "--dtype", dtype, "--json", "a")
    steps = list(mt.load(model, dtype).generate("a", max_tokens=4))
    assert json.loads(result.stdout)["logprobs"] == pytest.approx([s.logprob for s in steps], abs=1e-5)


def test_a_length_that_does_not_fit_the_memory_is_refused_with_both_figures(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = mt.memory.weights_bytes(mt.load(model).model) + 1
    monkeypatch.setattr(mt.memory, "of_device", lambda: mt.memory.Memory(2 * needed, needed, "for this test"))
    line = error_line(invoke("generate", "-m", str(model), "-n", "50", "a"), 4)
    assert "for 51 tokens" in line and "for this test" in line


@pytest.mark.parametrize("options", [[], ["--wired"]])
def test_freed_memory_is_bounded_and_wiring_is_opt_in(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    asked: dict[str, object] = {}

    def noted(name: str) -> Callable[[object], AbstractContextManager[None]]:
        return lambda value: nullcontext(asked.update({name: value}))

    for name in ("wired", "bounded_cache"):
        monkeypatch.setattr(mt.memory, name, noted(name))
    assert invoke("generate", "-m", str(model), "-n", "2", *options, "a").exit_code == 0
    assert asked == {"wired": bool(options), "bounded_cache": generate.FREED}


def test_without_a_model_the_bundled_one_writes_and_a_real_one_is_named() -> None:
    result = invoke("generate", "-n", "12", "--seed", "6", "ROMEO:")
    settings = {"temperature": 0.8, "top_p": 0.95, "seed": 6, "max_tokens": 12}
    assert result.stdout.rstrip("\n") == written(places.bundled(), "ROMEO:", **settings).rstrip("\n")
    (line,) = result.stderr.splitlines()
    assert places.BUNDLED in line and f"--model {places.EXAMPLE}" in line


def test_a_folder_that_is_called_like_the_bundled_model_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / places.BUNDLED).mkdir()
    monkeypatch.chdir(tmp_path)
    assert invoke("generate", "-n", "1", "ROMEO:").exit_code == 0


def test_without_a_bundled_model_a_model_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "bundled_folder", lambda: None)
    assert places.EXAMPLE in error_line(invoke("generate", "ROMEO:"), 4)


def test_a_chat_template_is_used_unless_the_prompt_is_raw(chatting: Path) -> None:
    raw = invoke("generate", "-m", str(chatting), "--raw", "-n", "6", "--json", "b")
    chat = invoke("generate", "-m", str(chatting), "-n", "6", "--json", "b")
    system = invoke("generate", "-m", str(chatting), "-n", "6", "--json", "--system", "c ", "b")
    lm = mt.load(chatting)
    prompts = ["b", "u b a", "r c u b a"]
    for result, prompt in zip((raw, chat, system), prompts, strict=True):
        assert json.loads(result.stdout)["text"] == written(chatting, prompt, max_tokens=6)
        assert json.loads(result.stdout)["prompt_tokens"] == len(lm.tokens(prompt))


def test_an_answer_that_was_cut_off_says_so(chatting: Path) -> None:
    assert "--max-tokens" in invoke("generate", "-m", str(chatting), "-n", "6", "b").stderr
    assert invoke("generate", "-m", str(chatting), "-n", "6", "--raw", "b").stderr == ""


def test_a_system_message_needs_a_chat_template(model: Path, chatting: Path) -> None:
    assert "needs a chat template" in error_line(invoke("generate", "-m", str(model), "--system", "a", "b"), 2)
    assert "--raw" in error_line(invoke("generate", "-m", str(chatting), "--raw", "--system", "a", "b"), 2)


def test_what_a_template_refuses_is_one_line(tmp_path: Path) -> None:
    model = speaking(tmp_path / "model", template="{{ raise_exception('only\nwords') }}")
    assert "only" in error_line(invoke("generate", "-m", str(model), "b"), 3)
