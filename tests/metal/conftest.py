"""Kernels of the package are made by the harness here, and checked by clang where there is one."""

from collections.abc import Iterator

import msl
import pytest

from mlx_tformer import kernels


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Let clang see each kernel first."""
    with msl.using(strict=msl.clang() is not None):
        yield


@pytest.fixture
def on_trial() -> Iterator[None]:
    """Run the package's kernels, wherever they can run, through the harness."""
    with kernels.made_by(msl.metal_kernel):
        yield
