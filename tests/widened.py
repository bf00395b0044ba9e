"""Checkpoints with random weights in other sizes than the golden cases have: rows of whole groups, to be quantized."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from checkpoints import Weights, make_folder
from helpers import config_of

from mlx_tformer.checkpoint.plan import shapes
from mlx_tformer.checkpoint.undo import origins, taken_apart
from mlx_tformer.config import Config
from mlx_tformer.families import family

SIZES: dict[str, dict[str, Any]] = {
    "llama-gqa-tied": {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96},
    "llama-bias": {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96, "head_dim": 8},
    "gpt2": {"n_embd": 64},
    "qwen2_moe": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "deepseek_v3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "v_head_dim": 16,
    },
}
"""Golden case -> settings that make every matrix quantizable."""


def widened(folder: Path, case: str) -> Path:
    """A golden case in these sizes, with random weights in bfloat16, the same every time, none of them 0 or 1."""
    return make_folder(folder, case, widened_weights(case), **SIZES[case])


def widened_weights(case: str) -> Weights:
    """Its weights, by the checkpoint's names."""
    config = Config(config_of(case) | SIZES[case])
    kind = family(config.model_type)
    wanted, made = shapes(kind.model(config)), dict[str, mx.array]()
    for i, (name, pieces) in enumerate(origins(wanted, kind.names(config), {}).items()):
        noise = mx.random.normal(wanted[name], key=mx.random.key(i))
        is_norm = len(wanted[name]) == 1 and name.endswith("weight")
        value = (1 + 0.3 * noise if is_norm else 0.2 * noise).astype(mx.bfloat16)
        for theirs, part in taken_apart(lambda value=value: [value], wanted[name], pieces):
            made[theirs] = mx.concatenate([made[theirs], part]) if theirs in made else part
    return made
