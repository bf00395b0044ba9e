"""Statistics of attention in whole models: those of the pattern, in chunks, steps and batches; what a watch keeps."""

import io
import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import CASES, GOLDEN, attentions, cases_of, expected, gap, golden, ids_of, seen

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.errors import UsageError
from mlx_tformer.generation import decode
from mlx_tformer.generation.sampling import Sampler, Sampling
from mlx_tformer.inspect import Wants, statistics_of, streaming
from mlx_tformer.nn import LM, Call, Keeping, Module, Places, attend, attention, latent, spectate
from mlx_tformer.tokens import Spans, Tokens

ATTENDING = [case for case in CASES if attentions(golden(case))]
LATENT = [case for case in ATTENDING if case.startswith("deepseek")]

# --- whole models ---

TOKENS = Tokens(range(24)).spans(every=5)


def watching(layers: str = "*", keep: int = 4096, top: int = 3, spans: Spans = TOKENS) -> inspect.Watch:
    """A watch of everything."""
    return inspect.stats(top=top, mass=spans, received=True, layers=layers, keep=keep)


WATCHED = Wants(top=3, spans=TOKENS, received=True)
VALUES = ("sink", "entropy", "logsumexp", "distance", "peak_weight", "top_weights", "mass", "received")


def values(layer: inspect.LayerStatistics) -> dict[str, np.ndarray]:
    """The statistics of a layer that do not hang on which of two equals is taken."""
    return {name: getattr(layer, name) for name in VALUES}


def agree(found: inspect.Watch, wanted: inspect.Watch, rows: slice = slice(None), limit: float = 2e-5) -> None:
    """Two watches saw the same; or the last one more, of which `rows` are compared."""
    assert found.paths == wanted.paths and found.paths
    for path in found.paths:
        assert np.array_equal(found[path].queries, wanted[path].queries[:, rows])
        for name, value in values(wanted[path]).items():
            value = value if name == "received" else value[:, :, rows]
            assert gap(mx.array(values(found[path])[name]), value) < limit * max(1, abs(value).max()), (path, name)


@pytest.mark.parametrize("case", ATTENDING)
def test_statistics_are_those_of_the_traced_pattern_and_change_nothing(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    plain = model(ids)
    with watching() as watch:
        watched = model(ids)
    assert mx.array_equal(watched, plain).item()
    with seen("*.attn.op.pattern") as patterns:
        model(ids)
    assert {f"{path}.pattern" for path in watch.paths} == patterns.keys()
    for path in watch.paths:
        sinks = any(op.path == path and "sinks" in op for op in attentions(model))
        wanted = statistics_of(patterns[f"{path}.pattern"], WATCHED, sinks=sinks).arrays()
        for name in wanted.keys() & set(VALUES):
            scale = max(1.0, float(mx.abs(wanted[name]).max().item()))
            assert gap(mx.array(getattr(watch[path], name)), wanted[name]) < 1e-5 * scale, (path, name)


@pytest.mark.parametrize("case", ATTENDING)
@pytest.mark.parametrize("sizes", [[10] + [1] * 14, [5, 8, 11]], ids=["steps", "chunks"])
def test_statistics_of_chunks_and_steps_are_those_of_one_pass(case: str, sizes: list[int]) -> None:
    """Whatever a window's cache has dropped, keys are counted from the beginning of the text."""
    model, ids = golden(case), ids_of(case)
    with watching() as whole:
        model(ids)
    parts, cache, start = watching(), model.new_cache(24), 0
    for size in sizes:
        with parts:
            model(ids[:, start : start + size], cache)
        start += size
    agree(parts, whole)


@pytest.mark.parametrize("case", ["llama-gqa-tied", "qwen3-window", "gpt_oss", "deepseek_v3"])
def test_statistics_over_a_bounded_cache_count_from_the_beginning_of_the_text(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, how = golden(case), ids_of(case), Keeping(size=7, keep=2)
    with watching() as whole:
        model(ids, model.new_cache(24, how))  # one pass: no gap, but a mask
    parts, cache, start = watching(), model.new_cache(24, how), 0
    monkeypatch.setattr(streaming, "BLOCK", 40)
    for size in (5, 8, 1, 1, 1, 8):
        with parts:
            model(ids[:, start : start + size], cache)
        start += size
    agree(parts, whole)


@pytest.mark.parametrize("up_to", [0, 24])
@pytest.mark.parametrize("case", LATENT)
def test_absorbed_and_expanded_latents_have_the_same_statistics(
    case: str, up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = golden(case), ids_of(case)
    with watching() as wanted:
        model(ids)
    monkeypatch.setattr(latent, "ABSORBED_UP_TO", up_to)
    with watching() as found:
        model(ids)
    agree(found, wanted)


@pytest.mark.parametrize(
    "case", ["llama-mha", "mistral-window", "gemma2", "gpt_oss", "llama4", "falcon-alibi", "bloom", "deepseek_v3"]
)
def test_padding_in_front_is_not_counted(case: str) -> None:
    """A row of a batch that is padded by three has the statistics of its text alone, in one pass and in steps."""
    model, ids = golden(case), ids_of(case)
    batch = mx.concatenate([ids[:, :20], mx.concatenate([ids[:, :3], ids[:, :17]], axis=1)])
    mask = mx.arange(20) >= mx.array([[0], [3]])
    with watching() as alone:
        model(ids[:, :17])
    one, steps, cache = watching(), watching(), model.new_cache(20)
    with one:
        model(batch, attention_mask=mask)
    with steps:
        model(batch[:, :15], cache, attention_mask=mask[:, :15])
        for i in range(15, 20):
            model(batch[:, i : i + 1], cache)
    for watch in (one, steps):
        for path in alone.paths:
            assert watch[path].queries[1].tolist() == list(range(-3, 17))
            for name, value in values(alone[path]).items():
                row = values(watch[path])[name][1:]
                row = row[..., :17] if name == "received" else row[:, :, 3:]
                assert gap(mx.array(row), value) < 3e-5 * max(1, abs(value).max()), (path, name)


@pytest.mark.parametrize("case", cases_of("mlm"))
def test_statistics_of_an_encoder_are_those_of_its_patterns(case: str) -> None:
    model = mt.load(GOLDEN / case, dtype="float32")
    ids, mask = mx.array(expected(case)["input_ids"]), mx.array(expected(case)["attention_mask"])
    with watching() as watch:
        watched = model(ids, attention_mask=mask)
    assert mx.array_equal(watched, model(ids, attention_mask=mask)).item()
    with seen("*.pattern") as patterns:
        model(ids, attention_mask=mask)
    assert {f"{path}.pattern" for path in watch.paths} == patterns.keys()
    for path in watch.paths:
        wanted = statistics_of(patterns[f"{path}.pattern"], WATCHED).arrays()
        for name in wanted.keys() & set(VALUES):
            scale = max(1.0, float(mx.abs(wanted[name]).max().item()))
            assert gap(mx.array(getattr(watch[path], name)), wanted[name]) < 1e-5 * scale, (path, name)


def test_the_sink_of_smollm2_is_where_it_is_known_to_be(smollm2: mt.LanguageModel) -> None:
    """Head 18.8 looks at the first token alone, and all heads together give it about two fifths of their weight."""
    said = mx.random.randint(100, 49000, (1, 64), key=mx.random.key(0))
    ids = mx.concatenate([mx.array([[1]]), said, said], axis=1)
    with inspect.stats(mass=Spans(("first", "rest"), (0, *[1] * 128))) as watch:
        smollm2(ids)
    first = np.stack([watch[i].mass[0, :, 1:, 0].mean(axis=-1) for i in range(30)])  # (layers, heads)
    assert first[18, 8] > 0.99 and 0.36 < first.mean() < 0.44
    assert watch[18].entropy[0, 8].mean() < 0.05


# --- generation ---


def test_generating_adds_a_row_for_each_token(shakespeare: mt.LanguageModel) -> None:
    tokens = shakespeare.tokens("ROMEO:\nWhat light is this?")
    spans = tokens.spans(by="line")
    watch, rows = watching(spans=spans), []
    made = shakespeare.generate(tokens, max_tokens=6, stop_at_end=False, watch=watch)
    for _ in made:
        rows.append(watch[2].seen - len(tokens))
        shakespeare(tokens.array)  # what runs between two steps is not watched
    assert rows == [1, 2, 3, 4, 5, 5]  # the model is one token ahead, and never runs on the last one
    with watching(spans=spans) as whole:
        shakespeare(mx.array([[*tokens, *made.tokens[:-1]]]))
    agree(watch, whole)
    assert watch.spans == (*spans.names, "(after)")
    assert (watch[2].mass[0, :, len(tokens) :, -1] > 0).all() and not watch[2].mass[0, :, : len(tokens), -1].any()


def test_a_span_map_tells_where_each_written_token_was_read_from(shakespeare: mt.LanguageModel) -> None:
    tokens = shakespeare.tokens("ROMEO:\nWhat light is this?")
    watch = inspect.stats(mass=tokens.spans(every=4), keep=6)
    made = shakespeare.generate(tokens, max_tokens=5, stop_at_end=False, watch=watch)
    texts = [step.text for step in made]
    drawn = watch.span_map(texts, first=len(tokens) - 1)
    assert (list(drawn.rows), list(drawn.columns)) == ([*watch.spans], texts)
    assert gap(mx.array(drawn.values.sum(axis=0)), np.ones(5)) < 1e-5
    assert drawn.values[-1, 0] == 0 and (drawn.values[-1, 1:] > 0).all()  # what was written counts from the second on
    by_hand = np.mean([watch[i].mass[0, :, -5:].mean(axis=0) for i in range(5)], axis=0).T
    assert gap(mx.array(drawn.values), by_hand) < 1e-6
    with pytest.raises(UsageError, match="rows from 2 on for 5 tokens are not kept, but"):
        watch.span_map(texts, first=2)


def test_a_prompt_that_is_read_in_chunks_is_watched_as_one(
    shakespeare: mt.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = shakespeare.tokens("To be, or not to be, that is the question")
    with watching() as whole:
        shakespeare(tokens.array)
    monkeypatch.setattr(decode, "CHUNK", 4)
    watch = watching()
    next(shakespeare.generate(tokens, max_tokens=1, watch=watch))
    agree(watch, whole)


def test_watching_does_not_change_what_is_generated(shakespeare: mt.LanguageModel) -> None:
    plain, watched = (
        list(shakespeare.generate("JULIET:", max_tokens=8, watch=watch)) for watch in (None, inspect.stats(top=2))
    )
    assert plain == watched


def test_a_text_that_outgrows_its_positions_is_watched_as_it_is_read_at_last() -> None:
    """The text is read again then, which begins the watch anew."""
    model, prompt = golden("llama-longrope"), ids_of("llama-longrope")[0, :18].tolist()
    decoder = decode.Decoder(model, prompt, Sampler(Sampling()), planned=26)
    with watching() as watch:
        list(decoder)
    cache = model.new_cache(26)
    with watching() as whole:
        model(mx.array([decoder.ids[:-1]]), cache)
    agree(watch, whole)


# --- what is kept ---


@pytest.mark.parametrize("keep", [1, 4, 9, 23])
def test_the_last_rows_are_kept_and_keys_go_on_receiving(keep: int) -> None:
    model, ids = golden("llama-mha"), ids_of("llama-mha")
    with watching() as whole:
        model(ids)
    watch, cache = watching(keep=keep), model.new_cache(24)
    with watch:
        for start, stop in [(0, 10), (10, 11), (11, 12), (12, 20), *((i, i + 1) for i in range(20, 24))]:
            model(ids[:, start:stop], cache)
            assert watch[0].queries[0].tolist() == list(range(max(0, stop - keep), stop))
    agree(watch, whole, slice(24 - keep, 24))
    assert watch[0].seen == 24


def test_what_is_kept_is_bounded() -> None:
    q = mx.random.normal((1, 4, 1, 8))
    with inspect.stats(top=4, keep=16) as watch:
        for i in range(1, 200):
            at = Places(range(i - 1, i), range(i))
            attend(Module(), q, mx.zeros((1, 4, i, 8)), mx.zeros((1, 4, i, 8)), scale=1.0, at=at)
    row = 4 * (6 + 2 * 4) * 4 + 2 * 8  # heads, numbers, bytes; and places
    assert watch[""].queries.tolist() == [list(range(183, 199))] and watch.nbytes <= 2 * 16 * row


@pytest.mark.parametrize("keep", [3, 8, 4096])
def test_a_part_that_is_read_again_replaces_its_rows(keep: int) -> None:
    """Also the part of it that is no longer kept."""
    model, ids = golden("llama-mha"), ids_of("llama-mha")
    other = mx.roll(ids, 5, axis=1)
    watch, cache = inspect.stats(keep=keep), model.new_cache(24)
    with watch:
        for chunk in (ids[:, :10], *mx.split(other[:, 10:16], 6, axis=1)):
            model(chunk, cache)
        cache.trim(6)
        model(ids[:, 10:12], cache)
        kept = watch[1].queries[0].tolist()
        assert kept == list(range(12 - len(kept), 12))
        assert watch[1].seen == 12
        model(ids[:, 12:], cache)
    with inspect.stats(keep=keep) as whole:
        model(ids)
    assert np.array_equal(watch[1].queries, whole[1].queries) and watch[1].seen == 24
    assert gap(mx.array(watch[1].entropy), whole[1].entropy) < 1e-5


def test_another_text_begins_anew_and_entering_twice_counts_once() -> None:
    model, ids = golden("llama-mha"), ids_of("llama-mha")
    watch = watching()
    with watch:
        model(mx.concatenate([ids, ids])[:, :9])
        with watch:
            model(ids)
    with watching() as whole:
        model(ids)
    agree(watch, whole)


def test_layers_are_chosen_by_number_or_glob() -> None:
    model, ids = golden("gemma3"), ids_of("gemma3")
    chosen: list[tuple[Any, int]] = [([1], 1), ([0, 2], 2), ("*.1.attn.op", 1), ("*", len(attentions(model)))]
    for layers, count in chosen:
        with inspect.stats(layers=layers) as watch:
            model(ids)
        assert len(watch) == count
    with pytest.raises(UsageError, match=r"layer 7: .*seen were decoder.layers.0.attn.op"):
        watch[7]
    assert watch[1] is watch["decoder.layers.1.attn.op"]


def test_a_number_that_two_modules_share_is_refused() -> None:
    with inspect.stats() as watch:
        for path in ("encoder.layers.0.attn.op", "decoder.layers.0.attn.op"):
            module = Module()
            module.path = path
            attend(module, *[mx.zeros((1, 2, 3, 4))] * 3, scale=1.0)
    with pytest.raises(UsageError, match=r"it has encoder\.layers\.0\.attn\.op, decoder"):
        watch[0]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"top": -1}, "top: found -1, expected a whole number of 0 or more"),
        ({"top": 1.5}, "top: found 1.5, expected a whole number of 0 or more"),
        ({"keep": 0}, "keep: found 0, expected a whole number of 1 or more"),
        ({"keep": True}, "keep: found True, expected a whole number of 1 or more"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        inspect.stats(**settings)


@pytest.mark.parametrize(
    ("name", "asked"),
    [("entropy", "entropy=True"), ("top_keys", "top=N"), ("mass", "mass=SPANS"), ("received", "received")],
)
def test_what_was_not_asked_for_is_refused(name: str, asked: str) -> None:
    with inspect.stats(entropy=False) as watch:
        golden("llama-mha")(ids_of("llama-mha"))
    assert watch[0].distance.shape == watch[0].sink.shape
    with pytest.raises(UsageError, match=rf"{name} was not asked for; use stats\({asked}"):
        getattr(watch[0], name)


def test_a_batch_that_changes_within_a_text_is_refused() -> None:
    model, ids = golden("llama-mha"), ids_of("llama-mha")
    caches = [model.new_cache(), model.new_cache()]
    with inspect.stats():
        model(mx.concatenate([ids, ids])[:, :9], caches[0])
    with inspect.stats() as watch:
        model(ids[:, :9], caches[1])
        with pytest.raises(UsageError, match="found a batch of 2 after one of 1"):
            model(mx.concatenate([ids, ids])[:, 9:], caches[0])
    assert watch[0].seen == 9


def test_looking_across_at_another_text_counts_its_keys_from_its_beginning() -> None:
    """A decoder's step looks at all of what an encoder made, whatever its own place."""
    q, k = (mx.random.normal((1, 2, n, 8), key=mx.random.key(n)) for n in (5, 9))
    with watching() as whole, seen("*.pattern") as found:
        attend(Module(), q, k, k, scale=1.0, at=Places(range(5), range(9)))
    with watching() as steps:
        for i in range(5):
            attend(Module(), q[:, :, i : i + 1], k, k, scale=1.0, at=Places(range(i, i + 1), range(9)))
    agree(steps, whole)
    assert np.array_equal(whole[""].peak, np.argmax(np.array(found[".pattern"]), axis=-1))
    assert whole[""].queries.tolist() == [[0, 1, 2, 3, 4]] and whole[""].received.shape == (1, 2, 9)


# --- nothing when off ---


def operations(model: LM, ids: mx.array) -> list[str]:
    """The operations in the graph of one pass, in the order in which they are printed."""
    text = io.StringIO()
    mx.export_to_dot(text, model(ids))
    return re.findall(r'label ="(\w+)"', text.getvalue())


@pytest.mark.parametrize("case", ["qwen3", "deepseek_v3"])
def test_spectators_add_nothing_to_the_graph(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = golden(case), ids_of(case)
    mx.eval(model.parameters())
    off = operations(model, ids)
    with spectate(lambda call: None):
        shown = operations(model, ids)
    monkeypatch.setattr(attention, "spectators", lambda: ())
    assert off == shown == operations(model, ids) and len(off) > 100


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind_when_something_raises(raised: type[BaseException]) -> None:
    calls: list[Call] = []
    with pytest.raises(raised), inspect.stats() as watch, spectate(calls.append):
        golden("llama-mha")(ids_of("llama-mha"))
        raise raised
    seen_by_then = len(calls)
    golden("llama-mha")(ids_of("llama-mha"))
    assert len(calls) == seen_by_then == len(watch) == 3 and watch[0].seen == 24
