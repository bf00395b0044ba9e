"""What the mechanisms of layers say about themselves on a card: facts, shapes and parameters.

A new kind of layer describes itself by registering with `facts_of`, `lines_of` and, if a token leaves some of its
weights alone, `idle_parameters`; what has not registered is shown by its class and parameters.
"""

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import mlx.nn as nn

from . import memory
from .nn import (
    Attention,
    CrossAttention,
    GatedDelta,
    GatedMlp,
    Identity,
    LayerNorm,
    Mamba,
    Mamba2,
    Mlp,
    NextToken,
    Position,
    RMSNorm,
)

Facts = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One step of the ledger: what comes out of it, in symbols and in numbers, and its parameters.

    Names are paths of modules and of the activations that `watch` sees.
    """

    name: str
    symbols: tuple[str, ...]
    shape: tuple[str | int, ...]
    parameters: int


@singledispatch
def idle_parameters(module: nn.Module) -> int:
    """Parameters in this module itself that the computation of one token does not touch."""
    return 0


@idle_parameters.register
def _(module: NextToken) -> int:
    # The model runs without it; what of it is idle anyway counts itself.
    inside = sum(idle_parameters(m) for m in module.modules() if m is not module)
    return memory.parameter_count(module) - inside


@singledispatch
def facts_of(op: object) -> Facts:
    """What a mechanism says about itself: `kind`, and more in numbers or in words."""
    return {"kind": type(op).__name__}


@facts_of.register
def _(op: Attention) -> Facts:
    return {
        "kind": "attention",
        "heads": op.heads,
        "kv_heads": op.kv_heads,
        "head_dim": op.head_dim,
        "sharing": _sharing(op.heads, op.kv_heads),
        "scale": op.scale,
        "mask": str(op.mask),
        "position": str(op.position),
        "q_norm": norm_text(op.q_norm),
        "k_norm": norm_text(op.k_norm),
    }


@facts_of.register
def _(op: CrossAttention) -> Facts:
    return {
        "kind": "attention",
        "heads": op.heads,
        "kv_heads": op.kv_heads,
        "head_dim": op.head_dim,
        "sharing": _sharing(op.heads, op.kv_heads),
        "scale": op.scale,
        "mask": "what the encoder has read",
    }


@facts_of.register
def _(op: Mlp | GatedMlp) -> Facts:
    style = "gated" if isinstance(op, GatedMlp) else "plain"
    return {"kind": "mlp", "style": style, "activation": op.act, "width": _hidden(op), "experts": "none (dense)"}


@facts_of.register
def _(op: Mamba | Mamba2) -> Facts:
    what = f"{op.heads} heads of {op.head_dim}" if isinstance(op, Mamba2) else str(op.features)
    return {"kind": "state space", "state": f"{what} features of {op.states} numbers, convolution of {op.conv.size}"}


@facts_of.register
def _(op: GatedDelta) -> Facts:
    what = f"{op.heads} heads of {op.key_dim} × {op.value_dim} numbers"
    return {"kind": "state space", "state": f"{what}, convolution of {op.conv.size}"}


@singledispatch
def lines_of(op: nn.Module, dim: int) -> list[Line]:
    """The ledger of a mechanism that reads and gives (B, L, dim); the parameters of its lines add up to its own."""
    return lines({"C": dim}, (type(op).__name__, "B L C", op))


@lines_of.register
def _(op: Attention, dim: int) -> list[Line]:
    sizes = {"C": dim, "H": op.heads, "K": op.kv_heads, "D": op.head_dim}
    rows = "(2H+2K)·D" if op.gated else "(H+2K)·D"
    sizes[rows] = op.qkv.weight.shape[0]
    return lines(
        sizes,
        ("qkv", f"B L {rows}", op.qkv),
        ("q_norm", "B H L D", op.q_norm),
        ("k_norm", "B K L D", op.k_norm),
        ("position", "B H L D", op.position),
        ("q", "B H L D", None),
        ("k", "B K L D", None),
        ("v", "B K L D", None),
        ("pattern", "B H L S", None),
        ("z", "B H L D", None),
        ("out", "B L C", op.out),
    )


@lines_of.register
def _(op: CrossAttention, dim: int) -> list[Line]:
    sizes = {"C": dim, "H": op.heads, "K": op.kv_heads, "D": op.head_dim}
    sizes |= {"H·D": op.q.weight.shape[0], "2K·D": op.kv.weight.shape[0]}
    return lines(
        sizes,
        ("q", "B L H·D", op.q),
        ("kv", "B S 2K·D", op.kv),
        ("k", "B K S D", None),
        ("v", "B K S D", None),
        ("pattern", "B H L S", None),
        ("z", "B H L D", None),
        ("out", "B L C", op.out),
    )


@lines_of.register
def _(op: GatedMlp, dim: int) -> list[Line]:
    sizes = {"C": dim, "F": _hidden(op), "2F": 2 * _hidden(op)}
    halves = [(name, "B L F", None) for name in ("gate", "up", "hidden")]
    return lines(sizes, ("gate_up", "B L 2F", op.gate_up), *halves, ("down", "B L C", op.down))


@lines_of.register
def _(op: Mlp, dim: int) -> list[Line]:
    sizes = {"C": dim, "F": _hidden(op)}
    return lines(sizes, ("up", "B L F", op.up), ("hidden", "B L F", None), ("down", "B L C", op.down))


def norm_text(norm: object) -> str | None:
    """A norm in words, None where there is none.

    >>> norm_text(RMSNorm(8, 1e-6)), norm_text(Identity())
    ('RMSNorm, eps 1e-06', None)
    """
    match norm:
        case Identity():
            return None
        case RMSNorm():
            return f"RMSNorm, eps {norm.eps:g}"
        case LayerNorm():
            return f"LayerNorm{'' if 'bias' in norm else ' without bias'}, eps {norm.eps:g}"
    return type(norm).__name__


def _sharing(heads: int, kv_heads: int) -> str:
    """How many query heads share a key-value head, in a word."""
    return "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query"


def _hidden(op: Mlp | GatedMlp) -> int:
    """Width of an MLP: half of the rows of gate and up together."""
    return op.gate_up.weight.shape[0] // 2 if isinstance(op, GatedMlp) else op.up.weight.shape[0]


def lines(sizes: dict[str, int], *steps: tuple[str, str, object]) -> list[Line]:
    """Lines from names, axes as in "B L C", and modules or None; modules that do nothing have no line."""
    lines = []
    for name, axes, module in steps:
        if isinstance(module, Identity) or type(module) is Position:
            continue
        symbols = tuple(axes.split())
        parameters = memory.parameter_count(module) if isinstance(module, nn.Module) else 0
        lines.append(Line(name, symbols, tuple(sizes.get(axis, axis) for axis in symbols), parameters))
    return lines
