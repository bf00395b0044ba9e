"""Golden cases with words: tiny models of all families that read text."""

import shutil
from pathlib import Path

from helpers import GOLDEN, config_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def worded(case: str, folder: Path, *, template: str | None = None) -> Path:
    """A golden case whose tokenizer knows the word w7 as id 7, and any other text as 9."""
    shutil.copytree(GOLDEN / case, folder, dirs_exist_ok=True)
    words = {f"w{i}": i for i in range(config_of(case)["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w9"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = "{}" if template is None else f'{{"chat_template": "{template}"}}'
    (folder / "tokenizer_config.json").write_text(settings)
    return folder


def text_of(ids: list[int]) -> str:
    """The text of these ids."""
    return " ".join(f"w{i}" for i in ids)
