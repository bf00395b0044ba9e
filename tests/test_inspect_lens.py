"""The lens and direct attribution: both end in the model's own logits."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import CASES, cases_of, expected, gap, ids_of, opened

import mlx_tformer as mt
from mlx_tformer.errors import UsageError
from mlx_tformer.inspect import attribution, editing, lens, trace, zero
from mlx_tformer.nn import Scaled, SoftCap

SITES = ["embed.out", "*.delta", "attn.z", "residual.out"]
IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def traced(lm: Any, ids: mx.array, *names: str) -> Any:
    with trace(lm, read=names) as t:
        lm(ids)
    return t


@pytest.mark.parametrize("case", CASES + cases_of("mlm"))
def test_after_the_last_layer_the_lens_is_the_model(case: str) -> None:
    lm, ids = opened(case), mx.array(expected(case)["input_ids"])
    logits = lm(ids)
    if logits.shape[-1] != lm.vocab:
        pytest.skip("no head")
    found = lens(traced(lm, ids, "residual.out"), None, top=3, of=7)
    own = np.array(logits[0])
    assert found.layers == list(range(len(found.layers))) and found.positions == list(range(ids.shape[1]))
    best = np.take_along_axis(own, np.array(found.tokens[-1]), axis=-1)
    np.testing.assert_allclose(best, -np.sort(-own, axis=-1)[:, :3], atol=2e-5 * np.abs(own).max())
    shares = np.array(mx.softmax(logits[0], axis=-1))
    np.testing.assert_allclose(
        np.array(found.probabilities[-1]), np.take_along_axis(shares, np.array(found.tokens[-1]), axis=-1), atol=2e-5
    )
    assert np.array(found.ranks[-1]).tolist() == (own > own[:, 7:8]).sum(axis=-1).tolist()


def test_the_lens_before_the_last_layer_is_that_of_a_model_without_the_layers_behind() -> None:
    lm = opened("gemma2")
    t = traced(lm, IDS, "residual.out")
    for layer in (0, 1):
        with editing(lm, [zero("*.delta", layers=range(layer + 1, len(lm.model.decoder.layers)))]):
            logits = lm(IDS)
        found = lens(t, -2, top=2)
        assert found.tokens[layer, 0].tolist() == mx.argsort(-logits[0, -2])[:2].tolist()
        assert gap(found.probabilities[layer, 0], mx.softmax(logits[0, -2])[found.tokens[layer, 0]]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_the_shares_of_all_parts_add_up_to_the_logit(case: str) -> None:
    lm, ids = opened(case), ids_of(case)
    names = (
        SITES
        if any(n.startswith("attention.") for n in expected(case)) or case == "falcon-alibi"
        else SITES[:2] + SITES[3:]
    )
    logits, t = lm(ids), traced(lm, ids, *names)
    finish = lm.model.finish
    for position, token in ((-1, 5), (11, 17)):
        found = attribution(t, token, position=position)
        said = logits[0, position, token].item()
        if isinstance(finish, SoftCap):
            said = finish.cap * np.arctanh(said / finish.cap)
            assert "SoftCap" in found.notes[0]
        tolerance = 2e-5 * max(1, sum(abs(share.value) for share in found.shares))
        assert abs(found.total - said) < tolerance and abs(found.logit - said) < tolerance
        assert isinstance(finish, Scaled | SoftCap) or found.notes == []
    other = attribution(t, 5, minus=17)
    apart = attribution(t, 5).total - attribution(t, 17).total
    assert other.total == pytest.approx(apart, abs=2e-4)


@pytest.mark.parametrize("case", ["llama-gqa-tied", "granite-tied"])  # one of them scales what is added, and logits
def test_the_share_of_a_head_is_what_the_logit_loses_without_it_if_the_norm_stays(case: str) -> None:
    lm = opened(case)
    t = traced(lm, IDS, *SITES)
    last = len(lm.model.decoder.layers) - 1
    found = {(s.layer, s.head): s.value for s in attribution(t, 9).shares if s.kind == "head"}
    if "bias" not in lm.model.decoder.layers[last].attn.op.out:
        assert all(abs(share.value) < 1e-5 for share in attribution(t, 9).shares if share.kind == "bias")
    x = t[f"layers.{last}.out"][0, -1]
    norm = lm.model.decoder.norm
    factor = mx.rsqrt(x.square().mean() + norm.eps) * norm.weight
    with editing(lm, [zero("attn.z", heads={last: [3]})]):
        without = traced(lm, IDS, f"layers.{last}.attn.delta")["attn.delta"][0, -1]
    lost = (t[f"layers.{last}.attn.delta"][0, -1] - without) * factor @ lm.model.embed.tokens.weight[9]
    scale = lm.model.finish.factor if isinstance(lm.model.finish, Scaled) else 1.0
    assert found[last, 3] == pytest.approx(lost.item() * scale, abs=1e-5)


def test_what_the_trace_has_not_read_is_read_in_one_more_run() -> None:
    lm = opened("qwen3")
    few, all_ = traced(lm, IDS, "residual.out"), traced(lm, IDS, *SITES)
    for one, two in zip(attribution(few, 5, minus=7).shares, attribution(all_, 5, minus=7).shares, strict=True):
        assert one.name == two.name and one.value == pytest.approx(two.value, abs=1e-5)
    top = attribution(few, 5).top(8)
    assert len(top) == 8 and all(abs(a.value) >= abs(b.value) for a, b in pairwise(top))
    with editing(lm, [zero("attn.z", heads={0: [0]})]):
        edited = traced(lm, IDS, "residual.out")
    with pytest.raises(UsageError, match=r"was edited in the trace"):
        attribution(edited, 5)


def test_padding_is_as_in_the_trace() -> None:
    lm, mask = opened("qwen3"), mx.array([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    with trace(lm, read=["residual.out"]) as t:
        lm(mx.concatenate([IDS, IDS]), attention_mask=mask)
    alone = attribution(traced(lm, IDS[:, 2:], "residual.out"), 5)
    assert attribution(t, 5, row=0).total == pytest.approx(alone.total, abs=1e-4)


def test_what_cannot_be_answered_is_refused(shakespeare: mt.LanguageModel) -> None:
    lm = opened("qwen3")
    t = traced(lm, IDS, "residual.out")
    for call, told in (
        (lambda: lens(traced(lm, IDS, "attn.z")), "trace with read="),
        (lambda: lens(t, 8), "found position 8"),
        (lambda: lens(t, of="a"), "no tokenizer"),
        (lambda: lens(t, of=10_000), "expected 0 to"),
        (lambda: attribution(t, 5, position=9), "position: found 9"),
        (lambda: attribution(traced(opened("bert"), IDS, "residual.out"), 5), "needs a decoder"),
        (lambda: lens(traced(shakespeare, shakespeare.tokens("O"), "residual.out"), of="to be or not"), "text of one"),
    ):
        with pytest.raises(UsageError, match=told):
            call()


@pytest.mark.parametrize("case", ["bert-classes", "bert-tokens"])
def test_labels_have_no_lens(case: str) -> None:
    lm = opened(case)
    with trace(lm, read=["residual.out"]) as t:
        lm([1, 2, 3])
    with pytest.raises(UsageError, match="the lens needs a head that says which token"):
        lens(t)
