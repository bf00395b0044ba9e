"""What a generation config forces and forbids where a text is continued: as transformers does, in any batch, with any
guesses, and by the caller's word as well."""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cli_models import error_line, invoke, speaking
from helpers import GOLDEN

import mlx_tformer as mt
from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.generation import Sampler, Sampling
from mlx_tformer.generation.rules import rules_for
from mlx_tformer.generation.settings import recommended

TEXTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "sampling" / "texts.json").read_text())
ENDS = [2, 5]


@cache
def model() -> mt.LanguageModel:
    """The model that transformers wrote the texts with; tests must not change it."""
    lm = mt.load(GOLDEN / "llama-gqa-tied", dtype="float32")
    assert isinstance(lm, mt.LanguageModel)
    return replace(lm, generation_config={"eos_token_id": ENDS})


def following(settings: dict[str, Any]) -> dict[str, Any]:
    """What `generate` is told where the generation config has these settings."""
    told = {name: value for name, value in settings.items() if name != "max_new_tokens"}
    lm = replace(model(), generation_config={"eos_token_id": ENDS, **told})
    return {"max_tokens": settings.get("max_new_tokens", 14), **lm.recommended_sampling}


def alone(prompt: list[int], **asked: Any) -> list[int]:
    return [step.token for step in model().generate(prompt, **asked)]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{len(text['prompt'])}-{'-'.join(text['settings'])}")
@pytest.mark.parametrize("draft", [None, "lookup", "itself"])
def test_texts_are_those_of_transformers(text: dict[str, Any], draft: str | None) -> None:
    guessing = {} if draft is None else {"draft": model() if draft == "itself" else draft, "draft_tokens": 3}
    assert alone(text["prompt"], **following(text["settings"]), **guessing) == text["tokens"]


@pytest.mark.parametrize("size", [1, 5, 24])
def test_texts_with_other_rules_beside_them_are_the_same(size: int) -> None:
    requests = [{"prompt": text["prompt"], **following(text["settings"])} for text in TEXTS]
    found = [result.tokens for result in model().batch(requests, size=size)]
    assert found == [text["tokens"] for text in TEXTS]


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_rules_hold_for_what_is_drawn_by_chance(draft: str | None) -> None:
    rules = {"no_repeat_ngram_size": 2, "suppress_tokens": [40, 60], "begin_suppress_tokens": [7], "min_length": 12}
    drawn: dict[str, Any] = {"temperature": 1.5, "top_k": 3, "max_tokens": 25, **rules}
    prompt, texts = [9, 7, 9, 7], [alone([9, 7, 9, 7], seed=seed, **drawn, draft=draft) for seed in range(6)]
    for tokens in texts:
        whole = [*prompt, *tokens]
        pairs = list(pairwise(whole))[3:]
        assert len({*pairs}) == len(pairs) and not {*pairs} & {(9, 7), (7, 9)}
        assert not {40, 60} & {*tokens} and tokens[0] != 7
        assert len(whole) > 12 and not {*ENDS} & {*whole[:12]}
    assert len({*map(tuple, texts)}) == 6
    if draft is None:
        together = model().batch([{"prompt": prompt, "seed": seed} for seed in range(6)], **drawn, size=4)
        assert [result.tokens for result in together] == texts


def test_no_end_is_forced_on_a_text_that_does_not_stop_at_ends() -> None:
    free, forced = (alone([7], max_tokens=6, stop_at_end=stop, forced_eos_token_id=[5]) for stop in (False, True))
    assert free == alone([7], max_tokens=6) != forced and forced[-1] == 5


def test_tokens_can_be_texts(shakespeare: mt.LanguageModel) -> None:
    space = shakespeare.tokenizer.encode(" the", add_bos=False)
    assert len(space) == 1
    plain = shakespeare.generate("ROMEO:", max_tokens=40)
    list(plain)
    first = shakespeare.tokenizer.decode(plain.tokens[:1])
    never = shakespeare.generate("ROMEO:", max_tokens=40, suppress_tokens=[" the"], begin_suppress_tokens=[first])
    list(never)
    assert space[0] in plain.tokens and space[0] not in never.tokens and never.tokens[0] != plain.tokens[0]
    biased = shakespeare.generate("ROMEO:", max_tokens=40, sequence_bias=[(" the", -100.0)])
    list(biased)
    assert " the" not in biased.text


def test_settings_that_say_nothing_of_rules_cost_nothing() -> None:
    settings = Sampling(repetition_penalty=1.0, suppress_tokens=[], forced_eos_token_id=[]).in_ids(None, 9)
    assert rules_for(settings, 3, 9, [2]) is None and Sampler(settings, [[1]], end_ids=[2]).settled
    assert not Sampler(Sampling(sequence_bias=[([1], 2.0)]).in_ids(None, 9), [[1]]).settled


def test_a_sampler_by_itself_keeps_to_the_rules() -> None:
    sampler = Sampler(Sampling(no_repeat_ngram_size=1, suppress_tokens=[3]), [[0]], end_ids=[4])
    logits = mx.array([[9.0, 5.0, 6.0, 8.0, 1.0]])
    assert not sampler.settled and [sampler(logits).token.item() for _ in range(3)] == [2, 1, 4]


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: found -1, expected a whole number of 0 or more"),
        ({"min_length": 1.5}, "min_length: found 1.5, expected a whole number of 0 or more"),
        ({"suppress_tokens": 7}, "suppress_tokens: found 7, expected a list of tokens"),
        ({"suppress_tokens": [131]}, "suppress_tokens: found id 131, expected 0 to 130"),
        ({"begin_suppress_tokens": [None]}, r"begin_suppress_tokens: found \[None\], expected a list of tokens"),
        ({"begin_suppress_tokens": ["a"]}, "begin_suppress_tokens: found 'a', but the model has no tokenizer"),
        ({"forced_bos_token_id": [1]}, r"forced_bos_token_id: found \[1\], expected a token"),
        ({"forced_eos_token_id": 1.0}, "forced_eos_token_id: found 1.0, expected a token or a list of them"),
        ({"forced_eos_token_id": [-1]}, "forced_eos_token_id: found id -1, expected 0 to 130"),
        ({"exponential_decay_length_penalty": [1]}, r"exponential_decay_length_penalty: found \[1\], expected"),
        ({"exponential_decay_length_penalty": [-1, 2.0]}, "exponential_decay_length_penalty: found .-1, 2.0"),
        ({"sequence_bias": {"a": 1}}, "sequence_bias: found {'a': 1}, expected pairs of a text, or ids, and a number"),
        ({"sequence_bias": [[1, 2.0]]}, r"sequence_bias: found \[\[1, 2.0\]\], expected pairs"),
        ({"sequence_bias": [[[], 2.0]]}, "sequence_bias: found"),
        ({"sequence_bias": [[[1], "x"]]}, r"sequence_bias: \[1\]: found x, expected a number"),
        ({"sequence_bias": [[[1, 500], 2.0]]}, "sequence_bias: found id 500, expected 0 to 130"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_and_is_bad_input_in_a_config(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=f"^{problem}"):
        model().generate([7], **asked)
    with pytest.raises(UsageError, match=f"^line 2: {problem}"):
        list(model().batch([[7], {"prompt": [7], **asked}], names=["line 1", "line 2"], max_tokens=1))
    with pytest.raises(BadInput, match=r"generation_config\.json: "):
        _ = replace(model(), generation_config=asked).recommended_sampling


def test_an_end_is_no_bad_word_and_new_tokens_count_more_than_all() -> None:
    config = {"bad_words_ids": [[5], [5, 5], [9]], "min_length": 9, "min_new_tokens": 2, "suppress_tokens": []}
    assert recommended(config, "a model", 20, [5]) == {"bad_words": [[5, 5], [9]], "min_tokens": 2}


def test_the_terminal_follows_the_config_and_lines_of_a_batch_their_own(tmp_path: Path) -> None:
    config = {"no_repeat_ngram_size": 1, "suppress_tokens": [0, 1], "num_beams": 2}
    folder = speaking(tmp_path / "model", generation=config)
    result = invoke("generate", "-m", str(folder), "-n", "12", "--json", "c")
    found = json.loads(result.stdout)
    assert len({2, *found["tokens"]}) == 13 and not {0, 1} & {*found["tokens"]}
    assert found["sampling"] == {"no_repeat_ngram_size": 1, "suppress_tokens": [0, 1]}
    assert "asks for num_beams, which is not followed here" in result.stderr
    lines = [{"ids": [2]}, {"ids": [2], "no_repeat_ngram_size": 0, "suppress_tokens": []}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given = ("generate", "-m", str(folder), "-n", "12", "--batch", str(tmp_path / "a.jsonl"))
    strict, free = map(json.loads, invoke(*given).stdout.splitlines())
    assert strict["tokens"] == found["tokens"]
    assert free["tokens"] == [step.token for step in mt.load(folder).generate([2], max_tokens=12)]
    speaking(folder, generation={"suppress_tokens": [900]})
    assert "suppress_tokens: found id 900" in error_line(invoke("generate", "-m", str(folder), "c"), 3)
