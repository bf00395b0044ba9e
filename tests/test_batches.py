"""Many texts: in batches of bounded size with little padding, in their own order, told as they are done."""

import random

import mlx.core as mx

from mlx_tformer.batches import TOKENS, Batch, Row, over


def rows(count: int, longest: int) -> list[Row]:
    chance = random.Random(count)
    lengths = [chance.randint(1, longest) for _ in range(count)]
    return [Row([1] * length, [0] * length) for length in lengths]


def test_batches_are_bounded_hold_little_padding_and_tell_how_far_they_are() -> None:
    texts, sizes, told = rows(2000, 60), list[int](), list[tuple[int, int]]()

    def compute(batch: Batch) -> mx.array:
        sizes.append(batch.ids.size)
        return batch.mask.sum(axis=1, keepdims=True)

    found = over(texts, compute, lambda done, total: told.append((done, total)))
    assert found[:, 0].tolist() == [len(row.ids) for row in texts]  # in their own order
    assert max(sizes) <= TOKENS
    assert sum(sizes) < 1.1 * sum(len(row.ids) for row in texts)
    assert len(sizes) <= sum(sizes) / TOKENS + 2  # none that is small without need
    assert [done for done, _ in told] == sorted({done for done, _ in told}) and len(told) == len(sizes)
    assert told[-1] == (2000, 2000)


def test_memory_is_that_of_a_batch_however_many_texts_there_are() -> None:
    def peak(count: int) -> int:
        texts, matrix = rows(count, 20), mx.ones((8, 256))
        mx.eval(matrix)
        mx.clear_cache()
        mx.reset_peak_memory()

        def compute(batch: Batch) -> mx.array:
            wide = batch.ids[..., None].astype(mx.float32) + mx.zeros((8,))
            return (wide @ matrix).max(axis=(1, 2), keepdims=True)[:, 0]

        before = mx.get_active_memory()
        mx.eval(over(texts, compute))
        return mx.get_peak_memory() - before

    assert peak(6000) < 1.5 * peak(1500)


def test_a_text_that_is_longer_than_a_batch_is_alone() -> None:
    sizes = []

    def compute(batch: Batch) -> mx.array:
        sizes.append(batch.ids.shape)
        return batch.mask.sum(axis=1, keepdims=True)

    texts = [Row([1] * length, [0] * length) for length in (3, TOKENS + 5, 2)]
    assert over(texts, compute)[:, 0].tolist() == [3, TOKENS + 5, 2]
    assert sizes == [(1, TOKENS + 5), (2, 3)]
