"""Makes expected.json: what transformers' logits processors do to random logits, in the order in which `generate` has
them. Run with an environment that has torch and transformers: python make.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

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
]  # fmt: skip
PROMPT, WRITTEN = [[1, 5, 9, 9], [12, 7, 21, 30], [2, 2, 2, 2], [39, 0, 7, 21]], [[21, 2], [2, 7], [21, 2], [30, 2]]


def main() -> None:
    random = np.random.default_rng(0)
    logits = np.round(random.normal(0, 3, (ROWS, VOCAB)), 3)
    ids = torch.tensor([a + b for a, b in zip(PROMPT, WRITTEN, strict=True)])
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    cases = []
    for case in CASES:
        given = dict(case)
        config = GenerationConfig(do_sample=True, eos_token_id=END, pad_token_id=0, **{"top_k": 0, **given})
        config._eos_token_tensor = torch.tensor([END])
        processors = model._get_logits_processor(config, input_ids_seq_length=len(PROMPT[0]))
        scores = processors(ids, torch.tensor(logits, dtype=torch.float32))
        rows = [[None if x == -np.inf else round(x, 5) for x in row] for row in scores.tolist()]
        cases.append({"settings": case, "scores": rows})
    made = {"logits": logits.tolist(), "prompt": PROMPT, "written": WRITTEN, "end": END, "cases": cases}
    Path(__file__).with_name("expected.json").write_text(json.dumps(made, separators=(",", ":")))


main()
