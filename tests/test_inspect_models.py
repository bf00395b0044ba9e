"""What is known of the attention of two real models, SmolLM2-135M-Instruct and all-MiniLM-L6-v2."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import gap
from mlx.utils import tree_map

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect import HeadScores, editing, trace
from mlx_tformer.nn import matrix

IOI = "Mary and John went out. John gave a drink to"


@pytest.fixture(scope="module")
def lm(smollm2_gguf: Any) -> mt.LanguageModel:
    """The model with its weights unpacked: packed ones are slow on a CPU."""
    found = mt.load(smollm2_gguf, dtype="float32")

    def unpacked(module: nn.Module) -> nn.Module:
        if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            return module
        plain = nn.Embedding(1, 1) if isinstance(module, nn.QuantizedEmbedding) else nn.Linear(1, 1, bias=False)
        plain.weight = matrix(module).astype(mx.float32)
        return plain

    leaves = tree_map(unpacked, found.model.leaf_modules(), is_leaf=nn.Module.is_module)
    found.model.update_modules(leaves)
    return found


@pytest.fixture(scope="module")
def scores(lm: mt.LanguageModel) -> HeadScores:
    return inspect.head_scores(lm, ["induction", "previous", "duplicate", "sink"], seeds=4)


def test_the_heads_of_a_real_model_do_what_they_are_known_for(scores: HeadScores) -> None:
    first, again = scores.losses
    assert 13.5 < first < 14.7 and 2.9 <= again <= 4.0
    assert [(layer, head) for layer, head, _ in scores.best("induction", 4)] == [(18, 6), (17, 3), (17, 4), (18, 7)]
    for kind, layer, head, low, high in (
        ("induction", 18, 6, 0.87, 0.93),
        ("induction", 17, 3, 0.75, 0.80),
        ("induction", 17, 4, 0.70, 0.75),
        ("induction", 18, 7, 0.58, 0.64),
        ("previous", 16, 0, 0.88, 0.90),
        ("previous", 11, 1, 0.83, 0.84),
        ("duplicate", 14, 3, 0.65, 0.74),
        ("duplicate", 8, 0, 0.65, 0.73),
        ("sink", 18, 8, 1.00, 1.00),
    ):
        assert low - 0.03 < scores[kind][layer, head].item() < high + 0.03, (kind, layer, head)
    assert scores.best("previous", 2)[0][:2] == (16, 0) and scores.best("duplicate", 1)[0][:2] == (14, 3)
    assert 0.36 < scores["sink"].mean().item() < 0.42


def test_without_its_induction_heads_the_model_no_longer_repeats(lm: mt.LanguageModel, scores: HeadScores) -> None:
    def without(heads: list[tuple[int, int]]) -> float:
        by_layer = {layer: [h for at, h in heads if at == layer] for layer, _ in heads}
        with editing(lm, [inspect.zero("attn.z", heads=by_layer)]):
            found = inspect.head_scores(lm, ["current"], seeds=1)
        assert found.losses is not None
        return found.losses[1]

    best = [(layer, head) for layer, head, _ in scores.best("induction", 6)]
    others = [(2, 4), (5, 1), (9, 7), (13, 2), (21, 5), (26, 0)]
    assert without(best) > 9.0
    assert 2.6 <= without(others) <= 5.3


def test_paris_comes_up_late_and_the_lens_ends_in_the_logits(lm: mt.LanguageModel) -> None:
    tokens = lm.tokens("The capital of France is")
    with trace(lm, read=["residual.out"]) as t:
        logits = lm(tokens)
    found = inspect.lens(t, -1, top=3, of=" Paris")
    ranks = np.array(found.ranks[:, 0]).tolist()
    assert abs(ranks[0] - 2678) < 60 and abs(ranks[26] - 33) <= 3 and ranks[-1] == 0
    assert found.texts[-1][0][0] == " Paris"
    assert mx.argsort(-logits[0, -1])[:3].tolist() == found.tokens[-1, 0].tolist()


def test_the_script_that_a_writer_should_be_able_to_write(lm: mt.LanguageModel) -> None:
    tokens = lm.tokens(IOI)
    with trace(lm, read=["attn.pattern", "residual.out"]) as t:
        logits = lm(tokens)
    assert t.check(1e-4) < 1e-5
    assert t.labels()[0] == "Mary" and t.patterns(layer=18, head=6)[0].keys == t.labels()
    found = inspect.attribution(t, " Mary", minus=" John")
    mary, john = (lm.tokens(name)[0] for name in (" Mary", " John"))
    wanted = (logits[0, -1, mary] - logits[0, -1, john]).item()
    assert found.total == pytest.approx(wanted, abs=2e-3) and found.logit == pytest.approx(wanted, abs=1e-3)
    assert len(found.top(8)) == 8 and {share.kind for share in found.shares} >= {"head", "mlp", "embed"}
    cut = inspect.run(lm, tokens, edit=[inspect.zero("attn.z", heads={18: [6, 7]})])
    assert cut.shape == logits.shape and gap(cut, logits) > 0.1


def test_generation_with_an_edit_and_a_trace_is_that_of_one_pass(lm: mt.LanguageModel) -> None:
    edit = [inspect.scale("mlp.delta", 0.5, layers=[5])]
    with editing(lm, edit), trace(lm, read=["layers.18.attn.pattern"]) as t:
        steps = [step.token for step in lm.generate(IOI, max_tokens=5)]
    ids = [*lm.tokens(IOI), *steps][: t.ids.shape[1]]
    with editing(lm, edit), trace(lm, read=["layers.18.attn.pattern"]) as whole:
        lm(ids)
    assert gap(t["attn.pattern"], whole["attn.pattern"]) < 1e-4


def test_the_heads_of_an_encoder_look_to_both_sides(minilm: mt.EncoderModel) -> None:
    texts = ["The quick brown fox jumps over the lazy dog.", "Stock prices fell sharply on Monday morning in New York."]
    means = []
    for text in texts:
        with trace(minilm, read=["attn.pattern"]) as t:
            minilm(minilm.tokens(text))
        assert t.check(1e-4) < 1e-5
        assert mx.triu(t["layers.0.attn.pattern"], 1).max().item() > 0.1
        p = {layer: np.array(x[0]) for layer, x in t.by_layer("attn.pattern").items()}
        means.append((np.diagonal(p[0][2], -1).mean(), np.diagonal(p[1][8], 1).mean(), p[4][5][:, 0].mean()))
    previous, following, first = np.mean(means, axis=0)
    assert previous > 0.97 and 0.5 < following < 0.8 and 0.8 < first <= 1.0


def test_padding_changes_no_pattern_of_an_encoder(minilm: mt.EncoderModel) -> None:
    ids = mx.array([list(minilm.tokens("The quick brown fox"))])
    padded, mask = mx.pad(ids, [(0, 0), (0, 5)]), mx.arange(ids.shape[1] + 5)[None] < ids.shape[1]
    with trace(minilm, read=["attn.pattern"]) as plain:
        minilm(ids)
    with trace(minilm, read=["attn.pattern"]) as t:
        minilm(padded, attention_mask=mask)
    n = ids.shape[1]
    for name in plain.names:
        assert gap(t[name][:, :, :n, :n], plain[name]) < 1e-5 and t[name][:, :, :n, n:].max().item() == 0
