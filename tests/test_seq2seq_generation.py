"""Texts of encoder-decoder models: beams as transformers searches, forced and forbidden tokens, the terminal."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cli_models import error_line, invoke
from helpers import GOLDEN, config_of, expected, seen
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import mlx_tformer as mt
from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.generation import Found, Generation
from mlx_tformer.generation.beam import BeamDecoder, Search
from mlx_tformer.generation.rules import Rules, Started
from mlx_tformer.nn import Cache, Position

BEAMS: list[dict[str, Any]] = json.loads((GOLDEN / "beams.json").read_text())
OURS = {"num_beams": "beams", "max_new_tokens": "max_tokens"}
PASSED = ("length_penalty", "early_stopping")


@cache
def loaded(case: str) -> mt.Seq2SeqModel:
    """The model of a golden case; tests must not change it."""
    found = mt.load(GOLDEN / case, dtype="float32")
    assert isinstance(found, mt.Seq2SeqModel)
    return found


def ruled(case: str, **settings: object) -> mt.Seq2SeqModel:
    """The model of a case whose generation config says this."""
    start = config_of(case)["decoder_start_token_id"]
    return replace(loaded(case), generation_config={"decoder_start_token_id": start, **settings})


def source(case: str, row: int) -> dict[str, mx.array]:
    e = expected(case)
    ids, mask = (mx.array(e[name])[row : row + 1] for name in ("input_ids", "attention_mask"))
    return {"prompt": ids, "attention_mask": mask}


# --- against transformers ---


@pytest.mark.parametrize("asked", BEAMS, ids=lambda row: f"{row['case']}-{row['row']}")
def test_texts_and_scores_are_those_of_transformers(asked: dict[str, Any]) -> None:
    settings = asked["settings"]
    rules = {k: v for k, v in settings.items() if k not in (*OURS, *PASSED)}
    given = {OURS.get(k, k): v for k, v in settings.items() if k in (*OURS, *PASSED)}
    made = ruled(asked["case"], **rules).generate(**source(asked["case"], asked["row"]), **given)
    tokens = [step.token for step in made]
    ends = set(settings["eos_token_id"])
    assert tokens == asked["ids"][: len(tokens)]
    assert len(tokens) == len(asked["ids"]) or tokens[-1] in ends  # padding is not a part of the text
    if asked["score"] is not None:
        assert isinstance(made, Found) and made.score == pytest.approx(asked["score"], abs=2e-5)


def test_the_golden_searches_end_early_and_late_and_differ_from_greedy_texts() -> None:
    lengths = {len(row["ids"]) for row in BEAMS}
    assert len(lengths) > 3 and max(lengths) == 10
    assert {json.dumps(row["settings"].get("early_stopping")) for row in BEAMS} == {"null", "true", '"never"'}


# --- against the definition ---


class Table:
    """A model of three tokens whose log-probabilities depend on the last token and the place."""

    def __init__(self, limit: int):
        table = mx.random.normal((limit + 1, 3, 3), key=mx.random.key(5))
        self.logprobs = table - mx.logsumexp(table, axis=-1, keepdims=True)
        self.at = 0

    def new_cache(self, context: int = 0) -> Cache:
        return Cache({}, context)

    def hidden(self, ids: mx.array, cache: Cache) -> mx.array:
        return ids

    def logits(self, x: mx.array) -> mx.array:
        return x

    def __call__(self, ids: mx.array, cache: Cache) -> mx.array:
        self.at += 1
        return self.logprobs[self.at - 1][ids]

    def scaled_positions(self) -> list[Position]:
        return []


def texts(limit: int, end: int) -> Iterator[tuple[int, ...]]:
    """All texts that end with their only end token, or at the limit."""
    for length in range(1, limit + 1):
        for tokens in product(range(3), repeat=length):
            if end not in tokens[:-1] and (tokens[-1] == end or length == limit):
                yield tokens


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_search_with_enough_beams_finds_the_best_text_of_all(penalty: float) -> None:
    limit, model = 4, Table(4)

    def score(tokens: tuple[int, ...]) -> float:
        total = sum(model.logprobs[i, a, b].item() for i, (a, b) in enumerate(zip((0, *tokens), tokens, strict=False)))
        return float(total) / len(tokens) ** penalty

    best = max(texts(limit, 2), key=score)
    search = Search(81, penalty, "never")
    decoder = BeamDecoder(Table(limit), Started(start=0, limit=limit), search, frozenset([2]))
    found = list(decoder)
    assert tuple(token for token, *_ in found) == best
    assert decoder.score == pytest.approx(score(best), abs=1e-6)
    assert sum(logprob for _, logprob, _ in found) / len(best) ** penalty == pytest.approx(score(best), abs=1e-5)


def test_the_source_is_read_once() -> None:
    with seen("encoder.out") as found:
        count = 0

        def see(path: str, value: mx.array) -> None:
            nonlocal count
            count += 1

        with mt.nn.watch("encoder.out", see):
            list(loaded("t5").generate(**source("t5", 0), max_tokens=4, beams=3))
    assert count == 1 and len(found) == 1


# --- rules ---


def test_the_first_and_the_last_token_can_be_forced_and_others_never_come() -> None:
    model = ruled("bart", forced_bos_token_id=11, forced_eos_token_id=[7], bad_words_ids=[[5], [9]], eos_token_id=7)
    made = model.generate(**source("bart", 0), max_tokens=6)
    tokens = [step.token for step in made]
    assert tokens[0] == 11 and tokens[-1] == 7 and made.finish == "end"
    assert next(model.generate(**source("bart", 0), max_tokens=3, first=12)).token == 12
    free = [s.token for s in model.generate(**source("bart", 0), max_tokens=6, stop_at_end=False)]
    assert free[-1] != 7
    plain = [s.token for s in ruled("bart").generate(**source("bart", 0), max_tokens=6, stop_at_end=False)]
    banned = ruled("bart", bad_words_ids=[[plain[2]]])
    assert plain[2] not in [s.token for s in banned.generate(**source("bart", 0), max_tokens=6, stop_at_end=False)]


def test_what_a_config_leaves_out_is_what_its_class_takes() -> None:
    model = loaded("marian")
    bare = {k: v for k, v in model.config.values.items() if "token_id" not in k}
    config = mt.config.Config(bare)
    with pytest.raises(BadInput, match="decoder_start_token_id: found 58100, expected an id from 0 to 130"):
        _ = replace(model, config=config, generation_config={}).rules
    assert replace(model, config=config, generation_config={}).end_ids == {0}
    with pytest.raises(BadInput, match="decoder_start_token_id: missing"):
        _ = replace(loaded("mbart"), config=mt.config.Config({"model_type": "mbart"}), generation_config={}).rules


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beams": 0}, "beams: found 0"),
        ({"beams": 2, "temperature": 0.5}, "expected one or the other"),
        ({"beams": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"beams": 2, "early_stopping": "now"}, "early_stopping"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"first": 1000}, "first: found 1000"),
        ({"first": "de"}, "first: found 'de'"),
        ({"attention_mask": mx.zeros((1, 24))}, "zeros alone"),
        ({"attention_mask": mx.ones((1, 3))}, "attention_mask: found shape"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loaded("bart").generate(mx.array(expected("bart")["input_ids"])[:1], **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bad_words_ids": [1, 2]}, "bad_words_ids: found .1, 2., expected lists of ids"),
        ({"bad_words_ids": [[1, 200]]}, "bad_words_ids: found 200, expected an id from 0 to 130"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: found -1, expected a whole number"),
        ({"encoder_no_repeat_ngram_size": 1.5}, "encoder_no_repeat_ngram_size: found 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty: found 0, expected a number above 0"),
        ({"exponential_decay_length_penalty": [1]}, "exponential_decay_length_penalty: found .1., expected"),
        ({"min_new_tokens": True}, "min_new_tokens: found True"),
        ({"num_beam_groups": 2}, "num_beam_groups: found 2, which is not followed here; expected 1 or none"),
        ({"diversity_penalty": 0.5}, "diversity_penalty: found 0.5, which is not followed here"),
        ({"constraints": [[3]]}, "constraints: found ..3.., which is not followed here; expected none"),
        ({"forced_bos_token_id": 500}, "forced_bos_token_id: found 500"),
        ({"forced_eos_token_id": "x"}, "forced_eos_token_id: found 'x'"),
        ({"min_length": -1}, "min_length: found -1"),
        ({"num_beams": -2}, "beams: found -2"),
    ],
)
def test_configs_that_cannot_be_followed_are_refused(settings: dict[str, Any], message: str) -> None:
    model = ruled("bart", **settings)
    with pytest.raises(BadInput, match=message):
        _ = model.rules, model.recommended_search


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_sequence_of_tokens_comes_that_is_there_already(n: int) -> None:
    texts = mx.random.randint(0, 3, (4, 14), key=mx.random.key(n))
    source = (0, 1, 2, 2, 1, 7, 1, 7)  # of which the decoder cannot write 7
    for length in range(1, 14):
        ids = texts[:, :length]
        same = Rules(ngram=n).apply(mx.zeros((4, 3)), ids).tolist()
        theirs = Rules(source_ngram=n, source=source).apply(mx.zeros((4, 3)), ids).tolist()
        for row, text in enumerate(ids.tolist()):
            for token in range(3):
                for found, of in ((same, text), (theirs, list(source))):
                    there = {tuple(of[i : i + n]) for i in range(len(of) - n + 1)}
                    new = (*text[len(text) - n + 1 :], token) if length >= n - 1 else ()
                    assert (found[row][token] == -math.inf) == (new in there)


def test_the_length_is_the_callers_else_what_the_config_says() -> None:
    def length(settings: dict[str, Any], **given: int) -> int:
        model = ruled("bart", **settings)
        return len(list(model.generate(**source("bart", 0), stop_at_end=False, **given)))

    assert length({"max_length": 5}) == 4  # it counts the start
    assert length({"max_length": 5, "max_new_tokens": 7}) == 7
    assert length({"max_length": 5}, max_tokens=6) == 6
    assert length({}) == loaded("bart").context  # which is less than 100
    with pytest.raises(BadInput, match="max_length: found 'x'"):
        length({"max_length": "x"})


@pytest.mark.parametrize("beams", [1, 3])
def test_repetitions_are_what_the_caller_says_else_the_config(beams: int) -> None:
    def text(model: mt.Seq2SeqModel, **given: Any) -> list[int]:
        made = model.generate(**source("t5", 0), beams=beams, max_tokens=9, stop_at_end=False, **given)
        return [step.token for step in made]

    config = ruled("t5", no_repeat_ngram_size=1, repetition_penalty=1.5)
    plain, strict = text(ruled("t5")), text(config)
    assert len({*strict}) == len(strict) and plain != strict
    assert text(ruled("t5"), no_repeat_ngram_size=1, repetition_penalty=1.5) == strict
    assert text(config, no_repeat_ngram_size=0, repetition_penalty=1) == plain
    assert config.recommended_sampling == {}  # it would count twice
    for wrong in ({"no_repeat_ngram_size": -1}, {"repetition_penalty": 0}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))}: found"):
            text(config, **wrong)


@pytest.mark.parametrize("beams", [1, 3])
def test_other_rules_are_what_the_caller_says_else_the_config(beams: int) -> None:
    def text(model: mt.Seq2SeqModel, **given: Any) -> list[int]:
        made = model.generate(**source("t5", 0), beams=beams, max_tokens=6, **given)
        return [step.token for step in made]

    plain = text(ruled("t5"))
    rules = {"suppress_tokens": plain[1:2], "begin_suppress_tokens": plain[:1], "min_length": 7, "eos_token_id": 31}
    strict = text(ruled("t5", **rules, forced_eos_token_id=9))
    assert plain[0] != strict[0] and plain[1] not in strict and len(strict) == 6 and strict[-1] == 9
    own = {name: value for name, value in rules.items() if name != "eos_token_id"}
    assert text(ruled("t5", eos_token_id=31), **own, forced_eos_token_id=9) == strict
    none = {"suppress_tokens": [], "begin_suppress_tokens": (), "min_length": 0, "forced_eos_token_id": ()}
    assert text(ruled("t5", **rules, forced_eos_token_id=9), **none) == text(ruled("t5", eos_token_id=31))
    assert text(ruled("t5"), forced_bos_token_id=7)[0] == text(ruled("t5", forced_bos_token_id=8), first=7)[0] == 7
    with pytest.raises(UsageError, match="suppress_tokens: found id 131"):
        text(ruled("t5"), suppress_tokens=[131])


def test_a_prompt_of_several_texts_or_one_that_is_too_long_is_refused() -> None:
    for prompt, message in ((mx.zeros((2, 3), mx.int32), "a batch of 2"), ([1] * 65, "has positions for 64")):
        with pytest.raises(UsageError, match=message):
            loaded("bart").generate(prompt)


def test_sampling_with_a_seed_gives_the_same_text_again() -> None:
    def text() -> list[int]:
        made = loaded("bart").generate(**source("bart", 0), max_tokens=9, temperature=2.0, top_k=30, seed=4)
        assert isinstance(made, Generation)
        return [step.token for step in made]

    assert text() == text() and len(set(text())) > 3


# --- the terminal ---


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BART's golden case with a tokenizer of words, which puts an end behind a text."""
    folder = tmp_path_factory.mktemp("bart") / "model"
    shutil.copytree(GOLDEN / "bart", folder, ignore=shutil.ignore_patterns("expected*", "case*"))
    words = ["<s>", "<pad>", "</s>", *(f"w{i}" for i in range(3, 131))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_terminal_writes_what_the_library_writes(speaking: Path) -> None:
    model = mt.load(speaking)
    assert isinstance(model, mt.Seq2SeqModel) and list(model.tokens("w5 w9")) == [5, 9, 2]
    wanted = "".join(step.text for step in model.generate("w5 w9 w20", max_tokens=5))
    result = invoke("generate", "-m", str(speaking), "-n", "5", "w5 w9 w20")
    assert (result.exit_code, result.stdout.strip()) == (0, wanted.strip()), result.output
    assert "stopped after 5 tokens" in result.stderr
    made = model.generate("w5 w9 w20", max_tokens=5, beams=3, length_penalty=2.0)
    tokens = [step.token for step in made]
    options = ("--beams", "3", "--length-penalty", "2", "--json", "--stats")
    found = json.loads(invoke("generate", "-m", str(speaking), "-n", "5", *options, "w5 w9 w20").stdout)
    assert isinstance(made, Found)
    assert (found["tokens"], found["prompt_tokens"]) == (tokens, 4)
    assert found["score"] == pytest.approx(made.score, abs=1e-5)
    first = invoke("generate", "-m", str(speaking), "-n", "2", "--first", "w77", "w5").stdout
    assert first.startswith("w77 ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--system", "x"), "--system is about a chat template"),
        (("--raw",), "--raw is about a chat template"),
        (("--length-penalty", "2"), "--length-penalty is for a search"),
        (("--beams", "2", "--temperature", "1"), "expected one or the other"),
        (("--first", "nobody"), "first: found 'nobody'"),
    ],
)
def test_options_that_make_no_sense_are_refused(speaking: Path, options: tuple[str, ...], message: str) -> None:
    assert message in error_line(invoke("generate", "-m", str(speaking), *options, "w5"), 2)


def test_options_for_models_with_an_encoder_are_refused_for_others() -> None:
    assert "--beams is for models with an encoder" in error_line(invoke("generate", "--beams", "2", "ROMEO:"), 2)


def test_authors_recommend_a_search_which_the_terminal_follows(speaking: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(speaking, tmp_path / "model")
    settings = {"decoder_start_token_id": 2, "num_beams": 3, "length_penalty": 2.0, "early_stopping": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    found = json.loads(invoke("generate", "-m", str(folder), "-n", "4", "--json", "w5 w9").stdout)
    assert found["sampling"] == {"beams": 3, "length_penalty": 2.0, "early_stopping": True}
    drawn = json.loads(invoke("generate", "-m", str(folder), "-n", "4", "--json", "--seed", "1", "w5 w9").stdout)
    assert "beams" not in drawn["sampling"] and "score" not in drawn


def test_conversions_are_verified_and_other_models_refused(speaking: Path, tmp_path: Path) -> None:
    result = invoke("convert", str(speaking), str(tmp_path / "ours"), "--verify")
    assert result.exit_code == 0 and "weights: equal" in result.stderr, result.output
    rounded = mt.verify(GOLDEN / "t5", GOLDEN / "t5")
    assert rounded.passed and rounded.mean_kl == 0
    with pytest.raises(BadInput, match="another model"):
        mt.verify(GOLDEN / "bart", GOLDEN / "marian")
