"""Text that a schema or an expression allows: whatever the weights, the tokenizer and the settings, nothing else."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import mlx_tformer as mt
from mlx_tformer.errors import UsageError
from mlx_tformer.generation.grammar import grammar_for

SIGNS = [*'{}[]":,.-0123456789', "e", "n", "r", "t", "u", "a", "l", "s", "f", "\\", "b"]
WHOLE = ['{"', '":', "true", "12", "al", "ab"]
VOCAB = 67
"""Ids of the model, more than any of the tokenizers has."""
DEAD = "regex: after 3 tokens, the other settings forbid every token that may follow"


def byte_level() -> Tokenizer:
    words = ["</s>", *SIGNS, *WHOLE, "Ġ", 'Ġ"', "Ġab", "Ċ", "Ã", "©"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def sentencepiece() -> Tokenizer:
    words = ["</s>", *SIGNS, *WHOLE, "▁", '▁"', "▁ab", "▁{", "▁▁", "<0x0A>", "<0xC3>", "<0xA9>"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def wordpiece() -> Tokenizer:
    words = ["</s>", *(f"##{sign}" for sign in SIGNS), *WHOLE, "{", "[", "é", "##é", "a", "1", '"', "n", ".", ","]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="a"))
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece, "wordpiece": wordpiece}


class Loaded(dict[str, mt.LanguageModel]):
    """Random models, one for each kind of tokenizer, made when it is needed."""

    root: Path

    def __missing__(self, kind: str) -> mt.LanguageModel:
        folder = self.root / kind
        folder.mkdir()
        config = json.loads((GOLDEN / "llama-bias" / "config.json").read_text())
        config = {key: value for key, value in config.items() if key != "eos_token_id"}
        config |= {"max_position_embeddings": 2048, "dtype": "float32", "torch_dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes((GOLDEN / "llama-bias" / "model.safetensors").read_bytes())
        made = KINDS[kind]()
        made.add_special_tokens(["</s>"])
        made.save(str(folder / "tokenizer.json"))
        more = {"eos_token": "</s>", "clean_up_tokenization_spaces": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(more))
        self[kind] = mt.load(folder, dtype="float32")
        assert self[kind].vocab == VOCAB > self[kind].tokenizer.size
        return self[kind]


MODELS = Loaded()


@pytest.fixture(scope="module", autouse=True)
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    MODELS.root = tmp_path_factory.mktemp("speaking")
    return MODELS.root


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether JSON is what the schemas of this file ask for."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "array":
        return isinstance(value, list) and len(value) <= schema["maxItems"] and all(
            fits(schema["items"], item) for item in value
        )  # fmt: skip
    if kind == "object":
        return set(value) == set(schema["required"]) and all(fits(schema["properties"][k], v) for k, v in value.items())
    return isinstance(value, bool) if kind == "boolean" else value is None


def boundless(parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


simple = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["al", "ab", 12, None]}]),
    st.integers(-30, 200).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 120}),
    st.integers(0, 9).map(lambda size: {"type": "string", "maxLength": size}),
)
schemas = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.dictionaries(st.sampled_from(["a", "al", "true", "1"]), inner, max_size=3).map(boundless),
    ),
    max_leaves=3,
)
prompts = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=8)
drawn = st.one_of(
    st.just({}),
    st.builds(
        lambda seed, top_k, top_p: {"temperature": 1.5, "seed": seed, "top_k": top_k, "top_p": top_p},
        st.integers(0, 99), st.sampled_from([0, 1, 3]), st.sampled_from([1.0, 0.7]),
    ),
)  # fmt: skip


@given(schema=schemas, kind=st.sampled_from(list(KINDS)), ids=prompts, sampling=drawn)
@settings(max_examples=40)
def test_any_weights_write_json_of_any_schema(
    schema: dict[str, Any], kind: str, ids: list[int], sampling: dict[str, Any]
) -> None:
    generation = MODELS[kind].generate(ids, json_schema=schema, max_tokens=1500, **sampling)
    assert [step.finish for step in generation][-1] == "end"
    assert fits(schema, json.loads(generation.text))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "pattern",
    ["ab{2,9}", "[ab]{3} ?[0-9]{2}", " ?(true|al){1,9},", "é?é", "-?(0|[1-9][0-9]{0,3})(\\.[0-9]{1,5})?", "al ab 1 12"],
)
def test_text_matches_the_whole_expression(kind: str, pattern: str) -> None:
    for sampling in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 2.0, "seed": 2, "repetition_penalty": 1.5}):
        generation = MODELS[kind].generate([5, 9], regex=pattern, max_tokens=200, **sampling)
        assert [step.finish for step in generation][-1] == "end"
        assert re.fullmatch(pattern, generation.text), generation.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ['{"al": 12}', "ab ab", "é", "1.2, 1", " ab", " a", "true"])
def test_what_only_one_text_matches_gives_that_text_or_no_token_can(kind: str, text: str) -> None:
    pattern = re.escape(text).replace("\\ ", " ")
    if kind == "wordpiece" and text.startswith(" "):  # it has no way to begin with a space
        with pytest.raises(UsageError, match="no token of the vocabulary may follow"):
            MODELS[kind].generate([3], regex=pattern)
        return
    generation = MODELS[kind].generate([3], regex=pattern)
    steps = list(generation)
    assert (generation.text, generation.finish) == (text, "end")
    assert steps[-1].token in MODELS[kind].end_ids


def test_padding_special_tokens_and_the_end_never_come_inside() -> None:
    lm = MODELS["byte-level"]
    grammar = grammar_for(lm, None, "[^é]{5,9}", [0])
    allowed = [i for i, may in enumerate(grammar.allowed().tolist()) if may]
    assert 0 not in allowed and allowed and max(allowed) < lm.tokenizer.size < lm.vocab
    b = lm.tokenizer.id_of("b")
    assert not grammar_for(lm, None, "[ab]{3}", [0, b]).allowed()[b].item()  # a letter that ends texts


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_k": 30}])
def test_a_batch_writes_what_each_would_alone(sampling: dict[str, Any]) -> None:
    lm = MODELS["sentencepiece"]
    schema = boundless(
        {"a": {"type": "integer", "minimum": 0, "maximum": 500}, "al": {"type": "string", "maxLength": 5}}
    )
    own: list[dict[str, Any]] = [
        {"json_schema": schema}, {}, {"regex": "[ab]{3,20}"}, {"regex": "true"}, {"json_schema": {"type": "boolean"}},
        {"regex": "1+", "max_tokens": 4},
    ]  # fmt: skip
    asked = [{"prompt": [7 + i, 3], "max_tokens": 90, **one, **sampling, "seed": i} for i, one in enumerate(own)]
    for size in (1, 3, 6):
        found = list(lm.batch([dict(one) for one in asked], size=size))
        for one, result in zip(asked, found, strict=True):
            alone = lm.generate(**one)
            list(alone)
            assert (result.text, result.tokens, result.finish) == (alone.text, alone.tokens, alone.finish)
    assert found[3].text == "true"


def until_the_end(lm: mt.LanguageModel, **asked: Any) -> tuple[list[int], str | None, str | None]:
    """What comes of a text alone: its tokens, why it ended, and the error if it ended with one."""
    generation = lm.generate(**asked)
    try:
        return [step.token for step in generation], generation.finish, None
    except UsageError as error:
        return generation.tokens, "error", str(error)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_k": 30}])
def test_a_dead_end_is_the_end_of_its_own_text_alone(sampling: dict[str, Any]) -> None:
    lm = MODELS["sentencepiece"]
    everything_but = [[i] for i in range(1, VOCAB) if i != lm.tokenizer.id_of("a")]
    own: list[dict[str, Any]] = [
        {"regex": "[ab]{3,4}x"}, {}, {"regex": "aaab", "bad_words": everything_but}, {"regex": "[12]{9}"},
        {"regex": "[12]{1,9}x", "max_tokens": 1}, {"regex": "[12]{9}x"}, {"regex": "true", "json_schema": None},
        {"regex": "a12", "bad_words": [[lm.tokenizer.id_of(s)] for s in ("1", "12")], "stop": ["a"]},
    ]  # fmt: skip
    asked = [{"prompt": [7 + i, 3], "max_tokens": 20, **one, **sampling, "seed": i} for i, one in enumerate(own)]
    wanted = [until_the_end(lm, **one) for one in asked]
    for size in (1, 3, 8):
        found = list(lm.batch([dict(one) for one in asked], size=size))
        assert [(result.tokens, result.finish, result.error) for result in found] == wanted
    ends = [finish for _, finish, _ in wanted]
    assert ends == ["error", "length", "error", "end", "length", "error", "end", "stop"]
    assert wanted[0][2] == f"regex: after {len(wanted[0][0])} tokens, no token of the vocabulary may follow"
    assert wanted[2][::2] == ([lm.tokenizer.id_of("a")] * 3, DEAD)


def test_a_text_that_cannot_begin_ends_without_a_token_and_alone_before_anything_is_read() -> None:
    lm = MODELS["byte-level"]
    with pytest.raises(UsageError, match="regex: after 0 tokens, no token of the vocabulary may follow"):
        lm.generate([4], regex="x")
    first, second = lm.batch([{"prompt": [4], "regex": "x"}, {"prompt": [5], "max_tokens": 3}])
    assert (first.tokens, first.finish) == ([], "error") and len(second.tokens) == 3 and second.error is None


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_guesses_change_nothing_about_what_is_allowed(draft: str, sampling: dict[str, Any]) -> None:
    lm = MODELS["byte-level"]
    schema = {"type": "array", "items": {"enum": ["ab", "al", 12]}, "minItems": 6, "maxItems": 9}
    ids = lm.tokenizer.encode('["ab","ab","ab","ab"')
    with_draft = lm.generate(
        ids, json_schema=schema, max_tokens=400, draft=lm if draft == "itself" else "lookup", **sampling
    )
    list(with_draft)
    assert all(item in ("ab", "al", 12) for item in json.loads(with_draft.text))
    if not sampling:
        plain = lm.generate(ids, json_schema=schema, max_tokens=400)
        assert [step.token for step in plain] == with_draft.tokens
        assert with_draft.stats.speculation.proposed > 0


def test_logprobs_are_those_of_the_model_itself() -> None:
    lm = MODELS["byte-level"]
    steps = list(lm.generate([5, 6], regex="ab12", logprobs=3))
    ids = [5, 6]
    for step in steps:
        logits = lm(ids)[0, -1].astype(mx.float32)
        wanted = logits - mx.logsumexp(logits)
        assert step.logprob == pytest.approx(wanted[step.token].item(), abs=1e-4)
        assert step.top[0][0] == mx.argmax(wanted).item()
        ids.append(step.token)
    assert "".join(step.text for step in steps) == "ab12"


def test_without_end_tokens_the_text_ends_where_nothing_may_come() -> None:
    generation = MODELS["byte-level"].generate([4], regex="ab{2,3}", stop_at_end=False)
    list(generation)
    assert (generation.text, generation.finish) == ("abbb", "end")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_off_is_a_beginning_and_says_so(kind: str) -> None:
    for most in (1, 2, 3):
        generation = MODELS[kind].generate([4], regex="é{9}", max_tokens=most)
        list(generation)
        assert generation.finish == "length" and set(generation.text) <= {"é"} and len(generation.text) <= most
    whole = MODELS[kind].generate([4], regex="(12){2}", max_tokens=30)
    tokens = len(list(whole)) - 1
    exact = MODELS[kind].generate([4], regex="(12){2}", max_tokens=tokens)
    list(exact)
    assert (exact.text, exact.finish) == ("1212", "end")


def test_a_stop_string_may_end_it_too() -> None:
    generation = MODELS["byte-level"].generate([4], regex="ab12al", stop=["2a"])
    list(generation)
    assert (generation.text, generation.finish) == ("ab1", "stop")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"regex": "("}, "regex: unclosed group in '('"),
        ({"regex": "(?=a)b"}, "regex: look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": 5}, "regex: found a int, expected text"),
        ({"regex": "", "stop_at_end": False}, "regex: nothing but the empty text matches"),
        ({"regex": "[^\\s\\S]"}, "regex: after 0 tokens, no token of the vocabulary may follow"),
        ({"regex": "x"}, "regex: after 0 tokens, no token of the vocabulary may follow"),
        ({"regex": "al", "bad_words": [[i] for i in range(1, VOCAB)]}, "regex: after 0 tokens, the other settings"),
        ({"regex": "a", "json_schema": {}}, "json_schema, regex: found both"),
        ({"json_schema": {"type": "foo"}}, "json_schema: Invalid type: foo"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema: .*uniqueItems"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "json_schema: unclosed group"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 1}}, "json_schema: Unsatisfiable schema"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema: Pointer '/nowhere' does not exist"),
        ({"json_schema": False}, "json_schema: false allows no text"),
        ({"json_schema": 5}, "json_schema: found '5', expected a JSON schema"),
        ({"json_schema": {"const": float("nan")}}, "json_schema: not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_one_line(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=f"^{problem.replace('(', '[(]')}") as found:
        list(MODELS["byte-level"].generate([4], **asked))
    assert "\n" not in str(found.value)


def test_a_model_without_a_tokenizer_is_refused() -> None:
    lm = mt.load(GOLDEN / "llama-bias", dtype="float32")
    with pytest.raises(UsageError, match=r"regex: .* has no tokenizer"):
        lm.generate([4], regex="a")


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=re.escape("regex needs llguidance: pip install 'mlx-tformer[grammar]'")):
        MODELS["byte-level"].generate([4], regex="a")


def test_the_bundled_model_writes_what_is_asked_for(shakespeare: mt.LanguageModel) -> None:
    text = "exactly this — “é” 中👩"
    generation = shakespeare.generate("ROMEO:", regex=text)
    list(generation)
    assert (generation.text, generation.finish) == (text, "end")
    cut = shakespeare.generate("ROMEO:", regex="中{5}", max_tokens=4)
    list(cut)
    assert (cut.text, cut.finish) == ("中", "length")


def test_a_real_model_answers_in_json(smollm2_dense: mt.LanguageModel) -> None:
    lm = smollm2_dense
    parts = {"capital": {"type": "string", "maxLength": 20}, "continent": {"enum": ["Africa", "Asia", "Europe"]}}
    ids = lm.chat([{"role": "user", "content": "Tell me the capital and the continent of France, as JSON."}])
    generation = lm.generate(ids, json_schema=boundless(parts), max_tokens=60)
    list(generation)
    assert json.loads(generation.text) == {"capital": "Paris", "continent": "Europe"}
