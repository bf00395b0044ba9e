"""Golden cases of encoder-decoder models, and what transformers' beam search finds with them; `make.py` runs this."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

Settings = dict[str, Any]
HERE = Path(__file__).parent
SOURCE, REAL, TARGET, NEW = 16, 10, 7, 12
MARGIN = 0.02
BIAS = "final_logits_bias"
"""A buffer of zeros to begin with."""

T5: Settings = {
    "vocab_size": 67,
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 28,
    "num_heads": 3,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 11,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
BART: Settings = {
    "vocab_size": 67,
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 28,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
}
SEQ2SEQ: dict[str, Settings] = {
    "t5-untied": {"model_type": "t5", **T5, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
    "switch-full": {
        "model_type": "switch_transformers",
        **T5,
        "expert_capacity": 2,
        "num_experts": 3,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 1,
        "router_bias": True,
        "layer_norm_epsilon": 1e-3,
        "dense_act_fn": "silu",
    },
    "mbart": {"model_type": "mbart", **BART, "activation_function": "relu"},
    "m2m_100": {"model_type": "m2m_100", **BART, "pad_token_id": 3, "scale_embedding": False},
    "marian-apart": {
        "model_type": "marian",
        **BART,
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 59,
        "decoder_start_token_id": 1,
    },
    "pegasus": {"model_type": "pegasus", **BART, "scale_embedding": True},
}


LOUD = ("marian", "pegasus")
"""Kinds whose greedy text repeats itself, less so where their matrices are large beside their embedding."""


def name_of(model: Any) -> str:
    """The model type."""
    return str(model.config.model_type)


def make_seq2seq(name: str, out: Path) -> None:
    """Write the folder of one case; seeds are tried until the greedy text is clear and varied."""
    folder, start = out / name, zlib.crc32(name.encode())
    for seed in range(start, start + 200):
        save(name, folder, seed)
        expected, margin = answers(folder, seed)
        varied = 1 if SEQ2SEQ[name]["model_type"] in LOUD else 3
        if margin > MARGIN and len(set(expected["greedy_ids"][0].tolist())) >= varied:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy text")
    write(name, folder, expected, margin)
    print(f"{name}: greedy margin {margin:.3f}, seed {seed}")


def save(name: str, folder: Path, seed: int) -> None:
    """A model with random weights, in bfloat16; T5's config as transformers 4 writes it where the head is not tied."""
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    settings = {**SEQ2SEQ[name]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    untied = settings.get("tie_word_embeddings") is False
    if untied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    perturb(model, seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    if untied:
        values = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def perturb(model: Any, seed: int) -> None:
    """Random matrices; norms, biases and the bias of the logits far from what they begin with, so that they count."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if not p.requires_grad:
                continue  # a table of computed positions
            if p.ndim == 1:
                p += 0.3 * noise
            elif "embed_positions" in name or "relative_attention_bias" in name:
                p.copy_(0.5 * noise)
            else:
                table, matrix = (0.2, 2.5) if name_of(model) in LOUD else (0.6, 1.4)
                p.copy_(noise * (table if "shared" in name or "embed" in name else matrix / p.shape[-1] ** 0.5))
        for name, buffer in model.named_buffers():
            if name == BIAS:
                buffer += 0.5 * torch.randn(buffer.shape, generator=generator)


def answers(folder: Path, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """What transformers computes in float32, and the smallest lead of a greedy choice."""
    import torch

    model = loaded(folder)
    generator = torch.Generator().manual_seed(seed + 1)
    vocab = min(model.config.vocab_size, model.lm_head.weight.shape[0])
    ids = torch.randint(4, model.config.vocab_size, (2, SOURCE), generator=generator)
    targets = torch.randint(4, vocab, (2, TARGET), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, REAL:] = 0
    ids[1, REAL:] = model.config.pad_token_id
    with torch.no_grad():
        greedy, margin = greedy_ids(model, ids[:1])
        out = model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=targets, output_attentions=True, use_cache=False
        )
    found = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": targets, "greedy_ids": greedy}
    found |= {"logits": out.logits, "encoder_out": out.encoder_last_hidden_state}
    for kind, of in {"attention": out.decoder_attentions, "cross_attention": out.cross_attentions}.items():
        found |= {f"{kind}.{i}": x for i, x in enumerate(of)}
    found |= {f"encoder_attention.{i}": x for i, x in enumerate(out.encoder_attentions)}
    whole = ("_ids", "_mask")
    return {k: v.numpy().astype(np.int32 if k.endswith(whole) else np.float32) for k, v in found.items()}, margin


def loaded(folder: Path) -> Any:
    """The model of a case in float32."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy_ids(model: Any, ids: Any) -> tuple[Any, float]:
    """The likeliest text for a source, by a full pass for every token."""
    import torch

    margin, written = float("inf"), torch.tensor([[model.config.decoder_start_token_id]])
    for _ in range(NEW):
        best = model(input_ids=ids, decoder_input_ids=written, use_cache=False).logits[:, -1].topk(2)
        margin = min(margin, (best.values[0, 0] - best.values[0, 1]).item())
        written = torch.cat([written, best.indices[:, :1]], dim=1)
    return written[:, 1:], margin


def write(name: str, folder: Path, expected: dict[str, np.ndarray], margin: float) -> None:
    """Put the answers and the description beside the checkpoint."""
    import transformers
    from safetensors.numpy import save_file

    case = {
        "name": name,
        "kind": "seq2seq",
        "model_type": SEQ2SEQ[name]["model_type"],
        "transformers": transformers.__version__,
        "greedy_margin": margin,
        "logits_std": float(expected["logits"].std()),
    }
    save_file({k: np.ascontiguousarray(v) for k, v in expected.items()}, folder / "expected.safetensors")
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")


# --- beam search ---

WAYS: list[Settings] = [
    {"num_beams": 2},
    {"num_beams": 3, "length_penalty": 0.0},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 3, "length_penalty": -1.5},
    {"num_beams": 4, "early_stopping": True},
    {"num_beams": 2, "length_penalty": 1.5, "early_stopping": "never"},
    {"num_beams": 3, "early_stopping": True, "length_penalty": 0.5},
]
RULED: list[Settings] = [
    {"num_beams": 3, "forced_bos_token_id": 11, "forced_eos_token_id": 7},
    {"num_beams": 4, "bad_words_ids": [[1], [5], [13]], "early_stopping": True},
    {"num_beams": 2, "min_length": 8},
    {"num_beams": 1, "forced_bos_token_id": 11, "forced_eos_token_id": 7, "min_length": 8, "bad_words_ids": [[1], [5]]},
]
BEAMED = ("t5", "bart", "marian", "mbart", "switch-full", "marian-apart")


def make_beams(out: Path) -> None:
    """Write beams.json: the texts and scores that transformers' own `generate` finds, with ends that come early."""
    import torch

    rows = []
    for name in BEAMED:
        folder = HERE / name
        model = loaded(folder)
        ids = torch.tensor(_expected(folder)["input_ids"]).long()
        mask = torch.tensor(_expected(folder)["attention_mask"]).long()
        for way, settings in enumerate(WAYS + RULED):
            row = way % 2
            source, real = ids[row : row + 1], mask[row : row + 1]
            # transformers 5.24 cannot cache a decoder of more layers than the encoder has; capacity counts what is
            # computed at once, which is a token a step with a cache.
            base = {"do_sample": False, "use_cache": name.startswith("switch")}
            greedy = model.generate(source, attention_mask=real, max_new_tokens=6, eos_token_id=None, **base)
            ends = [int(greedy[0, 4]), int(greedy[0, 6])][: 1 + way % 2]
            base |= {"max_new_tokens": 10, "eos_token_id": ends}
            way_out = model.generate(
                source,
                attention_mask=real,
                return_dict_in_generate=True,
                output_scores=True,
                **{**base, **settings},
            )
            kept = {k: v for k, v in {**base, **settings}.items() if k not in ("do_sample", "use_cache")}
            found: Settings = {"case": name, "row": row, "settings": kept}
            found["ids"] = way_out.sequences[0, 1:].tolist()
            found["score"] = way_out.sequences_scores[0].item() if settings["num_beams"] > 1 else None
            rows.append(found)
    text = ",\n".join(json.dumps(row) for row in rows)
    (out / "beams.json").write_text(f"[\n{text}\n]\n")
    print(f"beams.json: {len(rows)} searches")


def make_seq2seq_defaults(out: Path) -> None:
    """Write seq2seq_defaults.json: what the config class of each model type takes for a key that is left out."""
    from transformers import AutoConfig

    kinds = sorted({str(settings["model_type"]) for settings in SEQ2SEQ.values()} | {"bart"})
    found = {kind: AutoConfig.for_model(kind).to_dict() for kind in kinds}
    text = ",\n".join(f"{json.dumps(kind)}: {json.dumps(found[kind], sort_keys=True)}" for kind in found)
    (out / "seq2seq_defaults.json").write_text(f"{{\n{text}\n}}\n")
    print(f"seq2seq_defaults.json: {', '.join(found)}")


def _expected(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "expected.safetensors")
