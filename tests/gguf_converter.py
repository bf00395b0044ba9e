"""What llama.cpp's converter makes of a golden case: its names, orders, shifts and stacks, and the keys that it writes.

After `conversion/*.py` and `gguf-py/gguf/tensor_mapping.py` of llama.cpp; the numbers are those of the case, in
float32.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from checkpoints import case_weights
from gguf_builder import ARRAY, BOOL, Gguf, Row, Value, interleave, row
from helpers import config_of

Config = dict[str, Any]
Arrays = dict[str, np.ndarray]

ARCHITECTURES = {"gemma3_text": "gemma3", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
"""model_type -> general.architecture where that is another word."""
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in ("q", "k", "v", "qkv")},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def converted(case: str, *, one_by_one: bool = False, **changes: Any) -> Gguf:
    """A golden case as a GGUF file; `one_by_one`: with a tensor for each expert, as in 2023; `changes` are keys below
    the architecture, with `__` for a dot and None to leave one out."""
    config = config_of(case)
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    keys = metadata(config) | {key.replace("__", "."): x for key, x in changes.items()}
    values = stored(config, {name: np.array(x.astype(mx.float32)) for name, x in case_weights(case).items()})
    rows = [row(name, x) for name, x in (values if one_by_one else stacked(values)).items()]
    under = {f"{arch}.{key}": x for key, x in keys.items() if x is not None}
    return Gguf({"general.architecture": arch, **under}, [*rows, *divisors(config)])


def metadata(config: Config) -> dict[str, Any]:
    """The keys below the architecture."""
    table = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    keys = {theirs: config[ours] for theirs, ours in SIZES.items() if config.get(ours) is not None}
    keys["rope.freq_base"] = float(table["rope_theta"])
    if table["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(table["factor"])}
    return keys | KEYS.get(config["model_type"], lambda config: {})(config)


def llama_keys(config: Config) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": head_dim,
        "expert_count": config["num_local_experts"],
    }


def gemma2_keys(config: Config) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def gemma3_keys(config: Config) -> dict[str, Any]:
    """As newer files have them, which write down the theta of the layers with a window and which layers these are."""
    cap = config["final_logit_softcapping"]
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": Value(
            ARRAY, [x == "sliding_attention" for x in config["layer_types"]], BOOL
        ),
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        **({} if cap is None else {"final_logit_softcapping": cap}),
    }


def phi3_keys(config: Config) -> dict[str, Any]:
    trained, table = config["original_max_position_embeddings"], config["rope_parameters"]
    keys = {
        "attention.sliding_window": config["sliding_window"] or 0,
        "rope.scaling.original_context_length": trained,
        "rope.dimension_count": rotary(config),
    }
    if table["rope_type"] != "longrope":
        return keys
    longer = math.log(config["max_position_embeddings"] / trained) / math.log(trained)
    return keys | {"rope.scaling.attn_factor": math.sqrt(1 + longer)}


def qwen3_moe_keys(config: Config) -> dict[str, Any]:
    return {"expert_count": config["num_local_experts"]}


KEYS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "gemma2": gemma2_keys,
    "gemma3_text": gemma3_keys,
    "mixtral": llama_keys,
    "phi3": phi3_keys,
    "qwen3_moe": qwen3_moe_keys,
}


def rotary(config: Config) -> int:
    """Features of a head that turn."""
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    return int(share * config["hidden_size"]) // config["num_attention_heads"]


def divisors(config: Config) -> list[Row]:
    """Longrope's two tensors."""
    table = config["rope_parameters"]
    if table.get("rope_type") != "longrope":
        return []
    return [row(f"rope_factors_{x}.weight", np.array(table[f"{x}_factor"], np.float32)) for x in ("long", "short")]


def stored(config: Config, weights: Arrays) -> Arrays:
    """The tensors under llama.cpp's names, as it stores them, experts one by one."""
    found = {}
    for name, values in weights.items():
        module, _, leaf = name.rpartition(".")
        found[f"{theirs(module, config['model_type'])}.{leaf}"] = turned(module, values, config)
    return found


def theirs(module: str, model_type: str) -> str:
    """A module's name in llama.cpp."""
    if module in OUTER:
        return OUTER[module]
    layer, inner = module.removeprefix("model.layers.").split(".", 1)
    if ".experts." in inner:
        expert, matrix = inner.split(".")[-2:]
        return f"blk.{layer}.ffn_{EXPERTS[matrix]}.{expert}"
    if inner == "post_attention_layernorm" and model_type in ("gemma2", "gemma3_text"):
        return f"blk.{layer}.post_attention_norm"
    return f"blk.{layer}.{INNER[inner]}"


def turned(module: str, values: np.ndarray, config: Config) -> np.ndarray:
    """Gemma's norms one more, the rows of Llama's q and k for neighbours that turn together, one row as a vector."""
    kind, last = config["model_type"], module.rpartition(".")[2]
    if kind.startswith("gemma") and last.endswith("norm"):
        values = values + np.float32(1)
    if kind == "mixtral" and last in ("q_proj", "k_proj"):
        values = interleave(values, config["num_attention_heads" if last == "q_proj" else "num_key_value_heads"])
    scale = query_scale(config)
    if scale != 1 and last == ("q_norm" if kind == "gemma3_text" else "q_proj"):
        values = values * np.float32(scale)
    return values.squeeze()


def query_scale(config: Config) -> float:
    """What makes up for a `query_pre_attn_scalar` that files cannot say, where it is not the width of a head."""
    scalar = config.get("query_pre_attn_scalar")
    return 1.0 if scalar is None else math.sqrt(config["head_dim"] / scalar)


def stacked(values: Arrays) -> Arrays:
    """The same with one tensor for the experts of a layer, (E, out, in)."""
    groups: dict[str, list[np.ndarray]] = {}
    whole = {}
    for name, x in values.items():
        module, expert = name.removesuffix(".weight").rpartition(".")[::2]
        if expert.isdigit():  # experts come in their order
            groups.setdefault(f"{module}_exps.weight", []).append(x)
        else:
            whole[name] = x
    return whole | {name: np.stack(parts) for name, parts in groups.items()}
