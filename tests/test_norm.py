"""The norms that families have, against their formulas in float64."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import gap, shaken
from reference import Array, f64

from mlx_tformer.nn import AllHeads, EachHead, Identity, LayerNorm, RMSNorm, ShiftedRMSNorm, UnitRMSNorm

X = 3 * mx.random.normal((2, 5, 12), key=mx.random.key(0)) + 1
HEADS = 3 * mx.random.normal((2, 3, 5, 4), key=mx.random.key(1)) + 1  # (B, H, L, D)


def rms(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def standard(x: Array, eps: float) -> Array:
    """Mean 0 and variance 1."""
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_and_layer_norm_are_their_formulas(eps: float) -> None:
    plain, layer = shaken(RMSNorm(12, eps)), shaken(LayerNorm(12, eps))
    assert gap(plain(X), rms(f64(X), eps) * f64(plain.weight)) < 2e-6
    assert gap(layer(X), standard(f64(X), eps) * f64(layer.weight) + f64(layer.bias)) < 2e-6
    bare = shaken(LayerNorm(12, eps, bias=False))
    assert "bias" not in bare and gap(bare(X), standard(f64(X), eps) * f64(bare.weight)) < 2e-6


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_a_shifted_norm_multiplies_by_one_more_than_its_weight(eps: float) -> None:
    norm = shaken(ShiftedRMSNorm(12, eps))
    assert gap(norm(X), rms(f64(X), eps) * (1 + f64(norm.weight))) < 2e-6
    assert gap(ShiftedRMSNorm(12, eps)(X), RMSNorm(12, eps)(X)) == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_shifted_norm_adds_the_one_before_it_rounds(dtype: mx.Dtype) -> None:
    norm, x = shaken(ShiftedRMSNorm(12)), X.astype(dtype)
    norm.set_dtype(dtype)
    found = norm(x)
    assert found.dtype == dtype
    wide = rms(f64(x), norm.eps) * (1 + f64(norm.weight))
    assert (np.abs(f64(found) - wide) <= 0.51 * mx.finfo(dtype).eps * np.abs(wide)).all()


def test_a_shifted_norm_follows_its_weight() -> None:
    norm = shaken(ShiftedRMSNorm(12))
    before, weight = norm(X), norm.weight
    assert [*norm.parameters()] == ["weight"]
    norm.weight = 2 * weight
    assert gap(norm(X), before) > 0.01
    norm.update({"weight": weight})
    assert gap(norm(X), before) == 0

    def loss(weights: dict[str, Array]) -> Array:
        norm.update(weights)
        return norm(X).square().sum()

    gradient = mx.grad(loss)({"weight": weight})["weight"]
    step = mx.zeros_like(weight)
    step[3] = 1e-2
    moved = [loss({"weight": weight + sign * step}) for sign in (1, -1)]
    assert gradient[3].item() == pytest.approx((moved[0] - moved[1]).item() / 2e-2, rel=1e-2)
    norm.update({"weight": weight})
    assert gap(mx.compile(norm)(X), before) < 1e-5 and gap(norm(X), before) == 0


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_a_unit_norm_has_no_weights(eps: float) -> None:
    norm = UnitRMSNorm(eps)
    assert not norm.parameters()
    assert gap(norm(HEADS), rms(f64(HEADS), eps)) < 2e-6


@pytest.mark.parametrize("norm", [RMSNorm(12, 0.1), LayerNorm(12, 0.1)], ids=["rms", "layer"])
def test_a_norm_over_all_heads_sees_their_features_as_one_row(norm: nn.Module) -> None:
    norm = shaken(norm)
    flat = HEADS.swapaxes(1, 2).reshape(2, 5, 12)  # head by head
    wanted = norm(flat).reshape(2, 5, 3, 4).swapaxes(1, 2)
    assert gap(AllHeads(norm)(HEADS), wanted) == 0
    assert gap(AllHeads(RMSNorm(12))(HEADS), RMSNorm(4)(HEADS)) > 0.1


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_each_head_has_weights_of_its_own(eps: float) -> None:
    norm = EachHead(3, 4, eps)
    norm.weight = mx.random.normal((3, 4), key=mx.random.key(2))
    found = norm(HEADS)
    for head in range(3):
        wanted = standard(f64(HEADS[:, head]), eps) * f64(norm.weight)[head]
        assert gap(found[:, head], wanted) < 2e-6


NORMS = {
    "rms": (RMSNorm(12), X),
    "layer": (LayerNorm(12), X),
    "shifted": (ShiftedRMSNorm(12), X),
    "unit": (UnitRMSNorm(), X),
    "all heads": (AllHeads(RMSNorm(12)), HEADS),
    "each head": (EachHead(3, 4), HEADS),
}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_half_precision_is_rounded_once(name: str, dtype: mx.Dtype) -> None:
    """Statistics in float32: the square of a large value does not overflow float16."""
    norm, x = NORMS[name]
    norm = shaken(norm)
    norm.set_dtype(dtype)
    for scale in (1.0, 1000.0):
        small = (scale * x).astype(dtype)
        norm.set_dtype(mx.float32)
        wanted = norm(small.astype(mx.float32))
        norm.set_dtype(dtype)
        found = norm(small)
        assert found.dtype == dtype
        assert gap(found, wanted) < {mx.float16: 4e-3, mx.bfloat16: 4e-2}[dtype]


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_zeros_is_not_nan(name: str) -> None:
    norm, x = NORMS[name]
    assert mx.isfinite(norm(mx.zeros_like(x))).all().item()


def test_a_slot_without_a_norm_changes_nothing() -> None:
    assert Identity()(X) is X
