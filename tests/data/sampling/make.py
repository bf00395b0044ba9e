"""Makes expected.json: what transformers' logits processors do to random logits, in the order in which `generate` has
them; and texts.json: what `generate` writes with a golden case under such settings. Run with an environment that has
torch and transformers: python make.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB, ROWS, END = 40, 4, 3
CASES = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"typical_p": 0.2, "temperature": 1.4},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"sequence_bias": [[[4], 2.5], [[9], -3.0]]},
    {"bad_words_ids": [[5], [7, 8], [21, 2, 30], [2, 31], [30, 2, 9]]},
    {"min_new_tokens": 3},
    {"min_new_tokens": 2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8},
    {
        "temperature": 0.8, "top_k": 12, "top_p": 0.95, "repetition_penalty": 1.3, "bad_words_ids": [[6], [21, 2, 10]],
        "sequence_bias": [[[4], 1.5]], "min_new_tokens": 9,
    },
    {"bad_words_ids": [[3], [5], [3, 3]]},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"sequence_bias": [[[4], 2.5], [[21, 2, 30], 4.0], [[2, 31], -2.0], [[30, 2, 9], -np.inf]]},
    {"sequence_bias": [[[12, 7, 21, 30, 2, 7, 1], 3.0], [[2, 2, 2, 21, 2, 1], 3.0]]},
    {"sequence_bias": [[[9], 2.5], [[2, 9], -6.0]], "repetition_penalty": 1.7},
    {"min_length": 6},
    {"min_length": 7},
    {"min_length": 9, "min_new_tokens": 1},
    {"suppress_tokens": [3, 5, 30]},
    {"begin_suppress_tokens": [3, 5, 30]},
    {"begin_suppress_tokens": [3, 5, 30], "at": [4, 0]},
    {"begin_suppress_tokens": [3, 5, 30], "forced_bos_token_id": 7, "at": [4, 0]},
    {"begin_suppress_tokens": [3, 5, 30], "forced_bos_token_id": 7, "at": [1, 0]},
    {"begin_suppress_tokens": [3, 5, 30], "forced_bos_token_id": 0, "at": [1, 1]},
    {"begin_suppress_tokens": [3, 5, 30], "at": [1, 0]},
    {"forced_bos_token_id": 7, "forced_eos_token_id": 8, "max_new_tokens": 1, "at": [1, 0]},
    {"forced_eos_token_id": 3, "max_new_tokens": 3, "min_new_tokens": 9},
    {"forced_eos_token_id": [3, 8], "max_new_tokens": 3, "suppress_tokens": [8]},
    {"forced_eos_token_id": 3, "max_new_tokens": 4},
    {"exponential_decay_length_penalty": [0, 1.5]},
    {"exponential_decay_length_penalty": [1, 1.3], "repetition_penalty": 1.2, "temperature": 0.7},
    {"exponential_decay_length_penalty": [2, 1.5]},
    {
        "temperature": 0.8, "top_k": 12, "top_p": 0.95, "repetition_penalty": 1.3, "bad_words_ids": [[6], [21, 2, 10]],
        "sequence_bias": [[[4], 1.5], [[2, 7, 0], 9.0]], "min_length": 3, "no_repeat_ngram_size": 2,
        "max_new_tokens": 9, "suppress_tokens": [30, 31], "begin_suppress_tokens": [4], "forced_bos_token_id": 1,
        "forced_eos_token_id": 3, "exponential_decay_length_penalty": [1, 1.1],
    },
]  # fmt: skip
PROMPT, WRITTEN = [[1, 5, 9, 9], [12, 7, 21, 30], [2, 2, 2, 2], [39, 0, 7, 21]], [[21, 2], [2, 7], [21, 2], [30, 2]]

GOLDEN, ENDS = Path(__file__).parents[2] / "golden" / "llama-gqa-tied", [2, 5]
STARTS = [[7], [112, 40, 40, 37]]
TEXTS = [
    {},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": [40, 112]},
    {"begin_suppress_tokens": [126, 40]},
    {"bad_words_ids": [[40, 40], [5], [112, 112]]},
    {"sequence_bias": [[[40, 40], -50.0], [[61], 4.0]], "repetition_penalty": 1.2},
    {"forced_bos_token_id": 9, "forced_eos_token_id": 77, "max_new_tokens": 8},
    {"forced_eos_token_id": [2, 5], "suppress_tokens": [5], "begin_suppress_tokens": [9], "max_new_tokens": 5},
    {"min_length": 17},
    {"sequence_bias": [[[40, 40], -50.0], [[117, 117], -50.0]]},
    {"exponential_decay_length_penalty": [3, 1.6], "min_new_tokens": 5},
    {
        "repetition_penalty": 1.3, "bad_words_ids": [[61], [40, 103]], "sequence_bias": [[[126], -9.0]],
        "no_repeat_ngram_size": 3, "min_length": 9, "suppress_tokens": [112], "begin_suppress_tokens": [64],
        "exponential_decay_length_penalty": [9, 1.2], "forced_eos_token_id": 5,
    },
]  # fmt: skip


def main() -> None:
    random = np.random.default_rng(0)
    logits = np.round(random.normal(0, 3, (ROWS, VOCAB)), 3)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    cases = []
    for case in CASES:
        given = dict(case)
        before, since = given.pop("at", (4, 2))
        ids = torch.tensor([a[:before] + b[:since] for a, b in zip(PROMPT, WRITTEN, strict=True)])
        config = GenerationConfig(do_sample=True, eos_token_id=END, pad_token_id=0, **{"top_k": 0, **given})
        config._eos_token_tensor = torch.tensor([END])
        # As `generate` does before it asks for the processors.
        length = {"has_default_max_length": False, "has_default_min_length": False, "input_ids_length": before}
        model._prepare_generated_length(config, model_input_name="input_ids", inputs_tensor=ids[:, :before], **length)
        processors = model._get_logits_processor(config, input_ids_seq_length=before)
        scores = processors(ids, torch.tensor(logits, dtype=torch.float32))
        rows = [[None if x == -np.inf else round(x, 5) for x in row] for row in scores.tolist()]
        cases.append({"settings": case, "scores": rows})
    made = {"logits": logits.tolist(), "prompt": PROMPT, "written": WRITTEN, "end": END, "cases": cases}
    Path(__file__).with_name("expected.json").write_text(json.dumps(made, separators=(",", ":")))


def texts() -> None:
    model = AutoModelForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(eos_token_id=ENDS, pad_token_id=0)
    rows = []
    for prompt in STARTS:
        for settings in TEXTS:
            found = model.generate(torch.tensor([prompt]), **{"max_new_tokens": 14, **settings})
            rows.append({"prompt": prompt, "settings": settings, "tokens": found[0, len(prompt) :].tolist()})
    told = ",\n".join(json.dumps(row) for row in rows)
    Path(__file__).with_name("texts.json").write_text(f"[\n{told}\n]\n")
    print(told)


main()
texts()
