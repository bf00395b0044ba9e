"""Random models from sizes: every family, as large as asked, ready to learn, and the same after save and load."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import gap, leaves

import mlx_tformer as mt
from mlx_tformer.card import card
from mlx_tformer.encoder import EncoderModel
from mlx_tformer.families import known
from mlx_tformer.nn import LM, Attention, LatentAttention, Mamba, Mamba2, Mixture, Seq2Seq
from mlx_tformer.seq2seq import Seq2SeqModel

Wrapped = mt.LanguageModel | EncoderModel | Seq2SeqModel | mt.VisionModel
SIZES = {"dim": 48, "layers": 3, "vocab": 99}
SEEING = {"dim": 48, "layers": 3, "image_size": 24, "patch_size": 8}
"""Sizes of a family that reads images."""
HEADLESS = ("mamba",)
"""Families that have no heads."""
FAMILIES = known()
IDS = mx.array([[1, 5, 2, 7, 98, 3]])


def made(family: str, **sizes: object) -> Wrapped:
    heads = {} if family in HEADLESS else {"heads": 6}
    return mt.build(family, **(SEEING if family == "vit" else SIZES), **heads, **sizes)


def run(lm: Wrapped) -> mx.array:
    if isinstance(lm, mt.VisionModel):
        return lm(mx.random.normal((2, 3, 24, 24), key=mx.random.key(1)))
    return lm(IDS, decoder_input_ids=IDS) if isinstance(lm, Seq2SeqModel) else lm(IDS)


def stacks(lm: Wrapped) -> list:
    model = lm.model
    if isinstance(model, Seq2Seq):
        return [model.encoder, model.decoder]
    return [model.decoder if isinstance(model, LM) else model.encoder]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_sizes_that_are_asked_for(family: str) -> None:
    lm = made(family)
    assert [len(stack.layers) for stack in stacks(lm)] == [3] * len(stacks(lm))
    if isinstance(lm, mt.VisionModel):
        assert lm.model.embed.size == (24, 24) and lm.model.embed.first.shape[-1] == 48
    else:
        assert lm.vocab == 99 and lm.model.embed.tokens.weight.shape == (99, 48)
    heads = {m.heads for m in lm.model.modules() if isinstance(m, Attention | LatentAttention | Mamba2)}
    assert heads == (set() if family in HEADLESS else {6})
    assert isinstance(lm, mt.VisionModel) or lm.model.context in (None, 256)
    assert lm.config.model_type == family


@pytest.mark.parametrize("family", FAMILIES)
def test_a_built_model_is_ready_to_learn_and_the_same_once_saved_and_loaded(family: str, tmp_path: Path) -> None:
    lm = made(family, seed=3)
    before = run(lm)
    assert np.isfinite(np.array(before)).all() and before.var().item() > 0
    for name, value in leaves(lm.model).items():
        flat = value.ndim < 2 or name.endswith(("norm.weight", "bias"))
        assert flat or value.var().item() > 0, name
    again = mt.load(mt.save(lm, tmp_path / "model"))
    assert type(again) is type(lm) and gap(run(again), before) == 0
    assert leaves(again.model).keys() == leaves(lm.model).keys()


@pytest.mark.parametrize("family", ["deepseek_v3", "llama", "jamba", "mamba2", "gpt2"])
def test_a_card_of_a_built_model_works(family: str) -> None:
    lm = made(family)
    assert "99" in card(lm.model, trained=lm.model.context).render()


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("family", ["falcon", "llama", "qwen3"])
def test_heads_are_grouped_as_asked(family: str, kv_heads: int) -> None:
    lm = made(family, kv_heads=kv_heads)
    assert {m.kv_heads for m in lm.model.modules() if isinstance(m, Attention)} == {kv_heads}


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe"])
def test_experts_are_as_many_as_asked(family: str) -> None:
    lm = made(family, experts=8, experts_per_token=3)
    found = [m for m in lm.model.modules() if isinstance(m, Mixture)]
    assert found and all((m.experts.count, m.router.top) == (8, 3) for m in found)


def test_a_seed_decides_the_weights_whatever_was_drawn_before() -> None:
    first = leaves(made("jamba", seed=5).model)
    mx.random.seed(77)
    again, other = leaves(made("jamba", seed=5).model), leaves(made("jamba", seed=6).model)
    assert all(mx.array_equal(first[name], again[name]).item() for name in first)
    assert not mx.array_equal(first["embed.tokens.weight"], other["embed.tokens.weight"]).item()


def test_weights_are_as_wide_as_asked() -> None:
    for lm, wanted in ((made("llama"), 0.02), (made("llama", initializer_range=0.1), 0.1)):
        assert lm.model.embed.tokens.weight.std().item() == pytest.approx(wanted, rel=0.05)
        assert leaves(lm.model)["decoder.layers.0.mlp.op.down.weight"].std().item() == pytest.approx(wanted, rel=0.05)


def test_state_spaces_begin_with_small_steps() -> None:
    mixers = [m for m in made("mamba").model.modules() if isinstance(m, Mamba)]
    steps = np.concatenate([np.array(mx.logaddexp(m.dt.bias, 0)) for m in mixers])
    assert steps.min() > 0.99e-3 and steps.max() < 0.101 and 0.005 < np.median(steps) < 0.02


def test_a_dtype_keeps_what_must_be_precise() -> None:
    lm = mt.build("deepseek_v3", dtype="bfloat16", dim=32)
    kinds = {name: value.dtype for name, value in leaves(lm.model).items()}
    assert kinds.pop("decoder.layers.1.mlp.op.router.correction") == mx.float32
    assert set(kinds.values()) == {mx.bfloat16} and lm.dtype == mx.bfloat16


def test_a_head_is_made_room_for() -> None:
    assert mt.build("bert", **SIZES, parts=["head.dense.weight"])(IDS).shape == (1, 6, 99)
    assert mt.build("bert", **SIZES)(IDS).shape == (1, 6, 48)


def test_a_family_takes_the_keys_of_its_own_configs() -> None:
    lm = mt.build("llama", hidden_size=32, num_hidden_layers=1, rope_theta=500.0, tie_word_embeddings=True)
    attention = next(m for m in lm.model.modules() if isinstance(m, Attention))
    assert lm.model.tied and attention.position.theta == 500.0 and attention.head_dim == 8


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama", {"dims": 3}, "dims: llama has no such size, expected dim, "),
        ("llama", {"layrs": 3}, "layrs: llama has no such size, expected layers, "),
        ("gpt2", {"experts": 3}, "experts: gpt2 has no such size"),
        ("mamba", {"hidden": 3}, "hidden: mamba has no such size"),
        ("llama", {"dim": 64, "hidden_size": 64}, "hidden_size: given twice, as dim too"),
        ("llama", {"dim": -1}, "dim: found -1, expected a whole number from 1"),
        ("llama", {"heads": 0}, "heads: found 0, expected a whole number from 1"),
        ("llama", {"dim": "x"}, "dim: found 'x', expected a whole number"),
        ("llama", {"heads": 4, "kv_heads": 3}, "llama: sizes: num_key_value_heads: found 3, expected a divisor"),
        ("llama", {"dtype": "int8"}, "dtype: found 'int8', expected one of float32"),
        ("llama", {"initializer_range": "x"}, "initializer_range: found 'x', expected a number above 0"),
        ("lama", {}, "found 'lama', expected one of llama"),
        ("jamba", {"attn_layer_offset": 9}, "jamba: sizes: attn_layer_offset: found 9, expected less than"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(family: str, sizes: dict[str, object], message: str) -> None:
    with pytest.raises(mt.UsageError) as error:
        mt.build(family, **sizes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_models_that_can_do_more_than_read_do_it_once_saved(tmp_path: Path) -> None:
    seeing = mt.build("vit", **SEEING, heads=6, parts=["classifier.weight"], num_labels=5)
    again = mt.load(mt.save(seeing, tmp_path / "vit"))
    assert run(again).shape == (2, 5) and gap(run(again), run(seeing)) == 0 and again.model.has_head
    told = {"decoder_start_token_id": 3, "max_new_tokens": 6, "no_repeat_ngram_size": 1}
    writing = replace(made("t5", seed=4), generation_config=told)
    read = mt.load(mt.save(writing, tmp_path / "t5"))
    assert isinstance(read, Seq2SeqModel) and read.rules == writing.rules
    texts = [[step.token for step in lm.generate([5, 9, 20], beams=2)] for lm in (read, writing)]
    assert texts[0] == texts[1] and len({*texts[0]}) == len(texts[0]) <= 6


def test_a_trained_model_is_saved_with_its_tokenizer(shakespeare: mt.LanguageModel, tmp_path: Path) -> None:
    again = mt.load(mt.save(shakespeare, tmp_path / "model"))
    assert isinstance(again, mt.LanguageModel) and again.tokens("To be").ids == shakespeare.tokens("To be").ids
    assert gap(again(IDS), shakespeare(IDS)) == 0 and again.recommended_sampling == shakespeare.recommended_sampling


def test_packed_weights_are_saved_packed(tmp_path: Path) -> None:
    lm = mt.load(mt.convert("shakespeare", tmp_path / "packed", quantize=4).path)
    again = mt.load(mt.save(lm, tmp_path / "again"))
    assert mx.array_equal(again(IDS), lm(IDS)).item()
    assert {k: v.dtype for k, v in leaves(again.model).items()} == {k: v.dtype for k, v in leaves(lm.model).items()}


def test_a_folder_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    mt.save(made("gpt2"), tmp_path / "model")
    with pytest.raises(mt.InputOutputError, match="not empty"):
        mt.save(made("gpt2"), tmp_path / "model")


@pytest.mark.parametrize("name", [name for name in known() if isinstance(mt.build(name), Seq2SeqModel)])
def test_encoder_decoders_of_a_small_vocabulary_write(name: str) -> None:
    model = mt.build(name, vocab=60)
    assert isinstance(model, Seq2SeqModel)
    assert len(list(model.generate(mx.array([[5, 6, 7]]), max_tokens=3, stop_at_end=False))) == 3
    started = mt.build(name, vocab=60, decoder_start_token_id=5)
    assert isinstance(started, Seq2SeqModel) and started.rules.start == 5
