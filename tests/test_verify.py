"""Verifying: what two checkpoints compute, and how far their weights are apart."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import Packed, case_weights, make_folder, read_weights, refusal, same, way
from cli_models import error_line, invoke, speaking
from helpers import GOLDEN, config_of
from hypothesis import given
from hypothesis import strategies as st
from widened import widened

import mlx_tformer as mt
from mlx_tformer.checkpoint import plan as planning
from mlx_tformer.checkpoint import verify as verifying
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.export import export
from mlx_tformer.checkpoint.outputs import TEXT, TOKENS, Given, prompt
from mlx_tformer.checkpoint.verify import EXACT, QUANTIZED, ROUNDED, verify
from mlx_tformer.errors import BadInput, Mismatch, UsageError

CASE = "llama-bias"
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
SOME = ["bloom", "deepseek_v3", "gemma3", "gpt2", "gpt_oss", "llama-gqa-tied", "mixtral", "qwen2-window"]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read in blocks of a few rows, as large ones are."""
    monkeypatch.setattr(planning, "VALUES", 200)


# --- the same ---


@pytest.mark.parametrize("case", SOME)
def test_a_conversion_and_an_export_of_it_are_the_same_as_the_source(
    tmp_path: Path, case: str, small_blocks: None
) -> None:
    convert(GOLDEN / case, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "theirs")
    for made in ("ours", "theirs"):
        found = verify(GOLDEN / case, tmp_path / made)
        assert (found.largest_error, found.mean_kl, found.top1, found.limit) == (0, 0, 1, EXACT)
        assert found.passed and set(found.modules.values()) == {0.0}
        found.check()


# --- the figures ---


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def logits(model: Path, ids: list[int]) -> np.ndarray:
    return np.array(mt.load(model, "float32")(mx.array([ids]))[0], np.float64)


def test_the_figures_are_what_they_are_called(tmp_path: Path) -> None:
    source = widened(tmp_path / "source", CASE)
    made = convert(source, tmp_path / "made", quantize=3, group_size=32).path
    found = verify(source, made, ids=IDS, limit=9)
    a, b = logits(source, IDS), logits(made, IDS)
    p, q = log_softmax(a), log_softmax(b)
    assert found.tokens == len(IDS)
    assert found.largest_error == pytest.approx(np.abs(a - b).max(), rel=1e-6)
    assert found.deviation == pytest.approx(a.std(), rel=1e-6)
    assert found.mean_kl == pytest.approx((np.exp(p) * (p - q)).sum(axis=-1).mean(), rel=1e-6)
    assert found.mean_kl > 1e-3
    assert found.top1 == (a.argmax(axis=-1) == b.argmax(axis=-1)).mean() < 1


def test_the_errors_of_modules_are_relative_and_the_worst_comes_first(tmp_path: Path, small_blocks: None) -> None:
    source = widened(tmp_path / "source", "qwen2_moe")
    made = convert(source, tmp_path / "made", recipe="mixed-3-6", group_size=32, keep="layers.0").path
    whole, stored = read_weights(convert(source, tmp_path / "whole").path), read_weights(made)
    table = json.loads((made / "config.json").read_text())["mlx_tformer"]["quantization"]
    found = verify(source, made, limit=9).modules
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert {path for path, error in found.items() if error > 0} == table.keys()
    for path, how in table.items():
        leaves = (stored[f"{path}.{leaf}"].astype(mx.float32) for leaf in ("scales", "biases"))
        spread = np.array(mx.dequantize(stored[f"{path}.weight"], *leaves, **how), np.float64)
        bias = np.array(whole.get(f"{path}.bias", mx.zeros(())).astype(mx.float32), np.float64)
        exact = np.array(whole[f"{path}.weight"].astype(mx.float32), np.float64)
        size = np.sqrt((exact**2).sum() + (bias**2).sum())
        assert found[path] == pytest.approx(np.linalg.norm(exact - spread) / size, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, EXACT),
        ({"dtype": "float16"}, ROUNDED),
        ({"mode": "mxfp8"}, QUANTIZED),
        ({"recipe": "mixed-4-6"}, QUANTIZED),
    ],
    ids=str,
)
def test_what_is_allowed_depends_on_how_the_two_are_stored(tmp_path: Path, settings: dict, limit: float) -> None:
    made = convert("shakespeare", tmp_path / "made", **settings).path
    found = verify("shakespeare", made)
    assert found.limit == limit and found.passed
    assert (found.mean_kl == 0) == (settings == {})
    assert verify(made, made).limit == EXACT


# --- planted faults ---

FAULTS: dict[str, tuple[str, Callable[[mx.array], mx.array], str]] = {
    "a matrix scaled": ("model.layers.1.mlp.down_proj.weight", lambda x: 1.5 * x, "decoder.layers.1.mlp.op.down"),
    "rows swapped": ("model.layers.0.self_attn.k_proj.weight", lambda x: x[::-1], "decoder.layers.0.attn.op.qkv"),
    "a norm doubled": ("model.norm.weight", lambda x: 2 * x, "decoder.norm"),
    "one value": (
        "model.embed_tokens.weight",
        lambda x: mx.where(mx.arange(67)[:, None] == 5, x + 1, x),
        "embed.tokens",
    ),
    "a bias gone": ("model.layers.0.mlp.up_proj.bias", mx.zeros_like, "decoder.layers.0.mlp.op.gate_up"),
}


def faulty(folder: Path, name: str) -> Path:
    tensor, change, _ = FAULTS[name]
    weights = case_weights(CASE)
    return make_folder(folder, CASE, weights | {tensor: change(weights[tensor]).astype(mx.bfloat16)})


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_and_its_module_comes_first(tmp_path: Path, name: str) -> None:
    wrong = faulty(tmp_path / "wrong", name)
    found, module = verify(GOLDEN / CASE, wrong), FAULTS[name][2]
    assert not found.passed and found.limit == EXACT
    assert [path for path, error in found.modules.items() if error > 0] == [module]
    refusal(Mismatch, str(wrong), str(GOLDEN / CASE), "more than 1e-08", f"worst module {module}", of=found.check)
    again = convert(wrong, tmp_path / "made").path
    assert not verify(GOLDEN / CASE, again).passed


def test_a_fault_of_the_config_is_found_though_the_weights_are_equal(tmp_path: Path) -> None:
    theta = config_of(CASE)["rope_parameters"] | {"rope_theta": 10010.0}
    wrong = make_folder(tmp_path / "wrong", CASE, rope_parameters=theta)
    found = verify(GOLDEN / CASE, wrong)
    assert set(found.modules.values()) == {0.0}
    refusal(Mismatch, "the weights are equal", of=found.check)


def test_logits_that_are_not_finite_never_pass(tmp_path: Path) -> None:
    weights = case_weights(CASE) | {"model.norm.weight": mx.full((32,), float("nan"), dtype=mx.bfloat16)}
    wrong = make_folder(tmp_path / "wrong", CASE, weights)
    for a, b in ((GOLDEN / CASE, wrong), (wrong, wrong)):
        found = verify(a, b, limit=1e9)
        assert not found.passed
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["mean_kl"] is None
        assert next(iter(found.modules)) == "decoder.norm"


# --- the prompt ---


def test_without_a_tokenizer_ids_are_from_all_over_the_vocabulary() -> None:
    ids = prompt(mt.load(GOLDEN / CASE), Given()).ids
    assert len(ids) == TOKENS and min(ids) >= 0 and max(ids) < 67
    assert len(set(ids)) > 40 and max(ids) - min(ids) > 50


def test_with_a_tokenizer_the_prompt_is_a_text() -> None:
    lm = mt.load("shakespeare")
    assert prompt(lm, Given()).ids == tuple(lm.tokens(TEXT))
    assert prompt(lm, Given("ROMEO:")).ids == tuple(lm.tokens("ROMEO:"))


def test_a_prompt_is_cut_where_the_context_ends(tmp_path: Path) -> None:
    model = speaking(tmp_path / "model", context=16)
    assert verify(model, model, text="a b c " * 30).tokens == 16


PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"ids": []}, "ids: found none"),
    ({"ids": [1, 67]}, "ids: found 67, expected 0 to 66"),
    ({"ids": [1], "text": "a"}, "ids: found a text as well"),
    ({"text": "a"}, "has no tokenizer"),
    ({"limit": -1.0}, "limit: found -1.0"),
    ({"limit": float("nan")}, "limit: found nan"),
    ({"dtype": "int8"}, "dtype: found 'int8'"),
]


@pytest.mark.parametrize(("settings", "problem"), PROMPTS, ids=str)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], problem: str) -> None:
    refusal(UsageError, problem, of=lambda: verify(GOLDEN / CASE, GOLDEN / CASE, **settings))


def test_models_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    refusal(BadInput, "knows 131 ids", "67", of=lambda: verify(GOLDEN / CASE, GOLDEN / "gpt2"))
    parts = ("is another model than", "decoder.layers.*.attn.op.qkv.bias (2)")
    other = make_folder(tmp_path / "x", "llama-bias", vocab_size=131, weights=wider())
    refusal(BadInput, *parts, of=lambda: verify(other, GOLDEN / "llama-mha"))


def wider() -> dict[str, mx.array]:
    """The weights of a case with as many ids as others have."""
    weights = case_weights(CASE)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return weights | {name: mx.concatenate([weights[name], weights[name][:64]]) for name in names}


# --- how it is done ---


def test_one_model_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    counts: list[int] = []
    load = verifying.load

    def watched(*arguments: Any, **settings: Any) -> mt.LanguageModel:
        gc.collect()
        counts.append(sum(model() is not None for model in alive))
        lm = load(*arguments, **settings)
        alive.append(weakref.ref(lm.model))
        return lm

    monkeypatch.setattr(verifying, "load", watched)
    verify(GOLDEN / CASE, GOLDEN / CASE)
    assert counts == [0, 0]


def test_a_packed_source_is_compared_with_what_its_values_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = Packed.of(CASE, {"q_proj": way(4), "k_proj": way(8), "v_proj": way(4), "embed_tokens": way(8)})
    opened = verifying.open_source
    for module in ("convert", "load", "verify"):
        monkeypatch.setattr(
            f"mlx_tformer.checkpoint.{module}.open_source",
            lambda where, **settings: source if where == "packed" else opened(where, **settings),
        )
    made = convert("packed", tmp_path / "made", dtype="float32").path
    found = verify("packed", made)
    assert found.passed and found.mean_kl == 0 and max(found.modules.values()) == 0


@given(st.lists(st.integers(0, 5), max_size=6), st.lists(st.integers(0, 5), max_size=6))
def test_values_are_compared_in_order_however_they_come_in_blocks(a: list[int], b: list[int]) -> None:
    size = min(sum(a), sum(b))
    a, b = cut(a, size), cut(b, size)
    seen = list(verifying._pairs(blocks(a), blocks(b)))
    assert all(same(x, y) and x.size for x, y in seen)
    assert [i for x, _ in seen for i in x.tolist()] == list(range(size))


def cut(sizes: list[int], total: int) -> list[int]:
    """Sizes of blocks that make up a total, from those of at least as much."""
    made: list[int] = []
    for size in sizes:
        made.append(min(size, total - sum(made)))
    return made


def blocks(sizes: list[int]) -> list[mx.array]:
    """The numbers from 0 on, in blocks."""
    starts = np.cumsum([0, *sizes])
    return [
        mx.arange(start, stop)[:, None] for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]


# --- the command ---


def test_the_command_prints_the_figures(tmp_path: Path) -> None:
    made = convert("shakespeare", tmp_path / "made", quantize=4, group_size=32).path
    result = invoke("verify", "shakespeare", str(made))
    found = verify("shakespeare", made)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert f"mean KL divergence: {found.mean_kl:.3g} nats, limit 0.1" in lines
    assert f"largest error {found.largest_error:.3g}" in lines[0]
    assert f"{100 * found.top1:.1f} %" in lines[2]
    assert [line.split()[0] for line in lines[4:]] == list(found.modules)[:10]


def test_as_json_it_prints_every_module(tmp_path: Path) -> None:
    result = invoke("verify", str(GOLDEN / CASE), str(GOLDEN / CASE), "--json", "--ids", "1, 2 3")
    found = json.loads(result.stdout)
    assert (found["tokens"], found["mean_kl"], found["passed"]) == (3, 0, True)
    assert len(found["modules"]) == len(verify(GOLDEN / CASE, GOLDEN / CASE).modules)
    assert "weights: equal in all" in invoke("verify", str(GOLDEN / CASE), str(GOLDEN / CASE)).stdout


def test_a_mismatch_ends_the_command_with_one_line_and_3(tmp_path: Path) -> None:
    wrong = faulty(tmp_path / "wrong", "a norm doubled")
    result = invoke("verify", str(GOLDEN / CASE), str(wrong))
    assert result.exit_code == 3 and "decoder.norm" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("mlx-tformer: error: ") and "worst module decoder.norm" in line
    assert invoke("verify", str(GOLDEN / CASE), str(wrong), "--limit", "100").exit_code == 0
    assert not json.loads(invoke("verify", str(GOLDEN / CASE), str(wrong), "--json").stdout)["passed"]


@pytest.mark.parametrize(("option", "value"), [("--ids", "1 x"), ("--limit", "-1"), ("--dtype", "int8")])
def test_options_that_cannot_be_meant_are_named(option: str, value: str) -> None:
    assert option in error_line(invoke("verify", str(GOLDEN / CASE), str(GOLDEN / CASE), option, value), 2)


def test_a_conversion_can_be_verified_at_once(tmp_path: Path) -> None:
    result = invoke("convert", "shakespeare", str(tmp_path / "made"), "--quantize", "8", "--verify")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'made'}\n")
    assert "mlx-tformer: mean KL divergence: 0.0" in result.stderr and "limit 0.1" in result.stderr
    result = invoke("convert", "shakespeare", str(tmp_path / "two"), "--quantize", "2", "--verify")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "more than 0.1; worst module" in result.stderr.splitlines()[-1]
    assert (tmp_path / "two" / "conversion.json").exists()
