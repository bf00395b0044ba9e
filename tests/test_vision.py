"""Encoders of images against transformers and against themselves, and pictures on their way to numbers."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import GOLDEN, cases_of, config_of, expected, gap, limit, seen, tensors
from PIL import Image

import mlx_tformer as mt
from mlx_tformer.errors import BadInput, InputOutputError, UsageError
from mlx_tformer.pixels import Preprocessor

CASES = cases_of("vision")
TIGHT = 5e-5
PIXELS: dict[str, Any] = json.loads((GOLDEN / "pixels.json").read_text())
PICTURE = np.array(PIXELS["picture"], np.uint8)  # (13, 17, 3)
PROCESSOR = {"size": {"height": 32, "width": 32}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}


def loaded(folder: Path) -> mt.VisionModel:
    found = mt.load(folder, dtype="float32")
    assert isinstance(found, mt.VisionModel)
    return found


def images(case: str) -> mx.array:
    return mx.array(expected(case)["pixel_values"])


def written(folder: Path, case: str = "vit", weights: dict[str, mx.array] | None = None, **changes: Any) -> Path:
    """A case in a folder of its own with another config, other weights, and a preprocessor_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = tensors(GOLDEN / case / "model.safetensors") if weights is None else weights
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config_of(case) | changes))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


# --- against transformers ---


@pytest.mark.parametrize("case", CASES)
def test_logits_hidden_states_and_patterns_are_those_of_transformers(case: str) -> None:
    model, wanted = loaded(GOLDEN / case), expected(case)
    with seen("*") as found:
        logits = model(images(case))
    assert gap(logits, wanted["logits"]) < min(TIGHT, limit(wanted["logits"]))
    layers = len(model.model.encoder.layers)
    for i, path in enumerate(["embed.out", *(f"encoder.layers.{i}.out" for i in range(layers))]):
        assert gap(found[path], wanted[f"hidden.{i}"]) < TIGHT, path
    for i in range(layers):
        assert gap(found[f"encoder.layers.{i}.attn.op.pattern"], wanted[f"attention.{i}"]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_an_image_alone_and_one_of_a_batch_are_the_same(case: str) -> None:
    model, pixels = loaded(GOLDEN / case), images(case)
    rows = mx.concatenate([model(pixels[i : i + 1]) for i in range(2)])
    assert gap(model(pixels), rows) < TIGHT
    assert gap(model.model.logits(model.hidden(pixels)), rows) < TIGHT


def test_pixels_that_fill_no_patch_do_not_count_and_all_others_do() -> None:
    model, pixels = loaded(GOLDEN / "vit-oblong"), images("vit-oblong")  # 20 high, in patches of 6
    rest = mx.arange(20)[:, None] >= 18
    assert gap(model(mx.where(rest, 9.0, pixels)), model(pixels)) == 0
    row, column = mx.arange(20)[:, None], mx.arange(27)
    for y, x in ((0, 0), (17, 26), (11, 9)):
        assert gap(model(mx.where((row == y) & (column == x), 9.0, pixels)), model(pixels)) > 1e-4


# --- checkpoints as they lie on the hub ---


@pytest.mark.parametrize("prefix", ["", "vit."])
def test_a_model_without_classifier_gives_its_hidden_states_and_leaves_out_its_pooler(
    prefix: str, tmp_path: Path
) -> None:
    stored = tensors(GOLDEN / "vit" / "model.safetensors")
    weights = {prefix + k.removeprefix("vit."): v for k, v in stored.items() if k.startswith("vit.")}
    weights |= {f"{prefix}pooler.dense.weight": mx.zeros((48, 48)), f"{prefix}pooler.dense.bias": mx.zeros((48,))}
    weights |= {f"{prefix}embeddings.mask_token": mx.zeros((1, 1, 48))}
    model = loaded(written(tmp_path, weights=weights, architectures=["ViTModel"]))
    assert gap(model(images("vit")), loaded(GOLDEN / "vit").hidden(images("vit"))) == 0
    assert ["pooler" in note for note in model.notes] == [True]
    assert model.labels == []
    with pytest.raises(UsageError, match="has no classifier"):
        model.classify(PICTURE)


@pytest.mark.parametrize("case", CASES)
def test_converting_and_exporting_gives_the_same_bits_and_the_same_logits(case: str, tmp_path: Path) -> None:
    made = mt.convert(written(tmp_path / "hub", case), tmp_path / "ours").path
    back = mt.export(made, tmp_path / "theirs").path
    before, after = tensors(GOLDEN / case / "model.safetensors"), tensors(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name].view(mx.uint16), after[name].view(mx.uint16)).item() for name in before)
    assert mx.array_equal(loaded(made)(images(case)), loaded(GOLDEN / case)(images(case))).item()
    assert all(json.loads((f / "preprocessor_config.json").read_text()) == PROCESSOR for f in (made, back))


def test_positions_for_another_number_of_patches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"position_embeddings: found shape \(1, 17, 48\), expected \(26, 48\)"):
        loaded(written(tmp_path, image_size=40))
    with pytest.raises(BadInput, match="patch_size: found 33, expected no more than image_size"):
        loaded(written(tmp_path, patch_size=33))


def test_labels_that_the_config_miscounts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"classifier.weight: found shape \(7, 48\), expected \(2, 48\)"):
        loaded(written(tmp_path, id2label={"0": "cat", "1": "dog"}))
    for names in ({"0": "cat", "2": "dog"}, {}, ["cat"], {"0": 1}):
        with pytest.raises(BadInput, match="id2label"):
            loaded(written(tmp_path, id2label=names))


# --- what callers see ---


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 3, 32, 40), (1, 1, 32, 32), (1, 32, 32, 3)])
def test_pixels_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"pixel_values: found shape .*, expected \(B, 3, 32, 32\)"):
        loaded(GOLDEN / "vit")(mx.zeros(shape))


def test_what_an_encoder_of_images_cannot_do_is_refused_in_one_line() -> None:
    model = loaded(GOLDEN / "vit")
    for refused in (lambda: model.generate("a"), lambda: model.chat([])):
        with pytest.raises(UsageError, match="looks at images"):
            refused()
    with pytest.raises(UsageError, match=r"no preprocessor_config\.json"):
        model.classify(PICTURE)


@pytest.mark.parametrize("row", PIXELS["rows"], ids=[str(i) for i in range(len(PIXELS["rows"]))])
def test_a_picture_becomes_the_numbers_that_transformers_makes_of_it(row: dict[str, Any]) -> None:
    made = Preprocessor.read(row["settings"], "x")(PICTURE)
    assert gap(made[0], np.array(row["pixels"]).reshape(row["shape"])) < 2e-5


def test_a_file_an_image_and_an_array_give_the_same_labels_the_likeliest_first(tmp_path: Path) -> None:
    names = {str(i): f"kind {i}" for i in range(7)}
    model = loaded(written(tmp_path / "model", id2label=names))
    Image.fromarray(PICTURE).save(tmp_path / "picture.png")
    sources = [PICTURE, mx.array(PICTURE), Image.fromarray(PICTURE), tmp_path / "picture.png"]
    found, *others = [model.classify(source, top=None) for source in [*sources, str(tmp_path / "picture.png")]]
    assert all(other == found for other in others)
    logits = model(model.pixels(PICTURE))[0]
    assert [label.index for label in found] == mx.argsort(-logits).tolist()
    assert gap(mx.array([label.probability for label in found]), mx.sort(mx.softmax(logits))[::-1]) < 1e-6
    assert [label.label for label in found] == [f"kind {label.index}" for label in found]
    assert model.classify(PICTURE, top=2) == found[:2]
    grey = Image.fromarray(PICTURE[..., 0])
    assert model.classify(PICTURE[..., 0]) == model.classify(grey)


def test_what_is_no_picture_is_refused_in_one_line(tmp_path: Path) -> None:
    model = loaded(written(tmp_path / "model"))
    Image.fromarray(PICTURE).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:-200])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "program.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for name, problem in {"cut.png": "broken picture", "text.png": "no picture", "program.eps": "no picture"}.items():
        with pytest.raises(BadInput, match=problem) as caught:
            model.classify(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputOutputError, match="No such file"):
        model.classify(tmp_path / "nothing.png")
    for wrong in (PICTURE.astype(np.float32), PICTURE[None], PICTURE[:, :, :2], PICTURE[:0]):
        with pytest.raises(UsageError, match="image: found"):
            model.classify(wrong)
    with pytest.raises(UsageError, match="image: found a int"):
        model.classify(3)
    with pytest.raises(UsageError, match="top: found 0"):
        model.classify(PICTURE, top=0)


def test_without_pillow_a_picture_of_the_right_size_is_read_and_others_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(written(tmp_path))
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert len(model.classify(np.zeros((32, 32, 3), np.uint8))) == 5
    with pytest.raises(UsageError, match=r"mlx-tformer\[vision\]"):
        model.classify(PICTURE)


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 32}},
        {"size": 0},
        {"size": "big"},
        {"do_center_crop": True},
        {"do_resize": False},
        {"resample": 9},
        {"image_std": [0.5, 0.0, 0.5]},
        {"image_mean": ["a"]},
    ],
    ids=str,
)
def test_a_way_to_prepare_pictures_that_is_not_known_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=rf"preprocessor_config\.json: {next(iter(settings))}: found"):
        Preprocessor.read(settings, "x")


def test_pixel_values_may_come_from_numpy_and_nothing_but_an_array_is_taken() -> None:
    model, pixels = loaded(GOLDEN / "vit"), images("vit")
    assert gap(model(np.array(pixels)), model(pixels)) == 0
    for wrong in (None, "cat.png", object()):
        with pytest.raises(UsageError, match=r"pixel_values: found a .*, expected an array"):
            model(wrong)
