"""Training: layers that are computed again, and experts that are kept busy alike."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import gap, seen
from mlx.utils import tree_flatten

import mlx_tformer as mt
from mlx_tformer.nn import LM, Attention, Block, Embed, Experts, Mixture, Residual, Router, Stack, watch
from mlx_tformer.training import checkpoint, initialise, move_corrections, next_token_loss, pack, router_z_loss, routing

IDS = mx.random.randint(0, 30, (2, 12), key=mx.random.key(4))
SMALL = {"dim": 16, "heads": 2, "vocab": 30, "initializer_range": 0.2}


def loss_of(model: nn.Module, ids: mx.array) -> mx.array:
    """The loss of a model of any kind, with those of the routers if there are any."""
    with routing() as found:
        logits = model(ids) if isinstance(model, LM) else model(ids, decoder_input_ids=ids[:, ::-1])
    loss = next_token_loss(logits, ids)
    return loss if not found.logits else loss + found.balancing_loss() + 0.1 * found.z_loss()


def gradients(model: nn.Module, ids: mx.array = IDS) -> tuple[float, dict[str, mx.array]]:
    value, grads = nn.value_and_grad(model, loss_of)(model, ids)
    return value.item(), dict(tree_flatten(grads))


@pytest.mark.parametrize(
    "family", ["llama", "deepseek_v3", "jamba", "mixtral", "switch_transformers", "t5", "transformer"]
)
def test_layers_that_are_computed_again_have_the_same_gradients(family: str) -> None:
    model = mt.build(family, **SMALL).model
    value, wanted = gradients(model)
    checkpoint(model)
    again, found = gradients(model)
    assert again == pytest.approx(value, rel=1e-6) and found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert gap(found[name], grad) <= 1e-5 * float(mx.abs(grad).max().item()), name
    assert sum(mx.any(grad).item() for grad in wanted.values()) > 0.8 * len(wanted)
    checkpoint(model, on=False)
    assert gradients(model)[0] == value


def test_a_model_whose_layers_are_computed_again_keeps_its_weights() -> None:
    model = mt.build("llama", **SMALL).model
    before = dict(tree_flatten(model.parameters()))
    checkpoint(model)
    gradients(model)
    assert all(mx.array_equal(value, before[name]).item() for name, value in tree_flatten(model.parameters()))
    assert gap(model(IDS), mt.build("llama", **SMALL).model(IDS)) == 0


def test_layers_that_are_computed_again_need_less_memory() -> None:
    model, ids = mt.build("llama", dim=32, layers=8, hidden=512, vocab=30).model, mx.zeros((4, 128), mx.int32)

    def peak() -> int:
        mx.eval(model.parameters())
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(gradients(model, ids)[1])
        return mx.get_peak_memory() - mx.get_active_memory()

    plain = peak()
    checkpoint(model)
    assert peak() < 0.5 * plain


def test_watchers_see_what_is_computed_again_and_cannot_edit_it() -> None:
    model = mt.build("llama", **SMALL).model
    with seen("*.pattern") as wanted:
        model(IDS)
    checkpoint(model)
    with seen("*.pattern") as found:
        model(IDS)
    assert found.keys() == wanted.keys() and all(gap(found[at], wanted[at]) == 0 for at in wanted)
    with watch("*.pattern", lambda path, value: value * 0), pytest.raises(mt.UsageError, match="cannot be edited"):
        model(IDS)


def test_packed_rows_go_through_layers_that_are_computed_again() -> None:
    model, packed = mt.build("llama", **SMALL).model, pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 6)
    wanted = model(packed.ids, segments=packed.segments)
    checkpoint(model)
    assert gap(model(packed.ids, segments=packed.segments), wanted) < 1e-6


# --- experts ---


def mixture_model(capacity: int | None = None, *, correction: bool = False) -> LM:
    """Two layers of experts, with a router that likes the first ones far too much."""

    def block() -> Block:
        router = Router(16, 8, 2, score="sigmoid", normalise=True, correction=correction)
        mixture = Mixture(router, Experts(16, 8, 8), capacity=capacity)
        return Block(attn=Residual(Attention(16, heads=2)), mlp=Residual(mixture))

    model = LM(Embed(30, 16), Stack([block(), block()]))
    initialise(model, std=0.2)
    model.embed.tokens.weight = mx.random.normal((30, 16), key=mx.random.key(2)) + 0.5  # what tokens have in common
    return model


def unevenness(model: LM, ids: mx.array) -> float:
    with routing() as found:
        model(ids)
    return max(load.max().item() for load in found.load().values()) * 8


def test_the_report_is_what_the_routers_chose() -> None:
    model, real = mixture_model(capacity=2), IDS < 25
    with routing(real) as found, seen("*.chosen") as chosen, seen("*.kept") as kept:
        model(IDS)
    assert list(found.load()) == [f"decoder.layers.{i}.mlp.op.router" for i in (0, 1)]
    text = np.array(real).reshape(-1)
    for path, load in found.load().items():
        choices = np.array(chosen[f"{path}.chosen"])[text]
        assert gap(load, np.bincount(choices.ravel(), minlength=8) / choices.size) < 1e-6
    for path, share in found.dropped().items():
        lost = ~np.array(kept[f"{path}.kept"]).reshape(-1, 2)[text]
        assert share.item() == pytest.approx(lost.mean()) and lost.any()
    wanted = np.mean([router_z_loss(x, real=found.real).item() for x in found.logits.values()])
    assert found.z_loss().item() == pytest.approx(wanted, rel=1e-6)


def test_nothing_is_dropped_without_a_capacity() -> None:
    with routing() as found:
        mixture_model()(IDS)
    assert found.dropped() == {}
    with routing() as found:
        mixture_model(capacity=24)(IDS)
    assert [share.item() for share in found.dropped().values()] == [0, 0]


def test_a_dropped_token_passes_by_its_experts_and_no_other_is_touched() -> None:
    full, bounded = mixture_model(), mixture_model(capacity=1)
    bounded.load_weights(tree_flatten(full.parameters()))
    x = mx.random.normal((1, 6, 16), key=mx.random.key(8))
    some, every = (model.decoder.layers[0].mlp.op for model in (bounded, full))
    with seen("*.kept") as kept:
        found = some(x)
    lost = ~np.array(next(iter(kept.values())))[0]  # (L, top)
    change = np.abs(np.array(found - every(x)))[0].max(axis=-1)
    assert lost.any() and (change[~lost.any(axis=-1)] == 0).all() and (change[lost.any(axis=-1)] > 0).all()
    assert np.abs(np.array(found))[0][lost.all(axis=-1)].sum() == 0


def test_the_texts_of_a_packed_row_fill_places_of_their_own() -> None:
    model, texts = mixture_model(capacity=1), [[1, 2, 3, 4], [2, 3, 1], [4, 4, 4, 4, 4]]
    packed = pack(texts, 8)
    for text, logits in zip(texts, packed.apart(model(packed.ids, segments=packed.segments)), strict=True):
        assert gap(logits, model(mx.array([text]))[0]) < 1e-5


@pytest.mark.parametrize("way", ["loss", "correction"])
def test_experts_become_busy_alike(way: str) -> None:
    model, ids = mixture_model(correction=way == "correction"), mx.random.randint(0, 30, (8, 16), key=mx.random.key(3))
    before, optimizer = unevenness(model, ids), optim.Adam(1e-2)

    def loss(model: LM) -> mx.array:
        with routing() as found:
            model(ids)
        return found.balancing_loss()

    step = nn.value_and_grad(model, loss)
    for _ in range(40):
        if way == "loss":
            optimizer.update(model, step(model)[1])
        else:
            with routing() as found:
                model(ids)
            move_corrections(model, found.load(), rate=0.02)
        mx.eval(model.parameters())
    assert before > 2 and unevenness(model, ids) < 0.75 * before


def test_a_correction_moves_by_the_rate_towards_even_load_and_weighs_nothing() -> None:
    model = mixture_model(correction=True)
    with routing() as found:
        model(IDS)
    move_corrections(model, found.load(), rate=0.5)
    for path, load in found.load().items():
        layer = int(path.split(".")[2])
        correction = model.decoder.layers[layer].mlp.op.router.correction
        assert gap(correction, 0.5 * np.sign(1 / 8 - np.array(load))) == 0


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_a_compiled_step_on_packed_rows_is_the_step(family: str) -> None:
    model, packed = mt.build(family, **SMALL).model, pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 6)

    def step(ids: mx.array, segments: mx.array, mask: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        def loss(model: nn.Module) -> mx.array:
            return next_token_loss(model(ids, segments=segments), ids, loss_mask=mask)

        return nn.value_and_grad(model, loss)(model)

    rows = packed.ids, packed.segments, packed.loss_mask
    (one, ours), (other, theirs) = step(*rows), mx.compile(step)(*rows)
    assert other.item() == pytest.approx(one.item(), rel=1e-6)
    wanted = dict(tree_flatten(theirs))
    assert all(gap(value, wanted[name]) < 1e-5 for name, value in tree_flatten(ours))
