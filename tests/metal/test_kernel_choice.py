"""When a kernel of ours is used: a table of the choice, and the switch."""

from dataclasses import replace

import mlx.core as mx
import msl
import pytest
from float64 import random

from mlx_tformer import kernels
from mlx_tformer.kernels import (
    Asked,
    Case,
    Latent,
    Packed,
    Plain,
    Plan,
    Sight,
    Slopes,
    case_of,
    choose,
    chosen_for,
    place,
    plan,
)

GEMMA2 = {"heads": 16, "kv_heads": 8, "softcap": True}

TABLE = [
    # decoding: MLX where it fuses, ours where it does not
    (Case(1, 4096, 128, 128), "mlx"),
    (Case(1, 4096, 128, 128, mask="array"), "mlx"),
    (Case(8, 4096, 64, 64, mask="causal"), "mlx"),
    (Case(8, 4096, 64, 64, heads=40, kv_heads=8), "mlx"),  # more rows than MLX decodes, and than we do
    (Case(1, 4096, 192, 128), "mlx"),
    (Case(1, 4096, 96, 64), "mlx"),
    (Case(1, 4096, 80, 80), "ours"),
    (Case(1, 4096, 72, 72, dtype=mx.bfloat16), "ours"),
    (Case(1, 4096, 112, 112, dtype=mx.float32), "ours"),
    (Case(4, 4096, 32, 32, mask="array"), "ours"),
    (Case(8, 4096, 48, 48), "ours"),
    (Case(9, 4096, 48, 48), "mlx"),
    (Case(4, 4096, 48, 48, heads=64), "ours"),
    (Case(5, 4096, 48, 48, heads=64), "mlx"),
    (Case(1, 4096, 128, 128, dtype=mx.float64), "mlx"),
    (Case(1, 4096, 80, 80, dtype=mx.float64), "mlx"),
    (Case(1, 4096, 512, 512, heads=64), "mlx"),
    (Case(1, 512, 512, 512, heads=64), "ours"),
    # caps and biases
    (Case(1, 4096, 256, 256, **GEMMA2), "ours"),
    (Case(16, 4096, 256, 256, mask="causal", **GEMMA2), "twin"),
    (Case(4096, 8192, 256, 256, mask="causal", **GEMMA2), "ours"),  # scores of 2 GB
    (Case(1, 4096, 128, 128, bias="distances"), "ours"),
    (Case(64, 4096, 128, 128, bias="distances"), "mlx"),
    (Case(1, 4096, 128, 128, bias="array"), "mlx"),
    (Case(1, 4096, 128, 128, bias="array", softcap=True), "twin"),
    # prefill
    (Case(512, 512, 80, 80, mask="causal"), "mlx"),
    (Case(512, 512, 112, 112, mask="causal"), "mlx"),
    (Case(8192, 8192, 112, 112, mask="causal"), "ours"),
    (Case(8192, 8192, 128, 128, mask="causal"), "mlx"),
    (Case(2048, 2048, 512, 512, mask="causal"), "mlx"),
    (Case(8192, 4096, 48, 48), "mlx"),  # scores of 1 GB
    (Case(8193, 4096, 48, 48), "ours"),
    # packed keys and latents
    (Case(1, 4096, 128, 128, kept="packed"), "ours"),
    (Case(512, 4096, 128, 128, kept="packed"), "twin"),
    (Case(1, 4096, 576, 512, heads=16, kv_heads=1, kept="latent"), "ours"),
    (Case(1, 4096, 576, 512, heads=128, kv_heads=1, kept="latent"), "twin"),
]


@pytest.mark.parametrize("case, answer", TABLE, ids=lambda value: str(value).replace("mlx.core.", ""))
def test_the_choice_on_metal(case, answer):
    assert choose("metal", case) == answer


@pytest.mark.parametrize("case, _", TABLE)
def test_the_cpu_never_has_a_kernel(case, _):
    assert choose("cpu", case) == ("mlx" if case.kept == "plain" and not case.softcap else "twin")


@pytest.mark.parametrize("case, answer", [
    (Case(512, 512, 128, 128), "ours"), (Case(9, 4, 64, 64), "ours"), (Case(9, 4, 64, 64, mask="causal"), "mlx"),
    (Case(9, 4, 64, 64, bias="distances"), "mlx"), (Case(1, 4, 64, 64, bias="array"), "mlx"),
    (Case(1, 4, 64, 600), "mlx"),
])  # fmt: skip
def test_on_trial_whatever_can_be_is_ours(case, answer):
    assert choose("trial", case) == answer


@pytest.mark.parametrize("sizes, wanted", [
    # batch, key heads, rows, keys, widths
    ((1, 8, 4, 255, 128, 128), Plan(4, 4, 1)), ((1, 8, 4, 256, 128, 128), Plan(4, 8, 1)),
    ((1, 8, 4, 512, 128, 128), Plan(4, 8, 2)), ((1, 8, 4, 99999, 128, 128), Plan(4, 8, 8)),
    ((1, 8, 5, 99999, 128, 128), Plan(8, 8, 8)), ((2, 8, 9, 99999, 128, 128), Plan(8, 8, 2)),
    ((8, 8, 4, 99999, 128, 128), Plan(4, 8, 1)), ((1, 8, 8, 99999, 256, 256), Plan(4, 8, 4)),
    ((1, 1, 16, 99999, 576, 512), Plan(2, 8, 8)), ((1, 1, 1, 99999, 64, 64), Plan(1, 8, 64)),
], ids=str)  # fmt: skip
def test_the_plan_fills_the_gpu_and_no_more_registers_than_there_are(sizes, wanted):
    assert plan(*sizes) == wanted
    assert plan(*sizes, statistics=True) == replace(wanted, splits=1)


def test_cases_are_read_off_the_arguments():
    q, k, v = random(2, 6, 3, 40), random(2, 2, 17, 40), random(2, 2, 17, 24)
    asked = Asked(0.3, Sight(causal=True), softcap=2.0, distances=Slopes((0.5,) * 6))
    assert case_of(q, Plain(k, v), asked) == Case(
        3, 17, 40, 24, heads=6, kv_heads=2, batch=2, dtype=mx.float32, mask="causal", bias="distances", softcap=True
    )
    assert case_of(q, Plain(k, v), Asked(0.3, left=mx.array([0, 1]))).mask == "array"
    assert case_of(random(1, 4, 1, 24), Latent(random(1, 1, 9, 16), random(1, 1, 9, 8)), Asked(1.0)).kept == "latent"
    packed = Packed.pack(random(1, 2, 9, 64), random(1, 2, 9, 32), 32, 8)
    found = case_of(random(1, 4, 1, 64), packed, Asked(1.0))
    assert (found.width, found.value, found.kept) == (64, 32, "packed")


def test_keys_of_another_dtype_than_the_queries_are_left_to_mlx():
    q, k = random(1, 2, 1, 40), random(1, 2, 5, 40, dtype=mx.float16)
    with kernels.made_by(msl.metal_kernel):
        assert not chosen_for(q, Plain(k, k), Asked(1.0))
        assert chosen_for(q.astype(mx.float16), Plain(k, k), Asked(1.0))


def test_kernels_run_on_metal_alone_and_can_be_switched_off(monkeypatch):
    monkeypatch.delenv("MLX_TFORMER_KERNELS", raising=False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert place() == "cpu"
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert place() == "metal"
    monkeypatch.setenv("MLX_TFORMER_KERNELS", "off")
    assert place() == "cpu"
    monkeypatch.setenv("MLX_TFORMER_KERNELS", "on")
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert place() == "cpu"
