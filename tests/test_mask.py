"""Who sees whom: `visible` against the predicates, one query and one key at a time."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tformer.nn import Cache, Causal, Chunk, Context, Everything, Mask, Window, visible
from mlx_tformer.nn.mask import window_of

windows = st.builds(Window, st.integers(1, 9))
chunks = st.builds(Chunk, st.integers(1, 9))
masks = st.lists(st.one_of(st.just(Causal()), st.just(Everything()), windows, chunks), min_size=1, max_size=3)


def all_of(parts: list[Mask]) -> Mask:
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask


def holds(part: Mask, query: int, key: int) -> bool:
    """What each mask means."""
    match part:
        case Causal():
            return key <= query
        case Window(size):
            return key > query - size
        case Chunk(size):
            return (query - query % size) <= key < query - query % size + size
    return True


def brute(parts: list[Mask], queries: range, keys: range, left: list[int] | None) -> np.ndarray:
    """(B, L, S), every pair by itself."""
    rows = [0] if left is None else left
    return np.array(
        [
            [[k >= row and q >= row and all(holds(p, q - row, k - row) for p in parts) for k in keys] for q in queries]
            for row in rows
        ]
    )


def dense(found: mx.array | str | None, queries: range, keys: range, rows: int) -> np.ndarray:
    """What the answer of `visible` means to attention, as booleans (B, L, S)."""
    if found is None:
        return np.ones((rows, len(queries), len(keys)), dtype=bool)
    if isinstance(found, str):
        assert found == "causal"  # the last query stands where the last key does
        shown = np.tri(len(queries), len(keys), len(keys) - len(queries), dtype=bool)
        return np.broadcast_to(shown, (rows, *shown.shape))
    assert found.dtype == mx.bool_
    seen = np.array(found)
    return np.broadcast_to(seen, (rows, *seen.shape)) if seen.ndim == 2 else seen[:, 0]


@given(masks, st.integers(0, 12), st.integers(1, 8), st.integers(0, 12), st.lists(st.integers(0, 15), max_size=3))
def test_visible_is_the_predicate_for_every_query_and_key(
    parts: list[Mask], start: int, length: int, forgotten: int, left: list[int]
) -> None:
    queries = range(start, start + length)
    keys = range(min(forgotten, start), start + length)
    padding = left or None
    found = visible(all_of(parts), queries, keys, None if padding is None else mx.array(padding))
    np.testing.assert_array_equal(dense(found, queries, keys, len(left) or 1), brute(parts, queries, keys, padding))


@given(masks, st.integers(0, 12), st.integers(1, 8), st.integers(0, 6), st.integers(0, 6))
def test_keys_may_end_before_or_after_the_queries(
    parts: list[Mask], start: int, length: int, before: int, after: int
) -> None:
    """As in cross-attention and with drafts."""
    queries, keys = range(start, start + length), range(max(start - before, 0), start + length + after - 3)
    if not len(keys):
        return
    found = visible(all_of(parts), queries, keys)
    np.testing.assert_array_equal(dense(found, queries, keys, 1), brute(parts, queries, keys, None))


@given(masks, st.integers(0, 12), st.integers(1, 8), st.integers(0, 12))
def test_no_array_is_built_where_words_suffice(parts: list[Mask], start: int, length: int, forgotten: int) -> None:
    queries, keys = range(start, start + length), range(min(forgotten, start), start + length)
    found, wanted = visible(all_of(parts), queries, keys), brute(parts, queries, keys, None)
    if wanted.all():
        assert found is None
    elif (wanted == dense("causal", queries, keys, 1)).all() and Causal() in parts:
        assert found == "causal"
    else:
        assert isinstance(found, mx.array)


CAUSAL = Causal()


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "wanted"),
    [
        (CAUSAL, range(5), range(5), "causal"),
        (CAUSAL, range(3, 5), range(5), "causal"),
        (CAUSAL, range(4, 5), range(5), None),  # one step
        (CAUSAL & Window(5), range(4, 5), range(5), None),
        (CAUSAL & Window(5), range(5), range(5), "causal"),  # the text is no longer than the window
        (CAUSAL & Window(4), range(7, 8), range(4, 8), None),  # the ring holds just the window
        (Everything(), range(3), range(9), None),
        (Everything() & CAUSAL, range(5), range(5), "causal"),
        (Window(3), range(2), range(2), None),
        (CAUSAL & Chunk(5), range(5), range(5), "causal"),  # the text is no longer than a chunk
        (CAUSAL & Chunk(4), range(7, 8), range(4, 8), None),  # the last of its chunk
        (Chunk(4), range(4, 8), range(4, 8), None),
    ],
)
def test_these_need_no_array(mask: Mask, queries: range, keys: range, wanted: str | None) -> None:
    assert visible(mask, queries, keys) == wanted


@pytest.mark.parametrize("size", [1, 4, 5])
def test_a_query_sees_exactly_as_many_keys_as_its_window_has(size: int) -> None:
    found = visible(CAUSAL & Window(size), range(20), range(20))
    assert isinstance(found, mx.array)
    assert found.sum(axis=1).tolist() == [min(size, query + 1) for query in range(20)]


@pytest.mark.parametrize("size", [1, 4, 5])
def test_a_query_sees_what_came_before_it_in_its_chunk(size: int) -> None:
    found = visible(CAUSAL & Chunk(size), range(20), range(20))
    assert isinstance(found, mx.array)
    assert found.sum(axis=1).tolist() == [query % size + 1 for query in range(20)]


def test_chunks_are_counted_from_behind_the_padding() -> None:
    found = visible(CAUSAL & Chunk(4), range(9), range(9), mx.array([3]))
    assert isinstance(found, mx.array)
    assert found[0, 0].sum(axis=1).tolist() == [0, 0, 0, 1, 2, 3, 4, 1, 2]


def test_padding_sees_nothing_and_is_not_seen() -> None:
    found = visible(CAUSAL, range(4), range(4), mx.array([0, 2, 4]))
    assert isinstance(found, mx.array) and found.shape == (3, 1, 4, 4)
    assert found.sum(axis=(1, 2, 3)).tolist() == [10, 3, 0]
    assert not mx.any(found[1, :, :2]).item() and not mx.any(found[1, :, :, :2]).item()


def test_masks_combine_in_any_order_and_once() -> None:
    a, b = CAUSAL, Window(3)
    assert (a & b).parts == (a, b) and ((a & b) & (b & a)).parts == (a, b)
    assert (a & Everything()).parts == (a,) == (Everything() & a).parts
    assert hash(a & b) == hash(Causal() & Window(3)) and (a & b) == (Causal() & Window(3))
    assert (a & b) != (a & Window(4))


@given(masks)
def test_the_smallest_window_bounds_what_a_cache_keeps(parts: list[Mask]) -> None:
    sizes = [part.size for part in parts if isinstance(part, Window | Chunk)]
    assert window_of(all_of(parts)) == (min(sizes) if sizes else None)


def test_a_mask_says_what_it_is() -> None:
    assert [str(m) for m in (CAUSAL, Everything(), Window(7))] == ["causal", "none", "window of 7"]
    assert str(CAUSAL & Window(7)) == "causal, window of 7"
    assert str(CAUSAL & Chunk(7)) == "causal, chunks of 7"


def test_layers_with_the_same_mask_share_one_array() -> None:
    ctx = Context(start=4, length=3, cache=Cache({}), context=7)
    first, again = ctx.visible(CAUSAL & Window(3), 7), ctx.visible(Causal() & Window(3), 7)
    assert first is again
    assert ctx.visible(CAUSAL & Window(2), 7) is not first
    other = ctx.visible(CAUSAL & Window(3), 5)
    assert isinstance(first, mx.array) and isinstance(other, mx.array)
    assert mx.array_equal(other, first[:, 2:]).item()


def test_a_context_counts_positions_from_behind_the_padding() -> None:
    ctx = Context(start=4, length=3, left=mx.array([0, 2]))
    assert isinstance(ctx.offset, mx.array) and ctx.offset.tolist() == [4, 2]
    assert Context(start=4, length=3).offset == 4
    assert Context.alone(mx.zeros((2, 5, 8))) == Context(start=0, length=5, context=5)
