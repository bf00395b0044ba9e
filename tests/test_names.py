"""From a checkpoint's names to ours."""

import json
import re
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import CASES, GOLDEN, config_of, golden, ids_of, leaves, load, tensors
from hypothesis import given
from hypothesis import strategies as st

from mlx_tformer.config import Config
from mlx_tformer.errors import BadInput
from mlx_tformer.families import family
from mlx_tformer.names import (
    Alternating,
    Assignment,
    ByGroup,
    Change,
    Drop,
    Flattened,
    Names,
    Piece,
    Rows,
    Same,
    Transposed,
    Unflattened,
    assign,
    joined,
    summary,
    templated,
)
from mlx_tformer.nn import LM

TABLE: Names = {
    "embed": "tokens",
    "h.{}.ln": "layers.{}.norm",
    **joined("layers.{}.qkv", {"h.{}.q": 4, "h.{}.k": 1, "h.{}.v": 1}),
    "h.{}.experts.{}.w": "layers.{}.experts.{}.up",
    "h.{}.freqs": Drop("computed"),
    "lm_head": Same("tokens"),
}


def test_each_rule_sends_a_tensor_where_it_says() -> None:
    found = assign(
        [
            "embed.weight",
            "h.0.ln.weight",
            "h.12.ln.bias",
            "h.3.k.weight",
            "h.3.q.weight",
            "h.3.v.weight",
            "h.3.q.bias",
            "h.4.experts.17.w.scales",
            "h.3.freqs",
            "lm_head.weight",
            "lm_head.scales",
        ],
        TABLE,
    )
    of = (4, 1, 1)
    assert found == Assignment(
        pieces={
            "tokens.weight": [Piece("embed.weight")],
            "layers.0.norm.weight": [Piece("h.0.ln.weight")],
            "layers.12.norm.bias": [Piece("h.12.ln.bias")],
            "layers.3.qkv.weight": [
                Piece("h.3.k.weight", 1, of),
                Piece("h.3.q.weight", 0, of),
                Piece("h.3.v.weight", 2, of),
            ],
            "layers.3.qkv.bias": [Piece("h.3.q.bias", 0, of)],
            "layers.4.experts.17.up.scales": [Piece("h.4.experts.17.w.scales")],
        },
        copies={"lm_head.weight": "tokens.weight", "lm_head.scales": "tokens.scales"},
        dropped={"h.3.freqs": "computed"},
        unknown=[],
    )


@pytest.mark.parametrize(
    "name",
    [
        "h.0.mystery.weight",
        "h.ln.weight",  # no number
        "h.x.ln.weight",
        "H.0.ln.weight",
        "model.h.0.ln.weight",  # a prefix
        "h.0.ln.weight.extra",
        "h.0.experts.w",  # a number short
        "h.0",
        "embed.0.weight",
        "",
        ".",
        "weight",
        "h.{}.ln.weight",  # the table's own spelling
        "h.{}.experts.3.w.weight",
        "h.-1.ln.weight",
    ],
)
def test_a_tensor_that_no_rule_names_is_unknown(name: str) -> None:
    assert assign([name], TABLE) == Assignment(unknown=[name])


@given(st.lists(st.text(alphabet="h.{}0l9nqw ", max_size=12), max_size=4, unique=True))
def test_every_tensor_ends_in_exactly_one_place_whatever_it_is_called(names: list[str]) -> None:
    found = assign(names, TABLE)
    placed = [piece.source for pieces in found.pieces.values() for piece in pieces]
    assert sorted([*placed, *found.unknown, *names_of(found)]) == sorted(names)


def names_of(found: Assignment) -> list[str]:
    return [*found.copies, *found.dropped]


def test_a_joined_matrix_remembers_its_parts_in_order_and_their_shares() -> None:
    assert joined("a", {"q": 4, "k": 2, "v": 1}) == {
        "q": Rows("a", 0, (4, 2, 1)),
        "k": Rows("a", 1, (4, 2, 1)),
        "v": Rows("a", 2, (4, 2, 1)),
    }


@pytest.mark.parametrize(
    ("name", "template", "numbers"),
    [
        ("model.layers.12.mlp.experts.3.w1.weight", "model.layers.{}.mlp.experts.{}.w1.weight", ["12", "3"]),
        ("h.0", "h.{}", ["0"]),
        ("layer1.conv2d.weight", "layer1.conv2d.weight", []),
        ("", "", []),
        ("a.1.2.b", "a.{}.{}.b", ["1", "2"]),
    ],
)
def test_numbers_between_dots_are_taken_out_of_a_name(name: str, template: str, numbers: list[str]) -> None:
    assert templated(name) == (template, numbers)


@given(st.lists(st.sampled_from(["a", "w1", "0", "7", "12", "layers"]), min_size=2, max_size=6))
def test_a_template_and_its_numbers_give_the_name_back(parts: list[str]) -> None:
    template, numbers = templated(".".join(["m", *parts]))
    assert template.format(*numbers) == ".".join(["m", *parts])


def test_a_summary_names_everything_once() -> None:
    many = [f"h.{i}.{leaf}" for i in range(30) for leaf in ("w", "b")]
    assert summary([*many, "x"]) == "h.*.w (30), h.*.b (30), x"
    assert summary([]) == ""


# --- other orders ---

CHANGES: list[tuple[Change, tuple[int, ...]]] = [
    (Transposed(), (3, 5)),
    (Transposed(), (5,)),
    (Transposed(stacked=True), (2, 3, 5)),
    (Transposed(stacked=True), (2, 3)),
    (Alternating(0), (6, 2)),
    (Alternating(1), (2, 6, 3)),
    (Alternating(1, parts=3), (2, 6)),
    (ByGroup(4, (1, 1, 1)), (24, 5)),
    (ByGroup(2, (3, 1, 1)), (20, 3)),
    (ByGroup(1, (4, 1, 1)), (12,)),
    (Flattened(0, (1, 5)), (1, 5, 4)),
    (Flattened(1, (3, 2, 2)), (4, 3, 2, 2)),
    (Unflattened(0, 3), (12, 2)),
    (Unflattened(1, 2), (3, 8)),
]


@pytest.mark.parametrize(("change", "shape"), CHANGES, ids=str)
def test_undoing_a_change_gives_the_tensor_back(change: Change, shape: tuple[int, ...]) -> None:
    x = mx.random.normal(shape)
    assert mx.array_equal(change.undo(change.do(x)), x).item()
    assert sorted(np.array(change.do(x)).flatten()) == sorted(np.array(x).flatten())


sides = st.integers(1, 5)


@given(sides, sides, st.lists(sides, min_size=1, max_size=4), st.lists(sides, max_size=2), st.data())
def test_any_change_can_be_undone(
    groups: int, width: int, sizes: list[int], rest: list[int], data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(rest)))
    grouped: Change = ByGroup(groups, tuple(sizes))
    for change, side, at in [(grouped, groups * sum(sizes) * width, 0)] + [
        (change, groups * width, axis) for change in (Alternating(axis, parts=width), Unflattened(axis, width))
    ]:
        shape = (*rest[:at], side, *rest[at:])
        x = mx.arange(int(np.prod(shape))).reshape(shape)
        assert mx.array_equal(change.undo(change.do(x)), x).item()


def test_each_change_is_the_order_that_it_says() -> None:
    rows = mx.arange(24)  # two groups of 3 q, 2 k, 1 v, of two rows each
    found = ByGroup(2, (3, 2, 1)).do(rows)
    q, k, v = [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17], [6, 7, 8, 9, 18, 19, 20, 21], [10, 11, 22, 23]
    assert found.tolist() == q + k + v
    assert Alternating(0).do(mx.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]
    assert Alternating(0, parts=3).do(mx.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    assert Alternating(1).do(mx.array([[0, 1, 2, 3], [4, 5, 6, 7]])).tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert Transposed().do(mx.array([[0, 1, 2]])).tolist() == [[0], [1], [2]]
    assert Transposed(stacked=True).do(mx.array([[[0, 1]], [[2, 3]]])).tolist() == [[[0], [1]], [[2], [3]]]
    assert Unflattened(0, 2).do(mx.arange(4)).tolist() == [[0, 1], [2, 3]]


# --- the tables of the families ---


def stored_again(parameter: mx.array, piece: Piece) -> mx.array:
    """The tensor of a checkpoint that a piece of one of our parameters was."""
    matrix = parameter if piece.expert is None else parameter[piece.expert]
    unit = matrix.shape[piece.axis] // sum(piece.of)
    ends = [unit * end for end in accumulate(piece.of)]
    part = mx.split(matrix, ends[:-1], axis=piece.axis)[piece.part]
    for change in reversed(piece.changes):
        part = change.undo(part)
    return part


@pytest.mark.parametrize("case", CASES)
def test_a_family_places_every_tensor_of_its_checkpoints_so_that_it_can_be_stored_again(case: str) -> None:
    config = Config(config_of(case))
    stored = tensors(GOLDEN / case / "model.safetensors")
    found = assign(stored, family(config.model_type).names(config))
    assert (found.unknown, found.copies, found.dropped) == ([], {}, {})
    parameters = leaves(golden(case))
    assert found.pieces.keys() == parameters.keys()
    assert sorted(piece.source for pieces in found.pieces.values() for piece in pieces) == sorted(stored)
    for name, pieces in found.pieces.items():
        for piece in pieces:
            again = stored_again(parameters[name], piece)
            assert mx.array_equal(again, stored[piece.source].astype(mx.float32)).item(), piece


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_head_beside_a_tied_embedding_is_a_copy_and_old_rotary_tables_are_dropped(model_type: str) -> None:
    config = Config({**config_of("llama-gqa-tied"), "model_type": model_type})
    extra = ["lm_head.weight", "model.layers.1.self_attn.rotary_emb.inv_freq"]
    found = assign(extra, family(model_type).names(config))
    assert found.copies == {"lm_head.weight": "embed.tokens.weight"}
    assert list(found.dropped) == extra[1:] and not found.unknown and not found.pieces


# --- the same weights, stored otherwise ---


def load_as(case: str, stored: Mapping[str, mx.array], folder: Path) -> LM:
    """A case whose weights are these; `folder` is an empty one to put them into."""
    mx.save_safetensors(str(folder / "model.safetensors"), dict(stored))
    (folder / "config.json").write_text(json.dumps(config_of(case)))
    return load(folder)


def same(case: str, stored: Mapping[str, mx.array], folder: Path) -> bool:
    """True if weights stored so give the very logits of the case."""
    return bool(mx.array_equal(load_as(case, stored, folder)(ids_of(case)), golden(case)(ids_of(case))).item())


PREFIXES = {"bloom": "transformer.", "gpt2": "transformer.", "opt": "model.", "opt-after": "model."}


@pytest.mark.parametrize(("case", "prefix"), PREFIXES.items())
def test_names_may_have_the_prefix_of_the_language_model_or_not(case: str, prefix: str, tmp_path: Path) -> None:
    """As published first, and as saved since."""
    stored = tensors(GOLDEN / case / "model.safetensors")
    assert all(name.startswith(prefix) for name in stored)
    assert same(case, {name.removeprefix(prefix): value for name, value in stored.items()}, tmp_path)


BUFFERS = {
    "gpt2": ["transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"],
    "gptj": ["transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"],
    "gpt_neox": ["gpt_neox.layers.{}.attention." + leaf for leaf in ("bias", "masked_bias", "rotary_emb.inv_freq")],
    "falcon": ["transformer.h.{}.self_attention.rotary_emb.inv_freq"],
    "llama-mha": ["model.layers.{}.self_attn.rotary_emb.inv_freq"],
    "mixtral": ["model.layers.{}.self_attn.rotary_emb.inv_freq"],
    "deepseek_v2": ["model.layers.{}.self_attn.rotary_emb.inv_freq"],
}


@pytest.mark.parametrize(("case", "buffers"), BUFFERS.items())
def test_buffers_that_older_versions_stored_are_passed_over(case: str, buffers: list[str], tmp_path: Path) -> None:
    extra = {name.format(layer): mx.ones((3,)) for name in buffers for layer in range(3)}
    assert same(case, tensors(GOLDEN / case / "model.safetensors") | extra, tmp_path)


HEADS = ["bloom", "bloom-heads", "falcon", "gpt2", "mpt", "opt", "gemma", "cohere", "granite-tied", "mixtral-window"]


@pytest.mark.parametrize("case", HEADS)
def test_a_tied_head_may_be_stored_once_more_if_it_is_the_same(case: str, tmp_path: Path) -> None:
    stored = tensors(GOLDEN / case / "model.safetensors")
    table = next(name for name, value in stored.items() if value.shape[0] == config_of(case)["vocab_size"])
    assert same(case, stored | {"lm_head.weight": stored[table]}, tmp_path)
    with pytest.raises(BadInput, match="differs from embed"):
        load_as(case, stored | {"lm_head.weight": stored[table] + 1}, tmp_path)


EXPERTS = [
    "mixtral",
    "mixtral-window",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_moe-mixed",
    "qwen3_next",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
]


PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def stacked(stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """One tensor for all experts of a layer, gate and up joined, as transformers 5 has them in memory."""
    found, layers = dict[str, mx.array](), dict[str, dict[tuple[int, int], mx.array]]()
    for name, value in stored.items():
        one = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name.replace("block_sparse_moe", "mlp"))
        if one is None:
            found[name.replace("block_sparse_moe", "mlp")] = value
        else:
            layers.setdefault(one[1], {})[PARTS[one[3]], int(one[2])] = value
    for layer, each in layers.items():
        gate, up, down = (mx.stack([each[part, n] for n in range(len(each) // 3)]) for part in range(3))
        found |= {
            f"{layer}.experts.gate_up_proj": mx.concatenate([gate, up], axis=1),
            f"{layer}.experts.down_proj": down,
        }
    return found


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_may_be_stored_one_by_one_or_stacked(case: str, tmp_path: Path) -> None:
    stored = tensors(GOLDEN / case / "model.safetensors")
    assert len(stacked(stored)) < len(stored)
    assert same(case, stacked(stored), tmp_path)


def test_experts_may_come_in_any_order(tmp_path: Path) -> None:
    """Ten of them and more would be shuffled by the alphabet."""
    stored = tensors(GOLDEN / "qwen3_moe" / "model.safetensors")
    assert same("qwen3_moe", dict(reversed(stored.items())), tmp_path)
    names = [f"model.layers.0.mlp.experts.{n}.down_proj.weight" for n in sorted(range(12), key=str)]
    pieces = assign(names, family("qwen3_moe").names(Config(config_of("qwen3_moe")))).pieces
    assert [piece.expert for piece in pieces["decoder.layers.0.mlp.op.experts.down.weight"]] == sorted(
        range(12), key=str
    )


EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({EXPERT.format(3, "up"): None}, f"no weights for {EXPERT.format(3, 'up')}"),
        ({EXPERT.format(0, "down"): None}, f"no weights for {EXPERT.format(0, 'down')}"),
        ({EXPERT.format(7, x): None for x in ("gate", "up", "down")}, EXPERT.format(7, "gate")),
        ({EXPERT.format(8, x): (28, 48) for x in ("gate", "up")} | {EXPERT.format(8, "down"): (48, 28)}, "experts.8"),
        ({EXPERT.format("07", "up"): (28, 48)}, "7.up_proj.weight"),
        ({EXPERT.format(2, "up"): (48, 28)}, f"{EXPERT.format(2, 'up')}: found shape (48, 28), expected (28, 48)"),
        ({"model.layers.1.mlp.experts.down_proj": (8, 48, 28)}, "experts.*.down_proj.weight (8)"),
        ({"model.layers.1.mlp.gate.weight": None}, "no weights for model.layers.1.mlp.gate.weight"),
    ],
)
def test_experts_that_are_missing_or_too_many_are_named(
    changes: Mapping[str, tuple[int, ...] | None], problem: str, tmp_path: Path
) -> None:
    stored = tensors(GOLDEN / "qwen3_moe" / "model.safetensors")
    stored |= {name: mx.zeros(shape, mx.bfloat16) for name, shape in changes.items() if shape is not None}
    stored = {name: value for name, value in stored.items() if changes.get(name, ()) is not None}
    with pytest.raises(BadInput) as caught:
        load_as("qwen3_moe", stored, tmp_path)
    assert problem in str(caught.value)
