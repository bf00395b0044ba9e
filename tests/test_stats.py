"""Statistics of attention: against float64, against patterns, in chunks and steps, in batches, in bounded memory."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from helpers import CASES, attentions, gap, golden, seen
from reference import f64

from mlx_tformer import inspect
from mlx_tformer.inspect import Statistics, Wants, statistics_of, streaming
from mlx_tformer.nn import Call, Module, Places, attend, attention
from mlx_tformer.tokens import Spans, Tokens

ATTENDING = [case for case in CASES if attentions(golden(case))]
LATENT = [case for case in ATTENDING if case.startswith("deepseek")]
B, H, K, L, D = 2, 6, 2, 7, 8
SPANS = Spans(("a", "b", "c"), (0, 2, 1, 1, 0))
"""Of the first five tokens; the others come after."""
ALL = Wants(entropy=True, distance=True, top=3, spans=SPANS, received=True)
LEFT = mx.array([0, 3])
SINKS = mx.array([2.0, -1.0, 0.0, 30.0, 0.5, -20.0])
BIAS = mx.random.normal((H, L, L), key=mx.random.key(9))


def sees_of(mask: str, length: int = L, keys: int = L) -> np.ndarray:
    """What each query sees under every kind of mask, (B, L, S)."""
    i, j = np.arange(keys - length, keys)[:, None], np.arange(keys)
    padding = np.array([0, 3])[:, None, None] if mask == "padded" else np.zeros((B, 1, 1), int)
    sees = {
        "none": (j >= 0) & (i >= 0),
        "causal": j <= i,
        "window": (j <= i) & (i - j < 3),
        "scattered": (j * 5 + i * 3) % 4 > 0,
        "blind rows": (j <= i) & (i % 3 > 0),
        "padded": j <= i,
    }[mask]
    return sees & (j >= padding) & (i >= padding)


def call_of(mask: str, length: int = L, keys: int = L, **extras: Any) -> Call:
    """A call of attention with grouped heads, that stands in its text as the mask says."""
    shapes = [(B, H, length, D), (B, K, keys, D), (B, K, keys, D)]
    q, k, v = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes))
    sees = sees_of(mask, length, keys)
    given = {"none": None, "causal": "causal", "padded": mx.array(sees[:, None])}.get(mask, mx.array(sees[0]))
    at = Places.plain(length, keys)
    if mask == "padded":
        at = Places(at.queries, at.keys, LEFT, LEFT)
    settings: dict[str, Any] = {"bias": None, "softcap": None, "sinks": None, **extras}
    return Call("here", q, k, v, 0.5, given, at=at, **settings)


def written(call: Call, mask: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The pattern in float64, and what its rows say, one row after another."""
    length, keys = call.q.shape[2], call.k.shape[2]
    bias = None if call.bias is None else np.broadcast_to(f64(call.bias), (B, H, length, keys))
    sinks = None if call.sinks is None else f64(call.sinks)
    sees = sees_of(mask, length, keys)
    q, k, v = f64(call.q), f64(call.k), f64(call.v)
    _, pattern = reference.attention(q, k, v, call.scale, sees, bias=bias, softcap=call.softcap, sinks=sinks)
    found: dict[str, np.ndarray] = {name: np.zeros((B, H, length)) for name in ("entropy", "distance", "sink")}
    found["mass"], found["received"] = np.zeros((B, H, length, 4)), pattern.sum(axis=2)
    left = [0, 0] if call.at.left is None else call.at.left.tolist()
    for b, h, i in np.ndindex(B, H, length):
        row = pattern[b, h, i]
        rest = 1 - row.sum() if sinks is not None else 0.0
        shares = [share for share in (*row, rest) if share > 0]
        found["entropy"][b, h, i] = -sum(share * np.log(share) for share in shares)
        found["sink"][b, h, i] = rest
        for j, weight in enumerate(row):
            place = call.at.keys[j] - left[b]
            found["distance"][b, h, i] += weight * abs(call.at.queries[i] - left[b] - place) / max(row.sum(), 1e-300)
            found["mass"][b, h, i, SPANS.labels[place] if 0 <= place < 5 else 3] += weight
    return pattern, found


def close(found: Statistics, wanted: dict[str, np.ndarray], limit: float) -> None:
    """`wanted` is in `found`."""
    arrays = found.arrays()
    for name, value in wanted.items():
        assert gap(arrays[name], value) < limit, name


def picked(pattern: np.ndarray, keys: mx.array, at: Places) -> np.ndarray:
    """The weights that a pattern has at places in the text, (..., top); zeros where there is none."""
    left = np.zeros(B, int) if at.keys_left is None else np.array(at.keys_left)
    places = np.array(keys)
    index = np.maximum(places - at.keys.start + left[:, None, None, None], 0)
    return np.where(places < 0, 0, np.take_along_axis(pattern, index, axis=-1))


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a bias": {"bias": BIAS},
    "a bias of every row": {"bias": mx.stack([BIAS, 2 * BIAS])},
    "a bias of every key": {"bias": BIAS[:, :1]},
    "a cap": {"softcap": 0.5},
    "sinks": {"sinks": SINKS},
    "all of them": {"bias": BIAS, "softcap": 0.5, "sinks": SINKS},
}
MASKS = ["none", "causal", "window", "scattered", "blind rows", "padded"]


@pytest.fixture(params=[1, 2, 1000], ids=["row by row", "blocks of two", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows are held at a time."""
    monkeypatch.setattr(streaming, "BLOCK", request.param * B * H * L)


# --- against float64 ---


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_statistics_are_what_is_written_out(mask: str, extra: str) -> None:
    call = call_of(mask, **EXTRAS[extra])
    pattern, wanted = written(call, mask)
    found = streaming.streamed(call, ALL)
    close(found, wanted, 2e-6)
    best = np.sort(pattern, axis=-1)[..., ::-1][..., :3]
    assert found.top_keys is not None and found.peak is not None
    close(found, {"top_weights": best, "peak_weight": best[..., 0]}, 1e-6)
    assert gap(mx.array(picked(pattern, found.top_keys, call.at)), best) < 1e-6
    assert gap(mx.array(picked(pattern, found.peak[..., None], call.at)), best[..., :1]) < 1e-6


@pytest.mark.parametrize(("length", "keys"), [(3, 9), (1, 9), (1, 1)])
@pytest.mark.parametrize("mask", MASKS)
def test_few_queries_are_the_last_of_the_text(mask: str, length: int, keys: int) -> None:
    call = call_of(mask, length, keys)
    close(streaming.streamed(call, ALL), written(call, mask)[1], 2e-6)


@pytest.mark.parametrize("extra", ["plain", "a cap", "sinks", "all of them"])
def test_scores_and_their_logsumexp_give_the_weights(extra: str) -> None:
    call = call_of("causal", **EXTRAS[extra])
    found = streaming.streamed(call, Wants())
    scores = attention.scores_of(call.q * call.scale, call.k, call.bias, call.softcap)
    assert found.logsumexp is not None
    weights = mx.where(mx.tri(L, dtype=mx.bool_), mx.exp(scores - found.logsumexp[..., None]), 0)
    assert gap(weights, written(call, "causal")[0]) < 2e-6


def test_a_query_that_sees_nothing_has_nothing_to_say() -> None:
    found = streaming.streamed(call_of("blind rows"), ALL).arrays()
    for name, wanted in {"entropy": 0, "distance": 0, "sink": 0, "peak": -1, "peak_weight": 0, "mass": 0}.items():
        assert (np.array(found[name])[:, :, ::3] == wanted).all(), name
    assert (np.array(found["logsumexp"])[:, :, ::3] == -np.inf).all()
    assert (np.array(found["top_keys"])[:, :, ::3] == -1).all()


def test_equal_scores_have_known_statistics() -> None:
    """n equal weights: entropy log n, a distance of (n - 1) / 2, and each key receives the harmonic rest."""
    zeros, n = mx.zeros((1, 2, 6, 4)), np.arange(1, 7)
    call = Call("", zeros, zeros, zeros, 1.0, "causal", None, None, None, Places.plain(6, 6))
    rest = np.cumsum(1 / n[::-1])[::-1]
    wanted = {
        "entropy": np.log(n),
        "logsumexp": np.log(n),
        "distance": (n - 1) / 2,
        "peak_weight": 1 / n,
        "received": rest,
    }
    close(streaming.streamed(call, ALL), {k: np.broadcast_to(v, (1, 2, 6)) for k, v in wanted.items()}, 1e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_counted_in_float32(dtype: mx.Dtype) -> None:
    call = call_of("causal")
    half = Call("", *(x.astype(dtype) for x in (call.q, call.k, call.v)), 0.5, "causal", None, None, None, call.at)
    found = streaming.streamed(half, ALL)
    assert {x.dtype for x in found.arrays().values()} == {mx.float32, mx.int32}
    close(found, written(half, "causal")[1], 2e-6)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 700])
def test_the_largest_of_many_are_found(count: int) -> None:
    """Long rows are searched tile by tile."""
    weights = mx.softmax(3 * mx.random.normal((2, 3, 5, 700), key=mx.random.key(1)), axis=-1)
    keys, found = inspect.peaks.largest(weights, count, Places(range(695, 700), range(700)))
    order = np.argsort(-np.array(weights), axis=-1, kind="stable")[..., :count]
    assert np.array_equal(np.array(keys), order)
    assert mx.array_equal(found, mx.take_along_axis(weights, keys, axis=-1)).item()


# --- value probes ---

MANY = Spans(tuple("abcdefghijkl"), tuple(range(12)))
"""More spans than a key has features."""


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("extra", ["plain", "a bias", "sinks"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("spans", [SPANS, MANY, None])
def test_probes_say_what_the_scores_say(
    mask: str, extra: str, spans: Spans | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without making scores, but for a distance where a key may stand behind its query."""
    call = call_of(mask, **EXTRAS[extra])
    wants = Wants(entropy=False, distance=mask == "causal", spans=spans)
    wanted = streaming.streamed(call, wants)
    monkeypatch.setattr(streaming, "probes_pay", lambda: True)
    monkeypatch.delattr(streaming, "scores_of")
    found = streaming.streamed(call, wants)
    assert found.arrays().keys() == wanted.arrays().keys()
    close(found, {name: np.array(value) for name, value in wanted.arrays().items()}, 2e-6)


@pytest.mark.parametrize("change", [{"entropy": True}, {"top": 2}, {"received": True}, {"distance": True}])
def test_what_probes_cannot_say_is_written_out(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wants = Wants(**({"entropy": False, "distance": False, "spans": SPANS} | change))
    call = call_of("window")
    wanted = streaming.streamed(call, wants).arrays()
    monkeypatch.setattr(streaming, "probes_pay", lambda: True)
    found = streaming.streamed(call, wants).arrays()
    assert all(mx.array_equal(found[name], wanted[name]).item() for name in wanted)


# --- 512 tokens against the pattern, 8192 in bounded memory ---


def test_statistics_of_512_tokens_are_those_of_the_pattern() -> None:
    shapes = [(1, 9, 512, 64), (1, 3, 512, 64), (1, 3, 512, 64)]
    q, k, v = (2 * mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes))
    wants = Wants(top=8, spans=Tokens(range(512)).spans(every=64), received=True)
    with seen("*.pattern") as found:
        attend(Module(), q, k, v, scale=0.125, mask="causal")
    wanted = statistics_of(found[".pattern"], wants).arrays()
    with inspect.stats(top=8, mass=wants.spans, received=True) as watch:
        attend(Module(), q, k, v, scale=0.125, mask="causal")
    for name in wanted.keys() - {"peak", "top_keys"}:
        scale = max(1.0, float(mx.abs(wanted[name]).max().item())) if name in ("distance", "received") else 1.0
        assert gap(mx.array(getattr(watch[""], name)), wanted[name]) < 1e-5 * scale, name
    assert np.mean(watch[""].top_keys != np.array(wanted["top_keys"])) < 1e-3  # equals may change places


def test_statistics_of_8192_tokens_need_less_than_a_tenth_of_the_pattern() -> None:
    length, heads = 8192, 9
    q, k = (mx.random.normal((1, n, length, 8), key=mx.random.key(n)) for n in (heads, 1))
    mx.eval(q, k)
    spans = Tokens(range(length)).spans(every=512)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with inspect.stats(top=8, mass=spans, received=True) as watch:
        attend(Module(), q, k, k, scale=0.35, mask="causal")
    needed = mx.get_peak_memory() - before
    assert needed + watch.nbytes < heads * length * length * 4 / 10
    found = watch[""]
    assert found.seen == length and found.received.shape == (1, heads, length)
    assert abs(found.received.sum() - heads * length) < 1
    assert abs(found.mass.sum(axis=-1) - 1).max() < 1e-5
