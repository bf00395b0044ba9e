"""What a card says, against known models, running models and its own sums."""

import io
import json
import re
import subprocess
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as mlx_nn
import pytest
from rich.console import Console

from mlx_tformer.card import Card, card, ranges
from mlx_tformer.config import Config
from mlx_tformer.errors import UsageError
from mlx_tformer.families import family
from mlx_tformer.memory import Memory, parameter_count
from mlx_tformer.nn import (
    LM,
    Attention,
    Block,
    Context,
    Embed,
    Everything,
    GatedMlp,
    LayerNorm,
    Linear,
    Mlp,
    Module,
    Parallel,
    Residual,
    RMSNorm,
    Stack,
    watch,
)

MACHINE = Memory(16_000_000_000, 10_000_000_000, "recommended in a test")
SMOL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
TINY = SMOL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 131,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
CASES = {
    "llama": TINY,
    "untied": TINY | {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "biased": TINY | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "yarn": TINY | {"rope_scaling": YARN, "head_dim": 16},
    "mistral": TINY | {"model_type": "mistral", "sliding_window": 7},
    "qwen2": TINY | {"model_type": "qwen2"},
    "qwen3": TINY
    | {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def build(values: dict) -> LM:
    return family(values["model_type"]).model(Config(values))


def parallel_model() -> LM:
    def block(width: int) -> Block:
        attn = Attention(32, 4, bias=True, mask=Everything(), scale=0.5)
        return Parallel(
            attn=Residual(attn, pre=LayerNorm(32), post=RMSNorm(32, 1e-3)),
            mlp=Residual(Mlp(32, width), pre=LayerNorm(32, 1e-6, bias=False)),
        )

    return LM(Embed(50, 32), Stack([block(64), block(72), block(64)], LayerNorm(32)), Linear(32, 50))


def models() -> dict[str, LM]:
    return {name: build(values) for name, values in CASES.items()} | {"parallel": parallel_model()}


def of(values: dict, **told: Any) -> Card:
    return card(build(values), **{"device": MACHINE, "deployed": 8192, "trained": 2048, **told})


def test_a_card_of_smollm2_says_what_is_published() -> None:
    found = of(SMOL, dtype=mx.bfloat16, tokenizer_size=49152, name="SmolLM2-135M")
    attn, mlp = found.kinds[0].steps
    assert (found.dim, found.layers, found.vocabulary, found.tied) == (576, 30, 49152, True)
    assert [attn.facts[key] for key in ("heads", "kv_heads", "head_dim", "sharing")] == [9, 3, 64, "grouped-query"]
    assert [mlp.facts[key] for key in ("width", "style", "activation")] == [1536, "gated", "silu"]
    assert found.parameters == found.active_parameters == 134_515_008
    assert (found.weights_bytes, found.bits_per_weight) == (269_030_016, 16.0)
    assert found.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2 == 23_040
    assert found.kv_bytes == 8192 * 23_040
    assert (found.fits, found.needed_bytes) == (True, 269_030_016 + 8192 * 23_040)


TEXT = """\
name            SmolLM2-135M
layers          30 of width 576
residual order  sequential: attn, then mlp
heads           9 query, 3 key-value (grouped-query), 64 features each
mask            causal
position        rotary on 64 features, theta 100000, unscaled
length          trained on 2,048 tokens, deployed for 8,192 tokens
MLP             gated, silu, 1,536 wide
experts         none (dense)
norms           RMSNorm, eps 1e-05: before attn, before mlp
last norm       RMSNorm, eps 1e-05
biases          none
head            tied to the embedding
vocabulary      49,152 rows, 49,152 ids in the tokenizer: they match
parameters      134,515,008; a token uses all of them
weights         269 MB, 16.00 bits per weight
KV cache        23,040 bytes per token in bfloat16;
                189 MB for 8,192 tokens
memory          fits: needs 458 MB of the 10.0 GB recommended in a test

                    shape             in numbers     parameters
embedding
  ids               (B, L)            (B, L)
  embed.tokens      (B, L, C)         (B, L, 576)    28,311,552
decoder.layers.0-29 × 30
  attn.pre          (B, L, C)         (B, L, 576)           576
  attn.op.qkv       (B, L, (H+2K)·D)  (B, L, 960)       552,960
  attn.op.position  (B, H, L, D)      (B, 9, L, 64)
  attn.op.q         (B, H, L, D)      (B, 9, L, 64)
  attn.op.k         (B, K, L, D)      (B, 3, L, 64)
  attn.op.v         (B, K, L, D)      (B, 3, L, 64)
  attn.op.pattern   (B, H, L, S)      (B, 9, L, S)
  attn.op.z         (B, H, L, D)      (B, 9, L, 64)
  attn.op.out       (B, L, C)         (B, L, 576)       331,776
  attn.out          (B, L, C)         (B, L, 576)
  mlp.pre           (B, L, C)         (B, L, 576)           576
  mlp.op.gate_up    (B, L, 2F)        (B, L, 3072)    1,769,472
  mlp.op.gate       (B, L, F)         (B, L, 1536)
  mlp.op.up         (B, L, F)         (B, L, 1536)
  mlp.op.hidden     (B, L, F)         (B, L, 1536)
  mlp.op.down       (B, L, C)         (B, L, 576)       884,736
  mlp.out           (B, L, C)         (B, L, 576)
  out               (B, L, C)         (B, L, 576)
end
  decoder.norm      (B, L, C)         (B, L, 576)           576
  logits            (B, L, V)         (B, L, 49152)

B texts of L tokens that see S keys; C width, V vocabulary, F MLP width;
H query heads and K key-value heads of D features.
"""


def test_a_card_reads_like_this() -> None:
    found = of(SMOL, dtype=mx.bfloat16, tokenizer_size=49152, name="SmolLM2-135M")
    assert found.render() == TEXT
    assert found.render(ascii_only=True) == TEXT.replace("×", "x").replace("·", "*")


@pytest.mark.parametrize("name", [*CASES, "parallel"])
def test_the_lines_of_the_ledger_add_up_to_the_parameters(name: str) -> None:
    model = models()[name]
    found = card(model, device=MACHINE)
    assert sum(s.times * line.parameters for s in found.ledger for line in s.lines) == parameter_count(model)
    layers = sorted(layer for section in found.ledger for layer in section.layers)
    assert layers == sorted(layer for kind in found.kinds for layer in kind.layers) == list(range(found.layers))


@pytest.mark.parametrize("name", [*CASES, "parallel"])
def test_the_ledger_s_shapes_are_those_of_a_running_model(name: str) -> None:
    model = models()[name]
    seen: dict[str, tuple[int, ...]] = {}
    with watch("*", lambda path, value: seen.__setitem__(path.lstrip("."), value.shape)):
        mx.eval(model(mx.array([[1, 2, 3, 4, 5]] * 3)))
    found = card(model, device=MACHINE)
    lengths = {"B": 3, "L": 5, "S": 5}
    told = {"logits": found.ledger[-1].lines[-1]}
    for section in found.ledger:
        told |= {f"decoder.layers.{n}.{line.name}": line for n in section.layers for line in section.lines}
    same = [path for path in told if path in seen]
    assert {path.rpartition(".")[2] for path in same} >= {"logits", "q", "k", "v", "pattern", "z", "hidden", "out"}
    for path in same:
        assert tuple(lengths.get(str(axis), axis) for axis in told[path].shape) == seen[path], path


@pytest.mark.parametrize("name", [*CASES, "parallel"])
def test_json_gives_back_the_card(name: str) -> None:
    told = card(models()[name], device=MACHINE, trained=2048, deployed=8192, name="héllo").to_dict()
    assert json.loads(json.dumps(told)) == told
    assert list(told) == list(Card.__dataclass_fields__)
    assert isinstance(told["weights_bytes"], int)
    assert isinstance(told["kv_bytes"], int)
    assert told["device"]["recommended"] == 10_000_000_000


@pytest.mark.parametrize("width", [80, 100, 40])
@pytest.mark.parametrize("name", [*CASES, "parallel"])
def test_no_line_is_longer_than_the_terminal(name: str, width: int) -> None:
    model = models()[name]
    for layers in (model.decoder.layers, model.decoder.layers * 7):
        model.decoder.layers = layers
        told = card(
            model, device=MACHINE, deployed=131072, trained=8192, name="a/long name " * 20, tokenizer_size=10**6
        )
        assert max(map(len, told.render(width).splitlines())) <= width
        assert told.render(width, ascii_only=True).isascii()


def test_a_long_vocabulary_and_a_large_model_still_fit_in_80_columns() -> None:
    large = SMOL | {"hidden_size": 18432, "intermediate_size": 147456, "num_attention_heads": 144, "vocab_size": 10**6}
    rows = of(large).render().splitlines()
    assert max(map(len, rows)) <= 80
    down = next(row for row in rows if "mlp.op.down" in row)
    assert down.endswith(f"{18432 * 147456:,}")  # not folded


def test_rich_prints_a_card_even_where_only_ascii_can_be_written() -> None:
    written = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    Console(file=written, width=80).print(of(SMOL, name="naïve"))
    written.seek(0)
    text = written.read()
    assert "decoder.layers.0-29 x 30" in text
    assert "na?ve" in text


def test_a_name_cannot_steer_the_terminal_or_the_markup() -> None:
    first = of(TINY, name="[bold]\x1b[2Jx[/nothing]\n").render().splitlines()[0]
    assert first == "name            [bold]?[2Jx[/nothing]?"


def row(found: Card, label: str) -> str:
    """What the text says after a label, lines joined."""
    head = found.render().split("\n\n")[0]
    match = re.search(rf"^{label} +(.*(?:\n {{16}}.*)*)", head, re.MULTILINE)
    assert match is not None, head
    return " ".join(match[1].split())


def test_masks_are_grouped_by_layers() -> None:
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    windows = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 512, "layer_types": types}
    found = of(TINY | windows | {"num_hidden_layers": 12, "head_dim": 8})
    assert row(found, "mask") == "layers 0-4, 6-10: causal, window of 512; layers 5, 11: causal"
    per_token = 12 * 2 * 2 * 8 * 4
    assert found.kv_bytes_per_token == per_token
    assert found.kv_bytes == per_token * 2 // 12 * 8192 + per_token * 10 // 12 * 512
    assert row(found, "KV cache").endswith("for 8,192 tokens, bounded by windows")
    assert [section.times for section in found.ledger] == [1, 12, 1]  # shapes are the same in all layers


def test_layers_of_other_shapes_have_their_own_ledger() -> None:
    found = card(parallel_model(), device=MACHINE)
    assert [(s.title, s.times) for s in found.ledger[1:-1]] == [("decoder.layers.0, 2", 2), ("decoder.layers.1", 1)]
    assert row(found, "MLP") == "layers 0, 2: plain, gelu, 64 wide; layer 1: plain, gelu, 72 wide"


def test_norms_biases_order_and_scale_are_told() -> None:
    found = card(parallel_model(), device=MACHINE)
    assert row(found, "residual order") == "parallel: attn and mlp read the same input"
    assert row(found, "heads") == "4 query, 4 key-value (multi-head), 8 features each, scale 0.5"
    assert row(found, "mask") == "none"
    assert row(found, "position") == "none"
    assert row(found, "norms") == (
        "LayerNorm, eps 1e-05: before attn; RMSNorm, eps 0.001: on the output of attn; "
        "LayerNorm without bias, eps 1e-06: before mlp"
    )
    assert row(found, "biases") == "attn.out, attn.qkv, mlp.down, mlp.up; head"
    assert row(found, "head") == "a matrix of its own"
    assert row(found, "length") == "not known"
    assert found.context is found.kv_bytes is found.tokens_that_fit is None


def test_each_family_tells_its_own_traits() -> None:
    assert row(of(CASES["qwen2"]), "biases") == "attn.qkv"
    assert row(of(CASES["biased"]), "biases") == "attn.out, attn.qkv, mlp.down, mlp.gate_up"
    assert "multi-query" in row(of(CASES["biased"]), "heads")
    assert row(of(CASES["qwen3"]), "norms").endswith("before attn, on each head of q, on each head of k, before mlp")
    assert row(of(CASES["mistral"]), "mask") == "causal, window of 7"
    yarn = "rotary on 16 features, theta 100000, YaRN ×4 beyond 2048"
    assert row(of(CASES["yarn"]), "position") == yarn


def test_the_tree_is_told_and_not_the_name() -> None:
    model = build(TINY)
    model.decoder.layers[2].attn.op.mask = Everything()
    model.decoder.layers[1].mlp.op.act = "relu"
    found = card(model, device=MACHINE, name="llama")
    assert row(found, "mask") == "layers 0-1, 3: causal; layer 2: none"
    assert row(found, "MLP") == "layers 0, 2-3: gated, silu, 48 wide; layer 1: gated, relu, 48 wide"


def test_a_vocabulary_with_too_few_rows_is_an_error_and_spare_rows_are_counted() -> None:
    assert row(of(TINY, tokenizer_size=131), "vocabulary") == "131 rows, 131 ids in the tokenizer: they match"
    assert row(of(TINY, tokenizer_size=100), "vocabulary").endswith("31 spare rows")
    short = of(TINY, tokenizer_size=132)
    assert row(short, "vocabulary") == "ERROR: 131 rows, 132 ids in the tokenizer: too few by 1"
    assert short.vocabulary_matches is False
    assert of(TINY).vocabulary_matches is None
    assert of(TINY, tokenizer_size=131).vocabulary_matches is True


def test_a_token_reads_one_row_of_an_untied_embedding() -> None:
    found = of(CASES["untied"])
    assert found.parameters - found.active_parameters == 130 * 32


def test_lengths_are_told_as_far_as_they_are_known() -> None:
    assert row(of(TINY, trained=8192), "length") == "8,192 tokens, trained and deployed"
    assert row(of(TINY, trained=None), "length") == "deployed for 8,192 tokens"
    only = of(TINY, deployed=None)
    assert (row(only, "length"), only.context) == ("trained on 2,048 tokens", 2048)


def test_a_model_that_does_not_fit_says_how_many_tokens_would() -> None:
    found = of(SMOL, dtype=mx.bfloat16, device=Memory(10**9, 300_000_000, "recommended in a test"))
    fit = (300_000_000 - 269_030_016) // 23_040
    assert not found.fits
    assert row(found, "memory") == (
        f"DOES NOT FIT: needs 458 MB of the 300 MB recommended in a test; {fit:,} tokens would fit"
    )
    smaller = of(SMOL, dtype=mx.bfloat16, device=Memory(10**9, 300_000_000, "recommended in a test"), context=fit)
    assert smaller.fits


def test_a_context_that_is_not_positive_is_refused() -> None:
    with pytest.raises(UsageError, match="context: found 0, expected 1 or more"):
        of(TINY, context=0)


def test_quantized_weights_are_counted_from_their_arrays() -> None:
    model = build(SMOL)
    mlx_nn.quantize(model, 32, 4)
    found = card(model, device=MACHINE, deployed=8192, dtype=mx.bfloat16)
    norms = 576 * 61
    assert found.parameters == 134_515_008
    assert found.weights_bytes == (134_515_008 - norms) * 5 // 8 + 2 * norms  # 4 bits + 2 × 16 bits / 32
    assert (found.dim, found.vocabulary, found.dtype) == (576, 49152, "bfloat16")
    assert sum(s.times * line.parameters for s in found.ledger for line in s.lines) == 134_515_008
    assert row(found, "weights") == "84.1 MB, 5.00 bits per weight"


def test_weights_that_are_known_better_are_taken_from_the_caller() -> None:
    found = of(SMOL, weights_bytes=134_515_008, dtype=mx.float16)
    assert (found.weights_bytes, found.bits_per_weight, found.dtype) == (134_515_008, 8.0, "float16")


class Mixer(Module):
    """A mechanism that cards know nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Linear(32, 32)

    def __call__(self, x: mx.array, ctx: Context) -> mx.array:
        return self.mix(x)


def test_a_mechanism_that_has_not_described_itself_is_shown_by_its_class() -> None:
    blocks = [Block(mixer=Residual(Mixer())), Block(mlp=Residual(GatedMlp(32, 48)))]
    model = LM(Embed(50, 32), Stack(blocks))
    found = card(model, device=MACHINE)
    assert row(found, "residual order") == "layer 0: sequential: mixer (Mixer); layer 1: sequential: mlp"
    assert row(found, "MLP") == "layer 0: none; layer 1: gated, silu, 48 wide"
    line = found.ledger[1].lines[0]
    assert (line.name, line.shape, line.parameters) == ("mixer.op.Mixer", ("B", "L", 32), 32 * 33)
    assert found.kv_bytes_per_token == 0


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 3, 5, 6], "0-1, 3, 5-6")])
def test_numbers_of_layers_are_told_in_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


GIANT = """
import resource, sys
import mlx.core as mx
from mlx_tformer.card import card
from mlx_tformer.config import Config
from mlx_tformer.families import family

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
values = {"model_type": "llama", "hidden_size": 20480, "intermediate_size": 81920, "num_attention_heads": 160,
          "num_key_value_heads": 8, "num_hidden_layers": 100, "vocab_size": 256000, "max_position_embeddings": 131072}
found = card(family("llama").model(Config(values)), deployed=131072)
text = found.render()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(found.parameters, mx.get_active_memory(), mx.get_peak_memory(), grown * (1 if sys.platform == "darwin" else 1024))
"""


def test_a_card_of_600_billion_parameters_takes_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", GIANT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parameters, active, peak, grown = map(int, done.stdout.split())
    assert parameters > 600_000_000_000
    assert active <= peak < 1_000_000
    assert grown < 60_000_000
