"""Attention in one pass over the keys, with and without statistics, against float64."""

import attention_cases as cases
import float64
import mlx.core as mx
import msl
import numpy as np
import pytest
from float64 import TOLERANCE, assert_close, bits, f64, random

from mlx_tformer import UsageError, kernels
from mlx_tformer.kernels import (
    Asked,
    Plain,
    Plan,
    Sight,
    Slopes,
    Wanted,
    attention,
    attention_statistics,
    plain_attention,
)

pytestmark = pytest.mark.usefixtures("on_trial")

WIDTH, VALUE = 40, 24
WANTED = Wanted(((0, 3), (2, 9), (5, 5), (8, 40)), 3)
CUT = Plan(rows=4, groups=2, splits=1)


def qkv(shape, width=WIDTH, value=VALUE, dtype=mx.float32):
    b, heads, kv_heads, queries, keys = shape
    sizes = [(b, heads, queries, width), (b, kv_heads, keys, width), (b, kv_heads, keys, value)]
    q, k, v = (random(*size, dtype=dtype, seed=i) for i, size in enumerate(sizes))
    return q, Plain(k, v)


def agree(found, wanted, dtype):
    """Every statistic is float64's. Where two keys come closer than the tolerance, either may be the peak."""
    tolerance = TOLERANCE[dtype]
    assert_close(found.out, wanted["out"], tolerance)
    for name in ("logsumexp", "entropy", "distance", "mass", "top_weights"):
        if getattr(found, name) is not None:
            assert_close(getattr(found, name), wanted[name], 1e-5)
    assert np.array_equal(np.array(found.peak), wanted["peak"])
    if found.top_keys is not None:
        assert np.array_equal(np.array(found.top_keys), wanted["top_keys"])


def check(shape, asked, dtype=mx.float32, how=CUT, wanted=WANTED, width=WIDTH, value=VALUE):
    q, keys = qkv(shape, width, value, dtype)
    want = float64.attention(f64(q), f64(keys.k), f64(keys.v), asked, wanted)
    found = attention_statistics(q, keys, asked, wanted, how)
    agree(found, want, dtype)
    assert_close(attention(q, keys, asked, how), want["out"], TOLERANCE[dtype])
    return found


def test_equal_weights_come_in_the_order_of_their_keys():
    q, k = mx.zeros((1, 1, 1, WIDTH)), mx.ones((1, 1, 11, WIDTH))
    found = attention_statistics(q, Plain(k, k[..., :VALUE]), Asked(1.0), Wanted((), 3), CUT)
    assert found.peak.item() == 0
    assert found.top_keys.tolist() == [[[[0, 1, 2]]]]


RULES = [(sight, []) for sight in cases.SIGHTS] + [("causal", [name]) for name in cases.OPTIONS]
RULES += [("everything", ["padding"]), ("around", ["padding", "sinks"]), ("chunk", ["padding"])]


@pytest.mark.parametrize(
    "sight, options", RULES, ids=lambda value: "+".join(value) if isinstance(value, list) else value
)
def test_each_rule_is_that_of_float64(sight, options):
    for shape in cases.SHAPES[:3]:
        check(shape, cases.asked(sight, options, shape))


@pytest.mark.parametrize("seed", range(24))
def test_rules_together_are_those_of_float64(seed):
    shape, sight, options = cases.drawn(seed)
    check(shape, cases.asked(sight, options, shape), list(TOLERANCE)[seed % 3])


@pytest.mark.parametrize("how", [None, Plan(1, 3, 1), Plan(8, 1, 1), Plan(2, 4, 3), Plan(4, 2, 7)], ids=str)
def test_it_does_not_matter_how_the_work_is_cut(how):
    shape = (2, 6, 2, 3, 17)
    check(shape, cases.asked("all", ["softcap", "alibi", "padding"], shape), how=how)
    check(shape, cases.asked("causal", ["sinks", "masks of rows"], shape), how=how)


WIDTHS = [*((width, width) for width in range(32, 257, 8)), (192, 128), (9, 13)]


@pytest.mark.parametrize("width, value", WIDTHS)
def test_heads_may_be_of_any_width(width, value):
    shape = (1, 4, 2, 2, 7)
    q, keys = qkv(shape, width, value, mx.float16)
    asked = Asked(width**-0.5, Sight(causal=True))
    want = float64.attention(f64(q), f64(keys.k), f64(keys.v), asked, Wanted())
    assert_close(attention(q, keys, asked), want["out"], TOLERANCE[mx.float16])


@pytest.mark.parametrize("top", [1, 8])
def test_the_largest_weights_come_in_order(top):
    shape = (1, 4, 2, 3, 5 if top == 8 else 30)  # fewer keys than are asked for, and more
    check(shape, cases.asked("causal", [], shape), wanted=Wanted((), top))


def test_a_query_that_sees_nothing_gives_zeros():
    mask = mx.array([[False] * 9, [True] * 9])
    q, keys = qkv((1, 2, 1, 2, 9))
    found = attention_statistics(q, keys, Asked(1.0, mask=mask), WANTED, CUT)
    assert not found.out[:, :, 0].any().item()
    assert found.logsumexp[0, 0, 0].item() == -np.inf
    assert found.peak[..., 0].tolist() == [[-1, -1]]
    assert np.isfinite(f64(found.out)).all()


def test_large_scores_neither_overflow_nor_vanish():
    q, keys = qkv((1, 2, 1, 2, 9))
    asked = Asked(300.0, Sight(causal=True))
    want = float64.attention(f64(q), f64(keys.k), f64(keys.v), asked, WANTED)
    assert_close(attention(q, keys, asked, CUT), want["out"], 1e-4)


def test_keys_may_be_a_stretch_of_a_longer_buffer():
    q, keys = qkv((2, 6, 2, 3, 17))
    buffers = [mx.pad(x, [(0, 0), (0, 0), (4, 9), (0, 0)], constant_values=np.nan)[:, :, 4:21] for x in keys.arrays]
    turned = mx.contiguous(q.swapaxes(1, 2)).swapaxes(1, 2)
    asked = Asked(0.3, Sight(causal=True))
    assert bits(attention(turned, Plain(*buffers), asked, CUT)) == bits(attention(q, keys, asked, CUT))


def test_any_order_of_threads_gives_the_same_bits():
    shape = (2, 6, 2, 3, 17)
    q, keys = qkv(shape)
    asked, found = cases.asked("window", ["sinks", "masks of rows"], shape), set()
    for order in (0, 1, 2):
        with msl.using(order=order):
            statistics = attention_statistics(q, keys, asked, WANTED, CUT)
            split = attention(q, keys, asked, Plan(4, 2, 3))
        found.add((*(bits(value) for value in vars(statistics).values()), bits(split)))
    assert len(found) == 1


def test_its_gradient_is_that_of_the_twin():
    shape = (1, 4, 2, 3, 7)
    q, keys = qkv(shape)
    asked, pull = cases.asked("causal", ["sinks", "buckets", "softcap"], shape), random(1, 4, 3, VALUE, seed=5)

    def gradients(how):
        def loss(q, k, v, table, sinks):
            return (how(q, Plain(k, v), asked.of([table, sinks])) * pull).sum()

        return mx.grad(loss, argnums=range(5))(q, keys.k, keys.v, *asked.arrays)

    for x, y in zip(gradients(attention), gradients(plain_attention), strict=True):
        assert_close(x, f64(y), 1e-5)


@pytest.mark.parametrize("case", range(12))
def test_the_twin_is_float64s(case):
    shape, sight, options = cases.drawn(case)
    q, keys = qkv(shape)
    asked = cases.asked(sight, options, shape)
    want = float64.attention(f64(q), f64(keys.k), f64(keys.v), asked, WANTED)
    found = kernels.plain_statistics(q, keys, asked, WANTED)
    for name, value in vars(found).items():
        assert_close(value, want[name], 1e-5)
    assert_close(plain_attention(q, keys, asked), want["out"], 1e-5)


@pytest.mark.parametrize("shape, asked, wanted, complaint", [
    ((1, 4, 2, 9, 4), Asked(1.0, Sight(causal=True)), WANTED, "q: found 9 queries, expected 4 or fewer"),
    ((1, 4, 2, 9, 4), Asked(1.0, distances=Slopes((1.0,) * 4)), WANTED, "q: found 9 queries, expected 4 or fewer"),
    ((1, 4, 2, 0, 4), Asked(1.0), WANTED, "q: found 0 queries and 4 keys, expected some of each"),
    ((1, 5, 2, 1, 4), Asked(1.0), WANTED, "heads: found 5, expected a multiple of the 2 key heads"),
    ((1, 4, 2, 1, 4), Asked(1.0), Wanted((), 9), "top: found 9, expected 8 or fewer"),
    ((1, 4, 2, 1, 4), Asked(1.0), Wanted(((0, 1),) * 33), "spans: found 33, expected 32 or fewer"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(shape, asked, wanted, complaint):
    q, keys = qkv(shape)
    with pytest.raises(UsageError, match=complaint):
        attention_statistics(q, keys, asked, wanted)


def test_more_queries_than_keys_are_fine_where_places_do_not_matter():
    shape = (1, 4, 2, 9, 4)
    check(shape, cases.asked("everything", ["masked keys"], shape))
