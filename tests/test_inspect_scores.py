"""Head scores, sweeps, measures, rollout, flow, experts and circuits, where the answers are known."""

import itertools
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import CASES, GOLDEN, attentions, gap, ids_of, opened
from mlx.utils import tree_map_with_path

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.errors import UsageError
from mlx_tformer.inspect import editing, trace
from mlx_tformer.inspect.measures import most
from mlx_tformer.inspect.scores import SCORES, Probe, said_twice
from mlx_tformer.nn import Attention, LatentAttention, ShiftedRMSNorm

IDS, OTHER = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]]), mx.array([[3, 1, 4, 1, 7, 9, 2, 6]])


# --- head scores ---


@pytest.mark.parametrize(
    ("kind", "back"),
    [("induction", 4), ("duplicate", 5), ("previous", 1), ("current", 0), ("next", -1), ("sink", None)],
)
def test_a_head_that_does_only_one_thing_scores_one_in_that(kind: str, back: int | None) -> None:
    probe = Probe(mx.zeros((2, 11), dtype=mx.int32), 1, 5)
    at = np.arange(11)
    looked = np.zeros(11, int) if back is None else np.clip(at - back, 0, 10)
    pattern = mx.array(np.eye(11, dtype=np.float32)[looked])[None, None] * mx.ones((2, 3, 1, 1))
    scores = {name: score(pattern, probe) for name, score in SCORES.items()}
    assert scores[kind].tolist() == pytest.approx([1.0] * 3)
    others = {name for name, score in scores.items() if score.max().item() > 0.6} - {kind}
    assert others <= ({"local"} if back in (0, 1) else set())


@pytest.mark.parametrize("case", ["qwen3", "gpt_oss", "mistral-window", "bert", "jamba"])
def test_scores_are_those_of_the_patterns(case: str) -> None:
    lm = opened(case)
    found = inspect.head_scores(lm, seeds=3, length=5, chunk=2)
    probe = said_twice(lm, range(3), 5)
    assert mx.array_equal(probe.ids[:, 1:6], probe.ids[:, 6:11]).item() and found["sink"].shape[0] == len(found.layers)
    with trace(lm, read=["attn.pattern"]) as t:
        out = lm(probe.ids)
    for i, pattern in enumerate(t.by_layer("attn.pattern").values()):
        for kind, score in SCORES.items():
            assert gap(found[kind][i], score(pattern, probe)) < 1e-5
    if case == "bert":
        assert found.losses is None
        return
    logprobs = out - mx.logsumexp(out, axis=-1, keepdims=True)
    loss = -np.take_along_axis(np.array(logprobs[:, :-1]), np.array(probe.ids)[:, 1:, None], axis=-1)[..., 0]
    assert found.losses == pytest.approx((loss[:, :5].mean(), loss[:, 5:].mean()), abs=1e-4)
    best = found.best("current", 3)
    assert [x for _, _, x in best] == sorted((x for _, _, x in best), reverse=True)
    assert found["current"][found.layers.index(best[0][0]), best[0][1]].item() == best[0][2]
    assert "current" in str(found)


def test_scores_that_cannot_be_measured_are_refused() -> None:
    lm = opened("qwen3")
    for arguments, told in (
        ({"kinds": ["inducing"]}, "found 'inducing'|found inducing"),
        ({"kinds": "sink"}, "expected a list"),
        ({"seeds": 0}, "0 seeds"),
        ({"length": 10_000}, "the model reads"),
    ):
        with pytest.raises(UsageError, match=told):
            inspect.head_scores(lm, **arguments)
    with pytest.raises(UsageError, match="expected one of sink"):
        inspect.head_scores(lm, ["sink"], seeds=1, length=5)["next"]


# --- sweeps ---


@pytest.mark.parametrize("batch", [3, 64])
def test_a_sweep_is_one_patched_run_for_each_cell(batch: int) -> None:
    lm = opened("qwen3")
    found = inspect.sweep(lm, IDS, OTHER, (5, 7), batch=batch)
    assert found.values.shape == (3, 8) and found.layers == [0, 1, 2] and found.numbers == list(range(8))
    for layer, position in ((0, 4), (1, 7), (2, 2)):
        patched = inspect.run(lm, OTHER, [inspect.patch("residual.out", IDS, layers=layer, positions=position)])
        value = (patched[0, -1, 5] - patched[0, -1, 7]).item()
        assert found.values[layer, position].item() == pytest.approx(value, abs=1e-4)
    clean, corrupted = (lm(ids)[0, -1] for ids in (IDS, OTHER))
    assert found.clean == pytest.approx((clean[5] - clean[7]).item(), abs=1e-5)
    assert found.corrupted == pytest.approx((corrupted[5] - corrupted[7]).item(), abs=1e-5)
    assert found.recovered[2, 7].item() == pytest.approx(1.0, abs=1e-3)  # the last place of the last layer is all
    assert gap(found.recovered[:, :4], mx.zeros((3, 4))) < 1e-3  # before the texts differ there is nothing to restore
    assert len(found.top(3)) == 3 and found.top(1)[0][2] >= found.top(3)[2][2]


@pytest.mark.parametrize(
    ("case", "site"), [("qwen3", "attn.z"), ("llama-gqa-tied", "attn.v"), ("qwen3", "attn.pattern")]
)
def test_a_sweep_over_heads_is_one_patched_run_for_each_head(case: str, site: str) -> None:
    lm = opened(case)
    found = inspect.sweep(lm, IDS, OTHER, 5, site=site, over="heads", layers=[1, 2], positions=[4, -1])
    assert found.layers == [1, 2]
    for layer, head in ((1, 0), (2, 1)):
        edit = inspect.patch(site, IDS, heads={layer: [head]}, positions=[4, 7])
        value = inspect.run(lm, OTHER, [edit])[0, -1, 5].item()
        assert found.values[layer - 1, head].item() == pytest.approx(value, abs=1e-4)


def test_a_sweep_takes_any_metric_and_shows_no_bar_where_there_is_no_terminal(capsys: Any) -> None:
    found = inspect.sweep(opened("qwen3"), IDS, IDS, lambda logits: logits.max(axis=(1, 2)), layers=1, positions=[0, 3])
    assert found.values.shape == (1, 2) and gap(found.values, mx.full((1, 2), found.clean)) < 1e-4
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match="nothing to recover"):
        inspect.sweep(opened("qwen3"), IDS, IDS, lambda logits: 0 * logits[:, -1, 0], layers=1).top()


def test_a_terminal_gets_a_bar_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    inspect.sweep(opened("qwen3"), IDS, OTHER, 5, layers=1)
    shown = capsys.readouterr()
    assert "residual.out over positions" in shown.err and shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"corrupted": IDS[:, :5]}, "expected one length"),
        ({"over": "neurons"}, "expected positions or heads"),
        ({"site": "residual.out", "over": "heads"}, "with heads"),
        ({"site": "logits"}, "in each of the layers"),
        ({"site": "*"}, "in each of the layers"),
        ({"layers": [9]}, "in each of the layers"),
        ({"positions": [8]}, "found 8, expected one of 8"),
        ({"positions": []}, r"found positions \[\] and a batch of 16, expected one or more"),
        ({"batch": 0}, "a batch of 0, expected one or more"),
        ({"metric": (1, 2, 3)}, "expected one or two"),
        ({"metric": lambda logits: logits[0, 0]}, "for one text"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        inspect.sweep(opened("qwen3"), **{"clean": IDS, "corrupted": OTHER, "metric": 5, **arguments})


# --- one number a row ---


def test_entropy_distance_and_sink_mass_are_their_formulas() -> None:
    with trace(opened("gpt_oss"), read=["attn.pattern"]) as t:
        opened("gpt_oss")(ids_of("gpt_oss"))
    pattern = t["layers.1.attn.pattern"]
    p = np.array(pattern, np.float64)
    rest = 1 - p.sum(axis=-1, keepdims=True)
    whole = np.concatenate([p, rest], axis=-1)
    assert gap(inspect.entropy(pattern), -(whole * np.log(np.where(whole > 0, whole, 1))).sum(axis=-1)) < 1e-5
    at = np.arange(24)
    assert gap(inspect.distance(pattern), (p * (at[:, None] - at)).sum(axis=-1) / p.sum(axis=-1)) < 1e-4
    assert gap(inspect.sink_mass(pattern, 2), p[..., :2].sum(axis=-1) + rest[..., 0]) < 1e-6
    step, blind = pattern[:, :, -1:], mx.zeros((1, 2, 3))
    assert gap(inspect.distance(step)[0, :, 0], inspect.distance(pattern)[0, :, -1]) < 1e-5
    assert gap(inspect.distance(step, first_query=23, first_key=0), inspect.distance(step)) == 0
    for measure in (inspect.entropy, inspect.distance, inspect.sink_mass):
        assert measure(blind).tolist() == [[0.0, 0.0]]


# --- rollout and flow ---


def traced(case: str = "llama-mha", length: int = 6) -> Any:
    with trace(opened(case), read=["attn.pattern"]) as t:
        opened(case)(ids_of(case)[:, :length])
    return t


def mixed(t: Any, share: float = 0.5) -> list[np.ndarray]:
    found = []
    for pattern in t.by_layer("attn.pattern").values():
        mean = np.array(pattern[0], np.float64).mean(axis=0)
        mean = mean / mean.sum(axis=-1, keepdims=True)
        found.append(share * np.eye(len(mean)) + (1 - share) * mean)
    return found


@pytest.mark.parametrize("case", ["llama-mha", "gpt_oss", "bert"])
def test_rollout_multiplies_patterns_and_residual_connections(case: str) -> None:
    t = traced(case)
    found, product = inspect.rollout(t, residual=0.3), np.eye(6)
    for i, weights in enumerate(mixed(t, 0.3)):
        product = weights @ product
        assert gap(found[i, 0], product) < 1e-6
    assert gap(found.sum(axis=-1), mx.ones(found.shape[:3])) < 1e-5
    assert gap(inspect.rollout(t, residual=1.0)[-1, 0], np.eye(6)) < 1e-6


def smallest_cut(layers: list[np.ndarray], source: int, sink: int) -> float:
    """By trying all cuts: what flows is what the narrowest lets through (Ford and Fulkerson 1956)."""
    length, depth = len(layers[0]), len(layers)
    free = [(n, i) for n in range(depth + 1) for i in range(length) if (n, i) not in ((depth, source), (0, sink))]
    best = np.inf
    for flags in itertools.product([False, True], repeat=len(free)):
        side = dict(zip(free, flags, strict=True)) | {(depth, source): True, (0, sink): False}
        cut = sum(
            layers[n][i, j]
            for n in range(depth)
            for i in range(length)
            for j in range(length)
            if side[n + 1, i] and not side[n, j]
        )
        best = min(best, cut)
    return best


def test_flow_is_what_the_narrowest_cut_lets_through() -> None:
    t = traced(length=3)
    weights = mixed(t)
    found = inspect.flow(t)
    for token in range(3):
        assert found[token] == pytest.approx(smallest_cut(weights, 2, token), abs=1e-6)
    assert inspect.flow(t, position=0)[1:] == [0.0, 0.0]  # the first token sees itself alone


def test_flow_goes_back_where_a_first_path_was_wrong() -> None:
    graph = {0: {2: 1.0, 1: 1.0}, 1: {4: 1.0, 3: 1.0}, 2: {3: 1.0}, 3: {5: 1.0}, 4: {5: 1.0}, 5: {}}
    assert most(graph, 0, 5) == 2.0 and most(graph, 5, 0) == 0.0


def test_what_has_no_rollout_is_refused() -> None:
    lm = opened("llama-mha")
    with trace(lm, read=["layers.0.attn.pattern"]) as some:
        lm(IDS)
    cache = lm.new_cache()
    lm(IDS[:, :5], cache)
    with trace(lm, read=["attn.pattern"]) as late:
        lm(IDS[:, 5:], cache)
    for call, told in (
        (lambda: inspect.rollout(some), "layers.1.attn.op.pattern: not read"),
        (lambda: inspect.rollout(late), "3 queries and 8 keys"),
        (lambda: inspect.rollout(traced(), residual=2), "expected 0 to 1"),
        (lambda: inspect.flow(traced(), position=6), "position: found 6"),
    ):
        with pytest.raises(UsageError, match=told):
            call()


# --- experts ---


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3", "llama4", "jamba"])
def test_a_report_counts_what_the_router_chose(case: str) -> None:
    lm, ids = opened(case), ids_of(case)
    with trace(lm, read=["router.*"]) as t:
        lm(ids)
    reports = inspect.experts(t)
    assert [report.layer for report in reports] == list(t.by_layer("router.chosen"))
    for report in reports:
        chosen = np.array(t[f"layers.{report.layer}.mlp.router.chosen"])[0]
        logits = np.array(t[f"layers.{report.layer}.mlp.router.logits"], np.float64)[0]
        count = logits.shape[-1]
        load = np.bincount(chosen.flatten(), minlength=count)
        assert report.load.tolist() == load.tolist() and report.tokens == 24 and report.dropped == 0
        assert report.unused == np.flatnonzero(load == 0).tolist() and 0 < report.balance <= 1
        both = sum(np.outer(row, row) for row in np.eye(count)[chosen].sum(axis=1))
        assert report.together.tolist() == both.tolist()
        p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        assert gap(report.entropy[0], -(p * np.log(p)).sum(axis=-1)) < 1e-5
        assert report.weight.sum().item() == pytest.approx(
            np.array(t[f"layers.{report.layer}.mlp.router.weights"]).sum(), rel=1e-5
        )


def test_padding_and_dropped_tokens_are_told_apart_from_text() -> None:
    lm, mask = opened("mixtral"), mx.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    with trace(lm, read=["router.*"]) as t:
        lm(IDS, attention_mask=mask)
    assert inspect.experts(t)[0].tokens == 5 and inspect.experts(t)[0].load.sum().item() == 10
    with editing(lm, [inspect.zero("router.weights", positions=[2, 3], layers=0)]), trace(lm, read=["router.*"]) as t:
        lm(IDS)
    assert [report.dropped for report in inspect.experts(t)][:2] == [2, 0]
    with trace(opened("qwen3"), read=["logits"]) as none, pytest.raises(UsageError, match="was not read"):
        opened("qwen3")(IDS)
        inspect.experts(none)


# --- weights ---


@pytest.mark.parametrize("case", ["llama-gqa-tied", "gpt_neox", "gemma", "phi", "bert", "gpt2"])
def test_circuits_are_the_products_of_the_weights(case: str) -> None:
    lm = opened(case)
    for found in inspect.circuits(lm)[:2]:
        stack = lm.model.encoder if case == "bert" else lm.model.decoder
        block = stack.layers[found.layer]
        op, norm = block.attn.op, block.pre if case == "phi" else block.attn.pre
        d, group = op.head_dim, op.heads // op.kv_heads
        weight = np.array(op.qkv.weight, np.float64)
        if case != "bert":
            weight = weight * (np.array(norm.weight, np.float64) + (case == "gemma"))
        if case in ("gpt_neox", "phi", "gpt2"):  # layer norms take the mean away
            weight = weight - weight.mean(axis=1, keepdims=True)
        out = np.array(op.out.weight, np.float64)
        qk, ov = [], []
        for h in range(op.heads):
            q = weight[h * d : (h + 1) * d]
            k, v = (weight[(op.heads + n + h // group) * d :][:d] for n in (0, op.kv_heads))
            qk.append(q.T @ k)
            ov.append(v.T @ out[:, h * d : (h + 1) * d].T)
        for circuit, dense in ((found.qk, np.array(qk)), (found.ov, np.array(ov))):
            assert gap(circuit.left @ circuit.right, dense) < 1e-4
            norms = np.linalg.norm(dense, axis=(1, 2))
            np.testing.assert_allclose(np.array(circuit.norms), norms, rtol=1e-4)
            singular = np.linalg.svd(dense, compute_uv=False)[:, :d]
            np.testing.assert_allclose(np.array(circuit.singular_values), singular, atol=2e-4 * singular.max())
            np.testing.assert_allclose(
                np.array(circuit.trace), np.trace(dense, axis1=1, axis2=2), atol=1e-4 * norms.max()
            )


def along(found: mx.array, wanted: mx.array) -> float:
    """The cosine of two arrays (..., D), the least one."""
    size = mx.linalg.norm(found, axis=-1) * mx.linalg.norm(wanted, axis=-1)
    return float(((found * wanted).sum(axis=-1) / size).min().item())


@pytest.mark.parametrize("case", [case for case in CASES if "clipped" not in case and attentions(opened(case).model)])
def test_circuits_tell_what_the_first_token_looks_for_and_moves(case: str) -> None:
    """At the first token nothing is turned, and it sees itself alone; so its q, its k and what each head says are those
    of the circuits, but for the sizes by which norms divide, and for biases."""
    lm = mt.load(GOLDEN / case, dtype="float32")
    lm.model.update(tree_map_with_path(lambda name, x: 0 * x if name.endswith("bias") else x, lm.model.parameters()))
    with trace(lm, read=["residual.in", "attn.q", "attn.k", "attn.result"]) as t:
        lm(IDS)
    for found in inspect.circuits(lm):
        step = lm.model.decoder.layers[found.layer].attn
        op, said = step.op, step.post.weight + isinstance(step.post, ShiftedRMSNorm) if "weight" in step.post else 1
        x = t[f"decoder.layers.{found.layer}.in"][0, 0]
        q, k, result = (t[f"decoder.layers.{found.layer}.attn.op.{name}"][0, :, 0] for name in ("q", "k", "result"))
        k = mx.repeat(k, op.heads // k.shape[0], axis=0)
        if isinstance(op, LatentAttention):
            q, k = q[:, : op.plain], k[:, : op.plain]
        assert along(x @ found.qk.left, q) > 1 - 1e-5 and along(found.qk.right @ x, k) > 1 - 1e-5
        gated = isinstance(op, Attention) and op.gated
        assert gated or along(x @ (found.ov.left @ found.ov.right), said * result) > 1 - 1e-5


def test_composition_is_the_norm_of_the_products() -> None:
    first, second = inspect.circuits(opened("llama-gqa-tied"))[:2]
    dense = [[np.array(c.left @ c.right, np.float64) for c in (one.qk, one.ov)] for one in (first, second)]
    found = inspect.composition(first, second)
    norm = np.linalg.norm
    for i, j in ((0, 0), (3, 5), (5, 1)):
        ov, (qk, later) = dense[0][1][i], (dense[1][0][j], dense[1][1][j])
        for kind, other in (("q", qk), ("k", qk.T), ("v", later)):
            assert found[kind][i, j].item() == pytest.approx(norm(ov @ other) / norm(ov) / norm(other), rel=1e-4)
    assert all(-1 <= share <= 1 for share in inspect.copying(first)) and first.qk.of(2).norms[0] == first.qk.norms[2]
    with pytest.raises(UsageError, match="an earlier one first"):
        inspect.composition(second, first)
    with pytest.raises(UsageError, match="no attention whose q, k and v are linear"):
        inspect.circuits(opened("mamba"))


def test_quantized_weights_have_circuits_too(tmp_path: Any) -> None:
    small = mt.load(mt.convert("shakespeare", tmp_path / "small", quantize=8).path)
    for one, two in zip(inspect.circuits(small), inspect.circuits(mt.load("shakespeare")), strict=True):
        np.testing.assert_allclose(np.array(one.ov.norms), np.array(two.ov.norms), rtol=0.01)
