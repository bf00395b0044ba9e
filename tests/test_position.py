"""Rotary positions: frequencies against transformers' tables, the turning against a rotation written out."""

import json
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from helpers import GOLDEN, gap, golden
from hypothesis import given
from hypothesis import strategies as st
from reference import f64

from mlx_tformer.config import Config
from mlx_tformer.errors import UsageError
from mlx_tformer.families.falcon import RoundedAlibi
from mlx_tformer.families.llama4_text import NormedRope, Tempered
from mlx_tformer.nn import (
    Alibi,
    DynamicNTK,
    Learned,
    LinearScaling,
    Llama3,
    LongRope,
    Position,
    Rope,
    Scaling,
    Unscaled,
    Yarn,
)
from mlx_tformer.nn.position import alibi_slopes

TABLES: list[dict[str, Any]] = json.loads((GOLDEN / "rope.json").read_text())


def rope_of(table: dict[str, Any]) -> Rope:
    keys = ("rope_parameters", "max_position_embeddings")
    c = Config({"model_type": "phi"} | {key: table[key] for key in keys})
    return c.taking({"partial_rotary_factor": 1.0}).rope(table["head_dim"])


# --- scalings ---


@pytest.mark.parametrize("table", TABLES, ids=[f"{table['name']} at {table['length']}" for table in TABLES])
def test_frequencies_and_amplitude_are_those_of_transformers(table: dict[str, Any]) -> None:
    rope = rope_of(table)
    np.testing.assert_allclose(reference.frequencies(rope, table["length"]), table["inv_freq"], rtol=1e-6)
    assert rope.scaling.amplitude == pytest.approx(table["amplitude"], rel=1e-12)


SCALINGS: list[Scaling] = [
    Unscaled(),
    LinearScaling(4.0),
    DynamicNTK(2.0, 64),
    Yarn(4.0, 64),
    Llama3(8.0, 1.0, 4.0, 64),
    LongRope((1.0, 1.2, 1.4, 1.6), (1.0, 2.0, 3.0, 4.0), 64, 4.0),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@given(context=st.integers(0, 500))
def test_lengths_of_one_regime_share_their_frequencies(scaling: Scaling, context: int) -> None:
    beyond = context > 64
    regime = scaling.regime(context)
    if isinstance(scaling, DynamicNTK):
        assert regime == (context if beyond else 0)
    else:
        assert regime == (1 if beyond and isinstance(scaling, LongRope) else 0)
    if not beyond:
        np.testing.assert_array_equal(scaling.frequencies(8, 1e4, regime), scaling.frequencies(8, 1e4))


def test_scalings_that_do_nothing_give_the_plain_frequencies() -> None:
    plain = Unscaled().frequencies(16, 1e4)
    np.testing.assert_allclose(plain, [1e4 ** (-i / 8) for i in range(8)], rtol=1e-14)
    for scaling in (LinearScaling(1.0), DynamicNTK(8.0, 64), Yarn(1.0, 64), Llama3(1.0, 1.0, 4.0, 64)):
        np.testing.assert_allclose(scaling.frequencies(16, 1e4), plain, rtol=1e-14)


def test_dynamic_scaling_divides_the_slowest_pair_by_just_what_the_text_is_longer() -> None:
    """NTK scaling is made so: the fastest pair stays as it is, and the slowest is slowed by the whole stretch."""
    plain, scaled = Unscaled().frequencies(16, 1e4), DynamicNTK(1.0, 64).frequencies(16, 1e4, regime=256)
    assert scaled[0] == plain[0]
    assert plain[-1] / scaled[-1] == pytest.approx(256 / 64)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    plain, scaled = (np.array(s.frequencies(64, 1e4)) for s in (Unscaled(), Yarn(4.0, 2048)))
    plain, scaled = np.array(plain), np.array(scaled)
    turns = 2048 * plain / (2 * math.pi)
    assert (scaled[turns > 40] == plain[turns > 40]).all()
    np.testing.assert_allclose(scaled[turns < 0.8], plain[turns < 0.8] / 4)
    assert (np.diff(plain / scaled) >= 0).all()


def test_a_scaling_says_what_it_is() -> None:
    assert [str(Rope(8, 5e5, scaling)) for scaling in SCALINGS] == [
        "rotary on 8 features, theta 500000, unscaled",
        "rotary on 8 features, theta 500000, linear ×4",
        "rotary on 8 features, theta 500000, dynamic NTK ×2 beyond 64",
        "rotary on 8 features, theta 500000, YaRN ×4 beyond 64",
        "rotary on 8 features, theta 500000, llama3 ×8 beyond 64",
        "rotary on 8 features, theta 500000, longrope ×4 beyond 64",
    ]
    assert str(Rope(8, interleaved=True)).endswith(", interleaved")
    assert str(Position()) == "none"


# --- turning ---


def heads(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def turned(rope: Rope, x: mx.array, offset: int | list[int], context: int = 0) -> np.ndarray:
    """What `rope` should make of x (B, H, L, D), in float64."""
    first = np.broadcast_to(np.array(offset), x.shape[:1])
    positions = first[:, None] + np.arange(x.shape[2])
    speeds, amplitude = reference.frequencies(rope, context), rope.scaling.amplitude
    return reference.rotate(reference.f64(x), positions, speeds, interleaved=rope.interleaved, amplitude=amplitude)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [4, 8, 12])
@pytest.mark.parametrize("scaling", SCALINGS[:5], ids=str)
@pytest.mark.parametrize("offset", [0, 5, 130])
def test_rope_is_the_rotation_written_out(interleaved: bool, dims: int, scaling: Scaling, offset: int) -> None:
    rope, x = Rope(dims, 100.0, scaling, interleaved=interleaved), heads(2, 3, 7, 12)
    found = rope.rotate(x, offset, offset + 7)
    assert gap(found, turned(rope, x, offset, offset + 7)) < 1e-4
    if scaling.amplitude == 1:
        assert gap(rope.rotate(x[:, :, :1], 0, offset + 7), x[:, :, :1]) == 0


@pytest.mark.parametrize("context", [64, 65])
@pytest.mark.parametrize("interleaved", [False, True])
def test_longrope_turns_by_the_set_that_the_whole_text_asks_for(context: int, interleaved: bool) -> None:
    rope, x = Rope(8, 100.0, SCALINGS[5], interleaved=interleaved), heads(2, 3, 7, 12)
    assert gap(rope.rotate(x, 9, context), turned(rope, x, 9, context)) < 1e-5
    assert gap(rope.rotate(x, 9, context), turned(rope, x, 9, 129 - context)) > 0.1


@pytest.mark.parametrize("scaling", SCALINGS[:5], ids=str)
def test_features_beyond_the_rotary_ones_are_left_alone(scaling: Scaling) -> None:
    x = heads(2, 3, 7, 12)
    assert mx.array_equal(Rope(8, 1e4, scaling).rotate(x, 4, 11)[..., 8:], x[..., 8:]).item()


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_each_row_may_have_its_own_offset(length: int, interleaved: bool, rows: int) -> None:
    """As many rows as heads: an offset taken for a head's would show. Padding has negative positions."""
    offsets = [-2, 11, 5][:rows]
    rope, x = Rope(8, 100.0, interleaved=interleaved), heads(rows, 3, length, 12)
    found = rope.rotate(x, mx.array(offsets), 20)
    assert gap(found, turned(rope, x, offsets)) < 1e-5
    for row, offset in enumerate(offsets):
        assert gap(found[row : row + 1], rope.rotate(x[row : row + 1], offset, 20)) < 1e-6


def test_a_chunk_is_turned_as_a_part_of_the_whole() -> None:
    rope, x = Rope(12, 100.0, Yarn(4.0, 16)), heads(2, 3, 20, 12)
    parts = [rope.rotate(x[:, :, start : start + 5], start, 20) for start in range(0, 20, 5)]
    assert gap(mx.concatenate(parts, axis=2), rope.rotate(x, 0, 20)) < 1e-6


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), st.booleans(), st.sampled_from(SCALINGS))
def test_a_score_depends_on_the_distance_alone(
    query: int, key: int, shift: int, interleaved: bool, scaling: Scaling
) -> None:
    rope = Rope(8, 100.0, scaling, interleaved=interleaved)
    q, k = heads(1, 1, 1, 12, seed=1), heads(1, 1, 1, 12, seed=2)

    def score(i: int, j: int) -> float:
        return float(reference.f64(rope.rotate(q, i, 400) * rope.rotate(k, j, 400)).sum())

    assert score(query, key) == pytest.approx(score(query + shift, key + shift), abs=2e-3)
    if abs(query - key) <= 2 and query != key:
        assert score(query, key) != pytest.approx(score(query, query), abs=1e-3)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_turning_changes_lengths_by_the_amplitude_alone(scaling: Scaling) -> None:
    x = heads(1, 2, 9, 8)
    found = Rope(8, 1e4, scaling).rotate(x, 3, 12)
    ratio = mx.linalg.norm(found, axis=-1) / mx.linalg.norm(x, axis=-1)
    assert gap(ratio, np.full(ratio.shape, scaling.amplitude)) < 1e-6


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_stays_what_it_is(dtype: mx.Dtype) -> None:
    rope, x = Rope(8, 100.0, Yarn(4.0, 16)), heads(1, 2, 9, 12).astype(dtype)
    found = rope.rotate(x, 3, 12)
    assert found.dtype == dtype
    assert gap(found, turned(rope, x, 3)) < {mx.float16: 4e-3, mx.bfloat16: 4e-2}[dtype]


def test_no_position_leaves_everything_as_it_is() -> None:
    x = heads(1, 2, 3, 4)
    assert mx.array_equal(Position().rotate(x, 7, 10), x).item()
    assert Position().regime(10**6) == 0


@pytest.mark.parametrize("dims", [0, -2])
def test_some_features_must_turn(dims: int) -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        Rope(dims)


# --- ALiBi ---


@pytest.mark.parametrize("heads", [1, 2, 8, 64])
def test_slopes_of_a_power_of_two_heads_are_those_of_the_paper(heads: int) -> None:
    """A geometric series that begins with its own ratio, 2^(-8 / heads)."""
    assert alibi_slopes(heads) == pytest.approx([2 ** (-8 * (h + 1) / heads) for h in range(heads)])


@pytest.mark.parametrize("heads", [3, 6, 12, 20, 71, 112])
def test_other_heads_take_every_other_slope_of_the_next_power_of_two(heads: int) -> None:
    near = 2 ** int(math.log2(heads))
    assert alibi_slopes(heads)[:near] == alibi_slopes(near)
    assert alibi_slopes(heads)[near:] == alibi_slopes(2 * near)[::2][: heads - near]
    assert len(set(alibi_slopes(heads))) == heads


def test_alibi_penalizes_the_distance() -> None:
    found = Alibi(4).bias(range(5, 8), range(2, 8))
    wanted = [[[slope * (k - q) for k in range(2, 8)] for q in range(5, 8)] for slope in alibi_slopes(4)]
    assert gap(found, np.array(wanted)) == 0
    assert gap(Alibi(4).bias(range(5, 8), range(2, 8), mx.array([0, 3])), found) == 0  # whatever the padding is
    assert str(Alibi(4)) == "ALiBi over 4 heads" and Position().bias(range(3), range(3)) is None


def test_falcons_alibi_is_rounded_to_bfloat16_and_counts_from_the_first_token_of_each_row() -> None:
    found = RoundedAlibi(12, 0.5).bias(range(300), range(300))
    slopes = [mx.array(slope).astype(mx.bfloat16) for slope in alibi_slopes(12)]
    wanted = [[0.5 * f64(slope * mx.array(k).astype(mx.bfloat16)) for k in (0, 7, 259, 299)] for slope in slopes]
    assert gap(found[:, 0][:, [0, 7, 259, 299]], np.array(wanted)) == 0
    assert gap(found[:, 0, 1:] - found[:, 0, :-1], np.array(alibi_slopes(12))[:, None].repeat(299, 1) / 2) > 0.1
    padded = RoundedAlibi(12, 0.5).bias(range(300), range(300), mx.array([0, 40]))
    assert padded.shape == (2, 12, 1, 300)
    assert gap(padded[0], found) == 0 and gap(padded[1, ..., 40:], found[..., :260]) == 0


# --- learned positions ---


def test_learned_positions_are_rows_of_a_table() -> None:
    learned = Learned(10, 4)
    assert gap(learned(3, 5), learned.table.weight[5:8]) == 0
    assert gap(Learned(10, 4, first=2)(3, 0), mx.zeros((3, 4))) > 0
    opt = Learned(10, 4, first=2)
    assert opt.table.weight.shape == (12, 4) and gap(opt(3, 5), opt.table.weight[7:10]) == 0
    assert str(opt) == "learned, 10 positions"


def test_a_text_longer_than_the_table_is_refused_and_nothing_behind_it_read() -> None:
    learned = Learned(10, 4, first=2)
    assert learned(10, 0).shape == (10, 4) and learned(3, mx.array([7, -2])).shape == (2, 3, 4)
    with pytest.raises(UsageError, match="found a text of 11 tokens, but the model has 10 positions"):
        learned(3, 8)
    with pytest.raises(UsageError, match="found a text of 11 tokens"):
        learned(3, mx.array([0, 8]))
    with pytest.raises(UsageError, match="found a text of 129 tokens, but the model has 128 positions"):
        golden("gpt2")(mx.zeros((1, 129), dtype=mx.int32))


def test_rows_that_begin_elsewhere_have_positions_of_their_own_and_padding_has_the_first() -> None:
    learned = Learned(10, 4)
    found = learned(4, mx.array([0, -2]))
    assert gap(found[0], learned.table.weight[:4]) == 0
    assert gap(found[1], learned.table.weight[mx.array([0, 0, 0, 1])]) == 0


# --- Llama 4 ---


def test_queries_and_keys_are_normed_after_they_turned() -> None:
    rope, q, k = Rope(8, 100.0, interleaved=True), heads(1, 4, 5, 8), heads(1, 2, 5, 8, seed=1)
    for x, found in zip((q, k), NormedRope(rope, 1e-3).turn(q, k, 3, 8), strict=True):
        wanted = turned(rope, x, 3)
        assert gap(found, wanted / np.sqrt((wanted**2).mean(axis=-1, keepdims=True) + 1e-3)) < 1e-5


def test_queries_grow_with_their_position_where_there_is_no_other() -> None:
    q, k = heads(2, 4, 12, 8), heads(2, 2, 12, 8, seed=1)
    factor = [1 + 0.7 * math.log(1 + (at + 1) // 5) for at in range(20)]
    assert factor[3] == 1.0 < factor[4] == factor[8] < factor[9]
    found, same = Tempered(0.7, 5).turn(q, k, 8, 20)
    assert gap(found, f64(q) * np.array(factor[8:])[:, None]) < 1e-6 and gap(same, k) == 0
    rows, _ = Tempered(0.7, 5).turn(q, k, mx.array([0, -3]), 12)
    assert gap(rows[1, :, 3:], f64(q[1, :, 3:]) * np.array(factor[:9])[:, None]) < 1e-6
