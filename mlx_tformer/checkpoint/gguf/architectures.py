"""The architectures of GGUF files, as data: what llama.cpp calls one, and what it is in Hugging Face's terms.

Names are those of llama.cpp's `gguf-py/gguf/tensor_mapping.py`, and what its converter does to tensors and leaves out
of the metadata is in `conversion/*.py` and `src/models/*.cpp` there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .fields import Fields

Values = dict[str, Any]
Reading = Callable[[Fields, Values], Values]
"""From the metadata, and what is known of the config, to more of the config."""

_LAYER = "model.layers.{}."
_ATTENTION = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": _LAYER + "input_layernorm",
    "blk.{}.attn_q": _LAYER + "self_attn.q_proj",
    "blk.{}.attn_k": _LAYER + "self_attn.k_proj",
    "blk.{}.attn_v": _LAYER + "self_attn.v_proj",
    "blk.{}.attn_output": _LAYER + "self_attn.o_proj",
    "blk.{}.ffn_norm": _LAYER + "post_attention_layernorm",
}
_DECODER = {
    **_ATTENTION,
    "blk.{}.ffn_gate": _LAYER + "mlp.gate_proj",
    "blk.{}.ffn_up": _LAYER + "mlp.up_proj",
    "blk.{}.ffn_down": _LAYER + "mlp.down_proj",
}
_QK_NORMS = {
    "blk.{}.attn_q_norm": _LAYER + "self_attn.q_norm",
    "blk.{}.attn_k_norm": _LAYER + "self_attn.k_norm",
}
_SANDWICH = {
    **_DECODER,
    "blk.{}.post_attention_norm": _LAYER + "post_attention_layernorm",
    "blk.{}.ffn_norm": _LAYER + "pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": _LAYER + "post_feedforward_layernorm",
}
_SHARED = {
    "blk.{}.ffn_gate_shexp": _LAYER + "mlp.shared_expert.gate_proj",
    "blk.{}.ffn_up_shexp": _LAYER + "mlp.shared_expert.up_proj",
    "blk.{}.ffn_down_shexp": _LAYER + "mlp.shared_expert.down_proj",
    "blk.{}.ffn_gate_inp_shexp": _LAYER + "mlp.shared_expert_gate",
}


def _experts(place: str) -> dict[str, str]:
    """The router and the stacked experts, (E, out, in), under mlx-lm's names, which has them stacked as well."""
    stacked = {f"blk.{{}}.ffn_{x}_exps": f"{_LAYER}{place}.switch_mlp.{x}_proj" for x in ("gate", "up", "down")}
    return {**_ATTENTION, "blk.{}.ffn_gate_inp": f"{_LAYER}{place}.gate", **stacked}


_MIXTRAL = {
    **_experts("block_sparse_moe"),
    # One tensor for each expert, as in the files of 2023.
    "blk.{}.ffn_gate.{}": _LAYER + "block_sparse_moe.experts.{}.w1",
    "blk.{}.ffn_up.{}": _LAYER + "block_sparse_moe.experts.{}.w3",
    "blk.{}.ffn_down.{}": _LAYER + "block_sparse_moe.experts.{}.w2",
}
_PHI3 = {
    **_DECODER,
    "blk.{}.attn_qkv": _LAYER + "self_attn.qkv_proj",
    "blk.{}.ffn_up": _LAYER + "mlp.gate_up_proj",  # gate over up
}
_STARCODER2 = {
    **_ATTENTION,
    "blk.{}.ffn_up": _LAYER + "mlp.c_fc",
    "blk.{}.ffn_down": _LAYER + "mlp.c_proj",
}


@dataclass(frozen=True)
class Architecture:
    """What a `general.architecture` of llama.cpp is in Hugging Face's terms."""

    model_type: str
    names: Mapping[str, str]
    """Modules: theirs -> Hugging Face's, `{}` for the number of the layer and that of the expert."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Config keys that the architecture implies."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """Config key -> the tensor whose presence makes it true."""
    readings: tuple[Reading, ...] = ()
    """What more is in the metadata, or follows from it."""
    eps: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    """The norms' epsilon: the config's key, and the metadata's."""
    interleaved: bool = False
    """True if the rows of q and k are stored so that neighbours turn together (the original Llama order)."""
    partial: bool = False
    """True if only the first features of a head may turn."""
    shifted: bool = False
    """True if norms are stored as what they multiply by, where Hugging Face has one less (Gemma).

    Float32 has x - 1 exactly for x from 0.5 on, and gives back what a converter added 1 to wherever its sum was exact.
    """
    single: frozenset[str] = frozenset()
    """Modules of ours that have one row, which is stored without its axis."""


# --- what more the metadata says ---


def _windows(period: int, window: int = 0) -> Reading:
    """A window in all layers but every `period`-th, unless the file says otherwise; `window` where it has no size."""

    def read(fields: Fields, values: Values) -> Values:
        size = fields.whole("attention.sliding_window", window, least=0)
        layers = values["num_hidden_layers"]
        sliding = _pattern(fields, period, layers) if size else [False] * layers
        kinds = ["sliding_attention" if x else "full_attention" for x in sliding]
        return {"layer_types": kinds, **({"sliding_window": size} if size else {})}

    return read


def _pattern(fields: Fields, period: int, layers: int) -> list[bool]:
    """Which layers have a window: the file's truth values, or all but every so many-th."""
    key = "attention.sliding_window_pattern"
    if isinstance(fields.get(key), np.ndarray):
        found = fields.numbers(key, layers)
        if found.dtype != bool:
            raise fields.wrong(key, "truth values, or a whole number")
        return [bool(x) for x in found]
    every = fields.whole(key, period)
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _query_scale(largest: int) -> Reading:
    """What scores are divided by the root of, which no file says: the width of a head, or in the largest Gemma, which
    `largest` layers tell, the width of the model over the heads."""

    def read(fields: Fields, values: Values) -> Values:
        if values["num_hidden_layers"] != largest:
            return {"query_pre_attn_scalar": values["head_dim"]}
        return {"query_pre_attn_scalar": values["hidden_size"] // values["num_attention_heads"]}

    return read


def _caps(fields: Fields, values: Values) -> Values:
    """Gemma 2's; its first files have none, and mean these."""
    return {
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }


def _final_cap(fields: Fields, values: Values) -> Values:
    key = "final_logit_softcapping"
    return {key: fields.number(key)} if fields.has(key) else {}


def _two_thetas(fields: Fields, values: Values) -> Values:
    """Gemma 3's layers with a window turn by a theta of their own and are not scaled."""
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    return {"rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local}}


def _phi3(fields: Fields, values: Values) -> Values:
    """Files say 0 for no window. The first do not say, and those of the models for 4096 tokens mean 2047."""
    context = values["max_position_embeddings"]
    window = fields.whole("attention.sliding_window", 2047 if context == 4096 else 0, least=0)
    trained = fields.whole("rope.scaling.original_context_length", context)
    return {"sliding_window": window or None, "original_max_position_embeddings": trained}


def _routing(fields: Fields, count_key: str) -> Values:
    """How many experts there are, and how many a token takes."""
    count = fields.whole("expert_count")
    top = fields.whole("expert_used_count")
    if top > count:
        raise fields.wrong("expert_used_count", f"at most {count}, the experts that there are")
    return {count_key: count, "num_experts_per_tok": top}


def _mixtral(fields: Fields, values: Values) -> Values:
    return _routing(fields, "num_local_experts")


def _small_experts(normalised: bool) -> Reading:
    """Qwen's; `normalised`: whether the chosen experts' weights add up to 1 where the file does not say."""

    def read(fields: Fields, values: Values) -> Values:
        routing = _routing(fields, "num_experts")
        share = values["intermediate_size"] // routing["num_experts_per_tok"] or 1
        return {
            **routing,
            "moe_intermediate_size": fields.whole("expert_feed_forward_length", share),
            "norm_topk_prob": fields.flag("expert_weights_norm", normalised),
        }

    return read


def _shared_expert(fields: Fields, values: Values) -> Values:
    key = "shared_expert_intermediate_size"
    return {key: fields.whole("expert_shared_feed_forward_length", values["intermediate_size"])}


# --- the rows ---

_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_UNWINDOWED = {"use_sliding_window": False}
_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        _DECODER,
        biases={**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
        interleaved=True,
    ),
    "gemma": Architecture("gemma", _DECODER, _GELU, shifted=True),
    "gemma2": Architecture(
        "gemma2", _SANDWICH, _GELU, readings=(_windows(2, 4096), _query_scale(46), _caps), shifted=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**_SANDWICH, **_QK_NORMS},
        _GELU,
        readings=(_windows(6), _query_scale(62), _final_cap, _two_thetas),
        shifted=True,
    ),
    "phi3": Architecture("phi3", _PHI3, readings=(_phi3,), partial=True),
    "qwen2": Architecture("qwen2", _DECODER, _UNWINDOWED),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_experts("mlp"), **_SHARED},
        _UNWINDOWED,
        biases={"qkv_bias": "blk.0.attn_q.bias"},
        readings=(_small_experts(normalised=False), _shared_expert),
        single=frozenset({"shared_expert_gate"}),
    ),
    "qwen3": Architecture("qwen3", {**_DECODER, **_QK_NORMS}, _UNWINDOWED, _ATTENTION_BIAS),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**_experts("mlp"), **_QK_NORMS},
        _UNWINDOWED,
        _ATTENTION_BIAS,
        readings=(_small_experts(normalised=True),),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _STARCODER2,
        # No file says that the models that there are have a window.
        {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096},
        biases={"use_bias": "blk.0.attn_q.bias"},
        eps=("norm_epsilon", "attention.layer_norm_epsilon"),
    ),
}

WITH_EXPERTS: dict[str, Architecture] = {
    "llama": Architecture("mixtral", _MIXTRAL, readings=(_mixtral,), interleaved=True),
}
"""Architectures that are another family where `expert_count` is above 0."""
