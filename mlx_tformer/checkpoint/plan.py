"""How the tensors of a checkpoint become the parameters of a model: worked out from names and shapes alone.

`plan` knows before anything is read what is missing, superfluous or of the wrong shape, and how each parameter is
made. `load` and `convert` carry it out, the one in memory, the other file by file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config import Config
from ..errors import BadInput
from ..families import Family, family
from ..names import Assignment, Drop, Expert, Names, Piece, Rows, Same, Unused, assign, readings, summary
from ..nn import ExpertLinear, Model, Module
from .language_part import is_part, language_config, language_names, leave_out
from .mlx_names import with_mlx_names
from .source import STEP, Quantization, Source, Tensor

Reader = Callable[[str], mx.array]
VALUES = 1 << 21
"""Values that are in memory at a time where a tensor is read in blocks of rows."""
PACKABLE = (nn.Linear, nn.Embedding, ExpertLinear)
"""Modules whose weight can be packed."""


@dataclass(frozen=True)
class Recipe:
    """How one of our tensors is made: its pieces, in order, unpacked if they are packed differently, one below the
    other, and the experts stacked."""

    pieces: tuple[Piece, ...]
    unpack: Mapping[str, Quantization]
    """Source tensors to dequantize on the way -> how they are packed."""

    def make(self, read: Reader) -> mx.array:
        """Our tensor from the checkpoint's, which `read` gives by name."""
        matrices = [self._matrix(pieces, read) for pieces in self._matrices()]
        return matrices[0] if self.pieces[0].expert is None else mx.stack(matrices)

    def _matrices(self) -> list[tuple[Piece, ...]]:
        """The pieces of each matrix: all of them, or those of one expert after the other."""
        count = len(self.pieces[0].of)
        return [self.pieces[start : start + count] for start in range(0, len(self.pieces), count)]

    def _matrix(self, pieces: Iterable[Piece], read: Reader) -> mx.array:
        parts = [self._part(piece, read) for piece in pieces]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=self.pieces[0].axis)

    def _part(self, piece: Piece, read: Reader) -> mx.array:
        if piece.source in self.unpack:
            how = self.unpack[piece.source]
            value = dequantize(map(read, packed_names(piece.source, how["mode"])), how)
        else:
            value = read(piece.source)
        return changed(value, piece)

    def blocks(self, source: Source) -> Iterator[mx.array]:
        """The same tensor from top to bottom, some rows at a time and never more than `VALUES` values of wide ones;
        an expert at a time, and whole where its values are in another order."""
        if self.pieces[0].expert is not None:
            for pieces in self._matrices():
                yield self._matrix(pieces, source.read)[None]
            return
        parts = [self._part_blocks(piece, source) for piece in self.pieces]
        if self.pieces[0].axis == 0:
            yield from chain(*parts)
            return
        for rows in zip(*parts, strict=True):
            yield mx.concatenate(list(rows), axis=self.pieces[0].axis)

    def _part_blocks(self, piece: Piece, source: Source) -> Iterator[mx.array]:
        """One piece, some rows at a time."""
        if piece.changes:
            yield self._part(piece, source.read)
            return
        name, how = piece.source, self.unpack.get(piece.source)
        rows = max(1, VALUES // max(1, prod(unpacked(source.tensors[name], how).shape[1:])))
        if how is None:
            yield from source.blocks(name, rows)
            return
        leaves = [source.blocks(leaf, rows) for leaf in packed_names(name, how["mode"])]
        for parts in zip(*leaves, strict=True):
            yield dequantize(parts, how)


def dequantize(parts: Iterable[mx.array], how: Quantization) -> mx.array:
    """The values of packed rows, in float32, where scale times number plus offset is not rounded to float16.

    `parts` are those of `packed_names`, in that order.
    """
    weight, *rest = parts
    scales, *biases = (part.astype(mx.float32) if mx.issubdtype(part.dtype, mx.floating) else part for part in rest)
    return mx.dequantize(weight, scales, biases[0] if biases else None, dtype=mx.float32, **how)


def changed(value: mx.array, piece: Piece) -> mx.array:
    """A source tensor's values in our order, in memory as well: a transposed view may multiply in another order."""
    for change in piece.changes:
        value = change.do(value)
    return mx.contiguous(value) if piece.changes else value


def packed_names(weight: str, mode: str = "affine") -> tuple[str, ...]:
    """The tensors that a packed weight consists of: itself, scales, and offsets if the mode has them."""
    module = weight.removesuffix(".weight")
    return (weight, f"{module}.scales", f"{module}.biases") if mode == "affine" else (weight, f"{module}.scales")


@dataclass(frozen=True)
class Plan:
    """A model without weights, and how each of its parameters is made."""

    model: Model
    config: Config
    family: Family
    recipes: dict[str, Recipe]
    assignment: Assignment
    quantization: dict[str, Quantization]
    """Modules of ours that stay packed as they are in the checkpoint."""
    notes: list[str] = field(default_factory=list)
    """What a user should know: that parts of the checkpoint are not used, for example."""
    names: Names = field(default_factory=dict)
    """What checkpoints like this one call the weights."""

    @cached_property
    def precise(self) -> frozenset[str]:
        """Parameters that keep the dtype they are stored in."""
        modules = (module for module in self.model.modules() if isinstance(module, Module))
        return frozenset(f"{module.path}.{leaf}" for module in modules for leaf in module.precise)

    def float_dtype(self, name: str, asked: mx.Dtype, source: Source) -> mx.Dtype:
        """What the floats of a parameter become in a model of `asked`."""
        if name not in self.precise or asked == mx.float32:
            return asked
        return source.tensors[self.recipes[name].pieces[0].source].dtype


def plan(source: Source) -> Plan:
    """Build the model that the config describes and find a source for each parameter.

    Raises BadInput that lists every tensor without a place, every parameter without a source, and every wrong shape
    or dtype.
    """
    config = language_config(source)
    kind = family(config.model_type, config.file)
    model = build(kind, config)
    names = language_names(kind.names(config), source.config, source.tensors)
    theirs = language_names(with_mlx_names(kind.name, kind.names(config)), source.config, source.tensors)
    assignment = _identity(source) if source.ours else _assigned(source, theirs, model)
    notes = [*(leave_out(assignment) if is_part(source.config) else []), *_unused(assignment, names)]
    check_packing(source)
    packed = _packed(source, assignment, model)
    recipes = _recipes(source, assignment, packed)
    pack(model, packed, source.config_file)
    made = Plan(model, config, kind, recipes, assignment, packed, notes, names)
    problems = [*_without_place(made), *_without_source(made, {} if source.ours else names), *_wrong(made, source)]
    if problems:
        raise BadInput("; ".join(problems), file=source.origin)
    return made


def build(kind: Family, config: Config) -> Model:
    """The module tree for a config, all of whose settings must be understood; allocates no weights."""
    try:
        model = kind.model(config)
    except BadInput:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise BadInput(f"its settings do not go together: {error}", file=config.file) from None
    config.finish()
    return model


def pack(model: nn.Module, how: Mapping[str, Quantization], file: str = "config.json") -> None:
    """Replace the modules at these paths by quantized ones, in place.

    Raises BadInput for a path that is no matrix of the model, or one whose rows are not whole groups.
    """
    named: Any = model.named_modules() if how else ()
    modules = dict(named)
    for path, way in how.items():
        module = modules.get(path)
        if not isinstance(module, PACKABLE):
            raise BadInput("is packed, but is no matrix of the model", file=file, field=path)
        width, step = module.weight.shape[-1], max(way["group_size"], STEP)
        if width % step:
            problem = f"is packed in groups of {step}, but its rows have {width} values"
            raise BadInput(problem, file=file, field=path)
    if how:
        nn.quantize(model, class_predicate=lambda path, module: dict(how[path]) if path in how else False)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by path."""
    flat: Any = tree_flatten(model.parameters())
    return {name: value.shape for name, value in flat}


def _identity(source: Source) -> Assignment:
    return Assignment(pieces={name: [Piece(name)] for name in source.tensors})


def _assigned(source: Source, names: Names, model: nn.Module) -> Assignment:
    """Where tensors go by a family's table, without those that go along with others or are not needed.

    Where the table names a weight and not its module, the scales of a packed one are not in it. Biases of zeros are
    left out if the model has none there.
    """
    found, parameters = assign(source.tensors, names), shapes(model)
    gone = set(found.unknown)
    with_weight = {f"{module}.{leaf}" for module in source.quantization for leaf in ("scales", "biases")}
    found.unknown = [n for n in found.unknown if n not in with_weight or f"{_module(n)}.weight" in gone]
    for target in [target for target in found.pieces if target not in parameters]:
        sources = [piece.source for piece in found.pieces[target]]
        if source.padding.issuperset(sources):
            del found.pieces[target]
            found.dropped |= dict.fromkeys(sources, "zeros, for a bias that the model does not have")
    return found


def _unused(assignment: Assignment, names: Names) -> list[str]:
    """What a user should know was left out, and why."""
    reasons = list(dict.fromkeys(rule.reason for rule in names.values() if isinstance(rule, Unused)))
    left = {reason: [name for name, why in assignment.dropped.items() if why == reason] for reason in reasons}
    return [f"left out: {summary(found)}, {reason}" for reason, found in left.items() if found]


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _packed(source: Source, assignment: Assignment, model: nn.Module) -> dict[str, Quantization]:
    """Modules of ours that can stay packed, because all parts of their weight are packed alike, row by row."""
    named: Any = model.named_modules()
    packed, modules = dict[str, Quantization](), dict(named)
    for target, pieces in assignment.pieces.items():
        first, *others = [source.quantization.get(_module(piece.source)) for piece in pieces]
        alike = first is not None and all(way == first for way in others)
        rows = all(c.keeps_rows(len(source.tensors[piece.source].shape)) for piece in pieces for c in piece.changes)
        fits = source.ours or isinstance(modules.get(_module(target)), PACKABLE)
        if target.endswith(".weight") and alike and rows and fits:
            packed[_module(target)] = dict(first or {})
    return packed


def _recipes(source: Source, assignment: Assignment, packed: Mapping[str, Quantization]) -> dict[str, Recipe]:
    """A recipe for each of our tensors; what is not to stay packed is unpacked."""
    recipes: dict[str, Recipe] = {}
    for target, pieces in assignment.pieces.items():
        ways = {piece.source: source.quantization.get(_module(piece.source)) for piece in pieces}
        unpack = {name: way for name, way in ways.items() if way is not None and _module(target) not in packed}
        leaf = target.rpartition(".")[2]
        if unpack and leaf in ("scales", "biases"):
            continue  # they go into the weight
        ordered = tuple(sorted(pieces, key=_place))
        recipes[target] = Recipe(ordered, {name: way for name, way in unpack.items() if name.endswith(".weight")})
    return recipes


def _place(piece: Piece) -> tuple[int, int]:
    """What a piece is of its tensor: which part, and of which expert."""
    return -1 if piece.expert is None else piece.expert, piece.part


def check_packing(source: Source) -> None:
    """Raise BadInput for packed modules whose tensors are not what unpacking needs."""
    for module, how in source.quantization.items():
        names = packed_names(f"{module}.weight", how["mode"])
        missing = [name for name in names if name not in source.tensors]
        if missing:
            raise BadInput(f"is packed, but there is no {summary(missing)}", file=source.origin, field=module)
        weight, *rest = (source.tensors[name] for name in names)
        width = unpacked(weight, how).shape[-1] if weight.shape else 0
        groups = (*weight.shape[:-1], width // how["group_size"])
        whole = width > 0 and width % how["group_size"] == 0 and width * how["bits"] == weight.shape[-1] * 32
        if not whole or any(tensor.shape != groups for tensor in rest):
            others = " and ".join(f"{leaf} {t.shape}" for leaf, t in zip(("scales", "biases"), rest, strict=False))
            found = f"found weight {weight.shape}, {others}"
            problem = f"{found}, which do not go together with {how['bits']} bits in groups of {how['group_size']}"
            raise BadInput(problem, file=source.origin, field=module)
        if how["mode"] != "affine" and rest[0].dtype != mx.uint8:
            problem = f"found scales of {dtype_name(rest[0].dtype)}, expected uint8 for {how['mode']}"
            raise BadInput(problem, file=source.origin, field=module)


def _without_place(made: Plan) -> Iterator[str]:
    """Tensors that the model has no parameter for."""
    wanted, copies = shapes(made.model), made.assignment.copies
    unused = [piece.source for name in made.recipes.keys() - wanted.keys() for piece in made.recipes[name].pieces]
    unused += [copy for copy, target in copies.items() if target not in made.recipes]
    there = made.recipes.keys() & wanted.keys()
    unused += [piece.source for name in there for piece in _superfluous(made.recipes[name], wanted[name])]
    if unused or made.assignment.unknown:
        yield f"tensors that have no place in the model: {summary(sorted([*unused, *made.assignment.unknown]))}"


def _superfluous(recipe: Recipe, wanted: tuple[int, ...]) -> list[Piece]:
    """Pieces for a part that an earlier one is for already, for more experts than there are, or for single experts
    where another is for all of them."""
    again = [piece for before, piece in pairwise(recipe.pieces) if _place(before) == _place(piece)]
    experts = 0 if recipe.pieces[0].expert is None or not wanted else wanted[0]
    return again + [piece for piece in recipe.pieces if piece.expert is not None and piece.expert >= experts]


def _without_source(made: Plan, names: Names) -> Iterator[str]:
    """Parameters that nothing in the checkpoint makes, by the names that the checkpoint would have for them."""
    missing = [theirs for name in shapes(made.model) if name not in made.recipes for theirs in their_names(name, names)]
    for name, recipe in made.recipes.items():
        missing += _absent(name, recipe, shapes(made.model).get(name, ()), names)
    if missing:
        yield f"no weights for {summary(missing)}"


def _absent(name: str, recipe: Recipe, wanted: tuple[int, ...], names: Names) -> list[str]:
    """The parts that are missing of a tensor that others are there for."""
    first = recipe.pieces[0]
    experts = [-1] if first.expert is None else range(wanted[0] if wanted else 0)
    there = {_place(piece) for piece in recipe.pieces}
    absent = [(expert, part) for expert in experts for part in range(len(first.of)) if (expert, part) not in there]
    return [theirs for expert, part in absent for theirs in their_names(name, names, part, expert)]


def their_names(target: str, names: Names, part: int | None = None, expert: int = 0) -> list[str]:
    """What a checkpoint calls one of our tensors, or one of the parts that it joins; our own name if there is no rule
    for it."""
    ways, found = readings(target), []
    for theirs, rule in names.items():
        if isinstance(rule, Same | Drop) or (part is not None and not isinstance(rule, Rows | Expert)):
            continue
        to = rule if isinstance(rule, str) else rule.to
        numbers, leaf = next(((n, t.removeprefix(to)) for t, n in ways if to in (t, _module(t))), (None, ""))
        if numbers is not None and (part is None or (isinstance(rule, Rows | Expert) and rule.part == part)):
            found.append(theirs.format(*numbers, expert) + leaf)
    return found or [target]


def _wrong(made: Plan, source: Source) -> Iterator[str]:
    """Tensors of another shape or kind than the model needs, those with the same problem together."""
    wanted, problems = shapes(made.model), dict[str, list[str]]()
    for name, recipe in made.recipes.items():
        if name in wanted:
            for piece, problem in _unfit(name, recipe, wanted[name], made, source):
                problems.setdefault(problem, []).append(piece)
    for copy, target in made.assignment.copies.items():
        if target in wanted and (found := source.tensors[copy].shape) != wanted[target]:
            problems.setdefault(f"found shape {found}, expected {wanted[target]}", []).append(copy)
    for problem, tensors in problems.items():
        yield f"{summary(tensors)}: {problem}"


def _unfit(name: str, recipe: Recipe, wanted: tuple[int, ...], made: Plan, source: Source) -> Iterator[tuple[str, str]]:
    """The pieces of a recipe that cannot make a tensor of this shape, and why."""
    for piece in recipe.pieces:
        tensor, how = source.tensors[piece.source], recipe.unpack.get(piece.source)
        matrix = wanted if piece.expert is None else wanted[1:]
        share = _share(matrix, piece)
        found = unpacked(tensor, how).shape
        if _changed_shape(found, piece) != share:
            order = " after it is put in our order" if piece.changes else ""
            yield piece.source, f"found shape {found}, expected {share}{order}"
        kind = mx.uint32 if how is not None else packed_dtype(name, made.quantization)
        if not (tensor.dtype == kind if kind is not None else mx.issubdtype(tensor.dtype, mx.floating)):
            expected = "floats" if kind is None else dtype_name(kind)
            yield piece.source, f"found {tensor.code or dtype_name(tensor.dtype)}, expected {expected}"


def _share(shape: tuple[int, ...], piece: Piece) -> tuple[int, ...]:
    """The shape of one piece of a tensor of this shape."""
    at = piece.axis
    if len(shape) <= at:
        return shape
    return *shape[:at], shape[at] * piece.of[piece.part] // sum(piece.of), *shape[at + 1 :]


def packed_dtype(name: str, quantization: Mapping[str, Quantization]) -> mx.Dtype | None:
    """What a tensor of a packed module is stored as, or None for floats."""
    module, _, leaf = name.rpartition(".")
    how = quantization.get(module)
    if how is None:
        return None
    return {"weight": mx.uint32, "scales": None if how["mode"] == "affine" else mx.uint8}.get(leaf)


def _changed_shape(shape: tuple[int, ...], piece: Piece) -> tuple[int, ...] | None:
    """The shape that a tensor has in our order, or None if it cannot be put into it."""
    try:
        return changed(mx.zeros(shape), piece).shape  # never evaluated
    except ValueError:
        return None


def dtype_name(dtype: mx.Dtype) -> str:
    """A dtype as people write it.

    >>> dtype_name(mx.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("mlx.core.")


def unpacked(tensor: Tensor, how: Quantization | None) -> Tensor:
    """What a packed tensor is once its values are spread out."""
    if how is None:
        return tensor
    return Tensor((*tensor.shape[:-1], tensor.shape[-1] * 32 // how["bits"]), mx.float32)
