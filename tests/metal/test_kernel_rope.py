"""Rotary positions of Q and K in one launch, against float64 and against their twin."""

import float64
import mlx.core as mx
import msl
import numpy as np
import pytest
from float64 import TOLERANCE, assert_close, bits, f64, random

from mlx_tformer import kernels
from mlx_tformer.kernels.rope import chosen
from mlx_tformer.nn import Rope, Yarn

pytestmark = pytest.mark.usefixtures("on_trial")

# B, H, K, L, D, pairs, interleaved, amplitude
SHAPES = {
    "all features, one token": (2, 8, 8, 1, 32, 16, False, 1.0),
    "half of them, interleaved": (2, 3, 1, 13, 40, 10, True, 1.0),
    "grouped heads, amplitude": (1, 6, 2, 7, 24, 12, False, 1.2),
    "odd width": (1, 1, 1, 33, 9, 3, False, 0.9),
    "one pair": (3, 2, 2, 5, 8, 1, True, 1.3),
}
POSITIONS = {
    "an offset": lambda b, n: (3, 3 + np.arange(n)[None]),
    "an offset for each row": lambda b, n: (mx.arange(b) * 7, 7 * np.arange(b)[:, None] + np.arange(n)),
    "a position for each token": lambda b, n: (mx.arange(n)[None] * 1000, 1000 * np.arange(n)[None]),
    "padding before the text": lambda b, n: (-mx.arange(b), -np.arange(b)[:, None] + np.arange(n)),
}


def table(pairs: int) -> mx.array:
    return mx.array([1e4 ** -(i / pairs) for i in range(pairs)])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_turns_as_float64_does(shape, positions, dtype):
    b, heads, kv_heads, n, width, pairs, interleaved, amplitude = SHAPES[shape]
    q, k = random(b, heads, n, width, dtype=dtype), random(b, kv_heads, n, width, dtype=dtype, seed=1)
    given, at = POSITIONS[positions](b, n)
    at = np.broadcast_to(at[..., None], (b, n, pairs))
    found = kernels.rope(q, k, given, table(pairs), amplitude=amplitude, interleaved=interleaved)
    for x, y in zip((q, k), found, strict=True):
        assert_close(y, float64.rope(f64(x), at, f64(table(pairs)), amplitude, interleaved), TOLERANCE[dtype] / 4)


def test_late_positions_are_as_exact_as_early_ones():
    q, at = random(1, 1, 4, 16), mx.array([[131071, 99991, 5, 1048575]])
    found, _ = kernels.rope(q, q, at, table(8))
    want = float64.rope(f64(q), np.array(at)[..., None], f64(table(8)), 1.0, False)
    assert_close(found, want, 5e-7)
    assert np.abs(f64(kernels.plain_rope(q, q, at, table(8))[0]) - want).max() > 1e-3  # a float's angle is not


def test_each_pair_follows_its_own_axis():
    axes, at = [0, 0, 1, 1, 1, 2], mx.random.randint(0, 50, (3, 2, 5), key=mx.random.key(5))
    q, k = random(2, 3, 5, 16), random(2, 1, 5, 16, seed=1)
    each = np.array(at)[axes].transpose(1, 2, 0)  # (B, L, pairs)
    for how in (kernels.rope, kernels.plain_rope):
        for x, y in zip((q, k), how(q, k, at, table(6), axes=axes), strict=True):
            assert_close(y, float64.rope(f64(x), each, f64(table(6)), 1.0, False), 1e-5)


def test_memory_may_lie_as_it_likes():
    both = random(2, 7, 6, 16)
    q, k = (x.swapaxes(1, 2)[..., ::2] for x in mx.split(both, [4], axis=2))  # (B, 4, L, 8) and (B, 2, L, 8), no copies
    found = kernels.rope(q, k, 2, table(4))
    for x, y in zip(found, kernels.plain_rope(q, k, 2, table(4)), strict=True):
        assert_close(x, f64(y), 1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_twin_is_what_mlx_computes(interleaved):
    x = random(2, 4, 9, 24)
    found, _ = kernels.plain_rope(x, x, mx.array([3, 40]), table(8), interleaved=interleaved)
    want = mx.fast.rope(
        x, 16, traditional=interleaved, base=None, scale=1.0, offset=mx.array([3, 40]), freqs=1 / table(8)
    )
    assert_close(found, f64(want), 5e-6)


def test_any_order_of_threads_gives_the_same_bits():
    q, k = random(2, 5, 9, 24), random(2, 2, 9, 24, seed=1)
    found = set()
    for order in (0, 1, 2):
        with msl.using(order=order):
            found.add(tuple(map(bits, kernels.rope(q, k, 5, table(8)))))
    assert len(found) == 1


def test_its_gradient_is_that_of_the_twin():
    q, k, pull = random(1, 2, 5, 16), random(1, 1, 5, 16, seed=1), random(1, 2, 5, 16, seed=2)

    def pulled(how):
        def loss(q, k):
            turned_q, turned_k = how(q, k, 3, table(6), amplitude=1.1)
            return (turned_q * pull).sum() + (turned_k * turned_k * pull).sum()

        return mx.grad(loss, argnums=(0, 1))(q, k)

    for x, y in zip(pulled(kernels.rope), pulled(kernels.plain_rope), strict=True):
        assert_close(x, f64(y), 1e-5)


@pytest.mark.parametrize("where, length, plain, wanted", [
    ("metal", 1, True, True), ("metal", 8, True, True), ("metal", 9, True, False), ("metal", 9, False, True),
    ("metal", 4096, False, True), ("metal", 0, False, False), ("trial", 0, True, False),
    ("cpu", 1, True, False), ("cpu", 1, False, False), ("trial", 4096, True, True),
])  # fmt: skip
def test_it_is_chosen_where_it_saves_launches(where, length, plain, wanted):
    assert chosen(where, length, plain=plain) is wanted


@pytest.mark.parametrize("rope", [
    Rope(16), Rope(8, interleaved=True), Rope(7, 500.0), Rope(16, scaling=Yarn(4.0, 32)),
    Rope(8, scaling=Yarn(4.0, 32)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "offset",
    [0, 11, mx.array([4, -3]), mx.array([[0] * 6, [2, 2, 2, -3, -3, -3]])],
    ids=["start", "later", "padded", "several texts in a row"],
)
def test_positions_of_models_turn_by_it_as_without_it(rope, offset):
    q, k = random(2, 4, 6, 16), random(2, 2, 6, 16, seed=1)
    with kernels.made_by(msl.metal_kernel, "cpu"):
        wanted = rope.turn(q, k, offset, 17)
    for x, y in zip(rope.turn(q, k, offset, 17), wanted, strict=True):
        assert_close(x, f64(y), 5e-6)
