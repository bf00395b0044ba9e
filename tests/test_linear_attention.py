"""Linear and LSH attention against their definitions in float64, and in models of a few lines."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import refusal
from helpers import gap, seen, shaken
from reference import Array, attention, f64, linear

from mlx_tformer.errors import UsageError
from mlx_tformer.nn import (
    LM,
    Block,
    Cache,
    Context,
    Embed,
    Encoder,
    GatedMlp,
    LinearAttention,
    LSHAttention,
    Module,
    Residual,
    RMSNorm,
    Stack,
)
from mlx_tformer.nn.tap import name_modules

B, DIM, HEADS = 2, 12, 3
LENGTHS = [1, 2, 63, 64, 65, 1000]


def text(length: int, rows: int = B) -> mx.array:
    return 2 * mx.random.normal((rows, length, DIM), key=mx.random.key(5))


def made(layer: Any) -> Any:
    name_modules(shaken(layer))
    return layer


def heads_of(x: Array) -> Array:
    """(B, L, H * D) -> (B, H, L, D)"""
    return x.reshape(*x.shape[:2], -1, DIM // HEADS).swapaxes(1, 2)


def joined(z: Array) -> Array:
    return z.swapaxes(1, 2).reshape(z.shape[0], z.shape[2], -1)


# --- linear attention ---


def weighed(layer: LinearAttention, x: Array, causal: bool) -> Array:
    """The sum over keys that each query takes for itself (equations 4 and 8 of the paper)."""
    q, k, v = (heads_of(y) for y in np.split(linear(layer.qkv, x), 3, axis=-1))
    q, k = (np.where(y > 0, y + 1, np.exp(np.minimum(y, 0))) for y in (q, k))
    weights = q @ k.swapaxes(-1, -2)
    weights = np.tril(weights) if causal else weights
    return linear(layer.out, joined(weights @ v / weights.sum(axis=-1, keepdims=True)))


def in_parts(layer: LinearAttention, x: mx.array, sizes: list[int], left: mx.array | None = None) -> tuple[Any, Cache]:
    cache, parts, start = Cache.of(layer), [], 0
    for size in sizes:
        parts.append(layer(x[:, start : start + size], Context(start, size, cache, left, x.shape[1])))
        mx.eval(parts[-1], cache.arrays)
        start += size
    return mx.concatenate(parts, axis=1), cache


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 13, 131])
def test_linear_attention_is_the_sum_over_its_keys(causal: bool, length: int) -> None:
    layer, x = made(LinearAttention(DIM, HEADS, bias=True, causal=causal)), text(length)
    assert gap(layer(x), weighed(layer, f64(x), causal)) < 1e-5


@pytest.mark.parametrize("length", LENGTHS)
def test_steps_chunks_and_one_pass_of_linear_attention_are_one(length: int) -> None:
    layer, x = made(LinearAttention(DIM, HEADS)), text(length)
    whole, cache = in_parts(layer, x, [length])
    third = length // 3
    for sizes in ([1] * length, [third, length - third], [length - third, *[1] * third]):
        found, other = in_parts(layer, x, [size for size in sizes if size])
        assert gap(found, whole) < 1e-5
        assert all(gap(a / length, b / length) < 1e-5 for a, b in zip(other.arrays, cache.arrays, strict=True))
    assert gap(layer(x), whole) == 0 and cache.length == length
    assert cache.nbytes == B * layer.state_bytes(length, mx.float32)
    refusal(UsageError, "cannot forget 1 tokens", of=lambda: cache.trim(1))


@pytest.mark.parametrize("sizes", [[40], [30, 10], [1] * 40])
def test_padding_in_front_leaves_no_trace_in_linear_attention(sizes: list[int]) -> None:
    layer, x, left = made(LinearAttention(DIM, HEADS, bias=True)), text(40, 3), [0, 7, 25]
    found, cache = in_parts(layer, x, sizes, mx.array(left))
    for row, pad in enumerate(left):
        alone, single = in_parts(layer, x[row : row + 1, pad:], [40 - pad])
        assert gap(found[row : row + 1, pad:], alone) < 1e-5
        assert all(gap(a[row : row + 1], b) < 2e-5 for a, b in zip(cache.arrays, single.arrays, strict=True))


def test_weights_that_are_next_to_nothing_still_share_out_the_whole() -> None:
    layer = made(LinearAttention(DIM, HEADS, bias=True))
    layer.qkv.bias = mx.concatenate([mx.full((2 * DIM,), -20.0), layer.qkv.bias[2 * DIM :]])
    x = text(9)
    assert gap(layer(x), weighed(layer, f64(x), True)) < 1e-5


# --- LSH attention ---


def found_by(layer: LSHAttention, q: mx.array) -> Array:
    """Who sees whom (B, H, L, L), from the hashes alone: sorted, cut, one chunk back, and the rounds put together."""
    buckets = np.array(layer.hash(q))
    sees = np.zeros((*q.shape[:3], q.shape[2]), bool)
    for b, h, r in np.ndindex(*buckets.shape[:3]):
        of = buckets[b, h, r]
        order = sorted(range(len(of)), key=lambda i, of=of: (of[i], i))
        chunk = {i: place // layer.chunk for place, i in enumerate(order)}
        for i, j in np.ndindex(len(of), len(of)):
            sees[b, h, i, j] |= of[i] == of[j] and chunk[i] - chunk[j] in (0, 1)
    return sees


def hashed(layer: LSHAttention, x: mx.array) -> tuple[Array, Array]:
    """LSH attention with every pair looked at, and who sees whom."""
    qv = linear(layer.qkv, f64(x))
    q, v = (heads_of(y) for y in np.split(qv, 2, axis=-1))
    sees = found_by(layer, mx.array(q.astype(np.float32)))
    sees = np.tril(sees) if layer.causal else sees
    others = sees & ~np.eye(x.shape[1], dtype=bool)
    sees = np.where(others.any(-1, keepdims=True), others, sees)
    k, z = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6), np.zeros_like(v)
    for h in range(HEADS):
        one = slice(h, h + 1)
        z[:, one] = attention(q[:, one], k[:, one], v[:, one], (DIM // HEADS) ** -0.5, sees[:, h])[0]
    return linear(layer.out, joined(z)), sees


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("length", [1, 16, 24])
def test_one_bucket_and_one_chunk_are_whole_attention_with_shared_queries(
    length: int, rounds: int, causal: bool
) -> None:
    layer, x = made(LSHAttention(DIM, HEADS, buckets=1, rounds=rounds, chunk=24, causal=causal)), text(length)
    wanted, sees = hashed(layer, x)
    everyone = np.ones((length, length), bool) & ~np.eye(length, dtype=bool)
    everyone = np.tril(everyone) if causal else everyone
    assert (sees[..., 1:, :] == everyone[1:]).all() and sees[..., 0, 0].all() == (causal or length == 1)
    assert gap(layer(x), wanted) < 1e-5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "rounds", "chunk"), [(2, 1, 5), (4, 3, 4), (6, 4, 16), (8, 2, 3)])
def test_lsh_attention_is_attention_to_whom_a_round_finds(buckets: int, rounds: int, chunk: int, causal: bool) -> None:
    layer = made(LSHAttention(DIM, HEADS, buckets=buckets, rounds=rounds, chunk=chunk, causal=causal, bias=True))
    x = text(41)
    wanted, sees = hashed(layer, x)
    assert 0 < sees.mean() < 0.45
    assert gap(layer(x), wanted) < 1e-5


def test_more_rounds_find_more() -> None:
    counts = [
        hashed(made(LSHAttention(DIM, HEADS, buckets=4, rounds=n, chunk=8)), text(41))[1].sum() for n in (1, 2, 6)
    ]
    assert counts == sorted(counts) and counts[0] < counts[2]


@pytest.mark.parametrize("causal", [True, False])
def test_padding_moves_no_chunk(causal: bool) -> None:
    layer, x = made(LSHAttention(DIM, HEADS, buckets=4, rounds=2, chunk=5, causal=causal, bias=True)), text(31, 3)
    left = [0, 4, 17]
    found = layer(x, Context(0, 31, left=mx.array(left)))
    real = mx.arange(31) < mx.array([31, 27, 14])[:, None]
    behind = layer(x, Context(0, 31, real=real))
    for row, pad in enumerate(left):
        assert gap(found[row : row + 1, pad:], layer(x[row : row + 1, pad:])) < 1e-5
        assert gap(behind[row : row + 1, : 31 - pad], layer(x[row : row + 1, : 31 - pad])) < 1e-5


def test_gradients_of_lsh_attention_are_those_of_finite_differences() -> None:
    layer, x = made(LSHAttention(DIM, HEADS, buckets=4, rounds=2, chunk=5)), text(17, 1)
    along = mx.random.normal(x.shape, key=mx.random.key(8))
    slope = (mx.grad(lambda v: layer(v).sum())(x) * along).sum().item()
    ends = [hashed(layer, x + step * along)[0].sum() for step in (1e-3, -1e-3)]
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=2e-2)


def test_lsh_attention_takes_no_cache_and_says_so() -> None:
    layer = made(LSHAttention(DIM, HEADS, buckets=2))
    refusal(UsageError, "remembers nothing; leave out the cache", of=lambda: layer(text(3), Context(0, 3, Cache({}))))
    whole = made(LinearAttention(DIM, HEADS, causal=False))
    refusal(UsageError, "reads a whole text at once", of=lambda: in_parts(whole, text(3), [3]))
    with pytest.raises(ValueError, match="even number"):
        LSHAttention(DIM, HEADS, buckets=3)


# --- in a model ---


def block(op: Module) -> Block:
    return Block(attn=Residual(op, pre=RMSNorm(DIM)), mlp=Residual(GatedMlp(DIM, 20), pre=RMSNorm(DIM)))


def test_a_language_model_of_linear_attention_reads_in_any_parts() -> None:
    model = shaken(LM(Embed(50, DIM), Stack([block(LinearAttention(DIM, HEADS)) for _ in range(2)], RMSNorm(DIM))))
    ids = mx.random.randint(0, 50, (1, 80), key=mx.random.key(1))
    cache, start, parts = model.new_cache(), 0, []
    for size in (70, 1, 1, 8):
        parts.append(model(ids[:, start : start + size], cache))
        start += size
    with seen("*.attn.op.z") as watched:
        whole = model(ids)
    assert gap(mx.concatenate(parts, axis=1), whole) < 1e-5
    assert list(watched) == [f"decoder.layers.{i}.attn.op.z" for i in range(2)]


def test_a_language_model_of_lsh_attention_looks_at_no_later_token() -> None:
    layer = LSHAttention(DIM, HEADS, buckets=1, chunk=32)
    model = shaken(LM(Embed(50, DIM), Stack([block(layer)], RMSNorm(DIM))))
    ids = mx.random.randint(0, 50, (1, 30), key=mx.random.key(1))
    assert gap(model(ids)[:, :20], model(ids[:, :20])) < 1e-5


def test_an_encoder_of_either_ignores_its_padding() -> None:
    ops = [LinearAttention(DIM, HEADS, causal=False), LSHAttention(DIM, HEADS, buckets=2, chunk=4, causal=False)]
    model = shaken(Encoder(Embed(50, DIM), Stack([block(op) for op in ops])))
    ids = mx.random.randint(0, 50, (2, 20), key=mx.random.key(1))
    mask = mx.arange(20) < mx.array([20, 13])[:, None]
    assert gap(model(ids, attention_mask=mask)[1:, :13], model(ids[1:, :13])) < 1e-5
