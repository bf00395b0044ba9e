"""The way back from our tensors to a checkpoint's: every rule has an inverse."""

import mlx.core as mx
import numpy as np
from checkpoints import Weights, same
from hypothesis import given
from hypothesis import strategies as st

from mlx_tformer.checkpoint import plan as planning
from mlx_tformer.checkpoint.plan import Recipe
from mlx_tformer.checkpoint.source import Source, Tensor
from mlx_tformer.checkpoint.undo import origins, piece_shape, taken_apart
from mlx_tformer.names import (
    Alternating,
    ByGroup,
    Drop,
    Expert,
    Moved,
    Names,
    Rows,
    Same,
    Transposed,
    Unflattened,
    assign,
    joined,
)


class Arrays(Source):
    """Tensors in memory."""

    def __init__(self, arrays: Weights):
        super().__init__("memory", {}, {name: Tensor(array.shape, array.dtype) for name, array in arrays.items()})
        self.arrays = arrays

    def read(self, name: str) -> mx.array:
        return self.arrays[name]

    def companions(self) -> dict[str, bytes]:
        return {}


CHANGES = [
    (Transposed(),),
    (Alternating(axis=0),),
    (Alternating(axis=1),),
    (Transposed(), Alternating(axis=0)),
    (ByGroup(2, (1, 2, 1)),),
    (ByGroup(1, (4, 1, 1)),),
    (ByGroup(3, (1, 1)), Transposed()),
    (Unflattened(0, 4),),
]
STACKED = [(Transposed(stacked=True),), (Transposed(stacked=True), Alternating(axis=1)), (Alternating(axis=2),)]
sizes = st.lists(st.integers(1, 3), min_size=2, max_size=3)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Names, dict[str, tuple[int, ...]]]:
    """A table, and the shapes of a checkpoint's tensors that it is for."""
    names: Names = {}
    shapes: dict[str, tuple[int, ...]] = {}
    width = draw(st.integers(1, 3)) * 2
    for i in range(draw(st.integers(1, 4))):
        theirs, ours = f"{draw(st.sampled_from(['h', 'model.h']))}.{{}}.m{i}", f"layers.{{}}.x.n{i}"
        layers = draw(st.sets(st.integers(0, 11), min_size=1, max_size=2))
        kind = draw(st.sampled_from(["plain", "rows", "expert", "moved", "stacked", "tensor"]))
        parts = draw(sizes) if kind in ("rows", "expert") and draw(st.booleans()) else [1]
        experts = draw(st.integers(1, 3))
        for part, size in enumerate(parts):
            row = f"{theirs}.{{}}.p{part}" if kind == "expert" else f"{theirs}.p{part}"
            if kind == "expert":
                names[row] = Expert(ours, part, tuple(parts))
            elif kind == "rows":
                names |= joined(ours, {f"{theirs}.p{p}": n for p, n in enumerate(parts)})
            elif kind == "moved":
                names[row] = Moved(ours, draw(st.sampled_from(CHANGES)))
            elif kind == "stacked":
                names[f"{row}.all"] = Moved(f"{ours}.weight", draw(st.sampled_from(STACKED)))
            elif kind == "tensor":
                names[f"{row}.table"] = f"{ours}.weight"
            else:
                names[row] = ours
            for layer in layers:
                if kind == "expert":
                    for e in range(experts):
                        shapes[f"{row.format(layer, e)}.weight"] = (2 * size, width)
                        shapes[f"{row.format(layer, e)}.bias"] = (2 * size,)
                elif kind == "stacked":
                    shapes[f"{row.format(layer)}.all"] = (experts, width, 24)
                elif kind == "tensor":
                    shapes[f"{row.format(layer)}.table"] = (3, width)
                else:
                    rows = 24 if kind == "moved" else 2 * size
                    shapes[f"{row.format(layer)}.weight"] = (rows, 24 if kind == "moved" else width)
    return names, shapes


@given(tables(), st.booleans(), st.sampled_from([4, 30, 1 << 21]))
def test_any_table_leads_there_and_back(table: tuple[Names, dict], recorded: bool, values: int) -> None:
    names, shapes = table
    arrays = {n: mx.arange(int(np.prod(s))).reshape(s) + 1000 * i for i, (n, s) in enumerate(shapes.items())}
    found = assign(arrays, names)
    assert not found.unknown
    source = Arrays(arrays)
    ours = {
        to: Recipe(tuple(sorted(pieces, key=planning._place)), {}).make(source.read)
        for to, pieces in found.pieces.items()
    }
    record = {to: [piece.source for piece in pieces] for to, pieces in found.pieces.items()} if recorded else {}
    back: dict[str, list[mx.array]] = {}
    held = Arrays(ours)
    for to, pieces in origins({to: array.shape for to, array in ours.items()}, names, record).items():
        shape = ours[to].shape
        rows = max(1, values // max(1, int(np.prod(shape[1:]))))
        for name, part in taken_apart(lambda to=to, rows=rows: held.blocks(to, rows), shape, pieces):
            back.setdefault(name, []).append(part)
        assert [piece_shape(piece, shape) for piece in pieces] == [arrays[piece.source].shape for piece in pieces]
    assert {name: mx.concatenate(parts).tolist() for name, parts in back.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def test_rows_that_give_nothing_back_are_passed_over() -> None:
    table: Names = {"mask": Drop("not needed"), "head": Same("tokens"), "embed": "tokens"}
    assert [piece.source for piece in origins({"tokens.weight": (2, 2)}, table, {})["tokens.weight"]] == [
        "embed.weight"
    ]
    assert origins({"other.weight": (2, 2)}, table, {}) == {"other.weight": []}


def test_stacked_parts_along_another_axis_are_told_apart() -> None:
    table: Names = {f"{side}_proj": Rows("gate_up", part, (1, 1), axis=1) for part, side in enumerate(("gate", "up"))}
    gate, up = mx.arange(24).reshape(2, 3, 4), 100 + mx.arange(24).reshape(2, 3, 4)
    whole = mx.concatenate([gate, up], axis=1)
    pieces = origins({"gate_up.weight": whole.shape}, table, {})["gate_up.weight"]
    parts: dict[str, list[mx.array]] = {}
    for name, part in taken_apart(lambda: iter([whole[:1], whole[1:]]), whole.shape, pieces):
        parts.setdefault(name, []).append(part)
    assert same(mx.concatenate(parts["gate_proj.weight"]), gate) and same(mx.concatenate(parts["up_proj.weight"]), up)
