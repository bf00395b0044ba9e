"""Every setting of every family: in each dialect that configs are written in, wrong, and left out."""

import json
from collections.abc import Callable, Iterator
from functools import cache, reduce
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import CASES, GOLDEN, attentions, config_of, expected, gap, golden, ids_of, leaves, limit, load, variant

import mlx_tformer.config
from mlx_tformer.checkpoint.plan import build
from mlx_tformer.errors import BadInput
from mlx_tformer.families import family
from mlx_tformer.nn import LM, Attention, Groups, Mixture, Position, Rope, ShiftedRMSNorm, Window
from mlx_tformer.settings import HARMLESS

Config = dict[str, Any]
CLASSES: dict[str, Config] = json.loads((GOLDEN / "defaults.json").read_text())
FOUND = {config_of(case)["model_type"]: case for case in CASES}
NEW = sorted(FOUND.keys() - CLASSES.keys())
assert not NEW, f"golden/defaults.json says nothing of {', '.join(NEW)}: run make.py defaults.json in golden/"
DEFAULTS = {name: CLASSES[name] for name in FOUND}
SCALED = ("yarn", "llama3", "longrope", "linear", "dynamic")


def kind_of(case: str) -> str:
    """The model type of a case."""
    return str(config_of(case)["model_type"])


def layers_of(config: Config) -> int:
    return int(next(config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config))


# --- config dialects ---

SLIDING: dict[str, Callable[[int, Config], bool]] = {
    "cohere2": lambda layer, c: (layer + 1) % c.get("sliding_window_pattern", 4) != 0,
    "gemma2": lambda layer, c: layer % 2 == 0,
    "gemma3_text": lambda layer, c: (layer + 1) % c.get("sliding_window_pattern", 6) != 0,
    "gpt_oss": lambda layer, c: layer % 2 == 0,
    "qwen2": lambda layer, c: c["use_sliding_window"] and layer >= c["max_window_layers"],
    "qwen2_moe": lambda layer, c: c["use_sliding_window"] and layer % 2 == 0 and layer < c["max_window_layers"],
    "qwen3": lambda layer, c: c["use_sliding_window"] and layer >= c["max_window_layers"],
    "smollm3": lambda layer, c: c["use_sliding_window"] and not c["no_rope_layers"][layer],
}
"""Which layers have a window where `layer_types` does not say."""


def derived_layers(config: Config) -> list[str]:
    """What `layer_types` would say if only the settings spoke that came before it."""
    if config["model_type"] == "llama4_text":
        return ["chunked_attention" if turns else "full_attention" for turns in config["no_rope_layers"]]
    if config["model_type"] == "qwen3_next":
        return ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers_of(config))]
    windowed = SLIDING[config["model_type"]]
    found = [windowed(layer, config) for layer in range(layers_of(config))]
    return ["sliding_attention" if sliding else "full_attention" for sliding in found]


def one_table(config: Config, kind: str) -> Config:
    """The rotary settings in the words of transformers 4; `kind` is what it called the rope type."""
    rope = config.pop("rope_parameters")
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    theta, part = ("rotary_emb_base", "rotary_pct") if config["model_type"] == "gpt_neox" else ("rope_theta", None)
    config[theta] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config[part or "partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    name = rope.pop("rope_type")
    config["rope_scaling"] = None if name == "default" else {kind: name, **rope}
    return config


RENAMED = {
    "bloom": {"hidden_size": "n_embed", "n_head": "num_attention_heads"},
    "gemma3_text": {"_sliding_window_pattern": "sliding_window_pattern"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
"""Settings that had another name."""
LATENT = {"moe_layer_freq": 1, "ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True}
MORE: dict[str, Config] = {
    "bloom": {"n_inner": None, "offset_alibi": 100, "seq_length": 2048, "skip_bias_add": True, "unk_token_id": 0}
    | {"attention_softmax_in_fp32": True, "masked_softmax_fusion": True, "bias_dropout_fusion": True},
    "cohere": {"model_max_length": 131072},
    "deepseek_v2": {**LATENT, "scoring_func": "softmax"},
    "deepseek_v3": {**LATENT, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "falcon": {"apply_residual_connection_post_layernorm": False},
    "falcon_h1": {"attn_layer_indices": None, "mamba_use_mlp": True, "mlp_expansion_factor": 8, "time_step_max": 0.1},
    "gpt2": {"n_ctx": 1024, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    "gptj": {"rotary": True, "scale_attn_weights": True, "tokenizer_class": "GPT2Tokenizer"},
    "llama4_text": {"for_llm_compressor": False, "router_jitter_noise": 0.0},
    "opt": {"activation_dropout": 0.0, "prefix": "</s>"},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "starcoder2": {"layer_norm_epsilon": 1e-05, "mlp_type": "default", "norm_type": "layer_norm"},
    "qwen3_next": {"full_attention_interval": 4, "use_sliding_window": False},
    "mpt": {"verbose": 0, "init_config": {"name": "kaiming_normal_"}, "tokenizer_name": "EleutherAI/gpt-neox-20b"},
}
"""What checkpoints said besides and later ones do not."""
LESS = {"deepseek_v2": ["head_dim", "qk_head_dim"], "deepseek_v3": ["head_dim", "qk_head_dim"]}
"""What they did not say."""


def old_dialect(config: Config, kind: str = "rope_type") -> Config:
    """The same config in the words of transformers 4."""
    name = config["model_type"]
    config = {**config, "torch_dtype": config.pop("dtype"), "transformers_version": "4.42.0", **MORE.get(name, {})}
    config = {RENAMED.get(name, {}).get(key, key): value for key, value in config.items()}
    config = {key: value for key, value in config.items() if key not in LESS.get(name, [])}
    if "layer_types" in config and config["layer_types"] == derived_layers(config):
        del config["layer_types"]
    return one_table(config, kind) if "rope_parameters" in config else config


def beside(config: Config) -> Config:
    """The trained length beside the rotary settings instead of among them, as in Phi 3."""
    trained = config.get("rope_parameters", {}).pop("original_max_position_embeddings", None)
    return config if trained is None else {**config, "original_max_position_embeddings": trained}


SIZES = {"d_model", "ffn_dim", "hidden_size", "n_embed", "n_head", "n_layer", "num_attention_heads"}
"""Classes have defaults for these too, but a checkpoint that leaves them out is not what it seems."""


def spare(config: Config) -> Config:
    """Without what the family's class takes by default anyway."""
    defaults = DEFAULTS[config["model_type"]]
    needed = {"model_type", *SIZES}
    kept = {k: v for k, v in config.items() if k in needed or k not in defaults or v != defaults[k]}
    if "layer_types" in kept and kept["layer_types"] == derived_layers(config):
        del kept["layer_types"]
    return kept


DIALECTS: dict[str, Callable[[Config], Config]] = {
    "transformers 4": old_dialect,
    "transformers 4, earlier": lambda config: old_dialect(config, "type"),
    "trained length beside": beside,
    "defaults left out": spare,
    "transformers 4, defaults left out": lambda config: spare(old_dialect(config)),
    "nulls for what is not there": lambda config: {**config, "rope_scaling": None, "pruned_heads": None},
}


@pytest.mark.parametrize("case", CASES)
def test_every_config_dialect_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    wanted, tried = golden(case)(ids_of(case)), [config_of(case)]
    for number, (name, dialect) in enumerate(DIALECTS.items()):
        config = dialect(config_of(case))
        if config in tried:
            continue
        tried.append(config)
        (tmp_path / str(number)).mkdir()
        assert mx.array_equal(variant(case, config, tmp_path / str(number))(ids_of(case)), wanted).item(), name
    assert len(tried) >= 4


PUBLISHED: list[dict[str, Any]] = json.loads((GOLDEN / "published.json").read_text())


@pytest.mark.parametrize("row", PUBLISHED, ids=[row["name"] for row in PUBLISHED])
def test_the_config_of_a_well_known_checkpoint_is_understood_whole(row: dict[str, Any]) -> None:
    """As its folder has it, with all that is needless in it; the model has as many parameters as transformers'."""
    values = mlx_tformer.config.Config(row["config"])
    model = family(values.model_type).model(values)
    values.finish()
    main = [value for name, value in leaves(model).items() if name.startswith(("embed.", "decoder.", "head."))]
    assert sum(prod(value.shape) for value in main) == row["parameters"]


# --- a wrong setting shows ---


class Read(dict[str, Any]):
    """A config's values that remember which of them were asked for."""

    def __init__(self, values: Config):
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def settings_of(case: str) -> Iterator[tuple[str, ...]]:
    """The settings of a case that its family reads, as paths: those in a table one by one."""
    values = Read(config_of(case))
    family(values["model_type"]).model(mlx_tformer.config.Config(values))
    asked = {key: value for key, value in values.items() if key in values.asked}
    if "original_max_position_embeddings" in asked:
        asked["rope_parameters"].pop("original_max_position_embeddings", None)  # the one beside the table counts
    yield from paths_in(asked)


def paths_in(table: Config) -> Iterator[tuple[str, ...]]:
    """The paths to the values in a table that could matter."""
    for key, value in table.items():
        if value is None or key in HARMLESS | ELSEWHERE:
            continue
        if isinstance(value, dict):
            yield from ((key, *path) for path in paths_in(value))
        else:
            yield (key,)


ELSEWHERE = {"attn_impl", "_sliding_window_pattern", "sliding_window_pattern", "max_window_layers"} | {
    "interleave_moe_layer_step",
    "full_attention_interval",
    "no_rope_layer_interval",
    "use_sliding_window",
    "n_positions",
    "max_seq_len",
    "num_nextn_predict_layers",
}
"""Settings that say nothing about the numbers, or nothing where others say it in full; see below for the latter."""


def raised(value: float) -> float:
    return type(value)(value * 1.125) + isinstance(value, int)


def other_eps(value: float) -> float:
    return 1e-3 if value < 1e-3 else 1e-6


def other_activation(value: str) -> str:
    return {"gelu": "gelu_new", "relu": "gelu"}.get(value, "relu")


KINDS = {"full_attention": "sliding_attention", "linear_attention": "sliding_attention"}
WRONG: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"], other_eps),
    **dict.fromkeys(["activation", "activation_function", "hidden_act", "hidden_activation"], other_activation),
    **dict.fromkeys(
        ["long_factor", "short_factor", "mlp_multipliers", "ssm_multipliers"], lambda v: [1.1 * x for x in v]
    ),
    **dict.fromkeys(["mlp_only_layers", "moe_layers"], lambda v: v[:-1]),
    "beta_fast": lambda v: v / 8,
    "beta_slow": lambda v: v * 8,
    "attn_type": lambda v: "multiquery_attention",
    "layer_types": lambda v: [KINDS.get(kind, "full_attention") for kind in v],
    "no_rope_layers": lambda v: [1 - v[0], *v[1:]],
    "norm_type": lambda v: "rms",
    "original_max_position_embeddings": lambda v: 16 * v,
    "partial_rotary_factor": lambda v: v / 2,
    "rope_type": lambda v: "linear" if v == "default" else "default",
    "sliding_window": lambda v: v + 1,
    "time_step_limit": lambda v: [0.0, 0.01],
    "topk_method": lambda v: {"greedy": "group_limited_greedy"}.get(v, "greedy"),
}
"""Another value for a setting, not far from the right one. Flags are flipped, other numbers raised by an eighth."""


def wrong(config: Config, path: tuple[str, ...]) -> Config:
    """The config with a wrong value for one setting."""
    *tables, key = path
    holder = reduce(lambda table, name: table[name], tables, config)
    value = holder[key]
    holder[key] = not value if isinstance(value, bool) else WRONG.get(key, raised)(value)
    return config


@cache
def right(case: str, length: int) -> mx.array:
    return golden(case)(ids_of(case)[:, :length])


def moved(case: str, other: LM) -> bool:
    """True if the logits of a short or a longer text are not within the limit of the right ones."""
    most = limit(expected(case)["logits"])
    return any(gap(other(ids_of(case)[:, :length]), right(case, length)) > most for length in (24, 16))


def shows(case: str, config: Config, folder: Path) -> bool:
    """True if a case under this config gives other logits, or is refused."""
    try:
        return moved(case, variant(case, config, folder))
    except BadInput:
        return True


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_wrong_setting_moves_the_logits_or_does_not_load(name: str, tmp_path: Path) -> None:
    """Of each setting that a family reads, in at least one of its cases."""
    cases = [case for case in CASES if kind_of(case) == name]
    readers: dict[tuple[str, ...], list[str]] = {}
    for case in cases:
        for path in settings_of(case):
            readers.setdefault(path, []).append(case)
    assert readers
    unseen = [p for p, of in readers.items() if not any(shows(c, wrong(config_of(c), p), tmp_path) for c in of)]
    assert unseen == []


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("value", [0, 3, 2**24, 0.5], ids=str)
def test_a_setting_of_any_value_is_refused_or_makes_a_model_that_runs(name: str, value: Any) -> None:
    case = next(case for case in CASES if kind_of(case) == name)
    for path in settings_of(case):
        config = config_of(case)
        reduce(lambda table, key: table[key], path[:-1], config)[path[-1]] = value
        if path[-1] not in ("num_hidden_layers", "n_layer", "n_layers"):
            try:  # shapes alone: nothing is computed
                build(family(name), mlx_tformer.config.Config(config))(ids_of(case))
            except BadInput as error:
                assert str(error).startswith("config.json: ")


DENSE: list[tuple[str, Config]] = [
    ("deepseek_v2", {"first_k_dense_replace": 9}),
    ("deepseek_v3", {"first_k_dense_replace": 9}),
    ("jamba", {"num_experts": 1}),
    ("llama4", {"moe_layers": []}),
    ("qwen2_moe-mixed", {"mlp_only_layers": [0, 1, 2, 3]}),
    ("qwen3_moe-mixed", {"decoder_sparse_step": 9}),
    ("qwen3_next-mixed", {"mlp_only_layers": [0, 1, 2]}),
]


@pytest.mark.parametrize(("case", "changes"), DENSE, ids=[case for case, _ in DENSE])
def test_a_config_that_leaves_no_layer_its_experts_makes_a_dense_model(case: str, changes: Config) -> None:
    config = config_of(case) | changes
    model = build(family(config["model_type"]), mlx_tformer.config.Config(config))
    assert not any(isinstance(module, Mixture) for module in model.modules())


@pytest.mark.parametrize("case", ["cohere2", "gemma2", "gemma3", "gpt_oss", "qwen3-window"])
def test_a_config_in_which_no_layer_has_a_window_may_still_give_its_size(case: str) -> None:
    config = config_of(case) | {"layer_types": ["full_attention"] * layers_of(config_of(case))}
    model = build(family(config["model_type"]), mlx_tformer.config.Config(config))
    assert not any(isinstance(part, Window) for m in attentions(model) for part in m.mask.parts)


def test_deepseek_v3_turns_the_features_and_in_the_order_that_the_config_says(tmp_path: Path) -> None:
    """transformers turns `head_dim` features where that is given, and takes a null for the order as no."""
    given = config_of("deepseek_v3-yarn")
    with pytest.raises(BadInput, match=f"head_dim: found 4, expected {given['qk_rope_head_dim']}"):
        build(family("deepseek_v3"), mlx_tformer.config.Config(given | {"head_dim": 4}))
    assert given["rope_interleave"] is False
    assert not moved("deepseek_v3-yarn", variant("deepseek_v3-yarn", given | {"rope_interleave": None}, tmp_path))


STILL: list[tuple[str, Config]] = [
    ("cohere2", {"layer_types": ["full_attention"] * 4}),
    ("llama4-tempered", {"no_rope_layers": [0, 0], "layer_types": None}),
    ("smollm3-layers", {"no_rope_layers": [0, 0, 0]}),
]


@pytest.mark.parametrize(("case", "changes"), STILL, ids=[case for case, _ in STILL])
def test_a_config_in_which_no_layer_turns_may_still_say_how_they_would(case: str, changes: Config) -> None:
    config = config_of(case) | changes
    model = build(family(config["model_type"]), mlx_tformer.config.Config(config))
    assert not any(isinstance(module, Rope) for module in model.modules())


PATTERNS: list[tuple[str, Config]] = [
    ("cohere2", {"sliding_window_pattern": 3}),
    ("gemma3-linear", {"sliding_window_pattern": 2}),
    ("llama4-tempered", {"no_rope_layer_interval": 4, "no_rope_layers": None}),
    ("llama4-tempered", {"interleave_moe_layer_step": 1, "moe_layers": None}),
    ("qwen2-window", {"max_window_layers": 2}),
    ("qwen2-window", {"use_sliding_window": False}),
    ("qwen2_moe-mixed", {"max_window_layers": 3}),
    ("qwen2_moe-mixed", {"use_sliding_window": False}),
    ("qwen3_moe-mixed", {"use_sliding_window": False}),
    ("qwen3_next", {"full_attention_interval": 3}),
    ("smollm3", {"no_rope_layer_interval": 3, "no_rope_layers": None}),
    ("smollm3-layers", {"use_sliding_window": False}),
]


@pytest.mark.parametrize(("case", "changes"), PATTERNS)
def test_a_wrong_pattern_of_layers_moves_the_logits(case: str, changes: Config, tmp_path: Path) -> None:
    plain = {key: value for key, value in config_of(case).items() if key != "layer_types"}
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    assert not moved(case, variant(case, plain, tmp_path / "right"))
    assert shows(case, plain | changes, tmp_path / "wrong")


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
def test_a_wrong_length_of_the_context_moves_the_logits_where_positions_depend_on_it(name: str, tmp_path: Path) -> None:
    assert shows(name, wrong(config_of(name), ("max_position_embeddings",)), tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_a_window_one_larger_or_smaller_moves_the_logits(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    for key in ("sliding_window", "attention_chunk_size"):
        for by in (-1, 1):
            if config.get(key):
                (tmp_path / f"{key}{by}").mkdir()
                assert moved(case, variant(case, config | {key: config[key] + by}, tmp_path / f"{key}{by}"))


def modules_of(model: LM) -> dict[str, nn.Module]:
    """The modules of a model by path."""
    return dict(model.named_modules())


def parts_of(model: LM, name: str) -> Iterator[slice]:
    """The rows of a bias or norm that count: those of q, k and v apart."""
    if not name.endswith("attn.op.qkv.bias"):
        yield slice(None)
        return
    op = modules_of(model)[name.removesuffix(".qkv.bias")]
    assert isinstance(op, Attention)
    if op.gated:  # q and the gate of one head after the other
        yield from (slice(a * op.head_dim, (a + 1) * op.head_dim) for a in range(2 * op.heads))
    ends = accumulate([op.heads * (1 + op.gated), op.kv_heads, op.kv_heads], initial=0)
    q, k, v = (slice(a * op.head_dim, b * op.head_dim) for a, b in pairwise(ends))
    # The same for all keys, it shifts all scores of a query alike, and the softmax does not see it.
    yield from (q, k, v) if isinstance(op.position, Rope) else (q, v)


def neutral(model: LM, name: str) -> int:
    """What a norm's weight or a bias is where it does nothing."""
    shifted = isinstance(modules_of(model)[name.rpartition(".")[0]], ShiftedRMSNorm)
    return int(name.endswith(".weight") and not shifted)


@pytest.mark.parametrize("case", CASES)
def test_a_forgotten_norm_or_bias_moves_the_logits(case: str) -> None:
    model = load(GOLDEN / case)
    wanted = leaves(model)
    vectors = {k: v for k, v in wanted.items() if v.ndim == 1 or k.endswith((".bias", "norm.weight"))}
    for name, value in vectors.items():
        for part in parts_of(model, name):
            left_out = mx.array(value)
            left_out[part] = neutral(model, name)
            model.load_weights([(name, left_out)], strict=False)
            assert moved(case, model), f"{name} {part}"
            model.load_weights([(name, value)], strict=False)
    assert not moved(case, model)


# --- what a key that is left out means ---

PLAIN = (bool, int, float, str, tuple)
X = mx.linspace(-9, 9, 19)


def shown(value: object) -> str:
    """A setting of a module as something that can be compared: functions by what they do."""
    if callable(value) and not isinstance(value, Groups):
        return str(value(X, -X).tolist())
    return str(value)


def description(config: Config) -> dict[str, str]:
    """All that a config decides about a model: shapes, and what its modules keep besides arrays."""
    values = mlx_tformer.config.Config(config)
    model = family(values.model_type).model(values)
    values.finish()
    found = {name: str(value.shape) for name, value in leaves(model).items()}
    for path, module in model.named_modules():
        kept = {**vars(module), **{k: v for k, v in module.items() if isinstance(v, PLAIN)}}
        found |= {f"{path}.{k}": shown(v) for k, v in kept.items() if k != "path" and not k.startswith("_")}
        found |= {f"{path} is": str(module)} if isinstance(module, Position) else {}
    return found


def few_layers(config: Config, layers: int = 4) -> Config:
    """A config of fewer layers."""
    shorter = {k: v[:layers] if k in ("layer_types", "no_rope_layers") else v for k, v in config.items()}
    key = next(key for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config)
    return shorter | {key: layers, "moe_layers": [n for n in shorter.get("moe_layers") or [] if n < layers] or None}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_key_left_out_means_what_it_means_to_transformers_or_is_missed(name: str) -> None:
    whole = few_layers(DEFAULTS[name])
    wanted = description(whole)
    for key in DEFAULTS[name]:
        if key == "model_type":
            continue
        try:
            found = description({k: v for k, v in whole.items() if k != key})
        except BadInput as error:
            assert f"{key}: missing" in str(error)
        else:
            assert found == wanted, key


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_moe"])
def test_a_window_of_null_is_no_window_even_where_windows_are_used(name: str) -> None:
    config = few_layers(DEFAULTS[name]) | {"max_window_layers": 2, "use_sliding_window": True}
    del config["layer_types"]
    without, wide = (description(config | {"sliding_window": window}) for window in (None, 9))
    masks = [{v for k, v in found.items() if k.endswith(".mask")} for found in (without, wide)]
    assert masks == [{"causal"}, {"causal", "causal, window of 9"}]
