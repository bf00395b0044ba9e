"""What was read and measured can be drawn: the numbers of a picture are those of the arrays."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import ids_of, opened

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect import trace
from mlx_tformer.inspect.pictures import Grid, Heads

IDS, OTHER = mx.array([[3, 1, 4, 1, 5]]), mx.array([[3, 1, 7, 1, 5]])


def test_a_trace_draws_a_head_a_layer_or_all_of_them(
    shakespeare: mt.LanguageModel, capsys: Any, tmp_path: Path
) -> None:
    with trace(shakespeare, read=["attn.pattern"]) as t:
        shakespeare(shakespeare.tokens("ROMEO: what"))
    one, layer, every = t.picture(1, 2), t.picture(1), t.picture()
    assert isinstance(one, Grid) and isinstance(layer, Heads) and isinstance(every, Heads)
    np.testing.assert_allclose(one.values, np.array(t["layers.1.attn.pattern"][0, 2]))
    assert list(one.rows) == list(one.columns) == t.labels()
    assert list(layer.patterns) == ["1"] and list(every.patterns) == [str(n) for n in t.layers]
    t.show(layer=1, head=2)
    assert capsys.readouterr().out.strip()
    t.html(tmp_path / "page.html", layer=1)
    assert f'"{t.labels()[0]}"' in (tmp_path / "page.html").read_text()


def test_sinks_and_windows_are_drawn_as_they_are() -> None:
    lm, ids = opened("gpt_oss"), ids_of("gpt_oss")
    cache = lm.new_cache()
    for i in range(23):
        lm(ids[:, i : i + 1], cache)
    with trace(lm, read=["attn.pattern"]) as t:
        lm(ids[:, 23:], cache)
    drawn = t.picture()
    assert isinstance(drawn, Heads) and drawn.keys[-1] == "(sink)" and len(drawn.keys) == 25
    first = t.keys("layers.0.attn.pattern").start
    assert first > 0 and drawn.patterns["0"][..., :first].max() == 0
    np.testing.assert_allclose(drawn.patterns["0"][:, 0].sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", [None, "sink"])
def test_scores_sweeps_and_the_lens_are_grids(kind: str | None) -> None:
    lm = opened("qwen3")
    scores = inspect.head_scores(lm, ["previous", "sink"], seeds=1, length=5)
    drawn = scores.picture(kind)
    np.testing.assert_allclose(drawn.values, np.array(scores[kind or "previous"]))
    found = inspect.sweep(lm, IDS, OTHER, 5)
    assert found.picture().values.shape == (3, 5) and list(found.picture().columns) == ["0", "1", "2", "3", "4"]
    with trace(lm, read=["residual.out"]) as t:
        lm(IDS)
    table = inspect.lens(t, None).picture()
    assert table.values.shape == (3, 5) and len(table.text) == 3 and len(table.text[0]) == 5
