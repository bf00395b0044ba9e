"""From a checkpoint's names to ours."""

import pytest
from helpers import CASES, GOLDEN, config_of, golden, leaves, tensors
from hypothesis import given
from hypothesis import strategies as st

from mlx_tformer.config import Config
from mlx_tformer.families import family
from mlx_tformer.names import Assignment, Drop, Names, Piece, Rows, Same, assign, joined, summary, templated

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


# --- the tables of the families ---


@pytest.mark.parametrize("case", CASES)
def test_a_family_places_every_tensor_of_its_checkpoints(case: str) -> None:
    config = Config(config_of(case))
    stored = tensors(GOLDEN / case / "model.safetensors")
    found = assign(stored, family(config.model_type).names(config))
    assert (found.unknown, found.copies, found.dropped) == ([], {}, {})
    parameters = leaves(golden(case))
    assert found.pieces.keys() == parameters.keys()
    for name, pieces in found.pieces.items():
        rows = {piece.part: stored[piece.source].shape[0] for piece in pieces}
        assert list(range(len(rows))) == sorted(rows) and len(rows) == len(pieces[0].of)
        assert sum(rows.values()) == parameters[name].shape[0]
        total = sum(pieces[0].of)
        assert all(rows[part] * total == share * parameters[name].shape[0] for part, share in enumerate(pieces[0].of))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_head_beside_a_tied_embedding_is_a_copy_and_old_rotary_tables_are_dropped(model_type: str) -> None:
    config = Config({**config_of("llama-gqa-tied"), "model_type": model_type})
    extra = ["lm_head.weight", "model.layers.1.self_attn.rotary_emb.inv_freq"]
    found = assign(extra, family(model_type).names(config))
    assert found.copies == {"lm_head.weight": "embed.tokens.weight"}
    assert list(found.dropped) == extra[1:] and not found.unknown and not found.pieces
