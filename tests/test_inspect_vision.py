"""Inspecting encoders of images: their tokens are patches, and have no ids."""

import mlx.core as mx
import pytest
from helpers import cases_of, expected, gap, opened, seen

from mlx_tformer import inspect
from mlx_tformer.inspect import sites_of, trace


@pytest.mark.parametrize("case", cases_of("vision"))
def test_patterns_and_the_residual_stream_of_images_are_those_of_transformers(case: str) -> None:
    model, e = opened(case), expected(case)
    pixels = mx.array(e["pixel_values"])
    with trace(model, read=["attn.pattern", "embed.out", "residual.out"]) as t:
        model(pixels)
    assert t.check(1e-5) < 1e-5 and gap(t["embed.out"], e["hidden.0"]) < 1e-4
    for layer, pattern in t.by_layer("attn.pattern").items():
        assert gap(pattern, e[f"attention.{layer}"]) < 1e-5
        assert gap(t[f"blocks.{layer}.hook_resid_post"], e[f"hidden.{layer + 1}"]) < 1e-4
    count = t["embed.out"].shape[1]
    assert t.patterns(0)[0].keys == [str(i) for i in range(count)]
    assert gap(inspect.rollout(t)[-1].sum(axis=-1), mx.ones((pixels.shape[0], count))) < 1e-5


@pytest.mark.parametrize("case", cases_of("vision"))
def test_what_is_declared_is_offered_and_edits_reach_it(case: str) -> None:
    model, pixels = opened(case), mx.array(expected(case)["pixel_values"])
    with seen("*") as found:
        plain = model(pixels)
    offered = {path.lstrip(".") for path in found if not path.endswith((".values", ".fused"))}
    assert {site.name for site in sites_of(model.model)} == offered
    cut = inspect.run(model, pixels, [inspect.zero("attn.z", heads={1: [0]}, positions=[0])])
    assert gap(cut, plain) > 1e-3
