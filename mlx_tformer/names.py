"""Checkpoint names -> our names, as data that works in both directions.

A family's table pairs the checkpoint's modules with ours; `{}` stands for one number. A pair moves all the leaves
of a module (weight, bias, and the scales of a quantized one). The right side is a path of ours, or a rule:

* `Rows(path, i, sizes)`: these are the rows of part i of a joined matrix, as q, k and v are parts of `qkv`;
* `Same(path)`: the same weights stored a second time, as a tied head is; they must be equal;
* `Drop(reason)`: not needed, such as a table that is computed from the config.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rows:
    """Part number `part` of a matrix that joins several along its rows, whose sizes are to each other as `of`."""

    to: str
    part: int
    of: tuple[int, ...]


@dataclass(frozen=True)
class Same:
    """A copy of the weights at `to`."""

    to: str


@dataclass(frozen=True)
class Drop:
    """Weights that the model does not need, and why."""

    reason: str


Rule = str | Rows | Same | Drop
Names = dict[str, Rule]


def joined(to: str, parts: dict[str, int]) -> Names:
    """A row of `Rows` for each checkpoint name in `parts`, with the share of rows that it has.

    >>> joined("attn.qkv", {"q_proj": 4, "k_proj": 1, "v_proj": 1})["k_proj"]
    Rows(to='attn.qkv', part=1, of=(4, 1, 1))
    """
    return {name: Rows(to, part, tuple(parts.values())) for part, name in enumerate(parts)}


@dataclass(frozen=True)
class Piece:
    """One source tensor's place within a target tensor: part `part` of `of`, the only one by default."""

    source: str
    part: int = 0
    of: tuple[int, ...] = (1,)


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
    {'layers.3.norm.weight': [Piece(source='h.3.ln.weight', part=0, of=(1,))]}
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
            case Rows(to, part, of):
                result.pieces.setdefault(to.format(*numbers) + leaf, []).append(Piece(name, part, of))
            case str(to):
                result.pieces.setdefault(to.format(*numbers) + leaf, []).append(Piece(name))
    return result


def _rule_for(name: str, names: Names) -> tuple[Rule, list[str], str] | None:
    """The rule for a tensor, the numbers in its name, and its leaf (`.weight`, or "" where the rule names the tensor
    itself)."""
    template, numbers = templated(name)
    if template.count("{}") != len(numbers):
        return None  # braces of the name's own
    module, _, leaf = template.rpartition(".")
    if template in names:
        return names[template], numbers, ""
    if module in names:
        return names[module], numbers, f".{leaf}"
    return None


def templated(name: str) -> tuple[str, list[str]]:
    """A name with its numbers taken out.

    >>> templated("model.layers.12.mlp.experts.3.w1.weight")
    ('model.layers.{}.mlp.experts.{}.w1.weight', ['12', '3'])
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", name), re.findall(r"(?<=\.)(\d+)(?=\.|$)", name)


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
