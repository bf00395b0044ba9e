"""Reading a config: both dialects, and every wrong value refused in one line that names it."""

import json
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from helpers import GOLDEN, config_of, leaves
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_tformer.config import HARMLESS, ROPE_KEYS, RULES, SCALINGS, Config
from mlx_tformer.errors import BadInput
from mlx_tformer.families import family, known
from mlx_tformer.nn import LM, DynamicNTK, LinearScaling, Llama3, LongRope, Rope, Unscaled, Yarn

Values = dict[str, Any]
PART = "partial_rotary_factor"
FAMILIES = {"llama": "llama-llama3rope", "mistral": "mistral-window", "qwen2": "qwen2", "qwen3": "qwen3"}
"""A golden case of each family, with 6 heads, 2 key heads and 3 layers."""
ROPES: dict[str, Values] = {t["name"]: t for t in json.loads((GOLDEN / "rope.json").read_text())}


def config(model_type: str = "llama", **changes: Any) -> Values:
    """A small config of a family, with changes; what is changed to `...` is left out."""
    values = {**config_of(FAMILIES[model_type]), **changes}
    return {k: v for k, v in values.items() if v is not ...}


def build(values: Values) -> LM:
    c = Config(values)
    model = family(c.model_type).model(c)
    c.finish()
    return model


def refusal(values: Values) -> str:
    """The one line that a config is refused with."""
    with pytest.raises(BadInput) as caught:
        build(values)
    line = str(caught.value)
    assert line.isprintable() and len(line) < 400
    return line


def rope(head_dim: int = 16, **values: Any) -> Rope:
    """The rotary position in a family whose heads may turn in part."""
    c = Config({"model_type": "phi", "max_position_embeddings": 64, **values})
    return c.taking({"partial_rotary_factor": 1.0}).rope(head_dim)


# --- settings ---

WRONG_VALUES = [
    ({"num_attention_heads": 0}, "num_attention_heads: found 0, expected a whole number"),
    ({"num_attention_heads": 5, "head_dim": ..., "num_key_value_heads": 1}, "num_attention_heads: found 5"),
    ({"num_key_value_heads": 4}, "num_key_value_heads: found 4, expected a divisor of num_attention_heads (6)"),
    ({"num_key_value_heads": 12}, "num_key_value_heads: found 12, expected a divisor of num_attention_heads (6)"),
    ({"num_key_value_heads": 0}, "num_key_value_heads: found 0, expected a whole number"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: found 1000000000, expected a whole number from 1 to"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: found 0"),
    ({"hidden_size": -64}, "hidden_size: found -64, expected a whole number"),
    ({"hidden_size": "64"}, "hidden_size: found '64', expected a whole number"),
    ({"hidden_size": 64.0}, "hidden_size: found 64.0, expected a whole number"),
    ({"hidden_size": True}, "hidden_size: found True, expected a whole number"),
    ({"hidden_size": [64]}, "hidden_size: found [64], expected a whole number"),
    ({"hidden_size": ...}, "hidden_size: missing, expected a whole number"),
    ({"hidden_size": None}, "hidden_size: missing, expected a whole number"),
    ({"intermediate_size": ...}, "intermediate_size: missing"),
    ({"num_hidden_layers": ...}, "num_hidden_layers: missing"),
    ({"num_attention_heads": ...}, "num_attention_heads: missing"),
    ({"vocab_size": ...}, "vocab_size: missing"),
    ({"vocab_size": 0}, "vocab_size: found 0"),
    ({"head_dim": 7}, "head_dim: found 7"),
    ({"head_dim": 0}, "head_dim: found 0"),
    ({"rms_norm_eps": 0}, "rms_norm_eps: found 0, expected a number above 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: found nan"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps: found inf"),
    ({"hidden_act": "sillu"}, "hidden_act: found 'sillu', expected one of gelu, "),
    ({"hidden_act": ["silu"]}, "hidden_act: found ['silu'], expected one of"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: found 'yes', expected true or false"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: found 1, expected true or false"),
]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("changes", "problem"), WRONG_VALUES, ids=[problem for _, problem in WRONG_VALUES])
def test_a_wrong_value_is_refused_with_the_rule_that_it_breaks(name: str, changes: Values, problem: str) -> None:
    if name == "qwen3" and "head_dim" in changes:
        changes = {**changes, "head_dim": changes["head_dim"] if changes["head_dim"] is not ... else None}
    assert f"config.json: {problem}" in refusal(config(name, **changes))


@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("llama", {"attention_bias": "no"}, "attention_bias: found 'no', expected true or false"),
        ("llama", {"mlp_bias": 2}, "mlp_bias: found 2, expected true or false"),
        ("qwen3", {"attention_bias": []}, "attention_bias: found [], expected true or false"),
        ("mistral", {"sliding_window": 0}, "sliding_window: found 0, expected a whole number"),
        ("mistral", {"sliding_window": -1}, "sliding_window: found -1"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window: found 1, expected true or false"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers: found -1, expected a whole number of 0 or more"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types: found ['full_attention'], expected 3 entries"),
        (
            "qwen3",
            {"layer_types": ["full_attention"] * 2 + ["linear_attention"]},
            "expected kinds of attention with a mask",
        ),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types: found 'full_attention', expected a list"),
        ("qwen3", {"layer_types": [["full_attention"]]}, "layer_types: found [['full_attention']], expected a list"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "expected full_attention alone"),
    ],
)
def test_settings_that_some_families_have_are_checked_too(model_type: str, changes: Values, problem: str) -> None:
    assert problem in refusal(config(model_type, **changes))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_setting_that_no_family_reads_is_an_error_that_names_it(model_type: str) -> None:
    line = refusal(config(model_type, embedding_multiplier=12.0, logit_scale=None, query_pre_attn_scalar=64))
    assert line == (
        f"config.json: embedding_multiplier: found 12.0, a setting that {model_type} does not know"
        " (and query_pre_attn_scalar)"
    )


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"attention_bias": True}),
        ("qwen2", {"attention_bias": False}),
        ("llama", {"sliding_window": 7}),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}),
        ("llama", {"attn_logit_softcapping": 50.0}),
        ("llama", {"rope_interleaved": True}),
        ("llama", {"rope_interleaved": 0}),
        ("qwen2", {"use_mrope": True}),
    ],
)
def test_a_setting_of_another_family_is_not_passed_over(model_type: str, changes: Values) -> None:
    (name,) = changes
    assert f"config.json: {name}: found " in refusal(config(model_type, **changes))


@pytest.mark.parametrize(
    "harmless",
    [
        {"attention_dropout": 0.1, "use_cache": False, "initializer_range": 1.0, "architectures": ["X"]},
        {"_name_or_path": "x", "transformers_version": "4.31.0", "pretraining_tp": 4, "auto_map": {}},
        # what SmolLM2's, Qwen 2.5's and DeepSeek-R1-Distill-Qwen's own configs say
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        {"use_mrope": False},
        {"some_new_setting": None},
    ],
)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_settings_that_cannot_change_the_result_are_passed_over(model_type: str, harmless: Values) -> None:
    build(config(model_type, **harmless))


def test_a_setting_whose_name_is_an_attack_on_the_terminal_is_shown_harmlessly() -> None:
    assert "\\n" in refusal({**config(), "evil\n\x1b[2J": 1})


def test_what_decides_is_not_called_harmless() -> None:
    # A decoder does not look at the id of padding; RoBERTa counts its positions from it.
    assert HARMLESS & RULES.keys() <= {"max_position_embeddings", "pad_token_id"}
    assert not HARMLESS & (ROPE_KEYS.keys() | {"rope_parameters", "rope_scaling", "quantization_config"})


def test_a_long_value_is_shortened_in_the_message() -> None:
    line = refusal(config(hidden_size="x" * 10**6))
    assert "found 'xxx" in line and "..." in line


@pytest.mark.parametrize("found", [None, 7, [], {"a": 1}])
def test_a_config_must_say_which_family_it_is_of(found: Any) -> None:
    with pytest.raises(BadInput, match=r"config\.json: model_type: .*expected the name of a family"):
        _ = Config({} if found is None else {"model_type": found}).model_type


@pytest.mark.parametrize(("name", "nearest"), [("lama", "llama"), ("mistral3", "mistral"), ("qwen2.5", "qwen2")])
def test_an_unknown_family_is_refused_with_the_known_ones_nearest_first(name: str, nearest: str) -> None:
    with pytest.raises(BadInput, match=f"found '{name}', expected one of {nearest}, ") as caught:
        family(name)
    assert all(other in str(caught.value) for other in known())


@pytest.mark.parametrize("name", ["__init__", "..", "llama.py", "os", "", "x" * 10_000, "llama\n"])
def test_a_model_type_cannot_reach_anything_but_a_family(name: str) -> None:
    with pytest.raises(BadInput, match="model_type"):
        family(name)


def test_the_file_that_is_wrong_is_named() -> None:
    with pytest.raises(BadInput, match=r"^there/config\.json: hidden_size: found 0"):
        _ = Config({"hidden_size": 0}, file="there/config.json")["hidden_size"]


# --- rotary settings ---

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

WRONG_ROPES = [
    ({"rope_type": "yarm"}, ".rope_type: found 'yarm', expected one of default, linear"),
    ({"type": "yarm"}, "type: found 'yarm', expected one of default, linear"),
    ({"rope_type": ["yarn"]}, ".rope_type: found ['yarn'], expected one of default"),
    ({"rope_type": "linear"}, ".factor: missing"),
    ({"rope_type": "linear", "factor": None}, ".factor: missing"),
    ({"rope_type": "linear", "factor": -2}, ".factor: found -2, expected a number above 0"),
    ({"rope_type": "linear", "factor": 0}, ".factor: found 0, expected a number above 0"),
    ({"rope_type": "linear", "factor": "2"}, ".factor: found '2', expected a number above 0"),
    ({"rope_type": "linear", "factor": float("inf")}, ".factor: found inf"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, ".beta_fast: found 32, a setting that rope type linear"),
    ({"rope_type": "default", "factor": 2.0}, ".factor: found 2.0, a setting that rope type default does not have"),
    ({"rope_type": "dynamic"}, ".factor: missing"),
    ({**YARN, "factor": -2}, ".factor: found -2"),
    ({**YARN, "colour": "red"}, ".colour: found 'red', a setting that is not known"),
    ({**YARN, "attention_factor": -1.0}, ".attention_factor: found -1.0"),
    ({**YARN, "truncate": 1}, ".truncate: found 1, expected true or false"),
    ({**YARN, "original_max_position_embeddings": 0}, ".original_max_position_embeddings: found 0"),
    ({**YARN, "mrope_section": [1, 2]}, ".mrope_section: found [1, 2], a setting that is not known"),
    ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, ".low_freq_factor: missing"),
    ({**LLAMA3, "mscale": 1.0}, ".mscale: found 1.0, a setting that rope type llama3 does not have"),
    ({**LLAMA3, "high_freq_factor": 0.5}, ".high_freq_factor: found 0.5"),
    ({**LONG, "short_factor": [1.0] * 7}, ".short_factor: found 7 numbers, expected 8"),
    ({**LONG, "long_factor": [1.0] * 7 + [0.0]}, ".long_factor: found [1.0"),
    ({**LONG, "long_factor": 2.0}, ".long_factor: found 2.0, expected a list"),
    ({"rope_theta": 0}, "rope_theta: found 0, expected a number above 1"),
    ({"rope_theta": 1}, "rope_theta: found 1, expected a number above 1"),
    ({"rope_theta": "1e4"}, "rope_theta: found '1e4'"),
    ({"partial_rotary_factor": 0}, "partial_rotary_factor: found 0"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: found 1.5, expected a number above 0, at most 1"),
    ({"partial_rotary_factor": 0.01}, "found 0 rotary features, expected an even number"),
]


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("settings", "problem"), WRONG_ROPES, ids=[problem for _, problem in WRONG_ROPES])
def test_a_wrong_rotary_setting_is_refused_by_name(where: str, settings: Values, problem: str) -> None:
    values: Values = {where: settings}
    with pytest.raises(BadInput) as caught:
        rope(**values)
    assert problem in str(caught.value) and str(caught.value).startswith("config.json: ")
    if problem.startswith("."):
        assert f"{where}{problem}" in str(caught.value)


@pytest.mark.parametrize("inside", [True, False], ids=["in the table", "beside it"])
def test_heads_turn_in_part_only_in_families_whose_reference_does(inside: bool) -> None:
    table = config()["rope_parameters"]
    changes = {"rope_parameters": {**table, PART: 0.5}} if inside else {PART: 0.5}
    assert f"{PART}: found 0.5, expected 1: llama turns whole heads" in refusal(config(**changes))
    assert build(config(**{PART: 1.0})).vocab
    assert rope(**{PART: 0.5}).dims == 8


@pytest.mark.parametrize("found", [7, "yarn", [1], True])
@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_rotary_settings_must_be_an_object(where: str, found: Any) -> None:
    with pytest.raises(BadInput, match=f"{where}: found .*, expected an object"):
        rope(**{where: found})


def test_a_wrong_theta_beside_the_table_is_named_as_it_stands_there() -> None:
    with pytest.raises(BadInput, match=r"^config\.json: rope_theta: found 0, expected a number above 1"):
        rope(rope_theta=0)


def test_two_tables_that_differ_are_refused() -> None:
    one, other = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(BadInput, match="rope_scaling: differs from rope_parameters"):
        rope(rope_parameters=one, rope_scaling=other)
    assert rope(rope_parameters=one, rope_scaling=one).scaling == LinearScaling(2.0)


@pytest.mark.parametrize(
    ("values", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_scaling": {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 3.0}, 5e5),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {}, "rope_theta": 5e5}, 5e5),
        ({"rope_theta": None}, 10000.0),
    ],
)
def test_theta_may_stand_in_the_table_or_beside_it_and_the_table_comes_first(values: Values, theta: float) -> None:
    """transformers 5 writes it inside, where other readers overlook it and take 10000."""
    assert rope(**values).theta == theta


def test_each_rope_type_is_the_scaling_of_its_name() -> None:
    length = {"original_max_position_embeddings": 32}
    tables = {
        Unscaled(): {"rope_type": "default", **length},
        LinearScaling(4.0): {"rope_type": "linear", "factor": 4.0},
        DynamicNTK(4.0, 64): {"rope_type": "dynamic", "factor": 4.0, **length},
        Yarn(4.0, 32): {**YARN, **length},
        Yarn(4.0, 64): YARN,
        Yarn(4.0, 32, 1.5, 8, 2, 0.7, 0.9, False): {
            **YARN,
            **length,
            "attention_factor": 1.5,
            "beta_fast": 8,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
            "truncate": False,
        },
        Llama3(8.0, 1.0, 4.0, 32): {**LLAMA3, **length},
        LongRope((1.0,) * 8, (2.0,) * 8, 32, 2.0): {**LONG, **length},
        LongRope((1.0,) * 8, (2.0,) * 8, 32, 3.0, 1.5): {**LONG, **length, "factor": 3.0, "attention_factor": 1.5},
    }
    for scaling, table in tables.items():
        assert rope(rope_parameters=table).scaling == scaling
        earlier = {("type" if k == "rope_type" else k): v for k, v in table.items()}
        assert rope(rope_scaling=earlier).scaling == scaling
    assert (
        rope(rope_scaling={**LONG, "rope_type": "su", **length}).scaling
        == rope(rope_scaling={**LONG, **length}).scaling
    )
    assert {table["rope_type"] for table in tables.values()} | {"su"} == set(SCALINGS)


@pytest.mark.parametrize("table", [YARN, LLAMA3, LONG], ids=["yarn", "llama3", "longrope"])
def test_the_trained_length_may_stand_beside_the_table_and_comes_first_there(table: Values) -> None:
    inside = rope(rope_parameters={**table, "original_max_position_embeddings": 32})
    assert rope(rope_parameters=table, original_max_position_embeddings=32).scaling == inside.scaling
    both = {**table, "original_max_position_embeddings": 16}
    assert rope(rope_parameters=both, original_max_position_embeddings=32).scaling == inside.scaling
    assert rope(rope_parameters=table).scaling != inside.scaling


def test_each_layer_type_may_have_its_own_table() -> None:
    tables = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    c = Config({"model_type": "x", "rope_parameters": tables, "max_position_embeddings": 64})
    full, sliding = (c.rope(16, layer_type=name) for name in tables)
    assert (full.theta, full.scaling, sliding.theta, sliding.scaling) == (1e6, LinearScaling(8.0), 1e4, Unscaled())
    with pytest.raises(BadInput, match=r"rope_parameters\.full_attention: found .*, a setting that is not known"):
        c.rope(16)
    one = Config({"model_type": "x", "rope_parameters": tables["full_attention"], "max_position_embeddings": 64})
    assert one.rope(16, layer_type="sliding_attention").scaling == LinearScaling(8.0)


def test_partial_and_interleaved_rotation_are_passed_on() -> None:
    assert rope(partial_rotary_factor=0.5).dims == rope(rope_parameters={"partial_rotary_factor": 0.5}).dims == 8
    assert rope(80, partial_rotary_factor=0.4).dims == 32
    c = Config({"model_type": "x"})
    assert c.rope(16, interleaved=True).interleaved and not c.rope(16).interleaved


# --- anything at all ---

NUMBERS = st.one_of(st.integers(-3, 9), st.sampled_from([2**31, 2**33, 10**18, 10**400]), st.floats())
WORDS = st.sampled_from(["", "64", "silu", "yarn", "linear", "full_attention", "\n\x1b[2J", "é"])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.just("x" * 500)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=5,
)


@pytest.mark.parametrize("model_type", FAMILIES)
@given(key=st.sampled_from([*sorted(RULES), "rope_parameters", "rope_scaling", "partial_rotary_factor"]), value=JSON)
@example(key="hidden_size", value=10**30)
@example(key="vocab_size", value=2**33)
@example(key="head_dim", value=2**32)
@example(key="rms_norm_eps", value=10**400)
@example(key="layer_types", value=[{}])
@example(key="rope_parameters", value={"rope_type": []})
def test_any_value_of_any_setting_is_understood_or_refused(model_type: str, key: str, value: Any) -> None:
    try:
        model = build(config(model_type, **{key: value}))
    except BadInput as error:
        assert str(error).isprintable() and len(str(error)) < 500
    else:
        assert all(isinstance(v, mx.array) for v in leaves(model).values())


@pytest.mark.parametrize("name", ROPES)
@given(data=st.data(), value=st.one_of(JSON, st.sampled_from([1e308, 1e-300, 1.0000001, 2, 1])))
def test_a_rope_that_is_accepted_turns_by_usable_numbers(name: str, data: st.DataObject, value: Any) -> None:
    """No overflow, no division by zero once the model runs: what cannot turn is refused when the config is read."""
    table = ROPES[name]
    key = data.draw(st.sampled_from([*table["rope_parameters"], "rope_theta", "original_max_position_embeddings"]))
    changed = {**table["rope_parameters"], key: value}
    try:
        made = rope(table["head_dim"], rope_parameters=changed)
    except BadInput:
        return
    for context in (1, 10**6):
        with np.errstate(all="ignore"):
            periods = (1 / reference.frequencies(made, context)).astype(np.float32)
        assert np.isfinite(periods).all() and (periods > 0).all() and math.isfinite(made.scaling.amplitude)


@pytest.mark.parametrize("head_dim", [2, 4])
@pytest.mark.parametrize("settings", [{"rope_type": "dynamic", "factor": 2.0}, YARN, LLAMA3], ids=str)
def test_heads_of_a_single_pair_turn_or_are_refused(head_dim: int, settings: Values) -> None:
    try:
        made = rope(head_dim, rope_parameters=settings)
    except BadInput as error:
        assert head_dim == 2
        assert "head_dim" in str(error) or "rope" in str(error)
    else:
        assert np.isfinite(reference.frequencies(made, 10**6)).all()
