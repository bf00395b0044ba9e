"""The router in one launch, against float64, its twin and the router of the models."""

import mlx.core as mx
import msl
import numpy as np
import pytest
from float64 import assert_close, bits, f64, random

from mlx_tformer import kernels
from mlx_tformer.kernels import Rules, plain_route, route
from mlx_tformer.kernels.router import chosen_route
from mlx_tformer.nn import Groups, Router

pytestmark = pytest.mark.usefixtures("on_trial")

CASES = {
    "softmax first": (5, 8, Rules(2), False),
    "softmax first, then summing to one": (1, 60, Rules(4, normalise=True), False),
    "softmax of the chosen": (7, 32, Rules(4, "none", "softmax"), False),
    "sigmoid of the chosen": (3, 16, Rules(1, "none", "sigmoid"), False),
    "sigmoid of the chosen, summing to one": (3, 16, Rules(2, "none", "sigmoid", normalise=True), False),
    "groups by their best": (4, 160, Rules(6, scale=16.0, groups=(8, 3, 1)), False),
    "correction and groups by two": (9, 256, Rules(8, "sigmoid", normalise=True, scale=2.5, groups=(8, 4, 2)), True),
    "correction": (3, 33, Rules(3, "sigmoid", normalise=True), True),
    "everyone": (2, 6, Rules(6, normalise=True), True),
    "groups by three": (3, 12, Rules(3, "softmax", groups=(4, 2, 3)), True),
    "groups wider than a simdgroup": (6, 144, Rules(5, "none", groups=(2, 1, 3)), False),
}


def wanted(logits, rules, correction):
    """Weights and numbers, in float64."""
    scores = {
        "softmax": lambda x: (
            np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
        ),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "none": lambda x: x,
    }
    found = scores[rules.score](logits)
    choice = found + correction
    count, keep, best = rules.groups
    groups = choice.reshape(len(logits), count, -1)
    worth = np.sort(groups, axis=-1)[..., -best:].sum(-1)
    rank = np.argsort(np.argsort(-worth, axis=-1, kind="stable"), axis=-1)
    choice = np.where((rank < keep)[..., None], groups, -np.inf).reshape(choice.shape)
    chosen = np.argsort(-choice, axis=-1, kind="stable")[:, : rules.top]
    weights = scores[rules.after](np.take_along_axis(found, chosen, axis=-1))
    return (weights / weights.sum(-1, keepdims=True) if rules.normalise else weights) * rules.scale, chosen


def given(case):
    tokens, experts, rules, corrected = CASES[case]
    return random(tokens, experts) * 2, rules, random(experts, seed=3) * 0.3 if corrected else None


@pytest.mark.parametrize("case", CASES)
def test_it_routes_as_float64_does(case):
    logits, rules, correction = given(case)
    weights, chosen = wanted(f64(logits), rules, 0.0 if correction is None else f64(correction))
    for how in (route, plain_route):
        found = how(logits, rules, correction)
        assert np.array_equal(np.array(found[1]), chosen)
        assert_close(found[0], weights, 1e-5)


@pytest.mark.parametrize("rules, experts", [
    (Rules(4, "none", groups=(4, 2, 2)), 8), (Rules(5, "none", groups=(3, 1, 3)), 15),
    (Rules(6, "none", groups=(2, 1, 3)), 144), (Rules(7, "none"), 70),
], ids=str)  # fmt: skip
def test_equals_are_told_apart_by_their_numbers_alone(rules, experts):
    logits = mx.round(random(40, experts))  # few different numbers, so that most are equal to others
    weights, chosen = wanted(f64(logits), rules, 0.0)
    found = route(logits, rules)
    assert np.array_equal(np.array(found[1]), chosen)
    assert_close(found[0], weights, 1e-6)


@pytest.mark.parametrize("experts", [31, 32, 64, 65])
def test_of_equals_the_first_are_chosen(experts):
    weights, chosen = route(mx.zeros((2, experts)), Rules(3, groups=(1, 1, 1)))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert_close(weights, np.full((2, 3), 1 / experts), 1e-6)


def test_of_equal_groups_the_first_are_kept():
    logits = mx.array([[1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 2.0, -1.0]])
    for how in (route, plain_route):
        assert how(logits, Rules(4, "none", groups=(4, 2, 2)))[1].tolist() == [[0, 2, 1, 3]]


def test_equals_that_one_lane_holds_both_count_for_their_group():
    logits = mx.zeros((1, 144))
    logits[0, 0] = logits[0, 32] = 1.0  # together more than 1.5
    logits[0, 100] = 1.5
    for how in (route, plain_route):
        assert how(logits, Rules(2, "none", groups=(2, 1, 2)))[1].tolist() == [[0, 32]]


def test_any_order_of_threads_gives_the_same_bits():
    logits, rules, correction = given("correction and groups by two")
    found = set()
    for order in (0, 1, 2):
        with msl.using(order=order):
            found.add(tuple(map(bits, route(logits, rules, correction))))
    assert len(found) == 1


@pytest.mark.parametrize("case", ["softmax first, then summing to one", "softmax of the chosen", "correction"])
def test_its_gradient_is_that_of_the_twin(case):
    logits, rules, correction = given(case)
    pull = random(*logits.shape[:1], rules.top, seed=9)

    def gradient(how):
        return mx.grad(lambda x: (how(x, rules, correction)[0] * pull).sum())(logits)

    assert mx.abs(gradient(route)).max().item() > 0
    assert_close(gradient(route), f64(gradient(plain_route)), 1e-5)


@pytest.mark.parametrize("settings", [
    {"normalise": True}, {"score": "none", "after": "softmax", "bias": True}, {"score": "sigmoid", "correction": True},
    {"score": "sigmoid", "correction": True, "groups": Groups(4, 2, 2), "scale": 2.5}, {"groups": Groups(4, 1, 1)},
], ids=str)  # fmt: skip
def test_routers_of_models_choose_by_it_as_without_it(settings):
    router = Router(24, 16, 3, **settings)
    for i, name in enumerate(router.parameters()):
        router[name] = random(*router[name].shape, seed=i)
    x, found = random(7, 24, seed=8), []
    for place in ("trial", "cpu"):
        with kernels.made_by(msl.metal_kernel, place):
            weights, chosen = router(x)
        order = mx.argsort(chosen, axis=-1)
        found.append([f64(mx.take_along_axis(y, order, axis=-1)) for y in (weights, chosen)])
    assert np.array_equal(found[0][1], found[1][1])
    assert np.abs(found[0][0] - found[1][0]).max() < 2e-6


@pytest.mark.parametrize("where, tokens, experts, rules, answer", [
    ("metal", 1, 512, Rules(8), True), ("metal", 0, 512, Rules(8), False), ("metal", 9, 513, Rules(8), False),
    ("metal", 9, 64, Rules(33), False),
    ("metal", 9, 64, Rules(32), True), ("metal", 1, 256, Rules(8, groups=(64, 4, 2)), False),
    ("cpu", 1, 8, Rules(2), False),
    ("trial", 1, 8, Rules(2), True), ("metal", 1, 16, Rules(2, groups=(8, 4, 3)), False),
])  # fmt: skip
def test_it_is_chosen_on_metal_within_its_bounds(where, tokens, experts, rules, answer):
    assert chosen_route(where, tokens, experts, rules) is answer
