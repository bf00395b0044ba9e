"""State spaces against their recurrence in float64, one token at a time; scan, steps and chunks against each other."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import gap, golden, ids_of, leaves, seen, shaken
from reference import Array, activation, f64, linear, rms_norm

from mlx_tformer import memory
from mlx_tformer.card import card
from mlx_tformer.errors import UsageError
from mlx_tformer.mechanisms import facts_of
from mlx_tformer.nn import (
    LM,
    Block,
    Cache,
    Context,
    Embed,
    GatedDelta,
    GatedNorm,
    Mamba,
    Mamba2,
    Multipliers,
    NormedGate,
    Residual,
    RMSNorm,
    SiluGate,
    Stack,
    ssm,
    watch,
)
from mlx_tformer.nn.delta import inverse
from mlx_tformer.nn.ssm import CausalConv, Recurrent, StateSpace, scan
from mlx_tformer.nn.tap import name_modules

B, L, DIM = 2, 13, 24
LENGTHS = [1, 2, 63, 64, 65, 1000]
ONE: dict[str, Any] = {"inner": 20, "states": 5, "rank": 3}
TWO: dict[str, Any] = {"heads": 6, "head_dim": 4, "states": 5, "groups": 3}
DELTA: dict[str, Any] = {"heads": 6, "key_heads": 3, "key_dim": 4, "value_dim": 5, "eps": 1e-2}
MAKERS: dict[str, Callable[[], StateSpace]] = {
    "mamba": lambda: Mamba(DIM, **ONE),
    "mamba, biased": lambda: Mamba(DIM, **ONE, bias=True, conv_bias=False),
    "mamba, normed": lambda: Mamba(
        DIM, **ONE, conv=2, dt_norm=RMSNorm(3, 1e-2), b_norm=RMSNorm(5, 1e-2), c_norm=RMSNorm(5, 1e-2)
    ),
    "mamba, convolution of one": lambda: Mamba(DIM, **ONE, conv=1),
    "mamba2": lambda: Mamba2(DIM, **TWO),
    "mamba2, biased": lambda: Mamba2(DIM, **TWO, bias=True, conv_bias=False, conv=3),
    "mamba2, one group": lambda: Mamba2(DIM, **TWO | {"groups": 1}, eps=1e-2),
    "mamba2, bounded steps": lambda: Mamba2(DIM, **TWO, limits=(0.6, 1.1)),
    "mamba2, gate without a norm": lambda: Mamba2(DIM, **TWO, out_bias=True, norm=SiluGate()),
    "mamba2, gate behind the norm": lambda: Mamba2(DIM, **TWO, norm=NormedGate(24, 3, 1e-2)),
    "mamba2, multipliers": lambda: Mamba2(DIM, **TWO, scaled=Multipliers([0.5, 2, 0.7, 3, 1.5], [24, 24, 15, 15, 6])),
    "delta": lambda: GatedDelta(DIM, **DELTA),
    "delta, a key for each value": lambda: GatedDelta(DIM, **DELTA | {"key_heads": 6}, conv=2),
}
KINDS = ["mamba", "mamba2", "delta"]


def layer_of(name: str) -> StateSpace:
    layer = shaken(MAKERS[name]())
    name_modules(layer)
    return layer


def text(length: int, rows: int = B) -> mx.array:
    return mx.random.normal((rows, length, DIM), key=mx.random.key(5))


def convolved(layer: StateSpace, x: Array) -> Array:
    weight, size = f64(layer.conv.weight)[:, 0], layer.conv.size
    padded = np.concatenate([np.zeros((len(x), size - 1, x.shape[2])), x], axis=1)
    y = np.stack([(padded[:, t : t + size] * weight.T).sum(axis=1) for t in range(x.shape[1])], axis=1)
    return activation("silu", y + f64(layer.conv.bias) if layer.conv.has_bias else y)


def normed(norm: nn.Module, x: Array) -> Array:
    return x if isinstance(norm, nn.Identity) else rms_norm(norm, x)


def written_out(layer: StateSpace, x: Array) -> tuple[Array, Array]:
    """The output and the hidden state after each token."""
    if isinstance(layer, GatedDelta):
        return _delta(layer, x)
    return _one(layer, x) if isinstance(layer, Mamba) else _two(layer, x)


def _one(layer: Any, x: Array) -> tuple[Array, Array]:
    x, gate = np.split(linear(layer.into, x), 2, axis=-1)
    x = convolved(layer, x)
    dt, b, c = np.split(linear(layer.select, x), [layer.rank, layer.rank + layer.states], axis=-1)
    dt = np.logaddexp(linear(layer.dt, normed(layer.dt_norm, dt)), 0)
    b, c = normed(layer.b_norm, b), normed(layer.c_norm, c)
    h, hidden, y = np.zeros((len(x), *layer.hidden_shape)), [], []
    for t in range(x.shape[1]):
        decay = np.exp(-np.exp(f64(layer.a_log)) * dt[:, t, :, None])
        h = decay * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        hidden.append(h)
        y.append((h * c[:, t, None]).sum(axis=-1) + f64(layer.skip) * x[:, t])
    return linear(layer.out, np.stack(y, axis=1) * activation("silu", gate)), np.stack(hidden, axis=1)


def _two(layer: Any, x: Array) -> tuple[Array, Array]:
    inner, rows = layer.inner, layer.groups * layer.states
    into = linear(layer.into, x)
    if isinstance(layer.scaled, Multipliers):
        sizes = np.diff(layer.scaled.ends, prepend=0)
        into = into * np.repeat(layer.scaled.factors, sizes)
    gate, xbc, dt = np.split(into, [inner, inner + layer.features], axis=-1)
    x, b, c = np.split(convolved(layer, xbc), [inner, inner + rows], axis=-1)
    dt = np.clip(np.logaddexp(dt + f64(layer.dt_bias), 0), *layer.limits)
    x = x.reshape(*x.shape[:2], layer.heads, layer.head_dim)
    b, c = (v.reshape(*v.shape[:2], layer.groups, layer.states) for v in (b, c))
    hidden, y = np.zeros((len(x), x.shape[1], *layer.hidden_shape)), np.zeros_like(x)
    for row, head in np.ndindex(len(x), layer.heads):
        group, h = head // (layer.heads // layer.groups), np.zeros((layer.head_dim, layer.states))
        for t in range(x.shape[1]):
            decay = np.exp(-np.exp(f64(layer.a_log)[head]) * dt[row, t, head])
            h = decay * h + dt[row, t, head] * np.outer(x[row, t, head], b[row, t, group])
            hidden[row, t, head] = h
            y[row, t, head] = h @ c[row, t, group] + f64(layer.skip)[head] * x[row, t, head]
    return linear(layer.out, gated(layer.norm, y.reshape(*gate.shape), activation("silu", gate))), hidden


def gated(norm: Any, y: Array, gate: Array) -> Array:
    """A gate, before a norm in groups, behind it, or without one."""
    if isinstance(norm, SiluGate):
        return y * gate
    parts = (y * gate if isinstance(norm, GatedNorm) else y).reshape(*y.shape[:2], norm.groups, -1)
    parts = parts / np.sqrt((parts * parts).mean(axis=-1, keepdims=True) + norm.eps)
    normed = parts.reshape(*y.shape) * f64(norm.weight)
    return normed if isinstance(norm, GatedNorm) else normed * gate


def _delta(layer: GatedDelta, x: Array) -> tuple[Array, Array]:
    qkv, gate = np.split(linear(layer.into, x), [layer.features], axis=-1)
    write, keep = np.split(linear(layer.rates, x), 2, axis=-1)
    write, decay = 1 / (1 + np.exp(-write)), -np.exp(f64(layer.a_log)) * np.logaddexp(keep + f64(layer.dt_bias), 0)
    width, shared = layer.key_heads * layer.key_dim, layer.heads // layer.key_heads
    q, k, v = np.split(convolved(layer, qkv), [width, 2 * width], axis=-1)
    q, k = (y.reshape(*y.shape[:2], layer.key_heads, -1) for y in (q, k))
    q, k = (y / np.sqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    v, gate = (y.reshape(*y.shape[:2], layer.heads, -1) for y in (v, gate))
    hidden, y = np.zeros((*v.shape[:2], *layer.hidden_shape)), np.zeros_like(v)
    for row, head in np.ndindex(len(x), layer.heads):
        state = np.zeros((layer.key_dim, layer.value_dim))
        for t in range(x.shape[1]):
            key, at = k[row, t, head // shared], (row, t, head)
            state = np.exp(decay[at]) * state
            state = state + np.outer(key, write[at] * (v[at] - state.T @ key))
            hidden[at] = state
            y[at] = state.T @ q[row, t, head // shared] / np.sqrt(layer.key_dim)
    normed = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + layer.norm.eps) * f64(layer.norm.weight)
    return linear(layer.out, (normed * activation("silu", gate)).reshape(*x.shape[:2], -1)), hidden


def in_parts(layer: StateSpace, x: mx.array, sizes: list[int], left: mx.array | None = None) -> tuple[mx.array, Cache]:
    """What comes out of x in chunks, and the cache behind them."""
    cache, parts, start = Cache.of(layer), [], 0
    for size in sizes:
        ctx = Context(start, size, cache, left, x.shape[1])
        parts.append(layer(x[:, start : start + size], ctx))
        mx.eval(parts[-1], cache.arrays)
        start += size
    return mx.concatenate(parts, axis=1), cache


# --- against the definition ---


def test_a_convolution_in_16_bits_is_rounded_once() -> None:
    conv, x = shaken(CausalConv(6, 4)), mx.random.normal((2, 9, 6), key=mx.random.key(6)).astype(mx.bfloat16)
    conv.set_dtype(mx.bfloat16)
    y, after = conv(x)
    assert (y.dtype, after.dtype) == (mx.bfloat16, mx.bfloat16)
    padded, weight = np.pad(f64(x), [(0, 0), (3, 0), (0, 0)]), f64(conv.weight)[:, 0].T
    wide = np.stack([(padded[:, t : t + 4] * weight).sum(axis=1) for t in range(9)], axis=1) + f64(conv.bias)
    assert (np.abs(f64(y) - wide) <= 0.51 * mx.finfo(mx.bfloat16).eps * np.abs(wide)).all()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("length", [1, L, 2 * ssm.CHUNK + 3])
def test_a_state_space_is_its_recurrence_written_out(name: str, length: int) -> None:
    layer, x = layer_of(name), text(length)
    assert gap(layer(x), written_out(layer, f64(x))[0]) < 2e-5


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_scan_steps_and_chunks_give_the_same(name: str, length: int) -> None:
    layer, x = layer_of(name), text(length)
    whole, cache = in_parts(layer, x, [length])
    third = length // 3
    for sizes in ([1] * length, [third, length - third], [length - third, *[1] * third]):
        found, other = in_parts(layer, x, [size for size in sizes if size])
        assert gap(found, whole) < 1e-5
        assert all(gap(a, b) < 1e-5 for a, b in zip(other.arrays, cache.arrays, strict=True))
    assert gap(layer(x), whole) == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_a_scan_is_its_loop(length: int) -> None:
    decay = mx.random.uniform(0, 1, (2, length, 3), key=mx.random.key(1))
    written, h = mx.random.normal((2, length, 3), key=mx.random.key(2)), mx.random.normal((2, 3), key=mx.random.key(3))
    state, wanted = f64(h), []
    for t in range(length):
        state = f64(decay)[:, t] * state + f64(written)[:, t]
        wanted.append(state)
    assert gap(scan(decay, written, h), np.stack(wanted, axis=1)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_decays_that_no_float_can_hold_leave_the_result_finite_and_right(kind: str) -> None:
    """The product of a chunk's decays is zero in float32, and nothing may be divided by it."""
    layer: Any = layer_of(kind)
    layer.a_log = layer.a_log + 6
    x = text(2 * ssm.CHUNK)
    assert gap(layer(x), written_out(layer, f64(x))[0]) < 2e-5


@pytest.mark.parametrize("rate", [-9.0, 0.0, 9.0])
def test_tokens_that_are_all_alike_are_corrected_as_one_by_one(rate: float) -> None:
    """Their keys overlap wholly: powers of such a matrix reach 1e18 before they cancel, its inverse stays below 1."""
    layer: Any = layer_of("delta")
    layer.rates.weight = mx.zeros_like(layer.rates.weight)
    layer.dt_bias, layer.a_log = mx.full((6,), -9.0), mx.zeros((6,))  # next to nothing is forgotten
    layer.rates.bias = mx.concatenate([mx.full((6,), rate), mx.zeros((6,))])
    x = mx.repeat(text(1), 2 * ssm.CHUNK, axis=1)
    found, wanted = layer(x), written_out(layer, f64(x))[0]
    assert gap(found, wanted) < 2e-5


@pytest.mark.parametrize("size", [1, 2, 3, 31, 64])
def test_the_inverse_of_a_triangle_is_that_of_float64(size: int) -> None:
    below = mx.tril(mx.random.uniform(-1, 1, (2, size, size), key=mx.random.key(3)), -1) / size**0.5
    assert gap(inverse(below), np.linalg.inv(np.eye(size) + f64(below))) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    layer, x = layer_of(kind), text(ssm.CHUNK + 2, 1)
    along = mx.random.normal(x.shape, key=mx.random.key(8))
    slope = (mx.grad(lambda v: layer(v).sum())(x) * along).sum().item()
    ends = [written_out(layer, f64(x) + step * f64(along))[0].sum() for step in (1e-5, -1e-5)]
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3)


# --- padding, and what is remembered ---


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("sizes", [[40], [30, 10], [20, *[1] * 20], [1] * 40])
def test_padding_leaves_no_trace(name: str, sizes: list[int]) -> None:
    layer, x, left = layer_of(name), text(40, 3), mx.array([0, 7, 25])
    found, cache = in_parts(layer, x, sizes, left)
    for row in range(3):
        pad = int(left[row].item())
        alone, single = in_parts(layer, x[row : row + 1, pad:], [40 - pad])
        assert gap(found[row : row + 1, pad:], alone) < 1e-5
        assert all(gap(a[row : row + 1], b) < 1e-5 for a, b in zip(cache.arrays, single.arrays, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_behind_padding_alone_is_zero(name: str) -> None:
    _, cache = in_parts(layer_of(name), text(9), [9], mx.array([9, 9]))
    assert all(not mx.any(array).item() for array in cache.arrays)


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_remembered_has_one_size_and_is_counted_right(name: str) -> None:
    layer = layer_of(name)
    for length in (1, 5, 200):
        _, cache = in_parts(layer, text(length, 1), [length])
        assert cache.nbytes == layer.state_bytes(length, mx.float32) == layer.state_bytes(0, mx.float32)
        assert cache.length == length


def test_a_state_forgets_nothing_and_says_so() -> None:
    state = Recurrent()
    state.length = 3
    state.trim(0)
    for count in (1, 3, -1):
        with pytest.raises(UsageError, match=f"cannot forget {count} tokens: a state space"):
            state.trim(count)
    assert state.length == 3


WIDE: dict[str, Callable[[], StateSpace]] = {
    "mamba": lambda: Mamba(16, inner=32, states=64, rank=4),
    "mamba2": lambda: Mamba2(16, heads=8, head_dim=8, states=64),
    "delta": lambda: GatedDelta(16, heads=4, key_heads=2, key_dim=64, value_dim=32),
}
"""State spaces whose hidden state is far larger than what a token brings."""


def peak_of(mixer: StateSpace, length: int) -> int:
    """The most bytes that a prefill holds beyond the weights, evaluated at once."""
    model = LM(Embed(50, 16), Stack([Block(mixer=Residual(mixer))]))
    mx.eval(model.parameters())
    ids = mx.zeros((1, length), mx.int32)
    mx.eval(ids)
    cache, before = model.new_cache(), mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(model.hidden(ids, cache), cache.arrays)
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_a_prefill_is_linear_in_its_length_and_holds_few_hidden_states(kind: str) -> None:
    """A hidden state for every token would be more than twice the bound: what grows is what the tokens bring, a few
    times over."""
    mixer = WIDE[kind]()
    half, whole = peak_of(mixer, 8_000), peak_of(mixer, 16_000)
    assert whole <= 1.2 * 2 * half
    assert whole < 16_000 * mixer.state_bytes(1, mx.float32) / 2


# --- watchers ---


@pytest.mark.parametrize("name", MAKERS)
def test_the_hidden_states_that_a_watcher_sees_are_those_of_the_recurrence(name: str) -> None:
    layer, x = layer_of(name), text(ssm.CHUNK + 9)
    plain = layer(x)
    with seen("*") as found:
        watched = layer(x)
    offered = {"q", "k", "v", "decay", "write"} if isinstance(layer, GatedDelta) else {"x", "dt"}
    assert {path.lstrip(".") for path in found} == offered | {"hidden", "z"}
    assert gap(found[".hidden"], written_out(layer, f64(x))[1]) < 2e-5
    assert gap(watched, plain) <= (0 if isinstance(layer, Mamba) else 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[20], [1] * 20, [7, 13]])
def test_an_edited_hidden_state_changes_what_is_read_of_it_and_nothing_behind_it(kind: str, sizes: list[int]) -> None:
    layer, x = layer_of(kind), text(20)
    plain, cache = in_parts(layer, x, sizes)
    with watch(".hidden", lambda path, value: 2 * value):
        doubled, other = in_parts(layer, x, sizes)
    assert gap(doubled, plain) > 1e-2
    assert all(gap(a, b) < 1e-6 for a, b in zip(other.arrays, cache.arrays, strict=True))
    with watch(".hidden", lambda path, value: 2 * value):
        whole = layer(x)
    assert gap(doubled, whole) < 1e-5


# --- weights of other kinds ---


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_projections_compute_with_what_they_stand_for(kind: str) -> None:
    makers = {
        "mamba": lambda: Mamba(64, inner=128, states=8, rank=32),
        "mamba2": lambda: Mamba2(64, heads=8, head_dim=16, states=8),
        "delta": lambda: GatedDelta(64, heads=8, key_heads=4, key_dim=8, value_dim=16, eps=1e-2),
    }
    layer, x = shaken(maker := makers[kind]()), mx.random.normal((2, 30, 64), key=mx.random.key(9))
    nn.quantize(layer, group_size=32, bits=8)
    packed = {path: m for path, m in layer.named_modules() if isinstance(m, nn.QuantizedLinear)}
    assert packed.keys() == {"into", "out"} | {"mamba": {"select", "dt"}, "mamba2": set(), "delta": {"rates"}}[kind]
    found, most = layer(x), float(mx.abs(layer(x)).max().item())
    plain: Any = maker
    for path, m in packed.items():
        linear_layer = nn.Linear(1, 1, bias="bias" in m)
        linear_layer.weight = mx.dequantize(m.weight, m.scales, m.biases, m.group_size, m.bits)
        if "bias" in m:
            linear_layer.bias = m.bias
        plain[path] = linear_layer
    steps = in_parts(layer, x, [1] * 30)[0]
    assert max(gap(found / most, plain(x) / most), gap(found / most, steps / most)) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_hidden_state_is_kept_in_float32_whatever_the_weights_are(kind: str, dtype: mx.Dtype) -> None:
    layer = layer_of(kind)
    wanted = layer(text(80))
    layer.set_dtype(dtype)
    found, cache = in_parts(layer, text(80).astype(dtype), [50, 30])
    inputs, hidden = cache.arrays
    assert (found.dtype, inputs.dtype, hidden.dtype) == (dtype, dtype, mx.float32)
    assert gap(found, wanted) < 0.05 * float(mx.abs(wanted).max().item())


# --- a whole model ---


SPACES = {
    "mamba": "features of 8 numbers, convolution of 4",
    "mamba2": "features of 8 numbers, convolution of 4",
    "jamba": "features of 8 numbers, convolution of 4",
    "qwen3_next": "4 heads of 8 × 8 numbers, convolution of 4",
    "falcon_h1": "4 heads of 10 features of 6 numbers, convolution of 4",
}


@pytest.mark.parametrize(("case", "said"), SPACES.items())
def test_a_card_tells_of_state_spaces(case: str, said: str) -> None:
    model = golden(case)
    layers = [m for m in model.modules() if isinstance(m, StateSpace)]
    told, facts = card(model, context=100), facts_of(layers[0])
    fixed = len(layers) * layers[0].state_bytes(1, mx.float32)
    assert memory.kv_bytes(model, 0, mx.float32) == fixed
    assert len(layers) == {"jamba": 2, "falcon_h1": 2}.get(case, 3)
    assert told.parameters == sum(value.size for value in leaves(model).values())
    assert (told.kv_bytes_per_token == 0) == (case in ("mamba", "mamba2"))
    assert facts["kind"] == "state space"
    assert facts["state"].endswith(said)
    assert sum(line.parameters * section.times for section in told.ledger for line in section.lines) == told.parameters
    assert facts["state"] in told.render(200)


@pytest.mark.parametrize("case", ["mamba", "mamba2", "jamba", "qwen3_next-mixed", "falcon_h1-plain"])
def test_a_model_reads_a_text_longer_than_its_chunks_in_any_parts(case: str) -> None:
    model, ids = golden(case), mx.concatenate([ids_of(case)] * 4, axis=1)
    whole, cache, start, parts = model(ids), model.new_cache(96), 0, []
    for size in (70, 1, 1, 24):
        parts.append(model(ids[:, start : start + size], cache))
        start += size
    assert gap(mx.concatenate(parts, axis=1), whole) < 1e-4
