"""What a family reads from `config.json`: checked when it is read, and every reading recorded.

Recording is what makes an unknown setting an error: when the model is built, a key that nobody read and that is not
on the list of harmless ones could change the mathematics, and `finish` refuses it by name. Dialects end here:
transformers 4 wrote `rope_theta` and `rope_scaling`, 5 writes `rope_parameters`, and a null is the same as a key
that is not there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import BadInput
from .nn import (
    ACTIVATIONS,
    Causal,
    Chunk,
    DynamicNTK,
    LinearScaling,
    Llama3,
    LongRope,
    Mask,
    Rope,
    Scaling,
    Unscaled,
    Window,
    Yarn,
)

MOST_LAYERS = 10_000
MOST = 2**31 - 1
"""MLX counts the rows and columns of an array in 32 bits."""


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
KINDS = ("full_attention", "sliding_attention", "chunked_attention")
LAYER_TYPES = Rule(f"a list of {', '.join(KINDS)}", lambda v: isinstance(v, list) and all(kind in KINDS for kind in v))
SWITCHES = Rule("a list of 0 and 1", lambda v: isinstance(v, list) and all(x in (0, 1) for x in v))
LAYER_LIST = Rule("a list of layer numbers", lambda v: isinstance(v, list) and all(COUNT.holds(x) for x in v))
OBJECT = Rule("an object", lambda v: isinstance(v, dict))
NUMBER = Rule("a number", _is_number)
TEXT = Rule("a text", lambda v: isinstance(v, str))

RULES: dict[str, Rule] = {
    "_sliding_window_pattern": SIZE,
    "activation": ACTIVATION,
    "activation_function": ACTIVATION,
    "alibi": FLAG,
    "alibi_bias_max": POSITIVE,
    "attention_bias": FLAG,
    "attention_chunk_size": SIZE,
    "attention_multiplier": POSITIVE,
    "attn_config": OBJECT,
    "attn_logit_softcapping": POSITIVE,
    "attn_scale": POSITIVE,
    "attn_temperature_tuning": Rule("true, false or a number", lambda v: isinstance(v, int | float)),
    "bias": FLAG,
    "clip_qkv": POSITIVE,
    "d_model": WIDTH,
    "decoder_sparse_step": SIZE,
    "do_layer_norm_before": FLAG,
    "embedding_multiplier": POSITIVE,
    "enable_bias": FLAG,
    "expansion_ratio": POSITIVE,
    "ffn_dim": WIDTH,
    "ffn_hidden_size": WIDTH,
    "final_logit_softcapping": POSITIVE,
    "first_k_dense_replace": COUNT,
    "floor_scale": POSITIVE,
    "head_dim": WIDTH,
    "hidden_activation": ACTIVATION,
    "hidden_act": ACTIVATION,
    "hidden_size": WIDTH,
    "interleave_moe_layer_step": SIZE,
    "intermediate_size": WIDTH,
    "intermediate_size_mlp": WIDTH,
    "kv_lora_rank": WIDTH,
    "layer_norm_elementwise_affine": FLAG,
    "layer_norm_eps": POSITIVE,
    "layer_norm_epsilon": POSITIVE,
    "layer_types": LAYER_TYPES,
    "logit_scale": POSITIVE,
    "logits_scaling": POSITIVE,
    "max_position_embeddings": SIZE,
    "max_seq_len": SIZE,
    "max_window_layers": COUNT,
    "mlp_bias": FLAG,
    "mlp_only_layers": LAYER_LIST,
    "moe_intermediate_size": WIDTH,
    "moe_layers": LAYER_LIST,
    "multi_query": FLAG,
    "n_embd": WIDTH,
    "n_group": SIZE,
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
    "norm_epsilon": POSITIVE,
    "norm_topk_prob": FLAG,
    "num_attention_heads": WIDTH,
    "num_experts": WIDTH,
    "num_experts_per_tok": SIZE,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": WIDTH,
    "num_kv_heads": WIDTH,
    "num_ln_in_parallel_attn": SIZE,
    "num_local_experts": WIDTH,
    "num_nextn_predict_layers": COUNT,
    "original_max_position_embeddings": SIZE,
    "parallel_attn": FLAG,
    "q_lora_rank": WIDTH,
    "qk_layernorm": FLAG,
    "qk_nope_head_dim": WIDTH,
    "qk_rope_head_dim": WIDTH,
    "qkv_bias": FLAG,
    "query_pre_attn_scalar": POSITIVE,
    "residual_multiplier": POSITIVE,
    "rms_norm_eps": POSITIVE,
    "rope_interleave": FLAG,
    "rope_local_base_freq": ABOVE_ONE,
    "rope_theta": ABOVE_ONE,
    "rotary_dim": WIDTH,
    "rotary_emb_base": ABOVE_ONE,
    "rotary_pct": POSITIVE,
    "routed_scaling_factor": POSITIVE,
    "scale_attn_by_inverse_layer_idx": FLAG,
    "scale_attn_weights": FLAG,
    "shared_expert_intermediate_size": WIDTH,
    "sliding_window": SIZE,
    "sliding_window_pattern": SIZE,
    "swiglu_alpha": POSITIVE,
    "swiglu_limit": POSITIVE,
    "tie_word_embeddings": FLAG,
    "topk_group": SIZE,
    "topk_method": TEXT,
    "use_bias": FLAG,
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
        "_from_model_config", "_name_or_path", "add_cross_attention", "architectures", "attention_dropout",
        "attention_probs_dropout_prob", "attn_pdrop", "auto_map", "bad_words_ids", "begin_suppress_tokens",
        "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "classifier_dropout",
        "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dropout",
        "dtype", "early_stopping", "emb_pdrop", "embd_pdrop", "embedding_dropout", "encoder_no_repeat_ngram_size",
        "eos_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
        "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "id2label", "init_std",
        "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "layerdrop", "length_penalty",
        "max_length", "max_position_embeddings", "min_length", "mlx_tformer", "model_type", "n_ctx",
        "neftune_noise_alpha", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id",
        "prefix", "pretraining_tp", "problem_type", "pruned_heads", "remove_invalid_values",
        "reorder_and_upcast_attn", "repetition_penalty", "resid_pdrop", "residual_dropout", "return_dict",
        "return_dict_in_generate", "router_aux_loss_coef", "router_z_loss_coef", "sep_token_id",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k",
        "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
        "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache", "use_return_dict",
    }
)
# fmt: on
"""Keys that cannot change what a decoder computes: training, generation, bookkeeping, tokens and labels."""

HARMLESS_VALUES = {"is_llama_config": True, "rope_interleaved": False, "use_mrope": False}
"""Keys that say what is so anyway, as long as they hold these values (SmolLM2, Qwen 2.5)."""

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


class Config:
    """A checkpoint's config, read by a family: `c["hidden_size"]`, `c.get("head_dim", 64)`, `c.rope(64)`.

    >>> c = Config({"model_type": "llama", "hidden_size": -64, "colour": "red", "dtype": None})
    >>> c["hidden_size"]
    Traceback (most recent call last):
    mlx_tformer.errors.BadInput: config.json: hidden_size: found -64, expected a whole number from 1 to 16777216
    >>> c.finish()
    Traceback (most recent call last):
    mlx_tformer.errors.BadInput: config.json: colour: found 'red', a setting that llama does not know
    """

    def __init__(self, values: dict[str, Any], file: str = "config.json"):
        self.values, self.file = values, file
        self._read: set[str] = set()
        self._absent: dict[str, Any] = {}

    def taking(self, absent: dict[str, Any]) -> "Config":
        """The same config, in which a key that is not there means what `absent` says; a null does not."""
        other = Config(self.values, self.file)
        other._read, other._absent = self._read, absent
        return other

    @property
    def model_type(self) -> str:
        """Which family this is a config of."""
        found = self.values.get("model_type")
        if not isinstance(found, str):
            raise self.wrong("model_type", "the name of a family")
        return found

    def __getitem__(self, key: str) -> Any:
        """The value of a key that has to be there."""
        found = self.get(key)
        if found is None:
            raise BadInput(f"missing, expected {RULES[key].expected}", file=self.file, field=key)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; where it is left out what the family's class takes, and else `default`."""
        self._read.add(key)
        found = self.values.get(key, self._absent.get(key))
        if found is None:
            return default
        if not RULES[key].holds(found):
            raise self.wrong(key, RULES[key].expected)
        return found

    def expect(self, **values: Any) -> None:
        """Refuse settings that the family has and nobody needs yet, unless they are as given or left out."""
        for key, value in values.items():
            self._read.add(key)
            if self.values.get(key) not in (None, value):
                raise self.wrong(key, f"{_short(value)}: nothing else is supported")

    def ignore(self, *keys: str) -> None:
        """Pass over settings that the family's reference does not look at either."""
        self._read |= set(keys)

    def masks(self, types: list[str]) -> list[Mask]:
        """The mask of each layer: `layer_types` if the config has them, else `types`."""
        kinds, layers = self.get("layer_types", types), len(types)
        if len(kinds) != layers:
            raise self.wrong("layer_types", f"{layers} entries, one for each layer")
        return [self._mask(kind) for kind in kinds]

    def within(self, key: str) -> "Config":
        """The settings that lie in an object of their own under `key`."""
        return Config(self.get(key, {}), f"{self.file}: {key}")

    def has_rope_table(self, layer_type: str) -> bool:
        """True if one kind of layer has rotary settings of its own."""
        table = self.values.get("rope_parameters") or self.values.get("rope_scaling")
        return isinstance(table, dict) and layer_type in table

    def _mask(self, kind: str) -> Mask:
        if kind == "sliding_attention":
            return Causal() & Window(self["sliding_window"])
        return Causal() & Chunk(self["attention_chunk_size"]) if kind == "chunked_attention" else Causal()

    def wrong(self, key: str, expected: str) -> BadInput:
        """The error for a value that is not as expected."""
        if key not in self.values:
            return BadInput(f"missing, expected {expected}", file=self.file, field=key)
        return BadInput(f"found {_short(self.values[key])}, expected {expected}", file=self.file, field=key)

    def finish(self) -> None:
        """Raise BadInput for the settings that nobody read and that could matter."""
        passed = self._read | HARMLESS | {k for k, v in HARMLESS_VALUES.items() if self.values.get(k) is v}
        left = {k: v for k, v in self.values.items() if k not in passed and v is not None}
        if not left:
            return
        first, *others = left
        more = f" (and {', '.join(others)})" if others else ""
        who = self.values.get("model_type") or "the family"
        problem = f"found {_short(left[first])}, a setting that {who} does not know{more}"
        raise BadInput(problem, file=self.file, field=first)

    def rope(self, head_dim: int, *, layer_type: str | None = None, interleaved: bool = False) -> Rope:
        """The rotary position that the config asks for, from either dialect; `layer_type` picks one where there are
        several."""
        table = self._rope_table(layer_type)
        dims = int(head_dim * table.get("partial_rotary_factor", 1.0))
        if dims < 1 or (dims % 2 and dims == head_dim):
            raise BadInput(f"found {dims} rotary features, expected an even number", file=self.file, field="head_dim")
        rope = Rope(dims, table.get("rope_theta", 10000.0), self._scaling(table, dims), interleaved=interleaved)
        if not _turns(rope):
            problem = f"found {_short(table)}, which gives no usable frequencies for {dims} features"
            raise BadInput(problem, file=self.file, field=self.rope_field)
        return rope

    def _rope_table(self, layer_type: str | None) -> dict[str, Any]:
        """What is said about rotary positions, wherever it stands, in the words of transformers 5."""
        self._read |= {"rope_parameters", "rope_scaling", "partial_rotary_factor", "rope_theta"}
        new, old = self.values.get("rope_parameters"), self.values.get("rope_scaling")
        if new and old and new != old:
            raise BadInput("differs from rope_parameters; expected one of them", file=self.file, field="rope_scaling")
        self.rope_field = "rope_parameters" if new else "rope_scaling"
        table = new or old or {}
        if isinstance(table, dict) and layer_type in table:
            table = table[layer_type] or {}
        if not isinstance(table, dict):
            raise self.wrong(self.rope_field, "an object")
        beside = ("rope_theta", "partial_rotary_factor")
        around = {key: self.values.get(key, self._absent.get(key)) for key in beside}
        merged = {k: v for k, v in {**around, **table}.items() if v is not None}
        for key, value in merged.items():
            if key not in ("rope_type", "type"):
                self._check_rope(key if table.get(key) is None else f"{self.rope_field}.{key}", value)
        return merged

    def _check_rope(self, where: str, value: object) -> None:
        rule = ROPE_KEYS.get(where.rpartition(".")[2])
        if rule is None:
            raise BadInput(f"found {_short(value)}, a setting that is not known", file=self.file, field=where)
        if not rule.holds(value):
            raise BadInput(f"found {_short(value)}, expected {rule.expected}", file=self.file, field=where)

    def _scaling(self, table: dict[str, Any], dims: int) -> Scaling:
        kind = table.get("rope_type", table.get("type", "default"))
        if not isinstance(kind, str) or kind not in SCALINGS:
            field, expected = f"{self.rope_field}.rope_type", f"one of {', '.join(SCALINGS)}"
            raise BadInput(f"found {_short(kind)}, expected {expected}", file=self.file, field=field)
        return SCALINGS[kind](RopeTable(self, table, dims))


@dataclass(frozen=True)
class RopeTable:
    """The rotary settings of one layer type; keys that a scaling does not use are refused."""

    config: Config
    table: dict[str, Any]
    dims: int

    def take(self, *required: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
        """The values of these keys, those that are there; raises BadInput for a missing or a superfluous one."""
        around = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        for key in required:
            if key not in self.table:
                raise BadInput("missing", file=self.config.file, field=f"{self.config.rope_field}.{key}")
        for key in [key for key in self.table if key not in around | {*required, *optional}]:
            kind = self.table.get("rope_type", self.table.get("type", "default"))
            problem = f"found {_short(self.table[key])}, a setting that rope type {kind} does not have"
            raise BadInput(problem, file=self.config.file, field=f"{self.config.rope_field}.{key}")
        return {key: self.table[key] for key in (*required, *optional) if key in self.table}

    @property
    def trained(self) -> int:
        """The trained length: beside the table (Phi-3), in it, or else the whole length."""
        c = self.config
        beside = c.get("original_max_position_embeddings")
        inside = self.table.get("original_max_position_embeddings")
        return beside or inside or c["max_position_embeddings"]


def _unscaled(t: RopeTable) -> Scaling:
    # Some checkpoints repeat the trained length, which changes nothing without a scaling.
    t.take(optional=("original_max_position_embeddings",))
    return Unscaled()


def _linear(t: RopeTable) -> Scaling:
    return LinearScaling(**t.take("factor"))


def _dynamic(t: RopeTable) -> Scaling:
    found = t.take("factor", optional=("original_max_position_embeddings",))
    return DynamicNTK(found["factor"], t.config["max_position_embeddings"])


def _yarn(t: RopeTable) -> Scaling:
    optional = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
    found = t.take("factor", optional=("original_max_position_embeddings", *optional))
    named = {"beta_fast": "fast", "beta_slow": "slow"}
    return Yarn(found["factor"], t.trained, **{named.get(k, k): found[k] for k in optional if k in found})


def _llama3(t: RopeTable) -> Scaling:
    found = t.take("factor", "low_freq_factor", "high_freq_factor", optional=("original_max_position_embeddings",))
    low, high = found["low_freq_factor"], found["high_freq_factor"]
    if high <= low:
        problem = f"found {_short(high)}, expected more than low_freq_factor ({_short(low)})"
        raise BadInput(problem, file=t.config.file, field=f"{t.config.rope_field}.high_freq_factor")
    return Llama3(found["factor"], low, high, t.trained)


def _longrope(t: RopeTable) -> Scaling:
    found = t.take(
        "short_factor", "long_factor", optional=("factor", "attention_factor", "original_max_position_embeddings")
    )
    for key in ("short_factor", "long_factor"):
        if len(found[key]) != t.dims // 2:
            problem = f"found {len(found[key])} numbers, expected {t.dims // 2}: one for each pair of rotary features"
            raise BadInput(problem, file=t.config.file, field=f"{t.config.rope_field}.{key}")
    factor = found.get("factor", t.config["max_position_embeddings"] / t.trained)
    short, long = tuple(found["short_factor"]), tuple(found["long_factor"])
    return LongRope(short, long, t.trained, factor, found.get("attention_factor"))


SCALINGS: dict[str, Callable[[RopeTable], Scaling]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
}
"""How each `rope_type` is read. `su` is what Phi-3's first configs called longrope."""


def _turns(rope: Rope) -> bool:
    """True if the settings give frequencies that float32 can hold, for short texts and for long ones."""
    try:
        found = [f for n in (1, MOST) for f in rope.scaling.frequencies(rope.dims, rope.theta, rope.regime(n))]
        return all(1e-37 < f < 1e37 for f in found) and math.isfinite(rope.scaling.amplitude)
    except ArithmeticError:
        return False


def _short(value: object) -> str:
    """A value as a message shows it: never longer than a line can bear."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
