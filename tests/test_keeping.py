"""Caches that keep less than everything: packed ones against the full one, bounded ones against a mask."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from helpers import GOLDEN, gap, golden, shaken
from hypothesis import given
from hypothesis import strategies as st

import mlx_tformer as mt
from mlx_tformer import memory
from mlx_tformer.errors import UsageError
from mlx_tformer.nn import (
    KV,
    Attention,
    Cache,
    Context,
    Keeping,
    KeptKV,
    LatentAttention,
    PackedKV,
    Recent,
    Rope,
    Window,
    WindowKV,
    watch,
)
from mlx_tformer.nn.mask import window_of
from mlx_tformer.nn.packed import packed_bytes, turned

BOTH = [Keeping(bits=8), Keeping(bits=4)]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders of the buffers every few tokens."""
    monkeypatch.setattr(KV, "STEP", 4)


def logits(lm: mt.LanguageModel, ids: list[int], cuts: list[int], how: Keeping) -> mx.array:
    """Logits of a text that is read in pieces, (L, V)."""
    cache, parts = lm.new_cache(len(ids), how), []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        parts.append(lm(mx.array([ids[start:stop]]), cache)[0])
    return mx.concatenate(parts)


# --- packed ---


@pytest.mark.parametrize("width", [1, 7, 8, 32, 48, 64, 80, 128])
def test_turning_keeps_scores_and_turns_back(width: int) -> None:
    a, b = (mx.random.normal((1, 2, 5, width), key=mx.random.key(i)) for i in range(2))
    assert gap(turned(a) @ turned(b).swapaxes(2, 3), a @ b.swapaxes(2, 3)) < 1e-4
    assert gap(turned(turned(a)), a) < 1e-5


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 9), st.sampled_from([8, 40, 64]))
def test_packed_keys_are_near_what_was_given_however_it_came(parts: list[int], start: int, width: int) -> None:
    state, length = PackedKV(8, start), sum(parts)
    keys, values = (mx.random.normal((2, 3, length, w), key=mx.random.key(w)) for w in (width, 16))
    at = 0
    for count in parts:
        k, v = state.append(keys[:, :, at : at + count], values[:, :, at : at + count])
        at += count
    assert bool(state.packed) == (length > start)
    k, v = state.turn(k), state.turn_back(v)
    assert (k.shape, v.shape, state.length) == (keys.shape, values.shape, length)
    assert gap(k, keys) < 0.03 and gap(v, values) < 0.03
    assert length <= start or state.packed[0].dtype == mx.uint32


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_bytes_are_those_of_the_buffers(dtype: mx.Dtype) -> None:
    layer = Attention(64, heads=4, kv_heads=2, head_dim=64)
    state = layer.kept_state(Keeping(bits=4))
    assert isinstance(state, PackedKV)
    keys = mx.ones((1, 2, 8, 64), dtype)
    k, _ = state.append(keys, keys)
    assert k.dtype == dtype
    assert sum(x.nbytes for x in state.arrays) == layer.kept_bytes(8, dtype, Keeping(bits=4))
    assert layer.kept_bytes(8, dtype, Keeping(bits=4, start=8)) == layer.state_bytes(8, dtype)
    assert packed_bytes(1, 64, 4, mx.float16) == 36  # 4.5 bits a number


@pytest.mark.parametrize(
    "case", ["qwen3", "qwen3-window", "mixtral", "deepseek_v3", "mamba2", "jamba", "gpt_oss", "bloom"]
)
@pytest.mark.parametrize("how", BOTH, ids=["8", "4"])
def test_a_packed_cache_changes_little_and_the_same_however_a_text_is_cut(case: str, how: Keeping) -> None:
    lm, ids = mt.load(GOLDEN / case, dtype="float32"), [5, 11, 2, 7, 40, 3, 9, 1, 22, 8, 30, 4]
    full = lm(mx.array([ids]))[0]
    one, several = logits(lm, ids, [], how), logits(lm, ids, [1, 4, 5, 9], how)
    deviation = full.std().item()
    # A mean: where rounding chooses another code, or another expert, single logits are far apart.
    assert mx.abs(one - several).mean().item() < 0.01 * deviation
    assert 0 < mx.abs(one - full).mean().item() < (0.02 if how.bits == 8 else 0.3) * deviation or not any(
        isinstance(module, Attention) for module in lm.model.modules()
    )


def test_watchers_see_packed_keys_and_values_unturned_and_their_edits_count() -> None:
    model = golden("llama-gqa-tied")
    ids, site = mx.array([[5, 9, 13, 2, 7, 30]]), "decoder.layers.1.attn.op"

    def run(how: Keeping, factor: float | None = None) -> tuple[mx.array, dict[str, mx.array]]:
        found: dict[str, mx.array] = {}

        def see(path: str, value: mx.array) -> mx.array | None:
            found[path.removeprefix(f"{site}.")] = value
            return None if factor is None else factor * value

        with watch(f"{site}.[kv]", see):
            return model(ids, model.new_cache(6, how)), found

    plain, wanted = run(Keeping())
    packed, found = run(Keeping(bits=8))
    for name in "kv":
        assert gap(found[name], wanted[name]) < 0.02 * float(mx.abs(wanted[name]).max().item())
    assert mx.array_equal(packed, model(ids, model.new_cache(6, Keeping(bits=8))))
    assert gap(run(Keeping(bits=8), 2.0)[0], run(Keeping(), 2.0)[0]) < 0.1 * gap(run(Keeping(), 2.0)[0], plain)


def test_window_layers_latents_and_states_are_kept_as_they_are() -> None:
    for case, kinds in {
        "gemma2": {"PackedKV", "WindowKV"}, "deepseek_v3": {"KV"}, "mamba2": {"Recurrent"},
        "jamba": {"PackedKV", "Recurrent"},
    }.items():  # fmt: skip
        cache = golden(case).new_cache(how=Keeping(bits=4))
        assert {type(state).__name__ for state in cache.states.values()} == kinds


def test_a_text_is_packed_once_it_is_longer_than_the_start() -> None:
    lm = mt.load(GOLDEN / "qwen3", dtype="float32")
    ids = [5, 11, 2, 7, 40, 3, 9, 1]
    assert mx.array_equal(logits(lm, ids, [3], Keeping(bits=4, start=8)), logits(lm, ids, [3], Keeping())).item()
    later = logits(lm, ids, [3, 5], Keeping(bits=4, start=5))
    assert gap(later[:5], logits(lm, ids, [3, 5], Keeping())[:5]) < 1e-5
    assert gap(later[5:], logits(lm, ids, [3, 5], Keeping())[5:]) > 1e-5


def test_a_trimmed_packed_cache_goes_on_as_if_nothing_had_been() -> None:
    lm, how = mt.load(GOLDEN / "qwen3", dtype="float32"), Keeping(bits=8)
    ids = [5, 11, 2, 7, 40, 3]
    cache = lm.new_cache(how=how)
    lm(mx.array([[*ids, 99, 98, 97]]), cache)
    cache.trim(3)
    assert gap(lm(mx.array([[9, 1]]), cache)[0], logits(lm, [*ids, 9, 1], [6], how)[6:]) < 1e-4


def test_texts_join_and_leave_a_packed_batch() -> None:
    lm, how = mt.load(GOLDEN / "qwen3", dtype="float32"), Keeping(bits=8)
    texts = [[5, 11, 2], [7, 40, 3, 9, 1]]
    caches = [lm.new_cache(how=how) for _ in texts]
    for text, cache in zip(texts, caches, strict=True):
        lm(mx.array([text]), cache)
    caches[0].join(caches[1:])
    found = lm(mx.array([[8], [4]]), caches[0])
    for row, (text, token) in enumerate(zip(texts, [8, 4], strict=True)):
        assert gap(found[row], logits(lm, [*text, token], [len(text)], how)[-1:]) < 1e-4
    caches[0].take([1])
    again = lm(mx.array([[6]]), caches[0])[0]
    assert gap(again, logits(lm, [*texts[1], 4, 6], [5, 6], how)[-1:]) < 1e-4


def test_quantized_caches_of_a_real_model_cost_little(smollm2_dense: mt.LanguageModel, hamlet: str) -> None:
    lm = smollm2_dense
    ids = mx.array([list(lm.tokens(hamlet[:3000]))[:500]])

    def logprobs(how: Keeping) -> mx.array:
        x = lm(ids, lm.new_cache(500, how))[0]
        return x - mx.logsumexp(x, axis=-1, keepdims=True)

    full, eight, four = logprobs(Keeping()), logprobs(Keeping(bits=8)), logprobs(Keeping(bits=4))
    same = (full.argmax(-1) == eight.argmax(-1)).astype(mx.float32).mean().item()
    assert same >= 0.99
    assert (mx.exp(full) * (full - four)).sum(-1).mean().item() <= 0.06


# --- bounded ---


def tokens(values: list[int]) -> mx.array:
    return mx.broadcast_to(mx.array(values, dtype=mx.float32)[None, None, :, None], (1, 1, len(values), 2))


@given(st.integers(1, 6), st.integers(0, 5), st.lists(st.integers(-4, 6), max_size=20))
def test_a_bounded_state_gives_the_first_and_the_last_tokens(window: int, keep: int, actions: list[int]) -> None:
    state, text, fresh = KeptKV(window + keep, keep), list[int](), 1
    for count in actions:
        if count <= 0:
            try:
                state.trim(-count)
                text = text[: len(text) + count]
            except UsageError:
                pass
            continue
        new = list(range(fresh, fresh + count))
        fresh, before = fresh + count, len(text)
        text += new
        k, _ = state.append(tokens(new), tokens(new))
        oldest = max(before - window + 1, 0)
        wanted = text[: min(keep, oldest)] + text[oldest:]
        assert np.array(k)[0, 0, :, 0].tolist() == wanted


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("case", ["qwen3", "gpt_oss", "deepseek_v3", "mixtral-window"])
@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [4, 9], list(range(1, 20))])
def test_a_bounded_cache_is_a_mask(case: str, keep: int, cuts: list[int]) -> None:
    lm, ids = mt.load(GOLDEN / case, dtype="float32"), [(7 * i) % 40 for i in range(20)]
    found = logits(lm, ids, cuts, Keeping(size=6, keep=keep))
    lm = mt.load(GOLDEN / case, dtype="float32")
    for module in lm.model.modules():
        if isinstance(module, Attention | LatentAttention) and Keeping(size=6).bounds(window_of(module.mask)):
            module.mask = module.mask & Recent(6, keep)
            module.kept_state = lambda how: KV()  # so that nothing is dropped
    whole = logits(lm, ids, [], Keeping())
    assert gap(found, whole) < 1e-4 * max(whole.std().item(), 1)


@pytest.mark.parametrize("keep", [0, 3])
def test_a_bounded_cache_stays_small_and_says_what_it_needs(keep: int) -> None:
    lm, how = mt.load(GOLDEN / "qwen3", dtype="float32"), Keeping(size=8, keep=keep)
    cache = lm.new_cache(how=how)
    for i in range(60):
        lm(mx.array([[i]]), cache)
        mx.eval(cache.arrays)
    assert all(x.shape[2] <= 8 + KV.STEP for x in cache.arrays)
    assert memory.kv_bytes(lm.model, 60, mx.float32, how) == memory.kv_bytes(lm.model, 8, mx.float32)
    assert cache.length == 60


def test_a_size_below_a_window_bounds_it_and_one_above_does_not() -> None:
    window = Attention(8, 2, mask=Attention(8, 2).mask & Window(5))
    assert isinstance(window.kept_state(Keeping(size=4, keep=1)), KeptKV)
    assert isinstance(window.kept_state(Keeping(size=4)), WindowKV)
    state = window.kept_state(Keeping(size=9, keep=1))
    assert isinstance(state, WindowKV) and not isinstance(state, KeptKV) and state.size == 5


# --- what cannot be ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "kv_bits: found 3, expected 4 or 8"),
        ({"start": -1}, "kv_start: found -1"),
        ({"size": 0}, "kv_size: found 0"),
        ({"size": 4, "keep": 4}, "kv_keep: found 4, expected a whole number from 0 to 3"),
        ({"keep": 1}, "kv_keep: it needs kv_size"),
        ({"size": 9, "bits": 4}, "kv_bits: it does not go together with kv_size"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Keeping(**settings)


def test_first_tokens_are_refused_where_positions_add_to_scores_or_rows_are_padded() -> None:
    with pytest.raises(UsageError, match="ALiBi"):
        golden("bloom").new_cache(how=Keeping(size=4, keep=1))
    model = golden("qwen3")
    with pytest.raises(UsageError, match="padded batch"):
        model(
            mx.array([[0, 1], [2, 3]]),
            model.new_cache(how=Keeping(size=4, keep=1)),
            attention_mask=mx.array([[0, 1], [1, 1]]),
        )


# --- forks ---

STATES: dict[str, Callable[[], Keeping]] = {
    "whole": Keeping, "packed": lambda: Keeping(bits=8), "bounded": lambda: Keeping(size=5, keep=1)
}  # fmt: skip


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("case", ["qwen3-window", "deepseek_v3", "jamba"])
def test_forks_go_on_by_themselves(case: str, kind: str) -> None:
    lm, how = mt.load(GOLDEN / case, dtype="float32"), STATES[kind]()
    ids = [5, 11, 2, 7, 40, 3]
    cache = lm.new_cache(how=how)
    lm(mx.array([ids]), cache)
    mx.eval(cache.arrays)
    twin = cache.fork()
    ends = [[9, 1, 8], [4, 30, 2]]
    found = [
        [lm(mx.array([[token]]), one)[0, -1] for token in end] for one, end in zip((cache, twin), ends, strict=True)
    ]
    for end, rows in zip(ends, found, strict=True):
        assert gap(mx.stack(rows), logits(lm, ids + end, [6, 7, 8], how)[6:]) < 1e-4
    assert (cache.length, twin.length) == (9, 9)


def test_a_fork_takes_no_memory_before_it_writes() -> None:
    attention = shaken(Attention(64, 4, position=Rope(16)))
    attention.path = "a"
    cache = Cache({"a": KV()})
    x = mx.random.normal((1, 3000, 64))
    mx.eval(attention(x, Context(0, 3000, cache)), cache.arrays)
    mx.synchronize()
    before = mx.get_active_memory()
    twins = [cache.fork() for _ in range(5)]
    mx.eval([twin.arrays for twin in twins])
    assert mx.get_active_memory() - before < cache.nbytes / 2
