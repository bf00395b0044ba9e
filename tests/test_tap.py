"""The seam for watchers: what they see, what they may change, and that they leave nothing behind."""

import io
import re
import threading
from collections.abc import Callable

import mlx.core as mx
import pytest
from helpers import gap, golden, seen

from mlx_tformer.nn import LM, Module, attention, block, mlp, model, tap, wanted, watch

CASE = "qwen3"
IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
LAYER = "decoder.layers.1.attn.op"
PLACES = [
    *(f"attn.op.{name}" for name in ("q", "k", "v", "scores", "pattern", "z", "result")),
    *(f"mlp.op.{name}" for name in ("gate", "up", "hidden")),
    *("in", "attn.in", "attn.delta", "attn.out", "mlp.in", "mlp.delta", "mlp.out", "out"),
]
"""What a layer offers."""
WITNESSES = {"attn.op.values", "attn.op.fused"}
"""What its pattern may be held against."""


def named(path: str) -> Module:
    module = Module()
    module.path = path
    return module


# --- paths and globs ---


def test_every_activation_of_a_layer_is_offered_under_its_path() -> None:
    with seen("decoder.layers.1.*") as found:
        golden(CASE)(IDS)
    assert {path.removeprefix("decoder.layers.1.") for path in found} == {*PLACES, *WITNESSES}


def test_activations_come_in_the_order_in_which_they_are_computed() -> None:
    with seen("*") as found:
        golden(CASE)(IDS)
    layers = [path for path in found if re.fullmatch(r"decoder\.layers\.\d+\.out", path)]
    assert layers == [f"decoder.layers.{i}.out" for i in range(3)]
    assert list(found)[:5] == ["embed.slots", "embed.real", "embed.ids", "embed.out", "decoder.slots"]
    assert list(found)[-3:] == ["decoder.out", ".first", ".logits"]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (f"{LAYER}.pattern", True),
        ("*.pattern", True),
        ("*", True),
        ("decoder.layers.?.attn.op.pattern", True),
        ("decoder.layers.[01].*.p*", True),
        ("*.PATTERN", False),
        ("pattern", False),
        ("decoder.layers.1", False),
        ("decoder.layers.11.*", False),
        ("*.pattern.*", False),
        ("", False),
    ],
)
def test_a_glob_covers_a_whole_path(pattern: str, matches: bool) -> None:
    with watch(pattern, lambda path, value: None):
        assert wanted(named(LAYER), "pattern") is matches


def test_only_the_layer_that_is_asked_for_is_computed_the_long_way() -> None:
    with watch(f"{LAYER}.pattern", lambda path, value: None):
        assert wanted(named(LAYER), "pattern") and not wanted(named(LAYER), "scores")
        assert not wanted(named("decoder.layers.0.attn.op"), "pattern")
    with seen(f"{LAYER}.pattern") as found:
        golden(CASE)(IDS)
    assert list(found) == [f"{LAYER}.pattern"]


# --- changed values ---


@pytest.mark.parametrize(
    "path",
    ["embed.out", *(f"decoder.layers.{i}.{place}" for i in (0, 2) for place in PLACES), "decoder.out", "*logits"],
)
def test_a_value_put_in_place_is_what_the_model_goes_on_with(path: str) -> None:
    m = golden(CASE)
    plain = m(IDS)
    with watch(path, lambda _, value: value * 1):
        assert gap(m(IDS), plain) < 1e-5
    with watch(path, lambda _, value: mx.zeros_like(value)):
        assert gap(m(IDS), plain) > 1e-2


def test_zeroing_what_a_head_gives_is_zeroing_its_columns_of_the_output_matrix() -> None:
    m = golden(CASE)
    op = m.decoder.layers[1].attn.op
    keep = mx.arange(op.heads) != 2
    with watch(f"{LAYER}.z", lambda _, z: z * keep[:, None, None]):
        cut = m(IDS)
    weight = op.out.weight
    op.out.weight = weight * mx.repeat(keep, op.head_dim)
    try:
        assert gap(cut, m(IDS)) < 1e-5
    finally:
        op.out.weight = weight


def test_zeroing_a_delta_is_leaving_the_step_out() -> None:
    m = golden(CASE)
    with watch("decoder.layers.2.mlp.delta", lambda _, delta: 0 * delta), seen("*.out") as found:
        m(IDS)
    assert mx.array_equal(found["decoder.layers.2.out"], found["decoder.layers.2.attn.out"]).item()


# --- several watchers ---


def test_watchers_see_in_the_order_in_which_they_came_and_each_what_the_last_one_left() -> None:
    log = []

    def add(name: str, amount: float) -> Callable[[str, mx.array], mx.array]:
        def see(path: str, value: mx.array) -> mx.array:
            log.append((name, value.item()))
            return value + amount

        return see

    with watch("a.x", add("outer", 10)), watch("a.*", add("inner", 100)):
        result = tap(named("a"), "x", mx.array(1.0))
    assert log == [("outer", 1.0), ("inner", 11.0)]
    assert result.item() == 111.0


def test_leaving_an_inner_watch_leaves_the_outer_one() -> None:
    module = named("a")
    with watch("a.x", lambda path, value: value + 1):
        with watch("a.x", lambda path, value: value * 10):
            assert tap(module, "x", mx.array(1.0)).item() == 20
        assert tap(module, "x", mx.array(1.0)).item() == 2
    assert tap(module, "x", mx.array(1.0)).item() == 1


def test_a_watcher_may_watch_itself() -> None:
    """A value is looked at with the watchers there are when it is offered: no endless loop, no surprise."""
    module, inside = named("a"), []

    def see(path: str, value: mx.array) -> None:
        with watch("a.y", lambda path, value: inside.append(path)):
            tap(module, "y", value)

    with watch("a.x", see):
        tap(module, "x", mx.array(1.0))
    assert inside == ["a.y"]


# --- nothing left behind ---


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_nothing_is_left_behind_when_a_watcher_or_the_block_raises(raised: type[BaseException]) -> None:
    def fail(path: str, value: mx.array) -> None:
        raise raised

    m, plain = golden(CASE), golden(CASE)(IDS)
    with pytest.raises(raised), watch("*.pattern", fail):
        m(IDS)
    with pytest.raises(raised), watch("*", lambda path, value: 0 * value):
        raise raised
    assert not wanted(named(LAYER), "pattern")
    assert mx.array_equal(m(IDS), plain).item()


def test_the_last_watchers_see_what_the_others_leave_however_early_they_came() -> None:
    module, found = named("a"), []
    with (
        watch("a.x", lambda path, value: found.append(value.item()), last=True),
        watch({"a.x", "a.y"}, lambda path, value: value + 1),
        watch({"a.y"}, lambda path, value: value * 100),
    ):
        tap(module, "x", mx.array(1.0))
    assert found == [2.0]


def test_a_watch_is_of_the_thread_that_made_it() -> None:
    found = []
    with watch("*", lambda path, value: None):
        thread = threading.Thread(target=lambda: found.append(wanted(named(LAYER), "pattern")))
        thread.start()
        thread.join()
        assert wanted(named(LAYER), "pattern")
    assert found == [False]


# --- nothing in the graph ---


def operations(m: LM) -> list[str]:
    """The operations in the graph of one pass, in the order in which they are printed."""
    text = io.StringIO()
    mx.export_to_dot(text, m(IDS))
    return re.findall(r'label ="(\w+)"', text.getvalue())


def test_a_tap_that_nobody_listens_to_gives_back_the_very_same_array() -> None:
    value = mx.array([1.0])
    assert tap(named("a"), "x", value) is value
    with watch("b.*", lambda path, value: 0 * value):
        assert tap(named("a"), "x", value) is value
    with watch("a.*", lambda path, value: None):
        assert tap(named("a"), "x", value) is value


def test_taps_add_nothing_to_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    m = golden(CASE)
    mx.eval(m.parameters())
    with_taps = operations(m)
    with seen("*.out"), seen("*.z"), watch("nothing", lambda path, value: 0 * value):
        listened = operations(m)
    for module in (attention, block, mlp, model):
        monkeypatch.setattr(module, "tap", lambda module, name, value: value)
    assert with_taps == listened == operations(m)
    assert len(with_taps) > 100
