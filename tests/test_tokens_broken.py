"""Tokenizer files that are broken or hostile: one clear line, nothing else on stderr, and a sound twin loads."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.tokens import Tokenizer

DATA = Path(__file__).parent / "data" / "tokenizers"
SOUND = json.loads((DATA / "byte-level" / "tokenizer.json").read_text("utf-8"))
TINY = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "é": 3}, "merges": ["a b"]}

UNSOUND = {"merges": ["a é"], "continuing_subword_prefix": "#"}
"""With these the `tokenizers` package ends the process, if it gets to see them."""


def load(state: Any, **files: Any) -> Tokenizer:
    """A tokenizer from a tokenizer.json, and other files as keywords (`tokenizer_config` and so on)."""
    raw = state if isinstance(state, bytes) else json.dumps(state).encode()
    others = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    made = Tokenizer.from_files({"tokenizer.json": raw, **others}, "folder")
    assert made is not None
    return made


def use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a" * 40 + "b é")
    tokenizer.decode(ids)
    stream = tokenizer.stream()
    for index in ids:
        stream.add(index)
    stream.finish()


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def template(ids: list[int], named: str = "X") -> dict[str, Any]:
    parts = [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {named: {"id": named, "ids": ids, "tokens": ["X"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


def growing(times: int) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * times,
    }


BROKEN: dict[str, Any] = {
    "empty": b"",
    "not JSON": b"{nope",
    "not an object": b"[]",
    "no model": b"{}",
    "not UTF-8": b'{"model": "\xff"}',
    "nested deeply": b'{"model":' + b"[" * 100_000,
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "cut": json.dumps(SOUND).encode()[:5000],
    "unknown model": {"model": {"type": "Magic"}},
    "merge of unknown tokens": {"model": {**TINY, "merges": ["a x"]}},
    "merges shorter than the prefix": {"model": {**TINY, "continuing_subword_prefix": "##"}},
    "merge that is cut in a character": {"model": {**TINY, **UNSOUND}},
    "prefix that is cut in a character": {"model": {**TINY, "merges": ["a é"], "continuing_subword_prefix": "é"}},
    "prefix that is spelled with escapes": json.dumps({"model": {**TINY, **UNSOUND}})
    .replace("continuing", "\\u0063ontinuing")
    .encode(),
    "prefix in the first of two models": b'{"model":'
    + json.dumps({**TINY, **UNSOUND}).encode()
    + b',"model":'
    + json.dumps(TINY).encode()
    + b"}",
    "merges that are none": {"model": {**TINY, "merges": 5, "continuing_subword_prefix": "##"}},
    "regex without an end": {"model": TINY, "pre_tokenizer": split("(a+")},
    "regex that never ends": {"model": TINY, "pre_tokenizer": split("(a+)+$")},
    "normalizer of garbage": {"model": TINY, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "normalizer that reads beyond its end": {
        "model": TINY,
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9hYmNk"},
    },
    "normalizer that makes a gigabyte": {"model": TINY, "normalizer": growing(30)},
    "token around a text that is missing": {"model": TINY, "post_processor": template([1], "Y")},
    "id around a text that is missing": {"model": TINY, "post_processor": template([7_000_000])},
    "no unknown token": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}},
    "chunks of nothing": {"model": TINY, "pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "negative id": {"model": {**TINY, "vocab": {"a": -1}}},
    "huge id": {"model": {**TINY, "vocab": {**TINY["vocab"], "c": 2**32 - 1}}},
}
FINE: dict[str, Any] = {
    "the sound one": SOUND,
    "plain": {"model": TINY},
    "merges with the prefix": {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "##b": 1, "ab": 2},
            "merges": ["a ##b"],
            "continuing_subword_prefix": "##",
        }
    },
    "regex": {"model": TINY, "pre_tokenizer": split("a+")},
    "normalizer": {"model": TINY, "normalizer": growing(2)},
    "token around a text": {"model": TINY, "post_processor": template([1])},
    "padding, which is switched off": {
        "model": TINY,
        "padding": {
            "strategy": {"Fixed": 10**11},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    },
    "cutting, which is switched off": {
        "model": TINY,
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    },
    "a hole in the ids": {"model": {**TINY, "vocab": {**TINY["vocab"], "c": 1000}}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_one_clear_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput) as caught:
        use(load(BROKEN[name]))
    text = str(caught.value)
    assert text.startswith("folder/tokenizer.json: ") and "\n" not in text and len(text) < 400
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", FINE)
def test_its_sound_twin_loads(name: str) -> None:
    use(load(FINE[name]))


def test_padding_and_cutting_do_not_change_ids() -> None:
    plain = load(FINE["plain"]).encode("abab")
    for name in ("padding, which is switched off", "cutting, which is switched off"):
        assert load(FINE[name]).encode("abab") == plain


def test_ids_that_no_token_has_decode_to_nothing() -> None:
    tokenizer = load(FINE["a hole in the ids"])
    assert tokenizer.size == 1001
    assert tokenizer.decode([0, 500, 1]) == tokenizer.decode([0, 1])
    assert tokenizer.token_text(500) == ""


def test_what_others_write_to_standard_error_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    from mlx_tformer.tokens.files import understood

    with understood("here", quiet=True):
        os.write(2, b"somebody else's words\n")
    assert capfd.readouterr().err == "somebody else's words\n"


def test_an_interruption_stays_one() -> None:
    from mlx_tformer.tokens.files import understood

    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), understood("here", quiet=True):
            raise kind


# The other files


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": []}, "tokenizer_config.json: found a list, expected an object"),
        ({"tokenizer_config": {"chat_template": 5}}, "tokenizer_config.json: chat_template: expected a template"),
        ({"tokenizer_config": {"chat_template": [{"name": "a"}]}}, "chat_template: expected a template"),
        ({"tokenizer_config": {"chat_template": [{"name": 5, "template": "a"}]}}, "chat_template: expected a template"),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, "added_tokens_decoder: expected ids and tokens"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}}, "added_tokens_decoder: expected ids"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": {"content": 5}}}}, "added_tokens_decoder: expected ids"),
        ({"tokenizer_config": {"extra_special_tokens": 5}}, "extra_special_tokens: found a int, expected a list"),
        ({"special_tokens_map": 5}, "special_tokens_map.json: found a int, expected an object"),
    ],
)
def test_a_broken_config_names_file_and_field(files: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        load(SOUND, **files)
    assert message in str(caught.value)


def test_named_tokens_may_be_strings_or_objects() -> None:
    for end in ("<|im_end|>", {"content": "<|im_end|>"}, {"__type": "AddedToken", "content": "<|im_end|>"}):
        assert load(SOUND, tokenizer_config={"eos_token": end}).eos_id == 1
        assert load(SOUND, special_tokens_map={"eos_token": end}).eos_id == 1
    assert load(SOUND, tokenizer_config={"eos_token": 5}).eos_id is None


def test_tokens_that_the_config_names_are_special() -> None:
    tokenizer = load(SOUND, tokenizer_config={"eos_token": "<think>", "additional_special_tokens": ["<new>"]})
    assert tokenizer.decode(tokenizer.encode("<think>a<new>", special=True), skip_special=True) == "a"
    assert len(tokenizer.encode("<think>")) > 1
    assert tokenizer.size == load(SOUND).size + 1


def test_without_tokenizer_files_there_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert Tokenizer.find(tmp_path) is None
    with pytest.raises(UsageError, match=r"has no tokenizer; expected tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("present", ["tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json"])
def test_a_tokenizer_of_another_kind_says_what_is_missing(tmp_path: Path, present: str) -> None:
    (tmp_path / present).write_text("{}")
    with pytest.raises(BadInput, match=f"tokenizer.json: not found, beside {present}"):
        Tokenizer.find(tmp_path)


def test_what_is_no_plain_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(BadInput, match="is not a regular file"):
        Tokenizer.find(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="is not a regular file"):
        Tokenizer.find(tmp_path)


GPT2 = {path.name: path.read_bytes() for path in (DATA / "gpt2").iterdir()}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"merges.txt": b"a b c\n"}, "merges.txt: line 1: expected two tokens"),
        ({"merges.txt": b"\xff"}, "merges.txt: not UTF-8 at byte 0"),
        ({"merges.txt": b"xx yy\n"}, "merges.txt: not a sound tokenizer"),
        ({"vocab.json": b'{"a": "b"}'}, "vocab.json: found 'b', expected an id"),
        ({"vocab.json": b'{"a": -1}'}, "vocab.json: found -1, expected an id"),
        (
            {"tokenizer_config.json": b'{"tokenizer_class": "RobertaTokenizer"}'},
            "only as GPT-2's, not for RobertaTokenizer",
        ),
        (
            {"tokenizer_config.json": b"{}", "config.json": b'{"model_type": "roberta"}'},
            "only as GPT-2's, not for roberta",
        ),
    ],
)
def test_a_broken_vocabulary_of_the_old_kind_is_refused(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        Tokenizer.from_files(GPT2 | files, "folder")
    assert message in str(caught.value)


def test_a_vocabulary_of_the_old_kind_needs_no_config() -> None:
    bare = {name: GPT2[name] for name in ("vocab.json", "merges.txt")}
    for files in (bare, bare | {"config.json": b'{"model_type": "gpt2"}'}):
        tokenizer = Tokenizer.from_files(files, "folder")
        assert tokenizer is not None
        assert tokenizer.eos_id == 0 and tokenizer.encode("The hat") == tokenizer.encode("The hat", add_bos=False)
    added = Tokenizer.from_files(bare | {"added_tokens.json": b'{"<b>": 381, "<a>": 380}'}, "folder")
    assert added is not None
    assert added.encode("<a><b>") == [380, 381]
