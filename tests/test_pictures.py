"""Pictures: what the terminal, a PNG and a page show are the numbers that they were given."""

import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect.pictures import Grid, Heads, figure, page, png, show, write_page
from mlx_tformer.inspect.pictures.colours import colour, ink
from mlx_tformer.inspect.pictures.picture import SINK, pooled

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WORDS = ["The", "capital", "of", "France", "is", "Paris", ",", "<b>and</b>", "</script>", "中\n"]


def patterns(layers: int = 3, heads: int = 4, sink: float = 0.0) -> np.ndarray:
    """Causal patterns (layers, H, L, L); each row lacks `sink` of one."""
    length = len(WORDS)
    scores = np.random.default_rng(0).normal(size=(layers, heads, length, length)) * 2
    weights = np.exp(scores) * np.tri(length)
    return ((1 - sink) * weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def heads_of(values: np.ndarray) -> Heads:
    layers = {str(3 * i): value for i, value in enumerate(values)}
    return Heads("attention", layers, WORDS, WORDS, notes=["<i>checked</i>"])


def lens() -> Grid:
    values = np.random.default_rng(1).uniform(size=(3, len(WORDS)))
    return Grid("lens", values, ["a", "b", "c"], WORDS, "block", "token", text=[WORDS[::-1]] * 3)


def scores() -> Grid:
    values = np.random.default_rng(2).normal(size=(3, 4))
    return Grid("scores", values, ["0", "1", "2"], ["0", "1", "2", "3"], "layer", "head")


def printed(picture: Grid | Heads, width: int = 120, **settings: object) -> str:
    out = io.StringIO()
    show(picture, Console(file=out, width=width, **settings))
    return out.getvalue()


# What is drawn


def test_what_sinks_take_is_a_column_of_its_own() -> None:
    found = heads_of(patterns(sink=0.3))
    assert found.keys == (*WORDS, SINK)
    assert np.allclose(found.patterns["3"][..., -1], 0.3, atol=1e-6)
    assert heads_of(patterns()).keys == tuple(WORDS)


def test_a_query_that_sees_nothing_has_no_sink() -> None:
    values = patterns(sink=0.3)
    values[:, :, 0] = 0
    assert np.all(heads_of(values).patterns["0"][:, 0, -1] == 0)


def test_rounding_is_no_sink() -> None:
    assert SINK not in heads_of(patterns(sink=5e-5)).keys


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: heads_of(patterns()).of(1), "layer: found 1, expected one of 0, 3, 6"),
        (lambda: heads_of(patterns()).head(3, 4), "head: found 4, expected 0 to 3"),
        (lambda: Heads("t", {"0": np.zeros((1, 2, 3))}, ["a"], ["b"]), r"layer 0: found a pattern \(1, 2, 3\)"),
        (lambda: Heads("t", {}, ["a"], ["b"]), "t: found no patterns"),
        (lambda: Grid("g", np.zeros((2, 2)), ["a"], ["b"]), r"g: found values of shape \(2, 2\)"),
        (lambda: Grid("g", np.zeros((1, 1)), ["a"], ["b"], text=[[]]), "g: found texts"),
        (lambda: page([]), "pictures: found none"),
    ],
)
def test_what_does_not_fit_together_is_refused(make: Callable[[], object], named: str) -> None:
    with pytest.raises(mt.UsageError, match=named):
        make()


def test_many_cells_become_the_largest_of_blocks() -> None:
    values = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    small, down, across = pooled(values, 4, 2)
    assert (small.shape, down, across) == ((4, 2), 2, 3)
    assert small.tolist() == [[7, 9], [17, 19], [27, 29], [32, 34]]


def test_both_signs_share_a_scale_around_zero() -> None:
    low, high = scores().bounds
    assert -low == high == pytest.approx(np.abs(scores().values).max())


# The terminal


@pytest.mark.parametrize("picture", [heads_of(patterns()), heads_of(patterns()).head(0, 1), lens(), scores()])
@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_none_has_colours_without_one(picture: Grid | Heads, width: int) -> None:
    text = printed(picture, width, color_system=None)
    assert "\x1b" not in text
    assert all(cell_len(line.rstrip()) <= width for line in text.splitlines())
    said = (
        picture.title if isinstance(picture, Heads) else f"{picture.title} {picture.down} down, {picture.across} across"
    )
    assert text.split()[: len(said.split())] == said.split()  # the title is whole


@pytest.mark.parametrize("width", [0, 1, 19])
def test_a_terminal_that_says_it_has_no_room_gets_narrow_pictures(width: int) -> None:
    assert printed(scores(), width, color_system=None) == printed(scores(), 20, color_system=None)


def test_of_texts_that_have_no_room_the_last_are_shown_and_that_is_said() -> None:
    words = [f"w{i}" for i in range(30)]
    lines = printed(Grid("lens", np.ones((1, 30)), ["0"], words, text=[words]), 80, color_system=None).splitlines()
    assert lines[1].split() == words[-13:] and lines[2].split() == ["0", *words[-13:]]
    assert lines[3] == "the last 13 of 30 columns; there is no room for the others"
    assert "the last" not in printed(Grid("lens", np.ones((1, 30)), ["0"], words, text=[words]), 200)


def test_maps_that_are_narrower_than_their_names_stand_below_them() -> None:
    lines = printed(Heads("", {"10": np.ones((3, 1, 1))}, ["a"], ["a"]), color_system=None).splitlines()
    assert [line.rstrip() for line in lines[:2]] == ["10.0  10.1  10.2", "@@    @@    @@"]


@pytest.mark.parametrize("picture", [heads_of(patterns()), heads_of(patterns()).head(0, 1), scores()])
def test_a_terminal_without_colour_gets_what_a_file_gets(picture: Grid | Heads) -> None:
    shown = printed(picture, 40, color_system="truecolor", force_terminal=True, no_color=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == printed(picture, 40, color_system=None)


def test_numbers_stand_in_cells_that_have_room() -> None:
    row = printed(scores(), color_system=None).splitlines()[2].split()
    assert [float(x) for x in row[1:]] == pytest.approx(scores().values[0].tolist(), rel=0.06)


def test_a_map_in_ascii_is_darker_where_there_is_more() -> None:
    values = np.array([[0, 0.5, 1.0] * 10])
    line = printed(Grid("", values, ["row"], ["c"] * 30), 80, color_system=None).splitlines()[-2]
    assert line.split(maxsplit=1)[1].rstrip() == ("  ++@@" * 10).strip()


def test_a_cell_in_true_colour_has_the_colour_of_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORFGBG", "0;15")
    values = np.array([[0.0, 0.25, 1.0] * 10])
    shown = printed(Grid("", values, ["row"], ["c"] * 30), 80, color_system="truecolor", force_terminal=True)
    found = [tuple(map(int, m)) for m in re.findall(r"48;2;(\d+);(\d+);(\d+)m", shown.splitlines()[-2])]
    assert found[:3] == [colour(at, dark=False) for at in (0.0, 0.25, 1.0)]


def test_an_ascii_terminal_gets_ascii() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(lens(), Console(file=out, width=100, color_system=None))
    out.flush()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("at", [-1.0, -0.5, -0.2, 0.0, 0.3, 0.6, 1.0])
def test_text_can_be_read_on_every_colour(at: float, dark: bool) -> None:
    def luminance(rgb: tuple[int, int, int]) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in rgb)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ground = colour(at, dark)
    a, b = sorted((luminance(ground), luminance(ink(ground))))
    assert (b + 0.05) / (a + 0.05) > 4.4  # contrast as the accessibility guidelines for the web (WCAG 2) have it


# PNG


@pytest.mark.parametrize("picture", [heads_of(patterns()), heads_of(patterns()).head(0, 1), lens(), scores()])
def test_a_png_holds_the_values(picture: Grid | Heads, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    images = [image.get_array() for axes in figure(picture).axes for image in axes.images]
    wanted = [picture.values] if isinstance(picture, Grid) else [x for p in picture.patterns.values() for x in p]
    assert len(images) == len(wanted)
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(images, wanted, strict=True))
    png(picture, tmp_path / "a.png", dpi=40)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.filterwarnings("ignore:Glyph .* missing")
def test_what_is_written_into_a_png_stays_in_its_cell() -> None:
    pytest.importorskip("matplotlib")
    words = [["a", "abcdefghijklmnopqrstuvwxyz", "中" * 20]]
    for picture, most in (
        (Grid("", np.ones((1, 3)), ["0"], ["0", "1", "2"], text=words), 3),
        (Grid("", np.ones((1, 100)), ["0"], ["0"] * 100, text=[["something"] * 100]), 100),
        (Grid("", np.ones((1, 400)), ["0"], ["0"] * 400, text=[["something"] * 400]), 0),  # for which there is no room
        (Grid("", np.full((2, 200), 0.125), ["0"] * 2, ["0"] * 200), 0),
        (Grid("", np.full((4, 9), -0.000125), ["0"] * 4, ["0"] * 9), 36),
    ):
        made = figure(picture)
        made.draw_without_rendering()
        axes = made.axes[0]
        cell = axes.get_window_extent().width / picture.values.shape[1]
        widths = [text.get_window_extent().width for text in axes.texts]
        assert len(widths) == most and max(widths, default=0) < 1.1 * cell


def test_maps_of_many_heads_stand_beside_each_other_and_fit_what_matplotlib_draws() -> None:
    pytest.importorskip("matplotlib")
    few, many = (np.ones((heads, 1, 1)) for heads in (9, 40))
    made = figure(Heads("", {"0": few}, ["a"], ["a"]))
    made.draw_without_rendering()
    (axes, beside), size = made.axes, made.bbox.height
    assert [text.get_text() for text in axes.texts] == [f"0.{head}" for head in range(9)]
    assert beside.get_tightbbox().y0 >= 0 and beside.get_tightbbox().y1 <= size  # no words are cut
    assert sorted(image.get_extent()[0] for image in axes.images) == [image.get_extent()[0] for image in axes.images]
    made = figure(Heads("", {str(layer): many for layer in range(2)}, ["a"], ["a"]))
    assert len({tuple(image.get_extent()) for image in made.axes[0].images}) == 80
    assert figure(Heads("", {str(layer): few[:1] for layer in range(125)}, ["a"], ["a"])).get_figheight() * 150 < 2**15


def test_a_png_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(mt.InputOutputError, match="nowhere"):
        png(scores(), tmp_path / "nowhere" / "a.png")


# The page


def test_a_page_needs_nothing_else_and_holds_no_markup_of_tokens(tmp_path: Path) -> None:
    text = page([heads_of(patterns()), lens()], title="<script>alert(1)</script>")
    assert not re.search(r"https?://|src=|url\(|@import|<link", text)
    assert text.count("<script") == 2 and "<b>and" not in text and "<i>checked" not in text
    assert text.count("</script") == 2


def test_a_page_goes_into_a_pipe_and_through_a_link(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    write_page(scores(), link)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_page(scores(), pipe)
    assert os.read(reader, 1 << 16) == file.read_bytes() and link.is_symlink() and pipe.is_fifo()
    os.close(reader)
    with pytest.raises(mt.InputOutputError, match=r"Is a directory"):
        write_page(scores(), tmp_path)


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(mt.InputOutputError, match="nowhere"):
        write_page(scores(), tmp_path / "nowhere" / "a.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(mt.InputOutputError, match="taken"):
        write_page(scores(), tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.fixture
def opened(browser: "Browser", tmp_path: Path) -> Iterator["Page"]:
    """A page of everything, from a file; fails if a script of it fails or if it asks for anything else."""
    write_page([heads_of(patterns(sink=0.3)), lens(), scores()], tmp_path / "a.html", title="all")
    shown, troubles = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light"), []
    shown.on("pageerror", lambda error: troubles.append(str(error)))
    shown.on("console", lambda message: message.type == "error" and troubles.append(message.text))
    shown.on("request", lambda request: request.url.startswith("file://") or troubles.append(request.url))
    shown.goto((tmp_path / "a.html").as_uri())
    yield shown
    assert not troubles
    shown.close()


def said(shown: "Page", picture: int) -> tuple[str, float]:
    """What the line under a picture says, and the number in it."""
    text = shown.locator(f"#picture-{picture} [role=status]").inner_text()
    return text, float(text.split()[-1].strip("−"))


def test_a_hovered_token_shows_its_weights(opened: "Page") -> None:
    wanted = patterns(sink=0.3)[0, 0, 5]
    opened.locator("#picture-0 .queries .token").nth(5).hover()
    keys = opened.locator("#picture-0 .keys .token")
    found = [float(keys.nth(i).get_attribute("data-value") or "nan") for i in range(keys.count())]
    assert found == pytest.approx([*wanted.tolist(), 0.3], abs=1e-6)
    keys.nth(2).hover()
    text, number = said(opened, 0)
    assert "“Paris” (5) → “of” (2)" in text and number == pytest.approx(wanted[2], abs=6e-5)


def test_another_head_shows_its_own_numbers(opened: "Page") -> None:
    opened.locator("#picture-0 .thumb").nth(3).click()
    opened.locator("#picture-0 .queries .token").nth(4).hover()
    opened.locator("#picture-0 .keys .token").nth(1).hover()
    text, number = said(opened, 0)
    assert text.startswith("layer 0, head 3:")
    assert number == pytest.approx(patterns(sink=0.3)[0, 3, 4, 1], abs=6e-5)


def test_the_keyboard_reaches_every_head_and_cell(opened: "Page") -> None:
    opened.get_by_label("overview, layers down and heads across").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        opened.keyboard.press(key)
    opened.get_by_label("attention, queries down and keys across").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        opened.keyboard.press(key)
    text, number = said(opened, 0)
    assert text.startswith("layer 6, head 1: “France” (3) → “capital” (1)")
    assert number == pytest.approx(patterns(sink=0.3)[2, 1, 3, 1], abs=6e-5)


def test_what_an_overview_says_counts_places_in_the_text(browser: "Browser", tmp_path: Path) -> None:
    values = patterns(sink=0.3)[0][:, -3:]  # of the last three queries alone
    placed = Heads("", {"0": values}, WORDS[-3:], WORDS, first=len(WORDS) - 3)
    write_page([placed, replace(placed, first=None)], tmp_path / "a.html")
    shown = browser.new_page()
    shown.goto((tmp_path / "a.html").as_uri())
    wanted = {
        "mean distance (keys)": np.array(inspect.distance(mx.array(values))),
        "weight of the query's own place": values[:, range(3), range(7, 10)],
        "weight of the key before": values[:, range(3), range(6, 9)],
    }
    for name, rows in wanted.items():
        shown.locator("#picture-0 select").select_option(name)
        shown.locator("#picture-0 canvas").first.focus()
        for head, key in enumerate(["ArrowLeft", *["ArrowRight"] * 3]):
            for _ in range(1 if head else 4):
                shown.keyboard.press(key)
            text = shown.locator("#picture-0 .readout").first.inner_text()
            assert f"head {head}: mean {name}" in text
            assert float(text.split()[-1]) == pytest.approx(rows[head].mean(), abs=6e-5)
    assert shown.locator("#picture-0 option").count() == 6 and shown.locator("#picture-1 option").count() == 3
    shown.close()


def test_tokens_are_shown_as_they_are(opened: "Page") -> None:
    shown = [token.inner_text() for token in opened.locator("#picture-0 .queries .token").all()]
    assert shown == [*WORDS[:-1], "中⏎"]


def test_the_cells_of_a_lens_and_of_a_grid_tell_their_values(opened: "Page") -> None:
    opened.locator("#picture-1 td").nth(len(WORDS) + 2).hover()
    text, number = said(opened, 1)
    assert text.startswith(f"block b, token of: “{WORDS[::-1][2]}”")
    assert number == pytest.approx(lens().values[1, 2], abs=6e-5)
    opened.locator("#picture-2 canvas").focus()
    opened.keyboard.press("ArrowRight")
    text, number = said(opened, 2)
    assert text.startswith("layer 0, head 1:") and number == pytest.approx(scores().values[0, 1], abs=6e-5)


def test_light_and_dark_are_the_systems_or_ones_own(opened: "Page") -> None:
    def ground() -> str:
        return str(opened.evaluate("getComputedStyle(document.body).backgroundColor"))

    def cell() -> str:
        return str(opened.evaluate("document.querySelectorAll('#picture-0 .keys .token')[0].style.background"))

    seen = [(ground(), cell())]
    opened.emulate_media(color_scheme="dark")
    seen.append((ground(), cell()))
    opened.locator("#theme").click()
    seen.append((ground(), cell()))
    assert seen[0] == seen[2] != seen[1]
    assert seen[1][0] == "rgb(16, 18, 24)"
