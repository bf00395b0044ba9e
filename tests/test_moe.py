"""Mixtures of experts against routing and experts written out in float64, one token at a time."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import reference
from helpers import gap, golden, ids_of, leaves, seen, shaken
from hypothesis import given
from hypothesis import strategies as st
from reference import Array, f64

import mlx_tformer as mt
from mlx_tformer.families.llama4_text import WeighedBefore
from mlx_tformer.nn import LM, ExpertLinear, Experts, GatedMlp, Groups, Linear, Mixture, Router, moe
from mlx_tformer.nn.moe import QuantizedExpertLinear

DIM, HIDDEN = 8, 12
X = mx.random.normal((2, 9, DIM), key=mx.random.key(0))
TOKENS = X.flatten(0, 1)

# --- routing ---


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()


SCORES = {"softmax": softmax, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "none": lambda x: x}


def in_groups(choice: Array, groups: Groups) -> Array:
    """The scores that a token may choose from: those of its best groups."""
    parts = choice.reshape(groups.count, -1)
    worth = np.sort(parts, axis=1)[:, -groups.best :].sum(axis=1)
    kept = np.argsort(-worth)[: groups.keep]
    return np.where(np.isin(np.arange(groups.count), kept)[:, None], parts, -np.inf).reshape(-1)


def route(router: Router, token: Array) -> dict[int, float]:
    """The experts of one token and their weights."""
    logits = f64(router.weight) @ token + (f64(router.bias) if router.has_bias else 0)
    scores = SCORES[router.score](logits)
    choice = scores + (f64(router.correction) if router.has_correction else 0)
    choice = choice if router.groups is None else in_groups(choice, router.groups)
    chosen = np.argsort(-choice)[: router.top]
    weights = SCORES[router.after](scores[chosen])
    weights = weights / weights.sum() if router.normalise else weights
    return {int(expert): float(weight) for expert, weight in zip(chosen, weights * router.scale, strict=True)}


ROUTERS: dict[str, dict[str, Any]] = {
    "a softmax": {},
    "a softmax, normalised": {"normalise": True},
    "a softmax, scaled": {"scale": 2.5},
    "a softmax over the chosen": {"score": "none", "after": "softmax"},
    "a softmax over the chosen, biased": {"score": "none", "after": "softmax", "bias": True},
    "a sigmoid": {"score": "sigmoid"},
    "a sigmoid of the chosen": {"score": "none", "after": "sigmoid"},
    "a sigmoid, corrected": {"score": "sigmoid", "correction": True, "normalise": True, "scale": 1.5},
    "the best of each group": {"groups": Groups(4, 2, best=1)},
    "the two best of each group": {
        "score": "sigmoid",
        "correction": True,
        "groups": Groups(3, 2, best=2),
        "normalise": True,
        "scale": 2.5,
    },
    "one group": {"groups": Groups(1, 1, best=2)},
}


@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_and_weighs_as_written_out(name: str, top: int) -> None:
    router = shaken(Router(DIM, 12, top, **ROUTERS[name]))
    weights, chosen = router(TOKENS)
    assert weights.shape == chosen.shape == (18, top) and weights.dtype == mx.float32
    for token, w, c in zip(f64(TOKENS), np.array(weights), np.array(chosen), strict=True):
        wanted = route(router, token)
        assert set(c.tolist()) == wanted.keys()
        assert w == pytest.approx([wanted[int(expert)] for expert in c], rel=1e-5)


def test_a_correction_selects_experts_and_does_not_weigh_them() -> None:
    router = shaken(Router(DIM, 6, 2, score="sigmoid", correction=True))
    router.correction = mx.array([0, 0, 9, 0, 8, 0], dtype=mx.float32)
    weights, chosen = router(TOKENS)
    assert np.sort(np.array(chosen), axis=1).tolist() == [[2, 4]] * 18
    scores = mx.sigmoid(TOKENS @ router.weight.T)
    assert gap(weights, mx.take_along_axis(scores, chosen, axis=1)) < 1e-6


def test_experts_of_a_group_that_is_not_kept_are_never_chosen_however_good() -> None:
    groups = Groups(2, 1, best=2)
    scores = mx.array([[9.0, 0.0, 0.0, 5.0, 5.0, 0.0]])  # the best expert stands alone, two good ones together
    assert groups(scores).tolist() == [[-np.inf, -np.inf, -np.inf, 5.0, 5.0, 0.0]]
    assert Groups(2, 1, best=1)(scores).tolist() == [[9.0, 0.0, 0.0, -np.inf, -np.inf, -np.inf]]


@pytest.mark.parametrize("groups", [None, Groups(4, 2, best=2)])
def test_ties_choose_as_many_experts_as_ever_and_none_twice(groups: Groups | None) -> None:
    router = Router(DIM, 8, 3, normalise=True, groups=groups)  # all weights are zero
    weights, chosen = router(TOKENS)
    assert all(len(set(row)) == 3 for row in np.array(chosen).tolist())
    assert gap(weights, np.full((18, 3), 1 / 3)) < 1e-6


@given(st.integers(1, 6), st.booleans(), st.floats(0.1, 4))
def test_normalised_weights_sum_to_the_scale(top: int, grouped: bool, scale: float) -> None:
    groups = Groups(2, 1, best=1) if grouped else None
    router = shaken(Router(DIM, 12, top, score="sigmoid", normalise=True, scale=scale, groups=groups))
    weights, chosen = router(TOKENS)
    assert gap(weights.sum(axis=1), np.full(18, scale)) < 1e-5
    if grouped:
        assert len({expert // 6 for expert in np.array(chosen)[0].tolist()}) == 1


def test_routing_is_done_in_float32_whatever_the_weights_are() -> None:
    router = shaken(Router(DIM, 6, 2, normalise=True, scale=1.5))
    router.weight = router.weight.astype(mx.bfloat16)
    half = router(TOKENS.astype(mx.bfloat16))[0]
    assert half.dtype == mx.float32
    assert gap(half, router(TOKENS.astype(mx.bfloat16).astype(mx.float32))[0]) == 0


# --- experts ---


def expert(experts: Experts, number: int, token: Array) -> Array:
    """What one expert says to one token."""
    both = f64(experts.gate_up.weight)[number] @ token
    both = both + (f64(experts.gate_up.bias)[number] if experts.gate_up.has_bias else 0)
    gate, up = both[: experts.hidden], both[experts.hidden :]
    hidden = reference.activation("silu", gate) * up
    return f64(experts.down.weight)[number] @ hidden + (f64(experts.down.bias)[number] if experts.down.has_bias else 0)


def mixed(mixture: Mixture, token: Array) -> Array:
    """What a mixture says to one token."""
    parts = route(mixture.router, token).items()
    return np.sum([weight * expert(mixture.experts, number, token) for number, weight in parts], axis=0)


def mixture_of(count: int = 5, top: int = 2, *, hidden: int = HIDDEN, bias: bool = False) -> Mixture:
    router, experts = Router(DIM, count, top, normalise=True), Experts(DIM, hidden, count, bias=bias)
    return shaken(Mixture(router, experts))


@pytest.mark.parametrize("tokens", [1, 2, 9, 18])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("count", "top", "hidden"), [(5, 2, 12), (3, 3, 4), (8, 1, 20), (1, 1, 12)])
def test_a_mixture_is_the_weighted_sum_of_its_experts(
    tokens: int, bias: bool, count: int, top: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered and sorted; experts narrower and wider than the model."""
    mixture, x = mixture_of(count, top, hidden=hidden, bias=bias), TOKENS[:tokens][None]
    wanted = np.stack([mixed(mixture, token) for token in f64(x[0])])[None]
    for few in (0, 10**6):
        monkeypatch.setattr(moe, "SORTED_FROM", few)
        assert gap(mixture(x), wanted) < 1e-5


def test_a_batch_is_its_rows() -> None:
    mixture = mixture_of()
    assert gap(mixture(X), mx.concatenate([mixture(X[:1]), mixture(X[1:])])) < 1e-6
    assert mixture(X).shape == X.shape


@pytest.mark.parametrize("few", [0, 10**6])
def test_what_each_expert_says_comes_back_in_the_order_of_the_router(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "SORTED_FROM", few)
    mixture = mixture_of(5, 3)
    with seen("*") as found:
        mixture(X)
    chosen, said = np.array(found[".chosen"]), found[".said"]
    wanted = [[expert(mixture.experts, n, x) for n in row] for row, x in zip(chosen, f64(TOKENS), strict=True)]
    assert gap(said, np.array(wanted)) < 1e-5


@pytest.mark.parametrize("few", [0, 10**6])
def test_only_the_chosen_experts_are_looked_at(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others hold nothing but NaN."""
    monkeypatch.setattr(moe, "SORTED_FROM", few)
    mixture, x = mixture_of(8, 2, bias=True), X[:, :1]
    wanted, chosen = mixture(x), mixture.router(x.flatten(0, 1))[1]
    used = mx.array([n in np.array(chosen) for n in range(8)])
    assert not used.all().item()
    for linear in (mixture.experts.gate_up, mixture.experts.down):
        linear.weight = mx.where(used[:, None, None], linear.weight, mx.nan)
        linear.bias = mx.where(used[:, None], linear.bias, mx.nan)
    assert gap(mixture(x), wanted) == 0


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_added_and_weighed_by_their_gate_alone(gated: bool) -> None:
    router, experts, shared = Router(DIM, 5, 2, scale=3.0), Experts(DIM, HIDDEN, 5), GatedMlp(DIM, 20)
    gate = Linear(DIM, 1, bias=False) if gated else None
    mixture = shaken(Mixture(router, experts, shared=shared, shared_gate=gate))
    weight = mx.sigmoid(gate(X)) if gate is not None else 1.0
    assert gap(mixture(X), Mixture(router, experts)(X) + weight * shared(X)) < 1e-5


def test_llama_4_weighs_what_goes_into_an_expert() -> None:
    router, experts = Router(DIM, 5, 2, score="none", after="sigmoid"), Experts(DIM, HIDDEN, 5)
    mixture = shaken(WeighedBefore(router, experts))
    wanted = [
        np.sum([expert(experts, n, weight * token) for n, weight in route(router, token).items()], axis=0)
        for token in f64(TOKENS)
    ]
    assert gap(mixture(X).flatten(0, 1), np.array(wanted)) < 1e-5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("few", [0, 10**6])
def test_half_precision_stays_what_it_is(dtype: mx.Dtype, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "SORTED_FROM", few)
    mixture = mixture_of(bias=True)
    mixture.set_dtype(dtype)
    found, wanted = mixture(X.astype(dtype)), np.stack([mixed(mixture, t) for t in f64(TOKENS.astype(dtype))])
    assert found.dtype == dtype
    assert gap(found.flatten(0, 1), wanted) < {mx.float16: 0.02, mx.bfloat16: 0.15}[dtype]


# --- packed weights ---


@pytest.mark.parametrize("few", [0, 10**6])
@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    [("affine", 4, 32), ("affine", 8, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)],
)
def test_packed_experts_compute_with_what_they_were_rounded_to(
    mode: str, bits: int, group: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "SORTED_FROM", few)
    experts = shaken(Experts(64, 64, 4, bias=True))
    packed, rounded = copy.copy(experts), copy.copy(experts)
    for name in ("gate_up", "down"):
        packed[name] = experts[name].to_quantized(group, bits, mode)
        assert isinstance(packed[name], QuantizedExpertLinear)
        rounded[name] = copy.copy(experts[name])
        parts = (packed[name].weight, packed[name].scales, packed[name].get("biases"))
        rounded[name].weight = mx.dequantize(*parts, group, bits, mode)
    x, chosen = mx.random.normal((7, 64)), mx.array([[0, 3], [1, 2], [3, 1], [2, 2], [0, 1], [3, 0], [1, 1]])
    assert gap(packed(x, chosen), rounded(x, chosen)) < 1e-3
    assert gap(packed(x, chosen), experts(x, chosen)) > 1e-3


# --- a dense model as a mixture ---


def copies(linear: nn.Linear | nn.QuantizedLinear, count: int) -> ExpertLinear:
    """`count` experts that are all this matrix, packed if it is."""
    if isinstance(linear, nn.QuantizedLinear):
        how = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
        stacked: ExpertLinear = QuantizedExpertLinear(count, 1, 1, False, **how)
    else:
        stacked = ExpertLinear(count, 1, 1)
    for name, value in leaves(linear).items():
        stacked[name] = mx.broadcast_to(value, (count, *value.shape))
    return stacked


def as_mixture(model: LM, count: int = 4, top: int = 2) -> LM:
    """The same model with `count` copies of each MLP as experts, behind routers of random weights."""
    model = copy.copy(model)
    model.decoder = copy.copy(model.decoder)
    model.decoder.layers = [copy.copy(layer) for layer in model.decoder.layers]
    for number, layer in enumerate(model.decoder.layers):
        mlp, dim = layer.mlp.op, layer.mlp.pre.weight.size
        experts = Experts(dim, 1, count, act=mlp.act)
        experts.gate_up, experts.down = copies(mlp.gate_up, count), copies(mlp.down, count)
        router = Router(dim, count, top, normalise=True)
        router.weight = mx.random.normal(router.weight.shape, key=mx.random.key(number))
        layer.mlp = copy.copy(layer.mlp)
        layer.mlp.op = Mixture(router, experts)
    return model


@pytest.mark.parametrize("few", [0, 10**6])
@pytest.mark.parametrize("case", ["llama-mha", "qwen3"])
def test_copies_of_one_mlp_as_experts_are_that_mlp(case: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "SORTED_FROM", few)
    model, ids = golden(case), ids_of(case)
    assert gap(as_mixture(model)(ids), model(ids)) < 5e-5
    assert "mlp.op.experts" not in " ".join(leaves(model))


def test_smollm2_turned_into_a_mixture_is_smollm2(smollm2: mt.LanguageModel) -> None:
    ids = mx.array([[504, 3575, 282, 4649, 314, 7042, 30]])
    found, wanted = as_mixture(smollm2.model)(ids), smollm2(ids)
    assert gap(found, wanted) < 1e-4 * float(np.array(wanted).std())
