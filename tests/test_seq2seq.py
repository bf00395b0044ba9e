"""Encoder-decoder models against transformers and against themselves: padding, caches, watchers, names of all kinds."""

import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import GOLDEN, cases_of, config_of, expected, gap, leaves, limit, seen, tensors

import mlx_tformer as mt
from mlx_tformer.config import Config
from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.families import family
from mlx_tformer.nn import Context, CrossAttention, Mixture, RelativeBias, Sinusoidal
from mlx_tformer.nn.moe import taken
from mlx_tformer.settings import HARMLESS, RULES, Other

CASES = cases_of("seq2seq")
TIGHT = 1e-4
LOOSE = {"t5-v1.1": 3, "t5-untied": 3}
"""Cases without any scale on the stream or the logits, which reach further."""

ROOMY = [case for case in CASES if case != "switch-full"]
"""Cases whose experts take all tokens: capacity counts the tokens of a call, and steps have one each."""


@cache
def loaded(case: str) -> mt.Seq2SeqModel:
    """The model of a golden case; tests must not change it."""
    found = mt.load(GOLDEN / case, dtype="float32")
    assert isinstance(found, mt.Seq2SeqModel)
    return found


def inputs(case: str) -> tuple[mx.array, mx.array, mx.array]:
    """Source, mask and target of a case; the source of the second row is padded on the right."""
    e = expected(case)
    return mx.array(e["input_ids"]), mx.array(e["attention_mask"]), mx.array(e["decoder_input_ids"])


def tight(case: str) -> float:
    return min(TIGHT * LOOSE.get(case, 1), limit(expected(case)["logits"]))


def written(folder: Path, weights: dict[str, mx.array], case: str, **changes: object) -> Path:
    """A checkpoint with these weights, and the config of a case with changes."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config_of(case) | changes))
    return folder


# --- against transformers ---


@pytest.mark.parametrize("case", CASES)
def test_logits_memory_and_patterns_are_those_of_transformers(case: str) -> None:
    wanted, (ids, mask, target) = expected(case), inputs(case)
    assert mask.min().item() == 0
    with seen("*") as found:
        logits = loaded(case)(ids, attention_mask=mask, decoder_input_ids=target)
    assert gap(logits, wanted["logits"]) < tight(case)
    real = mask[..., None].astype(mx.bool_)
    assert gap(mx.where(real, found["encoder.out"], 0), np.where(np.array(real), wanted["encoder_out"], 0)) < 2e-4
    names = {"encoder_attention": "encoder.layers.{}.attn", "attention": "decoder.layers.{}.attn"}
    names["cross_attention"] = "decoder.layers.{}.cross"
    patterns = [name for name in wanted if name.split(".")[0] in names]
    assert len(patterns) == len([name for name in found if name.endswith(".pattern")])
    for name in patterns:
        kind, layer = name.split(".")
        rows = slice(0, 1) if kind == "encoder_attention" else slice(None)  # rows of padding are nobody's
        pattern = found[f"{names[kind].format(layer)}.op.pattern"]
        assert gap(pattern[rows], wanted[name][rows]) < 4e-5, name


@pytest.mark.parametrize("case", ROOMY)
def test_greedy_text_is_that_of_transformers(case: str) -> None:
    settings = {"max_tokens": 12, "stop_at_end": False}
    steps = loaded(case).generate(inputs(case)[0][:1], **settings)
    assert [step.token for step in steps] == expected(case)["greedy_ids"][0].tolist()


@pytest.mark.parametrize("case", CASES)
def test_watching_does_not_change_the_result(case: str) -> None:
    ids, mask, target = inputs(case)
    plain = loaded(case)(ids, attention_mask=mask, decoder_input_ids=target)
    with seen("*.scores"):
        watched = loaded(case)(ids, attention_mask=mask, decoder_input_ids=target)
    assert gap(watched, plain) < tight(case)


# --- padding, caches, rows ---


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("before", [0, 5])
def test_padding_of_the_source_changes_nothing_wherever_it_stands(case: str, before: int) -> None:
    model, (ids, _, target) = loaded(case), inputs(case)
    text, more = ids[:1, :9], ids.shape[1] - 9
    alone = model(text, decoder_input_ids=target[:1])
    fill = [mx.full((1, n), 6, ids.dtype) for n in (before, more - before)]
    both = mx.concatenate([mx.concatenate([fill[0], text, fill[1]], axis=1), ids[:1]])
    mask = mx.array([[0] * before + [1] * 9 + [0] * (more - before), [1] * ids.shape[1]])
    found = model(both, attention_mask=mask, decoder_input_ids=mx.concatenate([target[:1]] * 2))
    assert gap(found[:1], alone) < tight(case)
    assert gap(found[1:], model(ids[:1], decoder_input_ids=target[:1])) < tight(case)


@pytest.mark.parametrize("case", ROOMY)
@pytest.mark.parametrize("sizes", [(1,) * 7, (2, 4, 1)], ids=["steps", "chunks"])
def test_cached_decoding_equals_one_pass(case: str, sizes: tuple[int, ...]) -> None:
    model, (ids, mask, target) = loaded(case).model, inputs(case)
    whole = model.logits(model.decode(target[:, :7], model.encode(ids, attention_mask=mask), attention_mask=mask))
    memory, kept, at, parts = model.encode(ids, attention_mask=mask), model.new_cache(), 0, []
    for size in sizes:
        given = (memory,) if at == 0 else ()
        x = model.decode(target[:, at : at + size], *given, cache=kept, attention_mask=mask if given else None)
        parts.append(model.logits(x))
        at += size
        assert kept.length == at
    assert gap(mx.concatenate(parts, axis=1), whole) < tight(case)


def test_keys_and_values_of_the_memory_are_made_once() -> None:
    model, (ids, _, target) = loaded("t5").model, inputs("t5")
    kept = model.new_cache()
    with seen("*.cross.op.k") as found:
        model.decode(target[:, :1], model.encode(ids), kept)
    assert len(found) == 3
    with seen("*.cross.op.k") as again:  # shown in every step, and there is no memory to make them of
        model.decode(target[:, 1:2], cache=kept)
    assert all(mx.array_equal(again[name], keys).item() for name, keys in found.items())
    with pytest.raises(UsageError, match="memory: found none"):
        model.decode(target[:, :1], cache=model.new_cache())


def test_the_encoder_remembers_nothing() -> None:
    assert all(path.startswith("decoder.") for path in loaded("t5").new_cache().states)


@pytest.mark.parametrize("case", ["t5", "marian"])
def test_rows_of_a_cache_can_be_chosen_again_and_again(case: str) -> None:
    model, (ids, mask, target) = loaded(case).model, inputs(case)
    kept = model.new_cache()
    model.decode(target[:, :4], model.encode(ids, attention_mask=mask), kept, attention_mask=mask)
    kept.take([1, 0, 1])
    rows = mx.array([1, 0, 1])
    whole = model.decode(target[rows], model.encode(ids, attention_mask=mask)[rows], attention_mask=mask[rows])
    assert gap(model.decode(target[rows][:, 4:], cache=kept), whole[:, 4:]) < TIGHT
    kept.trim(target.shape[1] - 4)
    kept.take([1])
    assert gap(model.decode(target[:1, 4:], cache=kept), whole[1:2, 4:]) < TIGHT


# --- parts ---


def reference_bucket(ahead: int, buckets: int, farthest: int, causal: bool) -> int:
    """The definition in T5's code (arXiv 1910.10683), in float64."""
    first = 0
    if not causal:
        buckets //= 2
        first, ahead = (buckets if ahead > 0 else 0), -abs(ahead)
    distance, near = max(-ahead, 0), buckets // 2
    if distance < near:
        return first + distance
    wide = np.log(np.float64(distance) / near) / np.log(np.float64(farthest) / near) * (buckets - near)
    return first + min(near + int(wide), buckets - 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (6, 11), (64, 128), (9, 40)])
def test_relative_bias_is_that_of_its_definition(buckets: int, farthest: int, causal: bool) -> None:
    bias = RelativeBias(buckets, 2, farthest, causal=causal)
    bias.table = mx.random.normal((buckets, 2), key=mx.random.key(1))
    found = bias.bias(range(150, 160), range(320))
    numbers = [[reference_bucket(k - q, buckets, farthest, causal) for k in range(320)] for q in range(150, 160)]
    assert gap(found, bias.table[mx.array(numbers)].transpose(2, 0, 1)) == 0


def test_layers_share_one_table_of_distances_that_is_stored_once() -> None:
    names = [name for name in leaves(loaded("t5").model) if "table" in name]
    assert sorted(names) == ["decoder.position.table", "encoder.position.table"]


def test_a_bias_that_cannot_be_is_refused() -> None:
    for buckets, farthest, causal in ((2, 20, False), (8, 4, True), (3, 20, False)):
        with pytest.raises(ValueError, match="do not go together"):
            RelativeBias(buckets, 2, farthest, causal=causal)


@pytest.mark.parametrize("interleaved", [False, True])
def test_sinusoids_are_those_of_the_paper(interleaved: bool) -> None:
    at = np.arange(700, 703)[:, None] / 10000 ** (np.arange(0, 16, 2) / 16)
    waves = np.stack([np.sin(at), np.cos(at)], axis=-1 if interleaved else 1).reshape(3, 16)
    assert gap(Sinusoidal(16, interleaved=interleaved)(3, 700), waves) < 1e-6
    rows = Sinusoidal(16, interleaved=interleaved)(3, mx.array([700, -2]))
    assert gap(rows[0], waves) < 1e-6 and rows[1, 0].tolist() == rows[1, 2].tolist()


def test_closed_sinusoids_end_at_ten_thousand() -> None:
    at = np.arange(5, 8)[:, None] * np.exp(-np.arange(8) * np.log(10000) / 7)
    waves = np.concatenate([np.sin(at), np.cos(at)], axis=1)
    assert gap(Sinusoidal(16, first=2, closed=True)(3, 3), waves) < 1e-6
    with pytest.raises(UsageError, match="found a text of 9 tokens, but the model has 8 positions"):
        Sinusoidal(16, 8)(2, 7)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_experts_take_the_first_tokens_of_each_text_up_to_their_capacity(capacity: int) -> None:
    chosen = mx.random.randint(0, 3, (2, 17, 1), key=mx.random.key(3))
    found = np.array(taken(chosen, 3, capacity))
    for row, experts in enumerate(np.array(chosen)):
        counts = [0, 0, 0]
        for place, expert in enumerate(experts[:, 0]):
            counts[expert] += 1
            assert bool(found[row, place, 0]) == (counts[expert] <= capacity)


def test_tokens_do_overflow_in_the_case_that_is_held_against_transformers() -> None:
    ids, mask, target = inputs("switch-full")
    with seen("*.kept") as found:
        loaded("switch-full")(ids, attention_mask=mask, decoder_input_ids=target)
    assert len(found) == 3
    assert all(0 < kept.sum().item() < kept.size for kept in found.values())
    sparse = [m.path for m in loaded("switch-full").model.modules() if isinstance(m, Mixture)]
    assert sorted(sparse) == ["decoder.layers.1.mlp.op", "encoder.layers.0.mlp.op", "encoder.layers.1.mlp.op"]


def test_cross_attention_is_softmax_over_the_memory() -> None:
    part = CrossAttention(8, heads=4, kv_heads=2, head_dim=3, memory_dim=5)
    x, memory = (mx.random.normal((2, n, d), key=mx.random.key(n)) for n, d in ((3, 8), (6, 5)))
    found = part(x, Context.alone(x, memory))
    w = {name: np.array(value, np.float64) for name, value in leaves(part).items()}
    q = (np.array(x) @ w["q.weight"].T).reshape(2, 3, 4, 3)
    k, v = np.split((np.array(memory) @ w["kv.weight"].T).reshape(2, 6, 4, 3), 2, axis=2)
    scores = np.einsum("blhd,bshd->bhls", q, np.repeat(k, 2, axis=2)) / np.sqrt(3)
    pattern = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    z = np.einsum("bhls,bshd->blhd", pattern, np.repeat(v, 2, axis=2)).reshape(2, 3, 12)
    assert gap(found, z @ w["out.weight"].T) < 1e-5


# --- checkpoints as they lie on the hub ---


def test_copies_of_the_embedding_are_understood_and_must_be_equal(tmp_path: Path) -> None:
    weights, (ids, _, target) = tensors(GOLDEN / "t5" / "model.safetensors"), inputs("t5")
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    more = weights | dict.fromkeys(copies, weights["shared.weight"])
    more["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = mx.zeros((8, 4))
    found = mt.load(written(tmp_path / "all", more, "t5"), dtype="float32")
    wanted = loaded("t5")(ids, decoder_input_ids=target)
    assert gap(found(ids, decoder_input_ids=target), wanted) == 0
    alone = {k: v for k, v in more.items() if k != "shared.weight"}
    found = mt.load(written(tmp_path / "alone", alone, "t5"), dtype="float32")
    assert gap(found(ids, decoder_input_ids=target), wanted) == 0
    for name in copies:
        with pytest.raises(BadInput, match=rf"{name}.*differs from embed\.tokens\.weight"):
            mt.load(written(tmp_path / name, more | {name: mx.zeros((131, 48))}, "t5"))


def test_a_head_of_its_own_counts_where_the_config_unties_it(tmp_path: Path) -> None:
    case = "t5-untied"
    weights, (ids, _, target) = tensors(GOLDEN / case / "model.safetensors"), inputs(case)
    assert not loaded(case).model.tied
    same = mt.load(written(tmp_path, weights | {"lm_head.weight": weights["shared.weight"]}, case), dtype="float32")
    assert same.model.tied
    got, other = (m(ids, decoder_input_ids=target) for m in (same, loaded(case)))
    assert gap(got, other) > 0.1
    with pytest.raises(BadInput, match=r"lm_head\.weight"):
        mt.load(written(tmp_path, weights, case, tie_word_embeddings=True, scale_decoder_outputs=True))


def test_tables_of_computed_positions_may_be_stored(tmp_path: Path) -> None:
    weights, (ids, _, target) = tensors(GOLDEN / "marian" / "model.safetensors"), inputs("marian")
    table = Sinusoidal(48)(64, 0)
    weights |= {f"model.{side}.embed_positions.weight": table for side in ("encoder", "decoder")}
    found = mt.load(written(tmp_path, weights, "marian"), dtype="float32")
    assert gap(found(ids, decoder_input_ids=target), loaded("marian")(ids, decoder_input_ids=target)) == 0


@pytest.mark.parametrize("case", CASES)
def test_conversion_and_export_give_the_checkpoint_back_bit_by_bit(case: str, tmp_path: Path) -> None:
    mt.convert(GOLDEN / case, tmp_path / "ours")
    ids, mask, target = inputs(case)
    ours = mt.load(tmp_path / "ours", dtype="float32")(ids, attention_mask=mask, decoder_input_ids=target)
    assert gap(ours, loaded(case)(ids, attention_mask=mask, decoder_input_ids=target)) == 0
    mt.export(tmp_path / "ours", tmp_path / "theirs")
    source, back = (tensors(folder / "model.safetensors") for folder in (GOLDEN / case, tmp_path / "theirs"))
    assert source.keys() == back.keys()
    assert all(mx.array_equal(source[name], back[name]).item() for name in source)


# --- what is refused ---


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("t5", {"colour": "red"}, "colour"),
        ("t5", {"feed_forward_proj": "gated-red"}, "feed_forward_proj"),
        ("t5", {"relative_attention_num_buckets": 1}, "do not go together"),
        ("t5", {"is_decoder": True}, "is_decoder"),
        ("switch", {"router_dtype": "bfloat16"}, "router_dtype"),
        ("bart", {"normalize_before": True}, "normalize_before"),
        ("bart", {"encoder_attention_heads": 7}, "encoder_attention_heads"),
        ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("marian", {"num_hidden_layers": 5}, "num_hidden_layers"),
        ("m2m_100", {"d_model": 25}, "even number of features"),
        ("mbart", {"decoder_attention_heads": 5}, "decoder_attention_heads"),
    ],
)
def test_settings_that_are_not_understood_are_errors(
    case: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        mt.load(written(tmp_path, tensors(GOLDEN / case / "model.safetensors"), case, **changes))


def test_arguments_that_do_not_go_together_are_refused() -> None:
    model, (ids, mask, target) = loaded("bart"), inputs("bart")
    for given, message in (
        ({"decoder_input_ids": target[:1]}, "found 1 rows, expected 2"),
        ({"decoder_input_ids": target + 1000}, "ids: found"),
        ({"decoder_input_ids": target, "attention_mask": mask[:, :3]}, "attention_mask: found shape"),
        ({"decoder_input_ids": mx.zeros((2, 65), mx.int32)}, "the model has 64 positions"),
    ):
        with pytest.raises(UsageError, match=message):
            model(ids, **given)


# --- every setting, wrong and left out ---

DEFAULTS: dict[str, dict[str, object]] = json.loads((GOLDEN / "seq2seq_defaults.json").read_text())
DEPTHS = ("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def settings_of(case: str) -> list[str]:
    """The settings in a case's config that its family reads and that decide something in it."""
    values = config_of(case)
    named = values.keys() & RULES.keys() - HARMLESS - {"tie_word_embeddings"} - SAID.get(case, set())
    return sorted(key for key in named if values[key] is not None)


SAID = {
    "t5": {"feed_forward_proj"},  # which dense_act_fn and is_gated_act say again
    "t5-v1.1": {"feed_forward_proj"},
    "t5-untied": {"feed_forward_proj", "scale_decoder_outputs"},  # whose weights are refused under another
    "switch": {"num_sparse_encoder_layers", "num_sparse_decoder_layers", "expert_capacity"},
    "switch-full": {"num_sparse_encoder_layers", "num_sparse_decoder_layers", "decoder_sparse_step"},
    "marian": {"decoder_vocab_size"},
}
"""Settings that do not show in a case: others say the same, or its experts have room for all."""


def wrong(value: object) -> object:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "tanh"
    assert isinstance(value, int | float)
    return value * 1e4 if isinstance(value, float) else 2 * value


@pytest.mark.parametrize("case", CASES)
def test_each_setting_shows_in_the_logits_or_in_an_error(case: str, tmp_path: Path) -> None:
    weights, (ids, mask, target) = tensors(GOLDEN / case / "model.safetensors"), inputs(case)
    found = settings_of(case)
    assert len(found) > 6
    for key in found:
        try:
            model = mt.load(
                written(tmp_path / key, weights, case, **{key: wrong(config_of(case)[key])}), dtype="float32"
            )
        except BadInput:
            continue
        got = model(ids, attention_mask=mask, decoder_input_ids=target)
        assert gap(got, expected(case)["logits"]) > tight(case), key


def shapes_and_settings(config: dict[str, object]) -> dict[str, str]:
    """All that a config decides about a model: shapes, and what its modules keep besides arrays."""
    values = Config(config)
    model = family(values.model_type).model(values)
    values.finish()
    found = {name: str(value.shape) for name, value in leaves(model).items()}
    for path, module in model.named_modules():
        kept = {k: v for k, v in module.items() if isinstance(v, bool | int | float | str | tuple)}
        plain = {k: v for k, v in vars(module).items() if k != "path" and not k.startswith("_")}
        found |= {f"{path}.{k}": str(v) for k, v in {**kept, **plain}.items()}
    return found


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_key_left_out_means_what_it_means_to_transformers_or_is_missed(name: str) -> None:
    shorter = {key: 4 for key in DEPTHS if DEFAULTS[name].get(key) is not None}
    steps = {f"{side}_sparse_step": 1 for side in ("encoder", "decoder")} if "switch" in name else {}
    whole = DEFAULTS[name] | shorter | steps | {"model_type": name}
    wanted = shapes_and_settings(whole)
    for key in whole.keys() - {"model_type", *DEPTHS}:
        try:
            found = shapes_and_settings({k: v for k, v in whole.items() if k != key})
        except BadInput as error:
            assert f"{key}: missing" in str(error)
        else:
            assert found == wanted, key
    class_says = {k: v for k, v in family(name).absent.items() if k in DEFAULTS[name] and not isinstance(v, Other)}
    assert class_says == {k: DEFAULTS[name][k] for k in class_says}
