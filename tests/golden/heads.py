"""What make.py makes of encoders with a head for labels, of texts and of images: their settings, and how."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

Settings = dict[str, Any]
LENGTH, TEXT = 24, 17  # of a row, and of the text in the one that is padded

VISION = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = {**VISION, "vocab_size": 67, "max_position_embeddings": 64, "pad_token_id": 0}
SMALL = {"dim": 32, "hidden_dim": 44, "n_layers": 2, "n_heads": 4, "vocab_size": 67, "max_position_embeddings": 64}
SEQUENCE, TOKENS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}
MODERN = {"model_type": "modernbert", **TEXTS, "global_attn_every_n_layers": 2, "local_attention": 8}
MODERN |= {"classifier_activation": "relu", "hidden_activation": "gelu_new", "norm_eps": 1e-4}

RECIPES: dict[str, tuple[str, Settings]] = {
    "vit-oblong": (
        "AutoModelForImageClassification",
        {"model_type": "vit", **VISION, "image_size": [20, 27], "patch_size": [6, 9], "num_channels": 2}
        | {"qkv_bias": False, "hidden_act": "gelu_new", "layer_norm_eps": 0.1, "num_labels": 5},
    ),
    "bert-classes": (SEQUENCE, {"model_type": "bert", **TEXTS, "num_labels": 3}),
    "bert-tokens": (TOKENS, {"model_type": "bert", **TEXTS, "num_labels": 5}),
    "roberta-classes": (SEQUENCE, {"model_type": "roberta", **TEXTS, **ROBERTA, "num_labels": 3}),
    "xlm_roberta-ranks": (SEQUENCE, {"model_type": "xlm-roberta", **TEXTS, **ROBERTA, "num_labels": 1}),
    "distilbert-classes": (SEQUENCE, {"model_type": "distilbert", **SMALL, "num_labels": 3}),
    "modernbert-classes": (SEQUENCE, {**MODERN, "num_labels": 3, "classifier_pooling": "mean"}),
    "modernbert-first": (SEQUENCE, {**MODERN, "num_labels": 2, "classifier_bias": True, "norm_bias": True}),
    "modernbert-tokens": (TOKENS, {**MODERN, "num_labels": 4}),
}
"""The class of transformers, and what the config holds."""


def make_case(name: str, out: Path) -> None:
    """Write the folder of one case."""
    from make import perturb, write_case

    seed, folder = zlib.crc32(name.encode()), out / name
    save(name, folder, seed, perturb)
    expected = answers(name, folder, seed)
    kind = "vision" if "pixel_values" in expected else "classes"
    write_case(name, folder, expected, kind=kind, model_type=RECIPES[name][1]["model_type"])
    print(f"{name}: seed {seed}")


def save(name: str, folder: Path, seed: int, perturb: Any) -> None:
    """A model with random weights, in bfloat16."""
    import torch
    import transformers

    auto, settings = RECIPES[name]
    rest = {key: value for key, value in settings.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(settings["model_type"], **rest)
    torch.manual_seed(seed)
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    perturb(model, seed, strong=False)
    model.to(torch.bfloat16).save_pretrained(folder)


def answers(name: str, folder: Path, seed: int) -> dict[str, np.ndarray]:
    """What transformers computes in float32."""
    import torch
    import transformers

    model = getattr(transformers, RECIPES[name][0]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    inputs = inputs_of(model.config, torch.Generator().manual_seed(seed + 1))
    with torch.no_grad():
        out = model.eval()(**inputs, output_hidden_states=True, output_attentions=True)
    found = {**inputs, "logits": out.logits}
    if "pixel_values" in inputs:
        found |= {f"hidden.{i}": x for i, x in enumerate(out.hidden_states)}
        found |= {f"attention.{i}": x for i, x in enumerate(out.attentions)}
    return {k: v.numpy().astype(np.float32 if v.is_floating_point() else np.int32) for k, v in found.items()}


def inputs_of(config: Any, generator: Any) -> Settings:
    """Two random images, or two texts of which one is padded, with types of tokens if the model tells them apart."""
    import torch

    if config.model_type == "vit":
        return {"pixel_values": torch.randn((2, config.num_channels, *config.image_size), generator=generator)}
    ids = torch.randint(3, config.vocab_size, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, TEXT:] = 0
    ids = torch.where(mask.bool(), ids, config.pad_token_id)  # RoBERTa counts its positions by that id
    found = {"input_ids": ids, "attention_mask": mask}
    if config.model_type == "bert":
        found["token_type_ids"] = (torch.arange(LENGTH) >= 9).long().expand(2, -1)
    return found


PROCESSORS: list[Settings] = [
    {"size": {"height": 8, "width": 10}},
    {"size": {"height": 20, "width": 15}, "resample": 3, "image_mean": [0.485, 0.456, 0.406]}
    | {"image_std": [0.229, 0.224, 0.225]},
    {"size": {"height": 13, "width": 17}, "do_normalize": False, "rescale_factor": 0.01},
    {"size": {"height": 5, "width": 5}, "do_rescale": False, "image_mean": 100.0, "image_std": 50.0, "resample": 0},
]
"""What preprocessor_config.json may say."""


def make_pixels(out: Path) -> None:
    """Write pixels.json: what transformers makes of one picture, under each of the settings; needs Pillow as well."""
    import PIL.Image
    from transformers import ViTImageProcessorPil

    picture = np.random.default_rng(0).integers(0, 256, (13, 17, 3)).astype(np.uint8)
    rows = []
    for settings in PROCESSORS:
        made = ViTImageProcessorPil(**settings)(PIL.Image.fromarray(picture), return_tensors="np")["pixel_values"][0]
        rows.append({"settings": settings, "pixels": [float(f"{x:.6g}") for x in made.flatten()], "shape": made.shape})
    (out / "pixels.json").write_text(json.dumps({"picture": picture.tolist(), "rows": rows}) + "\n")
    print(f"pixels.json: {len(rows)} ways")


def make_published(out: Path) -> None:
    """Write published_encoders.json: the configs in it, as some checkpoints have them (of one, the labels alone are
    fewer), with the number of parameters of the class that they name."""
    import torch
    import transformers

    rows = json.loads((Path(__file__).parent / "published_encoders.json").read_text())
    for row in rows:
        config = transformers.CONFIG_MAPPING[row["config"]["model_type"]].from_dict({**row["config"]})
        with torch.device("meta"):
            model = getattr(transformers, row["config"]["architectures"][0])(config)
        row["parameters"] = sum(value.numel() for value in model.parameters())
    text = ",\n".join(json.dumps(row) for row in rows)
    (out / "published_encoders.json").write_text(f"[\n{text}\n]\n")
    print(f"published_encoders.json: {len(rows)} configs")
