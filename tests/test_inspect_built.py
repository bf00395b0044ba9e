"""Two models built by hand, whose patterns are known on paper."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from helpers import gap

from mlx_tformer import inspect
from mlx_tformer.inspect import Trace, editing, run, trace
from mlx_tformer.nn import LM, Attention, Block, Cache, Embed, Learned, Linear, Residual, Rope, Stack
from mlx_tformer.nn.position import plain


@dataclass
class Bare:
    """A model as `load` would give it, without a tokenizer."""

    model: LM
    tokenizer: None = None

    def __call__(self, ids: mx.array, cache: Cache | None = None) -> mx.array:
        return self.model(ids, cache)


# --- (a) heads that look a fixed number of tokens back, by their biases alone ---

DIM, HEAD, THETA, LENGTH = 24, 16, 100.0, 20
BACK = [0, 1, 3, 6]
STRENGTH = 1.7


def looking_back() -> Bare:
    """Heads of which head h looks BACK[h] tokens back: q and k are biases, turned by their positions."""
    op = Attention(DIM, len(BACK), 2, HEAD, bias=True, position=Rope(HEAD, THETA))
    angles = np.array(plain(HEAD, THETA))
    q = [STRENGTH * np.concatenate([np.cos(-angles * s), np.sin(-angles * s)]) for s in BACK]
    k = [np.concatenate([np.ones(HEAD // 2), np.zeros(HEAD // 2)])] * 2
    v = [np.zeros(HEAD)] * 2
    op.qkv.weight = mx.concatenate([mx.zeros((6 * HEAD, DIM)), op.qkv.weight[6 * HEAD :]])
    op.qkv.bias = mx.array(np.concatenate([*q, *k, *v]).astype(np.float32))
    return Bare(LM(Embed(30, DIM), Stack([Block(attn=Residual(op))])))


def on_paper() -> np.ndarray:
    """softmax(scale · b · sum over f of cos(theta_f (i - j - s))), (H, L, L), in float64."""
    angles, at = np.array(plain(HEAD, THETA)), np.arange(LENGTH)
    found = []
    for s in BACK:
        scores = STRENGTH * HEAD**-0.5 * np.cos(angles * (at[:, None] - at - s)[..., None]).sum(axis=-1)
        weights = np.where(at <= at[:, None], np.exp(scores), 0)
        found.append(weights / weights.sum(axis=-1, keepdims=True))
    return np.array(found)


@pytest.mark.parametrize("cuts", [[LENGTH], [7, *[1] * (LENGTH - 7)]])
def test_heads_made_of_biases_look_back_as_calculated(cuts: list[int]) -> None:
    lm, ids = looking_back(), mx.arange(LENGTH)[None]
    cache = lm.model.new_cache(LENGTH)
    with trace(lm, read=["attn.pattern"]) as t:
        for start, count in zip(np.cumsum([0, *cuts[:-1]]), cuts, strict=True):
            lm(ids[:, int(start) : int(start) + count], cache)
    pattern = t["attn.pattern"][0]
    assert gap(pattern, on_paper()) < 2e-6 and t.check(1e-5) < 1e-5
    for head, back in enumerate(BACK):
        assert mx.all(mx.argmax(pattern[head, back:], axis=-1) == mx.arange(LENGTH - back)).item()


# --- (b) an induction circuit of two layers, each thing in a slot of its own ---

VOCAB, PLACES = 11, 12
TOKEN, BEFORE, SAID, PLACE = (slice(i * VOCAB, (i + 1) * VOCAB) for i in (0, 1, 2, 3))
PLACE = slice(3 * VOCAB, 3 * VOCAB + PLACES)
WIDTH = 3 * VOCAB + PLACES
SHARP = (5.0, 20.0)
TEXT = [0, 3, 8, 1, 10, 6, 3, 8, 1, 10, 6, 3]


def matching(query: np.ndarray, key: np.ndarray, takes: slice, gives: slice, sharp: float) -> Attention:
    """One head with scores query · key · sharp of slots that match, which moves one slot into another."""
    op = Attention(WIDTH, 1, head_dim=PLACES, scale=1.0)
    move, out = np.zeros((PLACES, WIDTH)), np.zeros((WIDTH, PLACES))
    move[:VOCAB, takes], out[gives, :VOCAB] = np.eye(VOCAB), np.eye(VOCAB)
    op.qkv.weight = mx.array(np.concatenate([sharp * query, key, move]).astype(np.float32))
    op.out.weight = mx.array(out.astype(np.float32))
    return op


def induction() -> Bare:
    q, k = np.zeros((2, PLACES, WIDTH)), np.zeros((2, PLACES, WIDTH))
    q[0][:, PLACE], k[0][:, PLACE] = np.eye(PLACES, k=1), np.eye(PLACES)  # place i asks for place i - 1
    q[1][:VOCAB, TOKEN], k[1][:VOCAB, BEFORE] = np.eye(VOCAB), np.eye(VOCAB)  # a token asks for where it was before
    layers = [matching(q[0], k[0], TOKEN, BEFORE, SHARP[0]), matching(q[1], k[1], TOKEN, SAID, SHARP[1])]
    embed, head = Embed(VOCAB, WIDTH, positions=Learned(PLACES, WIDTH)), Linear(WIDTH, VOCAB, bias=False)
    head.weight = mx.array(np.eye(VOCAB, WIDTH, k=2 * VOCAB).astype(np.float32))
    embed.tokens.weight = mx.array(np.eye(VOCAB, WIDTH).astype(np.float32))
    embed.positions.table.weight = mx.array(np.eye(PLACES, WIDTH, k=3 * VOCAB).astype(np.float32))
    return Bare(LM(embed, Stack([Block(attn=Residual(op)) for op in layers]), head))


def read(lm: Bare) -> Trace:
    with trace(lm, read=["attn.pattern", "residual.out"]) as t:
        lm(mx.array([TEXT]))
    return t


def test_the_weight_on_the_previous_token_is_that_on_paper() -> None:
    pattern = np.array(read(induction())["layers.0.attn.pattern"][0, 0])
    for i in range(1, len(TEXT)):
        assert pattern[i, i - 1] == pytest.approx(np.exp(SHARP[0]) / (np.exp(SHARP[0]) + i), abs=1e-6)
    assert pattern[0, 0] == 1.0


def test_the_second_layer_finds_what_came_after_the_same_token_and_the_model_says_it() -> None:
    lm = induction()
    t, logits = read(lm), lm(mx.array([TEXT]))[0]
    for i in range(6, len(TEXT) - 1):
        at = i - 4  # what came after the same token, five tokens ago
        assert t["layers.1.attn.pattern"][0, 0, i, at].item() > 0.9
        assert mx.argmax(logits[i]).item() == TEXT[i + 1]
    found = inspect.attribution(t, TEXT[8], position=7)
    assert found.total == pytest.approx(logits[7, TEXT[8]].item(), abs=1e-5)
    assert found.top(1)[0].name == "head 1.0"
    assert inspect.lens(t, 7, of=TEXT[8]).ranks[:, 0].tolist() == [0, 0]  # nothing is said before layer 1: all tie


def test_flattening_the_first_layer_destroys_the_circuit() -> None:
    lm = induction()
    flat = [inspect.set("attn.scores", 0.0, layers=0)]
    with editing(lm, flat):
        pattern = read(lm)["layers.1.attn.pattern"][0, 0]
    logits = run(lm, mx.array([TEXT]), flat)[0]
    assert all(pattern[i, i - 4].item() < 0.5 for i in range(6, len(TEXT)))
    whole = lm(mx.array([TEXT]))[0]
    own = mx.array(TEXT[7:12])[:, None]
    assert mx.take_along_axis(whole[6:11], own, axis=1).min().item() > 0.9
    assert mx.take_along_axis(logits[6:11], own, axis=1).max().item() < 0.6
    uniform = 1 / mx.arange(1, len(TEXT) + 1)[:, None]
    same = run(lm, mx.array([TEXT]), [inspect.set("attn.pattern", mx.tril(mx.ones((12, 12))) * uniform, layers=0)])[0]
    assert gap(same, logits) < 1e-5


def test_weights_alone_show_how_the_two_layers_fit_together() -> None:
    first, second = inspect.circuits(induction())
    fits = inspect.composition(first, second)
    assert fits["k"].item() > 0.2 and fits["q"].item() == 0 and fits["v"].item() == 0
    assert first.ov.singular_values[0].tolist() == pytest.approx([1.0] * VOCAB + [0.0], abs=1e-5)
