"""Residual steps, blocks, feed-forward layers and whole models against the formulas written out in float64."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
import reference
from helpers import gap, leaves, seen, shaken
from hypothesis import given
from hypothesis import strategies as st
from reference import Array, f64, linear, rms_norm

from mlx_tformer.errors import UsageError
from mlx_tformer.nn import (
    ACTIVATIONS,
    LM,
    Attention,
    Block,
    Context,
    Embed,
    GatedMlp,
    Identity,
    LayerNorm,
    Linear,
    Mlp,
    Module,
    Parallel,
    Residual,
    RMSNorm,
    Stack,
)
from mlx_tformer.nn.model import left_padding

X = mx.random.normal((2, 5, 8), key=mx.random.key(0))
CTX = Context.alone(X)


# --- activations ---


def test_every_activation_has_its_formula_here() -> None:
    assert set(ACTIVATIONS) == set(reference.ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_formula(name: str) -> None:
    x = mx.linspace(-9, 9, 721)
    assert gap(ACTIVATIONS[name](x), reference.activation(name, f64(x))) < 1e-5


def test_the_two_forms_of_gelu_are_told_apart() -> None:
    x = mx.linspace(-3, 3, 61)
    assert gap(ACTIVATIONS["gelu"](x), ACTIVATIONS["gelu_new"](x)) > 1e-4


# --- feed-forward layers ---


def mlp(layer: Mlp, x: Array) -> Array:
    return linear(layer.down, reference.activation(layer.act, linear(layer.up, x)))


def gated(layer: GatedMlp, x: Array) -> Array:
    both = linear(layer.gate_up, x)
    gate, up = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
    return linear(layer.down, reference.activation(layer.act, gate) * up)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["gelu", "relu", "gelu_new"])
def test_an_mlp_is_its_formula(bias: bool, act: str) -> None:
    layer = shaken(Mlp(8, 12, act, bias))
    assert gap(layer(X), mlp(layer, f64(X))) < 2e-6
    assert ("bias" in layer.up, "bias" in layer.down) == (bias, bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu", "relu2"])
def test_a_gated_mlp_is_its_formula(bias: bool, act: str) -> None:
    layer = shaken(GatedMlp(8, 12, act, bias))
    assert gap(layer(X), gated(layer, f64(X))) < 2e-6
    assert ("bias" in layer.gate_up, "bias" in layer.down) == (bias, bias)


def test_gate_and_up_are_shown_apart() -> None:
    layer = shaken(GatedMlp(8, 12))
    with seen("*") as found:
        layer(X)
    assert {path: value.shape for path, value in found.items()} == dict.fromkeys(
        (".gate", ".up", ".hidden"), (2, 5, 12)
    )
    both = linear(layer.gate_up, f64(X))
    assert gap(found[".gate"], both[..., :12]) < 1e-6 and gap(found[".up"], both[..., 12:]) < 1e-6
    assert gap(layer.down(found[".hidden"]), gated(layer, f64(X))) < 2e-6


# --- norms ---


def test_norms_are_their_formulas() -> None:
    rms, layer = RMSNorm(8, 1e-2), LayerNorm(8, 1e-2)
    rms.weight, layer.weight, layer.bias = mx.arange(1, 9) / 5, mx.arange(1, 9) / 7, mx.arange(8) / 3
    assert gap(rms(X), rms_norm(rms, f64(X))) < 2e-6
    assert gap(layer(X), reference.layer_norm(layer, f64(X))) < 2e-6
    assert mx.array_equal(Identity()(X), X).item()


# --- residual steps and blocks ---


class Double(Module):
    """An operation that is easy to follow."""

    def __call__(self, x: mx.array, ctx: Context) -> mx.array:
        return 2 * x


def plus(n: float) -> Callable[[mx.array], mx.array]:
    return lambda x: x + n


def test_a_residual_step_is_after_of_x_plus_post_of_op_of_pre() -> None:
    x = f64(X)
    cases = {
        "pre-norm": (Residual(Double(), pre=plus(1)), x + 2 * (x + 1)),
        "post-norm, 2017": (Residual(Double(), after=plus(3)), (x + 2 * x) + 3),
        "OLMo 2": (Residual(Double(), post=plus(5)), x + (2 * x + 5)),
        "sandwich": (Residual(Double(), pre=plus(1), post=plus(5)), x + (2 * (x + 1) + 5)),
        "all": (Residual(Double(), pre=plus(1), post=plus(5), after=plus(3)), x + (2 * (x + 1) + 5) + 3),
        "none": (Residual(Double()), 3 * x),
    }
    for name, (step, wanted) in cases.items():
        assert gap(step(X, CTX), wanted) < 2e-6, name


@pytest.mark.parametrize("slot", ["pre", "post", "after"])
def test_a_norm_in_any_slot_is_the_one_that_works_there(slot: str) -> None:
    norm = shaken(RMSNorm(8, 1e-3))
    step, x = Residual(Double(), **{slot: norm}), f64(X)

    def at(name: str, value: Array) -> Array:
        return rms_norm(norm, value) if name == slot else value

    wanted = at("after", x + at("post", 2 * at("pre", x)))
    assert gap(step(X, CTX), wanted) < 2e-6
    assert f"{slot}.weight" in leaves(step)


def test_delta_is_what_a_step_adds() -> None:
    step = Residual(Double(), pre=plus(1), post=plus(5))
    with seen("*") as found:
        out = step(X, CTX)
    assert set(found) == {".in", ".delta", ".out"}
    assert gap(found[".in"], f64(X) + 1) < 2e-6
    assert gap(found[".delta"], 2 * (f64(X) + 1) + 5) < 2e-6
    assert gap(X + found[".delta"], out) == 0 and gap(step.delta(X, CTX), found[".delta"]) == 0


def steps() -> dict[str, Residual]:
    return {"attn": Residual(Double(), pre=plus(1)), "mlp": Residual(Double(), pre=plus(7))}


def test_the_steps_of_a_block_run_in_order() -> None:
    x = f64(X)
    first = x + 2 * (x + 1)
    assert gap(Block(**steps())(X, CTX), first + 2 * (first + 7)) < 1e-5
    backwards = dict(reversed(steps().items()))
    second = x + 2 * (x + 7)
    assert gap(Block(**backwards)(X, CTX), second + 2 * (second + 1)) < 1e-5
    assert list(Block(**backwards).order) == ["mlp", "attn"]


def test_parallel_steps_all_read_the_same_input() -> None:
    x = f64(X)
    assert gap(Parallel(**steps())(X, CTX), x + 2 * (x + 1) + 2 * (x + 7)) < 1e-5


def test_steps_behind_those_that_are_parallel_follow_one_by_one() -> None:
    both, x = Parallel(**steps())(X, CTX), f64(X)
    third = Residual(Mlp(8, 12), pre=RMSNorm(8))
    assert gap(Parallel(None, 2, **steps(), last=third)(X, CTX), third(both, CTX)) == 0
    assert gap(Parallel(None, 1, **steps())(X, CTX), 3 * x + 2 + 2 * (3 * x + 2 + 7)) < 1e-4


def test_a_block_has_the_weights_of_its_steps_and_no_others() -> None:
    block = Block(attn=Residual(Attention(8, 2), pre=RMSNorm(8)), mlp=Residual(GatedMlp(8, 12), post=RMSNorm(8)))
    assert set(leaves(block)) == {
        "attn.pre.weight",
        "attn.op.qkv.weight",
        "attn.op.out.weight",
        "mlp.op.gate_up.weight",
        "mlp.op.down.weight",
        "mlp.post.weight",
    }


# --- a whole model ---

IDS = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def lm(tied: bool, parallel: bool = False) -> LM:
    kind = Parallel if parallel else Block

    def block() -> Block:
        attn, mlp = Residual(Attention(8, 2), pre=RMSNorm(8)), Residual(GatedMlp(8, 12), pre=RMSNorm(8))
        return kind(attn=attn, mlp=mlp)

    head = None if tied else Linear(8, 11, bias=False)
    return shaken(LM(Embed(11, 8), Stack([block(), block()], RMSNorm(8)), head))


def heads_of(layer: Attention, x: Array) -> tuple[Array, Array, Array]:
    q, k, v = (p.reshape(*x.shape[:2], 2, 4).swapaxes(1, 2) for p in np.split(linear(layer.qkv, x), 3, axis=-1))
    return q, k, v


def written_out(model: LM, ids: Array) -> Array:
    x = f64(model.embed.tokens.weight)[ids]
    sees = np.repeat(np.tri(ids.shape[1], dtype=bool)[None], ids.shape[0], axis=0)
    for layer in model.decoder.layers:
        z, _ = reference.attention(*heads_of(layer.attn.op, rms_norm(layer.attn.pre, x)), 0.5, sees)
        attn = linear(layer.attn.op.out, z.swapaxes(1, 2).reshape(x.shape))
        if isinstance(layer, Parallel):
            x = x + attn + gated(layer.mlp.op, rms_norm(layer.mlp.pre, x))
        else:
            x = x + attn
            x = x + gated(layer.mlp.op, rms_norm(layer.mlp.pre, x))
    x = rms_norm(model.decoder.norm, x)
    return x @ f64(model.embed.tokens.weight).T if model.tied else linear(model.head, x)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_model_is_what_is_written_out(tied: bool, parallel: bool) -> None:
    model = lm(tied, parallel)
    assert gap(model(IDS), written_out(model, np.array(IDS))) < 2e-5
    assert gap(model.logits(model.hidden(IDS)), written_out(model, np.array(IDS))) < 2e-5


def test_a_tied_model_has_no_head_and_an_untied_one_has() -> None:
    names = [set(leaves(lm(tied))) for tied in (True, False)]
    assert names[1] - names[0] == {"head.weight"} and names[0] < names[1]


def test_a_model_knows_the_path_of_every_part() -> None:
    paths = {path: m.path for path, m in lm(False).named_modules() if isinstance(m, Module)}
    assert paths.keys() >= {"embed", "decoder", "decoder.layers.1", "decoder.layers.1.attn.op", "decoder.layers.0.mlp"}
    assert all(path == told for path, told in paths.items())


def test_a_stack_without_a_norm_ends_with_its_last_layer() -> None:
    block = shaken(Block(mlp=Residual(Mlp(8, 12), pre=RMSNorm(8))))
    assert mx.array_equal(Stack([block])(X, CTX), block(X, CTX)).item()


def test_building_a_model_allocates_nothing() -> None:
    mx.synchronize()
    before = mx.get_active_memory()
    block = Block(attn=Residual(Attention(2048, 16)), mlp=Residual(GatedMlp(2048, 5504)))
    model = LM(Embed(32000, 2048), Stack([block]))
    assert sum(v.size for v in leaves(model).values()) > 1e8
    assert mx.get_active_memory() - before < 10_000


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_left_padding_is_what_stands_in_front(lengths: list[int]) -> None:
    mask = mx.array([[0] * (6 - length) + [1] * length for length in lengths])
    found = left_padding(mask, mask.shape)
    if all(length == 6 for length in lengths):
        assert found is None
    else:
        assert found is not None and found.tolist() == [6 - length for length in lengths]


@pytest.mark.parametrize("row", [[1, 1, 0], [0, 1, 0], [1, 0, 1]])
def test_padding_behind_or_within_a_text_is_refused(row: list[int]) -> None:
    with pytest.raises(UsageError, match="attention_mask"):
        left_padding(mx.array([[1, 1, 1], row]), (2, 3))
