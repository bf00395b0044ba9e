"""`attend` and `Attention` against attention written out in float64, fused and explicit."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from helpers import gap, seen, shaken
from reference import f64

from mlx_tformer.nn import (
    Alibi,
    AllHeads,
    Attention,
    Cache,
    Causal,
    Chunk,
    Context,
    EachHead,
    Everything,
    LayerNorm,
    Linear,
    Mask,
    Module,
    RMSNorm,
    Rope,
    Window,
    attend,
    watch,
)

HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1)}
B, L, D = 2, 7, 8


def sees_of(name: str, length: int, keys: int) -> np.ndarray:
    """The visible set of every kind of mask, (B, L, S)."""
    i, j = np.arange(keys - length, keys)[:, None], np.arange(keys)
    sees = {
        "none": (j >= 0) & (i >= 0),
        "causal": j <= i,
        "window": (j <= i) & (i - j < 3),
        "scattered": (j * 5 + i * 3) % 4 > 0,
        "blind rows": (j <= i) & (i % 3 > 0),
        "padded": j <= i,
    }[name]
    rows = np.repeat(sees[None], B, axis=0)
    if name == "padded":
        rows = rows & (j >= np.array([0, 3])[:, None, None]) & (i >= np.array([0, 3])[:, None, None])
    return rows


def given_as(name: str, sees: np.ndarray) -> mx.array | str | None:
    """The same as `attend` takes it."""
    if name in ("none", "causal"):
        return None if name == "none" else "causal"
    return mx.array(sees[:, None]) if name == "padded" else mx.array(sees[0])


def qkv(heads: str, length: int, keys: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    h, kv = HEADS[heads]
    shapes = [(B, h, length, D), (B, kv, keys, D), (B, kv, keys, D)]
    return [mx.random.normal(s, key=mx.random.key(i)).astype(dtype) for i, s in enumerate(shapes)]


@contextmanager
def explicit() -> Iterator[dict[str, mx.array]]:
    """Attention by its explicit twin, and what it shows."""
    with seen("*.scores") as scores, seen("*.pattern") as patterns:
        shown: dict[str, mx.array] = {}
        yield shown
        shown |= {"scores": scores[".scores"], "pattern": patterns[".pattern"]}


MASKS = ["none", "causal", "window", "scattered", "blind rows", "padded"]
SIZES = [(L, L), (3, 9), (1, 9), (1, 1)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("length", "keys"), SIZES)
def test_attention_is_what_is_written_out(heads: str, mask: str, length: int, keys: int) -> None:
    q, k, v = qkv(heads, length, keys)
    sees = sees_of(mask, length, keys)
    z, pattern = reference.attention(f64(q), f64(k), f64(v), 0.3, sees)
    fused = attend(Module(), q, k, v, scale=0.3, mask=given_as(mask, sees))
    with explicit() as shown:
        plain = attend(Module(), q, k, v, scale=0.3, mask=given_as(mask, sees))
    assert gap(fused, z) < 1e-6 and gap(plain, z) < 1e-6
    assert gap(shown["pattern"], pattern) < 1e-6
    assert gap(fused, plain) < 1e-6


BIAS = mx.random.normal((6, L, L), key=mx.random.key(9))
SINKS = mx.array([2.0, -1.0, 0.0, 30.0, 0.5, -20.0])
EXTRAS: dict[str, dict[str, Any]] = {
    "a bias": {"bias": BIAS},
    "a bias of every row": {"bias": mx.stack([BIAS, 2 * BIAS])},
    "a bias of every key": {"bias": BIAS[:, :1]},
    "a cap": {"softcap": 0.5},
    "sinks": {"sinks": SINKS},
    "all of them": {"bias": BIAS, "softcap": 0.5, "sinks": SINKS},
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_biases_caps_and_sinks_are_what_is_written_out(extra: str, mask: str) -> None:
    q, k, v = qkv("GQA", L, L)
    sees, extras = sees_of(mask, L, L), EXTRAS[extra]
    bias, sinks = extras.get("bias"), extras.get("sinks")
    z, pattern = reference.attention(
        f64(q),
        f64(k),
        f64(v),
        0.3,
        sees,
        bias=None if bias is None else np.broadcast_to(f64(bias), (B, 6, L, L)),
        softcap=extras.get("softcap"),
        sinks=None if sinks is None else f64(sinks),
    )
    fused = attend(Module(), q, k, v, scale=0.3, mask=given_as(mask, sees), **extras)
    with explicit() as shown:
        plain = attend(Module(), q, k, v, scale=0.3, mask=given_as(mask, sees), **extras)
    for found in (fused, plain):
        assert gap(found, z) < 1e-6
    assert gap(shown["pattern"], pattern) < 1e-6


def test_a_large_sink_takes_nearly_all_of_the_weight() -> None:
    q, k, v = qkv("GQA", L, L)
    z = attend(Module(), q, k, v, scale=0.3, mask="causal", sinks=mx.full((6,), 30.0))
    assert gap(z, np.zeros(z.shape)) < 1e-6


@pytest.mark.parametrize("mask", ["blind rows", "padded"])
def test_a_query_that_sees_nothing_gets_exact_zeros(mask: str) -> None:
    q, k, v = qkv("GQA", L, L)
    sees = sees_of(mask, L, L)
    blind = ~sees.any(axis=-1)
    assert blind.any()
    fused = attend(Module(), q, k, v, scale=0.3, mask=given_as(mask, sees))
    with explicit() as shown:
        plain = attend(Module(), q, k, v, scale=0.3, mask=given_as(mask, sees))
    for z in (fused, plain):
        assert (np.array(z).swapaxes(1, 2)[blind] == 0).all() and np.isfinite(np.array(z)).all()
    assert (np.array(shown["pattern"]).swapaxes(1, 2)[blind] == 0).all()


@pytest.mark.parametrize("mask", MASKS)
def test_what_is_not_visible_has_no_influence_at_all(mask: str) -> None:
    q, k, v = qkv("GQA", L, L)
    sees = sees_of(mask, L, L)
    hidden = mx.array(np.array(~sees.any(axis=1)))[:, None, :, None]  # keys that no query sees
    wild_k, wild_v = mx.where(hidden, 1e4, k), mx.where(hidden, -1e4, v)
    kwargs: dict[str, Any] = {"scale": 0.3, "mask": given_as(mask, sees)}
    assert gap(attend(Module(), q, k, v, **kwargs), attend(Module(), q, wild_k, wild_v, **kwargs)) == 0
    with explicit() as shown:
        attend(Module(), q, k, v, **kwargs)
    assert (np.array(shown["pattern"]).swapaxes(0, 1)[:, ~sees] == 0).all()


@pytest.mark.parametrize(("dtype", "limit"), [(mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", HEADS)
def test_half_precision_is_right_to_its_own_rounding(heads: str, mask: str, dtype: mx.Dtype, limit: float) -> None:
    q, k, v = qkv(heads, L, L, dtype)
    sees = sees_of(mask, L, L)
    z, pattern = reference.attention(f64(q), f64(k), f64(v), 0.3, sees)
    fused = attend(Module(), q, k, v, scale=0.3, mask=given_as(mask, sees))
    with explicit() as shown:
        plain = attend(Module(), q, k, v, scale=0.3, mask=given_as(mask, sees))
    assert fused.dtype == plain.dtype == dtype and shown["pattern"].dtype == shown["scores"].dtype == mx.float32
    assert gap(fused, z) < limit and gap(plain, z) < limit
    assert gap(shown["pattern"], pattern) < limit


def test_huge_scores_do_not_overflow() -> None:
    q, k, v = (300 * x for x in qkv("MHA", L, L))
    z, _ = reference.attention(f64(q), f64(k), f64(v), 1.0, sees_of("causal", L, L))
    with explicit():
        plain = attend(Module(), q, k, v, scale=1.0, mask="causal")
    for found in (attend(Module(), q, k, v, scale=1.0, mask="causal"), plain):
        assert gap(found, z) < 1e-3


def test_an_edited_pattern_is_what_the_values_are_weighed_by() -> None:
    q, k, v = qkv("GQA", L, L)
    with watch("*.pattern", lambda path, pattern: mx.full(pattern.shape, 1 / L)):
        z = attend(Module(), q, k, v, scale=0.3, mask=None)
    assert gap(z, mx.broadcast_to(mx.repeat(v.mean(axis=2, keepdims=True), 3, axis=1), z.shape)) < 1e-6


def test_edited_scores_are_what_the_softmax_sees_and_the_mask_still_holds() -> None:
    q, k, v = qkv("MHA", L, L)
    with watch("*.scores", lambda path, scores: mx.zeros(scores.shape)), explicit() as shown:
        attend(Module(), q, k, v, scale=0.3, mask="causal")
    flat = np.tri(L) / np.arange(1, L + 1)[:, None]
    assert gap(shown["pattern"], np.broadcast_to(flat, shown["pattern"].shape)) < 1e-6


# --- the layer ---

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "head_dim": 6},
    "biases": {"bias": True},
    "bias within": {"bias": True, "out_bias": False, "kv_heads": 2},
    "bias at the end": {"out_bias": True},
    "rotary": {"position": Rope(8, 100.0)},
    "rotary in part": {"position": Rope(4, 100.0, interleaved=True), "kv_heads": 1},
    "norms": {"q_norm": RMSNorm(8, 1e-3), "k_norm": RMSNorm(8, 1e-2), "position": Rope(8, 100.0)},
    "layer norms": {"q_norm": LayerNorm(8), "k_norm": LayerNorm(8), "kv_heads": 2},
    "own scale": {"scale": 0.7},
    "window": {"mask": Causal() & Window(3), "position": Rope(8, 100.0)},
    "everything": {"mask": Everything()},
    "chunks": {"mask": Causal() & Chunk(3), "position": Rope(8, 100.0)},
    "linear biases": {"position": Alibi(4)},
    "a cap": {"softcap": 0.7, "kv_heads": 2},
    "sinks": {"sinks": True, "kv_heads": 2, "position": Rope(8, 100.0)},
    "clipped": {"clip": 0.5, "position": Rope(8, 100.0)},
    "norms over all heads": {"q_norm": AllHeads(RMSNorm(32)), "k_norm": AllHeads(RMSNorm(16)), "kv_heads": 2},
    "norms for each head": {"q_norm": EachHead(4, 8), "k_norm": EachHead(2, 8), "kv_heads": 2},
    "clipped norms": {"q_norm": AllHeads(RMSNorm(32)), "k_norm": AllHeads(RMSNorm(32)), "clip": 0.5},
}


def layer_of(name: str) -> Attention:
    """An attention layer of width 32 with 4 heads, all of whose weights count."""
    return shaken(Attention(32, 4, **copy.deepcopy(LAYERS[name])))


def norm(layer: object, x: np.ndarray) -> np.ndarray:
    match layer:
        case RMSNorm():
            return reference.rms_norm(layer, x)
        case LayerNorm():
            return reference.layer_norm(layer, x)
        case AllHeads():
            return np.stack(np.split(norm(layer.norm, np.concatenate(list(x.swapaxes(0, 1)), -1)), x.shape[1], -1), 1)
        case EachHead():
            scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer.eps)
            return scaled * f64(layer.weight)[:, None]
    return x


def turn(position: object, x: np.ndarray) -> np.ndarray:
    if not isinstance(position, Rope):
        return x
    speeds = reference.frequencies(position)
    return reference.rotate(x, np.arange(x.shape[2])[None], speeds, interleaved=position.interleaved)


def sees_under(mask: Mask, length: int) -> np.ndarray:
    i, j = np.arange(length)[:, None], np.arange(length)
    sees = np.ones((1, length, length), dtype=bool)
    for part in mask.parts:
        match part:
            case Window(size):
                sees = sees & (i - j < size)
            case Chunk(size):
                sees = sees & (i // size == j // size)
            case _:
                sees = sees & (j <= i)
    return sees


def biases(layer: Attention, length: int) -> dict[str, Any]:
    """What a layer does to its scores besides."""
    i, j = np.arange(length)[:, None], np.arange(length)
    slopes = np.array([2.0 ** (-8 * (h + 1) / layer.heads) for h in range(layer.heads)])[:, None, None]
    return {
        "bias": (-slopes * (i - j))[None].repeat(B, 0) if isinstance(layer.position, Alibi) else None,
        "softcap": layer.softcap,
        "sinks": f64(layer.sinks) if layer.has_sinks else None,
    }


def written_out(layer: Attention, x: np.ndarray) -> np.ndarray:
    """The layer, one head after another."""
    h, kv, d = layer.heads, layer.kv_heads, layer.head_dim
    joined = reference.linear(layer.qkv, x)
    heads = [joined[..., i * d : (i + 1) * d] for i in range(h + 2 * kv)]
    q, k, v = (np.stack(part, axis=1) for part in (heads[:h], heads[h : h + kv], heads[h + kv :]))
    most = np.inf if layer.clip is None else layer.clip
    q, k, v = (np.clip(part, -most, most) for part in (norm(layer.q_norm, q), norm(layer.k_norm, k), v))
    q, k = turn(layer.position, q), turn(layer.position, k)
    sees = np.repeat(sees_under(layer.mask, x.shape[1]), x.shape[0], axis=0)
    z, _ = reference.attention(q, k, v, layer.scale, sees, **biases(layer, x.shape[1]))
    return reference.linear(layer.out, np.concatenate([z[:, i] for i in range(h)], axis=-1))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_what_is_written_out(name: str) -> None:
    layer, x = layer_of(name), mx.random.normal((B, L, 32), key=mx.random.key(3))
    assert gap(layer(x), written_out(layer, f64(x))) < 2e-5


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_the_same_when_its_pattern_is_watched(name: str) -> None:
    layer, x = layer_of(name), mx.random.normal((B, L, 32), key=mx.random.key(3))
    with explicit() as shown:
        watched = layer(x)
    assert gap(watched, layer(x)) < 1e-6
    assert shown["pattern"].shape == (B, 4, L, L)
    assert gap(shown["pattern"].sum(axis=-1), np.ones((B, 4, L))) < 1e-6 or layer.has_sinks


def test_the_pattern_times_the_values_is_the_fused_output() -> None:
    """Rows that sum to one would also come from a missing rotation, a missing mask or heads shared out wrongly."""
    layer = shaken(Attention(32, 4, 2, position=Rope(8, 100.0), mask=Causal() & Window(3)))
    x = mx.random.normal((B, L, 32), key=mx.random.key(3))
    with seen("*.z") as z, seen("*.v") as v:
        layer(x)
    with seen("*.pattern") as pattern:
        layer(x)
    assert gap(pattern[".pattern"] @ mx.repeat(v[".v"], 2, axis=1), z[".z"]) < 1e-6


def test_a_layer_offers_its_queries_keys_values_and_outputs() -> None:
    with seen("*") as found:
        Attention(32, 4, 2, 6)(mx.zeros((B, L, 32)))
    assert {path: value.shape for path, value in found.items()} == {
        ".q": (B, 4, L, 6),
        ".k": (B, 2, L, 6),
        ".v": (B, 2, L, 6),
        ".scores": (B, 4, L, L),
        ".pattern": (B, 4, L, L),
        ".z": (B, 4, L, 6),
        ".result": (B, 4, L, 32),
        ".values": (B, 2, L, 6),
        ".fused": (B, 4, L, 6),
    }


@pytest.mark.parametrize("bias", [True, False])
def test_what_the_heads_say_one_by_one_adds_up_to_what_they_say_together(bias: bool) -> None:
    layer, x = shaken(Attention(64, 4, 2, 32, bias=bias)), mx.random.normal((B, L, 64), key=mx.random.key(5))
    plain = layer(x)
    with seen("*.result") as found:
        assert mx.array_equal(layer(x), plain).item()
    with watch("*.result", lambda path, value: 1 * value):
        assert gap(layer(x), plain) < 1e-5
    said = found[".result"].sum(axis=1)
    assert gap(said + layer.out.bias if bias else said, plain) < 1e-5
    layer.out = layer.out.to_quantized(32, 8)
    with seen("*.result") as packed:
        layer(x)
    assert 0 < gap(packed[".result"], found[".result"]) < 0.02 * mx.abs(found[".result"]).max().item()


def test_keys_and_values_are_shown_as_they_are_attended_to_those_of_the_cache_included() -> None:
    layer = shaken(Attention(32, 4, 2, 6, position=Rope(6)))
    layer.path = "it"
    cache, x = Cache({"it": layer.new_state()}), mx.random.normal((B, L, 32), key=mx.random.key(5))
    with seen("*.[kv]") as whole:
        layer(x)
    layer(x[:, :4], Context(0, 4, cache))
    with seen("*.[kv]") as step:
        layer(x[:, 4:], Context(4, L - 4, cache))
    assert gap(step["it.k"], whole["it.k"]) < 1e-6 and gap(step["it.v"], whole["it.v"]) < 1e-6


def test_the_sizes_of_a_layer_follow_from_what_is_given() -> None:
    layer = Attention(32, 4)
    assert (layer.kv_heads, layer.head_dim, layer.scale) == (4, 8, 8**-0.5)
    assert (layer.qkv.weight.shape, layer.out.weight.shape) == ((96, 32), (32, 32))
    assert Attention(32, 4, scale=0.7).scale == 0.7
    layer = Attention(32, 4, 1, 6, bias=True, out_bias=False)
    assert (layer.qkv.weight.shape, layer.out.weight.shape) == ((36, 32), (32, 24))
    assert isinstance(layer.qkv, Linear) and "bias" in layer.qkv and "bias" not in layer.out


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 4), (2, 4)])
def test_key_heads_must_divide_the_heads(heads: int, kv_heads: int) -> None:
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        Attention(32, heads, kv_heads)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sinks", [False, True])
def test_capped_attention_with_copied_heads_is_its_explicit_twin(mask: str, sinks: bool) -> None:
    q, k, v = qkv("GQA", 3, 9)
    sees, extra = given_as(mask, sees_of(mask, 3, 9)), mx.array([0.5, -1.0, 0.0, 2.0, 1.0, -2.0]) if sinks else None
    with seen("*.[pf]*") as found:
        z = attend(Module(), q, k, v, scale=0.4, mask=sees, softcap=2.0, sinks=extra)
    assert gap(found[".fused"], z) < 2e-6
