"""From a GGUF file's vocabulary to tokenizer.json and tokenizer_config.json.

Two kinds are known: `gpt2`, byte-level BPE with its merges in the file and its way of splitting text named by
`tokenizer.ggml.pre`, and `llama`, SentencePiece's BPE, whose merges follow from the scores of its tokens. The splits
are those of the models' own tokenizer.json; the names are llama.cpp's (`src/llama-vocab.cpp`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BadInput
from .container import brief
from .fields import Fields

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_LONGEST_PIECE = 1024  # characters; the work of deriving merges grows with the square of it
_SPACE = "▁"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(after)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(after)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED % {"after": "", "digits": ""}
_GPT4O = _CASED % {"after": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": "{1,3}"}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before the merges, and what goes with it."""

    splits: tuple[dict[str, Any], ...] = ()
    gpt2: bool = False
    """True if GPT-2's own split comes after these."""
    nfc: bool = False
    whole_words: bool = False
    """True if a word that is a token needs no merges (`ignore_merges`)."""
    add_bos: bool = False
    """Whether text begins with bos where the file does not say."""


_LLAMA3 = PreTokenizer((_split(_GPT4 % "{1,3}"),), whole_words=True, add_bos=True)
_QWEN2 = _split(_GPT4 % "")
_DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True},), gpt2=True)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(tuple(_split(pattern) for pattern in _DEFAULT)),
    "dbrx": PreTokenizer((_split(_GPT4 % "{1,3}"),)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "gpt-2": PreTokenizer(gpt2=True),
    "gpt-4o": PreTokenizer((_split(_GPT4O),)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": PreTokenizer((_split(_TEKKEN),), whole_words=True, add_bos=True),
}


def tokenizer_files(path: Path, metadata: dict[str, Any]) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json and, if there is a chat template, chat_template.jinja, as texts.

    Empty if the file has no tokenizer. Raises BadInput for one that is broken or of an unknown kind.
    """
    if not Fields(path, metadata).has("tokenizer.ggml.model"):
        return {}
    vocabulary = Vocabulary(path, metadata)
    kind = vocabulary.fields.text("model")
    if kind not in KINDS:
        raise vocabulary.fields.wrong("model", f"one of {', '.join(KINDS)}")
    tokenizer = KINDS[kind](vocabulary)
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": vocabulary.config()}
    texts = {name: json.dumps(content, ensure_ascii=False) for name, content in files.items()}
    template = vocabulary.chat_template()
    return texts if template is None else {**texts, "chat_template.jinja": template}


class Vocabulary:
    """The `tokenizer.ggml.` keys, checked, and the parts of a tokenizer.json that do not depend on its kind."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path, self.metadata = path, metadata
        self.fields = Fields(path, metadata, "tokenizer.ggml.")
        self.tokens = self.fields.strings("tokens")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if not self.tokens or len(self.ids) != len(self.tokens):
            raise self.fields.wrong("tokens", "one or more tokens, all different")
        types = self.fields.numbers("token_type", len(self.tokens), NORMAL)
        if types.dtype.kind not in "iu":
            raise self.fields.wrong("token_type", "whole numbers")
        self.types: list[int] = types.tolist()
        self.add_bos = self.add_eos = False

    def named(self, key: str) -> str | None:
        """The text of a special token such as `bos_token_id`, None if the file has none."""
        if not self.fields.has(key):
            return None
        index = self.fields.whole(key, least=0)
        if index >= len(self.tokens):
            raise self.fields.wrong(key, f"a token below {len(self.tokens)}")
        return self.tokens[index]

    def added_tokens(self) -> list[dict[str, Any]]:
        """Control tokens are special; those that a user defined are found in text but are not special."""
        flags = {"single_word": False, "lstrip": False, "normalized": False}
        return [
            {"id": index, "content": token, **flags, "rstrip": self._strips(token), "special": kind != USER_DEFINED}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]

    def _strips(self, token: str) -> bool:
        """True for a token that takes the space behind it along, which no file says; Phi-3's do."""
        phi3 = self.metadata.get("general.architecture") == "phi3" and self.fields.get("model") == "llama"
        return phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")

    def frame(self, default_bos: bool) -> dict[str, Any] | None:
        """The post-processor that puts bos before and eos behind, None if there is nothing to put."""
        self.add_bos = self.fields.flag("add_bos_token", default_bos and self.fields.has("bos_token_id"))
        self.add_eos = self.fields.flag("add_eos_token", False)
        before = self._required("bos_token_id") if self.add_bos else []
        after = self._required("eos_token_id") if self.add_eos else []
        if not before and not after:
            return None

        def sequence(name: str, number: int) -> list[dict[str, Any]]:
            special = {token: {"SpecialToken": {"id": token, "type_id": number}} for token in before + after}
            middle = {"Sequence": {"id": name, "type_id": number}}
            return [*(special[token] for token in before), middle, *(special[token] for token in after)]

        return {
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": sequence("A", 0) + sequence("B", 1),
            "special_tokens": {t: {"id": t, "ids": [self.ids[t]], "tokens": [t]} for t in before + after},
        }

    def _required(self, key: str) -> list[str]:
        token = self.named(key)
        if token is None:
            raise self.fields.wrong(key, "the token that add_bos_token or add_eos_token puts around a text")
        return [token]

    def config(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        named = {ours: self.named(f"{theirs}_token_id") for ours, theirs in keys.items()}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "clean_up_tokenization_spaces": False,
            **{ours: token for ours, token in named.items() if token is not None},
        }
        template = self.chat_template()
        return config if template is None else {**config, "chat_template": template}

    def chat_template(self) -> str | None:
        """The Jinja template of a chat, None if the file has none."""
        fields = Fields(self.path, self.metadata)
        return fields.text("tokenizer.chat_template") if fields.has("tokenizer.chat_template") else None


def byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE. Raises BadInput for an unknown pre-tokenizer or a merge of unknown tokens."""
    fields = vocabulary.fields
    name = fields.text("pre")
    if name not in PRE_TOKENIZERS:
        raise fields.wrong("pre", f"one of {', '.join(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[name]
    frame, bytes_out = vocabulary.frame(pre.add_bos), _byte_level(use_regex=True)
    cuts = [*pre.splits, _byte_level(use_regex=pre.gpt2)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "post_processor": bytes_out if frame is None else {"type": "Sequence", "processors": [bytes_out, frame]},
        "decoder": bytes_out,
        "model": _bpe(vocabulary, _merges(vocabulary), ignore_merges=pre.whole_words),
    }


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The file's merges as pairs: each is one string with a space between its halves."""
    merges = []
    for index, text in enumerate(vocabulary.fields.strings("merges")):
        middle = text.find(" ", 1)
        left, right = text[:middle], text[middle + 1 :]
        if middle < 0 or not {left, right, left + right} <= vocabulary.ids.keys():
            problem = f"found {brief(text)}, expected two tokens that make a third"
            raise BadInput(problem, file=vocabulary.path, field=f"tokenizer.ggml.merges[{index}]")
        merges.append((left, right))
    return merges


def sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json of SentencePiece's BPE with bytes for what has no token. Raises BadInput without scores."""
    fields = vocabulary.fields
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    prefix = fields.flag("add_space_prefix", True)
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, spaces] if prefix else [spaces]
    unknown = vocabulary.named("unknown_token_id")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": vocabulary.frame(default_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges_from_scores(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores amount to: every way to make a token of two others, best token first.

    Control, byte and unused tokens take no part, so that no text can be merged into one.
    """
    scores = vocabulary.fields.numbers("scores", len(vocabulary.tokens))
    if not np.all(np.isfinite(scores)):
        raise vocabulary.fields.wrong("scores", "finite numbers")
    ids = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] in (NORMAL, USER_DEFINED)}
    merges = []
    for token, index in ids.items():
        if len(token) > _LONGEST_PIECE:
            problem = f"found a token of {len(token)} characters, expected at most {_LONGEST_PIECE}"
            raise BadInput(problem, file=vocabulary.path, field=f"tokenizer.ggml.tokens[{index}]")
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [half for half in halves if half[0] in ids and half[1] in ids]
        merges += [(float(scores[index]), left, right) for left, right in pairs]
    # Among equal scores the longer left half first, as transformers has it.
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    defaults = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    affixes = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {"type": "BPE", **affixes, **defaults, **settings, "vocab": vocabulary.ids, "merges": merges}


KINDS: dict[str, Callable[[Vocabulary], dict[str, Any]]] = {"gpt2": byte_level, "llama": sentencepiece}
