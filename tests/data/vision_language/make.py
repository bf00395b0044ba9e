"""Make the cases of this folder: tiny vision-language checkpoints, and what transformers computes from a text alone.

    python make.py OUT              writes a folder for each case into the folder OUT

Needs torch and transformers, which nothing else here does. `config.json` and `model.safetensors` are what
`save_pretrained` writes; `expected.safetensors` has `input_ids` (1, 16) and float32 `logits` (1, 16, vocab).
`defaults.json` has what the language part of each kind takes where `text_config` has nothing but its kind.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EYE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_EYE = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 1}
KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "sliding_window"),
)
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 2, 1]}}

CASES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **TEXT,
            "head_dim": 12,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 20,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": EYE,
        "mm_tokens_per_image": 1,
        "image_token_index": 96,
    },
    "llama4": {
        "text_config": {
            **TEXT,
            "attention_chunk_size": 6,
            "head_dim": 8,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "num_local_experts": 2,
        },
        "vision_config": {**EYE, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
        "image_token_index": 96,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**EYE, "model_type": "clip_vision_model", "projection_dim": 8},
        "image_token_index": 96,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "head_dim": 12, "sliding_window": None},
        "vision_config": {**EYE, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 96,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, **MROPE},
        "vision_config": {**QWEN_EYE, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32},
    },
    "qwen2_vl": {
        "text_config": {**TEXT, **MROPE},
        "vision_config": {**QWEN_EYE, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 1},
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, **MROPE, "head_dim": 8},
        "vision_config": {
            **QWEN_EYE,
            "hidden_size": 16,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "num_position_embeddings": 4,
            "deepstack_visual_indexes": [0],
        },
    },
}


def make_case(name: str, out: Path) -> None:
    """A model with random weights in bfloat16, and its logits of a text in float32."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    seed = zlib.crc32(name.encode())
    config = AutoConfig.for_model(name, **CASES[name])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p += 0.3 * noise
            else:
                p.copy_(noise * (0.4 if "embed" in path else 1.3 / p.shape[-1] ** 0.5))
    model.to(torch.bfloat16).save_pretrained(out / name)
    model = AutoModelForImageTextToText.from_pretrained(out / name, dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(3, 90, (1, 16), generator=generator)
    reader = model.language_model if name == "llama4" else model  # the whole fails without an image
    with torch.no_grad():
        logits = reader.eval()(input_ids=ids).logits
    save_file({"input_ids": ids, "logits": logits.contiguous()}, out / name / "expected.safetensors")
    print(name, tuple(logits.shape), float(logits.std()))


def make_defaults(out: Path) -> None:
    """Write defaults.json: the language part of each kind where `text_config` has nothing but its kind."""
    from transformers import CONFIG_MAPPING

    kinds = {kind: CONFIG_MAPPING[kind] for kind in (*CASES, "llava_onevision")}
    named = {kind: {"model_type": made().text_config.model_type} for kind, made in kinds.items()}
    found = {kind: made(text_config=named[kind]).text_config.to_dict() for kind, made in kinds.items()}
    rows = {kind: {key: text[key] for key in (*KEYS, "rope_parameters") if key in text} for kind, text in found.items()}
    text = ",\n".join(f"{json.dumps(kind)}: {json.dumps(row)}" for kind, row in rows.items())
    (out / "defaults.json").write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    for case in CASES:
        make_case(case, Path(sys.argv[1]))
    make_defaults(Path(sys.argv[1]))
