"""Edits: they change what they name and nothing else, in one pass, in steps and in generation."""

from typing import Any

import mlx.core as mx
import pytest
from helpers import CASES, expected, gap, ids_of, opened
from test_inspect_trace import ATTENDING

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.errors import UsageError
from mlx_tformer.inspect import editing, run, trace
from mlx_tformer.nn import Keeping, wanted

IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
OTHER = mx.array([[2, 7, 1, 8, 2, 8, 1, 8]])
INF = float("inf")
PLAIN = ["llama-gqa-tied", "qwen3", "deepseek_v2", "mistral-window", "gpt_oss", "mixtral"]


def read(lm: Any, name: str, ids: mx.array = IDS) -> mx.array:
    with trace(lm, read=[name]) as t:
        lm(ids)
    return t[name]


# --- identities ---


@pytest.mark.parametrize("case", CASES)
def test_patching_activations_with_themselves_changes_nothing(case: str) -> None:
    lm, ids = opened(case), ids_of(case)
    names = ["residual.out", "mlp.delta"] + (["attn.z", "attn.q", "attn.k"] if case in ATTENDING else [])
    if case in ("mamba", "mamba2"):
        names = ["residual.out", "mixer.x"]
    plain = lm(ids)
    with trace(lm, read=names) as t:
        lm(ids)
    assert gap(run(lm, ids, [inspect.patch(name, t) for name in names]), plain) <= 2e-6 * mx.abs(plain).max().item()
    moved = run(lm, ids, [inspect.patch("residual.out", t, positions={5: 4})])
    assert gap(moved[:, :5], plain[:, :5]) < 2e-6 * mx.abs(plain).max().item() and gap(moved, plain) > 1e-3


@pytest.mark.parametrize("case", ["qwen3", "mixtral", "gpt_neox", "gemma2", "deepseek_v3"])
def test_patching_patterns_and_experts_with_themselves_changes_nothing(case: str) -> None:
    lm, ids = opened(case), ids_of(case)
    names = [
        "attn.pattern",
        "attn.scores",
        "attn.result",
        *(["op.said", "experts.hidden"] if case == "mixtral" else []),
    ]
    plain = lm(ids)
    for name in names:
        assert gap(run(lm, ids, [inspect.patch(name, ids)]), plain) < 5e-5


@pytest.mark.parametrize("case", [c for c in ATTENDING if c in PLAIN])
def test_ablating_all_heads_of_a_layer_is_skipping_its_attention(case: str) -> None:
    lm, ids = opened(case), ids_of(case)
    op = lm.model.decoder.layers[1].attn.op
    bias = op.out.get("bias", 0.0)
    skipped = run(lm, ids, [inspect.set("attn.delta", bias, layers=1)])
    for name in ("attn.z", "attn.v", "attn.pattern", "attn.result"):
        if not (case == "deepseek_v2" and name == "attn.v"):
            assert gap(run(lm, ids, [inspect.zero(name, layers=1)]), skipped) < 2e-5
    every = {1: list(range(op.heads))}
    assert gap(run(lm, ids, [inspect.zero("attn.z", heads=every)]), skipped) < 2e-5
    assert gap(skipped, lm(ids)) > 1e-2


@pytest.mark.parametrize("case", PLAIN)
def test_edits_in_steps_are_those_of_one_pass(case: str) -> None:
    lm, ids = opened(case), ids_of(case)
    edits = [
        inspect.zero("attn.z", heads={1: [0, 2]}),
        inspect.scale("attn.v", 0.5, heads=[0], positions=[0, 7, 23])
        if case not in ("deepseek_v2", "mistral-window")
        else inspect.scale("attn.z", 0.5, positions=[0, 7, 23]),
        inspect.steer("residual.out", mx.ones((lm.model.embed.tokens.weight.shape[1],)), 0.3, positions=slice(5, 20)),
        inspect.zero("attn.pattern", layers=[0], keys=[20], positions=[22]),
        inspect.patch("residual.in", ids[:, ::-1], layers=2, positions=[3, 21]),
    ]
    whole = run(lm, ids, edits)
    cache, parts = lm.new_cache(24), []
    with editing(lm, edits):
        for start, stop in ((0, 9), (9, 10), (10, 21), (21, 22), (22, 23), (23, 24)):
            parts.append(lm(ids[:, start:stop], cache))
    assert gap(mx.concatenate(parts, axis=1), whole) < 5e-5 and gap(whole, lm(ids)) > 1e-2


@pytest.mark.parametrize("case", ["llama-gqa-tied", "deepseek_v3"])
@pytest.mark.parametrize(
    "edits",
    [
        [inspect.set("attn.scores", -INF, keys=[1, 17])],
        [inspect.zero("attn.pattern", keys=[0, 12], positions=slice(12, None))],
        [inspect.scale("attn.k", 0.5, positions=[1, 13])],
    ],
    ids=["scores", "pattern", "keys"],
)
def test_keys_of_a_bounded_cache_are_edited_by_their_places(case: str, edits: list[inspect.Edit]) -> None:
    lm, ids, how = opened(case), ids_of(case), Keeping(size=7, keep=2)
    cache = lm.new_cache(24, how)
    with editing(lm, edits):
        whole = lm(ids, lm.new_cache(24, how))
        found = mx.concatenate([lm(ids[:, i : i + 4], cache) for i in range(0, 24, 4)], axis=1)
    assert gap(found, whole) < 5e-5 * mx.abs(whole).max().item()
    assert gap(whole, lm(ids, lm.new_cache(24, how))) > 1e-3


def test_an_edited_generation_is_that_of_edited_passes() -> None:
    lm, prompt = opened("qwen3"), mx.array(expected("qwen3")["prompt_ids"])
    edits = [inspect.zero("mlp.delta", layers=0), inspect.scale("attn.z", 2.0, heads=[1])]
    with editing(lm, edits):
        steps = [step.token for step in lm.generate(prompt, max_tokens=6, stop_at_end=False)]
    ids = prompt
    for token in steps:
        assert mx.argmax(run(lm, ids, edits)[0, -1]).item() == token
        ids = mx.concatenate([ids, mx.array([[token]])], axis=1)
    assert steps != expected("qwen3")["greedy_ids"][0, :6].tolist()


# --- what each of them does ---


def test_each_edit_does_what_it_says_where_it_says() -> None:
    lm = opened("qwen3")
    before = read(lm, "layers.1.attn.z")
    vector = mx.arange(before.shape[-1]) / 10.0
    for edit, known in {
        inspect.zero: mx.zeros_like(before),
        inspect.scale: 3 * before,
        inspect.set: mx.full(before.shape, 0.25),
        inspect.steer: before + 2 * vector,
        inspect.mean: mx.broadcast_to(before.mean(axis=2, keepdims=True), before.shape),
        inspect.rewrite: before**2,
    }.items():
        extra = {
            inspect.scale: (3.0,),
            inspect.set: (0.25,),
            inspect.steer: (vector, 2.0),
            inspect.rewrite: (lambda z: z**2,),
        }.get(edit, ())
        with editing(lm, [edit("attn.z", *extra, layers=1, heads=[2], positions=[3, -1])]):
            after = read(lm, "layers.1.attn.z")
        assert gap(after[:, 2, 3], known[:, 2, 3]) < 1e-6 and gap(after[:, 2, 7], known[:, 2, 7]) < 1e-6
        assert gap(after, before) > 1e-3
        for head, position in ((0, 3), (2, 2), (1, 7)):
            assert gap(after[:, head, position], before[:, head, position]) == 0


def test_a_patch_takes_the_positions_of_another_prompt_or_trace() -> None:
    lm = opened("qwen3")
    mine, theirs = read(lm, "layers.1.out"), read(lm, "layers.1.out", OTHER)
    for source in (OTHER, OTHER[0].tolist()):
        with editing(lm, [inspect.patch("residual.out", source, layers=1, positions=[2, 5])]):
            mixed = read(lm, "layers.1.out")
        assert gap(mixed[:, [2, 5]], theirs[:, [2, 5]]) < 1e-5 and gap(mixed[:, [0, 7]], mine[:, [0, 7]]) == 0
    with editing(lm, [inspect.patch("residual.out", OTHER, layers=1, positions={6: 0, 1: -1})]):
        moved = read(lm, "layers.1.out")
    assert gap(moved[:, 6], theirs[:, 0]) < 1e-5 and gap(moved[:, 1], theirs[:, -1]) < 1e-5
    with editing(lm, [inspect.patch("residual.out", OTHER[:, :3], layers=1)]):
        short = read(lm, "layers.1.out")
    assert gap(short[:, :3], theirs[:, :3]) < 1e-5 and gap(short[:, 3:], mine[:, 3:]) == 0


def test_scores_of_minus_infinity_hide_a_key_and_the_rest_sums_to_one() -> None:
    lm = opened("qwen3")
    with editing(lm, [inspect.set("attn.scores", -INF, keys=[0], layers=1)]):
        pattern = read(lm, "layers.1.attn.pattern")
        logits = lm(IDS)
    assert mx.all(pattern[..., 0] == 0).item() and mx.all(pattern[:, :, 0] == 0).item()  # the first sees itself alone
    assert gap(pattern.sum(axis=-1)[:, :, 1:], mx.ones((1, pattern.shape[1], 7))) < 1e-6
    assert not mx.any(mx.isnan(logits)).item()
    with editing(lm, [inspect.set("attn.pattern", 1.0, keys=[7], layers=1)]):
        assert gap(read(lm, "layers.1.attn.pattern")[..., 7], mx.ones((1, pattern.shape[1], 8))) == 0


def test_a_mean_leaves_padding_out_and_may_come_from_other_prompts() -> None:
    lm = opened("qwen3")
    alone = read(lm, "layers.1.mlp.delta", IDS[:, 3:]).mean(axis=1)
    mask = mx.array([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    edit = [inspect.mean("mlp.delta", layers=1)]
    with editing(lm, edit), trace(lm, read=["layers.1.mlp.delta"]) as t:
        lm(mx.concatenate([IDS, IDS]), attention_mask=mask)
    assert gap(t["layers.1.mlp.delta"][0, 5], alone[0]) < 1e-5
    assert gap(t["layers.1.mlp.delta"][1, 5], read(lm, "layers.1.mlp.delta").mean(axis=1)[0]) < 1e-5
    with editing(lm, [inspect.mean("mlp.delta", OTHER, layers=1)]):
        found = read(lm, "layers.1.mlp.delta", IDS[:, :1])
    assert gap(found[0, 0], read(lm, "layers.1.mlp.delta", OTHER)[0].mean(axis=0)) < 1e-5


def test_edits_come_in_order_and_nest() -> None:
    lm = opened("qwen3")
    before = read(lm, "layers.0.out")
    with editing(
        lm, [inspect.scale("residual.out", 2.0, layers=0), inspect.set("residual.out", 1.0, layers=0, positions=0)]
    ):
        both = read(lm, "layers.0.out")
        with editing(lm, [inspect.scale("residual.out", 3.0, layers=0)]):
            nested = read(lm, "layers.0.out")
    assert gap(both[:, 1:], 2 * before[:, 1:]) < 1e-5 and gap(both[:, 0], mx.ones_like(both[:, 0])) == 0
    assert gap(nested, 3 * both) < 1e-4


# --- refusals ---


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (inspect.zero("attn.zz"), "nearest names: attn.z"),
        (inspect.zero("attn.z", layers=[1, 9]), r"found layers \[9\], expected some of 0, 1, 2"),
        (inspect.zero("attn.z", heads={9: [0]}), r"found layers \[9\]"),
        (inspect.zero("attn.z", heads=[99]), "found head 99, expected 0 to"),
        (inspect.zero("attn.k", heads=[5]), "found head 5, expected 0 to 1"),
        (inspect.zero("residual.out", heads=[0]), "found heads, but it has none"),
        (inspect.zero("attn.z", keys=[0]), "only patterns and scores"),
        (inspect.zero("attn.z", positions=[3, 50]), "no token stood at position 50"),
        (inspect.zero("attn.z", positions=-9), "no token stood at position -9"),
        (inspect.zero("attn.z", positions=slice(50, 60)), "touched nothing"),
        (inspect.zero("attn.z", positions=slice(-2, None)), "counts from the beginning"),
        (inspect.zero("attn.z", layers=0, heads={1: [0]}), "give one of them"),
        (inspect.zero("attn.pattern", keys=[50]), "touched nothing"),
        (inspect.steer("residual.out", mx.zeros((5,))), "vector: found shape"),
        (inspect.set("residual.out", mx.zeros((3, 5))), "to: found shape"),
        (inspect.patch("attn.pattern", IDS[:, :3]), "source: found shape"),
        (inspect.patch("attn.z", IDS, positions={0: 77}), "the source has 8 tokens"),
    ],
)
def test_an_edit_that_touches_nothing_or_does_not_fit_is_refused(edit: inspect.Edit, told: str) -> None:
    lm, plain = opened("qwen3"), opened("qwen3")(IDS)
    with pytest.raises(UsageError, match=told) as raised:
        run(lm, IDS, [edit])
    assert "\n" not in str(raised.value)
    assert not wanted(lm.model.decoder.layers[0].attn.op, "z") and mx.array_equal(lm(IDS), plain).item()


def test_a_mean_of_one_token_and_a_trace_without_the_activation_are_refused() -> None:
    lm = opened("qwen3")
    with pytest.raises(UsageError, match="of one token; give a trace or prompt"), editing(lm, [inspect.mean("attn.z")]):
        list(lm.generate(IDS, max_tokens=3))
    with trace(lm, read=["residual.out"]) as t:
        lm(IDS)
    with pytest.raises(UsageError, match=r"the trace has not read decoder\.layers\.0\.attn\.op\.z"):
        run(lm, IDS, [inspect.patch("attn.z", t)])
    with (
        pytest.raises(UsageError, match="touched nothing: what it names was never computed"),
        editing(lm, [inspect.zero("logits")]),
    ):
        lm.model.hidden(IDS)


def test_text_may_be_given_as_text(shakespeare: mt.LanguageModel) -> None:
    cut = run(shakespeare, "ROMEO: what", [inspect.patch("residual.out", "JULIET: oh", layers=0)])
    assert cut.shape[1] == len(shakespeare.tokens("ROMEO: what"))
