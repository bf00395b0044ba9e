"""What an import brings along: a program pays for what it uses."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_tformer as mt
from mlx_tformer import nn

HEAVY = ("numpy", "torch", "transformers", "tokenizers", "jinja2", "rich", "huggingface_hub", "matplotlib", "PIL")


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `code`."""
    program = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_alone_brings_nothing_but_itself() -> None:
    found = modules_after("import mlx_tformer")
    assert not {"mlx.core", "mlx_tformer.nn", *HEAVY} & found


@pytest.mark.parametrize("code", ["from mlx_tformer import load, convert, build", "import mlx_tformer.inspect"])
def test_what_is_used_brings_nothing_heavy_before_it_is_needed(code: str) -> None:
    heavy = HEAVY if "inspect" not in code else ("torch", "transformers", "matplotlib", "tokenizers", "PIL")
    assert not set(heavy) & modules_after(code)


def test_all_public_names_are_there() -> None:
    assert set(mt.__all__) <= set(dir(mt))
    assert all(vars(mt).get(name, getattr(mt, name)) is not None for name in mt.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'generator'"):
        _ = mt.generator


def test_the_parts_can_be_read_in_the_order_that_is_given() -> None:
    folder, order = Path(nn.__path__[0]), re.findall(r"`(\w+)`", nn.__doc__ or "")
    assert sorted([*order, "__init__"]) == sorted(file.stem for file in folder.glob("*.py"))
    for at, name in enumerate(order):
        needed = re.findall(r"^from \.(\w+) import", (folder / f"{name}.py").read_text(), re.MULTILINE)
        assert set(needed) <= set(order[:at]), name


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MLX brings a fast BLAS here")
def test_these_tests_run_on_the_fast_blas_if_there_is_one() -> None:
    """What comes before `mlx_tformer` must not import mlx.core, after which it is too late."""
    program = "from mlx_tformer.blas import preload; print(preload())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    if found != "None":
        ctypes.CDLL(found, mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # raises OSError for one that is not loaded
