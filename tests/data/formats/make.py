"""Make the quantized checkpoints of this folder, and ask those who know the formats for the answers.

    python make.py OUT AUTOAWQ AUTOGPTQ

Needs torch, transformers (5.24 was used), accelerate, mlx and mlx-lm (0.32.2). AUTOAWQ and AUTOGPTQ are folders with
the unpacked sources of the packages autoawq 0.2.9 and auto-gptq 0.7.1, of which two files are used. What is written:

* `mxfp4-gpt_oss`, `fp8-deepseek_v3`: checkpoints that transformers unpacks and computes logits from;
* `mlx-...`: checkpoints that mlx-lm wrote, and its logits;
* `matrices.safetensors`: matrices of each format, and what transformers, AutoAWQ and AutoGPTQ make of them.
"""

import importlib.util
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]
IDS = [[1, 7, 33, 60, 5, 5, 18, 42, 9, 27, 51, 2, 14, 63, 30, 11]]
BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT = {
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **BASE,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt2": GPT,
    "gpt_neox": {**BASE, "intermediate_size": 256, "rotary_pct": 0.25, "hidden_act": "gelu_new"},
    "gpt_oss": {
        **BASE,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "granitemoe": {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {**BASE, "num_hidden_layers": 2, "tie_word_embeddings": False},
    "mixtral": {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        **BASE,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}
MLX: dict[str, tuple[str, dict[str, Any]]] = {
    "mlx-deepseek_v3": ("deepseek_v3", {"bits": 8, "group_size": 32}),
    "mlx-gpt2": ("gpt2", {"bits": 4, "group_size": 32}),
    "mlx-gpt2-plain": ("gpt2", {}),
    "mlx-gpt_neox": ("gpt_neox", {"bits": 4, "group_size": 32}),
    "mlx-gpt_oss": ("gpt_oss", {"bits": 4, "group_size": 32}),
    "mlx-granitemoe": ("granitemoe", {"bits": 4, "group_size": 32}),
    "mlx-llama-mixed": ("llama", {"bits": 4, "group_size": 32, "own": {"down_proj": 8, "o_proj": 6, "lm_head": None}}),
    "mlx-mixtral": ("mixtral", {"bits": 4, "group_size": 32}),
    "mlx-qwen3_moe": ("qwen3_moe", {"bits": 8, "group_size": 32, "mode": "mxfp8"}),
}

OLDER = {
    "gpt2": {"n_ctx": 64},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "granitemoe": {"rope_theta": 10000.0},
    "llama": {"rope_theta": 10000.0},
    "mixtral": {"rope_theta": 1000000.0},
    "qwen3_moe": {"rope_theta": 10000.0, "num_experts": 4},
}
"""Settings of an older dialect that mlx-lm needs."""


def plain(kind: str, folder: Path, seed: int = 0) -> None:
    """A model with random weights in bfloat16, whose norms and biases count."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]), dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p += 0.3 * noise
            else:
                p.copy_(noise * (0.4 if "embed" in name else 1.3 / p.shape[-1] ** 0.5))
    model.to(torch.bfloat16).save_pretrained(folder)


def rewrite(folder: Path, change: Any, quantization: dict[str, Any]) -> None:
    """Store the weights otherwise: `change` gives the tensors for one of them, or None to leave it."""
    stored: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored |= change(name, tensor) or {name: tensor}
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}, indent=1) + "\n")


def tidy(folder: Path, logits: np.ndarray) -> None:
    """Leave the config, the weights and the answers alone."""
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    answers = {"input_ids": torch.tensor(IDS, dtype=torch.int32), "logits": torch.from_numpy(logits)}
    save_file(answers, folder / "expected.safetensors")


def by_transformers(folder: Path) -> np.ndarray:
    """The logits of a checkpoint, which transformers unpacks where there is no accelerator."""
    kwargs = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.no_grad():
        return model(torch.tensor(IDS), use_cache=False).logits.numpy()


# --- transformers ---


def random_blocks(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of MXFP4: any bytes, and powers of two about 1/4."""
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(123, 127, shape, generator=generator, dtype=torch.uint8)


def make_mxfp4(out: Path) -> None:
    """gpt-oss as OpenAI stores it; down_proj is neither square nor of the shape of gate_up_proj."""
    folder, generator = out / "mxfp4-gpt_oss", torch.Generator().manual_seed(1)
    plain("gpt_oss", folder)

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        experts, width, rows = tensor.shape  # (E, in, out)
        blocks, scales = random_blocks((experts, rows, width // 32), generator)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    rewrite(folder, change, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    tidy(folder, by_transformers(folder))


def fp8(tensor: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit floats, and a scale for each square block."""
    rows, columns = tensor.shape
    blocks = tensor.float().reshape(rows // block, block, columns // block, block)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    return (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn), scale


def make_fp8(out: Path) -> None:
    """DeepSeek V3 with scales for blocks of 32 x 32 (transformers takes blocks that divide the sides for granted)."""
    folder = out / "fp8-deepseek_v3"
    plain("deepseek_v3", folder)

    def change(name: str, tensor: torch.Tensor) -> Tensors | None:
        if "_proj" not in name:
            return None
        weight, scale = fp8(tensor, 32)
        return {name: weight, f"{name}_scale_inv": scale}

    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    rewrite(folder, change, said)
    tidy(folder, by_transformers(folder))


# --- mlx-lm ---


def for_mlx(kind: str, out: Path, folder: Path) -> Path:
    """A checkpoint that mlx-lm reads."""
    if kind == "gpt_oss":  # which it reads in MXFP4 alone
        return out / "mxfp4-gpt_oss"
    plain(kind, folder, seed=2)
    file, weights = folder / "config.json", folder / "model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | OLDER.get(kind, {})))
    if kind == "gpt2":  # which it knows without its prefix
        save_file({name.removeprefix("transformer."): x for name, x in load_file(weights).items()}, weights)
    return folder


def make_mlx(name: str, out: Path) -> None:
    """A checkpoint as `mlx_lm.convert` writes it."""
    import mlx.core as mx
    from mlx_lm import utils

    kind, how = MLX[name]
    own = how.get("own", {})

    def way(path: str, module: Any) -> bool | dict[str, Any]:
        bits = next((bits for end, bits in own.items() if path.endswith(end)), how["bits"])
        usual = bits == how["bits"]
        return usual or (False if bits is None else {"bits": bits, "group_size": how["group_size"]})

    with TemporaryDirectory() as temporary:
        model, config = utils.load_model(for_mlx(kind, out, Path(temporary)))
    if how:
        mode = how.get("mode", "affine")
        model, config = utils.quantize_model(model, config, how["group_size"], how["bits"], mode, quant_predicate=way)
    utils.save_model(out / name, model)
    utils.save_config(config, out / name / "config.json")
    model, _ = utils.load_model(out / name)
    model.set_dtype(mx.float32)
    tidy(out / name, np.array(model(mx.array(IDS)).astype(mx.float32)))


# --- matrices ---


def module_of(file: Path) -> Any:
    """A Python file as a module, without the package that it belongs to."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def awq_matrix(sources: Path, generator: torch.Generator) -> Tensors:
    """Any bits, and what AutoAWQ reads them as."""
    packing = module_of(sources / "awq" / "utils" / "packing_utils.py")

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)

    qweight, qzeros = words(64, 3), words(2, 3)
    scales = torch.rand((2, 24), generator=generator).half()
    values = packing.dequantize_gemm(qweight, qzeros, scales.float(), 4, 32)  # (in, out), of float16 scales
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "expected": values.T.contiguous()}


def gptq_matrix(sources: Path, bits: int, generator: torch.Generator) -> Tensors:
    """Numbers that AutoGPTQ packs and unpacks again."""
    import torch.nn as nn

    module = module_of(sources / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda_old.py")
    scales = (torch.rand((32, 2), generator=generator) + 0.1).half().float()
    zeros = torch.randint(1, 2**bits, (32, 2), generator=generator).float()
    numbers = torch.randint(0, 2**bits, (32, 64), generator=generator).float()
    each = torch.arange(64) // 32
    linear = nn.Linear(64, 32, bias=False)
    linear.weight.data = (numbers - zeros[:, each]) * scales[:, each]
    layer = module.QuantLinear(bits, 32, 64, 32, False)
    layer.pack(linear, scales.clone(), zeros.clone(), None)
    layer.scales = layer.scales.float()
    expected = layer(torch.eye(64)).T.contiguous()
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half(), "expected": expected}


def make_matrices(out: Path, autoawq: Path, autogptq: Path) -> None:
    """One matrix of each kind."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    found = {f"awq.{k}": v for k, v in awq_matrix(autoawq, generator).items()}
    for bits in (2, 4, 8):
        found |= {f"gptq{bits}.{k}": v for k, v in gptq_matrix(autogptq, bits, generator).items()}
    blocks, scales = random_blocks((2, 6, 2), generator)
    scales[0] = torch.tensor([[0, 1], [2, 60], [100, 127], [128, 140], [200, 250], [251, 252]])
    dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    found |= {"mxfp4.blocks": blocks, "mxfp4.scales": scales, "mxfp4.expected": dense}
    weight = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scale = torch.rand((4, 2), generator=generator)
    for kind, dtype in {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.items():
        values = Fp8Dequantize(None)._dequantize_one(weight.view(dtype), scale, torch.float32)
        found |= {
            f"{kind}.weight": weight.clone().view(dtype),
            f"{kind}.scale": scale.clone(),
            f"{kind}.expected": values,
        }
    powers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found |= {"e8m0.scale": powers, "e8m0.expected": powers.float()}
    save_file({k: v.contiguous() for k, v in found.items()}, out / "matrices.safetensors")


def main() -> None:
    out, autoawq, autogptq = map(Path, sys.argv[1:])
    make_matrices(out, autoawq, autogptq)
    make_mxfp4(out)
    make_fp8(out)
    for name in MLX:
        make_mlx(name, out)


if __name__ == "__main__":
    main()
