"""What the mechanisms of layers say about themselves on a card: facts, shapes and parameters.

A new kind of layer describes itself by registering with `facts_of`, `lines_of` and, if a token leaves some of its
weights alone, `idle_parameters`; what has not registered is shown by its class and parameters.
"""

from dataclasses import dataclass, replace
from functools import singledispatch
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import memory
from .nn import (
    AllHeads,
    Attention,
    CrossAttention,
    EachHead,
    GatedDelta,
    GatedMlp,
    Identity,
    LatentAttention,
    LayerNorm,
    Mamba,
    Mamba2,
    Mixture,
    Mlp,
    NextToken,
    PlainExperts,
    Position,
    RMSNorm,
    ShiftedRMSNorm,
)

Facts = dict[str, Any]
Row = tuple[str, str, object]
"""A line to be: a path, the axes of what comes out of it as in "B L C", and what holds its parameters or None."""


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


@idle_parameters.register
def _(module: Mixture) -> int:
    each = memory.parameter_count(module.experts) // module.experts.count
    return each * (module.experts.count - module.router.top)


@singledispatch
def facts_of(op: object) -> Facts:
    """What a mechanism says about itself: `kind`, and more in numbers or in words."""
    return {"kind": type(op).__name__}


@facts_of.register
def _(op: Attention) -> Facts:
    return _heads(op, op.head_dim) | {
        "mask": str(op.mask),
        "position": str(op.position),
        "q_norm": norm_text(op.q_norm),
        "k_norm": norm_text(op.k_norm),
        "normed": "all heads" if isinstance(op.q_norm, AllHeads) else "each head",
        "softcap": op.softcap,
        "sinks": op.has_sinks,
        "clip": op.clip,
        "gated": op.gated,
    }


@facts_of.register
def _(op: CrossAttention) -> Facts:
    return _heads(op, op.head_dim) | {"mask": "what the encoder has read"}


@facts_of.register
def _(op: LatentAttention) -> Facts:
    return _heads(op, op.plain + op.rotary) | {
        "sharing": f"all from latents of {op.rank}",
        "mask": str(op.mask),
        "position": str(op.position),
    }


def _heads(op: Attention | CrossAttention | LatentAttention, head_dim: int) -> Facts:
    """What attention of every kind says."""
    kv_heads = op.heads if isinstance(op, LatentAttention) else op.kv_heads
    return {
        "kind": "attention",
        "heads": op.heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "sharing": "multi-head" if kv_heads == op.heads else "multi-query" if kv_heads == 1 else "grouped-query",
        "scale": op.scale,
    }


@facts_of.register
def _(op: Mlp | GatedMlp) -> Facts:
    style = "gated" if isinstance(op, GatedMlp) else "plain"
    return {"kind": "mlp", "style": style, "activation": str(op.act), "width": _hidden(op), "experts": "none (dense)"}


@facts_of.register
def _(op: Mixture) -> Facts:
    style = "plain" if isinstance(op.experts, PlainExperts) else "gated"
    said = f"{op.router.top} of {op.experts.count} for each token"
    if op.capacity is not None:
        said += f", at most {op.capacity} tokens of a text each"
    if op.has_shared:
        said += f", and one {facts_of(op.shared)['width']:,} wide for all tokens"
    return {
        "kind": "experts",
        "style": style,
        "activation": str(op.experts.act),
        "width": op.experts.hidden,
        "experts": said,
    }


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
        *([("sinks", "H", op.sinks)] if op.has_sinks else []),
        *_found(op),
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
        *_found(op),
    )


@lines_of.register
def _(op: LatentAttention, dim: int) -> list[Line]:
    queries, into = op.heads * (op.plain + op.rotary), op.into.weight.shape[0]
    rows = "H·D+R+r" if op.q_rank is None else "Q+R+r"
    sizes = {"C": dim, "H": op.heads, "D": op.plain + op.rotary, "H·D": queries, rows: into}
    sizes |= {"R": op.rank, "r": op.rotary, "U": op.value, "D-r+U": op.plain + op.value}
    query: list[Row] = []
    if op.q_rank is not None:
        sizes["Q"] = op.q_rank
        query = [("q_norm", "B L Q", op.q_norm), ("q_up", "B L H·D", op.q_up)]
    return lines(
        sizes,
        ("into", f"B L {rows}", op.into),
        *query,
        ("kv_norm", "B L R", op.kv_norm),
        ("latent", "B 1 S R", None),
        ("kv_up", "B H S D-r+U", op.kv_up),
        ("position", "B H L r", op.position),
        ("q", "B H L D", None),
        ("k", "B H S D", None),
        ("v", "B H S U", None),
        *_found(op, "U"),
    )


def _found(op: Attention | CrossAttention | LatentAttention, width: str = "D") -> list[Row]:
    """The steps behind queries, keys and values; `width` is that of a value."""
    return [("pattern", "B H L S", None), ("z", f"B H L {width}", None), ("out", "B L C", op.out)]


@lines_of.register
def _(op: GatedMlp, dim: int) -> list[Line]:
    sizes = {"C": dim, "F": _hidden(op), "2F": 2 * _hidden(op)}
    halves = [(name, "B L F", None) for name in ("gate", "up", "hidden")]
    return lines(sizes, ("gate_up", "B L 2F", op.gate_up), *halves, ("down", "B L C", op.down))


@lines_of.register
def _(op: Mlp, dim: int) -> list[Line]:
    sizes = {"C": dim, "F": _hidden(op)}
    return lines(sizes, ("up", "B L F", op.up), ("hidden", "B L F", None), ("down", "B L C", op.down))


@lines_of.register
def _(op: Mixture, dim: int) -> list[Line]:
    """Tokens of all texts go through one by one, B·L of them."""
    experts, sizes = op.experts, {"C": dim, "E": op.experts.count, "k": op.router.top, "F": op.experts.hidden}
    sizes["2F"] = 2 * experts.hidden
    plain = isinstance(experts, PlainExperts)
    into: Row = (
        ("experts.up", "B·L k F", experts["up"]) if plain else ("experts.gate_up", "B·L k 2F", experts["gate_up"])
    )
    found = lines(
        sizes,
        ("router", "B·L E", op.router),
        ("router.chosen", "B·L k", None),
        ("router.weights", "B·L k", None),
        into,
        ("experts.hidden", "B·L k F", None),
        ("experts.down", "B·L k C", experts["down"]),
        ("said", "B·L k C", None),
    )
    if op.has_shared:
        found += [_by_token(line) for line in lines_of(op.shared, dim)]
    if op.has_shared_gate:
        found += lines(sizes, ("shared_gate", "B·L 1", op.shared_gate))
    return found


def norm_text(norm: object) -> str | None:
    """A norm in words, None where there is none.

    >>> norm_text(RMSNorm(8, 1e-6)), norm_text(Identity())
    ('RMSNorm, eps 1e-06', None)
    """
    match norm:
        case Identity():
            return None
        case AllHeads():
            return norm_text(norm.norm)
        case RMSNorm():
            return f"RMSNorm, eps {norm.eps:g}"
        case ShiftedRMSNorm():
            return f"RMSNorm times 1 + weight, eps {norm.eps:g}"
        case EachHead():
            return f"LayerNorm with weights of its own, eps {norm.eps:g}"
        case LayerNorm():
            return f"LayerNorm{'' if 'bias' in norm else ' without bias'}, eps {norm.eps:g}"
    return type(norm).__name__


def _hidden(op: Mlp | GatedMlp) -> int:
    """Width of an MLP: half of the rows of gate and up together."""
    return op.gate_up.weight.shape[0] // 2 if isinstance(op, GatedMlp) else op.up.weight.shape[0]


def _by_token(line: Line) -> Line:
    """A line of an MLP that all tokens go through, beside experts."""
    (_, _, *symbols), (_, _, *shape) = line.symbols, line.shape
    return replace(line, name=f"shared.{line.name}", symbols=("B·L", *symbols), shape=("B·L", *shape))


def lines(sizes: dict[str, int], *rows: Row) -> list[Line]:
    """The ledger of rows; modules that do nothing have no line."""
    lines = []
    for name, axes, holder in rows:
        if isinstance(holder, Identity) or type(holder) is Position:
            continue
        symbols = tuple(axes.split())
        shape = tuple(sizes.get(axis, int(axis) if axis.isdigit() else axis) for axis in symbols)
        lines.append(Line(name, symbols, shape, _parameters(holder)))
    return lines


def _parameters(holder: object) -> int:
    if isinstance(holder, mx.array):
        return prod(holder.shape)
    return memory.parameter_count(holder) if isinstance(holder, nn.Module) else 0
