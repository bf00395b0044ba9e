"""Encoders against transformers and against themselves: padding, names of all kinds, sentence embeddings."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from cli_models import invoke
from helpers import GOLDEN, cases_of, expected, gap, limit, seen, tensors

import mlx_tformer as mt
from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.nn import Around, Everything, pooled, visible

CASES = cases_of("mlm")
TIGHT = 5e-5


def loaded(case: str) -> mt.EncoderModel:
    found = mt.load(GOLDEN / case, dtype="float32")
    assert isinstance(found, mt.EncoderModel)
    return found


def inputs(case: str) -> tuple[mx.array, mx.array]:
    """Ids and mask of a case, (2, 24), of which one row is padded on the right."""
    return mx.array(expected(case)["input_ids"]), mx.array(expected(case)["attention_mask"])


def of_text(x: mx.array, mask: mx.array) -> mx.array:
    """What stands at text; zeros at padding."""
    return mx.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0)


def written(folder: Path, weights: dict[str, mx.array], case: str, **changes: object) -> Path:
    """A checkpoint with these weights, and the config of a case with changes."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = json.loads((GOLDEN / case / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- against transformers ---


@pytest.mark.parametrize("case", CASES)
def test_logits_and_hidden_states_and_patterns_are_those_of_transformers(case: str) -> None:
    model, wanted, (ids, mask) = loaded(case), expected(case), inputs(case)
    assert mask.min().item() == 0
    with seen("*") as found:
        logits = model(ids, attention_mask=mask)
    want = mx.array(wanted["logits"])
    assert gap(of_text(logits, mask), of_text(want, mask)) < min(TIGHT, limit(wanted["logits"]))
    layers = len(model.model.encoder.layers)
    paths = ["embed.out", *(f"encoder.layers.{i}.out" for i in range(layers - 1)), "encoder.out"]
    for i, path in enumerate(paths):
        assert gap(of_text(found[path], mask), of_text(mx.array(wanted[f"hidden.{i}"]), mask)) < TIGHT, path
    for i in range(layers):
        rows = (of_text(x.swapaxes(1, 2), mask) for x in (found[f"encoder.layers.{i}.attn.op.pattern"],))
        want = of_text(mx.array(wanted[f"attention.{i}"]).swapaxes(1, 2), mask)
        assert gap(next(rows), want) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_watching_does_not_change_the_result(case: str) -> None:
    model, (ids, mask) = loaded(case), inputs(case)
    plain = model(ids, attention_mask=mask)
    with seen("*.pattern"):
        assert gap(of_text(model(ids, attention_mask=mask), mask), of_text(plain, mask)) < TIGHT


# --- padding ---


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("before", [0, 3, 7])
def test_padding_before_and_behind_a_text_changes_nothing(case: str, before: int) -> None:
    model, ids = loaded(case), inputs(case)[0]
    text = ids[:1, :17]
    alone = model(text)
    for filler in (0, 1, 63):
        pads = [mx.full((1, n), filler, ids.dtype) for n in (before, 7 - before)]
        batch = mx.concatenate([mx.concatenate([pads[0], text, pads[1]], axis=1), ids[:1]])
        mask = mx.array([[0] * before + [1] * 17 + [0] * (7 - before), [1] * 24])
        found = model(batch, attention_mask=mask)
        assert gap(found[:1, before : before + 17], alone) < TIGHT
        assert gap(found[1:], model(ids[:1])) < TIGHT


@pytest.mark.parametrize("case", CASES)
def test_a_mask_of_ones_is_no_mask_and_every_token_counts(case: str) -> None:
    model, ids = loaded(case), inputs(case)[0]
    assert gap(model(ids, attention_mask=mx.ones_like(ids)), model(ids)) < TIGHT
    other = mx.concatenate([ids[:, :-1], (ids[:, -1:] + 1) % 60], axis=1)
    assert gap(model(other)[:, 0], model(ids)[:, 0]) > 1e-3  # the first token sees the last


def test_keys_of_padding_are_hidden_under_every_mask() -> None:
    real = mx.array([[1, 0, 1, 1]]).astype(mx.bool_)
    whole = visible(Everything(), range(4), range(4), None, real)
    near = visible(Around(1), range(4), range(4), None, real)
    assert isinstance(whole, mx.array) and isinstance(near, mx.array)
    assert whole.tolist() == [[[[True, False, True, True]]]]
    assert near.astype(mx.int32).tolist() == [[[[1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1]]]]
    assert visible(Around(3), range(4), range(4)) is None


# --- checkpoints as they lie on the hub ---


def bare(weights: dict[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


@pytest.mark.parametrize("case", [case for case in CASES if case != "modernbert"])
def test_a_bare_model_without_prefix_gives_its_hidden_states(case: str, tmp_path: Path) -> None:
    weights = bare(tensors(GOLDEN / case / "model.safetensors"), f"{case}.")
    model, (ids, mask) = mt.load(written(tmp_path, weights, case), dtype="float32"), inputs(case)
    assert not model.has_head
    assert gap(model(ids, attention_mask=mask), loaded(case).hidden(ids, attention_mask=mask)) == 0


def test_gamma_and_beta_position_ids_heads_of_other_tasks_and_a_second_decoder_are_understood(tmp_path: Path) -> None:
    weights = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors(GOLDEN / "bert" / "model.safetensors").items()
    }
    weights |= {
        "bert.embeddings.position_ids": mx.arange(64)[None],
        "bert.pooler.dense.weight": mx.zeros((48, 48)),
        "bert.pooler.dense.bias": mx.zeros((48,)),
        "cls.seq_relationship.weight": mx.zeros((2, 48)),
        "cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": weights["cls.predictions.bias"],
    }
    model, (ids, mask) = mt.load(written(tmp_path / "hub", weights, "bert"), dtype="float32"), inputs("bert")
    assert gap(model(ids, attention_mask=mask), loaded("bert")(ids, attention_mask=mask)) == 0
    assert ["pooler" in note or "next sentence" in note for note in model.notes] == [True, True]
    weights["cls.predictions.decoder.weight"] = mx.zeros((131, 48))
    with pytest.raises(BadInput, match=r"differs from embed\.tokens\.weight"):
        mt.load(written(tmp_path / "wrong", weights, "bert"))


@pytest.mark.parametrize("case", CASES)
def test_converting_and_exporting_gives_the_same_bits_and_the_same_logits(case: str, tmp_path: Path) -> None:
    made = mt.convert(GOLDEN / case, tmp_path / "ours").path
    back = mt.export(made, tmp_path / "theirs").path
    before, after = tensors(GOLDEN / case / "model.safetensors"), tensors(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name].view(mx.uint16), after[name].view(mx.uint16)).item() for name in before)
    ids, mask = inputs(case)
    ours = mt.load(made, dtype="float32")(ids, attention_mask=mask)
    assert mx.array_equal(ours, loaded(case)(ids, attention_mask=mask)).item()


def test_a_decoder_of_this_kind_is_refused(tmp_path: Path) -> None:
    weights = tensors(GOLDEN / "bert" / "model.safetensors")
    with pytest.raises(BadInput, match="is_decoder"):
        mt.load(written(tmp_path, weights, "bert", is_decoder=True))


# --- what callers see ---


def test_what_an_encoder_cannot_do_is_refused_in_one_line() -> None:
    model, (ids, _) = loaded("bert"), inputs("bert")
    with pytest.raises(UsageError, match="is an encoder"):
        model.generate("a")
    with pytest.raises(UsageError, match="is an encoder"):
        model.chat([])
    with pytest.raises(UsageError, match="no tokenizer"):
        model.embed("a")
    with pytest.raises(UsageError, match="pool: found 'max'"):
        model.embed("a", pool="max")
    with pytest.raises(UsageError, match="attention_mask: found shape"):
        model(ids, attention_mask=mx.ones((1, 3)))
    with pytest.raises(UsageError, match="token_types: found 2"):
        model(ids, token_types=mx.full(ids.shape, 2))
    with pytest.raises(UsageError, match="a text of 65 tokens"):
        model(mx.zeros((1, 65), dtype=mx.int32))


def test_the_types_of_tokens_move_the_result() -> None:
    model, (ids, _) = loaded("bert"), inputs("bert")
    first, second = (model(ids, token_types=mx.full(ids.shape, kind)) for kind in (0, 1))
    assert gap(first, model(ids)) == 0
    assert gap(first, second) > 1e-2


def test_sentences_of_a_real_model_are_as_alike_as_they_are_known_to_be(minilm: mt.EncoderModel) -> None:
    texts = [
        "A man is eating food.",
        "A man is eating a piece of bread.",
        "Stock prices fell on Monday morning.",
    ]
    batch = minilm.embed(texts)
    assert batch.shape == (3, 384)
    assert (batch[0] @ batch[1]).item() == pytest.approx(0.755, abs=0.005)
    assert (batch[0] @ batch[2]).item() < 0.2
    for pool in ("mean", "cls", "last"):
        for normalise in (True, False):
            together = minilm.embed(texts, pool=pool, normalise=normalise)
            alone = mx.concatenate([minilm.embed(text, pool=pool, normalise=normalise) for text in texts])
            assert gap(together, alone) < TIGHT
    assert gap(mx.linalg.norm(batch, axis=-1), mx.ones((3,))) < 1e-5


def test_a_text_that_is_too_long_is_refused_by_its_number(minilm: mt.EncoderModel) -> None:
    with pytest.raises(UsageError, match="602 tokens in text 1"):
        minilm.embed(["a", "a " * 600])


def test_a_real_model_quantized_to_8_bits_is_nearly_the_same(minilm: mt.EncoderModel, tmp_path: Path) -> None:
    made = mt.convert(minilm.origin, tmp_path / "small", quantize=8)
    assert any("embed.types" in line and "added to every token" in line for line in made.unquantized)
    texts = ["A man is eating food.", "A man is eating a piece of bread."]
    small = mt.load(made.path).embed(texts)
    assert (small * minilm.embed(texts)).sum(axis=-1).min().item() > 0.999


def test_commands_that_need_a_decoder_say_so_in_one_line() -> None:
    folder = str(GOLDEN / "bert")
    done = invoke("generate", "-m", folder, "hi")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1 and "is an encoder" in done.stderr


def test_the_mean_of_a_long_text_does_not_overflow_in_float16() -> None:
    hidden, mask = mx.full((1, 4000, 2), 30.0, mx.float16), mx.arange(4000)[None] < 3000
    assert gap(pooled(hidden, mask, "mean"), mx.full((1, 2), 30.0)) == 0
    assert pooled(hidden, None, "mean").dtype == mx.float16
