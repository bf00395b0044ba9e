"""The bundled model speaks English, fits in 4 MB, and was made by our own converter."""

import gzip
import json
import re
from pathlib import Path

import pytest

from mlx_tformer.checkpoint.open import BUNDLED, bundled_folder
from mlx_tformer.nn import Attention

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def corpus_words() -> set[str]:
    return set(gzip.decompress((DATA / "shakespeare_words.txt.gz").read_bytes()).decode().split())


@pytest.fixture(scope="module")
def folder() -> Path:
    return bundled_folder() / BUNDLED


def test_nine_of_ten_words_that_it_writes_occur_in_the_plays(shakespeare, corpus_words):
    steps = shakespeare.generate("ROMEO:\n", max_tokens=400, temperature=0.8, seed=0, stop_at_end=False)
    text = "".join(step.text for step in steps)
    words = re.findall(r"[a-z]+(?:'[a-z]+)*", text.lower())
    assert len(words) > 150
    unknown = [word for word in words if word not in corpus_words]
    assert len(unknown) <= 0.1 * len(words), unknown


def test_it_needs_less_than_4_megabytes(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000


def test_it_has_grouped_heads_and_about_2000_ids(shakespeare):
    attention = shakespeare.model.decoder.layers[0].attn.op
    assert isinstance(attention, Attention)
    assert 1 < attention.kv_heads < attention.heads
    assert 1900 <= shakespeare.vocab <= 2100
    assert shakespeare.tokenizer.size <= shakespeare.vocab


def test_its_record_says_what_each_tensor_came_from(folder):
    record = json.loads((folder / "conversion.json").read_text())
    sources = [name for entry in record["tensors"].values() for name in entry["from"]]
    assert "model.layers.0.self_attn.q_proj.weight" in sources
    assert json.loads((folder / "config.json").read_text())["mlx_tformer"]["layout"] == 1
