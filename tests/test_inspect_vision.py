"""Inspecting encoders of images: their tokens are patches, and have no ids."""

from dataclasses import replace

import mlx.core as mx
import pytest
from helpers import cases_of, expected, gap, opened, seen

from mlx_tformer import UsageError, inspect
from mlx_tformer.inspect import sites_of, trace
from mlx_tformer.inspect.pictures import Heads
from mlx_tformer.nn import VisionEncoder


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
    across = {"vit": 4, "vit-oblong": 3}[case]
    assert t.labels() == ["[CLS]", *(f"{i // across},{i % across}" for i in range(count - 1))]
    assert t.patterns(0)[0].keys == t.patterns(0)[0].queries == t.labels()
    assert [one.first for one in (t.picture(), t.picture(1)) if isinstance(one, Heads)] == [None, None]  # on no line
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


@pytest.mark.parametrize("has_head", [True, False])
def test_what_is_about_texts_says_so(has_head: bool) -> None:
    model, pixels = opened("vit"), mx.array(expected("vit")["pixel_values"])
    if not has_head:
        model = replace(model, model=VisionEncoder(model.model.embed, model.model.encoder))
    with trace(model, read=["residual.out"]) as t:
        model(pixels)
    for asked, named in (
        (lambda: inspect.lens(t), "needs a head that says which token"),
        (lambda: inspect.attribution(t, 0), "needs a decoder"),
        (lambda: inspect.head_scores(model), "looks at images"),
    ):
        with pytest.raises(UsageError, match=named):
            asked()


def test_patches_are_swept_by_what_the_model_says_of_labels() -> None:
    model, pixels = opened("vit"), mx.array(expected("vit")["pixel_values"])
    found = inspect.sweep(model, pixels[:1], pixels[1:], lambda logits: logits[:, 3], layers=[1, 2])
    patched = inspect.run(model, pixels[1:], [inspect.patch("residual.out", pixels[:1], layers=1, positions=4)])
    assert found.values[0, 4].item() == pytest.approx(patched[0, 3].item(), abs=1e-4)
    assert found.recovered[1, 0].item() == pytest.approx(1.0, abs=1e-3)  # the first token is what is classified
    with pytest.raises(UsageError, match="no logits of tokens"):
        inspect.sweep(model, pixels[:1], pixels[1:], 3)
