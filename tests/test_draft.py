"""DeepSeek V3's modules of multi-token prediction, against the formulas of its report written out in float64.

transformers passes over these weights, so a golden case gets them here: one more decoder layer and five parts more.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import Weights, case_weights, files_in, make_folder, parameters, refusal, same
from helpers import config_of, expected, gap, golden, ids_of
from reference import activation, attention, f64, rotate

import mlx_tformer as mt
from mlx_tformer.card import card
from mlx_tformer.checkpoint.convert import convert
from mlx_tformer.checkpoint.export import export
from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile
from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.memory import kv_bytes, parameter_count
from mlx_tformer.nn import LM

CASE = "deepseek_v3"
CONFIG = config_of(CASE)
LAYERS, EPS, VOCAB = CONFIG["num_hidden_layers"], CONFIG["rms_norm_eps"], CONFIG["vocab_size"]
TIGHT = 5e-5
Array = np.ndarray


def noise(name: str, shape: tuple[int, ...], scale: float) -> mx.array:
    key = mx.random.key(sum(map(ord, name)))
    return (scale * mx.random.normal(shape, key=key)).astype(mx.bfloat16)


def with_modules(count: int = 1, own: bool = False) -> Weights:
    """The weights of the golden case, and those of modules that look ahead; `own` gives them other tables and heads."""
    weights, dim = case_weights(CASE), CONFIG["hidden_size"]
    last, main = f"model.layers.{LAYERS - 1}.", ("model.embed_tokens.weight", "lm_head.weight")
    for i in range(count):
        begin = f"model.layers.{LAYERS + i}."
        for name in [name for name in weights if name.startswith(last)]:
            new = begin + name.removeprefix(last)
            weights[new] = weights[name] + noise(new, weights[name].shape, 0.1).astype(weights[name].dtype)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{begin}{name}.weight"] = 1 + noise(begin + name, (dim,), 0.3)
        weights[f"{begin}eh_proj.weight"] = noise(f"{begin}eh_proj", (dim, 2 * dim), 0.2)
        for name, of in zip(("embed_tokens.weight", "shared_head.head.weight"), main, strict=True):
            weights[begin + name] = -weights[of] if own else weights[of]
    return weights


def folder_of(folder: Path, count: int = 1, own: bool = False, weights: Weights | None = None) -> Path:
    weights = with_modules(count, own) if weights is None else weights
    return make_folder(folder, CASE, weights, num_nextn_predict_layers=count)


def model_of(folder: Path) -> LM:
    return mt.load(folder, dtype="float32").model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LM:
    """The golden case with one module."""
    return model_of(folder_of(tmp_path_factory.mktemp("draft")))


def inputs() -> tuple[mx.array, mx.array]:
    """What transformers gives after the last norm, for all tokens but the last, and the tokens that follow them."""
    return mx.array(expected(CASE)[f"hidden.{LAYERS}"])[:, :-1], ids_of(CASE)[:, 1:]


# --- the reference ---


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def gated(w: dict[str, Array], name: str, x: Array) -> Array:
    gate, up, down = (w[f"{name}.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    return (activation("silu", x @ gate) * (x @ up)) @ down


def attend(w: dict[str, Array], x: Array) -> Array:
    heads, plain, turned, value, rank = (
        CONFIG[key]
        for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    batch, length, _ = x.shape
    m = {name: w[f"self_attn.{name}.weight"] for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_b_proj")}
    q = norm(x @ m["q_a_proj"].T, m["q_a_layernorm"]) @ m["q_b_proj"].T
    latent = x @ w["self_attn.kv_a_proj_with_mqa.weight"].T
    kv = norm(latent[..., :rank], w["self_attn.kv_a_layernorm.weight"]) @ m["kv_b_proj"].T
    q, kv = (y.reshape(batch, length, heads, -1).swapaxes(1, 2) for y in (q, kv))
    at = np.broadcast_to(np.arange(length), (batch, length))
    speeds = 10000.0 ** (-np.arange(0, turned, 2) / turned)
    q_turned = rotate(q[..., plain:], at, speeds, interleaved=True)
    k_turned = rotate(latent[:, None, :, rank:], at, speeds, interleaved=True).repeat(heads, 1)
    q = np.concatenate([q[..., :plain], q_turned], -1)
    k = np.concatenate([kv[..., :plain], k_turned], -1)
    sees = np.broadcast_to(np.tril(np.ones((length, length), bool)), (batch, length, length))
    z, _ = attention(q, k, kv[..., plain:], (plain + turned) ** -0.5, sees)
    return z.swapaxes(1, 2).reshape(batch, length, heads * value) @ w["self_attn.o_proj.weight"].T


def mixture(w: dict[str, Array], x: Array) -> Array:
    """Each token by itself: the group whose two best are best, the two best of it, weighed without the bias."""
    groups, top = CONFIG["n_group"], CONFIG["num_experts_per_tok"]
    out = gated(w, "mlp.shared_experts", x)
    for b, i in np.ndindex(*x.shape[:2]):
        scores = 1 / (1 + np.exp(-w["mlp.gate.weight"] @ x[b, i]))
        choice = (scores + w["mlp.gate.e_score_correction_bias"]).reshape(groups, -1)
        best = np.argsort(-np.sort(choice, -1)[:, -2:].sum(-1))[: CONFIG["topk_group"]]
        allowed = np.full_like(choice, -np.inf)
        allowed[best] = choice[best]
        chosen = np.argsort(-allowed.flatten())[:top]
        weights = scores[chosen] / scores[chosen].sum() * CONFIG["routed_scaling_factor"]
        for expert, weight in zip(chosen, weights, strict=True):
            out[b, i] += weight * gated(w, f"mlp.experts.{expert}", x[b, i])
    return out


def looked_ahead(weights: Weights, hidden: Array, ids: Array, module: int = 0) -> tuple[Array, Array]:
    """h' and the logits of a module (arXiv 2412.19437, equations 21 to 23), the embedding joined first."""
    begin = f"model.layers.{LAYERS + module}."
    w = {name.removeprefix(begin): f64(value) for name, value in weights.items() if name.startswith(begin)}
    embedded = w["embed_tokens.weight"][ids]
    both = np.concatenate([norm(embedded, w["enorm.weight"]), norm(hidden, w["hnorm.weight"])], -1)
    x = both @ w["eh_proj.weight"].T
    x = x + attend(w, norm(x, w["input_layernorm.weight"]))
    x = x + mixture(w, norm(x, w["post_attention_layernorm.weight"]))
    return x, norm(x, w["shared_head.norm.weight"]) @ w["shared_head.head.weight"].T


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_logits_are_those_of_the_formulas(own: bool, tmp_path: Path) -> None:
    hidden, ids = inputs()
    model = model_of(folder_of(tmp_path, own=own))
    _, wanted = looked_ahead(with_modules(own=own), f64(hidden), np.array(ids))
    assert gap(model.draft(hidden, ids), wanted) < TIGHT
    assert gap(model.draft(model.hidden(ids_of(CASE))[:, :-1], ids), wanted) < TIGHT


def test_a_second_module_reads_what_the_first_gave(tmp_path: Path) -> None:
    hidden, ids = inputs()
    model, weights = model_of(folder_of(tmp_path, 2)), with_modules(2)
    assert model.depth == 2
    first = model.draft_hidden(hidden, ids)[:, :-1]
    wanted, _ = looked_ahead(weights, f64(hidden), np.array(ids))
    _, logits = looked_ahead(weights, wanted[:, :-1], np.array(ids)[:, 1:], module=1)
    assert gap(model.draft(first, ids[:, 1:], module=1), logits) < TIGHT


# --- beside the model ---


def test_the_model_computes_what_it_did_without_them(model: LM) -> None:
    plain = golden(CASE)
    assert same(model(ids_of(CASE)), plain(ids_of(CASE)))
    assert model.new_cache().states.keys() == plain.new_cache().states.keys()
    assert kv_bytes(model, 100, mx.float32) == kv_bytes(plain, 100, mx.float32)


@pytest.mark.parametrize("sizes", [[1] * 23, [10, 1, 1, 11], [23]], ids=["steps", "chunks", "at once"])
def test_cached_drafts_equal_one_pass(model: LM, sizes: list[int]) -> None:
    hidden, ids = inputs()
    cache, start, parts = model.new_draft_cache(), 0, []
    for size in sizes:
        parts.append(model.draft(hidden[:, start : start + size], ids[:, start : start + size], cache))
        start += size
    assert list(cache.states) == ["drafts.0.block.attn.op"] and cache.length == 23
    assert gap(mx.concatenate(parts, axis=1), model.draft(hidden, ids)) < TIGHT


def test_a_draft_can_be_taken_back(model: LM) -> None:
    hidden, ids = inputs()
    cache = model.new_draft_cache()
    model.draft(mx.concatenate([hidden[:, :9], hidden[:, :4]], axis=1), ids[:, :13], cache)
    cache.trim(4)
    assert gap(model.draft(hidden[:, 9:], ids[:, 9:], cache), model.draft(hidden, ids)[:, 9:]) < TIGHT


def test_a_left_padded_batch_equals_its_rows(model: LM) -> None:
    hidden, ids = inputs()
    pad = 6
    short = [mx.concatenate([x[:, :pad] * 0, x[:, :-pad]], axis=1) for x in (hidden, ids)]
    mask = mx.array([[1] * 23, [0] * pad + [1] * (23 - pad)])
    both = [mx.concatenate(pair) for pair in zip((hidden, ids), short, strict=True)]
    found = model.draft(both[0], both[1], attention_mask=mask)
    assert gap(found[:1], model.draft(hidden, ids)) < TIGHT
    assert gap(found[1:, pad:], model.draft(hidden[:, :-pad], ids[:, :-pad])) < TIGHT


def test_a_model_without_them_says_so() -> None:
    plain = golden(CASE)
    assert plain.depth == 0 and "drafts" not in plain
    refusal(UsageError, "module: found 0", of=lambda: plain.draft(*inputs()))


def test_a_card_counts_them_and_no_token_needs_them(model: LM) -> None:
    found, plain = card(model), card(golden(CASE))
    assert found.parameters - plain.parameters == parameter_count(model.drafts[0])
    assert found.active_parameters == plain.active_parameters
    assert sum(line.parameters * s.times for s in found.ledger for line in s.lines) == found.parameters
    assert found.ledger[-1].title == "drafts.0" and found.ledger[-1].lines[-1].shape == ("B", "L", VOCAB)


# --- in files ---


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_tables_and_heads_are_shared_where_they_are_equal(own: bool, tmp_path: Path) -> None:
    model = model_of(folder_of(tmp_path, own=own))
    extra = {"drafts.0.embed.tokens.weight", "drafts.0.head.weight"}
    assert extra & parameters(model).keys() == (extra if own else set())


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_conversions_and_exports_keep_them(own: bool, tmp_path: Path) -> None:
    theirs, (hidden, ids) = folder_of(tmp_path / "theirs", own=own), inputs()
    made = convert(theirs, tmp_path / "made").path
    assert gap(model_of(made).draft(hidden, ids), np.array(model_of(theirs).draft(hidden, ids))) < 1e-6
    assert files_in(convert(made, tmp_path / "again").path) == files_in(made)
    back = SafetensorsFile(export(made, tmp_path / "back").path / "model.safetensors")
    wanted = with_modules(own=own)
    assert back.tensors.keys() == wanted.keys() and all(same(back.read(name), wanted[name]) for name in wanted)


def test_quantized_ones_still_look_ahead(tmp_path: Path) -> None:
    made = convert(folder_of(tmp_path / "theirs"), tmp_path / "made", quantize=8, group_size=32).path
    quantized = json.loads((made / "config.json").read_text())["mlx_tformer"]["quantization"]
    assert "drafts.0.join" in quantized and "drafts.0.block.mlp.op.router" not in quantized
    hidden, ids = inputs()
    wanted = np.array(model_of(tmp_path / "theirs").draft(hidden, ids))
    assert 0 < gap(model_of(made).draft(hidden, ids), wanted) < 0.1 * wanted.std()


def test_missing_parts_are_named(tmp_path: Path) -> None:
    weights = with_modules()
    gone = [f"model.layers.{LAYERS}.{name}.weight" for name in ("eh_proj", "self_attn.o_proj", "mlp.experts.3.up_proj")]
    weights = {name: value for name, value in weights.items() if name not in gone}
    refusal(BadInput, "no weights for", *gone, of=lambda: mt.load(folder_of(tmp_path, weights=weights)))


def test_modules_that_the_config_does_not_count_are_an_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASE, with_modules(), num_nextn_predict_layers=0)
    refusal(BadInput, "no place in the model", f"model.layers.{LAYERS}.enorm.weight", of=lambda: mt.load(folder))


def test_a_count_without_modules_is_passed_over() -> None:
    """As transformers writes it, which leaves the modules out."""
    assert CONFIG["num_nextn_predict_layers"] == 1 and golden(CASE).depth == 0
