"""Make golden cases from transformers: tiny random checkpoints, and what transformers computes from them.

    python make.py NAME OUT         one case, or one of the tables (*.json), written into the folder OUT
    python make.py --all OUT        all of them

Needs torch and transformers, which nothing else here does; README.md describes the files. A new family is one entry in
`recipes.py`, and an encoder with a head for labels one in `heads.py`.
"""

import argparse
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import numpy as np
from recipes import BASE, RECIPES, ROPES, STRONG, UNSEEN, Settings
from seq2seq import SEQ2SEQ, make_beams, make_seq2seq, make_seq2seq_defaults

FAMILIES = Path(__file__).parents[2] / "mlx_tformer" / "families"
LENGTH, PROMPT, NEW = 24, 10, 12
MARGIN = 0.03  # the best greedy logit leads by so much at every step, or the next seed is tried

ASKED: dict[str, Settings] = {
    "cohere": {"num_attention_heads": 128},
    "cohere2": {"num_attention_heads": 128},
    "deepseek_v2": {"num_attention_heads": 64, "num_experts_per_tok": 6},
    "deepseek_v3": {"num_attention_heads": 128},
    "falcon": {"num_attention_heads": 71},
    "mamba": {},
    "mamba2": {},
}
"""Settings with which the defaults of a config class are asked for, where they are not just 64 heads.

Most classes have 32 heads, and then a default that is derived from others agrees with one that is fixed.
"""

OURS = {"transformer"}
"""Families that transformers does not have."""

CORRECTION = "e_score_correction_bias"
"""A buffer in which DeepSeek V3 keeps what it learns otherwise than by gradients."""


def make_case(name: str, out: Path) -> None:
    """Write the folder of one case; seeds are tried from the name's own on until the greedy text is clear and varied.

    Clear, so that rounding cannot turn it; varied, so that a model that repeats itself does not pass.
    """
    folder, start = out / name, zlib.crc32(name.encode())
    for seed in range(start, start + 100):
        save(name, folder, seed)
        expected, margin = answers(folder, seed, seen=name not in UNSEEN)
        if margin > MARGIN and len(set(expected["greedy_ids"][0].tolist())) >= NEW // 2:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy text")
    write_case(name, folder, expected, kind="lm", model_type=RECIPES[name]["model_type"], margin=margin)
    print(f"{name}: greedy margin {margin:.3f}, seed {seed}")


def save(name: str, folder: Path, seed: int) -> None:
    """A model with random weights, in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**RECIPES[name]}
    kind = settings.pop("model_type")
    config = AutoConfig.for_model(kind, **{**base_of(kind), **settings})
    torch.manual_seed(seed)  # for what begins as noise, such as sinks
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    perturb(model, seed, strong=name in STRONG)
    model.to(torch.bfloat16).save_pretrained(folder)


def base_of(model_type: str) -> Settings:
    """The settings in BASE that this kind of config has."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = {*kind().to_dict(), *kind.attribute_map}
    return {key: value for key, value in BASE.items() if key in known}


def perturb(model: Any, seed: int, *, strong: bool) -> None:
    """Random matrices; norms and biases far from the ones and zeros that they begin with, so that they count."""
    import torch

    embedding, matrix = (0.1, 2.6) if strong else (0.4, 1.3)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p += 0.3 * noise
            else:
                p.copy_(noise * (embedding if "embed" in name else matrix / p.shape[-1] ** 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith(CORRECTION):
                buffer += 0.3 * torch.randn(buffer.shape, generator=generator)


def answers(folder: Path, seed: int, *, seen: bool) -> tuple[dict[str, np.ndarray], float]:
    """What transformers computes in float32, and the smallest lead of a greedy choice; with patterns if `seen`."""
    import torch
    from transformers import AutoModelForCausalLM

    way = "eager" if seen else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=way).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH), generator=generator)
    with torch.no_grad():
        greedy, margin = greedy_ids(model, ids[:, :PROMPT])
        out = model(ids, output_hidden_states=True, output_attentions=seen, use_cache=False)
    found = {"input_ids": ids, "prompt_ids": ids[:, :PROMPT], "greedy_ids": greedy, "logits": out.logits}
    found |= {f"hidden.{i}": x for i, x in enumerate(out.hidden_states)}
    found |= {f"attention.{i}": x for i, x in zip(attending(model), out.attentions or (), strict=False)}
    return {k: v.numpy().astype(np.int32 if k.endswith("_ids") else np.float32) for k, v in found.items()}, margin


def attending(model: Any) -> list[int]:
    """The layers that attend, for which alone there are patterns."""
    kinds = model.config.to_dict().get("layer_types") or ["full_attention"] * model.config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind != "linear_attention"]


def greedy_ids(model: Any, ids: Any) -> tuple[Any, float]:
    """The likeliest continuation, by a full pass for every token: nothing rests on a cache."""
    import torch

    margin = float("inf")
    for _ in range(NEW):
        best = model(ids, use_cache=False).logits[:, -1].topk(2)
        margin = min(margin, (best.values[0, 0] - best.values[0, 1]).item())
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, PROMPT:], margin


def write_case(
    name: str,
    folder: Path,
    expected: dict[str, np.ndarray],
    *,
    kind: str,
    model_type: str,
    margin: float | None = None,
) -> None:
    """Put the answers and the description beside the checkpoint."""
    import transformers
    from safetensors.numpy import save_file

    case = {
        "name": name,
        "kind": kind,
        "model_type": model_type,
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
    """Write defaults.json: what the config class of each decoder takes for a key that is left out."""
    from transformers import AutoConfig

    found = {}
    for name in sorted({path.stem for path in FAMILIES.glob("[a-z]*.py")} - OURS):
        kind = {"xlm_roberta": "xlm-roberta"}.get(name, name)
        found[name] = AutoConfig.for_model(kind, **ASKED.get(name, {"num_attention_heads": 64})).to_dict()
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name], sort_keys=True)}" for name in found)
    (out / "defaults.json").write_text(f"{{\n{text}\n}}\n")
    print(f"defaults.json: {', '.join(found)}")


def make_published(out: Path) -> None:
    """Write published.json: the configs in it, as some checkpoints have them, with the number of their parameters."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    rows = json.loads((Path(__file__).parent / "published.json").read_text())
    for row in rows:
        config = CONFIG_MAPPING[row["config"]["model_type"]].from_dict({**row["config"]})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        found = [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith(CORRECTION))]
        row["parameters"] = sum(value.numel() for value in found)
    text = ",\n".join(json.dumps(row) for row in rows)
    (out / "published.json").write_text(f"[\n{text}\n]\n")
    print(f"published.json: {len(rows)} configs")


TABLES: dict[str, Callable[[Path], None]] = {
    "beams.json": make_beams,
    "seq2seq_defaults.json": make_seq2seq_defaults,
    "rope.json": make_ropes,
    "defaults.json": make_defaults,
    "published.json": make_published,
    "pixels.json": heads.make_pixels,
    "published_encoders.json": heads.make_published,
}


def quiet() -> None:
    """No progress bars, and no advice about settings that are meant to be odd."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden cases from transformers.")
    parser.add_argument("name", nargs="?", choices=[*RECIPES, *heads.RECIPES, *SEQ2SEQ, *TABLES])
    parser.add_argument("out", type=Path)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    if args.all == (args.name is not None):
        parser.error("give either a NAME or --all")
    quiet()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in [*RECIPES, *heads.RECIPES, *SEQ2SEQ, *TABLES] if args.all else [args.name]:
        if name in TABLES:
            TABLES[name](args.out)
        elif name in SEQ2SEQ:
            make_seq2seq(name, args.out)
        else:
            (heads.make_case if name in heads.RECIPES else make_case)(name, args.out)


if __name__ == "__main__":
    main()
