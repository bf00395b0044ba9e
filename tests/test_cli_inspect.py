"""`mlx-tformer inspect`: its numbers are the library's, in the terminal, in JSON and on the page."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from cli_models import error_line, invoke
from helpers import GOLDEN, cases_of
from PIL import Image
from worded import text_of, worded

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect.sites import main_stack

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IDS = [3, 17, 4, 25, 9, 3, 17, 30]
TEXT = text_of(IDS)
# A window, sinks, latent attention, a soft cap, ALiBi twice, experts, layers without attention, and two encoders.
FAMILIES = [
    *("llama-gqa-tied", "mistral-window", "gpt_oss", "deepseek_v3", "gemma2", "bloom", "mpt", "mixtral", "jamba"),
    *("falcon_h1", "bert", "modernbert", "t5", "bart", "switch"),
]
FULL = "/dev/full"
WITH_FULL = pytest.mark.skipif(not Path(FULL).exists(), reason=f"there is no {FULL}")
Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a golden case with words."""
    top, made = tmp_path_factory.mktemp("worded"), set()

    def find(case: str) -> str:
        if case not in made:
            worded(case, top / case)
            made.add(case)
        return str(top / case)

    return find


def numbers(*arguments: str) -> dict[str, Any]:
    """What `inspect --json -` prints, and nothing else."""
    result = invoke("inspect", "--dtype", "float32", "--json", "-", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def traced(folder: str, *names: str, target: list[int] | None = None) -> inspect.Trace:
    """A trace of the text by the library."""
    lm: Any = mt.load(folder, dtype="float32")
    with inspect.trace(lm, read=names) as t:
        lm(lm.tokens(TEXT), **({} if target is None else {"decoder_input_ids": [lm.rules.start, *target]}))
    return t


@pytest.mark.parametrize("case", FAMILIES)
def test_the_heads_of_every_kind_of_attention_are_the_librarys(case: str, folder: Folder) -> None:
    two = case in cases_of("seq2seq")
    t = traced(folder(case), "*.pattern", target=[5, 6] if two else None)
    found = numbers("-m", folder(case), *(["--target", "w5 w6"] if two else []), TEXT)
    assert found["ids"] == IDS and found["check"] == t.check() < 1e-5
    assert list(found["parts"]) == (["encoder", "decoder", "cross"] if two else [main_stack(t.lm.model)])
    for part, told in found["parts"].items():
        wanted = t.patterns(stack="decoder" if part == "cross" else part, crosses=part == "cross")
        assert told["layers"] == [one.layer for one in wanted]
        for i, one in enumerate(wanted):
            assert told["entropy"][i] == np.array(inspect.entropy(one.values).mean(axis=-1)).tolist()
            assert told["sink_mass"][i] == np.array(inspect.sink_mass(one.values).mean(axis=-1)).tolist()
            assert np.isfinite(told["distance"][i]).all()


@pytest.mark.parametrize("case", FAMILIES)
def test_the_numbers_of_a_head_are_its_pattern(case: str, folder: Folder) -> None:
    two = case in cases_of("seq2seq")
    t = traced(folder(case), "*.pattern", target=[5, 6] if two else None)
    for part in ("encoder", "decoder", "cross") if two else (main_stack(t.lm.model),):
        wanted = t.patterns(stack="decoder" if part == "cross" else part, crosses=part == "cross")[-1]
        where = ["--layer", str(wanted.layer), "--head", "1", "--part", part]
        found = numbers("-m", folder(case), *where, *(["--target", "w5 w6"] if two else []), TEXT)
        alone = traced(folder(case), wanted.name, target=[5, 6] if two else None)  # which leaves other layers fused
        (wanted,) = alone.patterns(wanted.layer, stack=alone.site(wanted.name).stack, crosses=part == "cross")
        assert found["pattern"] == np.array(wanted.values[1]).tolist()
        assert found["deficit"] == np.array(wanted.deficit[1]).tolist()
        assert (found["queries"], found["keys"]) == (wanted.queries, wanted.keys)
        assert found["keys"][0] == ("w3" if part != "decoder" or not two else f"w{t.lm.rules.start}")


def test_what_sinks_take_is_said_and_shown(folder: Folder) -> None:
    shown = invoke("inspect", "-m", folder("gpt_oss"), "--layer", "0", "--head", "0", TEXT)
    assert "learned sinks take" in shown.stdout and "(sink" in shown.stdout
    assert "learned sinks" not in invoke("inspect", "-m", folder("bloom"), "--layer", "0", TEXT).stdout


def test_scores_are_the_librarys() -> None:
    found = numbers("--scores")
    wanted = inspect.head_scores(mt.load("shakespeare", dtype="float32"), list(found["scores"]))
    assert set(found["scores"]) == {"induction", "previous", "duplicate", "current", "sink", "local"}
    for kind, table in found["scores"].items():
        assert table == np.array(wanted[kind]).tolist()
    assert found["losses"] == list(wanted.losses or [])


@pytest.mark.parametrize("case", ["gemma2", "mamba", "bert", "bart"])
def test_the_lens_ends_in_the_models_own_best_tokens(case: str, folder: Folder) -> None:
    target = [5, 6] if case == "bart" else None
    t = traced(folder(case), "logits", target=target)
    given = ["--target", "w5 w6"] if target else []
    found = numbers("-m", folder(case), "--lens", "--top", "3", "--token", "w8", *given, TEXT)
    logits = t["logits"][0, -1]
    best = mx.argsort(-logits)[:3].tolist()
    assert found["ids_of_best"][-1] == best and found["best"][-1] == [f"w{i}" for i in best]
    assert found["probabilities"][-1] == pytest.approx(np.array(mx.softmax(logits))[best].tolist(), abs=1e-6)
    assert found["ranks"][-1] == int((logits > logits[8]).sum().item())


@pytest.mark.parametrize(("case", "part"), [("mixtral", None), ("gpt_oss", None), ("switch", "encoder")])
def test_experts_are_the_librarys(case: str, part: str | None, folder: Folder) -> None:
    t = traced(folder(case), f"{part or 'decoder'}.*.router.*", target=[5, 6] if part else None)
    given = ["--target", "w5 w6", "--part", part] if part else []
    found = numbers("-m", folder(case), "--experts", *given, TEXT)
    for told, wanted in zip(found["layers"], inspect.experts(t), strict=True):
        assert told["load"] == wanted.load.tolist() and told["together"] == wanted.together.tolist()
        assert told["entropy"] == np.array(wanted.entropy[0]).tolist()
        assert (told["layer"], told["dropped"], told["tokens"]) == (wanted.layer, wanted.dropped, len(IDS))


@pytest.mark.parametrize("written", [0, 5])
def test_statistics_are_the_librarys(written: int, folder: Folder) -> None:
    lm = mt.load(folder("gpt_oss"), dtype="float32")
    tokens = lm.tokens(TEXT)
    with inspect.stats(mass=tokens.spans(every=3)) as watch:
        made = list(lm.generate(tokens, max_tokens=written)) if written else lm(tokens)
    found = numbers("-m", folder("gpt_oss"), "--stats", "--spans", "3", *(["-n", "5"] if written else []), TEXT)
    assert len(found["written"]) == written and (not written or found["written"] == [step.token for step in made])
    assert list(found["attention"]) == list(watch.paths) and found["spans"] == list(watch.spans)
    for path in watch.paths:
        for name in ("entropy", "distance", "sink", "mass"):
            wanted = np.array(vars(type(watch[path]))[name].fget(watch[path]))[0].mean(axis=1)
            assert found["attention"][path][name] == wanted.tolist()


@pytest.mark.parametrize("case", ["bert", "bart"])
def test_statistics_of_encoders_are_those_of_their_patterns(case: str, folder: Folder) -> None:
    given = ["-n", "4"] if case == "bart" else []
    found, other = (numbers("-m", folder(case), *mode, *given, TEXT) for mode in (["--stats"], []))
    for part, told in other["parts"].items():
        kind = "cross" if part == "cross" else "attn"
        stack = "decoder" if part == "cross" else part
        for layer, entropy in zip(told["layers"], told["entropy"], strict=True):
            row = found["attention"][f"{stack}.layers.{layer}.{kind}.op"]
            assert row["entropy"] == pytest.approx(entropy, abs=1e-5)


def test_what_makes_a_model_say_a_token_adds_up(folder: Folder) -> None:
    found = numbers("-m", folder("gemma2"), "--token", "w5", "--minus", "w6", TEXT)
    t = traced(folder("gemma2"), "embed.out", "*.delta", "residual.out", "attn.z")
    wanted = inspect.attribution(t, 5, minus=6)
    assert found["logit"] == wanted.logit
    assert [share["value"] for share in found["shares"]] == [share.value for share in wanted.shares]


def test_what_is_written_is_looked_at_too(folder: Folder) -> None:
    lm = mt.load(folder("mistral-window"), dtype="float32")
    with inspect.trace(lm, read=["layers.1.attn.pattern"]) as t:
        for _ in lm.generate(lm.tokens(TEXT), max_tokens=4):
            pass
    found = numbers("-m", folder("mistral-window"), "--layer", "1", "-n", "4", TEXT)
    assert found["pattern"] == np.array(t["attn.pattern"][0]).tolist()
    assert found["queries"] == t.labels()[: len(found["queries"])] and len(found["queries"]) > len(IDS)


def test_a_chat_template_is_around_the_prompt_unless_it_is_to_be_raw(tmp_path: Path) -> None:
    made = str(worded("bloom", tmp_path, template="w1 {{ messages[0]['content'] }} w2"))
    assert numbers("-m", made, "w5 w6")["ids"] == [1, 5, 6, 2]
    assert numbers("-m", made, "--raw", "w5 w6")["ids"] == [5, 6]


def test_a_quantized_model_says_so(tmp_path: Path, folder: Folder) -> None:
    result = invoke("convert", folder("mistral-full"), str(tmp_path / "q"), "--quantize", "8", "--group-size", "32")
    assert result.exit_code == 0, result.output
    shown = invoke("inspect", "-m", str(tmp_path / "q"), TEXT)
    assert "quantized (8 bits): these are the quantized model's activations" in shown.stderr
    assert "quantized" not in shown.stdout  # said once
    assert numbers("-m", str(tmp_path / "q"), TEXT)["check"] < 1e-5


def test_the_terminal_shows_maps_numbers_and_the_proof(folder: Folder) -> None:
    shown = invoke("inspect", "-m", folder("bart"), "-n", "3", TEXT).stdout
    assert all(f"\n{title}\n" in f"\n{shown}" for title in ("encoder", "decoder", "cross-attention"))
    assert "check: pattern @ values differs from the fused output by" in shown and "\x1b" not in shown
    one = invoke("inspect", "-m", folder("llama-gqa-tied"), "--dtype", "float32", "--layer", "1", "--head", "2", TEXT)
    pattern = numbers("-m", folder("llama-gqa-tied"), "--layer", "1", "--head", "2", TEXT)["pattern"]
    last = one.stdout.splitlines()[-2].split()
    assert last[0] == "w30" and [float(x) for x in last[1:]] == pytest.approx(pattern[-1], rel=0.01, abs=1e-4)


@pytest.mark.parametrize(
    ("case", "arguments", "code", "named"),
    [
        ("bloom", ["--layer", "7"], 2, "--layer: found 7, expected one of 0-"),
        ("bloom", ["--layer", "0", "--head", "9"], 2, "--head: found 9, expected 0 to 3"),
        ("bloom", ["--head", "1"], 2, "--head needs --layer"),
        ("bloom", ["--scores", "--lens"], 2, "choose one"),
        ("bloom", ["--experts"], 2, "--experts: "),
        ("mixtral", ["--experts", "--layer", "9"], 2, "--layer: found 9"),
        ("bloom", ["--part", "cross"], 2, "--part: found cross, expected one of decoder"),
        ("bloom", ["--target", "w1"], 2, "--target: "),
        ("bloom", ["--minus", "w1"], 2, "--minus needs --token"),
        ("bloom", ["--spans", "line"], 2, "--spans needs --stats"),
        (
            "bloom",
            ["--stats", "--spans", "page"],
            2,
            "--spans: found 'page', expected a number of tokens, or one of line",
        ),
        ("bloom", ["--stats", "--spans", "0"], 2, "--spans: found '0'"),
        ("bloom", ["--layer", "0", "-n", "100000"], 2, "GB; use --stats"),
        *(
            ("bloom", [name, ""], 2, f"{name}: found '', expected the name of a file")
            for name in ("--png", "--html", "--json")
        ),
        ("bloom", ["--html", "{tmp}"], 4, "Is a directory"),
        pytest.param(*("bloom", ["--json", FULL], 4, f"{FULL}: No space left"), marks=WITH_FULL),
        ("bloom", ["-n", "0"], 2, "--max-tokens: found 0"),
        ("bloom", ["--token", "w1 w2"], 2, "found 2 tokens, expected text of one"),
        ("bloom", ["--lens", "--top", "0"], 2, "--top: found 0"),
        ("bloom", ["--part", "middle"], 2, "--part"),
        ("mamba", [], 2, "has no attention (mamba); --lens looks at any model that writes"),
        ("mamba2", ["--stats"], 2, "has no attention (mamba2)"),
        ("mamba", ["--scores"], 2, "has no attention (mamba)"),
        ("bert-classes", ["--lens"], 2, "--lens: "),
        ("bert", ["-n", "3"], 2, "--max-tokens: this model reads"),
        ("bert", ["--token", "w1"], 2, "--token: "),
        ("bart", ["--scores"], 2, "reads two"),
        ("bart", ["-n", "2", "--target", "w1"], 2, "choose one"),
        ("bloom", ["--html", "{tmp}/nowhere/a.html"], 4, "nowhere/a.html: No such file"),
        ("bloom", ["--png", "{tmp}/nowhere/a.png"], 4, "nowhere/a.png: No such file"),
        ("bloom", ["--json", "{tmp}/nowhere/a.json"], 4, "nowhere/a.json: No such file"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    case: str, arguments: list[str], code: int, named: str, folder: Folder, tmp_path: Path
) -> None:
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert named in error_line(invoke("inspect", "-m", folder(case), *given, TEXT), code)


# Images


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model of images with all that it needs, and a picture for it."""
    made = tmp_path_factory.mktemp("vit")
    shutil.copytree(GOLDEN / "vit", made / "vit")
    (made / "vit" / "preprocessor_config.json").write_text('{"size": 32}')
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(made / "a.png")
    return ["-m", str(made / "vit"), str(made / "a.png")]


def test_what_a_model_looks_at_in_a_picture_is_the_librarys(picture: list[str]) -> None:
    lm: Any = mt.load(picture[1], dtype="float32")
    with inspect.trace(lm, read=["attn.pattern"]) as t:
        lm(lm.pixels(picture[2]))
    found, one = numbers(*picture), numbers(*picture, "--layer", "1", "--head", "2")
    assert found["check"] == t.check() < 1e-5 and found["ids"] == []
    assert found["tokens"] == found["read"] == one["keys"] == one["queries"] == t.labels()
    every = found["parts"]["encoder"]
    assert set(every) == {"layers", "entropy", "sink_mass"}  # patches are on no line, along which they are apart
    for layer, pattern in t.by_layer("attn.pattern").items():
        assert every["entropy"][layer] == np.array(inspect.entropy(pattern[0]).mean(axis=-1)).tolist()
    with inspect.trace(lm, read=["layers.1.attn.pattern"]) as t:  # which leaves other layers fused
        lm(lm.pixels(picture[2]))
    assert one["pattern"] == np.array(t["attn.pattern"][0, 2]).tolist()
    kept = numbers(*picture, "--stats")["attention"]
    for layer, entropy in enumerate(every["entropy"]):
        assert kept[f"encoder.layers.{layer}.attn.op"]["entropy"] == pytest.approx(entropy, abs=1e-5)


def test_the_first_token_of_a_picture_has_a_map_of_patches(picture: list[str]) -> None:
    shown = invoke("inspect", *picture, "--dtype", "float32", "--layer", "1", "--head", "2").stdout
    pattern = numbers(*picture, "--layer", "1", "--head", "2")["pattern"]
    rows = [line.split() for line in shown.splitlines()[-5:-1]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [float(x) for row in rows for x in row[1:]] == pytest.approx(pattern[0][1:], rel=0.01, abs=1e-4)
    assert "[CLS]" in shown and "from [CLS] to each patch" in shown and "\n2,3 " in shown


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--scores"], 2, "this one looks at images"),
        (["--lens"], 2, "--lens: "),
        (["--experts"], 2, "--experts: "),
        (["--token", "a"], 2, "--token: "),
        (["--stats", "--spans", "3"], 2, "--spans: there is no text"),
        (["-n", "3"], 2, "--max-tokens: this model reads"),
        (["--part", "decoder"], 2, "--part: found decoder, expected one of encoder"),
        (["--layer", "3"], 2, "--layer: found 3, expected one of 0-2"),
        (["--model", str(GOLDEN / "vit")], 2, "no preprocessor_config.json"),
    ],
)
def test_what_is_about_texts_is_refused_for_a_picture(
    arguments: list[str], code: int, named: str, picture: list[str]
) -> None:
    assert named in error_line(invoke("inspect", *picture, *arguments), code)


def test_what_is_no_picture_is_one_line(picture: list[str]) -> None:
    config = str(Path(picture[1]) / "config.json")
    assert "nowhere.png: No such file" in error_line(invoke("inspect", *picture[:2], "nowhere.png"), 4)
    assert "is no picture" in error_line(invoke("inspect", *picture[:2], config), 3)


@pytest.mark.parametrize("mode", [[], ["--layer", "0"], ["--layer", "0", "--head", "0"], ["--stats"]], ids=str)
def test_every_way_to_look_at_a_picture_has_a_png_and_a_page(
    mode: list[str], picture: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    result = invoke("inspect", *picture, *mode, "--png", str(tmp_path / "a.png"), "--html", str(tmp_path / "a.html"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "<script" in (tmp_path / "a.html").read_text()


def test_more_than_can_be_held_or_opened_is_one_line(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlx_tformer_cli import look

    with monkeypatch.context() as m:
        m.setattr(look, "MOST", 100)
        line = error_line(invoke("inspect", "-m", folder("bloom"), TEXT), 2)
        assert "choose --layer, or use --stats" in line
    monkeypatch.setattr(sys.modules["mlx_tformer.inspect.pictures.page"], "MOST", 100)
    result = invoke("inspect", "-m", folder("bloom"), "--html", str(tmp_path / "a.html"), TEXT)
    assert "the page would hold" in error_line(result, 2) and not (tmp_path / "a.html").exists()


def test_without_matplotlib_a_png_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("inspect", "-m", "nowhere", "--png", str(tmp_path / "a.png"), "a")
    assert "pip install 'mlx-tformer[plot]'" in error_line(result, 2)


@pytest.mark.parametrize(
    "mode", [["--layer", "0"], ["--lens"], ["--experts"], ["--stats", "-n", "3"], ["--token", "w5"], []], ids=str
)
def test_every_mode_has_a_png_and_a_page(mode: list[str], folder: Folder, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ["--png", str(tmp_path / "a.png"), "--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")]
    result = invoke("inspect", "-m", folder("mixtral"), *mode, *files, TEXT)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<script" in (tmp_path / "a.html").read_text() and json.loads((tmp_path / "a.json").read_text())["ids"]


# The page


@pytest.mark.parametrize("case", ["gpt_oss", "bart"])
def test_the_page_shows_the_numbers_of_the_trace(case: str, browser: "Browser", folder: Folder, tmp_path: Path) -> None:
    two = case == "bart"
    given = ["--target", "w5 w6"] if two else []
    file = tmp_path / "a.html"
    result = invoke("inspect", "-m", folder(case), "--dtype", "float32", "--html", str(file), *given, TEXT)
    assert result.exit_code == 0, result.output
    t = traced(folder(case), "*.pattern", target=[5, 6] if two else None)
    shown, troubles = browser.new_page(), []
    shown.on("pageerror", lambda error: troubles.append(str(error)))
    shown.on("request", lambda request: request.url.startswith("file://") or troubles.append(request.url))
    shown.goto(file.as_uri())
    parts = [("encoder", False), ("decoder", False), ("decoder", True)] if two else [("decoder", False)]
    for number, (stack, crosses) in enumerate(parts):
        first = t.patterns(stack=stack, crosses=crosses)[0]
        for head, query in ((0, 1), (1, 2)):
            shown.locator(f"#picture-{number} .thumb").nth(head).click()
            shown.locator(f"#picture-{number} .queries .token").nth(query).hover()
            keys = shown.locator(f"#picture-{number} .keys .token")
            found = [float(keys.nth(i).get_attribute("data-value") or "nan") for i in range(keys.count())]
            wanted = np.array(first.values[head, query]).tolist()
            assert found[: len(wanted)] == pytest.approx(wanted, abs=1e-6)
            assert (len(found) == len(wanted) + 1) == (case == "gpt_oss")
            keys.nth(0).hover()
            said = shown.locator(f"#picture-{number} [role=status]").inner_text()
            assert float(said.split()[-1]) == pytest.approx(wanted[0], abs=6e-5)
    assert shown.locator("table td").count() > 0  # the lens
    assert not troubles
    shown.close()
