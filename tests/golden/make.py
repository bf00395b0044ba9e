"""Make golden cases from transformers: tiny random checkpoints, and what transformers computes from them.

    python make.py NAME OUT         one case (or rope.json, or defaults.json), written into the folder OUT
    python make.py --all OUT        all of them

Needs torch and transformers, which nothing else here does; README.md describes the files. A new family is one entry in
RECIPES: what its config says beyond BASE.
"""

import argparse
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Settings = dict[str, Any]

LENGTH, PROMPT, NEW = 24, 10, 12
MARGIN = 0.03  # the best greedy logit leads by so much at every step, or the next seed is tried

BASE: Settings = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# A trained length of 22 holds the greedy text (10 + 12) and not the 24 tokens of the full pass: both regimes are met.
RECIPES: dict[str, Settings] = {
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "llama-linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.5}},
    "llama-dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 22,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
    },
    "llama-longrope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "longrope",
            "original_max_position_embeddings": 22,
            "short_factor": [1.0, 1.1, 1.3, 1.6],
            "long_factor": [1.2, 2.0, 3.5, 5.5],
        },
    },
    "mistral-full": {
        "model_type": "mistral",
        "sliding_window": None,
        "head_dim": 10,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-3,
    },
    "qwen2-window": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "sliding_window": 7,
    },
    "qwen2-yarn": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.3,
            "rope_theta": 1000.0,
        },
    },
    "qwen3-bias": {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True, "head_dim": 12},
    "qwen3-window": {
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "head_dim": 12,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}

PHI3_FACTORS = [round(1 + 0.02 * i, 2) for i in range(48)], [round(1.05 + 0.028 * i * i, 3) for i in range(48)]
DEEPSEEK: Settings = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}

# name: (head_dim, max_position_embeddings, rope parameters). Real settings carry the name of their model.
ROPES: dict[str, tuple[int, int, Settings]] = {
    "default": (64, 2048, {"rope_type": "default"}),
    "default Qwen 2.5": (128, 32768, {"rope_type": "default", "rope_theta": 1e6}),
    "default partial": (64, 2048, {"rope_type": "default", "partial_rotary_factor": 0.25}),
    "default partial Phi 2": (80, 2048, {"rope_type": "default", "partial_rotary_factor": 0.4}),
    "linear": (64, 4096, {"rope_type": "linear", "factor": 4.0}),
    "linear partial": (64, 4096, {"rope_type": "linear", "factor": 1.7, "partial_rotary_factor": 0.25}),
    "linear theta": (48, 4096, {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}),
    "dynamic": (64, 2048, {"rope_type": "dynamic", "factor": 2.0}),
    "dynamic partial": (80, 1024, {"rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.4}),
    "yarn": (64, 8192, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}),
    "yarn trained length from the config": (64, 8192, {"rope_type": "yarn", "factor": 4.0}),
    "yarn attention factor": (
        64,
        8192,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "attention_factor": 0.75},
    ),
    "yarn factor 1": (64, 2048, {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 2048}),
    "yarn narrow ramp": (
        32,
        8192,
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 2},
    ),
    "yarn tiny": (8, 128, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "yarn partial": (
        64,
        8192,
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "partial_rotary_factor": 0.25,
        },
    ),
    "yarn Qwen 2.5": (
        128,
        131072,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
    ),
    "yarn DeepSeek V2 Lite": (64, 163840, {"rope_type": "yarn", **DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "yarn DeepSeek V3": (64, 163840, {"rope_type": "yarn", **DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn unequal mscales": (64, 163840, {"rope_type": "yarn", **DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 0.707}),
    "yarn one mscale": (64, 163840, {"rope_type": "yarn", **DEEPSEEK, "mscale": 0.707}),
    "yarn gpt-oss": (
        64,
        131072,
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 150000,
            "truncate": False,
        },
    ),
    "llama3 Llama 3.1": (
        128,
        131072,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
    ),
    "llama3 Llama 3.2": (
        64,
        131072,
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
    ),
    "longrope Phi 3 128k": (
        96,
        131072,
        {
            "rope_type": "longrope",
            "short_factor": PHI3_FACTORS[0],
            "long_factor": PHI3_FACTORS[1],
            "original_max_position_embeddings": 4096,
        },
    ),
    "longrope factor": (
        16,
        1024,
        {
            "rope_type": "longrope",
            "factor": 6.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
            "original_max_position_embeddings": 256,
        },
    ),
    "longrope attention factor partial": (
        16,
        1024,
        {
            "rope_type": "longrope",
            "attention_factor": 1.25,
            "short_factor": [1.0, 1.1],
            "long_factor": [1.0, 2.0],
            "original_max_position_embeddings": 256,
            "partial_rotary_factor": 0.25,
        },
    ),
}


def make_case(name: str, out: Path) -> None:
    """Write the folder of one case; seeds are tried from the name's own on until the greedy text is clear and varied.

    Clear, so that rounding cannot turn it; varied, so that a model that repeats itself does not pass.
    """
    folder, start = out / name, zlib.crc32(name.encode())
    for seed in range(start, start + 100):
        save(RECIPES[name], folder, seed)
        expected, margin = answers(folder, seed)
        if margin > MARGIN and len(set(expected["greedy_ids"][0].tolist())) >= NEW // 2:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy text")
    write_case(name, folder, expected, margin)
    print(f"{name}: greedy margin {margin:.3f}, seed {seed}")


def save(recipe: Settings, folder: Path, seed: int) -> None:
    """A model with random weights, in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**BASE, **recipe}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    perturb(model, seed)
    model.to(torch.bfloat16).save_pretrained(folder)


def perturb(model: Any, seed: int) -> None:
    """Random matrices; norms and biases far from the ones and zeros that they begin with, so that they count."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p += 0.3 * noise
            else:
                p.copy_(noise * (0.4 if "embed" in name else 1.3 / p.shape[-1] ** 0.5))


def answers(folder: Path, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """What transformers computes in float32 with eager attention, and the smallest lead of a greedy choice."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH), generator=generator)
    with torch.no_grad():
        greedy, margin = greedy_ids(model, ids[:, :PROMPT])
        out = model(ids, output_hidden_states=True, output_attentions=True, use_cache=False)
    found = {"input_ids": ids, "prompt_ids": ids[:, :PROMPT], "greedy_ids": greedy, "logits": out.logits}
    found |= {f"hidden.{i}": x for i, x in enumerate(out.hidden_states)}
    found |= {f"attention.{i}": x for i, x in enumerate(out.attentions)}
    return {k: v.numpy().astype(np.int32 if k.endswith("_ids") else np.float32) for k, v in found.items()}, margin


def greedy_ids(model: Any, ids: Any) -> tuple[Any, float]:
    """The likeliest continuation, by a full pass for every token: nothing rests on a cache."""
    import torch

    margin = float("inf")
    for _ in range(NEW):
        best = model(ids, use_cache=False).logits[:, -1].topk(2)
        margin = min(margin, (best.values[0, 0] - best.values[0, 1]).item())
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, PROMPT:], margin


def write_case(name: str, folder: Path, expected: dict[str, np.ndarray], margin: float) -> None:
    """Put the answers and the description beside the checkpoint."""
    import transformers
    from safetensors.numpy import save_file

    case = {
        "name": name,
        "kind": "lm",
        "model_type": RECIPES[name]["model_type"],
        "transformers": transformers.__version__,
        "greedy_margin": margin,
        "logits_std": float(expected["logits"].std()),
    }
    save_file({k: np.ascontiguousarray(v) for k, v in expected.items()}, folder / "expected.safetensors")
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")


def make_ropes(out: Path) -> None:
    """Write rope.json: frequencies and attention factors, for short and, where that matters, for long texts."""
    rows = []
    for name, (head_dim, positions, rope) in ROPES.items():
        trained = rope.get("original_max_position_embeddings", positions)
        lengths = (trained, trained + 1, 3 * trained) if rope["rope_type"] in ("dynamic", "longrope") else (trained,)
        for length in lengths:
            config = {"max_position_embeddings": positions, "head_dim": head_dim, "rope_parameters": rope}
            frequencies, amplitude = frequencies_of(config, length)
            rows.append({"name": name, **config, "length": length, "inv_freq": frequencies, "amplitude": amplitude})
    text = ",\n".join(json.dumps(row) for row in rows)
    (out / "rope.json").write_text(f"[\n{text}\n]\n")
    print(f"rope.json: {len(rows)} tables")


def frequencies_of(settings: Settings, length: int) -> tuple[list[float], float]:
    """transformers' own inverse frequencies and attention factor for a text of `length` tokens."""
    from transformers import PhiConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    heads, head_dim = 2, settings["head_dim"]
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **settings["rope_parameters"]}
    positions = settings["max_position_embeddings"]
    config = PhiConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        max_position_embeddings=positions,
        rope_parameters=rope,
    )
    config.head_dim = head_dim
    make = ROPE_INIT_FUNCTIONS.get(rope["rope_type"], PhiRotaryEmbedding.compute_default_rope_parameters)
    found, amplitude = make(config, device="cpu", seq_len=length)
    return [float(str(x)) for x in found.numpy()], float(amplitude)  # the fewest digits that give the float32 back


def make_defaults(out: Path) -> None:
    """Write defaults.json: what the config class of each model type takes for a key that is left out.

    With 64 heads, because with the usual 32 a default that is derived from others agrees with one that is fixed.
    """
    from transformers import AutoConfig

    types = sorted({recipe["model_type"] for recipe in RECIPES.values()})
    found = {name: AutoConfig.for_model(name, num_attention_heads=64).to_dict() for name in types}
    (out / "defaults.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"defaults.json: {', '.join(types)}")


TABLES: dict[str, Callable[[Path], None]] = {"rope.json": make_ropes, "defaults.json": make_defaults}


def quiet() -> None:
    """No progress bars, and no advice about settings that are meant to be odd."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden cases from transformers.")
    parser.add_argument("name", nargs="?", choices=[*RECIPES, *TABLES])
    parser.add_argument("out", type=Path)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    if args.all == (args.name is not None):
        parser.error("give either a NAME or --all")
    quiet()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in [*RECIPES, *TABLES] if args.all else [args.name]:
        if name in TABLES:
            TABLES[name](args.out)
        else:
            make_case(name, args.out)


if __name__ == "__main__":
    main()
