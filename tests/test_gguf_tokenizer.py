"""A GGUF file's vocabulary becomes a tokenizer.json that gives the ids which its model was trained on."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf_builder import TOKENS, Value, metadata
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlx_tformer.checkpoint.gguf.file import GgufFile
from mlx_tformer.checkpoint.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_files
from mlx_tformer.errors import BadInput

FILE = Path("m.gguf")
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 1234 times 56789 = lots.",
    "héllo wörld 👩‍👩‍👧 naïve — 中文\n\n\tdef f(x):\n\t\treturn x**2  # comment\r\n",
    "I'LL don't WON'T 3rd   spaces and\u00a0no-break; cafe\u0301 café ﬁ ½ ٣",
] * 3
TEXTS = [
    "",
    " ",
    "  two leading, two trailing  ",
    "12345 and 1,234.5",
    "don't I'LL it's",
    "héllo wörld 👩‍👩‍👧 naïve — 中文 \x00 end",
    "cafe\u0301 \n \n\n\t x\r\n",
    "HelloWorld fooBAR",
    "a<s>b<tool>c <unk>",
]


def keys(**changes: Any) -> dict[str, Any]:
    """Tokenizer metadata as it is after reading: `changes` below `tokenizer.ggml.`, None to leave one out."""
    base = {k: v for k, v in metadata().items() if k.startswith("tokenizer.")}
    base |= {f"tokenizer.ggml.{key}": x for key, x in changes.items()}
    read = {key: x.value if isinstance(x, Value) else x for key, x in base.items() if x is not None}
    arrays = {k: np.array(v) for k, v in read.items() if isinstance(v, list) and not isinstance(v[0], str)}
    return read | arrays


def built(**changes: Any) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(FILE, keys(**changes))["tokenizer.json"])


def refusal(**changes: Any) -> str:
    with pytest.raises(BadInput) as caught:
        tokenizer_files(FILE, keys(**changes))
    message = str(caught.value)
    assert message.startswith("m.gguf: ") and "\n" not in message
    return message.removeprefix("m.gguf: ")


def pieces(name: str, text: str) -> list[str]:
    """How a pre-tokenizer cuts a text; a blank is shown as Ġ."""
    return [piece for piece, _ in built(pre=name).pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "abc 123 don't", "abc Ġ 1 2 3 Ġdon 't"),
        ("smollm", "x  y\n\nz", "x Ġ Ġy Ċ Ċ z"),
        ("gpt-2", "abc 123  don't I'LL", "abc Ġ123 Ġ Ġdon 't ĠI ' LL"),
        ("gpt-2", "x\n\ny;;", "x Ċ Ċ y ;;"),
        ("llama-bpe", "abc 12345 I'LL (foo)\n\n bar", "abc Ġ 123 45 ĠI 'LL Ġ( foo )ĊĊ Ġbar"),
        ("llama-bpe", "a   b", "a ĠĠ Ġb"),
        ("qwen2", "abc 123 I'LL (foo)\n\n bar", "abc Ġ 1 2 3 ĠI 'LL Ġ( foo )ĊĊ Ġbar"),
        ("deepseek-r1-qwen", "x 12", "x Ġ 1 2"),
        ("tekken", "HelloWorld fooBAR 12 /\n", "Hello World Ġfoo BAR Ġ 1 2 Ġ/Ċ"),
        ("gpt-4o", "HelloWorld's 12345 I'LL /\n", "Hello World's Ġ 123 45 ĠI'LL Ġ/Ċ"),
        ("dbrx", "abc 12345 I'LL (foo)\n\n bar", "abc Ġ 123 45 ĠI 'LL Ġ( foo )ĊĊ Ġbar"),
        ("starcoder", "abc 123 don't", "abc Ġ 1 2 3 Ġdon 't"),
        ("default", "Hi!! 1234567$x", "Hi !! Ġ 123 456 7 $ x"),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_models_do(name: str, text: str, expected: str) -> None:
    assert pieces(name, text) == expected.split(" ")


def reference(name: str) -> Tokenizer:
    """A byte-level BPE put together with the `tokenizers` package and trained on the corpus."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in ("smollm", "gpt-2"))
    first: dict[str, Callable[[], list[Any]]] = {
        "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": list,
        "qwen2": lambda: [pre_tokenizers.Split(Regex(qwen2_pattern()), "isolated")],
        "llama-bpe": lambda: [pre_tokenizers.Split(Regex(qwen2_pattern().replace("N}|", "N}{1,3}|")), "isolated")],
    }
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first[name](), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, specials = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def qwen2_pattern() -> str:
    """As in Qwen 2's published tokenizer.json."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    return words + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("name", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_a_byte_level_vocabulary_encodes_and_decodes_as_where_it_came_from(name: str) -> None:
    original = reference(name)
    model = json.loads(original.to_str())["model"]
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    types = [4 if token == "<tool>" else 3 if token in ("<s>", "</s>") else 1 for token in tokens]
    merges = [" ".join(merge) for merge in model["merges"]]
    ours = built(pre=name, tokens=tokens, token_type=types, merges=merges, add_bos_token=False)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        if name != "qwen2":  # NFC changes the text
            assert ours.decode(ids, skip_special_tokens=False) == text
    assert len(merges) > 100


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = built()
    added = tokenizer.get_added_tokens_decoder()
    assert {i: (t.content, t.special, t.normalized) for i, t in added.items()} == {
        0: ("<s>", True, False),
        1: ("</s>", True, False),
        11: ("<tool>", False, False),
    }
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(TOKENS)}
    ids = tokenizer.encode("ab<tool></s>").ids
    assert ids == [9, 11, 1] and tokenizer.decode(ids) == "ab<tool>"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [9]),
        ({"add_bos_token": True}, [0, 9]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 9, 1]),
        ({"pre": "llama-bpe"}, [0, 9]),
        ({"pre": "llama-bpe", "bos_token_id": None}, [9]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [9]),
    ],
)
def test_bos_and_eos_stand_around_a_text_where_the_file_says_so(changes: dict[str, Any], expected: list[int]) -> None:
    tokenizer = built(**changes)
    assert tokenizer.encode("ab").ids == expected
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [9]


def test_tokenizer_config_and_chat_template_are_those_of_the_file() -> None:
    template = "{{ messages[0]['content'] }}\n"
    changed = keys(padding_token_id=1, add_bos_token=True) | {"tokenizer.chat_template": template}
    files = tokenizer_files(FILE, changed)
    assert files["chat_template.jinja"] == template
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "</s>", "</s>")
    assert config["add_bos_token"] is True and config["add_eos_token"] is False and "unk_token" not in config
    assert config["chat_template"] == template
    assert set(tokenizer_files(FILE, keys())) == {"tokenizer.json", "tokenizer_config.json"}


def test_a_file_without_a_tokenizer_has_no_files() -> None:
    assert tokenizer_files(FILE, keys(model=None)) == {}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: found 'bert', expected one of gpt2, llama"),
        ({"model": 5}, "tokenizer.ggml.model: found 5, expected a string"),
        ({"pre": "viking"}, "tokenizer.ggml.pre: found 'viking', expected one of default"),
        ({"pre": None}, "tokenizer.ggml.pre: found nothing"),
        ({"tokens": None}, "tokenizer.ggml.tokens: found nothing, expected an array of strings"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens: found an array of 2, expected an array of strings"),
        (
            {"tokens": ["a", "a"]},
            "tokenizer.ggml.tokens: found an array of 2, expected one or more tokens",
        ),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type: found an array of 2, expected an array of 12 numbers"),
        (
            {"token_type": [float("nan")] * 12},
            "tokenizer.ggml.token_type: found an array of 12, expected whole",
        ),
        ({"merges": None}, "tokenizer.ggml.merges: found nothing"),
        ({"merges": ["a b", "ab"]}, "tokenizer.ggml.merges[1]: found 'ab', expected two tokens that make a third"),
        ({"merges": ["a c"]}, "tokenizer.ggml.merges[0]: found 'a c'"),
        ({"merges": [""]}, "tokenizer.ggml.merges[0]: found ''"),
        ({"bos_token_id": 12}, "tokenizer.ggml.bos_token_id: found 12, expected a token below 12"),
        ({"bos_token_id": None, "add_bos_token": True}, "tokenizer.ggml.bos_token_id: found nothing"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token: found 'yes', expected a truth value"),
        ({"model": "llama"}, "tokenizer.ggml.scores: found nothing"),
        ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores: found an array of 1"),
        (
            {"model": "llama", "scores": [float("nan")] * 12},
            "tokenizer.ggml.scores: found an array of 12",
        ),
        (
            {"model": "llama", "scores": [0.0], "tokens": ["a" * 2000], "token_type": [1], "eos_token_id": 0},
            "tokenizer.ggml.tokens[0]: found a token of 2000 characters",
        ),
    ],
)
def test_a_broken_or_unknown_tokenizer_is_refused(changes: dict[str, Any], found: str) -> None:
    assert refusal(**changes).startswith(found)


def test_a_chat_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.chat_template: found 5, expected a string"):
        tokenizer_files(FILE, keys() | {"tokenizer.chat_template": 5})


WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def vocabulary(seed: int) -> tuple[list[str], list[float], list[int]]:
    """A SentencePiece vocabulary over a, b, c and blanks: random pieces, whose scores fall with their rank."""
    rng = np.random.default_rng(seed)
    letters = ["▁", "a", "b", "c"]
    longer = {"".join(rng.choice(letters, rng.integers(2, 6))) for _ in range(40)}
    # "<s>" could be put together from these, and must not be.
    ranked = [*rng.permutation(sorted(longer)).tolist(), "<", "s", ">", "<s", *letters, "<tool>"]
    tokens = [*WORDS, *ranked]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(ranked) - 1), 4]
    return tokens, [0.0] * len(WORDS) + [-float(i) for i in range(len(ranked) - 1)] + [0.0], types


def sentencepiece_ids(text: str, tokens: list[str], scores: list[float], types: list[int]) -> list[int]:
    """SentencePiece's own loop: of the neighbours that make a token, join those of the best score, leftmost first."""
    ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        place = min(pairs)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return found


def spm(seed: int, **changes: Any) -> tuple[Tokenizer, list[str], list[float], list[int]]:
    tokens, scores, types = vocabulary(seed)
    base = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "unknown_token_id": 0}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "merges": None, "pre": None}
    return built(**{**base, **ids, **changes}), tokens, scores, types


def random_texts(seed: int) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    yield from ["", " ", "a", "a<s>b", "héllo 中 👩‍👩‍👧\n\x00", "<unk></s>"]
    for _ in range(40):
        yield "".join(
            rng.choice(["a", "b", "c", " ", "é", "x"], rng.integers(1, 20), p=[0.25, 0.25, 0.2, 0.2, 0.05, 0.05])
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prefix", [True, False])
def test_scores_give_the_ids_of_sentencepiece(seed: int, prefix: bool) -> None:
    tokenizer, tokens, scores, types = spm(seed, add_space_prefix=prefix)
    tokenizer.encode_special_tokens = True  # control tokens in the text are text
    for text in random_texts(seed):
        whole = " " + text if prefix and text else text
        ids = sentencepiece_ids(whole, tokens, scores, types)
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.decode(ids) == text


def test_a_sentencepiece_text_begins_with_bos_unless_the_file_says_otherwise() -> None:
    assert spm(0)[0].encode("a").ids[0] == 1
    assert spm(0, add_bos_token=False)[0].encode("a").ids[0] != 1
    tokenizer, tokens, *_ = spm(0)
    added = tokenizer.get_added_tokens_decoder()
    assert {t.content: t.special for t in added.values()} == {"<unk>": True, "<s>": True, "</s>": True, "<tool>": False}
    assert tokenizer.encode("<tool></s>").ids[1:] == [tokens.index("<tool>"), 2]


def spm_of(**changes: Any) -> Tokenizer:
    """A vocabulary with runs of spaces and lines that a user defined, as Gemma's; these are more than their merges."""
    plain = ["▁", "a", "b", "ab", "▁a", "▁b", "\n"]
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", *plain, "  ", "   ", "\n\n", *(f"<0x{i:02X}>" for i in range(256))]
    types = [2, 3, 3, 3, *[1] * len(plain), 4, 4, 4, *[6] * 256]
    scores = [0.0, 0.0, 0.0, -1000.0, *(-float(i) for i in range(len(plain))), *[-1000.0] * 3, *[0.0] * 256]
    more = {"tokens": tokens, "token_type": types, "scores": scores, "unknown_token_id": 0, "bos_token_id": 1}
    return built(**{"model": "llama", "merges": None, "pre": "default", **more, **changes})


def test_a_gemma_vocabulary_takes_runs_of_spaces_and_lines_whole() -> None:
    tokenizer = spm_of(add_space_prefix=False)
    for text, pieces in {
        "ab b": ["ab", "▁b"],
        "  a": ["  ", "a"],
        "a     b": ["a", "   ", "  ", "b"],
        "a\n\n\n a": ["a", "\n\n", "\n", "▁a"],
        "é": ["<0xC3>", "<0xA9>"],
    }.items():
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *pieces]
        assert tokenizer.decode(encoded.ids) == text


@pytest.mark.parametrize(("arch", "pieces"), [("phi3", ["▁a"]), ("llama", ["▁", "\n", "a"])])
def test_only_phi_3_drops_the_space_behind_a_control_token(arch: str, pieces: list[str]) -> None:
    """As its tokenizer.json says; files do not."""
    metadata = {"general.architecture": arch, **keys(model="llama", merges=None, bos_token_id=1)}
    source = json.loads(spm_of().to_str())
    ids = source["model"]["vocab"]
    metadata["tokenizer.ggml.tokens"] = sorted(ids, key=ids.__getitem__)
    metadata["tokenizer.ggml.token_type"] = np.array([2, 3, 3, 3, *[1] * (len(ids) - 4)])
    metadata["tokenizer.ggml.scores"] = np.array([-float(i) for i in range(len(ids))])
    tokenizer = Tokenizer.from_str(tokenizer_files(FILE, metadata)["tokenizer.json"])
    found = [tokenizer.id_to_token(i) for i in tokenizer.encode("<|user|>\na").ids]
    assert found == ["<s>", "<|user|>", *pieces]
    assert not tokenizer.get_added_tokens_decoder()[1].rstrip


def test_every_pre_tokenizer_is_one_that_the_tokenizers_package_accepts() -> None:
    for name in PRE_TOKENIZERS:
        assert built(pre=name).encode("ab", add_special_tokens=False).ids == [9]


def test_the_real_file_gives_the_ids_that_its_model_was_trained_on(smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer.from_str(GgufFile(smollm2_gguf).tokenizer_files()["tokenizer.json"])
    known = {
        "The capital of France is": "504 3575 282 4649 314",
        "héllo wörld 👩‍👩‍👧 naïve — 中文 \x00 end": "88 2756 31394 267 29989 400 15107 235 119 321 231 10813 235 119 "
        "321 231 10813 235 117 15486 46494 1841 216 28589 29184 216 190 1112",
    }
    for text, ids in known.items():
        assert tokenizer.encode(text).ids == [int(i) for i in ids.split()]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_real_file_has_the_config_and_the_values_that_the_gguf_package_reads(smollm2_gguf: Path) -> None:
    from gguf import GGUFReader, dequantize

    file = GgufFile(smollm2_gguf)
    assert (file.config["num_hidden_layers"], file.config["num_attention_heads"]) == (30, 9)
    assert (file.config["num_key_value_heads"], file.config["head_dim"], file.config["vocab_size"]) == (3, 64, 49152)
    assert file.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert len(file.quantization) == 211 and len(file.tensors) == 3 * 211 + 61
    stored = {tensor.name: tensor for tensor in GGUFReader(smollm2_gguf).tensors}
    for theirs, ours in {"token_embd": "model.embed_tokens", "blk.3.ffn_down": "model.layers.3.mlp.down_proj"}.items():
        tensor = stored[f"{theirs}.weight"]
        scales, biases = (file.read(f"{ours}.{part}").astype(mx.float32) for part in ("scales", "biases"))
        found = mx.dequantize(file.read(f"{ours}.weight"), scales, biases, **file.quantization[ours])
        assert np.array_equal(np.array(found), dequantize(tensor.data, tensor.tensor_type))
