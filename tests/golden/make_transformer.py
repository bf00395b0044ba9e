"""Make the golden case `transformer` from PyTorch's nn.Transformer: the model of 2017 with random weights, under our
names, and what PyTorch computes from it.

    python make_transformer.py OUT

Needs torch. PyTorch's stacks end in a norm that the paper does not have; these do not.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

DIM, HEADS, LAYERS, HIDDEN, VOCAB = 16, 2, 2, 24, 40
SOURCE, TARGET = 11, 7


def waves(length: int) -> torch.Tensor:
    """The positions of the paper, section 3.5, (L, C)."""
    at = torch.arange(length, dtype=torch.float64)[:, None]
    angles = at / 10000 ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()


def make() -> nn.Transformer:
    """Post-norm stacks without norms at their ends; norms and biases far from ones and zeros, so that they count."""
    settings = {"activation": "relu", "batch_first": True, "norm_first": False, "layer_norm_eps": 1e-5, "dropout": 0.0}
    reads = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, **settings), LAYERS)
    writes = nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, **settings), LAYERS)
    model = nn.Transformer(DIM, HEADS, custom_encoder=reads, custom_decoder=writes, batch_first=True).eval()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape)
            if p.ndim == 1:
                p += 0.3 * noise
            else:
                p.copy_(1.3 * noise / p.shape[-1] ** 0.5)
    return model


def named(model: nn.Transformer, table: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights under our names: q, k and v of cross-attention as one matrix there, as q and kv here."""
    found = {"embed.tokens.weight": table}
    for name, p in model.named_parameters():
        side, _, layer, *rest = name.split(".")
        part, leaf = ".".join(rest[:-1]), rest[-1].removeprefix("in_proj_")
        kind = "cross" if "multihead" in part else "attn"
        norms = ("attn", "mlp") if side == "encoder" else ("attn", "cross", "mlp")
        ours = {
            "self_attn": "attn.op.qkv",
            "multihead_attn": "cross.op.qkv",
            f"{rest[0]}.out_proj": f"{kind}.op.out",
            "linear1": "mlp.op.up",
            "linear2": "mlp.op.down",
            **{f"norm{i + 1}": f"{step}.after" for i, step in enumerate(norms)},
        }[part]
        path = f"{side}.layers.{layer}.{ours}"
        if ours == "cross.op.qkv":
            found |= {f"{path[:-2]}.{leaf}": p[:DIM], f"{path[:-3]}kv.{leaf}": p[DIM:]}
        else:
            found[f"{path}.{leaf}"] = p
    return found


@torch.no_grad()
def main(out: Path) -> None:
    torch.manual_seed(0)
    model, table = make(), 0.3 * torch.randn(VOCAB, DIM)
    source, target = torch.randint(VOCAB, (2, SOURCE)), torch.randint(VOCAB, (2, TARGET))
    padding = torch.tensor([[False] * SOURCE, [False] * 8 + [True] * 3])
    x, y = (table[ids] * DIM**0.5 + waves(ids.shape[1]) for ids in (source, target))
    causal = torch.triu(torch.ones(TARGET, TARGET, dtype=torch.bool), diagonal=1)
    hidden = model(x, y, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    answers = {"input_ids": source, "decoder_input_ids": target, "attention_mask": ~padding, "logits": hidden @ table.T}
    kinds = {"logits": np.float32}
    out.mkdir(parents=True, exist_ok=True)
    save_file({k: v.numpy().astype(kinds.get(k, np.int32)) for k, v in answers.items()}, out / "expected.safetensors")
    weights = named(model, table)
    save_file({k: np.ascontiguousarray(v.detach().numpy()) for k, v in weights.items()}, out / "model.safetensors")
    sizes = {"d_model": DIM, "num_heads": HEADS, "num_layers": LAYERS, "d_ff": HIDDEN, "vocab_size": VOCAB}
    config = {"model_type": "transformer", **sizes, "attention_bias": True, "layer_norm_eps": 1e-5}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    case = {"name": out.name, "kind": "torch", "model_type": "transformer", "torch": torch.__version__}
    (out / "case.json").write_text(json.dumps(case, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
