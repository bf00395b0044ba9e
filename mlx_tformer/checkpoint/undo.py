"""The way back from our tensors to a checkpoint's: which names they had, or would have, and their values in its order.

Every rule of `names.py` has an inverse: what was joined is split, what was stacked is taken apart, what was put in
another order is put back.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import mlx.core as mx

from ..names import Drop, Expert, Moved, Names, Piece, Rows, Rule, Same, assign

Shape = tuple[int, ...]
Blocks = Callable[[], Iterable[mx.array]]
"""Gives the rows of one of our tensors from top to bottom, some at a time."""


def origins(shapes: Mapping[str, Shape], names: Names, recorded: Mapping[str, Sequence[str]]) -> dict[str, list[Piece]]:
    """The checkpoint's tensors that each of ours consists of, in order.

    `recorded` says which ones a tensor was made of. Where it says nothing, or nothing that `names` knows, they are
    called as the first row of the table that fits says. A tensor that no row is for has no pieces.

    >>> from mlx_tformer.names import joined
    >>> table = joined("attn.qkv", {"q": 2, "k": 1, "v": 1}) | {"Q": Rows("attn.qkv", 0, (2, 1, 1))}
    >>> [piece.source for piece in origins({"attn.qkv.weight": (8, 4)}, table, {})["attn.qkv.weight"]]
    ['q.weight', 'k.weight', 'v.weight']
    """
    found: dict[str, list[Piece]] = {}
    for name, shape in shapes.items():
        pieces = sorted(assign(recorded.get(name, []), names).pieces.get(name, []), key=_place)
        found[name] = pieces if _is_whole(pieces, shape) else _invented(name, shape, names)
    return found


def _place(piece: Piece) -> tuple[int, int]:
    return -1 if piece.expert is None else piece.expert, piece.part


def _is_whole(pieces: Sequence[Piece], shape: Shape) -> bool:
    """True if these are all pieces of a tensor."""
    if not pieces:
        return False
    first = pieces[0]
    experts = [-1] if first.expert is None else range(shape[0] if shape else 0)
    return [_place(piece) for piece in pieces] == [(e, part) for e in experts for part in range(len(first.of))]


def _invented(name: str, shape: Shape, names: Names) -> list[Piece]:
    """The pieces by the first row of the table that is for a tensor, and by the rows that go along with it."""
    rows = list(_rows_for(name, names))
    if not rows:
        return []
    first = rows[0][0]
    chosen: dict[int, str] = {}
    for rule, theirs in rows:
        if _kind(rule) == _kind(first):
            chosen.setdefault(rule.part if isinstance(rule, Rows | Expert) else 0, theirs)
    experts = range(shape[0]) if isinstance(first, Expert) else [0]
    sources = [chosen[part].format(expert) for expert in experts for part in sorted(chosen)]
    pieces = sorted(assign(sources, names).pieces.get(name, []), key=_place)
    return pieces if _is_whole(pieces, shape) else []


def _rows_for(name: str, names: Names) -> Iterator[tuple[Rule, str]]:
    """The rows of a table that are for a tensor of ours, and what they call it; `{}` is the number of an expert."""
    for theirs, rule in names.items():
        if isinstance(rule, Same | Drop):
            continue
        to = re.escape(rule if isinstance(rule, str) else rule.to).replace(r"\{\}", r"(\d+)")
        found = re.fullmatch(rf"{to}(|\.(?:weight|bias|scales|biases))", name)  # a row names a module or a tensor
        if found is not None:
            *numbers, leaf = found.groups()
            yield rule, theirs.format(*numbers, "{}") + leaf


def _kind(rule: Rule) -> tuple[object, ...]:
    """Equal for rows that can be for parts of the same tensor."""
    match rule:
        case Rows(_, _, of, axis):
            return Rows, of, axis
        case Expert(_, _, of):
            return Expert, of
        case Moved(_, changes):
            return Moved, changes
    return (str,)


def piece_shape(piece: Piece, shape: Shape) -> Shape:
    """The shape of a checkpoint's tensor, from that of ours that it is a piece of."""
    if piece.changes:
        return _undone(mx.zeros(shape), piece).shape  # never evaluated
    matrix = list(shape if piece.expert is None else shape[1:])
    if len(piece.of) > 1:
        matrix[piece.axis] = matrix[piece.axis] * piece.of[piece.part] // sum(piece.of)
    return tuple(matrix)


def taken_apart(blocks: Blocks, shape: Shape, pieces: Sequence[Piece]) -> Iterator[tuple[str, mx.array]]:
    """The checkpoint's tensors in order, some rows at a time, from the rows of ours; whole where their order
    differs."""
    first = pieces[0]
    if first.changes:
        yield first.source, _undone(mx.concatenate(list(blocks())), first)
    elif first.axis:
        for piece in pieces:
            yield from ((piece.source, _along(block, piece)) for block in blocks())
    elif len(pieces) == 1 and first.expert is None:
        yield from ((first.source, block) for block in blocks())
    else:
        yield from _in_rows(blocks(), shape, pieces)


def _in_rows(blocks: Iterable[mx.array], shape: Shape, pieces: Sequence[Piece]) -> Iterator[tuple[str, mx.array]]:
    """Pieces that follow each other row by row, and expert by expert."""
    stacked = pieces[0].expert is not None
    rest = iter(block.flatten(0, 1) if stacked else block for block in blocks)
    block = next(rest)
    for piece in pieces:
        missing = piece_shape(piece, shape)[0]
        while missing:
            if block.shape[0] == 0:
                block = next(rest)
            taken = min(missing, block.shape[0])
            yield piece.source, block[:taken]
            block, missing = block[taken:], missing - taken


def _along(block: mx.array, piece: Piece) -> mx.array:
    """The part of some rows that belongs to a piece of another axis than the first."""
    rows, whole = block.shape[piece.axis], sum(piece.of)
    start, stop = (rows * sum(piece.of[:end]) // whole for end in (piece.part, piece.part + 1))
    return mx.split(block, [start, stop], axis=piece.axis)[1]


def _undone(value: mx.array, piece: Piece) -> mx.array:
    """Our order back to the checkpoint's."""
    for change in reversed(piece.changes):
        value = change.undo(value)
    return value
