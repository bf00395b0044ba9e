"""Each family against transformers, and against itself: cached, batched, watched, from either config dialect."""

import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import CASES, GOLDEN, config_of, expected, gap, golden, leaves, limit, load, seen, variant

import mlx_tformer.config
from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.families import family
from mlx_tformer.nn import KV, LM, Attention, Cache, GatedMlp, RMSNorm, WindowKV

TIGHT = 5e-5
"""What float32 really gives on these cases: a tenth of the limit, and three times what was seen."""

Config = dict[str, Any]
DEFAULTS: dict[str, Config] = json.loads((GOLDEN / "defaults.json").read_text())
WINDOWED = [case for case in CASES if config_of(case).get("sliding_window") is not None]


def ids_of(case: str) -> mx.array:
    return mx.array(expected(case)["input_ids"])


# --- against transformers ---


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    wanted = expected(case)["logits"]
    assert gap(golden(case)(ids_of(case)), wanted) < min(TIGHT, limit(wanted))


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_those_of_transformers(case: str) -> None:
    model, wanted = golden(case), expected(case)
    layers = len(model.decoder.layers)
    paths = ["embed.out", *(f"decoder.layers.{i}.out" for i in range(layers - 1)), "decoder.out"]
    with seen("*.out") as found:
        model(ids_of(case))
    for i, path in enumerate(paths):
        assert gap(found[path], wanted[f"hidden.{i}"]) < TIGHT, path


@pytest.mark.parametrize("case", CASES)
def test_attention_patterns_are_those_of_transformers(case: str) -> None:
    with seen("*.pattern") as found:
        golden(case)(ids_of(case))
    for i in range(len(golden(case).decoder.layers)):
        assert gap(found[f"decoder.layers.{i}.attn.op.pattern"], expected(case)[f"attention.{i}"]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(case: str) -> None:
    wanted = expected(case)["greedy_ids"][0].tolist()
    model, ids = golden(case), mx.array(expected(case)["prompt_ids"])
    cache = model.new_cache(ids.shape[1] + len(wanted))
    found: list[int] = []
    while len(found) < len(wanted):
        ids = model(ids, cache)[:, -1:].argmax(axis=-1)
        found.append(int(np.array(ids)[0, 0]))
    assert found == wanted


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [[10] + [1] * 14, [5, 8, 11]], ids=["steps", "chunks"])
def test_the_patterns_of_cached_steps_are_those_rows_of_transformers(case: str, sizes: list[int]) -> None:
    """A window's cache holds its last keys alone; what is not there has no weight in the whole pattern either."""
    model, ids = golden(case), ids_of(case)
    cache, start = model.new_cache(24), 0
    for size in sizes:
        with seen("*.pattern") as found:
            model(ids[:, start : start + size], cache)
        for i, pattern in enumerate(found.values()):
            wanted = expected(case)[f"attention.{i}"][:, :, start : start + size, : start + size]
            kept = pattern.shape[-1]
            assert gap(pattern, wanted[..., start + size - kept :]) < 1e-5
            assert not wanted[..., : start + size - kept].any()
        start += size


# --- one pass, chunks, steps, batches ---

SPLITS = {
    "step by step": [1] * 24,
    "prefill and steps": [10] + [1] * 14,
    "chunks": [5, 1, 11, 7],
    "growing chunks": [1, 2, 3, 4, 6, 8],
    "all at once": [24],
}


def in_parts(model: LM, ids: mx.array, sizes: list[int], cache: Cache, **first: mx.array) -> mx.array:
    """Logits of ids that are fed in chunks; `first` goes with the first chunk."""
    parts, start = [], 0
    for size in sizes:
        parts.append(model(ids[:, start : start + size], cache, **(first if start == 0 else {})))
        start += size
    return mx.concatenate(parts, axis=1)


@pytest.mark.parametrize(("case", "split", "step"), list(product(CASES, SPLITS, [3, 4, KV.STEP])))
def test_cached_decoding_equals_one_pass(case: str, split: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KV, "STEP", step)
    model, ids = golden(case), ids_of(case)
    assert gap(in_parts(model, ids, SPLITS[split], model.new_cache(24)), model(ids)) < TIGHT


@pytest.mark.parametrize("case", ["llama-mha", "mistral-window", "qwen2-window"])
def test_cached_decoding_equals_one_pass_across_a_border_of_the_natural_buffer(case: str) -> None:
    model, length = golden(case), KV.STEP + 30
    ids = mx.random.randint(0, 60, (1, length), key=mx.random.key(7))
    sizes = [KV.STEP - 6, *[1] * 12, 5, *[1] * 6, length - KV.STEP - 17]
    assert gap(in_parts(model, ids, sizes, model.new_cache(length)), model(ids)) < TIGHT


@pytest.mark.parametrize("case", WINDOWED)
def test_a_window_model_remembers_little_more_than_its_window(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KV, "STEP", 4)
    model = golden(case)
    cache = model.new_cache(24)
    in_parts(model, ids_of(case), [1] * 24, cache)
    for state in cache.states.values():
        assert state.length == 24
        if isinstance(state, WindowKV):
            assert state.keys is not None and state.keys.shape[2] <= state.size + 4


@pytest.mark.parametrize("case", CASES)
def test_a_trimmed_cache_has_forgotten_what_was_trimmed(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    cache = model.new_cache(24)
    model(mx.concatenate([ids[:, :12], ids[:, :5]], axis=1), cache)
    cache.trim(5)
    assert gap(in_parts(model, ids[:, 12:], [1, 1, 7, 3], cache), model(ids)[:, 12:]) < TIGHT


def padded_batch(ids: mx.array, rows: int) -> tuple[mx.array, mx.array, list[mx.array]]:
    """A left-padded batch whose rows have 24, 19, 14, ... tokens, its mask, and the rows by themselves."""
    texts = [mx.roll(ids, row, 1)[:, : ids.shape[1] - 5 * row] for row in range(rows)]
    pads = [mx.full((1, ids.shape[1] - text.shape[1]), 63, text.dtype) for text in texts]
    batch = mx.concatenate([mx.concatenate([p, t], axis=1) for p, t in zip(pads, texts, strict=True)])
    mask = [[0] * pad.shape[1] + [1] * text.shape[1] for pad, text in zip(pads, texts, strict=True)]
    return batch, mx.array(mask), texts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", ["kv heads", "heads", "three"])
def test_a_left_padded_batch_equals_its_rows(case: str, size: str) -> None:
    """A batch as large as the number of heads would let a wrong broadcast pass unseen."""
    model, ids = golden(case), ids_of(case)
    op = model.decoder.layers[0].attn.op
    rows = {"kv heads": op.kv_heads, "heads": min(op.heads, 4), "three": 3}[size]
    batch, mask, texts = padded_batch(ids, rows)
    whole = model(batch, attention_mask=mask)
    chunked = in_parts(model, batch, [20, 1, 1, 2], model.new_cache(24), attention_mask=mask[:, :20])
    for row, text in enumerate(texts):
        alone = model(text, model.new_cache(24))
        assert gap(whole[row : row + 1, -text.shape[1] :], alone) < TIGHT
        assert gap(chunked[row : row + 1, -text.shape[1] :], alone) < TIGHT


def test_padding_that_goes_on_behind_the_first_chunk_is_refused() -> None:
    """It would be taken for text otherwise."""
    model = golden("qwen2")
    batch, mask, _ = padded_batch(ids_of("qwen2"), 3)
    cache = model.new_cache(24)
    model(batch[:, :4], cache, attention_mask=mask[:, :4])
    with pytest.raises(UsageError, match="attention_mask"):
        model(batch[:, 4:], cache, attention_mask=mask[:, 4:])


def test_a_mask_of_another_shape_than_the_ids_is_refused() -> None:
    with pytest.raises(UsageError, match="attention_mask: found shape"):
        golden("qwen2")(ids_of("qwen2"), attention_mask=mx.array([[0, 1, 1]]))


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_batch_without_padding_do_not_see_each_other(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    batch = mx.concatenate([ids, ids[:, ::-1], mx.roll(ids, 3, 1)])
    whole = model(batch)
    for row in range(3):
        assert gap(whole[row : row + 1], model(batch[row : row + 1])) < TIGHT


@pytest.mark.parametrize("case", CASES)
def test_padding_may_hold_any_token(case: str) -> None:
    model = golden(case)
    batch, mask, _ = padded_batch(ids_of(case), 3)
    other = mx.where(mask, batch, 5)
    first, second = (model(x, attention_mask=mask) for x in (batch, other))
    assert mx.array_equal(mx.where(mask[..., None], first, 0), mx.where(mask[..., None], second, 0)).item()


@pytest.mark.parametrize("case", CASES)
def test_watching_everything_does_not_change_the_result(case: str) -> None:
    """Not by a bit on the CPU, although attention is its explicit twin then; fused kernels may add up differently."""
    model, ids = golden(case), ids_of(case)
    plain = model(ids)
    with seen("*") as found:
        watched = model(ids)
    assert {path.rpartition(".")[2] for path in found} >= {"q", "k", "v", "z", "scores", "pattern", "delta", "logits"}
    assert gap(watched, plain) <= (0 if mx.default_device() == mx.Device(mx.cpu) else TIGHT)


@pytest.mark.parametrize("case", CASES)
def test_watching_what_attention_computes_anyway_leaves_it_fused(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    with seen("*.attn.op.[qkvz]") as found:
        watched = model(ids)
    assert len(found) == 4 * len(model.decoder.layers)
    assert mx.array_equal(watched, model(ids)).item()


# --- a text whose positions depend on its length ---


@pytest.mark.parametrize("case", ["llama-longrope", "llama-dynamic"])
def test_short_and_long_frequencies_are_never_mixed_in_one_cache(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    short = in_parts(model, ids, [10] + [1] * 14, model.new_cache(10))  # grows past 22 all the same
    planned = in_parts(model, ids, [10] + [1] * 14, model.new_cache(24))
    assert gap(planned, expected(case)["logits"]) < TIGHT
    assert gap(short, expected(case)["logits"]) > limit(expected(case)["logits"])
    assert gap(short[:, :22], model(ids[:, :22])) < TIGHT  # as if it had known 22 tokens alone
    assert gap(short, in_parts(model, ids, [10, 14], model.new_cache(10))) < TIGHT
    assert [[position.regime(n) for n in (10, 22)] for position in model.scaled_positions()] == [[0, 0]]


@pytest.mark.parametrize("case", CASES)
def test_only_positions_that_depend_on_the_length_count_as_scaled(case: str) -> None:
    assert bool(golden(case).scaled_positions()) == (case in ("llama-longrope", "llama-dynamic"))


# --- config dialects ---


def derived_layers(config: Config) -> list[str]:
    """What `layer_types` would say if only the settings spoke that came before it."""
    layers, first = config["num_hidden_layers"], config.get("max_window_layers", 0)
    windowed = config.get("use_sliding_window", False)
    return ["sliding_attention" if windowed and i >= first else "full_attention" for i in range(layers)]


def old_dialect(config: Config, kind: str = "rope_type") -> Config:
    """The same config in the words of transformers 4; `kind` is what it called the rope type."""
    config = {**config, "torch_dtype": config.pop("dtype"), "transformers_version": "4.42.0"}
    if config.get("layer_types") == derived_layers(config):
        del config["layer_types"]
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    name = rope.pop("rope_type")
    config["rope_scaling"] = None if name == "default" else {kind: name, **rope}
    return config


def beside(config: Config) -> Config:
    """The trained length beside the rotary settings instead of among them, as in Phi 3."""
    trained = config["rope_parameters"].pop("original_max_position_embeddings", None)
    return config if trained is None else {**config, "original_max_position_embeddings": trained}


def spare(config: Config) -> Config:
    """Without what the family's class takes by default anyway."""
    defaults = DEFAULTS[config["model_type"]]
    kept = {k: v for k, v in config.items() if k == "model_type" or k not in defaults or v != defaults[k]}
    if "layer_types" in kept and "sliding_attention" not in kept["layer_types"]:
        del kept["layer_types"]
    return kept


DIALECTS = {
    "transformers 4": old_dialect,
    "transformers 4, earlier": lambda config: old_dialect(config, "type"),
    "trained length beside": beside,
    "defaults left out": spare,
    "transformers 4, defaults left out": lambda config: spare(old_dialect(config)),
    "nulls for what is not there": lambda config: {**config, "rope_scaling": None, "pruned_heads": None},
}


@pytest.mark.parametrize(("case", "dialect"), list(product(CASES, DIALECTS)))
def test_every_config_dialect_gives_the_same_logits(case: str, dialect: str, tmp_path: Path) -> None:
    ids, config = ids_of(case), DIALECTS[dialect](config_of(case))
    assert mx.array_equal(variant(case, config, tmp_path)(ids), golden(case)(ids)).item()


# --- a wrong setting shows ---


class Read(dict[str, Any]):
    """A config's values that remember which of them were asked for."""

    def __init__(self, values: Config):
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def settings_of(case: str) -> list[str]:
    """The settings of a case that its family reads, those in the rotary table one by one."""
    values = Read(config_of(case))
    family(values["model_type"]).model(mlx_tformer.config.Config(values))
    found = [key for key in values if key in values.asked and values[key] is not None]
    found.remove("rope_parameters")
    return found + [f"rope_parameters.{key}" for key in values["rope_parameters"]]


WRONG: dict[str, Any] = {
    "hidden_act": lambda v: {"gelu": "gelu_new"}.get(v, "gelu"),
    "layer_types": lambda v: ["full_attention" if kind == "sliding_attention" else "sliding_attention" for kind in v],
    "original_max_position_embeddings": lambda v: 4 * v,
    "rms_norm_eps": lambda v: 1e-3 if v < 1e-3 else 1e-6,
    "rope_type": lambda v: "linear" if v == "default" else "default",
    "sliding_window": lambda v: v + 1,
    "long_factor": lambda v: [1.1 * x for x in v],
    "short_factor": lambda v: [1.1 * x for x in v],
}
"""Another value for a setting, not far from the right one. Flags are flipped, other numbers raised by an eighth."""


def wrong(key: str, value: Any) -> Any:
    """A wrong value for a setting."""
    name = key.rpartition(".")[2]
    if name in WRONG:
        return WRONG[name](value)
    return not value if isinstance(value, bool) else type(value)(value * 1.125) + isinstance(value, int)


def moved(case: str, other: LM) -> bool:
    """True if the logits of a short or a longer text are not within the limit of the right ones."""
    texts = [ids_of(case)[:, :16], ids_of(case)]
    return max(gap(other(text), golden(case)(text)) for text in texts) > limit(expected(case)["logits"])


ELSEWHERE = {"max_position_embeddings", "use_sliding_window", "max_window_layers"}
"""Settings that say nothing about the numbers, or nothing where `layer_types` is given."""
MATTERS = {("llama-dynamic", "max_position_embeddings"), ("llama-longrope", "max_position_embeddings")}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_setting_moves_the_logits_or_does_not_load(case: str, tmp_path: Path) -> None:
    for key in settings_of(case):
        if key in ELSEWHERE and (case, key) not in MATTERS:
            continue
        config, name = config_of(case), key.rpartition(".")[2]
        holder = config["rope_parameters"] if key.startswith("rope_parameters.") else config
        holder[name] = wrong(key, holder[name])
        (tmp_path / key).mkdir()
        try:
            other = variant(case, config, tmp_path / key)
        except BadInput:
            continue
        assert moved(case, other), f"{key} = {holder[name]}"


@pytest.mark.parametrize("change", [{"sliding_window": 6}, {"max_window_layers": 2}, {"use_sliding_window": False}])
def test_a_wrong_window_moves_the_logits(change: Config, tmp_path: Path) -> None:
    config = config_of("qwen2-window")
    del config["layer_types"]
    assert moved("qwen2-window", variant("qwen2-window", config | change, tmp_path))


@pytest.mark.parametrize("case", WINDOWED)
def test_a_window_one_smaller_moves_the_logits(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    assert moved(case, variant(case, config | {"sliding_window": config["sliding_window"] - 1}, tmp_path))


def vectors(model: LM) -> list[tuple[str, slice]]:
    """Every norm and bias of a model, those of q, k and v apart."""
    found = []
    for name, value in leaves(model).items():
        if name.endswith("qkv.bias"):
            op = model.decoder.layers[0].attn.op
            ends = [0, op.heads * op.head_dim, (op.heads + op.kv_heads) * op.head_dim, value.size]
            found += [(name, slice(*pair)) for pair in pairwise(ends)]
        elif value.ndim == 1:
            found.append((name, slice(None)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_forgotten_norm_or_bias_moves_the_logits(case: str) -> None:
    model = load(GOLDEN / case)
    right = leaves(model)
    for name, part in vectors(model):
        left_out = mx.array(right[name])
        left_out[part] = 0 if name.endswith("bias") else 1
        model.load_weights([(name, left_out)], strict=False)
        assert moved(case, model), f"{name} {part}"
        model.load_weights([(name, right[name])], strict=False)
    assert not moved(case, model)


# --- what a key that is left out means ---


def description(config: Config) -> dict[str, Any]:
    """All that a config decides about a model."""
    values = mlx_tformer.config.Config(config)
    model = family(values.model_type).model(values)
    values.finish()
    found: dict[str, Any] = {name: value.shape for name, value in leaves(model).items()}
    found |= {"tied": model.tied, "context": model.context}
    for path, module in model.named_modules():
        match module:
            case Attention():
                found[path] = (module.heads, module.kv_heads, module.head_dim, module.scale, str(module.mask))
                found[f"{path}.position"] = str(module.position)
            case RMSNorm():
                found[path] = module.eps
            case GatedMlp():
                found[path] = module.act
    return found


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_window_of_null_is_no_window_even_where_windows_are_used(name: str) -> None:
    config = {**DEFAULTS[name], "num_hidden_layers": 2, "max_window_layers": 0, "use_sliding_window": True}
    del config["layer_types"]
    found = description(config | {"sliding_window": None})["decoder.layers.1.attn.op"]
    assert found[-1] == "causal" != description(config | {"sliding_window": 9})["decoder.layers.1.attn.op"][-1]


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in DEFAULTS for key in DEFAULTS[name]])
def test_a_key_left_out_means_what_it_means_to_transformers_or_is_missed(name: str, key: str) -> None:
    if key == "model_type":
        return
    whole = {**DEFAULTS[name], "num_hidden_layers": 2}
    whole |= {"layer_types": whole["layer_types"][:2]} if "layer_types" in whole else {}
    less = {k: v for k, v in whole.items() if k != key}
    try:
        found = description(less)
    except BadInput as error:
        assert f"{key}: missing" in str(error)
    else:
        assert found == description(whole)
