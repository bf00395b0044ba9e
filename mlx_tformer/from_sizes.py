"""Random models of any family from sizes alone, for experiments.

Families call the same thing by many names; here is the one table of those (`SIZES`), and what is taken for sizes that
are not given, which are small. Which of a family's keys a size goes to follows from what the family reads.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint.load import FLOATS, Loaded, as_float, wrapped
from .checkpoint.plan import build as from_config
from .config import Config
from .errors import UsageError
from .families import Family, family
from .nn import LM, Encoder, Module, Seq2Seq
from .settings import POSITIVE, RULES, Other
from .training.initialise import initialise

Values = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """A size: the keys that configs have for it, and what is taken for it from the sizes before it (None: nothing)."""

    keys: tuple[str, ...]
    default: Callable[[Values], Any] | None = None


SIZES: dict[str, Size] = {
    "dim": Size(("hidden_size", "n_embd", "n_embed", "d_model", "dim"), lambda s: 64),
    "layers": Size(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), lambda s: 2),
    "heads": Size(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), lambda s: 4),
    "kv_heads": Size(("num_key_value_heads", "num_kv_heads"), lambda s: s["heads"]),
    "head_dim": Size(("head_dim", "d_kv"), lambda s: s["dim"] // s["heads"]),
    "hidden": Size(
        (
            *("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size", "hidden_dim"),
            *("n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim"),
        ),
        lambda s: 4 * s["dim"],
    ),
    "decoder_layers": Size(("num_decoder_layers", "decoder_layers"), lambda s: s["layers"]),
    "decoder_heads": Size(("decoder_attention_heads",), lambda s: s["heads"]),
    "decoder_hidden": Size(("decoder_ffn_dim",), lambda s: s["hidden"]),
    "vocab": Size(("vocab_size",), lambda s: 256),
    "context": Size(("max_position_embeddings", "n_positions", "max_seq_len"), lambda s: 256),
    "experts": Size(("num_local_experts", "num_experts", "n_routed_experts"), lambda s: 4),
    "experts_per_token": Size(("num_experts_per_tok",), lambda s: min(2, s["experts"])),
    "expert_hidden": Size(("moe_intermediate_size",), lambda s: s["dim"]),
    "states": Size(("state_size", "mamba_d_state"), lambda s: 16),
    "window": Size(("sliding_window",)),
    "theta": Size(("rope_theta", "rotary_emb_base")),
    "eps": Size(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")),
    "act": Size(("hidden_act", "activation_function", "activation", "hidden_activation")),
    "tied": Size(("tie_word_embeddings",)),
}
"""What each size is called in configs. A family that reads a new name for one adds it here."""

OTHERS: dict[str, Callable[[Values], Any]] = {
    "attn_layer_offset": lambda s: 1,
    "attn_layer_period": lambda s: 2,
    "first_k_dense_replace": lambda s: 1,
    "full_attention_interval": lambda s: 2,
    "image_size": lambda s: 32,
    "kv_lora_rank": lambda s: s["dim"] // 2,
    "linear_key_head_dim": lambda s: s["head_dim"],
    "linear_num_key_heads": lambda s: s["heads"],
    "linear_num_value_heads": lambda s: s["heads"],
    "linear_value_head_dim": lambda s: s["head_dim"],
    "mamba_d_ssm": lambda s: 2 * s["dim"],
    "mamba_n_heads": lambda s: s["heads"],
    "multi_query": lambda s: s["kv_heads"] == 1,
    "n_group": lambda s: 1,
    "n_groups": lambda s: 1,
    "n_shared_experts": lambda s: 1,
    "new_decoder_architecture": lambda s: 1 < s["kv_heads"] < s["heads"],
    "num_sparse_decoder_layers": lambda s: max(1, s["decoder_layers"] // 2),
    "num_sparse_encoder_layers": lambda s: max(1, s["layers"] // 2),
    "patch_size": lambda s: 8,
    "q_lora_rank": lambda s: s["dim"] // 2,
    "qk_nope_head_dim": lambda s: s["head_dim"],
    "qk_rope_head_dim": lambda s: s["head_dim"],
    "query_pre_attn_scalar": lambda s: s["head_dim"],
    "rotary_dim": lambda s: s["head_dim"],
    "shared_expert_intermediate_size": lambda s: s["dim"],
    "topk_group": lambda s: 1,
    "v_head_dim": lambda s: s["head_dim"],
}
"""What is taken for keys whose own default would not go together with small sizes."""


def build(
    name: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    parts: Iterable[str] = (),
    **sizes: Any,
) -> Loaded:
    """A random model of a family (`llama`, `bert`, ...), as `load` would give it for a checkpoint, without a tokenizer.

    sizes: `dim`, `layers`, `heads`, `kv_heads`, `hidden`, `vocab` and the others of `SIZES`, or any key of the family's
    own configs; what is not given is small. Weights are normal with a standard deviation of 0.02, or what the config's
    `initializer_range` says (`mlx_tformer.training.initialise`), the same for the same `seed`. parts: weights that the
    family makes room for where a checkpoint has them; "head.dense.weight" gives bert its head for masked tokens.

    Nothing is allocated before it is used. Raises UsageError for a family, a size or a dtype that there is not, and for
    sizes that do not go together.

    >>> import mlx.core as mx
    >>> lm = build("llama", dim=32, layers=2, heads=4, kv_heads=2, vocab=100)
    >>> lm(mx.array([[1, 2, 3]])).shape, lm.config["num_key_value_heads"]
    ((1, 3, 100), 2)
    >>> build("llama", dims=32)
    Traceback (most recent call last):
    mlx_tformer.errors.UsageError: dims: llama has no such size, expected dim, head_dim, heads, kv_heads, eps, tied, \
layers, hidden, vocab, theta, context or act, or a key of its configs
    """
    if dtype not in FLOATS:
        raise UsageError(f"dtype: found {dtype!r}, expected one of {', '.join(FLOATS)}")
    try:
        kind = family(name)
        config = config_of(kind, sizes, Parts(dict.fromkeys(parts)))
        model = from_config(kind, config)
    except UsageError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None
    initialise(model, std=_std(kind, sizes), seed=seed)
    precise = {id(m[leaf]) for m in model.modules() if isinstance(m, Module) for leaf in m.precise if leaf in m}
    if dtype != "float32":
        model.apply(lambda value: value if id(value) in precise else as_float(value, FLOATS[dtype]))
    return wrapped(model, config, FLOATS[dtype], f"random {kind.name}", [])


def _std(kind: Family, sizes: Mapping[str, Any]) -> float:
    """The standard deviation of the weights to begin with."""
    std = sizes.get("initializer_range", kind.absent.get("initializer_range", 0.02))
    if not POSITIVE.holds(std):
        raise UsageError(f"initializer_range: found {std!r}, expected {POSITIVE.expected}")
    return float(std)


@dataclass(frozen=True)
class Parts:
    """The tensors that a checkpoint of the model would have, as far as no setting tells of them."""

    tensors: Mapping[str, Any]

    def repeats(self, module: str, of: str) -> bool:
        return False


def config_of(kind: Family, sizes: Mapping[str, Any], parts: Parts) -> Config:
    """The config of a family for some sizes, with all that it reads of `SIZES` and `OTHERS`.

    Raises UsageError for a size that it does not have or that is given twice, BadInput for values that cannot be.
    """
    given, own = _told_apart(sizes)
    chosen = _chosen(given)
    values = {key: chosen[size] for size, entry in SIZES.items() if size in chosen for key in entry.keys}
    values |= {key: default(chosen) for key, default in OTHERS.items()} | own
    if {"num_heads", "expand"} <= kind.absent.keys() and "head_dim" not in sizes:  # heads of a stream that is widened
        values["head_dim"] = int(values.get("expand", kind.absent["expand"]) * chosen["dim"]) // chosen["heads"]
    trial = Config({"model_type": kind.name, **values}, "sizes", parts)
    tried = kind.model(trial)
    context = tried.context if isinstance(tried, LM | Encoder | Seq2Seq) else None
    beside = ["initializer_range", *(["decoder_start_token_id"] if isinstance(tried, Seq2Seq) else [])]
    _check(kind, sizes, {*trial.used, *beside})
    kept = {key: value for key, value in values.items() if key in trial.used}
    if context is not None:  # some have positions that no text reaches
        kept |= {key: 2 * kept[key] - context for key in SIZES["context"].keys if key in kept}
    if isinstance(tried, Seq2Seq):
        start = kind.absent.get("decoder_start_token_id")
        own.setdefault("decoder_start_token_id", start if start is not None and start < tried.target_vocab else 0)
    aliases = {other.key for key, other in kind.absent.items() if isinstance(other, Other) and key in kept}
    kept = {key: value for key, value in kept.items() if key not in aliases}
    kept |= {key: own[key] for key in beside if key in own}
    return Config({"model_type": kind.name, **kept}, "sizes", parts)


def _told_apart(sizes: Mapping[str, Any]) -> tuple[Values, Values]:
    """The sizes by our names, whatever they are called, and the family's own keys that are no sizes of ours."""
    ours = {key: size for size, entry in reversed(SIZES.items()) for key in (*entry.keys, size)}
    given, own = Values(), Values()
    for key, value in sizes.items():
        size = key if key in SIZES else ours.get(key)
        if size is None:
            own[key] = value
            continue
        if size in given:
            raise UsageError(f"{key}: given twice, as {size} too")
        rule = RULES[SIZES[size].keys[0]]
        if not rule.holds(value):
            raise UsageError(f"{key}: found {value!r}, expected {rule.expected}")
        given[size] = value
    return given, own


def _chosen(given: Values) -> Values:
    """A value for each size that is given or has a default."""
    chosen = dict(given)
    for size, entry in SIZES.items():
        if size not in chosen and entry.default is not None:
            chosen[size] = entry.default(chosen)
    return chosen


def _check(kind: Family, sizes: Mapping[str, Any], used: set[str]) -> None:
    """Raise UsageError for a size or a key that the family does not read."""
    there = [size for size, entry in SIZES.items() if used & set(entry.keys)]
    for key in sizes:
        if key not in there and key not in used:
            near = difflib.get_close_matches(key, there, n=len(there), cutoff=0.0)
            expected = f"{', '.join(near[:-1])} or {near[-1]}, or a key of its configs"
            raise UsageError(f"{key}: {kind.name} has no such size, expected {expected}")
