"""Attention over packed keys, and over DeepSeek's latents, against float64 and the plain way."""

import attention_cases as cases
import float64
import mlx.core as mx
import msl
import pytest
from float64 import TOLERANCE, assert_close, bits, f64, random

from mlx_tformer import UsageError
from mlx_tformer.kernels import (
    Asked,
    Latent,
    Packed,
    Plan,
    Sight,
    Wanted,
    attention,
    attention_statistics,
    plain_attention,
    plan,
)

pytestmark = pytest.mark.usefixtures("on_trial")

SHAPE = (2, 6, 2, 1, 37)


def packed(shape, width, value, group, bits, dtype):
    b, heads, kv_heads, queries, keys = shape
    k, v = random(b, kv_heads, keys, width, dtype=dtype, seed=1), random(b, kv_heads, keys, value, dtype=dtype, seed=2)
    return random(b, heads, queries, width, dtype=dtype), Packed.pack(k, v, group, bits)


def in_float64(q, keys, asked):
    """Of packed keys: what scales and biases of their dtype unpack to without rounding."""
    k, v = keys.plain()
    if isinstance(keys, Packed):
        wide = [tuple(x if x.dtype == mx.uint32 else x.astype(mx.float32) for x in part) for part in (keys.k, keys.v)]
        k, v = Packed(*wide, keys.group, keys.bits).plain()
    return float64.attention(f64(q), f64(k), f64(v), asked, Wanted())["out"]


@pytest.mark.parametrize("width, value, group, bits, dtype", [
    (128, 128, 128, 4, mx.float32), (64, 96, 32, 4, mx.bfloat16), (128, 64, 64, 4, mx.float16),
    (128, 128, 128, 8, mx.float16), (96, 64, 32, 8, mx.float32), (64, 128, 64, 8, mx.bfloat16),
])  # fmt: skip
def test_packed_keys_are_read_as_they_are(width, value, group, bits, dtype):
    q, keys = packed(SHAPE, width, value, group, bits, dtype)
    for how in (Plan(4, 2, 1), Plan(4, 2, 3)):
        for asked in (
            cases.asked("window", ["padding", "sinks"], SHAPE),
            cases.asked("everything", ["softcap"], SHAPE),
        ):
            assert_close(attention(q, keys, asked, how), in_float64(q, keys, asked), TOLERANCE[dtype])


def test_a_long_packed_context_is_split_and_merged():
    shape = (1, 2, 1, 1, 700)
    q, keys = packed(shape, 64, 64, 64, 4, mx.float32)
    how = plan(1, 1, 2, 700, 64, 64)
    assert how == Plan(rows=2, groups=8, splits=2)
    for sight in (Sight(causal=True), Sight(window=300)):
        asked = Asked(0.2, sight)
        assert_close(attention(q, keys, asked, how), in_float64(q, keys, asked), 1e-5)


def test_packed_keys_may_be_a_stretch_of_a_longer_buffer():
    q, keys = packed(SHAPE, 64, 64, 32, 4, mx.float32)
    longer = [mx.pad(x, [(0, 0), (0, 0), (2, 5), (0, 0)], constant_values=77)[:, :, 2:39] for x in keys.arrays]
    assert bits(attention(q, keys.of(longer), Asked(0.3))) == bits(attention(q, keys, Asked(0.3)))


def test_a_query_that_sees_nothing_gives_zeros_after_merging():
    q, keys = packed((1, 2, 1, 2, 9), 64, 64, 32, 4, mx.float32)
    mask = mx.array([[False] * 9, [True] * 4 + [False] * 5])  # nothing at all, and nothing in the last split
    found = attention(q, keys, Asked(0.3, mask=mask), Plan(2, 1, 3))
    assert not found[:, :, 0].any().item()
    assert_close(found, in_float64(q, keys, Asked(0.3, mask=mask)), 1e-5)


def test_packed_keys_have_no_gradient_and_no_statistics():
    q, keys = packed(SHAPE, 64, 64, 32, 4, mx.float32)
    with pytest.raises(UsageError, match="gradient: packed keys have none"):
        mx.grad(lambda q: attention(q, keys, Asked(0.3)).sum())(q)
    with pytest.raises(UsageError, match="statistics: packed keys have none"):
        attention_statistics(q, keys, Asked(0.3))


def latents(batch, heads, queries, keys, rank, turning, dtype=mx.float32):
    q = random(batch, heads, queries, rank + turning, dtype=dtype)
    parts = [random(batch, 1, keys, size, dtype=dtype, seed=size) for size in (rank, turning)]
    return q, Latent(*parts)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rank, turning, how", [(512, 64, None), (512, 64, Plan(2, 4, 3)), (48, 24, Plan(4, 2, 2))])
def test_latents_are_keys_and_values(rank, turning, how, dtype):
    q, keys = latents(2, 5, 2, 13, rank, turning, dtype)
    for asked in (Asked(0.05, Sight(causal=True)), Asked(0.05, Sight(causal=True), left=mx.array([0, 4]))):
        assert_close(attention(q, keys, asked, how), in_float64(q, keys, asked), TOLERANCE[dtype])


def test_latents_tell_statistics_and_have_gradients():
    q, keys = latents(1, 5, 2, 13, 48, 24)
    asked, wanted = Asked(0.1, Sight(causal=True)), Wanted(((0, 4), (4, 13)), 2)
    want = float64.attention(f64(q), *map(f64, keys.plain()), asked, wanted)
    for name, value in vars(attention_statistics(q, keys, asked, wanted)).items():
        assert_close(value, want[name], 1e-5)

    def gradients(how):
        return mx.grad(lambda *x: (how(x[0], Latent(*x[1:]), asked) ** 2).sum(), argnums=(0, 1, 2))(q, *keys.arrays)

    for x, y in zip(gradients(attention), gradients(plain_attention), strict=True):
        assert_close(x, f64(y), 1e-5)


def test_absorbed_latents_give_what_expanded_keys_give():
    heads, rank, plain, turning, value, keys = 4, 48, 16, 8, 12, 9
    q, up = random(1, heads, 1, plain + turning), random(heads, plain + value, rank, seed=3)
    _, latent = latents(1, heads, 1, keys, rank, turning)
    to_key, to_value = up[:, :plain], up[:, plain:]
    absorbed = mx.concatenate([q[..., :plain] @ to_key, q[..., plain:]], axis=-1)
    found = attention(absorbed, latent, Asked(0.1)) @ to_value.swapaxes(1, 2)
    k, v = latent.latent @ to_key.swapaxes(1, 2), latent.latent @ to_value.swapaxes(1, 2)
    expanded = mx.concatenate([k, mx.broadcast_to(latent.turning, (1, heads, keys, turning))], axis=-1)
    assert_close(found, float64.attention(f64(q), f64(expanded), f64(v), Asked(0.1), Wanted())["out"], 1e-5)


def test_any_order_of_threads_gives_the_same_bits():
    found = set()
    for order in (0, 1, 2):
        with msl.using(order=order):
            each = [attention(*packed(SHAPE, 64, 64, 32, 4, mx.float32), Asked(0.3), Plan(4, 2, 3))]
            each.append(attention(*latents(2, 5, 2, 13, 48, 24), Asked(0.3), Plan(4, 2, 2)))
        found.add(tuple(map(bits, each)))
    assert len(found) == 1
