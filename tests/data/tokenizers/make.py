"""Make the tiny tokenizers of this folder, and ask transformers for the answers that they must give.

Run with Python that has `transformers` (5.24 was used) and `tokenizers`: `python tests/data/tokenizers/make.py`.
One folder a kind of vocabulary; `expected.json` holds the answers. WordPiece's trainer breaks ties by chance, so that
its vocabulary is another one each time.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
CORPUS = [
    "The capital of France is Paris. It doesn't rain, does it? No! The hat is on the mat.",
    "user: what is the capital? assistant: it is hello world, hello there, system prompt tools",
    "Was ist die Hauptstadt? Sie haben recht. naïve café héllo wörld 中文 Ünïcode",
] * 8
TEXTS = [
    "",
    " ",
    "The capital of France is",
    "  two spaces  inside and after  ",
    "héllo wörld 👩‍👩‍👧 naïve — 中文 \x00 end",
    "line\nbreak\r\nand\ttab",
    "a<|im_end|>b <s> </s> [SEP]c",
    "doesn't stop , please . \" it 's \" ?",
    "▁under ▁score Ġdot",
    "<think>hm</think>",
]
MESSAGES = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "héllo\nwörld 中文"},
        {"role": "assistant", "content": "Hello!", "tool_calls": None},
        {"role": "user", "content": "It doesn't rain."},
    ],
    [
        {"role": "user", "content": [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]},
        {"role": "assistant", "content": "<think>hm</think>yes", "reasoning": "thought"},
        {"role": "user", "content": "more"},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "rain",
            "description": 'Does it rain in <place> & "there"? Ja – naïve',
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "default": """{%- macro part(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}{%- for p in content if p.type == 'text' -%}{{ p['text'] }}{{ ' ' if not loop.last }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(turns=0, system=none) -%}
{%- if messages[0].role == 'system' -%}
    {%- set ns.system = messages[0]['content'] -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set rest = messages -%}
{%- endif -%}
{{ bos_token if bos_token is defined }}
{%- if tools %}
{{- BEGIN + 'system\\n' }}
    {%- for tool in tools %}
{{ tool | tojson }}
        {%- for name, value in tool.function.parameters.properties.items() %} {{ name }}={{ value.type | upper }}
        {%- endfor %}
{{ tool.function | tojson(indent=2) }}
    {%- endfor %}
{{- END }}
{% endif %}
{%- if ns.system is not none %}{{ BEGIN ~ 'system\\n' ~ ns.system ~ END }}
{% endif %}
{%- for message in rest %}
    {%- if loop.index0 > 20 %}{% break %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{{ BEGIN + message.role }}
{% if message.reasoning_content is defined and think | default(true) %}<think>{{ message.reasoning_content }}</think>
{%- endif %}
{%- generation %}{{ part(message.content) }}{% endgeneration %}{{ END }}
    {%- if 'tool_calls' in message %}!{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ BEGIN }}assistant
{% endif %}""",
    "turns": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content|string|trim + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
}
CALLS = [{}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"think": False, "tools": TOOLS}]


def byte_level() -> Tokenizer:
    """GPT-2's kind, with ChatML's tokens and one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


def sentence_piece(*, metaspace: bool) -> Tokenizer:
    """SentencePiece's BPE with bytes to fall back to: as Llama's converter wrote it once, or with a Metaspace."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    corpus = [line.replace("中文", "") for line in CORPUS]
    splitter = None if metaspace else pre_tokenizers.Split("▁", "merged_with_next")
    pre_tokenizer, tokenizer.pre_tokenizer = tokenizer.pre_tokenizer, splitter or pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=430, special_tokens=special, show_progress=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    # Byte tokens are no special tokens in a real vocabulary, so only three of the added ones are kept.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    around = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    sequence = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": sequence, "pair": sequence, "special_tokens": around}
    state["post_processor"] = template
    return Tokenizer.from_str(json.dumps(state))


def word_piece() -> Tokenizer:
    """BERT's kind, in lower case and with its clean-up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=260, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def words() -> Tokenizer:
    """Whole words, put together with spaces: no decoder, and the clean-up of transformers."""
    known = {
        word: index for index, word in enumerate(["<unk>", "the", "hat", "is", ".", ",", "'", "n't", "'s", "do", "n"])
    }
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


CHATML = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}


def kinds() -> dict[str, tuple[Tokenizer, dict[str, Any], tuple[str, str]]]:
    """The tokenizers, their configs, and the tokens that their chat template writes."""
    return {
        "byte-level": (byte_level(), CHATML | {"add_bos_token": True}, ("<|im_start|>", "<|im_end|>")),
        "sentencepiece": (sentence_piece(metaspace=False), LLAMA, ("<s>", "</s>")),
        "metaspace": (sentence_piece(metaspace=True), LLAMA, ("<s>", "</s>")),
        "wordpiece": (word_piece(), BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]"}, ("[CLS]", "[SEP]")),
        "words": (words(), {"unk_token": "<unk>", "clean_up_tokenization_spaces": True}, ("", "")),
    }


def answers(tokenizer: Any, chats: bool) -> dict[str, Any]:
    """What transformers says to all texts and conversations."""
    found = {"size": len(tokenizer), "texts": [], "chats": []}
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        plain = tokenizer(text, split_special_tokens=True)["input_ids"]
        decoded, skipped = tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)
        row = {"text": text, "ids": ids, "bare": bare, "plain": plain, "decoded": decoded, "skipped": skipped}
        found["texts"].append(row)
    for name in TEMPLATES if chats else ():
        for number, messages in enumerate(MESSAGES):
            for call in CALLS:
                arguments = {"add_generation_prompt": True, "chat_template": name, **call}
                try:
                    text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
                    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
                except Exception as error:
                    text, ids = None, str(error)
                row = {"template": name, "messages": number, "call": CALLS.index(call), "text": text, "ids": ids}
                found["chats"].append(row)
    return found


def main() -> None:
    """Write everything."""
    from transformers import AutoTokenizer  # not at the top, since pytest imports this file to look for doctests

    expected = {"messages": MESSAGES, "calls": CALLS, "kinds": {}}
    for kind, (tokenizer, names, (begin, end)) in kinds().items():
        folder = HERE / kind
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False), "utf-8")
        templates = [
            {"name": name, "template": text.replace("BEGIN", repr(begin)).replace("END", repr(end))}
            for name, text in TEMPLATES.items()
        ]
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        if begin:
            config["chat_template"] = templates
        (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), "utf-8")
        expected["kinds"][kind] = answers(AutoTokenizer.from_pretrained(folder), bool(begin))
    old = HERE / "gpt2"
    old.mkdir(exist_ok=True)
    state = json.loads((HERE / "byte-level" / "tokenizer.json").read_text("utf-8"))["model"]
    vocab = {"<|endoftext|>" if token == "<|im_start|>" else token: index for token, index in state["vocab"].items()}
    (old / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    merges = "\n".join(" ".join(pair) for pair in state["merges"])
    (old / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    (old / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    expected["kinds"]["gpt2"] = answers(AutoTokenizer.from_pretrained(old), False)
    (HERE / "expected.json").write_text(json.dumps(expected, ensure_ascii=False), "utf-8")


if __name__ == "__main__":
    main()
