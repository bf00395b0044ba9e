"""The model of 2017: as PyTorch computes it, as large as the paper says, and trained by what `training` has."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import GOLDEN, expected, gap, leaves, limit

import mlx_tformer as mt
from mlx_tformer.memory import parameter_count
from mlx_tformer.seq2seq import Seq2SeqModel
from mlx_tformer.training import cross_entropy


def golden() -> Seq2SeqModel:
    found = mt.load(GOLDEN / "transformer", dtype="float32")
    assert isinstance(found, Seq2SeqModel)
    return found


def answer(name: str) -> mx.array:
    return mx.array(expected("transformer")[name])


def test_logits_are_pytorchs() -> None:
    wanted = expected("transformer")["logits"]
    found = golden()(
        answer("input_ids"), decoder_input_ids=answer("decoder_input_ids"), attention_mask=answer("attention_mask")
    )
    assert gap(found, wanted) < limit(wanted) / 4


def test_a_padded_source_gives_what_it_gives_alone() -> None:
    lm, ids, target = golden(), answer("input_ids")[1:], answer("decoder_input_ids")[1:]
    alone = lm(ids[:, :8], decoder_input_ids=target)
    assert gap(alone, expected("transformer")["logits"][1:]) < 1e-5


def test_one_token_at_a_time_gives_the_logits_of_one_pass() -> None:
    model, target = golden().model, answer("decoder_input_ids")
    memory, cache = model.encode(answer("input_ids")), golden().new_cache()
    whole = model(answer("input_ids"), decoder_input_ids=target)
    parts = [model.decode(target[:, i : i + 1], memory if i == 0 else None, cache) for i in range(target.shape[1])]
    assert gap(model.logits(mx.concatenate(parts, axis=1)), whole) < 1e-5


def test_the_base_model_has_as_many_parameters_as_the_paper_says() -> None:
    lm = mt.build("transformer", dim=512, heads=8, layers=6, hidden=2048, vocab=37000)
    assert parameter_count(lm.model) == pytest.approx(65e6, rel=0.04)
    assert parameter_count(mt.build("transformer", vocab=9, dim=512, hidden=2048, layers=6, heads=8).model) < 45e6


def test_both_sides_and_the_head_share_one_table() -> None:
    lm = mt.build("transformer", dim=16, vocab=11)
    assert [name for name, value in leaves(lm.model).items() if 11 in value.shape] == ["embed.tokens.weight"]
    ids = mx.array([[1, 2, 3]])
    before = lm(ids, decoder_input_ids=ids)
    lm.model.embed.tokens.weight = lm.model.embed.tokens.weight.at[5].add(mx.arange(16.0))
    after = lm(ids, decoder_input_ids=ids)  # 5 is nowhere in the text: its logit alone moves
    moved = np.abs(np.array(after - before)).max(axis=(0, 1))
    assert moved[5] > 1e-3 and np.delete(moved, 5).max() == 0


def test_it_learns() -> None:
    lm = mt.build("transformer", dim=32, heads=2, layers=1, hidden=64, vocab=12, initializer_range=32**-0.5)
    optimizer, key = optim.Adam(3e-3), mx.random.key(0)

    def loss(model: nn.Module, ids: mx.array) -> mx.array:
        before = mx.concatenate([mx.zeros_like(ids[:, :1]), ids[:, :-1]], axis=1)
        return cross_entropy(model(ids, decoder_input_ids=before), ids)

    step, losses = nn.value_and_grad(lm.model, loss), []
    for _ in range(60):
        key, now = mx.random.split(key)
        value, grads = step(lm.model, mx.random.randint(1, 12, (32, 6), key=now))
        optimizer.update(lm.model, grads)
        mx.eval(lm.model.parameters(), optimizer.state)
        losses.append(value.item())
    assert losses[0] > np.log(11) and losses[-1] < 0.9 * np.log(11)  # what guessing costs


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(mt.UsageError, match="d_model: found 15, expected an even number"):
        mt.build("transformer", dim=15, heads=3)
