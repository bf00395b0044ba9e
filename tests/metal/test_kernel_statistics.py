"""Statistics of whole models by the kernel are those by the scores."""

import mlx.core as mx
import msl
import pytest
from float64 import assert_close, f64
from helpers import golden, ids_of

from mlx_tformer import kernels
from mlx_tformer.inspect.streaming import Wants, streamed
from mlx_tformer.nn import Call, spectate

CASES = ["gemma2", "gpt_oss", "llama-yarn", "deepseek_v3", "qwen3"]


def calls(case: str, left: int = 0) -> list[Call]:
    """What attention is called with in two steps of a model; the second row begins with `left` tokens of padding."""
    found: list[Call] = []
    model, ids = golden(case), mx.repeat(ids_of(case)[:, :14], 2, axis=0)
    cache = model.new_cache(24)
    mask = mx.arange(14) >= mx.array([[0], [left]])
    with spectate(found.append):
        model(ids[:, :9], cache, **({"attention_mask": mask[:, :9]} if left else {}))
        model(ids[:, 9:], cache)
    return found


@pytest.mark.parametrize("left", [0, 3], ids=["text", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_statistics_by_the_kernel_are_those_by_the_scores(case, left):
    launches = 0

    def make(**settings):
        nonlocal launches
        launches += 1
        return msl.metal_kernel(**settings)

    for call in calls(case, left)[::3]:
        for wants in (Wants(top=3), Wants(entropy=False)):
            with kernels.made_by(make, "cpu"):
                wanted = streamed(call, wants).arrays()
            with kernels.made_by(make):
                found = streamed(call, wants).arrays()
            assert found.keys() == wanted.keys()
            for name, value in found.items():
                assert_close(value, f64(wanted[name]), 1e-5)
    assert launches > 0
