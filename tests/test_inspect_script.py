"""What a writer of scripts wants to write works as it is written, on a real model."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import gap

import mlx_tformer as mt

SCRIPT = """
import mlx_tformer as mt
from mlx_tformer import inspect

lm = mt.load("HuggingFaceTB/SmolLM2-135M-Instruct", dtype="float32")
tokens = lm.tokens("Mary and John went out. John gave a drink to")
with inspect.trace(lm, read=["attn.pattern", "residual.out"]) as t:
    lm(tokens)
t.check(1e-4)                                   # P @ V equals the fused output, or an error
t.show(layer=18, head=6)                        # terminal; also .png(path), .html(path)
lens = inspect.lens(t, position=-1, top=3)
shares = inspect.attribution(t, " Mary", minus=" John").top(8)
scores = inspect.head_scores(lm, ["induction", "previous", "duplicate", "sink"], seeds=4)
cut = inspect.run(lm, tokens, edit=[inspect.zero("attn.z", heads={18: [6, 7]})])
watch = inspect.stats(entropy=True, top=8, mass=tokens.spans(every=512))     # never n x n
for step in lm.generate(tokens, max_tokens=64, watch=watch):
    pass
"""


def test_the_script_works_as_it_is_written(
    smollm2_dense: mt.LanguageModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mt, "load", lambda name, dtype: smollm2_dense)
    names: dict[str, Any] = {}
    shorter = SCRIPT.replace("seeds=4", "seeds=1").replace("max_tokens=64", "max_tokens=6")  # which is all they change
    exec(compile(shorter, "script.py", "exec"), names)
    assert "layer 18, head 6" in capsys.readouterr().out
    logits = smollm2_dense(names["tokens"])
    assert names["lens"].tokens[-1, 0].tolist() == mx.argsort(-logits[0, -1])[:3].tolist()
    sizes = [abs(share.value) for share in names["shares"]]
    assert len(sizes) == 8 and sizes == sorted(sizes, reverse=True)
    assert names["scores"].best("induction", 1)[0][:2] == (18, 6)
    assert names["cut"].shape == logits.shape and gap(names["cut"], logits) > 0.1
    watch = names["watch"]
    assert len(watch) == 30 and watch[0].seen >= len(names["tokens"]) + 5
    weights = watch[29].mass
    assert np.allclose(weights.sum(axis=-1), 1, atol=1e-4) and watch[0].top_keys.shape[-1] == 8
