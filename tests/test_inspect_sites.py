"""What can be looked at, and by which names: paths, ends of paths, globs, and TransformerLens's."""

import mlx.core as mx
import pytest
from helpers import CASES, cases_of, expected, opened, seen

from mlx_tformer.errors import UsageError
from mlx_tformer.inspect import sites_of, trace
from mlx_tformer.inspect.sites import LENS, nearest, resolve

ENCODERS = cases_of("mlm")
WITNESSES = ("values", "fused")
LAYER = "decoder.layers.1"


def meant(case: str, pattern: str) -> list[str]:
    return [site.name for site in resolve(sites_of(opened(case).model), pattern)]


@pytest.mark.parametrize("case", CASES + ENCODERS)
def test_what_a_model_declares_is_what_it_offers(case: str) -> None:
    lm = opened(case)
    with seen("*") as found:
        lm(mx.array(expected(case)["input_ids"]))
    offered = {path.lstrip(".") for path in found if path.rpartition(".")[2] not in WITNESSES}
    assert {site.name for site in sites_of(lm.model) if not site.name.startswith("drafts.")} == offered


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("blocks.1.attn.hook_pattern", [f"{LAYER}.attn.op.pattern"]),
        ("decoder.1.attn.hook_pattern", [f"{LAYER}.attn.op.pattern"]),
        ("decoder.layers.1.attn.pattern", [f"{LAYER}.attn.op.pattern"]),
        ("layers.1.attn.pattern", [f"{LAYER}.attn.op.pattern"]),
        ("attn.pattern", [f"decoder.layers.{i}.attn.op.pattern" for i in range(3)]),
        ("blocks.*.hook_resid_post", [f"decoder.layers.{i}.out" for i in range(3)]),
        ("blocks.[02].hook_resid_post", [f"decoder.layers.{i}.out" for i in (0, 2)]),
        ("residual.in", [f"decoder.layers.{i}.in" for i in range(3)]),
        ("residual.mid", [f"decoder.layers.{i}.attn.out" for i in range(3)]),
        ("residual.out", [f"decoder.layers.{i}.out" for i in range(3)]),
        ("blocks.1.hook_resid_mid", [f"{LAYER}.attn.out"]),
        ("blocks.1.hook_resid_pre", [f"{LAYER}.in"]),
        ("blocks.1.hook_attn_out", [f"{LAYER}.attn.delta"]),
        ("blocks.1.hook_mlp_out", [f"{LAYER}.mlp.delta"]),
        *((f"blocks.1.attn.hook_{name}", [f"{LAYER}.attn.op.{name}"]) for name in ("q", "k", "v", "z", "result")),
        ("blocks.1.attn.hook_attn_scores", [f"{LAYER}.attn.op.scores"]),
        ("blocks.1.mlp.hook_post", [f"{LAYER}.mlp.op.hidden"]),
        ("blocks.1.mlp.hook_pre", [f"{LAYER}.mlp.op.gate"]),
        ("ln_final.hook_normalized", ["decoder.out"]),
        ("hook_embed", ["embed.out"]),
        ("logits", ["logits"]),
        ("attn.op.[qk]", [f"decoder.layers.{i}.attn.op.{name}" for i in range(3) for name in "qk"]),
    ],
)
def test_a_name_means_these_activations(pattern: str, paths: list[str]) -> None:
    assert meant("qwen3", pattern) == paths


def test_an_encoder_and_a_plain_mlp_and_experts_have_the_same_names() -> None:
    assert meant("bert", "blocks.1.attn.hook_pattern") == meant("bert", "encoder.1.attn.hook_pattern")
    assert meant("gpt2", "blocks.0.mlp.hook_pre") == ["decoder.layers.0.mlp.op.up"]
    assert meant("mixtral", "blocks.0.mlp.hook_expert_weights") == ["decoder.layers.0.mlp.op.router.weights"]
    assert meant("jamba", "residual.mid")[0] == "decoder.layers.0.mixer.out"


def test_every_alias_is_of_one_activation_only() -> None:
    for case in ("qwen3", "gpt2", "bert", "mixtral", "jamba", "phi"):
        names = [name for site in sites_of(opened(case).model) for name in {site.name, *site.aliases}]
        assert len(names) == len(set(names))
    assert len({name for names in LENS.values() for name in names} - {"mlp.hook_pre"}) > 20


@pytest.mark.parametrize(
    ("case", "pattern", "told"),
    [
        ("qwen3", "attn.patern", "attn.pattern"),
        ("qwen3", "blocks.*.attn.hook_patterns", "blocks.*.attn.hook_pattern"),
        ("qwen3", "blocks.7.attn.hook_pattern", "in layers 0, 1, 2"),
        ("qwen3", "hook_resid_pots", "hook_resid_post"),
        ("qwen3", "", "among others"),
        ("phi", "residual.mid", "residual.in"),  # steps side by side have nothing between them
        ("mamba", "attn.pattern", "mixer"),
        ("qwen3", "mlp.router.logits", "logits"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_the_nearest(case: str, pattern: str, told: str) -> None:
    with pytest.raises(UsageError, match="no activation is called") as raised:
        trace(opened(case), read=[pattern])
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_a_name_that_never_fired_is_refused_when_the_block_ends() -> None:
    lm = opened("qwen3")
    with (
        pytest.raises(UsageError, match=r"'attn\.pattern' was never computed: the model did not run"),
        trace(lm, read=["attn.pattern"]),
    ):
        pass
    with pytest.raises(UsageError, match="'logits' was never computed"), trace(lm, read=["logits", "embed.out"]):
        lm.model.hidden(mx.array([[1, 2]]))
    with pytest.raises(UsageError, match="expected a list of names"):
        trace(lm, read="attn.pattern")


def test_a_layer_that_does_not_exist_is_told_from_a_name_that_does_not() -> None:
    sites = sites_of(opened("jamba").model)
    assert nearest(sites, "blocks.0.attn.hook_pattern") == "there is one in layers 1, 3"
