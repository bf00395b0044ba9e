"""Which tokens a trace and an edit speak of: in generations and scores, beside drafts and other models, in batches."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers import GOLDEN, gap, opened
from test_draft import folder_of

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.errors import UsageError
from mlx_tformer.generation import decode
from mlx_tformer.generation import scores as generation_scores
from mlx_tformer.inspect import editing, trace

IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.mark.parametrize("settings", [{}, {"draft": "lookup"}, {"prompt_logprobs": True}], ids=str)
def test_logits_of_a_generation_are_those_of_their_tokens(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, size in ((generation_scores, "ROWS", 3), (decode, "CHUNK", 7)):
        monkeypatch.setattr(module, name, size)
    lm, prompt = opened("llama-gqa-tied"), [3, 4, 5, 6] * 4
    with trace(lm, read=["logits"]) as t:
        steps = [step.token for step in lm.generate(prompt, max_tokens=6, stop_at_end=False, **settings)]
    count = t.ids.shape[1] - (0 if "prompt_logprobs" in settings else len(prompt) - 1)
    wanted = lm([*prompt, *steps][: t.ids.shape[1]])[:, -count:]
    assert t["logits"].shape == wanted.shape and gap(t["logits"], wanted) < 1e-4


def test_logits_are_edited_where_they_stand_when_texts_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_scores, "ROWS", 3)
    lm, ids = opened("llama-gqa-tied"), IDS.tolist()[0]
    plain = lm.score([ids])[0].tokens
    for place in range(7):
        with editing(lm, [inspect.set("logits", 0.0, positions=[place])]):
            found = lm.score([ids])[0].tokens
        changed = [i for i, (a, b) in enumerate(zip(found, plain, strict=True)) if a.logprob != b.logprob]
        assert changed == [place + 1]


def test_what_drafts_of_the_model_itself_embed_is_no_part_of_the_text(tmp_path: Path) -> None:
    lm, prompt = mt.load(folder_of(tmp_path / "a"), dtype="float32"), [3, 4, 5, 6] * 4
    with trace(lm, read=["embed.out", "embed.ids"]) as t:
        steps = [step.token for step in lm.generate(prompt, max_tokens=6, stop_at_end=False, draft="ahead")]
    ids = mx.array([[*prompt, *steps]])[:, : t.ids.shape[1]]
    assert mx.array_equal(t["embed.ids"], ids).item() and mx.array_equal(t.ids, ids).item()
    with trace(lm, read=["embed.out"]) as whole:
        lm(ids)
    assert gap(t["embed.out"], whole["embed.out"]) == 0


def test_another_model_that_runs_beside_is_neither_read_nor_edited() -> None:
    lm, other = opened("llama-gqa-tied"), mt.load(GOLDEN / "llama-gqa-tied", dtype="float32")
    other.model.embed.tokens.weight = other.model.embed.tokens.weight * 1.3
    prompt, names = [3, 4, 5, 6] * 4, ["attn.k", "residual.out", "attn.pattern"]
    with inspect.stats() as watch, trace(lm, read=names) as t:
        steps = [step.token for step in lm.generate(prompt, max_tokens=8, draft=other, stop_at_end=False)]
    ids = mx.array([[*prompt, *steps]])[:, : t.ids.shape[1]]
    alone = other(IDS)
    with inspect.stats() as plain, trace(lm, read=names) as whole:
        lm(ids)
    assert gap(mx.array(watch[2].entropy), plain[2].entropy) < 1e-5
    with trace(lm, read=names) as beside, editing(lm, [inspect.zero("attn.z", heads=[0])]):
        assert mx.array_equal(other(IDS), alone).item()
        lm(ids)
        other(IDS)
    assert all(gap(t[name], whole[name]) < 1e-4 and beside[name].shape == whole[name].shape for name in t.names)
    assert gap(beside["layers.0.attn.k"], whole["layers.0.attn.k"]) < 1e-5


def test_which_tokens_are_text_is_told() -> None:
    mask = mx.array([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    lm, encoder = opened("qwen3"), opened("bert")
    with trace(lm, read=["attn.k", "embed.out"]) as t:
        cache = lm.new_cache()
        lm(mx.concatenate([IDS, IDS]), cache, attention_mask=mask)
        lm(mx.array([[5], [6]]), cache)
    every = mx.concatenate([mask, mx.ones((2, 1), mx.int32)], axis=1)
    assert mx.array_equal(t.real("layers.0.attn.k"), every).item() and mx.array_equal(t.real("embed.out"), every).item()
    with trace(encoder, read=["residual.out"]) as t:
        encoder(mx.concatenate([IDS, IDS]), attention_mask=mask[:, ::-1])
    assert mx.array_equal(t.real("layers.0.residual.out"), mask[:, ::-1]).item()
    with trace(lm, read=["residual.out"]) as t:
        lm(IDS)
    told = t.real("layers.0.residual.out")
    assert told is None or mx.all(told).item()


@pytest.mark.parametrize("case", ["llama-gqa-tied", "bart"])
def test_texts_that_change_their_rows_are_refused(case: str) -> None:
    lm = opened(case)
    t = trace(lm, read=["decoder.*.attn.pattern"])
    with pytest.raises(UsageError, match="found a batch of 3 that goes on with a text of 1; a trace can read"), t:
        if case == "bart":
            list(lm.generate([3, 4, 5], max_tokens=4, beams=3))
        else:
            list(lm.batch([[3, 4, 5], [6, 7], [8]], max_tokens=4, stop_at_end=False))


def test_rows_that_a_batch_does_not_have_are_refused() -> None:
    lm = opened("qwen3")
    with trace(lm, read=["attn.pattern", "residual.out"]) as t:
        lm(IDS)
    for asked in (
        lambda row: t.labels(row=row),
        lambda row: t.patterns(row=row),
        lambda row: inspect.lens(t, row=row),
        lambda row: inspect.attribution(t, 5, row=row),
        lambda row: inspect.flow(t, row=row),
    ):
        for row in (1, -1):
            with pytest.raises(UsageError, match=f"row: found {row}, expected 0 to 0"):
                asked(row)
    with pytest.raises(UsageError, match="found no position"):
        inspect.lens(t, [])
    with pytest.raises(UsageError, match="the trace has read nothing"):
        inspect.attribution(trace(lm, read=["residual.out"]), 5)
