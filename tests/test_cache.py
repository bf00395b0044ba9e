"""What a model remembers: the buffers against a plain list of tokens, through any sequence of appends and trims."""

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tformer.errors import UsageError
from mlx_tformer.nn import (
    KV,
    LM,
    Attention,
    Block,
    Cache,
    Causal,
    Embed,
    GatedMlp,
    Mask,
    Residual,
    Stack,
    Window,
    WindowKV,
)
from mlx_tformer.nn.tap import name_modules

STEP = 4


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders of the buffers every few tokens."""
    monkeypatch.setattr(KV, "STEP", STEP)


def tokens(values: list[int], width: int = 2) -> mx.array:
    """Keys (1, 1, L, width) of tokens that are told apart by their number."""
    return mx.broadcast_to(mx.array(values, dtype=mx.float32)[None, None, :, None], (1, 1, len(values), width))


def numbers(keys: mx.array) -> list[int]:
    """The tokens that keys (1, 1, S, width) belong to."""
    assert mx.array_equal(keys, mx.broadcast_to(keys[..., :1], keys.shape)).item()
    return [int(x) for x in np.array(keys)[0, 0, :, 0]]


@dataclass
class Plain:
    """A list of tokens beside a real state; numbers are never used twice, so that stale ones show."""

    state: KV
    window: int | None = None
    kept: list[int] = field(default_factory=list)
    next: int = 1
    largest: int = 0
    longest: int = 0

    def append(self, count: int) -> None:
        new, before = list(range(self.next, self.next + count)), len(self.kept)
        keys, values = self.state.append(tokens(new), tokens([-x for x in new], width=3))
        self.kept, self.next = self.kept + new, self.next + count
        self.largest, self.longest = max(self.largest, count), max(self.longest, len(self.kept))
        first = 0 if self.window is None else max(before - self.window + 1, 0)
        assert numbers(keys) == self.kept[first:]
        assert numbers(values) == [-x for x in self.kept[first:]]

    def trim(self, count: int) -> None:
        before = [mx.array(x) for x in self.state.arrays], self.state.length, self.state.first
        try:
            self.state.trim(count)
        except UsageError:
            assert count > len(self.kept) or self.lost(len(self.kept) - count)
            assert (self.state.length, self.state.first) == before[1:]
            assert all(mx.array_equal(a, b).item() for a, b in zip(self.state.arrays, before[0], strict=True))
        else:
            assert count <= len(self.kept) and not self.lost(len(self.kept) - count)
            del self.kept[len(self.kept) - count :]

    def lost(self, length: int) -> bool:
        """True if a key that the next query of a text of `length` tokens must see is gone."""
        return self.window is not None and max(length - self.window + 1, 0) < self.state.first

    def check(self) -> None:
        assert self.state.length == len(self.kept)
        most = (self.longest if self.window is None else self.window - 1 + self.largest) + STEP - 1
        assert all(array.shape[2] <= most for array in self.state.arrays)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.one_of(st.just(1), st.integers(1, 9))),
        st.tuples(st.just("trim"), st.one_of(st.integers(0, 3), st.integers(0, 30))),
    ),
    max_size=25,
)


def run(plain: Plain, actions: list[tuple[str, int]]) -> None:
    for name, count in actions:
        if name == "append":
            plain.append(count)
        else:
            plain.trim(count)
        plain.check()


@given(steps)
def test_keys_and_values_are_those_of_a_plain_list(actions: list[tuple[str, int]]) -> None:
    run(Plain(KV()), actions)


@settings(max_examples=150)
@given(st.integers(1, 9), steps)
def test_a_window_gives_what_its_queries_may_see_and_no_more(window: int, actions: list[tuple[str, int]]) -> None:
    run(Plain(WindowKV(window), window), actions)


@pytest.mark.parametrize(("window", "room"), [(None, 40), (5, 8)])
def test_single_steps_go_on_for_ever(window: int | None, room: int) -> None:
    plain = Plain(KV() if window is None else WindowKV(window), window)
    run(plain, [("append", 1)] * 40)
    assert [x.shape[2] for x in plain.state.arrays] == [room, room]


@pytest.mark.parametrize("window", [None, 50])
def test_nothing_is_dropped_before_a_window_is_full(window: int | None) -> None:
    plain = Plain(KV() if window is None else WindowKV(window), window)
    run(plain, [("append", 7), ("append", 1), ("trim", 8), ("append", 3), ("trim", 1), ("append", 20), ("trim", 22)])
    assert plain.state.first == 0 and plain.state.length == 0


def test_a_trim_past_what_a_window_dropped_is_refused_and_says_why() -> None:
    state = WindowKV(3)
    for i in range(20):
        state.append(tokens([i]), tokens([i]))
    before = state.length, state.first, [mx.array(x) for x in state.arrays]
    with pytest.raises(UsageError, match="a window of 3 has dropped what came before them"):
        state.trim(10)
    assert (state.length, state.first) == before[:2]
    assert all(mx.array_equal(a, b).item() for a, b in zip(state.arrays, before[2], strict=True))
    assert numbers(state.append(tokens([20]), tokens([20]))[0]) == [18, 19, 20]


def test_a_trim_past_what_one_row_dropped_is_refused_after_rows_have_joined() -> None:
    """In steps a window drops what is old, in one piece it has not yet."""
    ids = [list(range(1, 21)), list(range(31, 51))]
    steps, whole = WindowKV(3), WindowKV(3)
    for i in ids[0]:
        steps.append(tokens([i]), tokens([i]))
    whole.append(tokens(ids[1]), tokens(ids[1]))
    least, refused = 20 - steps.first - 2, "a window of 3 has dropped"
    for first, second in [(steps, whole), (whole, steps)]:
        state = first.fork()
        state.join([second.fork()])
        stored = state.stored()
        for again in (state, WindowKV(3)):
            again.restore(stored)
            with pytest.raises(UsageError, match=refused):
                again.trim(least + 1)
            again.trim(least)
            keys, _ = again.append(*[mx.zeros((2, 1, 1, 2))] * 2)
            wanted = [row[18 - least : 20 - least] for row in (ids if first is steps else ids[::-1])]
            assert keys[:, 0, :2, 0].tolist() == wanted


def test_no_text_of_a_batch_is_trimmed_into_its_padding() -> None:
    m = model()
    cache = m.new_cache()
    m(mx.array([[1, 2, 3, 4, 5], [0, 0, 0, 6, 7]]), cache, attention_mask=mx.array([[1] * 5, [0, 0, 0, 1, 1]]))
    with pytest.raises(UsageError, match="cannot forget 3 tokens: one text of the batch has 2"):
        cache.trim(3)
    cache.trim(2)
    assert lengths(cache) == [3, 3, 3]


@pytest.mark.parametrize("count", [-1, 6, 10**12])
@pytest.mark.parametrize("state", [KV, lambda: WindowKV(3)], ids=["all", "window"])
def test_only_what_was_remembered_can_be_forgotten(count: int, state: Callable[[], KV]) -> None:
    kv = state()
    kv.append(tokens([1, 2, 3, 4, 5]), tokens([1, 2, 3, 4, 5]))
    with pytest.raises(UsageError, match=f"cannot forget {count} tokens"):
        kv.trim(count)
    assert kv.length == 5


def test_keys_that_were_given_out_do_not_change_later() -> None:
    state = KV()
    first, _ = state.append(tokens([1, 2, 3]), tokens([1, 2, 3]))
    state.trim(2)
    state.append(tokens([7, 8]), tokens([7, 8]))
    assert numbers(first) == [1, 2, 3]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_buffers_keep_the_dtype_and_the_width_of_what_they_hold(dtype: mx.Dtype) -> None:
    state = KV()
    keys, values = mx.ones((2, 3, 5, 8), dtype=dtype), mx.zeros((2, 3, 5, 6), dtype=dtype)
    k, v = state.append(keys, values)
    assert (k.shape, v.shape, k.dtype, v.dtype) == (keys.shape, values.shape, dtype, dtype)
    assert sum(x.nbytes for x in state.arrays) == 2 * 3 * 8 * (8 + 6) * dtype.size


def test_an_empty_state_holds_nothing() -> None:
    assert KV().arrays == [] and KV().length == 0
    KV().trim(0)


# --- the cache of a model ---


def model() -> LM:
    """Two layers that remember everything, and one between them that has a window of 3."""
    masks = [Causal(), Causal() & Window(3), Causal()]
    blocks = [Block(attn=Residual(Attention(8, 2, mask=mask)), mlp=Residual(GatedMlp(8, 12))) for mask in masks]
    return LM(Embed(20, 8), Stack(blocks))


def lengths(cache: Cache) -> list[int]:
    return [state.length for state in cache.states.values()]


def test_a_cache_holds_one_state_for_each_stateful_module_under_its_path() -> None:
    cache = model().new_cache(7)
    assert {path: type(state) for path, state in cache.states.items()} == {
        "decoder.layers.0.attn.op": KV,
        "decoder.layers.1.attn.op": WindowKV,
        "decoder.layers.2.attn.op": KV,
    }
    assert isinstance(cache["decoder.layers.1.attn.op"], WindowKV) and cache["decoder.layers.1.attn.op"].size == 3
    assert (cache.length, cache.nbytes, cache.arrays, cache.context) == (0, 0, [], 7)


def test_a_model_fills_every_state_and_owns_none() -> None:
    m = model()
    first, second = m.new_cache(), m.new_cache()
    m(mx.array([[1, 2, 3]]), first)
    m(mx.array([[4]]), first)
    assert lengths(first) == [4, 4, 4] and first.length == 4
    assert lengths(second) == [0, 0, 0]
    assert first.nbytes == sum(x.nbytes for x in first.arrays) == 3 * 2 * 2 * 4 * STEP * 4
    assert len(first.arrays) == 6


def test_a_refused_trim_forgets_nothing_in_any_layer() -> None:
    m = model()
    cache = m.new_cache()
    for i in range(12):
        m(mx.array([[i]]), cache)
    with pytest.raises(UsageError, match="window of 3"):
        cache.trim(9)
    assert lengths(cache) == [12, 12, 12]
    cache.trim(1)
    assert lengths(cache) == [11, 11, 11]


def test_a_model_without_state_has_an_empty_cache() -> None:
    block = Block(mlp=Residual(GatedMlp(8, 12)))
    name_modules(block)
    cache = Cache.of(block)
    assert (cache.states, cache.length, cache.nbytes) == ({}, 0, 0)


@pytest.mark.parametrize(("mask", "kept"), [(Causal(), 100), (Causal() & Window(7), 7), (Causal() & Window(700), 100)])
def test_a_layer_knows_what_a_text_will_cost(mask: Mask, kept: int) -> None:
    layer = Attention(32, heads=4, kv_heads=2, head_dim=6, mask=mask)
    assert layer.state_bytes(100, mx.float16) == 2 * (2 * 6) * kept * 2
    assert layer.state_bytes(100, mx.float32) == 2 * layer.state_bytes(100, mx.bfloat16)
