"""What a model says about itself: sizes, masks, positions, norms, memory, and the shapes from ids to logits.

Everything is read off the module tree, so it is what the model computes and not what its name or its config promises;
only the trained length and the tokenizer's size, which no module knows, are told. No weight is evaluated: a card of a
model of any size is free. A new kind of layer describes itself by registering with `facts_of`, `lines_of` and, if a
token leaves some of its weights alone, `idle_parameters`; what has not registered is shown by its class and parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from . import memory
from .anatomy import Anatomy, Layers, anatomy
from .errors import UsageError
from .nn import (
    LM,
    Attention,
    Block,
    GatedDelta,
    GatedMlp,
    Identity,
    LayerNorm,
    Mamba,
    Mamba2,
    Mlp,
    Model,
    NextToken,
    Parallel,
    Position,
    Residual,
    RMSNorm,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

T = TypeVar("T")
Facts = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One residual step of a layer: what it wraps (see `facts_of`), the norms around it, projections with a bias."""

    name: str
    kind: str
    facts: Facts
    norms: dict[str, str]
    biases: tuple[str, ...]


@dataclass(frozen=True)
class LayerKind:
    """Layers that are made alike, by their numbers."""

    layers: tuple[int, ...]
    order: str
    """"sequential", or "parallel" where all steps read the same input."""
    steps: tuple[Step, ...]
    stack: str = "decoder"
    """Where the numbers count."""


@dataclass(frozen=True)
class Line:
    """One step of the ledger: what comes out of it, in symbols and in numbers, and its parameters.

    Names are paths of modules and of the activations that `watch` sees.
    """

    name: str
    symbols: tuple[str, ...]
    shape: tuple[str | int, ...]
    parameters: int


@dataclass(frozen=True)
class Section:
    """Steps of the ledger that happen `times` times, once in each of `layers` if there are any."""

    title: str
    layers: tuple[int, ...]
    times: int
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Card:
    """What there is to say about a model; None is what is not known. rich prints it, and `render` gives plain text."""

    name: str
    dim: int
    layers: int
    kinds: tuple[LayerKind, ...]
    final_norm: str | None
    tied: bool
    head_bias: bool
    head: str
    vocabulary: int | None
    images: str | None
    tokenizer_size: int | None
    vocabulary_matches: bool | None
    trained: int | None
    deployed: int | None
    parameters: int
    active_parameters: int
    weights_bytes: int
    bits_per_weight: float
    dtype: str
    kv_bytes_per_token: int
    context: int | None
    kv_bytes: int | None
    needed_bytes: int
    device: memory.Memory
    fits: bool
    tokens_that_fit: int | None
    ledger: tuple[Section, ...]

    def to_dict(self) -> dict[str, Any]:
        """The card as JSON knows it: dicts, lists, strings, numbers, booleans and null, under the names above."""
        return _plain(asdict(self))

    def render(self, width: int = 80, *, ascii_only: bool = False) -> str:
        """The card as plain text, no line longer than `width`."""
        from .card_text import plain_text

        return plain_text(self, width, ascii_only)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from .card_text import renderables

        yield from renderables(self, options.ascii_only)


def card(
    model: Model,
    *,
    trained: int | None = None,
    deployed: int | None = None,
    context: int | None = None,
    tokenizer_size: int | None = None,
    dtype: mx.Dtype | None = None,
    weights_bytes: int | None = None,
    name: str = "",
    device: memory.Memory | None = None,
) -> Card:
    """What `model` says about itself.

    trained, deployed: tokens that it was trained on and that it is offered for (`original_max_position_embeddings` and
    `max_position_embeddings`).
    context: tokens to count the cache for; as many as it is deployed for by default.
    tokenizer_size: ids that its tokenizer has.
    dtype: what floating-point weights are loaded as, and the cache is kept in; as they are by default.
    weights_bytes: what the weights take, if it is known better than from the model.
    device: the memory to hold it against; this machine's by default.

    Raises UsageError for a context that is not positive, and for a kind of model that has no card.

    >>> from mlx_tformer.nn import Embed, Stack
    >>> block = Block(attn=Residual(Attention(16, heads=2)), mlp=Residual(GatedMlp(16, 32)))
    >>> found = card(LM(Embed(100, 16), Stack([block])), deployed=64)
    >>> found.parameters, found.kv_bytes_per_token, found.kv_bytes
    (4160, 128, 8192)
    """
    context = next((length for length in (context, deployed, trained) if length is not None), None)
    if context is not None and context < 1:
        raise UsageError(f"context: found {context}, expected 1 or more")
    weights = memory.weights_bytes(model, dtype) if weights_bytes is None else weights_bytes
    device = memory.of_device() if device is None else device
    parts = anatomy(model)
    tree, rows = _tree(model, parts), parts.vocabulary
    context = context if parts.remembers else None
    return Card(
        **tree,
        **_needs(
            model, parts.remembers, context, memory.compute_dtype(model) if dtype is None else dtype, weights, device
        ),
        name=name,
        tokenizer_size=tokenizer_size,
        vocabulary_matches=None if tokenizer_size is None or rows is None else tokenizer_size <= rows,
        trained=trained,
        deployed=deployed,
        weights_bytes=weights,
        bits_per_weight=8 * weights / tree["parameters"],
    )


def _tree(model: Model, parts: Anatomy) -> dict[str, Any]:
    """The fields of a card that the module tree alone decides."""
    parameters, last = memory.parameter_count(model), parts.layers[-1].stack
    return {
        "dim": parts.sizes["C"],
        "layers": sum(len(layers.stack.layers) for layers in parts.layers),
        "kinds": tuple(kind for layers in parts.layers for kind in _kinds(layers)),
        "final_norm": norm_text(last.norm),
        "tied": parts.tied,
        "head_bias": parts.head_bias,
        "head": parts.head,
        "vocabulary": parts.vocabulary,
        "images": parts.images,
        "parameters": parameters,
        "active_parameters": parameters - parts.idle - sum(idle_parameters(m) for m in model.modules()),
        "ledger": tuple(_ledger(model, parts)),
    }


def _needs(
    model: Model, remembers: bool, context: int | None, dtype: mx.Dtype, weights: int, device: memory.Memory
) -> dict[str, Any]:
    """The fields of a card about the cache and about what fits."""
    cache = None if context is None else memory.kv_bytes(model, context, dtype)
    each = memory.kv_bytes(model, 1, dtype) - memory.kv_bytes(model, 0, dtype) if remembers else 0
    needed, room = weights + (cache or 0), device.recommended - weights
    return {
        "dtype": str(dtype).rpartition(".")[2],
        "kv_bytes_per_token": each,
        "context": context,
        "kv_bytes": cache,
        "needed_bytes": needed,
        "device": device,
        "fits": needed <= device.recommended,
        "tokens_that_fit": None if context is None else memory.tokens_that_fit(model, room, context, dtype),
    }


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
    shared = "multi-query" if op.kv_heads == 1 else "grouped-query"
    return {
        "kind": "attention",
        "heads": op.heads,
        "kv_heads": op.kv_heads,
        "head_dim": op.head_dim,
        "sharing": "multi-head" if op.kv_heads == op.heads else shared,
        "scale": op.scale,
        "mask": str(op.mask),
        "position": str(op.position),
        "q_norm": norm_text(op.q_norm),
        "k_norm": norm_text(op.k_norm),
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
    return _lines({"C": dim}, (type(op).__name__, "B L C", op))


@lines_of.register
def _(op: Attention, dim: int) -> list[Line]:
    sizes = {"C": dim, "H": op.heads, "K": op.kv_heads, "D": op.head_dim}
    rows = "(2H+2K)·D" if op.gated else "(H+2K)·D"
    sizes[rows] = op.qkv.weight.shape[0]
    return _lines(
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
def _(op: GatedMlp, dim: int) -> list[Line]:
    sizes = {"C": dim, "F": _hidden(op), "2F": 2 * _hidden(op)}
    halves = [(name, "B L F", None) for name in ("gate", "up", "hidden")]
    return _lines(sizes, ("gate_up", "B L 2F", op.gate_up), *halves, ("down", "B L C", op.down))


@lines_of.register
def _(op: Mlp, dim: int) -> list[Line]:
    sizes = {"C": dim, "F": _hidden(op)}
    return _lines(sizes, ("up", "B L F", op.up), ("hidden", "B L F", None), ("down", "B L C", op.down))


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


def _kinds(layers: Layers) -> Iterator[LayerKind]:
    for (order, steps), numbers in grouped(map(_made_of, layers.stack.layers)):
        yield LayerKind(numbers, order, steps, layers.name)


def _made_of(block: Block) -> tuple[str, tuple[Step, ...]]:
    order = "parallel" if isinstance(block, Parallel) else "sequential"
    if isinstance(block, Parallel) and block.beside < len(block.order):
        order = f"the first {block.beside} parallel"
    return order, tuple(_step(name, step) for name, step in zip(block.order, block.steps, strict=True))


def _step(name: str, step: Residual) -> Step:
    op: nn.Module = step["op"]
    facts = facts_of(op)
    texts = {where: norm_text(norm) for where, norm in (("pre", step.pre), ("post", step.post), ("after", step.after))}
    linears = ((path, m) for path, m in op.named_modules() if isinstance(m, nn.Linear | nn.QuantizedLinear))
    biases = tuple(sorted(path for path, linear in linears if "bias" in linear))
    norms = {where: text for where, text in texts.items() if text is not None}
    return Step(name, facts.pop("kind"), facts, norms, biases)


def grouped(values: Iterable[T]) -> list[tuple[T, tuple[int, ...]]]:
    """Equal values and where they stand, in order of appearance.

    >>> grouped("aab")
    [('a', (0, 1)), ('b', (2,))]
    """
    groups: dict[str, tuple[T, list[int]]] = {}
    for index, value in enumerate(values):
        groups.setdefault(repr(value), (value, []))[1].append(index)
    return [(value, tuple(indices)) for value, indices in groups.values()]


def _hidden(op: Mlp | GatedMlp) -> int:
    """Width of an MLP: half of the rows of gate and up together."""
    return op.gate_up.weight.shape[0] // 2 if isinstance(op, GatedMlp) else op.up.weight.shape[0]


def _lines(sizes: dict[str, int], *steps: tuple[str, str, object]) -> list[Line]:
    """Lines from names, axes as in "B L C", and modules or None; modules that do nothing have no line."""
    lines = []
    for name, axes, module in steps:
        if isinstance(module, Identity) or type(module) is Position:
            continue
        symbols = tuple(axes.split())
        parameters = memory.parameter_count(module) if isinstance(module, nn.Module) else 0
        lines.append(Line(name, symbols, tuple(sizes.get(axis, axis) for axis in symbols), parameters))
    return lines


def _layer_lines(block: Block, dim: int) -> Iterator[Line]:
    sizes, beside = {"C": dim}, 0
    if isinstance(block, Parallel):
        yield from _lines(sizes, ("pre", "B L C", block.pre))
        beside = block.beside
    for at, (name, step) in enumerate(zip(block.order, block.steps, strict=True)):
        yield from _lines(sizes, (f"{name}.pre", "B L C", step.pre))
        for line in lines_of(step["op"], dim):
            yield replace(line, name=f"{name}.op.{line.name}")
        yield from _lines(sizes, (f"{name}.post", "B L C", step.post), (f"{name}.after", "B L C", step.after))
        if at >= beside:
            yield from _lines(sizes, (f"{name}.out", "B L C", None))
    yield from _lines(sizes, ("out", "B L C", None))


def _ledger(model: Model, parts: Anatomy) -> Iterator[Section]:
    sizes = parts.sizes
    for part in parts.parts:
        if not isinstance(part, Layers):
            yield Section(part.title, (), 1, tuple(_lines(sizes, *part.rows)))
            continue
        for lines, layers in grouped(tuple(_layer_lines(block, sizes["C"])) for block in part.stack.layers):
            yield Section(f"{part.name}.layers.{ranges(layers)}", layers, len(layers), lines)
    for number in range(model.depth if isinstance(model, LM) else 0):
        yield Section(f"drafts.{number}", (), 1, tuple(_draft_lines(model.drafts[number], sizes)))


def _draft_lines(part: NextToken, sizes: dict[str, int]) -> Iterator[Line]:
    embed, head = (part.embed if part.has_embed else None), (part.head if part.has_head else None)
    yield from _lines(sizes, ("embed.tokens", "B L C", embed), ("embed_norm", "B L C", part.embed_norm))
    yield from _lines(sizes, ("hidden_norm", "B L C", part.hidden_norm), ("join", "B L C", part.join))
    for line in _layer_lines(part.block, sizes["C"]):
        yield replace(line, name=f"block.{line.name}")
    yield from _lines(sizes, ("out", "B L C", None), ("norm", "B L C", part.norm), ("logits", "B L V", head))


def _plain(value: Any) -> Any:
    """The same with lists for tuples, as JSON has it."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in few words.

    >>> ranges([0, 1, 2, 3, 4, 6, 7])
    '0-4, 6-7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
