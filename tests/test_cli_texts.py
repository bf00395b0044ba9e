"""`embed`, `fill` and `classify`: what they print, and how they end."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cli_models import error_line, invoke
from helpers import GOLDEN, gap
from PIL import Image
from test_vision import PICTURE, loaded, written
from text_models import reading


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: `bert`, which fills masks, `classes`, `ranks` and `vit`."""
    folder = tmp_path_factory.mktemp("models")
    for name, case in {"bert": "bert", "classes": "bert-classes", "ranks": "xlm_roberta-ranks"}.items():
        reading(folder / name, case)
    written(folder / "vit")
    return folder


def done(*arguments: str, text: str | None = None) -> str:
    """What a command prints, which computes in float32 and must end well."""
    result = invoke(arguments[0], "--dtype", "float32", *arguments[1:], text=text)
    assert result.exit_code == 0, result.stderr
    return result.stdout


# --- embed ---


def test_one_text_gives_its_vector_and_json_the_text_with_it(models: Path) -> None:
    model = reading(models / "bert", "bert")
    (plain,) = done("embed", "-m", str(models / "bert"), "a b").splitlines()
    assert gap(mx.array(json.loads(plain)), model.embed("a b")[0]) < 1e-5
    (line,) = done("embed", "-m", str(models / "bert"), "--json", "--pool", "cls", "a b").splitlines()
    found = json.loads(line)
    assert found["text"] == "a b"
    assert gap(mx.array(found["vector"]), model.embed("a b", pool="cls")[0]) < 1e-5


def test_several_texts_give_their_cosines(models: Path) -> None:
    texts = ["a b", "b a", "z"]
    vectors = reading(models / "bert", "bert").embed(texts)
    head, *rows = done("embed", "-m", str(models / "bert"), *texts).splitlines()
    assert head.split() == ["1", "2", "3"]
    assert [row.split(maxsplit=4)[4] for row in rows] == texts
    found = np.array([[float(x) for x in row.split()[1:4]] for row in rows])
    assert np.abs(found - np.array(vectors @ vectors.T)).max() < 6e-4


def test_lines_of_standard_input_are_texts_and_many_give_vectors(models: Path) -> None:
    for arguments in (["-"], []):
        lines = done("embed", "-m", str(models / "bert"), "--json", *arguments, text="a b\r\nc\n\nd\n").splitlines()
        assert [json.loads(line)["text"] for line in lines] == ["a b", "c", "", "d"]
    lines = done("embed", "-m", str(models / "bert"), text="a\n" * 41).splitlines()
    assert len(lines) == 41 and all(len(json.loads(line)) == 48 for line in lines)


def test_a_text_cannot_obey_the_terminal_or_break_a_line(models: Path) -> None:
    rows = done("embed", "-m", str(models / "bert"), "a\nb", "\x1b[2J" + "c" * 90).splitlines()
    assert len(rows) == 3 and rows[1].endswith("a\\nb") and "\x1b" not in rows[2] and rows[2].endswith("c...")


# --- fill ---


def test_masks_are_filled_and_json_says_all(models: Path) -> None:
    wanted = reading(models / "bert", "bert").fill("a [MASK] b [MASK]", top=2)
    lines = done("fill", "-m", str(models / "bert"), "--top", "2", "a [MASK] b [MASK]").splitlines()
    assert [line for line in lines if line.startswith("mask")] == ["mask 1", "mask 2"]
    shown = [line.split()[-2] for line in lines if line.endswith("%")]
    assert shown == [f"{100 * x.probability:.2f}" for row in wanted for x in row]
    found = json.loads(done("fill", "-m", str(models / "bert"), "--json", "-", text="a [MASK] b [MASK]\n"))
    assert found["text"] == "a [MASK] b [MASK]"
    assert [x["id"] for x in found["masks"][0][:2]] == [x.id for x in wanted[0]]


# --- classify ---


def test_texts_and_pairs_are_labelled(models: Path) -> None:
    model = reading(models / "classes", "bert-classes")
    lines = done("classify", "-m", str(models / "classes"), "a b").splitlines()
    (wanted,) = model.classify("a b")
    assert lines == [f"{100 * x.probability:6.2f} %  {x.label}" for x in wanted]
    rows = done("classify", "-m", str(models / "classes"), "--query", "a b", "--json", "--top", "1", "c", "d")
    found = [json.loads(line) for line in rows.splitlines()]
    assert [row["input"] for row in found] == ["c", "d"]
    pairs = model.classify([("a b", "c"), ("a b", "d")], top=1)
    assert [row["labels"][0]["label"] for row in found] == [labels[0].label for labels in pairs]
    titles = done("classify", "-m", str(models / "classes"), "--top", "1", "c", "d").splitlines()
    assert titles[0] == "c" and titles[2] == "d"


def test_a_cross_encoder_puts_texts_in_the_order_of_a_query(models: Path) -> None:
    wanted = reading(models / "ranks", "xlm_roberta-ranks").rank("a b", ["c", "d", "e f"])
    lines = done("classify", "-m", str(models / "ranks"), "--query", "a b", "c", "d", "e f").splitlines()
    assert lines == [f"{x.score:8.4f}  {x.text}" for x in wanted]


def test_pictures_are_labelled(models: Path, tmp_path: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "picture.png")
    lines = done("classify", "-m", str(models / "vit"), "--top", "2", str(tmp_path / "picture.png")).splitlines()
    best = loaded(models / "vit").classify(PICTURE, top=2)
    assert [line.split()[-1] for line in lines] == [x.label for x in best]


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["embed", "a"], 2, "no model: name one"),
        (["embed", "-m", "bert"], 2, "no text: standard input is empty"),
        (["embed", "-m", "bert", "--pool", "max", "a"], 2, "--pool: found 'max'"),
        (["embed", "-m", "bert", "a " * 70], 2, "72 tokens in text 0"),
        (["embed", "-m", "llama", "a"], 2, "is a llama, which writes texts"),
        (["embed", "-m", "vit", "a"], 2, "is a vit, which looks at images"),
        (["fill", "-m", "bert", "a b"], 2, "the text has no [MASK]"),
        (["fill", "-m", "classes", "a [MASK]"], 2, "no head for masked tokens"),
        (["fill", "-m", "bert", "--top", "0", "a [MASK]"], 2, "--top: found 0"),
        (["classify", "-m", "bert", "a"], 2, "has no classifier"),
        (["classify", "-m", "llama", "a"], 2, "is a llama, which writes texts"),
        (["classify", "-m", "vit", "--query", "a", "b"], 2, "--query: a model of images"),
        (["classify", "-m", "vit", "nothing.png"], 4, "nothing.png: No such file"),
        (["generate", "-m", "vit", "a"], 2, "looks at images"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_what_cannot_be_done_ends_in_one_line(models: Path, arguments: list[str], code: int, problem: str) -> None:
    places = {name: str(models / name) for name in ("bert", "classes", "vit")} | {"llama": str(GOLDEN / "llama-mha")}
    result = invoke(*[places.get(argument, argument) for argument in arguments], text="")
    assert problem in error_line(result, code)
