"""For the tests of encoders: golden cases with a tokenizer whose words are letters, and which writes pairs as BERT
does."""

import json
from pathlib import Path
from typing import Any

from helpers import GOLDEN, config_of
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import mlx_tformer as mt

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz", "<x>"]


def loaded(folder: Path) -> mt.EncoderModel:
    found = mt.load(folder, dtype="float32")
    assert isinstance(found, mt.EncoderModel)
    return found


def reading(folder: Path, case: str, **changes: Any) -> mt.EncoderModel:
    """A case with a tokenizer whose words are letters, which writes pairs as BERT does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(case) | changes))
    (folder / "model.safetensors").write_bytes((GOLDEN / case / "model.safetensors").read_bytes())
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]", "sep_token": "[SEP]"}))
    return loaded(folder)
