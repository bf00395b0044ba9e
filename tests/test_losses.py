"""Losses against their definitions in float64, and their gradients against finite differences of these.

The definitions are numpy's: MLX has float64, but its exponential is as precise as float32 alone.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from helpers import gap

from mlx_tformer.training import (
    cross_entropy,
    expert_load,
    load_balancing_loss,
    next_token_loss,
    router_z_loss,
    token_losses,
)

rng = np.random.default_rng(3)
LOGITS, IDS, MASK = rng.normal(size=(2, 5, 7)) * 2, rng.integers(0, 7, (2, 5)), rng.random((2, 5)) < 0.6
WEIGHTS, CHOSEN = rng.random((2, 5)), np.argsort(-LOGITS.reshape(10, 7), axis=1)[:, :2]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def entropies(x: np.ndarray, ids: np.ndarray = IDS, smoothing: float = 0.0) -> np.ndarray:
    """The cross entropy of each id."""
    return -(((1 - smoothing) * np.eye(7)[ids] + smoothing / 7) * np.log(softmax(x))).sum(axis=-1)


def balance(x: np.ndarray, chosen: np.ndarray) -> float:
    """E · Σ f p of rows of logits, choice by choice."""
    p = softmax(x).mean(axis=0)
    return 7 * sum((chosen[:, k] == i).mean() * p[i] for i in range(7) for k in range(chosen.shape[1]))


def z_loss(x: np.ndarray) -> float:
    return (np.log(np.exp(x).sum(axis=-1)) ** 2).mean()


Loss = Callable[[mx.array], mx.array]
Definition = Callable[[np.ndarray], float]
REAL, KEPT = mx.array(MASK.reshape(-1)), MASK.reshape(-1)
LOSSES: dict[str, tuple[Loss, Definition]] = {
    "cross entropy": (lambda x: cross_entropy(x, mx.array(IDS)), lambda x: entropies(x).mean()),
    "masked": (
        lambda x: cross_entropy(x, mx.array(IDS), loss_mask=mx.array(MASK)),
        lambda x: entropies(x)[MASK].mean(),
    ),
    "weighed": (
        lambda x: cross_entropy(x, mx.array(IDS), loss_mask=mx.array(WEIGHTS)),
        lambda x: (entropies(x) * WEIGHTS).sum() / WEIGHTS.sum(),
    ),
    "smoothed": (
        lambda x: cross_entropy(x, mx.array(IDS), smoothing=0.1),
        lambda x: entropies(x, smoothing=0.1).mean(),
    ),
    "next token": (lambda x: next_token_loss(x, mx.array(IDS)), lambda x: entropies(x[:, :-1], IDS[:, 1:]).mean()),
    "next token, masked": (
        lambda x: next_token_loss(x, mx.array(IDS), loss_mask=mx.array(MASK), smoothing=0.2),
        lambda x: entropies(x[:, :-1], IDS[:, 1:], 0.2)[MASK[:, 1:]].mean(),
    ),
    "balance, top 1": (
        lambda x: load_balancing_loss(x.flatten(0, 1), mx.array(CHOSEN[:, :1])),
        lambda x: balance(x.reshape(10, 7), CHOSEN[:, :1]),
    ),
    "balance, top 2": (
        lambda x: load_balancing_loss(x.flatten(0, 1), mx.array(CHOSEN)),
        lambda x: balance(x.reshape(10, 7), CHOSEN),
    ),
    "balance, padded": (
        lambda x: load_balancing_loss(x.flatten(0, 1), mx.array(CHOSEN), real=REAL),
        lambda x: balance(x.reshape(10, 7)[KEPT], CHOSEN[KEPT]),
    ),
    "z": (lambda x: router_z_loss(x.flatten(0, 1)), lambda x: z_loss(x.reshape(10, 7))),
    "z, padded": (lambda x: router_z_loss(x.flatten(0, 1), real=REAL), lambda x: z_loss(x.reshape(10, 7)[KEPT])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_definition(name: str) -> None:
    loss, definition = LOSSES[name]
    assert loss(mx.array(LOGITS)).item() == pytest.approx(definition(LOGITS), rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_what_finite_differences_of_the_definition_say(name: str) -> None:
    (loss, definition), step = LOSSES[name], 1e-5
    slopes = mx.grad(loss)(mx.array(LOGITS))
    for _ in range(5):
        direction = rng.normal(size=LOGITS.shape)
        wanted = (definition(LOGITS + step * direction) - definition(LOGITS - step * direction)) / (2 * step)
        found = (np.array(slopes, np.float64) * direction).sum()
        assert abs(found - wanted) < 1e-6 * np.abs(np.array(slopes) * direction).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_token_has_its_own_loss(smoothing: float) -> None:
    losses = token_losses(mx.array(LOGITS), mx.array(IDS), smoothing=smoothing)
    assert losses.dtype == mx.float32 and gap(losses, entropies(LOGITS, smoothing=smoothing)) < 2e-6


def test_what_is_masked_may_be_anything_and_leaves_no_trace() -> None:
    ids, logits = np.where(MASK, IDS, -100), np.where(MASK[..., None], LOGITS, np.nan)

    def loss(x: mx.array) -> mx.array:
        return cross_entropy(x, mx.array(ids), loss_mask=mx.array(MASK))

    assert loss(mx.array(logits)).item() == pytest.approx(entropies(LOGITS)[MASK].mean(), rel=1e-6)
    assert not np.array(mx.grad(loss)(mx.array(LOGITS)))[~MASK].any()


def test_a_mask_that_lets_nothing_through_costs_nothing() -> None:
    nothing = mx.zeros((2, 5))
    found, slope = mx.value_and_grad(lambda x: cross_entropy(x, mx.array(IDS), loss_mask=nothing))(mx.array(LOGITS))
    assert found.item() == 0 and not mx.any(slope).item()


def test_half_precision_loses_nothing_in_the_loss() -> None:
    half = mx.array(LOGITS).astype(mx.float16)
    assert token_losses(half, mx.array(IDS)).dtype == mx.float32
    assert gap(token_losses(half, mx.array(IDS)), token_losses(half.astype(mx.float32), mx.array(IDS))) == 0


@pytest.mark.parametrize("top", [1, 2])
def test_even_load_costs_as_much_as_experts_are_chosen_and_uneven_load_more(top: int) -> None:
    even = mx.array([[(i + k) % 4 for k in range(top)] for i in range(8)])
    assert load_balancing_loss(mx.zeros((8, 4)), even).item() == pytest.approx(top)
    logits = mx.array([[3.0, 2, 0, 0]] * 8)
    assert load_balancing_loss(logits, mx.array([[0, 1][:top]] * 8)).item() > 1.5 * top


def test_load_is_the_share_of_the_choices_that_are_no_padding() -> None:
    wanted = np.bincount(CHOSEN[KEPT].ravel(), minlength=7) / CHOSEN[KEPT].size
    assert gap(expert_load(mx.array(CHOSEN), 7, real=REAL), wanted) < 1e-7
