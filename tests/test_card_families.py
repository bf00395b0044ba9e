"""The cards of all families: parameters, what a token uses of them, shapes, and what experts and latents say."""

import json

import mlx.core as mx
import pytest
from helpers import CASES, GOLDEN, cases_of, golden, ids_of, opened

from mlx_tformer.card import Card, card
from mlx_tformer.checkpoint.plan import build
from mlx_tformer.config import Config
from mlx_tformer.families import family
from mlx_tformer.memory import parameter_count
from mlx_tformer.nn import watch

PUBLISHED = {row["name"]: row["config"] for row in json.loads((GOLDEN / "published.json").read_text())}


def said(case: str, label: str) -> str:
    """What the text of a card says after a label."""
    lines = card(golden(case)).render(1000).splitlines()
    return next(line.removeprefix(label).strip() for line in lines if line.startswith(f"{label} "))


@pytest.mark.parametrize("case", [*CASES, *cases_of("seq2seq")])
def test_the_lines_of_a_ledger_add_up_to_the_parameters(case: str) -> None:
    found = card(opened(case).model)
    assert sum(s.times * line.parameters for s in found.ledger for line in s.lines) == found.parameters
    assert found.parameters == parameter_count(opened(case).model)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def shapes(found: Card, lengths: dict[str, int]) -> dict[str, tuple[int | str, ...]]:
    """The shape of each activation of a decoder's layers, by path."""
    return {
        f"decoder.layers.{layer}.{line.name}": tuple(lengths.get(str(axis), axis) for axis in line.shape)
        for section in found.ledger
        for layer in section.layers
        for line in section.lines
    }


@pytest.mark.parametrize("case", CASES)
def test_the_shapes_of_a_ledger_are_those_of_a_running_model(case: str) -> None:
    seen: dict[str, tuple[int, ...]] = {}
    with watch("*", lambda path, value: seen.__setitem__(path, value.shape)):
        mx.eval(golden(case)(ids_of(case)))
    told = shapes(card(golden(case)), {"B": 1, "L": 24, "S": 24, "B·L": 24})
    same = told.keys() & seen.keys()
    assert {path: told[path] for path in same} == {path: seen[path] for path in same}
    names = {path.partition(".op.")[2] for path in same}
    assert names > {"pattern", "z"} or "mamba" in case
    assert {"router.chosen", "router.weights", "experts.hidden", "said"} <= names or "mlp.op.router" not in str(told)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mistralai/Mixtral-8x7B-v0.1", "12.9"), ("allenai/OLMoE-1B-7B-0924", "1.3"), ("meta-llama/Llama-4-Scout", "17")],
)
def test_a_token_uses_as_many_parameters_as_is_published(name: str, billions: str) -> None:
    """Which counts an embedding whole."""
    config = next(config for known, config in PUBLISHED.items() if known.startswith(name))
    model = build(family(config["model_type"]), Config(config))
    found = card(model)
    unread = (model.vocab - 1) * found.dim
    assert f"{(found.active_parameters + unread) / 1e9:.{len(billions.partition('.')[2])}f}" == billions


def test_experts_latents_and_what_attention_adds_are_told() -> None:
    assert said("mixtral", "experts") == "2 of 4 for each token"
    assert said("mixtral", "MLP") == "gated, silu, 40 wide"
    assert said("deepseek_v3", "experts").endswith("layers 1-2: 2 of 8 for each token, and one 28 wide for all tokens")
    assert said("deepseek_v3", "heads") == "4 query, 4 key-value (all from latents of 16), 20 features each"
    assert said("deepseek_v3", "mask") == "causal"
    assert said("deepseek_v3", "position").startswith("rotary on 8 features")
    assert said("gpt_oss", "heads").endswith(", with sinks")
    assert "sigmoid(1.702 · gate)" in said("gpt_oss", "MLP")
    assert said("gemma2", "heads").endswith(", scores capped at ±5")
    assert said("mpt-clipped", "heads").endswith(", q, k and v clipped at ±0.8")
    assert "features each, with gates" in said("qwen3_next", "heads")
    assert "on all heads of q, on all heads of k" in said("olmo2", "norms")
    assert "LayerNorm with weights of its own, eps 1e-05: on each head of q" in said("cohere-norms", "norms")


def test_a_model_that_widens_its_embedding_is_as_wide_as_its_layers() -> None:
    found = card(golden("opt-after"))
    assert (found.dim, golden("opt-after").embed.tokens.weight.shape[1]) == (32, 20)
    assert next(line.shape for line in found.ledger[-1].lines if line.name == "decoder.norm") == ("B", "L", 20)
