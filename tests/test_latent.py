"""Multi-head latent attention against its formula in float64; absorbed against expanded; what it remembers."""

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from helpers import gap, seen, shaken
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Array, f64, linear, rms_norm

from mlx_tformer.nn import KV, Attention, Cache, Causal, Context, LatentAttention, Rope, Window, latent, watch
from mlx_tformer.nn.tap import name_modules

B, L, DIM = 2, 13, 32
SIZES: dict[str, Any] = {"rank": 12, "plain": 6, "rotary": 4, "value": 10}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"position": Rope(4, 100.0)},
    "interleaved": {"position": Rope(4, 100.0, interleaved=True)},
    "small queries": {"q_rank": 9, "position": Rope(4, 100.0)},
    "biased": {"q_rank": 9, "bias": True, "position": Rope(4, 100.0), "eps": 1e-2},
    "own scale": {"scale": 0.7, "position": Rope(4, 100.0)},
    "window": {"mask": Causal() & Window(3), "position": Rope(4, 100.0)},
    "a value as wide as a key": {"value": 10, "plain": 4, "rotary": 6, "position": Rope(6, 100.0)},
}
X = mx.random.normal((B, L, DIM), key=mx.random.key(3))


def layer_of(name: str, heads: int = 3) -> LatentAttention:
    layer = shaken(LatentAttention(DIM, heads, **copy.deepcopy(SIZES | LAYERS[name])))
    name_modules(layer)
    return layer


def turned(layer: LatentAttention, x: Array) -> Array:
    if not isinstance(layer.position, Rope):
        return x
    speeds = reference.frequencies(layer.position)
    return reference.rotate(x, np.arange(x.shape[2])[None], speeds, interleaved=layer.position.interleaved)


def sees(layer: LatentAttention, length: int) -> Array:
    i, j = np.arange(length)[:, None], np.arange(length)
    window = next((part.size for part in layer.mask.parts if isinstance(part, Window)), length)
    return np.broadcast_to((j <= i) & (i - j < window), (B, length, length))


def written_out(layer: LatentAttention, x: Array) -> tuple[Array, Array]:
    """The output and the pattern (B, H, L, L): every head has keys and values of its own, made from the latents."""
    joined = linear(layer.into, x)
    q, small, turning = np.split(joined, [-layer.rank - layer.rotary, -layer.rotary], axis=-1)
    if layer.q_rank is not None:
        q = linear(layer.q_up, rms_norm(layer.q_norm, q))
    small = rms_norm(layer.kv_norm, small)
    q = np.stack(np.split(q, layer.heads, axis=-1), axis=1)  # (B, H, L, plain + rotary)
    both = np.stack([small @ f64(layer.kv_up)[h].T for h in range(layer.heads)], axis=1)  # (B, H, L, plain + value)
    k, v = both[..., : layer.plain], both[..., layer.plain :]
    shared = np.repeat(turned(layer, turning[:, None]), layer.heads, axis=1)
    q = np.concatenate([q[..., : layer.plain], turned(layer, q[..., layer.plain :])], axis=-1)
    k = np.concatenate([k, shared], axis=-1)
    z, pattern = reference.attention(q, k, v, layer.scale, sees(layer, x.shape[1]))
    return linear(layer.out, np.concatenate(list(z.swapaxes(0, 1)), axis=-1)), pattern


@pytest.mark.parametrize("up_to", [0, 100], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("name", LAYERS)
def test_latent_attention_is_what_is_written_out(name: str, up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "ABSORBED_UP_TO", up_to)
    layer = layer_of(name)
    wanted, pattern = written_out(layer, f64(X))
    assert gap(layer(X), wanted) < 2e-5
    with seen("*.pattern") as found:
        watched = layer(X)
    assert gap(watched, wanted) < 2e-5 and gap(found[".pattern"], pattern) < 2e-6


def outputs(layer: LatentAttention, x: mx.array, sizes: list[int], left: mx.array | None = None) -> mx.array:
    """The layer on chunks of x, with a cache."""
    cache, parts, start = Cache({layer.path: layer.new_state()}), [], 0
    for size in sizes:
        ctx = Context(start, size, cache, left, x.shape[1])
        parts.append(layer(x[:, start : start + size], ctx))
        start += size
    return mx.concatenate(parts, axis=1)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_any_chunks_give_the_full_pass_however_they_are_computed(name: str, sizes: list[int]) -> None:
    """Some are larger than what is absorbed, and some are not."""
    layer, length = layer_of(name), sum(sizes)
    x = mx.random.normal((B, length, DIM), key=mx.random.key(length))
    assert gap(outputs(layer, x, sizes), layer(x)) < 2e-5


@pytest.mark.parametrize("length", [*range(1, 11), 40])
@pytest.mark.parametrize("heads", [1, 3])
def test_absorbed_equals_expanded_at_every_length(length: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of("biased", heads), mx.random.normal((B, length, DIM), key=mx.random.key(length))
    found = []
    for up_to in (0, 100):
        monkeypatch.setattr(latent, "ABSORBED_UP_TO", up_to)
        found.append((layer(x), outputs(layer, x, [length - 1, 1] if length > 1 else [1])))
    assert all(gap(a, b) < 1e-5 for a, b in zip(*found, strict=True))
    assert gap(*found[0]) < 1e-5


def test_the_scale_is_that_of_a_whole_query_unless_another_is_given() -> None:
    assert layer_of("rotary").scale == 10**-0.5 and layer_of("own scale").scale == 0.7


def test_padded_rows_are_the_rows_alone() -> None:
    layer, left = layer_of("rotary"), mx.array([0, 5])
    for sizes in ([13], [11, 1, 1], [6, 7]):
        found = outputs(layer, X, sizes, left)
        assert gap(found[:1], layer(X[:1])) < 1e-5
        assert gap(found[1:, 5:], layer(X[1:, 5:])) < 1e-5


def test_the_latent_and_one_rotary_key_are_all_that_is_remembered() -> None:
    layer = layer_of("rotary")
    cache = Cache({layer.path: layer.new_state()})
    layer(X, Context(0, L, cache, None, L))
    state = cache[layer.path]
    assert isinstance(state, KV) and state.length == L
    assert [array.shape for array in state.arrays] == [(B, 1, KV.STEP, 12), (B, 1, KV.STEP, 4)]
    assert layer.state_bytes(7, mx.float16) == 7 * (12 + 4) * 2
    assert layer.state_bytes(7, mx.float16) < Attention(DIM, 3, head_dim=10).state_bytes(7, mx.float16)


def test_a_step_never_makes_keys_and_values_of_all_heads() -> None:
    """It attends over the latents, (B, 1, S, rank)."""
    layer = layer_of("rotary")
    with seen("*.??*") as absorbed:  # all but q, k, v and z
        layer(X[:, :1])
    assert absorbed[".values"].shape == (B, 1, 1, 12) and ".v" not in absorbed
    assert absorbed[".latent"].shape == (B, 1, 1, 12) and absorbed[".result"].shape == (B, 3, 1, DIM)


@pytest.mark.parametrize("length", [3, L])
def test_a_watcher_sees_keys_and_values_of_all_heads_and_a_step_takes_them_only_if_they_changed(length: int) -> None:
    layer, x = layer_of("rotary"), X[:, :length]
    plain = layer(x)
    with seen("*.[qkv]") as found:
        assert mx.array_equal(layer(x), plain).item()
    assert {path: value.shape for path, value in found.items()} == dict.fromkeys((".q", ".k", ".v"), (B, 3, length, 10))
    with watch("*.[qkv]", lambda path, value: 1 * value):
        assert gap(layer(x), plain) < 1e-5
    with watch("*.v", lambda path, value: 2 * value), seen("*.z") as doubled:
        layer(x)
    with seen("*.z") as once:
        layer(x)
    assert gap(doubled[".z"], 2 * once[".z"]) < 1e-5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("length", [3, L])
def test_half_precision_stays_what_it_is(dtype: mx.Dtype, length: int) -> None:
    layer, x = layer_of("biased"), X[:, :length]
    wanted = layer(x)
    layer.set_dtype(dtype)
    found = layer(x.astype(dtype))
    assert found.dtype == dtype
    assert gap(found, wanted) < {mx.float16: 0.05, mx.bfloat16: 0.4}[dtype] * float(np.array(wanted).std())
