"""Rows of several texts: each text computes what it computes alone."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import gap, golden, leaves, shaken

from mlx_tformer import UsageError
from mlx_tformer.nn import (
    LM,
    Alibi,
    Attention,
    Block,
    Causal,
    Chunk,
    Embed,
    GatedMlp,
    LatentAttention,
    Learned,
    Mamba,
    Mask,
    Position,
    Residual,
    Rope,
    Stack,
    Window,
)
from mlx_tformer.nn.model import text_starts
from mlx_tformer.nn.position import DynamicNTK, LinearScaling
from mlx_tformer.training import next_token_loss, pack

TEXTS = [[5, 3, 8, 1, 9], [2, 7], [4, 4, 6, 1, 0, 3, 2], [9], [1, 8, 3]]
POSITIONS = {
    "rope": lambda: Rope(8, theta=30),
    "interleaved": lambda: Rope(8, theta=30, interleaved=True),
    "partial": lambda: Rope(4, theta=30, scaling=LinearScaling(2.0)),
    "alibi": lambda: Alibi(4),
    "none": Position,
}


def model_of(position: Position | None = None, mask: Mask | None = None, learned: Learned | None = None) -> LM:
    def block() -> Block:
        attn = Attention(32, heads=4, kv_heads=2, position=position, mask=mask)
        return Block(attn=Residual(attn, pre=nn.RMSNorm(32)), mlp=Residual(GatedMlp(32, 48), pre=nn.RMSNorm(32)))

    return shaken(LM(Embed(10, 32, positions=learned), Stack([block(), block()])))


def assert_apart(model: LM, texts: list[list[int]] = TEXTS, length: int = 9) -> None:
    packed = pack(texts, length)
    found = packed.apart(model(packed.ids, segments=packed.segments))
    for text, logits in zip(texts, found, strict=True):
        assert gap(logits, model(mx.array([text]))[0]) < 2e-6 * float(mx.abs(logits).max().item()) + 2e-6


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(3), Causal() & Chunk(3)], ids=str)
def test_a_packed_text_computes_what_it_computes_alone(position: str, mask: Mask) -> None:
    assert_apart(model_of(POSITIONS[position](), mask))


def test_learned_positions_restart_with_each_text() -> None:
    assert_apart(model_of(learned=Learned(7, 32, first=2)))  # the longest text has 7 tokens, its row 9


CASES = ["bloom", "deepseek_v3", "falcon-alibi", "gemma2", "gpt2", "gpt_oss", "llama-llama3rope", "llama4-tempered"]


@pytest.mark.parametrize("case", [*CASES, "mixtral-window", "mpt", "opt", "phi-grouped"])
def test_families_keep_packed_texts_apart(case: str) -> None:
    model, key = golden(case), mx.random.key(7)
    ids = mx.random.randint(0, model.vocab, (30,), key=key).tolist()
    assert isinstance(ids, list)
    texts = [ids[:9], ids[9:14], ids[14:30]]
    packed = pack(texts, 20)
    for text, logits in zip(texts, packed.apart(model(packed.ids, segments=packed.segments)), strict=True):
        alone = model(mx.array([text]))[0]
        assert gap(logits, alone) < 1e-5 * float(alone.max().item() - alone.min().item())


def test_the_gradient_of_a_packed_row_is_that_of_its_texts() -> None:
    model, packed = model_of(Rope(8)), pack(TEXTS, 9)

    def together(model: LM) -> mx.array:
        logits = model(packed.ids, segments=packed.segments)
        return next_token_loss(logits, packed.ids, loss_mask=packed.loss_mask) * packed.loss_mask.sum()

    def apart(model: LM) -> mx.array:
        rows = [mx.array([text]) for text in TEXTS if len(text) > 1]
        return mx.stack([next_token_loss(model(row), row) * (row.size - 1) for row in rows]).sum()

    (one, ours), (other, theirs) = (nn.value_and_grad(model, f)(model) for f in (together, apart))
    assert abs(one.item() - other.item()) < 1e-5 * other.item()
    ours, theirs = (leaves_of(tree) for tree in (ours, theirs))
    assert all(gap(ours[name], theirs[name]) < 2e-5 * float(mx.abs(theirs[name]).max().item()) for name in theirs)


def leaves_of(tree: dict) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(tree))


def test_every_text_stands_in_one_row_with_its_loss_mask() -> None:
    packed = pack(TEXTS, 9, loss_from=[3, 0, 5, 0, 3])
    assert packed.ids.shape == (2, 9)
    assert [values.tolist() for values in packed.apart(packed.ids)] == TEXTS
    wanted = [[i >= max(n, 1) for i in range(len(text))] for text, n in zip(TEXTS, [3, 0, 5, 0, 3], strict=True)]
    assert [values.tolist() for values in packed.apart(packed.loss_mask)] == wanted
    padding = np.array(packed.segments) == -1
    assert padding.sum() == 18 - sum(map(len, TEXTS)) and not np.array(packed.loss_mask)[padding].any()
    assert all(len(set(values.tolist())) == 1 for values in packed.apart(packed.segments))


def test_texts_begin_where_the_number_changes() -> None:
    assert text_starts(mx.array([[3, 3, 0, 0, 3], [1, 1, 1, 1, 1]])).tolist() == [[0, 0, 2, 2, 4], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("texts", [[], [[]], [[1] * 10]], ids=["none", "empty", "long"])
def test_texts_that_do_not_fit_are_refused(texts: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="expected texts of 1 to 9"):
        pack(texts, 9)


def test_a_prompt_length_for_each_text_is_wanted() -> None:
    with pytest.raises(UsageError, match="loss_from: found 1"):
        pack(TEXTS, 9, loss_from=[1])


def test_what_cannot_keep_texts_apart_refuses() -> None:
    model, packed = model_of(), pack(TEXTS, 9)
    with pytest.raises(UsageError, match="cache"):
        model(packed.ids, model.new_cache(), segments=packed.segments)
    with pytest.raises(UsageError, match="shape"):
        model(packed.ids, segments=packed.segments[:, 1:])
    scan = Block(mixer=Residual(Mamba(8, inner=16, states=4, rank=2)))
    with pytest.raises(UsageError, match="Mamba"):
        LM(Embed(10, 8), Stack([scan]))(packed.ids, segments=packed.segments)
    with pytest.raises(UsageError, match="10 tokens, but the model has 7"):
        model_of(learned=Learned(7, 32))(mx.zeros((1, 10), mx.int32), segments=mx.zeros((1, 10), mx.int32))


def test_positions_that_scale_with_the_length_pack_as_long_as_they_do_not() -> None:
    model = model_of(Rope(8, scaling=DynamicNTK(4.0, trained=7)))
    assert_apart(model)
    with pytest.raises(UsageError, match="a text of 8 tokens needs a row of its own"):
        packed = pack([[1] * 8, [2]], 9)
        model(packed.ids, segments=packed.segments)


def test_latent_attention_keeps_packed_texts_apart() -> None:
    def block() -> Block:
        return Block(attn=Residual(LatentAttention(32, heads=4, rank=16, plain=8, rotary=4, value=8, position=Rope(4))))

    model = LM(Embed(10, 32), Stack([block(), block()]))
    model.load_weights([(k, 0.3 * mx.random.normal(v.shape, key=mx.random.key(1))) for k, v in leaves(model).items()])
    assert_apart(model)
    assert_apart(model, [[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2]], length=14)  # rows that are expanded


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_are_those_of_each_token(interleaved: bool) -> None:
    rope, x = Rope(8, theta=30, interleaved=interleaved), mx.random.normal((2, 3, 7, 8), key=mx.random.key(5))
    starts = mx.array([[0, 0, 0, 3, 3, 3, 3], [0, 1, 1, 1, 1, 1, 6]])
    found = rope.rotate(x, -starts, 7)
    for row, begins in enumerate(starts.tolist()):
        for start in set(begins):
            stop = start + begins.count(start)
            assert gap(found[row : row + 1, :, start:stop], rope.rotate(x[row : row + 1, :, start:stop], 0, 7)) < 1e-6
