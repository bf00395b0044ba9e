"""`mlx-tformer bench --kernels`: every kernel agrees with what would run without it, and one that did not is told."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest
from cli_models import invoke
from float64 import random
from mlx_tformer_cli.bench import table

from mlx_tformer.kernels import Packed, Plain, measure
from mlx_tformer.kernels.measure import measured, traffic, trials

NAMES = [trial.name for trial in trials(64)]


@pytest.mark.parametrize("name", NAMES)
def test_each_kernel_agrees_with_what_would_run_without_it(name, on_trial):
    trial = next(trial for trial in trials(64) if trial.name == name)
    found = measured(trial, rounds=1)
    assert found.fine, found
    assert 1 <= found.moved / found.floor < (9 if "latents" in name else 4)


def test_a_kernel_that_answers_otherwise_is_told(on_trial):
    trial = trials(64)[0]
    wrong = measured(replace(trial, otherwise=lambda: [x * 1.01 for x in trial.ours()]), rounds=1)
    nan = measured(replace(trial, ours=lambda: [x * mx.nan for x in trial.otherwise()]), rounds=1)
    assert not wrong.fine and not nan.fine
    assert "DIFFERS" in table([wrong]) and "same" in table([measured(trial, rounds=1)])


def test_bytes_are_counted_off_the_arrays():
    q, k, v = random(2, 6, 1, 64), random(2, 2, 700, 64), random(2, 2, 700, 32)
    kept, ends = (k.size + v.size) * 4, q.size * 4 + 2 * 6 * 32 * 4
    assert traffic(q, Plain(k, v)) == (kept + ends, kept + ends + 2 * 2 * 4 * (2 * 6 * 32 + 2 * 6))  # two splits
    packed = Packed.pack(k, v, 32, 4)
    assert traffic(q, packed)[0] == sum(x.nbytes for x in packed.arrays) + ends


def test_a_machine_without_metal_has_nothing_to_measure():
    found = invoke("bench", "--kernels")
    assert found.exit_code == 0
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert "nothing to measure: kernels run on Metal" in found.stderr


def test_figures_come_as_json(monkeypatch, on_trial):
    monkeypatch.setattr(measure, "trials", lambda: trials(64)[:1])
    found = invoke("bench", "--kernels", "--rounds", "1", "--json")
    assert found.exit_code == 0
    (kernel,) = json.loads(found.stdout)["kernels"]
    assert kernel["kernel"] == NAMES[0]
    assert kernel["same"] is True
    assert kernel["bytes"] >= kernel["bytes_at_least"] > 0
