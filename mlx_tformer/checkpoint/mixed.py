"""Which modules a conversion packs, and how: one way for most, recipes that give some of them more bits, exceptions.

Rounding hurts some matrices more than others. A down projection sums over the widest vectors of a block, and what the
head rounds nothing after it can mend, so the recipes give these more bits. Routers, gates and positions are small and
decide, so they stay as they are.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import mlx.core as mx

from ..errors import UsageError
from ..names import summary
from .plan import PACKABLE, Plan, shapes, their_names
from .source import MODES, STEP, Quantization

GROUP = 64
"""Weights that share a scale in affine packing, if nothing is said."""
HEAD = ("head", "lm_head")
"""What makes the logits goes by these names as well, whatever it is called, and even if it is the embedding."""
NEVER = {
    "router": "decides which experts a token goes to",
    "rates": "decides what is kept and what is put right",
    "shared_gate": "decides how much the shared expert counts",
    "positions": "is added to every token",
    "embed.types": "is added to every token",
    "norm": "scales every token",
}
"""Parts that are never packed, and why. To ask for one to be kept is no mistake, even where there is none.

What Mamba makes its step sizes of and chooses by (`select`, `dt`) is packed. In a random one of width 1024 both
together make less than a hundredth of the drift at 4 bits, and kept in full a fifth more bytes. A state space
multiplies with each other what it computes from the input, so a tiny one with large weights drifts further than
attention, whichever of its matrices are packed.
"""
LARGEST = {"mxfp4": 2.0**126, "mxfp8": 2.0**126, "nvfp4": 448 * 6.0}
"""What a mode can hold: with values beyond MLX makes infinities (mx modes), or other numbers (nvfp4)."""
TINY = 2.0**-100
"""With mx modes MLX 0.32 makes infinities, too, of a group that has nothing larger than some 1e-36."""


@dataclass(frozen=True)
class Mix:
    """A recipe: `more` bits for the modules that `where` matches, `bits` for the others."""

    bits: int
    more: int
    where: tuple[str, ...] = ("down", "head")


RECIPES = {"mixed-3-6": Mix(3, 6), "mixed-4-6": Mix(4, 6), "mixed-4-8": Mix(4, 8)}
"""Fewer bits for most modules, more for down projections and for what makes the logits."""


@dataclass(frozen=True)
class Packing:
    """What is to be packed, and how."""

    way: Quantization
    more: Quantization
    """For the modules that `where` matches."""
    where: tuple[str, ...]
    keep: tuple[str, ...]
    """Patterns for modules that stay as they are."""


@dataclass(frozen=True)
class Choice:
    """What becomes of the modules of a model."""

    ways: dict[str, Quantization]
    """Those to pack, and how."""
    left: list[str]
    """Those that stay as they are, each with the reason."""


def packing(
    quantize: int | None, group_size: int | None, mode: str | None, recipe: str | None, keep: str | Iterable[str]
) -> Packing | None:
    """The settings of a conversion, checked; None if nothing is to be packed. Raises UsageError for what cannot be."""
    kept = tuple(pattern.strip() for pattern in (keep.split(",") if isinstance(keep, str) else keep) if pattern.strip())
    if mode is not None and mode not in MODES:
        raise UsageError(f"mode: found {mode!r}, expected one of {', '.join(MODES)}")
    kind = "affine" if mode is None else mode
    sizes = MODES[kind][1]
    if group_size is not None and group_size not in sizes:
        raise UsageError(f"group_size: found {group_size}, expected {_one_of(sizes)} for mode {kind}")
    if quantize is None and mode is None and recipe is None:
        if kept:
            raise UsageError("keep: nothing is quantized; ask for that with quantize, mode or recipe")
        return None
    mix = _mix(quantize, kind, recipe)
    way = {"bits": mix.bits, "group_size": group_size or (GROUP if kind == "affine" else sizes[0]), "mode": kind}
    return Packing(way, way | {"bits": mix.more}, mix.where, kept)


def _mix(quantize: int | None, mode: str, recipe: str | None) -> Mix:
    """The bits that are asked for: by a recipe, by a number, or by a mode that has no other."""
    if recipe is not None:
        if recipe not in RECIPES:
            raise UsageError(f"recipe: found {recipe!r}, expected one of {', '.join(RECIPES)}")
        if quantize is not None or mode != "affine":
            raise UsageError(f"recipe: {recipe} says bits and mode itself; leave out quantize and mode")
        return RECIPES[recipe]
    allowed = MODES[mode][0]
    bits = allowed[0] if quantize is None and len(allowed) == 1 else quantize
    if bits is None or bits not in allowed:
        found = "missing" if bits is None else f"found {bits}"
        raise UsageError(f"quantize: {found}, expected {_one_of(allowed)} bits for mode {mode}")
    return Mix(bits, bits)


def _one_of(numbers: Iterable[int]) -> str:
    first, *others = map(str, numbers)
    return f"one of {', '.join([first, *others])}" if others else first


def choose(made: Plan, asked: Packing) -> Choice:
    """Go through the modules of a model that is planned; raises UsageError for a pattern that matches nothing."""
    choice, known = Choice({}, []), set[str]()
    for path, module in made.model.named_modules():
        if isinstance(module, PACKABLE) and path not in made.quantization:
            names = _names(path, made)
            known |= names
            reason = _reason(path, module.weight.shape[-1], names, asked)
            if reason is None:
                choice.ways[path] = asked.more if _first(asked.where, names) is not None else asked.way
            else:
                choice.left.append(f"{path}: {reason}")
    choice.left.extend(_others(made, known))
    _check_patterns(asked.keep, known | shapes(made.model).keys(), known & choice.ways.keys())
    return choice


def _names(path: str, made: Plan) -> set[str]:
    """What a module is called: by us, by checkpoints of its family, and for what it does."""
    theirs = {name.removesuffix(".weight") for name in their_names(f"{path}.weight", made.names)}
    is_head = path == "head" or (made.model.tied and path == "embed.tokens")
    return {path, *theirs, *(HEAD if is_head else ())}


def _reason(path: str, width: int, names: set[str], asked: Packing) -> str | None:
    """Why a matrix is not to be packed, or None."""
    never = _first(NEVER, [path])
    if never is not None:
        return f"stays as it is, since it {NEVER[never]}"
    kept = _first(asked.keep, names)
    if kept is not None:
        return f"kept, as {kept} asks"
    size = max(asked.way["group_size"], STEP)
    return f"rows of {width} are not whole groups of {size}" if width % size else None


def _others(made: Plan, known: set[str]) -> Iterator[str]:
    """Weights that are no vectors, and that no module has which could be packed."""
    for name, shape in shapes(made.model).items():
        module = name.rpartition(".")[0]
        if len(shape) > 1 and module not in known and module not in made.quantization:
            never = _first(NEVER, [name])
            why = "is no matrix of a linear layer" if never is None else f"stays as it is, since it {NEVER[never]}"
            yield f"{name if never is None else module}: {why}"


def _check_patterns(patterns: Iterable[str], known: Iterable[str], packed: Iterable[str]) -> None:
    known = list(known)
    for pattern in patterns:
        if pattern not in NEVER and not matches(pattern, known):
            raise UsageError(f"keep: {pattern!r} names no module; there are {summary(sorted(packed))}")


def _first(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """The first pattern that matches one of the names, or None."""
    return next((pattern for pattern in patterns if matches(pattern, names)), None)


def matches(pattern: str, names: Iterable[str]) -> bool:
    """True if a pattern matches one of the names: a glob the whole name, words some parts of it that follow each other.

    >>> path = "decoder.layers.11.mlp.op.down"
    >>> [matches(pattern, [path]) for pattern in ("down", "layers.11", "*.op.down", "layers.1", "op*")]
    [True, True, True, False, False]
    """
    if re.search(r"[*?\[]", pattern):
        return any(fnmatchcase(name, pattern) for name in names)
    return any(f".{pattern}." in f".{name}." for name in names)


def packed(value: mx.array, how: Quantization) -> tuple[mx.array, ...]:
    """Rows as words, scales, and offsets if the mode has them."""
    if how["mode"] in ("mxfp4", "mxfp8"):
        value = mx.where(mx.abs(value) < TINY, 0, value)
    return tuple(mx.quantize(value, **how))
