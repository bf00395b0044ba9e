"""What the keys of a config must hold, which of them cannot matter, and what stands for one that is left out."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .nn import ACTIVATIONS

MOST_LAYERS = 10_000
MOST_ROTARY = 2**16
MOST = 2**31 - 1
"""MLX counts the rows and columns of an array in 32 bits."""


@dataclass(frozen=True)
class Other:
    """What a family takes for a key that is left out: the value of another key, as older or newer configs call it."""

    key: str
    default: Any = None


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words and as a test."""

    expected: str
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    # Bounded, because an int of a thousand digits is a number that no float can hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


SIZE = Rule(f"a whole number from 1 to {MOST}", _is_size)
WIDTH = Rule(f"a whole number from 1 to {2**24}", lambda v: _is_size(v) and v <= 2**24)
LAYERS = Rule(f"a whole number from 1 to {MOST_LAYERS}", lambda v: _is_size(v) and v <= MOST_LAYERS)
COUNT = Rule("a whole number of 0 or more", lambda v: _is_size(v) or (v == 0 and not isinstance(v, bool)))
POSITIVE = Rule("a number above 0", lambda v: _is_number(v) and v > 0)
ABOVE_ONE = Rule("a number above 1", lambda v: _is_number(v) and v > 1)
FLAG = Rule("true or false", lambda v: isinstance(v, bool))
NUMBERS = Rule("a list of numbers above 0", lambda v: isinstance(v, list) and all(_is_number(x) and x > 0 for x in v))
ACTIVATION = Rule(f"one of {', '.join(ACTIVATIONS)}", lambda v: isinstance(v, str) and v in ACTIVATIONS)
FEED_FORWARD = Rule(
    f"one of {', '.join(ACTIVATIONS)}, or gated- and one of them",
    lambda v: isinstance(v, str) and v.removeprefix("gated-") in ACTIVATIONS,
)
KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
LAYER_TYPES = Rule(f"a list of {', '.join(KINDS)}", lambda v: isinstance(v, list) and all(kind in KINDS for kind in v))
SWITCHES = Rule("a list of 0 and 1", lambda v: isinstance(v, list) and all(x in (0, 1) for x in v))
LAYER_LIST = Rule("a list of layer numbers", lambda v: isinstance(v, list) and all(COUNT.holds(x) for x in v))
TAPS = Rule("a whole number from 1 to 64", lambda v: _is_size(v) and v <= 64)
RANK = Rule(f"auto or {WIDTH.expected}", lambda v: v == "auto" or WIDTH.holds(v))
EXTENT = 2**14


def _is_extent(value: Any) -> bool:
    pair = value if isinstance(value, list) else [value, value]
    return len(pair) == 2 and all(_is_size(side) and side <= EXTENT for side in pair)


EXTENTS = Rule(f"a whole number from 1 to {EXTENT}, or two: height and width", _is_extent)
OBJECT = Rule("an object", lambda v: isinstance(v, dict))
NUMBER = Rule("a number", _is_number)
TEXT = Rule("a text", lambda v: isinstance(v, str))


def _is_limit(value: object) -> bool:
    # JSON has no infinity; transformers 5 writes an object in its place.
    return value in (math.inf, {"__float__": "Infinity"}) or (isinstance(value, int | float) and 0 <= value < 1e30)


LIMITS = Rule(
    "a list of two numbers of 0 or more", lambda v: isinstance(v, list) and len(v) == 2 and all(map(_is_limit, v))
)

RULES: dict[str, Rule] = {
    "_sliding_window_pattern": SIZE,
    "activation": ACTIVATION,
    "activation_function": ACTIVATION,
    "alibi": FLAG,
    "attention_bias": FLAG,
    "attention_chunk_size": SIZE,
    "attention_multiplier": POSITIVE,
    "attention_in_multiplier": POSITIVE,
    "attention_out_multiplier": POSITIVE,
    "attn_config": OBJECT,
    "attn_layer_offset": COUNT,
    "attn_layer_period": SIZE,
    "attn_logit_softcapping": POSITIVE,
    "attn_scale": POSITIVE,
    "attn_temperature_tuning": Rule("true, false or a number", lambda v: isinstance(v, int | float)),
    "bias": FLAG,
    "classifier_activation": ACTIVATION,
    "classifier_bias": FLAG,
    "classifier_pooling": Rule("cls or mean", lambda v: v in ("cls", "mean")),
    "clip_qkv": POSITIVE,
    "conv_kernel": TAPS,
    "d_ff": WIDTH,
    "d_kv": WIDTH,
    "d_model": WIDTH,
    "decoder_attention_heads": WIDTH,
    "decoder_ffn_dim": WIDTH,
    "decoder_layers": LAYERS,
    "decoder_sparse_step": SIZE,
    "decoder_vocab_size": WIDTH,
    "dense_act_fn": ACTIVATION,
    "dim": WIDTH,
    "do_layer_norm_before": FLAG,
    "embedding_multiplier": POSITIVE,
    "enable_bias": FLAG,
    "encoder_attention_heads": WIDTH,
    "encoder_ffn_dim": WIDTH,
    "encoder_layers": LAYERS,
    "encoder_sparse_step": COUNT,
    "expand": POSITIVE,
    "expansion_ratio": POSITIVE,
    "expert_capacity": SIZE,
    "expert_layer_offset": COUNT,
    "expert_layer_period": SIZE,
    "feed_forward_proj": FEED_FORWARD,
    "ffn_dim": WIDTH,
    "ffn_hidden_size": WIDTH,
    "final_logit_softcapping": POSITIVE,
    "first_k_dense_replace": COUNT,
    "floor_scale": POSITIVE,
    "full_attention_interval": SIZE,
    "global_attn_every_n_layers": SIZE,
    "global_rope_theta": ABOVE_ONE,
    "head_dim": WIDTH,
    "hidden_act": ACTIVATION,
    "hidden_activation": ACTIVATION,
    "hidden_dim": WIDTH,
    "hidden_size": WIDTH,
    "image_size": EXTENTS,
    "interleave_moe_layer_step": SIZE,
    "intermediate_size": WIDTH,
    "intermediate_size_mlp": WIDTH,
    "is_gated_act": FLAG,
    "key_multiplier": POSITIVE,
    "kv_lora_rank": WIDTH,
    "layer_norm_elementwise_affine": FLAG,
    "layer_norm_eps": POSITIVE,
    "layer_norm_epsilon": POSITIVE,
    "layer_types": LAYER_TYPES,
    "linear_conv_kernel_dim": TAPS,
    "linear_key_head_dim": WIDTH,
    "linear_num_key_heads": WIDTH,
    "linear_num_value_heads": WIDTH,
    "linear_value_head_dim": WIDTH,
    "lm_head_multiplier": POSITIVE,
    "local_attention": SIZE,
    "local_rope_theta": ABOVE_ONE,
    "logit_scale": POSITIVE,
    "logits_scaling": POSITIVE,
    "mamba_conv_bias": FLAG,
    "mamba_d_conv": TAPS,
    "mamba_d_head": RANK,
    "mamba_d_ssm": WIDTH,
    "mamba_d_state": WIDTH,
    "mamba_dt_rank": RANK,
    "mamba_expand": POSITIVE,
    "mamba_n_groups": SIZE,
    "mamba_n_heads": WIDTH,
    "mamba_norm_before_gate": FLAG,
    "mamba_proj_bias": FLAG,
    "mamba_rms_norm": FLAG,
    "max_position_embeddings": SIZE,
    "max_seq_len": SIZE,
    "max_window_layers": COUNT,
    "mlp_bias": FLAG,
    "mlp_multipliers": NUMBERS,
    "mlp_only_layers": LAYER_LIST,
    "moe_intermediate_size": WIDTH,
    "moe_layers": LAYER_LIST,
    "multi_query": FLAG,
    "n_embd": WIDTH,
    "n_group": SIZE,
    "n_groups": SIZE,
    "n_head": WIDTH,
    "n_heads": WIDTH,
    "n_inner": WIDTH,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "n_positions": SIZE,
    "n_routed_experts": WIDTH,
    "n_shared_experts": SIZE,
    "new_decoder_architecture": FLAG,
    "no_bias": FLAG,
    "no_rope_layer_interval": SIZE,
    "no_rope_layers": SWITCHES,
    "norm_bias": FLAG,
    "norm_eps": POSITIVE,
    "norm_epsilon": POSITIVE,
    "norm_topk_prob": FLAG,
    "num_attention_heads": WIDTH,
    "num_decoder_layers": LAYERS,
    "num_channels": WIDTH,
    "num_experts": WIDTH,
    "num_experts_per_tok": SIZE,
    "num_heads": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": WIDTH,
    "num_kv_heads": WIDTH,
    "num_layers": LAYERS,
    "num_labels": WIDTH,
    "num_ln_in_parallel_attn": SIZE,
    "num_local_experts": WIDTH,
    "num_nextn_predict_layers": COUNT,
    "num_sparse_decoder_layers": COUNT,
    "num_sparse_encoder_layers": COUNT,
    "original_max_position_embeddings": SIZE,
    "pad_token_id": COUNT,
    "patch_size": EXTENTS,
    "parallel_attn": FLAG,
    "projectors_bias": FLAG,
    "q_lora_rank": WIDTH,
    "qk_layernorm": FLAG,
    "qk_nope_head_dim": WIDTH,
    "qk_rope_head_dim": WIDTH,
    "qkv_bias": FLAG,
    "query_pre_attn_scalar": POSITIVE,
    "relative_attention_max_distance": SIZE,
    "relative_attention_num_buckets": SIZE,
    "residual_multiplier": POSITIVE,
    "rms_norm_eps": POSITIVE,
    "rope_interleave": FLAG,
    "rope_local_base_freq": ABOVE_ONE,
    "rope_theta": ABOVE_ONE,
    "rotary_dim": WIDTH,
    "rotary_emb_base": ABOVE_ONE,
    "rotary_pct": POSITIVE,
    "routed_scaling_factor": POSITIVE,
    "router_bias": FLAG,
    "scale_attn_by_inverse_layer_idx": FLAG,
    "scale_attn_weights": FLAG,
    "scale_decoder_outputs": FLAG,
    "scale_embedding": FLAG,
    "share_encoder_decoder_embeddings": FLAG,
    "shared_expert_intermediate_size": WIDTH,
    "sliding_window": SIZE,
    "sliding_window_pattern": SIZE,
    "ssm_in_multiplier": POSITIVE,
    "ssm_multipliers": NUMBERS,
    "ssm_out_multiplier": POSITIVE,
    "state_size": WIDTH,
    "swiglu_alpha": POSITIVE,
    "swiglu_limit": POSITIVE,
    "tie_word_embeddings": FLAG,
    "time_step_limit": LIMITS,
    "time_step_rank": RANK,
    "topk_group": SIZE,
    "topk_method": TEXT,
    "type_vocab_size": WIDTH,
    "use_bias": FLAG,
    "use_conv_bias": FLAG,
    "use_parallel_residual": FLAG,
    "use_qk_norm": FLAG,
    "use_qkv_bias": FLAG,
    "use_sliding_window": FLAG,
    "v_head_dim": WIDTH,
    "vocab_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
}
"""What a key that families read must hold. A family that reads a new key adds it here."""

# fmt: off
HARMLESS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
        "_from_model_config", "_name_or_path", "activation_dropout", "add_cross_attention", "architectures",
        "attention_dropout",
        "attention_probs_dropout_prob", "attn_pdrop", "auto_map", "bad_words_ids", "begin_suppress_tokens",
        "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "classifier_dropout",
        "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dropout",
        "dtype", "early_stopping", "emb_pdrop", "embd_pdrop", "embedding_dropout", "encoder_no_repeat_ngram_size",
        "eos_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
        "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "id2label", "init_std",
        "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "layerdrop", "length_penalty",
        "max_length", "max_position_embeddings", "min_length", "mlx_tformer", "model_max_length", "model_type", "n_ctx",
        "neftune_noise_alpha", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id",
        "prefix", "pretraining_tp", "problem_type", "pruned_heads", "remove_invalid_values",
        "reorder_and_upcast_attn", "repetition_penalty", "resid_pdrop", "residual_dropout", "return_dict",
        "return_dict_in_generate", "router_aux_loss_coef", "router_z_loss_coef",
        "sbert_ce_default_activation_function", "sentence_transformers", "sep_token_id",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "tokenizer_name",
        "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
        "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache", "use_return_dict",
    }
)
# fmt: on
"""Keys that cannot change what a decoder computes: training, generation, bookkeeping, tokens and labels."""

HARMLESS_VALUES = {"is_llama_config": True, "rope_interleaved": False, "use_mrope": False}
"""Keys that say what is so anyway, as long as they hold these values (SmolLM2, Qwen 2.5)."""

ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")
"""Where a config tells of rotary positions: for families to ignore in models whose layers have none."""

ROPE_KEYS = {
    "factor": POSITIVE,
    "attention_factor": POSITIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "mscale": POSITIVE,
    "mscale_all_dim": POSITIVE,
    "truncate": FLAG,
    "short_factor": NUMBERS,
    "long_factor": NUMBERS,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "original_max_position_embeddings": SIZE,
    "rope_theta": ABOVE_ONE,
    "partial_rotary_factor": Rule("a number above 0, at most 1", lambda v: _is_number(v) and 0 < v <= 1),
}
