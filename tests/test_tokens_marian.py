"""Tokenizers of Marian's folders, which SentencePiece cuts and vocab.json numbers, against transformers' answers."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers import gap
from hypothesis import given
from hypothesis import strategies as st

import mlx_tformer as mt
from mlx_tformer.errors import BadInput
from mlx_tformer.tokens import Tokenizer
from mlx_tformer.tokens.sentencepiece import read_pieces

DATA = Path(__file__).parent / "data" / "marian"
SPM = (DATA / "source.spm").read_bytes()
ROWS = json.loads((DATA / "expected.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DATA)


@pytest.mark.parametrize("row", ROWS, ids=[str(i) for i in range(len(ROWS))])
def test_texts_have_transformers_ids_and_ids_its_text(tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    assert tokenizer.encode(row["text"]) == row["ids"]
    assert tokenizer.decode(row["ids"], skip_special=True).strip() == row["decoded"]
    assert "".join(tokenizer.pieces(row["ids"])) == tokenizer.decode(row["ids"])


def test_special_tokens_in_a_text_are_text_and_languages_are_not(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a </s> b").count(0) == 1 and tokenizer.encode("a </s> b", special=True).count(0) == 2
    assert tokenizer.encode(">>fra<< a")[0] == tokenizer.id_of(">>fra<<") is not None
    assert tokenizer.eos_id == 0 and tokenizer.end_ids >= {0} and tokenizer.pad_id == tokenizer.size - 1


def test_pieces_are_those_of_the_file() -> None:
    pieces = read_pieces(SPM, "x")
    assert len(pieces.scores) == 397 and pieces.prefixed and pieces.trimmed and pieces.charsmap
    assert pieces.normalizer().normalize_str("  \u00c0\tb\u2026 ") == "▁A▁b..."


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


GOOD = field(1, field(1, b"a") + b"\x15\0\0\x80\xbf")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "found no pieces"),
        (b"\x0b", "found wire type 3 at byte 1"),
        (GOOD[:-1], "ends behind it"),
        (b"\xff" * 12, "no end of the number"),
        (GOOD + field(2, b"\x18\x02"), "another way to cut texts"),
        (GOOD + field(2, b"\xc0\x01\x01"), "another way to cut texts"),
        (GOOD + field(3, b"\x28\0"), "a way to normalise that is not read"),
        (field(1, field(1, b"a") + b"\x18\x04"), "found 'a' of kind 4"),
        (field(1, field(1, b"\xff")), "not UTF-8"),
        (field(1, field(1, b"a") + b"\x15\0\0\xc0\x7f"), "found nan as the score of b'a'"),
        (field(1, b"\x10\x01"), "a piece without a text or score"),
    ],
)
def test_broken_vocabularies_are_refused_in_one_line(content: bytes, problem: str) -> None:
    with pytest.raises(BadInput) as error:
        read_pieces(content, "x/source.spm")
    assert problem in str(error.value) and str(error.value).startswith("x/source.spm: ")


@given(st.integers(0, len(SPM) - 1), st.integers(0, 255), st.booleans())
def test_damaged_vocabularies_are_read_or_refused(at: int, byte: int, cut: bool) -> None:
    damaged = SPM[:at] if cut else SPM[:at] + bytes([byte]) + SPM[at + 1 :]
    files = {"source.spm": damaged, "vocab.json": (DATA / "vocab.json").read_bytes()}
    try:
        found = Tokenizer.from_files(files, "x")
    except BadInput:
        return
    assert found is not None and found.encode("To be")[-1] == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokenizer_config.json": {"separate_vocabs": True}}, "tokenizer_config.json: separate_vocabs: found true"),
        ({"vocab.json": {"</s>": 0}}, "vocab.json: found no '<unk>'"),
        ({"vocab.json": {"<unk>": "a"}}, "vocab.json: found 'a', expected an id"),
    ],
)
def test_folders_that_do_not_fit_are_refused(changes: dict[str, Any], problem: str) -> None:
    files = {name: (DATA / name).read_bytes() for name in ("source.spm", "vocab.json", "tokenizer_config.json")}
    with pytest.raises(BadInput, match=problem):
        Tokenizer.from_files(files | {name: json.dumps(value).encode() for name, value in changes.items()}, "x")


def test_a_model_reads_and_writes_by_it_and_so_do_its_copies(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = mt.save(mt.build("marian", vocab=tokenizer.size, seed=1), tmp_path / "model")
    for name in ("source.spm", "vocab.json", "tokenizer_config.json"):
        shutil.copy(DATA / name, folder / name)
    model = mt.load(folder, dtype="float32")
    assert isinstance(model, mt.Seq2SeqModel)
    ids = tokenizer.encode("To be, or not to be")
    steps = [step.token for step in model.generate("To be, or not to be", max_tokens=5, stop_at_end=False)]
    assert steps == [step.token for step in model.generate(mx.array([ids]), max_tokens=5, stop_at_end=False)]
    copy = mt.load(mt.convert(folder, tmp_path / "ours").path, dtype="float32")
    assert isinstance(copy, mt.Seq2SeqModel) and copy.tokens("To be") == model.tokens("To be")
    rest = {"decoder_input_ids": mx.array([[0, 5]])}
    assert gap(copy(mx.array([ids]), **rest), model(mx.array([ids]), **rest)) < 1e-5
