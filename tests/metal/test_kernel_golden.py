"""Whole models whose attention, positions and routers run through our kernels give transformers' logits."""

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import msl
import pytest
from helpers import GOLDEN, attentions, expected, gap, golden, ids_of, limit

import mlx_tformer as mt
from mlx_tformer import kernels
from mlx_tformer.nn import Attention, CrossAttention, Keeping, Module, Rope, Router, attend
from mlx_tformer.nn.packed import PackedKV

# A golden case, and what it asks of the kernels.
CASES = {
    "gemma2": "soft cap, window, wide scale",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "gpt_oss": "sinks, window, YaRN",
    "llama-yarn": "amplitude",
    "phi3-longrope": "amplitude",
    "gptj": "interleaved",
    "llama4": "chunks",
    "deepseek_v3": "latents",
    "deepseek_v3-yarn": "latents, YaRN",
    "olmoe": "a router",
    "granitemoe": "a router of its own kind",
}


@pytest.fixture(autouse=True)
def launched() -> Iterator[Counter[str]]:
    """How often each kernel ran, all by the harness."""
    counts: Counter[str] = Counter()

    def make(**settings):
        kernel = msl.metal_kernel(**settings)

        def run(**launch):
            counts[settings["name"].removeprefix("mlx_tformer_")] += 1
            return kernel(**launch)

        return run

    with kernels.made_by(make):
        yield counts


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, launched):
    model, wanted = golden(case), expected(case)["logits"]
    assert gap(model(ids_of(case)), wanted) < limit(wanted)
    assert launched["attention"] == len(model.decoder.layers)
    assert launched["rope"] == sum(isinstance(op.position, Rope) for op in attentions(model))
    assert launched["router"] == sum(isinstance(module, Router) for module in model.modules())


@pytest.mark.parametrize("case", ["t5", "t5-v1.1"])
def test_encoder_decoders_with_a_bias_by_distance_give_transformers_logits(case, launched):
    lm, answer = mt.load(GOLDEN / case, dtype="float32"), expected(case)
    given = {name: mx.array(answer[name]) for name in ("input_ids", "decoder_input_ids", "attention_mask")}
    found = lm.model(given.pop("input_ids"), **given)
    assert gap(found, answer["logits"]) < limit(answer["logits"])
    attentions = [m for m in lm.model.modules() if isinstance(m, Attention | CrossAttention)]
    assert launched["attention"] == len(attentions)


@pytest.mark.parametrize("case", CASES)
def test_cached_steps_are_those_of_transformers(case, launched):
    model, ids, wanted = golden(case), ids_of(case), expected(case)["logits"]
    cache, start = model.new_cache(24), 0
    for size in (10, 1, 1, 12):
        found = model(ids[:, start : start + size], cache)
        assert gap(found, wanted[:, start : start + size]) < limit(wanted)
        start += size
    layers = len(model.decoder.layers)
    assert launched["attention"] == (2 if "deepseek" in case else 4) * layers
    assert launched["attention_latent"] == (2 if "deepseek" in case else 0) * layers


@pytest.mark.parametrize("case", ["llama-gqa-tied", "bloom"])
def test_a_packed_cache_is_read_by_a_kernel(case, launched):
    model, ids, start = golden(case), ids_of(case), 0
    cache = model.new_cache(24, Keeping(bits=8, start=4))
    for size in (10, 1, 1, 12):
        logits = model(ids[:, start : start + size], cache)
        start += size
    wanted = expected(case)["logits"][:, -12:]
    assert gap(logits, wanted) < 0.05 * wanted.std()
    assert launched["attention_packed"] == 4 * len(model.decoder.layers)
    assert launched["attention"] == 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width, value", [(64, 64), (24, 40), (72, 8)])
def test_attention_over_a_packed_cache_is_that_over_what_it_unpacks_to(width, value, bits, launched):
    state = PackedKV(bits)
    q, k, v = (mx.random.normal(shape) for shape in ((2, 6, 3, width), (2, 2, 9, width), (2, 2, 9, value)))
    k, v = state.append(k, v)
    found = attend(Module(), state.turn(q), k, v, scale=0.2, mask="causal", packed=state.as_keys())
    assert launched == {"attention_packed": 1}
    with kernels.made_by(msl.metal_kernel, "cpu"):
        assert gap(found, attend(Module(), state.turn(q), k, v, scale=0.2, mask="causal")) < 2e-6


def test_keys_and_values_in_other_groups_are_unpacked():
    state = PackedKV(4)
    state.append(mx.zeros((1, 1, 5, 64)), mx.zeros((1, 1, 5, 32)))
    assert state.groups == (64, 32) and state.as_keys() is None
