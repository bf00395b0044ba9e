"""Each family against transformers, and against itself: cached, in chunks, batched, watched."""

import mlx.core as mx
import pytest
from helpers import CASES, attentions, config_of, expected, gap, golden, ids_of, limit, seen, state_spaces

from mlx_tformer.errors import UsageError
from mlx_tformer.generation.decode import Decoder
from mlx_tformer.generation.sampling import Sampler
from mlx_tformer.generation.settings import Sampling
from mlx_tformer.nn import KV, LM, Attention, Cache, GatedDelta, Mamba, WindowKV, latent, moe

TIGHT = 5e-5
"""What float32 really gives on these cases: a tenth of the limit, and three times what was seen."""

ROUNDED = {"jamba": 2, "qwen3_next": 8}
"""Cases in which transformers itself is further than TIGHT from what it computes in float64: 7e-5 in jamba, whose
stream reaches 20, and 2e-4 in qwen3_next, whose gated norms raise heads with an output of 1e-4 to the size of the
others."""


def tight(case: str) -> float:
    return TIGHT * ROUNDED.get(case, 1)


def having(*keys: str) -> list[str]:
    """The cases whose configs set one of these keys."""
    return [case for case in CASES if any(config_of(case).get(key) for key in keys)]


SHOWN = [case for case in CASES if any(name.startswith("attention.") for name in expected(case))]
SPACES = [case for case in CASES if state_spaces(golden(case))]
ATTENDING = [case for case in CASES if attentions(golden(case))]
WINDOWED = having("sliding_window", "attention_chunk_size")
EXPERTS, LATENT = having("num_experts_per_tok"), having("kv_lora_rank")
GROWING = {"llama-dynamic": 22, "llama-longrope": 22, "phi3-longrope": 16}
"""Cases whose positions depend on the length of the text, and the trained length."""


# --- against transformers ---


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    wanted = expected(case)["logits"]
    assert gap(golden(case)(ids_of(case)), wanted) < min(tight(case), limit(wanted))


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_those_of_transformers(case: str) -> None:
    model, wanted = golden(case), expected(case)
    layers = len(model.decoder.layers)
    if case in ATTENDING:
        paths = ["embed.out", *(f"decoder.layers.{i}.out" for i in range(layers - 1)), "decoder.out"]
    else:  # transformers leaves out the embedding there, and not the last block
        paths = [*(f"decoder.layers.{i}.out" for i in range(layers)), "decoder.out"]
    assert f"hidden.{len(paths)}" not in wanted
    with seen("*.out") as found:
        model(ids_of(case))
    for i, path in enumerate(paths):
        assert gap(found[path], wanted[f"hidden.{i}"]) < tight(case), path


@pytest.mark.parametrize("case", SHOWN)
def test_attention_patterns_are_those_of_transformers(case: str) -> None:
    with seen("*.pattern") as found:
        golden(case)(ids_of(case))
    names = [name for name in expected(case) if name.startswith("attention.")]
    assert len(names) == len(attentions(golden(case)))
    for name in names:
        layer = name.removeprefix("attention.")
        pattern = found[f"decoder.layers.{layer}.attn.op.pattern"]
        assert gap(pattern, expected(case)[name]) < 1e-5 * ROUNDED.get(case, 1)


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(case: str) -> None:
    prompt, wanted = (expected(case)[name][0].tolist() for name in ("prompt_ids", "greedy_ids"))
    decoder = Decoder(golden(case), prompt, Sampler(Sampling()), planned=len(prompt) + len(wanted))
    assert [token for token, *_ in decoder] == wanted


@pytest.mark.parametrize("case", SHOWN)
@pytest.mark.parametrize("sizes", [[10] + [1] * 14, [5, 8, 11]], ids=["steps", "chunks"])
def test_the_patterns_of_cached_steps_are_those_rows_of_transformers(case: str, sizes: list[int]) -> None:
    """A window's cache holds its last keys alone; what is not there has no weight in the whole pattern either."""
    model, ids = golden(case), ids_of(case)
    cache, start = model.new_cache(24), 0
    for size in sizes:
        with seen("*.pattern") as found:
            model(ids[:, start : start + size], cache)
        for path, pattern in found.items():
            wanted = expected(case)[f"attention.{path.split('.')[2]}"][:, :, start : start + size, : start + size]
            kept = pattern.shape[-1]
            assert gap(pattern, wanted[..., start + size - kept :]) < 1e-5 * ROUNDED.get(case, 1)
            assert not wanted[..., : start + size - kept].any()
        start += size


# --- one pass, chunks, steps, batches ---

SPLITS = {
    "step by step": [1] * 24,
    "prefill and steps": [10] + [1] * 14,
    "chunks": [5, 1, 11, 7],
    "growing chunks": [1, 2, 3, 4, 6, 8],
    "all at once": [24],
}


def in_parts(model: LM, ids: mx.array, sizes: list[int], cache: Cache, **first: mx.array) -> mx.array:
    """Logits of ids that are fed in chunks; `first` goes with the first chunk."""
    parts, start = [], 0
    for size in sizes:
        parts.append(model(ids[:, start : start + size], cache, **(first if start == 0 else {})))
        start += size
    return mx.concatenate(parts, axis=1)


@pytest.mark.parametrize("case", CASES)
def test_cached_decoding_equals_one_pass(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    whole = model(ids)
    for split, sizes in SPLITS.items():
        assert gap(in_parts(model, ids, sizes, model.new_cache(24)), whole) < tight(case), split


@pytest.mark.parametrize("case", [*WINDOWED, "llama-mha", "deepseek_v3", "falcon"])
@pytest.mark.parametrize("step", [3, 4])
def test_cached_decoding_equals_one_pass_whenever_a_buffer_is_full(
    case: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KV, "STEP", step)
    model, ids = golden(case), ids_of(case)
    whole = model(ids)
    for split, sizes in SPLITS.items():
        assert gap(in_parts(model, ids, sizes, model.new_cache(24)), whole) < tight(case), split


@pytest.mark.parametrize("case", ["llama-mha", "mistral-window", "gemma3", "llama4", "deepseek_v3", "falcon-alibi"])
def test_cached_decoding_equals_one_pass_across_a_border_of_the_natural_buffer(case: str) -> None:
    model, length = golden(case), KV.STEP + 30
    ids = mx.random.randint(0, 60, (1, length), key=mx.random.key(7))
    sizes = [KV.STEP - 6, *[1] * 12, 5, *[1] * 6, length - KV.STEP - 17]
    assert gap(in_parts(model, ids, sizes, model.new_cache(length)), model(ids)) < tight(case)


@pytest.mark.parametrize("case", WINDOWED)
def test_a_window_model_remembers_little_more_than_its_window(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KV, "STEP", 4)
    model = golden(case)
    cache = model.new_cache(24)
    in_parts(model, ids_of(case), [1] * 24, cache)
    for state in cache.states.values():
        assert state.length == 24
        if isinstance(state, WindowKV):
            assert state.keys is not None and state.keys.shape[2] <= state.size + 4


@pytest.mark.parametrize("case", SPACES)
def test_a_cache_with_a_state_space_refuses_to_forget_and_stays_as_it_was(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    cache = model.new_cache(24)
    model(ids[:, :12], cache)
    with pytest.raises(UsageError, match="cannot forget 5 tokens: a state space"):
        cache.trim(5)
    cache.trim(0)
    assert {state.length for state in cache.states.values()} == {12}
    assert gap(in_parts(model, ids[:, 12:], [1, 1, 7, 3], cache), model(ids)[:, 12:]) < tight(case)


@pytest.mark.parametrize("case", [case for case in CASES if case not in SPACES])
def test_a_trimmed_cache_has_forgotten_what_was_trimmed(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    cache = model.new_cache(24)
    model(mx.concatenate([ids[:, :12], ids[:, :5]], axis=1), cache)
    cache.trim(5)
    assert gap(in_parts(model, ids[:, 12:], [1, 1, 7, 3], cache), model(ids)[:, 12:]) < tight(case)


def padded_batch(ids: mx.array, rows: int) -> tuple[mx.array, mx.array, list[mx.array]]:
    """A left-padded batch whose rows have 24, 19, 14, ... tokens, its mask, and the rows by themselves."""
    texts = [mx.roll(ids, row, 1)[:, : ids.shape[1] - 5 * row] for row in range(rows)]
    pads = [mx.full((1, ids.shape[1] - text.shape[1]), 63, text.dtype) for text in texts]
    batch = mx.concatenate([mx.concatenate([p, t], axis=1) for p, t in zip(pads, texts, strict=True)])
    mask = [[0] * pad.shape[1] + [1] * text.shape[1] for pad, text in zip(pads, texts, strict=True)]
    return batch, mx.array(mask), texts


def sizes_of(model: LM) -> set[int]:
    """Numbers of rows of which a wrong broadcast would let one pass unseen: as many as heads, and as key heads."""
    if not attentions(model):
        return {2, 3, 4}
    first = attentions(model)[0]
    return {min(n, 4) for n in (first.heads, first.kv_heads if isinstance(first, Attention) else 1, 3)}


@pytest.mark.parametrize("case", CASES)
def test_a_left_padded_batch_equals_its_rows(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    for rows in sizes_of(model):
        batch, mask, texts = padded_batch(ids, rows)
        whole = model(batch, attention_mask=mask)
        chunked = in_parts(model, batch, [20, 1, 1, 2], model.new_cache(24), attention_mask=mask[:, :20])
        for row, text in enumerate(texts):
            alone = model(text, model.new_cache(24))
            assert gap(whole[row : row + 1, -text.shape[1] :], alone) < tight(case)
            assert gap(chunked[row : row + 1, -text.shape[1] :], alone) < tight(case)


def test_padding_that_goes_on_behind_the_first_chunk_is_refused() -> None:
    """It would be taken for text otherwise."""
    model = golden("qwen2")
    batch, mask, _ = padded_batch(ids_of("qwen2"), 3)
    cache = model.new_cache(24)
    model(batch[:, :4], cache, attention_mask=mask[:, :4])
    with pytest.raises(UsageError, match="attention_mask"):
        model(batch[:, 4:], cache, attention_mask=mask[:, 4:])


def test_a_mask_of_another_shape_than_the_ids_is_refused() -> None:
    with pytest.raises(UsageError, match="attention_mask: found shape"):
        golden("qwen2")(ids_of("qwen2"), attention_mask=mx.array([[0, 1, 1]]))


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_batch_without_padding_do_not_see_each_other(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    batch = mx.concatenate([ids, ids[:, ::-1], mx.roll(ids, 3, 1)])
    whole = model(batch)
    for row in range(3):
        assert gap(whole[row : row + 1], model(batch[row : row + 1])) < tight(case)


@pytest.mark.parametrize("case", CASES)
def test_padding_may_hold_any_token(case: str) -> None:
    model = golden(case)
    batch, mask, _ = padded_batch(ids_of(case), 3)
    other = mx.where(mask, batch, 5)
    first, second = (model(x, attention_mask=mask) for x in (batch, other))
    assert mx.array_equal(mx.where(mask[..., None], first, 0), mx.where(mask[..., None], second, 0)).item()


@pytest.mark.parametrize("case", CASES)
def test_watching_everything_does_not_change_the_result(case: str) -> None:
    """Not by a bit on the CPU, although attention is its explicit twin then; fused kernels may add up differently, and
    a softmax with sinks does."""
    model, ids = golden(case), ids_of(case)
    plain = model(ids)
    with seen("*") as found:
        watched = model(ids)
    offered = {"q", "k", "v", "scores", "pattern"} if case in ATTENDING else set()
    for space in state_spaces(model):
        offered |= (
            {"q", "k", "v", "decay", "write", "hidden"} if isinstance(space, GatedDelta) else {"x", "dt", "hidden"}
        )
    assert {path.rpartition(".")[2] for path in found} >= offered | {"z", "delta", "logits"}
    dual = any(not isinstance(space, Mamba) for space in state_spaces(model))  # they have no hidden states otherwise
    alike = mx.default_device() == mx.Device(mx.cpu) and not having_sinks(model) and not dual
    assert gap(watched, plain) <= (0 if alike else tight(case))


def having_sinks(model: LM) -> bool:
    return any(isinstance(op, Attention) and op.has_sinks for op in attentions(model))


@pytest.mark.parametrize("case", ATTENDING)
def test_watching_what_attention_computes_anyway_leaves_it_fused(case: str) -> None:
    model, ids = golden(case), ids_of(case)
    with seen("*.attn.op.[qkvz]") as found:
        watched = model(ids)
    assert len(found) == 4 * len(attentions(model))
    assert mx.array_equal(watched, model(ids)).item()


# --- ways to compute that depend on how many tokens there are ---


@pytest.mark.parametrize("few", [0, 24])
@pytest.mark.parametrize("case", EXPERTS)
def test_tokens_sorted_by_expert_and_gathered_weights_give_the_same(
    case: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "SORTED_FROM", few)
    model, ids, wanted = golden(case), ids_of(case), expected(case)["logits"]
    for sizes in ([24], [1] * 24, [9, 15]):
        assert gap(in_parts(model, ids, sizes, model.new_cache(24)), wanted) < tight(case)


@pytest.mark.parametrize("up_to", [0, 24])
@pytest.mark.parametrize("case", LATENT)
def test_absorbed_and_expanded_latents_give_the_same(case: str, up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "ABSORBED_UP_TO", up_to)
    model, ids, wanted = golden(case), ids_of(case), expected(case)
    for sizes in ([24], [1] * 24, [9, 15]):
        assert gap(in_parts(model, ids, sizes, model.new_cache(24)), wanted["logits"]) < tight(case)
    with seen("*.pattern") as found:
        model(ids)
    for i, pattern in enumerate(found.values()):
        assert gap(pattern, wanted[f"attention.{i}"]) < 1e-5


# --- a text whose positions depend on its length ---


@pytest.mark.parametrize(("case", "trained"), GROWING.items())
def test_short_and_long_frequencies_are_never_mixed_in_one_cache(case: str, trained: int) -> None:
    model, ids = golden(case), ids_of(case)
    short = in_parts(model, ids, [10] + [1] * 14, model.new_cache(10))  # grows past it all the same
    planned = in_parts(model, ids, [10] + [1] * 14, model.new_cache(24))
    assert gap(planned, expected(case)["logits"]) < tight(case)
    assert gap(short, expected(case)["logits"]) > limit(expected(case)["logits"])
    assert gap(short[:, :trained], model(ids[:, :trained])) < tight(case)  # as if it had known so many tokens alone
    assert gap(short, in_parts(model, ids, [10, 14], model.new_cache(10))) < tight(case)
    assert [[position.regime(n) for n in (10, trained)] for position in model.scaled_positions()] == [[0, 0]]


@pytest.mark.parametrize("case", CASES)
def test_only_positions_that_depend_on_the_length_count_as_scaled(case: str) -> None:
    assert bool(golden(case).scaled_positions()) == (case in GROWING)
