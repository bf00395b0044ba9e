"""Reading activations: what is read is what the model computed, and reading changes nothing."""

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import CASES, cases_of, expected, gap, ids_of, opened

import mlx_tformer as mt
from mlx_tformer.errors import Mismatch, UsageError
from mlx_tformer.inspect import sites_of, trace
from mlx_tformer.nn import Cache, Keeping, attention, wanted, watch
from mlx_tformer.nn.keeping import WHOLE

ENCODERS = cases_of("mlm")
ATTENDING = [case for case in CASES if any(name.startswith("attention.") for name in expected(case))]
POST_NORM = [case for case in CASES if case == "opt-after"]
IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def call(case: str) -> tuple[Any, Callable[[], mx.array]]:
    """The model of a case, and its run on the case's text."""
    lm, e = opened(case), expected(case)
    if case in ENCODERS:
        return lm, lambda: lm(mx.array(e["input_ids"]), attention_mask=mx.array(e["attention_mask"]))
    return lm, lambda: lm(mx.array(e["input_ids"]))


def stepwise(lm: Any, ids: mx.array, cuts: list[int], how: Keeping = WHOLE) -> Cache:
    cache = lm.new_cache(ids.shape[1], how)
    for start, stop in pairwise([0, *cuts, ids.shape[1]]):
        lm(ids[:, start:stop], cache)
    return cache


# --- what is read ---


@pytest.mark.parametrize("case", ATTENDING + ENCODERS)
def test_patterns_are_those_of_transformers_and_give_the_fused_output(case: str) -> None:
    lm, run = call(case)
    with trace(lm, read=["attn.pattern"]) as t:
        run()
    known = {int(n.rpartition(".")[2]): v for n, v in expected(case).items() if n.startswith("attention.")}
    found = t.by_layer("attn.pattern")
    real = expected(case)["attention_mask"].astype(bool) if case in ENCODERS else np.ones((1, 24), bool)
    for layer, pattern in found.items():
        if layer in known:
            rows = [np.array(x).swapaxes(1, 2)[real] for x in (pattern, known[layer])]
            assert np.abs(rows[0] - rows[1]).max() < 2e-5
        assert gap(mx.where(pattern == 0, 0, pattern), pattern) == 0
        if case in CASES:
            assert mx.all(mx.triu(pattern, 1) == 0).item()
    assert set(found) >= set(known) and t.check(2e-6) < 2e-6


@pytest.mark.parametrize("case", CASES + ENCODERS)
def test_reading_all_but_patterns_changes_not_one_bit(case: str) -> None:
    lm, run = call(case)
    plain = run()
    names = [site.name for site in sites_of(lm.model) if not site.name.startswith("drafts.")]
    some = [n for n in names if not n.endswith((".pattern", ".scores", ".mixer.op.hidden"))]
    with trace(lm, read=some) as t:
        assert mx.array_equal(run(), plain).item()
    assert sorted(t.names) == sorted(some)
    with trace(lm, read=["logits" if "logits" in t else "out", "*out"]) as t:
        assert mx.array_equal(run(), plain).item()


@pytest.mark.parametrize("case", [case for case in CASES if case not in POST_NORM])
def test_the_embedding_and_all_that_is_added_is_the_final_residual(case: str) -> None:
    lm, run = call(case)
    with trace(lm, read=["embed.out", "*.delta", "residual.in", "residual.out"]) as t:
        run()
    total = t["embed.out"]
    for layer, after in t.by_layer("residual.out").items():
        assert gap(t[f"decoder.layers.{layer}.in"], total) <= 1e-5 * mx.abs(total).max().item()
        for delta in t.all(f"decoder.layers.{layer}.*.delta").values():
            total = total + delta
        assert gap(total, after) <= 1e-5 * mx.abs(after).max().item()


@pytest.mark.parametrize("case", ["qwen3", "deepseek_v2", "gpt_neox", "gemma2", "opt", "mpt"])
def test_what_the_heads_add_is_what_attention_adds(case: str) -> None:
    lm, run = call(case)
    with trace(lm, read=["attn.result", "attn.z"]) as t:
        run()
    for layer, each in t.by_layer("attn.result").items():
        op = lm.model.decoder.layers[layer].attn.op
        assert each.shape[:2] == (1, op.heads)
        together = op.out(t[f"layers.{layer}.attn.z"].swapaxes(1, 2).flatten(2))
        assert gap(each.sum(axis=1) + op.out["bias"] if "bias" in op.out else each.sum(axis=1), together) < 1e-5


def test_experts_are_read_by_text_and_token() -> None:
    lm, ids = opened("mixtral"), mx.concatenate([ids_of("mixtral"), ids_of("mixtral")[:, ::-1]])
    with trace(lm, read=["layers.0.mlp.*", "layers.0.mlp.op.*"]) as t:
        lm(ids)
    mixture = lm.model.decoder.layers[0].mlp.op
    top, count = mixture.router.top, mixture.router.count
    x, chosen, weights = t["layers.0.mlp.in"], t["mlp.op.router.chosen"], t["mlp.op.router.weights"]
    assert t["mlp.op.router.logits"].shape == (2, 24, count) and chosen.shape == weights.shape == (2, 24, top)
    assert gap(t["mlp.op.router.logits"], x @ mixture.router.weight.T) < 1e-5
    hidden, said = t["mlp.op.experts.hidden"], t["mlp.op.said"]
    assert gap((said * weights[..., None]).sum(axis=2), t["layers.0.mlp.delta"]) < 1e-5
    row, token, choice = 1, 5, 1
    expert = chosen[row, token, choice].item()
    assert gap(mixture.experts.down.weight[expert] @ hidden[row, token, choice], said[row, token, choice]) < 1e-5


# --- text in several passes ---


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("llama-dynamic", "phi3-longrope")])
def test_rows_of_steps_and_chunks_are_those_of_one_pass(case: str) -> None:
    lm, ids = opened(case), ids_of(case)
    names = ["embed.out", "residual.out", "logits"]
    names += ["attn.pattern", "attn.q", "attn.z"] if case in ATTENDING else []
    with trace(lm, read=names) as whole:
        lm(ids)
    with trace(lm, read=names) as t:
        stepwise(lm, ids, [9, 10, 11, 20])
    for name in whole.names:
        full, found = whole[name], t[name]
        if name.endswith(".pattern"):
            assert t.keys(name).stop == 24
            full = full[..., t.keys(name).start :]
        assert gap(found, full) < 5e-5 * max(1, mx.abs(full).max().item()), name
    assert mx.array_equal(t.ids, ids).item()
    if "attn.pattern" in names:
        t.check(2e-6)


@pytest.mark.parametrize("case", ["qwen3", "mistral-window", "deepseek_v2"])
def test_keys_and_values_of_steps_are_those_of_the_whole_text(case: str) -> None:
    lm, ids = opened(case), ids_of(case)
    with trace(lm, read=["attn.k", "attn.v"]) as whole:
        lm(ids)
    with trace(lm, read=["attn.k", "attn.v"]) as t:
        stepwise(lm, ids, [5, *range(6, 24)])
    for name in whole.names:
        keys = t.keys(name)
        assert keys.stop == 24 and gap(t[name], whole[name][:, :, keys.start :]) < 2e-5


def test_a_window_shows_its_keys_in_the_order_of_the_text() -> None:
    lm, ids = opened("mistral-window"), ids_of("mistral-window")
    cache = stepwise(lm, ids[:, :-1], list(range(1, 23)))
    with trace(lm, read=["layers.0.attn.pattern"]) as t, trace(lm, read=["layers.0.attn.pattern"]) as same:
        lm(ids[:, -1:], cache)
    with trace(lm, read=["layers.0.attn.pattern"]) as whole:
        lm(ids)
    keys = t.keys("attn.pattern")
    assert keys.stop == 24 and keys.start > 0
    assert gap(t["attn.pattern"][:, :, 0], whole["attn.pattern"][:, :, -1, keys.start :]) < 1e-5
    assert gap(same["attn.pattern"], t["attn.pattern"]) == 0
    shown = t.patterns(0)[0]
    assert (shown.first_query, shown.first_key, shown.queries, len(shown.keys)) == (23, keys.start, ["23"], len(keys))


@pytest.mark.parametrize("cuts", [[8, *range(9, 24)], [5, 13, 14]], ids=["steps", "chunks"])
@pytest.mark.parametrize("case", ["llama-gqa-tied", "qwen3-window", "gpt_oss", "deepseek_v3"])
def test_a_bounded_cache_shows_its_keys_at_their_places_with_a_gap_between(case: str, cuts: list[int]) -> None:
    lm, ids, how = opened(case), ids_of(case), Keeping(size=7, keep=2)
    names = ["attn.pattern", "attn.scores", "attn.k", "attn.v", "logits"]
    with trace(lm, read=names) as whole:
        stepwise(lm, ids, [], how)  # in one pass there is no gap, but a mask
    with trace(lm, read=names) as t:
        stepwise(lm, ids, cuts, how)
    for name in t.names:
        full, found = whole[name], t[name]
        if not name.endswith("logits"):
            assert t.keys(name).stop == 24
            axis = 2 if name.endswith((".k", ".v")) else 3
            full = mx.split(full, [t.keys(name).start], axis=axis)[1]
        full, found = (mx.where(x == -mx.inf, 1e3, x) for x in (full, found))
        assert gap(found, full) < 5e-5 * max(1, mx.where(full == 1e3, 0, mx.abs(full)).max().item()), name
    t.check(2e-6)


def test_what_a_bounded_cache_has_lost_when_a_trace_begins_is_nothing() -> None:
    lm, ids, how = opened("llama-gqa-tied"), ids_of("llama-gqa-tied"), Keeping(size=7, keep=2)
    cache = stepwise(lm, ids[:, :20], [9, 16], how)
    with trace(lm, read=["layers.1.attn.pattern", "layers.1.attn.k", "layers.1.attn.scores"]) as t:
        lm(ids[:, 20:22], cache)
        lm(ids[:, 22:], cache)
    seen = [i < 2 or i >= 16 for i in range(24)]
    assert (mx.abs(t["attn.k"]).max(axis=(0, 1, 3)) > 0).tolist() == seen
    assert (t["attn.scores"].max(axis=(0, 1, 2)) > -mx.inf).tolist() == seen
    assert t["attn.pattern"].shape == (1, 6, 4, 24) and t.patterns(1, 0)[0].first_key == 0


@pytest.mark.parametrize("case", ["qwen3", "gemma3", "jamba", "gpt_oss"])
def test_generation_is_read_token_by_token(case: str) -> None:
    lm, prompt = opened(case), mx.array(expected(case)["prompt_ids"])
    with trace(lm, read=["attn.pattern", "residual.out"]) as t:
        steps = [step.token for step in lm.generate(prompt, max_tokens=8, stop_at_end=False)]
    ids = mx.concatenate([prompt, mx.array([steps])], axis=1)
    assert steps == expected(case)["greedy_ids"][0, :8].tolist()
    read = t.ids.shape[1]
    assert 17 <= read <= 18 and mx.array_equal(t.ids, ids[:, :read]).item()
    with trace(lm, read=["attn.pattern", "residual.out"]) as whole:
        lm(ids[:, :read])
    for name in t.names:
        full = whole[name][..., t.keys(name).start :] if name.endswith("pattern") else whole[name]
        assert gap(t[name], full) < 5e-5 * max(1, mx.abs(full).max().item())


def test_forgotten_tokens_leave_the_text_and_a_new_text_takes_the_place_of_the_old() -> None:
    lm, ids, other = opened("qwen3"), ids_of("qwen3"), ids_of("qwen3")[:, ::-1]
    cache = lm.new_cache()
    with trace(lm, read=["attn.pattern"]) as t:
        lm(ids[:, :10], cache)
        cache.trim(4)
        lm(other[:, :3], cache)
    both = mx.concatenate([ids[:, :6], other[:, :3]], axis=1)
    with trace(lm, read=["attn.pattern"]) as whole:
        lm(ids)
        lm(both)
    assert mx.array_equal(t.ids, both).item()
    for name, pattern in whole.all("attn.pattern").items():
        assert pattern.shape[-1] == 9 and gap(t[name][..., :9], pattern) < 1e-5 and t[name].shape[-2] == 9


def test_padding_in_front_is_told_and_takes_no_mass() -> None:
    lm, ids = opened("qwen3"), mx.concatenate([IDS, IDS])
    mask = mx.array([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    with trace(lm, read=["attn.pattern"]) as t:
        lm(ids, attention_mask=mask)
    pattern = t["layers.0.attn.pattern"]
    assert t.left == [2, 0]
    assert mx.all(pattern[0, :, :, :2] == 0).item() and mx.all(t.deficit("layers.0.attn.pattern")[0, :, :2] == 1).item()
    t.check(1e-5)


# --- the proof ---


def planted_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern of queries that did not turn with their keys."""
    real = attention._explicit
    monkeypatch.setattr(attention, "_explicit", lambda m, q, *rest: real(m, mx.roll(q, 1, axis=2), *rest))


def planted_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention._explicit
    monkeypatch.setattr(attention, "_explicit", lambda m, q, k, v, mask, *rest: real(m, q, k, v, None, *rest))


def planted_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query head h with key head h mod K instead of h // (H / K)."""
    real = attention._explicit

    def wrong(m: Any, q: mx.array, k: mx.array, v: mx.array, *rest: Any) -> mx.array:
        return real(m, q, mx.roll(k, 1, axis=1), v, *rest)

    monkeypatch.setattr(attention, "_explicit", wrong)


@pytest.mark.parametrize("case", ["llama-gqa-tied", "gemma2"])  # one of them has caps, and so no fused path
@pytest.mark.parametrize("fault", [planted_rotation, planted_mask, planted_groups])
def test_the_check_finds_what_rows_that_sum_to_one_do_not(
    fault: Callable[[pytest.MonkeyPatch], None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = opened(case)
    fault(monkeypatch)
    with trace(lm, read=["layers.1.attn.pattern"]) as t:
        lm(ids_of(case))
    assert gap(t["attn.pattern"].sum(axis=-1), mx.ones((1, 6, 24))) < 1e-5
    with pytest.raises(Mismatch, match=r"decoder\.layers\.1\.attn\.op\.pattern: pattern @ values differs"):
        t.check(0.05)


def test_the_check_names_the_worst_layer_and_knows_what_is_no_number() -> None:
    lm = opened("qwen3")
    for factor in (1.01, float("nan")):
        with (
            watch("decoder.layers.2.attn.op.pattern", lambda path, value, factor=factor: factor * value),
            trace(lm, read=["attn.pattern"]) as t,
        ):
            lm(IDS)
        with pytest.raises(Mismatch, match=r"layers\.2"):
            t.check(1e-4)
    with trace(lm, read=["residual.out"]) as t:
        lm(IDS)
    with pytest.raises(UsageError, match="nothing to check"):
        t.check()


def test_what_a_row_lacks_of_one_is_the_mass_of_its_sink() -> None:
    lm = opened("gpt_oss")
    with trace(lm, read=["attn.pattern", "attn.scores"]) as t:
        lm(ids_of("gpt_oss"))
    for layer in t.layers:
        sinks = lm.model.decoder.layers[layer].attn.op.sinks.astype(mx.float32)[:, None]
        scores = t[f"layers.{layer}.attn.scores"]
        mass = mx.exp(sinks - mx.logaddexp(mx.logsumexp(scores, axis=-1), sinks))
        assert gap(t.deficit(f"layers.{layer}.attn.pattern"), mass) < 1e-6 and mass.max().item() > 0.1
        assert gap(t.patterns(layer)[0].deficit, mass[0]) < 1e-6


# --- how it behaves ---


def test_nothing_is_left_behind_after_an_exception_and_traces_nest() -> None:
    lm, plain = opened("qwen3"), opened("qwen3")(IDS)
    with pytest.raises(ZeroDivisionError), trace(lm, read=["attn.pattern"]) as t:
        lm(IDS)
        raise ZeroDivisionError
    assert not wanted(lm.model.decoder.layers[0].attn.op, "pattern") and len(t) == 3
    with trace(lm, read=["residual.out"]) as outer:
        with trace(lm, read=["attn.pattern"]) as inner:
            lm(IDS)
        assert not wanted(lm.model.decoder.layers[0].attn.op, "pattern")
        assert mx.array_equal(lm(IDS), plain).item()
    assert (len(inner), len(outer)) == (3, 3) and "residual.out" not in inner and "residual.out" in outer


def test_a_trace_shows_what_the_model_goes_on_with_whoever_changes_it() -> None:
    lm = opened("qwen3")
    for outside in (True, False):
        change = watch("decoder.layers.0.out", lambda path, value: 0 * value)
        reading = trace(lm, read=["residual.out"])
        first, second = (reading, change) if outside else (change, reading)
        with first, second:
            lm(IDS)
        assert mx.abs(reading["layers.0.out"]).max().item() == 0


def test_what_is_kept_is_no_larger_than_what_was_read() -> None:
    """The keys of a cache are a slice of a buffer of 256 tokens."""
    lm = opened("qwen3")
    lm(IDS, lm.new_cache())
    gc.collect()
    before = mx.get_active_memory()
    with trace(lm, read=["attn.k", "attn.v"]) as t:
        lm(IDS, lm.new_cache())
    gc.collect()
    kept = sum(t[name].nbytes for name in t)
    assert mx.get_active_memory() - before < kept + 40_000 < 2 * 3 * 256 * 2 * 16 * 4


def test_names_that_mean_several_things_or_nothing_are_refused() -> None:
    lm = opened("qwen3")
    with trace(lm, read=["attn.pattern", "residual.out"]) as t:
        lm(IDS)
    assert list(t) == t.names and len(t) == 6 and t.layers == [0, 1, 2] and "attn.z" not in t
    with pytest.raises(UsageError, match="means 3 activations"):
        t["attn.pattern"]
    with pytest.raises(UsageError, match=r"no activation is called 'attn\.z'"):
        t["attn.z"]
    with pytest.raises(UsageError, match="several activations of a layer"):
        t.by_layer("*")


def test_patterns_come_with_labels_for_those_who_draw_them(shakespeare: mt.LanguageModel) -> None:
    tokens = shakespeare.tokens("ROMEO: what light")
    with trace(shakespeare, read=["attn.pattern"]) as t:
        shakespeare(tokens)
    texts = [shakespeare.tokenizer.token_text(i) for i in tokens]
    shown = t.patterns(layer=1, head=2)[0]
    assert shown.queries == shown.keys == t.labels() == texts and shown.values.shape == (len(texts), len(texts))
    assert (shown.layer, shown.head, shown.name) == (1, 2, "decoder.layers.1.attn.op.pattern")
    assert gap(shown.values, t["blocks.1.attn.hook_pattern"][0, 2]) == 0 and len(t.patterns()) == len(t.layers)
    for wrong in ({"layer": 99}, {"head": 99}, {"row": 1}):
        with pytest.raises(UsageError, match=r"found|no pattern"):
            t.patterns(**wrong)
    with trace(opened("qwen3"), read=["attn.pattern"]) as bare:
        opened("qwen3")(IDS)
    assert bare.patterns(0)[0].queries == [str(i) for i in IDS[0].tolist()]


def test_patterns_of_quantized_weights_are_marked_as_such(tmp_path: Any) -> None:
    lm = mt.load(mt.convert("shakespeare", tmp_path / "small", quantize=8).path)
    with trace(lm, read=["attn.pattern", "attn.result"]) as t:
        lm(IDS)
    assert "quantized (8 bits)" in t.notes[0] and trace(opened("qwen3"), read=["logits"]).notes == []
    t.check(0.02)


@pytest.mark.parametrize("bits", [4, 8])
def test_patterns_over_packed_keys_are_marked_as_such_from_the_token_on_that_packs_them(bits: int) -> None:
    lm, ids = opened("llama-gqa-tied"), ids_of("llama-gqa-tied")
    cache = lm.new_cache(24, Keeping(bits=bits, start=10))
    with trace(lm, read=["attn.pattern"]) as t:
        lm(ids[:, :10], cache)
        assert t.notes == []
        lm(ids[:, 10:20], cache)
        lm(ids[:, 20:], cache)
    assert len(t.notes) == 1 and f"kept in {bits} bits" in t.notes[0] and t.picture(1).notes == t.notes
    t.check(2e-6)
    with trace(lm, read=["residual.out"]) as later:
        list(lm.generate(ids, max_tokens=2, kv_bits=bits))
    assert later.notes == t.notes  # whatever is read: it comes after attention
