"""Checkpoint names -> our names, as data that works in both directions.

A family's table pairs the checkpoint's modules with ours; `{}` stands for one number, and any of them may be
spelled out. A pair moves all the leaves of a module (weight, bias, and the scales of a quantized one). The right side
is a path of ours, or a rule:

* `Rows(path, i, sizes)`: these are the rows of part i of a joined matrix, as q, k and v are parts of `qkv`;
* `Expert(path, i, sizes)`: the same for one of many experts, which the last number of the name counts, in a stacked
tensor;
* `Moved(path, changes)`: the same values in another order, such as a transposed matrix;
* `Same(path)`: the same weights stored a second time, as a tied head is; they must be equal;
* `Drop(reason)`: not needed, such as a table that is computed from the config;
* `Unused(reason)`: the same for what another task would need, so that users are told.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations

import mlx.core as mx


@dataclass(frozen=True)
class Rows:
    """Part number `part` of a matrix that joins several along its rows, whose sizes are to each other as `of`.

    Rows lie along `axis`, which is 1 where the experts of a layer are stacked.
    """

    to: str
    part: int
    of: tuple[int, ...]
    axis: int = 0


@dataclass(frozen=True)
class Expert:
    """Part number `part` of the matrix of one expert; the last number in the checkpoint's name says of which."""

    to: str
    part: int = 0
    of: tuple[int, ...] = (1,)


class Change(ABC):
    """Another order of a tensor's values, and the way back."""

    @abstractmethod
    def do(self, x: mx.array) -> mx.array:
        """From the checkpoint's order to ours."""

    @abstractmethod
    def undo(self, x: mx.array) -> mx.array:
        """From our order to the checkpoint's."""

    def keeps_rows(self, axes: int) -> bool:
        """True if the last axis of a tensor with so many axes stays as it is, so that packed rows may be moved."""
        return False


@dataclass(frozen=True)
class Transposed(Change):
    """Matrices stored (in, out), as GPT-2's are; vectors stay as they are. `stacked`: one for each expert, (E, in,
    out)."""

    stacked: bool = False

    def do(self, x: mx.array) -> mx.array:
        return x.swapaxes(-1, -2) if x.ndim == 2 + self.stacked else x

    undo = do


@dataclass(frozen=True)
class Alternating(Change):
    """Along `axis` the values of `parts` parts alternate, a0 b0 a1 b1; ours stand one part after the other, a0 a1 b0
    b1."""

    axis: int
    parts: int = 2

    def do(self, x: mx.array) -> mx.array:
        pairs = mx.unflatten(x, self.axis, (-1, self.parts))
        return pairs.swapaxes(self.axis, self.axis + 1).flatten(self.axis, self.axis + 1)

    def keeps_rows(self, axes: int) -> bool:
        return self.axis < axes - 1

    def undo(self, x: mx.array) -> mx.array:
        parts = mx.unflatten(x, self.axis, (self.parts, -1))
        return parts.swapaxes(self.axis, self.axis + 1).flatten(self.axis, self.axis + 1)


@dataclass(frozen=True)
class ByGroup(Change):
    """Rows that come group by group, each with so many of every part as `sizes` says; ours come part by part.

    BLOOM and GPT-NeoX store q, k and v of one head together: `ByGroup(heads, (1, 1, 1))`; Falcon q, k and v of one
    kv head: `ByGroup(kv_heads, (heads // kv_heads, 1, 1))`.
    """

    groups: int
    sizes: tuple[int, ...]

    def do(self, x: mx.array) -> mx.array:
        units = mx.unflatten(x, 0, (self.groups, sum(self.sizes), -1))  # (G, units, D, ...)
        parts = mx.split(units, list(accumulate(self.sizes[:-1])), axis=1)
        return mx.concatenate([part.flatten(0, 2) for part in parts], axis=0)

    def keeps_rows(self, axes: int) -> bool:
        return axes > 1

    def undo(self, x: mx.array) -> mx.array:
        ends = [self.groups * end for end in accumulate(self.sizes)]
        units = mx.unflatten(x, 0, (ends[-1], -1))  # (units of all parts, D, ...)
        parts = mx.split(units, ends[:-1], axis=0)
        grouped = [mx.unflatten(part, 0, (self.groups, -1)) for part in parts]
        return mx.concatenate(grouped, axis=1).flatten(0, 2)


@dataclass(frozen=True)
class Unflattened(Change):
    """An axis that runs over blocks of `size`; ours has an axis for the blocks and one within them."""

    axis: int
    size: int

    def do(self, x: mx.array) -> mx.array:
        return mx.unflatten(x, self.axis, (-1, self.size))

    def undo(self, x: mx.array) -> mx.array:
        return x.flatten(self.axis, self.axis + 1)


@dataclass(frozen=True)
class Flattened(Change):
    """Axes of the sizes `shape`, from `axis` on, that are one axis of ours: a convolution over patches is a matrix."""

    axis: int
    shape: tuple[int, ...]

    def do(self, x: mx.array) -> mx.array:
        end = self.axis + len(self.shape)
        if x.shape[self.axis : end] != self.shape:
            raise ValueError(f"found axes {x.shape[self.axis : end]}, expected {self.shape}")
        return x.flatten(self.axis, end - 1)

    def undo(self, x: mx.array) -> mx.array:
        return mx.unflatten(x, self.axis, self.shape)


@dataclass(frozen=True)
class Moved:
    """The values of the tensor at `to` in the order of the checkpoint, which `changes`, one after the other, make
    ours."""

    to: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Same:
    """A copy of the weights at `to`."""

    to: str


@dataclass(frozen=True)
class Drop:
    """Weights that the model does not need, and why."""

    reason: str


@dataclass(frozen=True)
class Unused(Drop):
    """Weights of a part that the model can do without and that a user may look for, such as the head of another
    task."""


Rule = str | Rows | Expert | Moved | Same | Drop
Names = dict[str, Rule]


def joined(to: str, parts: dict[str, int]) -> Names:
    """`Rows` for each checkpoint name in `parts`, with the share of rows that it has.

    >>> joined("attn.qkv", {"q_proj": 4, "k_proj": 1, "v_proj": 1})["k_proj"]
    Rows(to='attn.qkv', part=1, of=(4, 1, 1), axis=0)
    """
    return {name: Rows(to, part, tuple(parts.values())) for part, name in enumerate(parts)}


def either(prefix: str, names: Names) -> Names:
    """A table for checkpoints that write a prefix before all names, and for those that do not."""
    return {f"{prefix}{name}": rule for name, rule in names.items()} | names


def first(own: Names, others: Names) -> Names:
    """A table with rows of its own before those of another: a tensor that several rows are for is called what the first
    says when a checkpoint is written and nothing tells what it was called.

    >>> list(first({"up": "mlp.up"}, {"embed": "tokens", "c_fc": "mlp.up"}))
    ['up', 'embed', 'c_fc']
    """
    return own | {name: rule for name, rule in others.items() if name not in own}


def moved_to(rule: Rule, old: str, new: str) -> Rule:
    """The same rule for a module that stands at another path.

    >>> moved_to(Rows("layers.{}.qkv", 0, (1, 1)), "layers.{}", "extra")
    Rows(to='extra.qkv', part=0, of=(1, 1), axis=0)
    """
    if isinstance(rule, Drop):
        return rule
    return rule.replace(old, new, 1) if isinstance(rule, str) else replace(rule, to=rule.to.replace(old, new, 1))


@dataclass(frozen=True)
class Piece:
    """One source tensor's place within a target tensor: part `part` of `of` along `axis`, of one expert or of the
    whole."""

    source: str
    part: int = 0
    of: tuple[int, ...] = (1,)
    expert: int | None = None
    changes: tuple[Change, ...] = ()
    axis: int = 0


@dataclass
class Assignment:
    """Where the tensors of a checkpoint go."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Our tensor -> the checkpoint's tensors that it is made of."""
    copies: dict[str, str] = field(default_factory=dict)
    """Checkpoint tensor -> our tensor that it must equal."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Checkpoint tensor -> why it is not needed."""
    unknown: list[str] = field(default_factory=list)
    """Checkpoint tensors that no rule names."""


def assign(tensors: Iterable[str], names: Names) -> Assignment:
    """Apply a table to the names of a checkpoint's tensors.

    >>> assign(["h.3.ln.weight"], {"h.{}.ln": "layers.{}.norm"}).pieces
    {'layers.3.norm.weight': [Piece(source='h.3.ln.weight', part=0, of=(1,), expert=None, changes=(), axis=0)]}
    """
    result = Assignment()
    for name in tensors:
        found = _rule_for(name, names)
        if found is None:
            result.unknown.append(name)
            continue
        rule, numbers, leaf = found
        match rule:
            case Drop(reason):
                result.dropped[name] = reason
            case Same(to):
                result.copies[name] = to.format(*numbers) + leaf
            case Rows(to, part, of, axis):
                result.pieces.setdefault(to.format(*numbers) + leaf, []).append(Piece(name, part, of, axis=axis))
            case Expert(to, part, of):
                *numbers, expert = numbers
                place = result.pieces.setdefault(to.format(*numbers) + leaf, [])
                place.append(Piece(name, part, of, expert=int(expert)))
            case Moved(to, changes):
                result.pieces.setdefault(to.format(*numbers) + leaf, []).append(Piece(name, changes=changes))
            case str(to):
                result.pieces.setdefault(to.format(*numbers) + leaf, []).append(Piece(name))
    return result


def _rule_for(name: str, names: Names) -> tuple[Rule, list[str], str] | None:
    """The rule for a tensor, the numbers in its name that are not spelled out there, and its leaf (`.weight`, or ""
    where the rule names the tensor itself)."""
    for template, numbers in readings(name):
        if template.count("{}") != len(numbers):
            return None  # braces of the name's own
        module, _, leaf = template.rpartition(".")
        if template in names:
            return names[template], numbers, ""
        if module in names:
            return names[module], numbers, f".{leaf}"
    return None


def readings(name: str) -> list[tuple[str, list[str]]]:
    """The ways in which a table may write a name: with its first number, as that of one layer, without any, and with
    others, as those of one step of each layer.

    >>> readings("model.layers.61.mlp.experts.3.w1")[0]
    ('model.layers.61.mlp.experts.{}.w1', ['3'])
    >>> readings("encoder.block.2.layer.0.norm")[2]
    ('encoder.block.{}.layer.0.norm', ['2'])
    """
    template, numbers = templated(name)
    if template.count("{}") != len(numbers):
        return [(template, numbers)]  # braces of the name's own
    places = range(len(numbers))
    others = [kept for size in places for kept in combinations(places, size + 1) if kept != (0,)]
    return [_spelled(template, numbers, kept) for kept in ([(0,)] if numbers else []) + [(), *others]]


def _spelled(template: str, numbers: list[str], kept: tuple[int, ...]) -> tuple[str, list[str]]:
    """A template with these of its numbers spelled out, and the others."""
    texts = [number if at in kept else "{}" for at, number in enumerate(numbers)]
    around = template.split("{}")
    name = around[0] + "".join(text + after for text, after in zip(texts, around[1:], strict=True))
    return name, [number for at, number in enumerate(numbers) if at not in kept]


def templated(name: str) -> tuple[str, list[str]]:
    """A name with its numbers taken out: parts of it that are one, and what counts experts in one of words.

    >>> templated("model.layers.12.mlp.experts.3.w1.weight")
    ('model.layers.{}.mlp.experts.{}.w1.weight', ['12', '3'])
    """
    number = r"(?<=\.)\d+(?=\.|$)|(?<=\.expert_)\d+(?=\.)"
    return re.sub(number, "{}", name), re.findall(number, name)


def summary(names: Iterable[str]) -> str:
    """All of the names, those that differ by their numbers alone as one.

    >>> summary(["a.0.w", "a.1.w", "b"])
    'a.*.w (2), b'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(templated(name)[0], []).append(name)
    shown = [f"{t.replace('{}', '*')} ({len(of)})" if len(of) > 1 else of[0] for t, of in groups.items()]
    return ", ".join(shown)
