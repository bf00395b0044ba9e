"""Inspecting encoder-decoder models: two stacks, two texts, and attention from one to the other."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import cases_of, expected, gap, opened, seen

from mlx_tformer import inspect
from mlx_tformer.errors import UsageError
from mlx_tformer.inspect import editing, run, sites_of, trace

CASES = cases_of("seq2seq")
STACKS = ["attn.pattern", "cross.pattern"]
NOISE = dict.fromkeys(("t5", "t5-v1.1", "switch"), 6e-5)
"""How far float32 may take the patterns of cases whose unscaled scores are large: transformers' own in float32 are up
to 6.1e-5 from what it gives in float64, and up to 1.3e-4 from themselves when the features stand in another order."""


def inputs(case: str) -> tuple[mx.array, dict[str, mx.array]]:
    e = expected(case)
    mask, start = mx.array(e["attention_mask"]), mx.array(e["decoder_input_ids"])
    return mx.array(e["input_ids"]), {"attention_mask": mask, "decoder_input_ids": start}


def traced(case: str, *names: str) -> Any:
    ids, rest = inputs(case)
    with trace(opened(case), read=names) as t:
        opened(case)(ids, **rest)
    return t


@pytest.mark.parametrize("case", CASES)
def test_patterns_of_all_three_kinds_are_those_of_transformers(case: str) -> None:
    t, wanted = traced(case, *STACKS), expected(case)
    real = wanted["attention_mask"].astype(bool)
    kinds = {
        "attention": "decoder.{}.attn",
        "cross_attention": "decoder.{}.cross_attn",
        "encoder_attention": "encoder.{}.attn",
    }
    for key, value in wanted.items():
        kind, _, layer = key.partition(".")
        if kind in kinds:
            found = np.array(t[f"{kinds[kind].format(layer)}.hook_pattern"])
            apart = np.abs(found - value)
            assert (apart.swapaxes(1, 2)[real] if kind == "encoder_attention" else apart).max() < NOISE.get(case, 1e-5)
            if kind == "cross_attention":
                assert not found[~np.broadcast_to(real[:, None, None], found.shape)].any()
    assert t.check(1e-5) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_what_is_declared_is_offered_and_reading_it_changes_not_one_bit(case: str) -> None:
    lm, (ids, rest) = opened(case), inputs(case)
    with seen("*") as found:
        lm(ids, **rest)
    names = [site.name for site in sites_of(lm.model)]
    assert set(names) == {path.lstrip(".") for path in found if not path.endswith((".values", ".fused"))}
    plain = lm(ids, **rest)
    with trace(lm, read=[name for name in names if not name.endswith((".pattern", ".scores"))]):
        assert mx.array_equal(lm(ids, **rest), plain).item()
    assert gap(run(lm, ids, [inspect.patch("cross.z", traced(case, "cross.z"))], **rest), plain) < 1e-5


@pytest.mark.parametrize("case", [case for case in CASES if case != "switch-full"])  # whose capacity is for one call
def test_generation_reads_the_source_once_and_writes_row_by_row(case: str) -> None:
    lm, (ids, rest) = opened(case), inputs(case)
    with trace(lm, read=[*STACKS, "logits"]) as t:
        steps = lm.generate(ids[:1], attention_mask=rest["attention_mask"][:1], max_tokens=6, stop_at_end=False)
        written = [step.token for step in steps]
    assert mx.array_equal(t.ids[:, 1:], mx.array([written])[:, : t.ids.shape[1] - 1]).item()
    with trace(lm, read=STACKS) as whole:
        lm(ids[:1], attention_mask=rest["attention_mask"][:1], decoder_input_ids=t.ids)
    assert set(whole.names) == set(t.names) - {"logits"}
    for name in whole.names:
        real = (
            ids.shape[1]
            if ".attn." in name and name.startswith("decoder")
            else int(rest["attention_mask"][0].sum().item())
        )
        assert t[name].shape == whole[name].shape
        if name.startswith("encoder"):
            assert gap(t[name][:, :, :real], whole[name][:, :, :real]) < 1e-5
        else:
            assert gap(t[name], whole[name]) < 5e-5
    drawn = t.patterns(0, crosses=True)[0]
    assert drawn.queries == [str(i) for i in t.ids[0].tolist()] and drawn.keys == [str(i) for i in ids[0].tolist()]
    assert t.patterns(0)[0].keys == drawn.queries and t.patterns(0, stack="encoder")[0].queries == drawn.keys


def test_edits_reach_the_source_and_the_cross_attention_in_every_step() -> None:
    case = "t5"
    lm, (ids, _) = opened(case), inputs(case)
    edits = [
        inspect.zero("decoder.*.cross.z", heads={1: [0]}),
        inspect.scale("encoder.*.residual.out", 0.5, layers=0, positions=[1]),
        inspect.set("cross.scores", -float("inf"), keys=[2], layers=[0]),
        inspect.scale("cross.v", 2.0, positions=[0], layers=0),
    ]
    with editing(lm, edits):
        steps = [s.token for s in lm.generate(ids[:1], max_tokens=5, stop_at_end=False)]
    with trace(lm, read=["embed.out"]) as t:
        list(lm.generate(ids[:1], max_tokens=1, stop_at_end=False))
    written = [int(t.ids[0, 0].item())]
    for token in steps:
        logits = run(lm, ids[:1], edits, decoder_input_ids=mx.array([written]))
        assert mx.argmax(logits[0, -1]).item() == token
        written.append(token)
    assert gap(run(lm, ids[:1], edits, decoder_input_ids=t.ids), lm(ids[:1], decoder_input_ids=t.ids)) > 1e-2


def test_the_lens_of_the_decoder_ends_in_the_logits() -> None:
    for case in ("t5", "bart"):
        lm, (ids, rest) = opened(case), inputs(case)
        t = traced(case, "residual.out")
        found, logits = inspect.lens(t, None, top=1), lm(ids, **rest)
        assert found.tokens[-1, :, 0].tolist() == mx.argmax(logits[0], axis=-1).tolist()


def test_experts_of_limited_capacity_drop_tokens() -> None:
    t = traced("switch-full", "router.*", "mlp.op.kept")
    assert any(not mx.all(kept).item() for kept in t.all("kept").values())


def test_what_needs_one_text_is_refused_for_two() -> None:
    lm = opened("t5")
    for call, told in (
        (lambda: inspect.head_scores(lm), "reads two"),
        (lambda: inspect.attribution(traced("t5", "residual.out"), 3), "needs a decoder"),
        (lambda: traced("t5", "attn.pattern").by_layer("attn.pattern"), "several activations of a layer"),
    ):
        with pytest.raises(UsageError, match=told):
            call()
