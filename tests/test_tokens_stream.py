"""Streamed text: whatever the ids and the decoder, its pieces put together are what decoding all ids gives."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tformer.errors import BadInput
from mlx_tformer.tokens import Tokenizer

DATA = Path(__file__).parent / "data" / "tokenizers"
EXPECTED = json.loads((DATA / "expected.json").read_text("utf-8"))
KINDS = list(EXPECTED["kinds"])
LOADED = {kind: Tokenizer.from_folder(DATA / kind) for kind in KINDS}


def streamed(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*map(stream.add, ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_text_equals_the_decoded_one(kind: str) -> None:
    tokenizer = LOADED[kind]
    for row in EXPECTED["kinds"][kind]["texts"]:
        assert "".join(streamed(tokenizer, row["ids"])) == row["decoded"]
        assert "".join(streamed(tokenizer, row["ids"], skip_special=True)) == row["skipped"]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_streamed_ids_equal_the_decoded_ones(kind: str, data: st.DataObject) -> None:
    tokenizer = LOADED[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=25))
    pieces, whole = streamed(tokenizer, ids), tokenizer.decode(ids)
    assert "".join(pieces) == whole
    assert tokenizer.decode(ids, skip_special=True) == "".join(streamed(tokenizer, ids, skip_special=True))
    for index in range(len(pieces)):
        assert whole.startswith("".join(pieces[:index]))


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_runs_of_bytes_and_spaces_stream_as_they_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = LOADED[kind]
    vocab = tokenizer._backend.get_vocab()
    likely = [vocab[f"<0x{byte:02X}>"] for byte in "é中👩".encode()] + [vocab["▁"], vocab["▁the"], vocab["a"], 1]
    ids = data.draw(st.lists(st.sampled_from(likely), max_size=30))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_no_half_character_is_streamed() -> None:
    tokenizer = LOADED["byte-level"]
    ids = tokenizer.encode("👩‍👩‍👧 中")
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == "👩‍👩‍👧 中"
    assert not any("\ufffd" in piece for piece in pieces)
    cut = streamed(tokenizer, ids[:2])
    assert cut[:-1] == ["", ""] and cut[-1] == "\ufffd" == tokenizer.decode(ids[:2])


def test_the_zero_byte_and_a_leading_space_survive_a_stream() -> None:
    for kind in ("byte-level", "sentencepiece", "metaspace"):
        tokenizer = LOADED[kind]
        ids = tokenizer.encode(" \x00 x", add_bos=False)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
        assert "\x00" in tokenizer.decode(ids)


def test_a_stream_keeps_only_a_few_tokens() -> None:
    for kind in ("sentencepiece", "metaspace", "wordpiece"):
        tokenizer = LOADED[kind]
        stream = tokenizer.stream()
        for index in (tokenizer.size - 1, 7, *tokenizer.encode("the hat is on the mat   ", add_bos=False)) * 200:
            stream.add(index)
        kept: Any = stream._detokenizer
        assert len(kept._head + kept._last + kept._run) <= 8, kind


def test_an_id_without_a_token_has_no_text() -> None:
    stream = LOADED["byte-level"].stream()
    assert stream.add(10**6) == "" and stream.finish() == ""


DECODERS: list[Any] = [
    None,
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Fuse"},
    {"type": "Strip", "content": "a", "start": 1, "stop": 1},
    {"type": "Strip", "content": "a", "start": 0, "stop": 2},
    {"type": "Strip", "content": "▁", "start": 2, "stop": 0},
    {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "▁", "start": 3, "stop": 0}]},
    {"type": "BPEDecoder", "suffix": "</w>"},
    {"type": "BPEDecoder", "suffix": "a"},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": False},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
    {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
    {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 2, "stop": 1},
        ],
    },
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "b"}, "content": "<0x41>"},
            {"type": "ByteFallback"},
        ],
    },
    {
        "type": "Sequence",
        "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}],
    },
    {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": "<0x41>"}]},
]
PIECES = [
    "a",
    "b",
    "ab",
    "▁",
    "▁a",
    "▁▁",
    " ",
    "##",
    "##a",
    "a</w>",
    "</w>",
    "<0xC3>",
    "<0xA9>",
    "<0x41>",
    "Ġa",
    "Ã",
    "©",
]
PIECES += [".", ",", "'", "n't", "do not", "<s>", "é", "aa", "aba"]


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: json.dumps(decoder)[:60])
@pytest.mark.parametrize("clean", [False, True])
@given(ids=st.lists(st.integers(0, len(PIECES)), max_size=20))
@settings(max_examples=60, deadline=None)
def test_every_decoder_streams_as_it_decodes(decoder: Any, clean: bool, ids: list[int]) -> None:
    key = json.dumps([decoder, clean])
    if key not in LOADED:
        vocab = {piece: index for index, piece in enumerate(PIECES)}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
        files = {"tokenizer.json": json.dumps({"model": model, "decoder": decoder}).encode()}
        files["tokenizer_config.json"] = json.dumps(
            {"clean_up_tokenization_spaces": clean, "bos_token": "<s>"}
        ).encode()
        found = Tokenizer.from_files(files, "here")
        assert found is not None
        LOADED[key] = found
    tokenizer = LOADED[key]
    ids = [index % tokenizer.size for index in ids]
    try:
        whole = tokenizer.decode(ids)
    except BadInput:  # `Strip` panics where it would cut more than there is
        with pytest.raises(BadInput, match="not a sound tokenizer"):
            streamed(tokenizer, ids)
        return
    assert "".join(streamed(tokenizer, ids)) == whole
