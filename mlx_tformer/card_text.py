"""A card as text for people: what there is to know about a model, then its shapes from ids to logits."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from . import memory
from .card import Card, Facts, LayerKind, Line, Step, ranges

if TYPE_CHECKING:
    from rich.console import RenderableType

ASCII = str.maketrans({"×": "x", "·": "*"})
TEXTS = "B texts of L tokens that see S keys; C width, V vocabulary, F MLP width;\n"
IMAGES = "B images of c × h × w, in L tokens that see S keys; C width, F MLP width;\n"
RARE = {
    "N": "N labels",
    "T": "T tokens to write",
    "E": "E experts",
    "k": "k of them for a token",
    "Q": "Q features that queries come through",
    "R": "R features of a latent",
    "r": "r that turn",
    "U": "U of a value",
    "W": "W width of the embedding",
}
"""Axes that few models have."""
HEADS = "H query heads and K key-value heads of D features"


def plain_text(card: Card, width: int, ascii_only: bool) -> str:
    """The card without colours, no line longer than `width`."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(*renderables(card, ascii_only), sep="\n")
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def renderables(card: Card, ascii_only: bool) -> Iterator[RenderableType]:
    """What rich prints."""
    from rich.table import Table
    from rich.text import Text

    def text(content: str, style: str = "") -> Text:
        safe = content.translate(ASCII).encode("ascii", "replace").decode() if ascii_only else content
        return Text(safe, style)

    facts = Table.grid(padding=(0, 2))
    for label, said in _rows(card):
        facts.add_row(text(label, "bold"), text(said, "bold red" if said.startswith(("ERROR", "DOES NOT")) else ""))
    yield facts
    yield text("")
    for line, is_title in _ledger(card):
        yield text(line, "bold" if is_title else "")
    yield text("")
    used = {axis for section in card.ledger for line in section.lines for axis in line.symbols}
    more = "".join(f"; {said}" for axis, said in RARE.items() if axis in used)
    yield text((TEXTS if card.images is None else IMAGES) + HEADS + more + ".", "dim")


def _rows(card: Card) -> Iterator[tuple[str, str]]:
    """Labels, and what there is to say."""
    if card.name:
        yield "name", "".join(c if c.isprintable() else "?" for c in card.name)
    yield "layers", f"{card.layers} of width {card.dim:,}"
    yield "residual order", _by_layers(card, _order)
    yield "heads", _by_layers(card, lambda kind: _facts(kind, "heads", _heads))
    spaces = _by_layers(card, lambda kind: _facts(kind, "state"))
    if spaces != "none":
        yield "state space", spaces
    yield "mask", _by_layers(card, lambda kind: _facts(kind, "mask"))
    yield "position", _by_layers(card, lambda kind: _facts(kind, "position"))
    yield ("length", _length(card)) if card.images is None else ("images", card.images)
    yield "MLP", _by_layers(card, lambda kind: _facts(kind, "width", _mlp))
    yield "experts", _by_layers(card, lambda kind: _facts(kind, "experts"))
    yield "norms", _by_layers(card, _norms)
    yield "last norm", card.final_norm or "none"
    yield "biases", _biases(card)
    yield "head", card.head
    if card.vocabulary is not None:
        yield "vocabulary", _vocabulary(card.vocabulary, card.tokenizer_size)
    active = "all of them" if card.active_parameters == card.parameters else f"{card.active_parameters:,}"
    yield "parameters", f"{card.parameters:,}; a token uses {active}"
    yield "weights", f"{memory.human(card.weights_bytes)}, {card.bits_per_weight:.2f} bits per weight"
    yield "KV cache", _cache(card)
    yield "memory", _fit(card)


def _by_layers(card: Card, text_of: Callable[[LayerKind], str]) -> str:
    """What `text_of` says of each kind of layer, with the numbers of the layers where they differ."""
    layers: dict[tuple[str, str], list[int]] = {}
    for kind in card.kinds:
        layers.setdefault((text_of(kind), kind.stack), []).extend(kind.layers)
    if len({text for text, _ in layers}) == 1:
        return next(iter(layers))[0]
    several = len({kind.stack for kind in card.kinds}) > 1
    said = ((f"{stack} " if several else "", sorted(of), text) for (text, stack), of in layers.items())
    return "; ".join(f"{stack}layer{'s' if len(of) > 1 else ''} {ranges(of)}: {text}" for stack, of, text in said)


def _facts(kind: LayerKind, key: str, text_of: Callable[[Facts], str] | None = None) -> str:
    """What the steps that have the fact `key` say, equal words once."""
    having = (step.facts for step in kind.steps if key in step.facts)
    told = (str(facts[key]) if text_of is None else text_of(facts) for facts in having)
    return " and ".join(dict.fromkeys(told)) or "none"


def _order(kind: LayerKind) -> str:
    def name(step: Step) -> str:
        return step.name if step.kind in ("attention", "mlp") else f"{step.name} ({step.kind})"

    if kind.order == "parallel":
        return f"parallel: {' and '.join(map(name, kind.steps))} read the same input"
    if kind.order == "sequential":
        return f"sequential: {', then '.join(map(name, kind.steps))}"
    return f"{kind.order}: {', '.join(map(name, kind.steps))}"


def _heads(facts: Facts) -> str:
    usual = facts["scale"] == facts["head_dim"] ** -0.5
    text = (
        f"{facts['heads']} query, {facts['kv_heads']} key-value ({facts['sharing']}), {facts['head_dim']} features each"
    )
    more = [] if usual else [f"scale {facts['scale']:g}"]
    more += [f"scores capped at ±{facts['softcap']:g}"] if facts.get("softcap") is not None else []
    more += [f"q, k and v clipped at ±{facts['clip']:g}"] if facts.get("clip") is not None else []
    more += [word for key, word in {"sinks": "with sinks", "gated": "with gates"}.items() if facts.get(key)]
    return ", ".join([text, *more])


def _mlp(facts: Facts) -> str:
    return f"{facts['style']}, {facts['activation']}, {facts['width']:,} wide"


def _norms(kind: LayerKind) -> str:
    words = {"pre": "before {}", "post": "on the output of {}", "after": "after adding {}"}
    places: dict[str, list[str]] = {}
    for step in kind.steps:
        for where, norm in step.norms.items():
            places.setdefault(norm, []).append(words[where].format(step.name))
        for what in "qk":
            if step.facts.get(f"{what}_norm") is not None:
                places.setdefault(step.facts[f"{what}_norm"], []).append(f"on {step.facts['normed']} of {what}")
    return "; ".join(f"{norm}: {', '.join(of)}" for norm, of in places.items()) or "none"


def _biases(card: Card) -> str:
    def of_layers(kind: LayerKind) -> str:
        return ", ".join(f"{step.name}.{path}" for step in kind.steps for path in step.biases) or "none"

    inside = _by_layers(card, of_layers)
    if not card.head_bias:
        return inside
    return "head" if inside == "none" else f"{inside}; head"


def _length(card: Card) -> str:
    if card.trained == card.deployed:
        return "not known" if card.deployed is None else f"{card.deployed:,} tokens, trained and deployed"
    known = {"trained on": card.trained, "deployed for": card.deployed}
    return ", ".join(f"{word} {length:,} tokens" for word, length in known.items() if length is not None)


def _vocabulary(rows: int, ids: int | None) -> str:
    if ids is None:
        return f"{rows:,} rows; no tokenizer to compare them with"
    if rows < ids:
        return f"ERROR: {rows:,} rows, {ids:,} ids in the tokenizer: too few by {ids - rows:,}"
    return (
        f"{rows:,} rows, {ids:,} ids in the tokenizer: {'they match' if rows == ids else f'{rows - ids:,} spare rows'}"
    )


def _cache(card: Card) -> str:
    if card.kv_bytes_per_token == 0 and card.context is None:
        return "none: nothing is remembered between calls"
    each = f"{card.kv_bytes_per_token:,} bytes per token in {card.dtype}"
    if card.context is None or card.kv_bytes is None:
        return each
    bounded = ", bounded by windows" if card.kv_bytes < card.kv_bytes_per_token * card.context else ""
    return f"{each};\n{memory.human(card.kv_bytes)} for {card.context:,} tokens{bounded}"


def _fit(card: Card) -> str:
    needed, limit = memory.human(card.needed_bytes), memory.human(card.device.recommended)
    held = f"needs {needed} of the {limit} {card.device.source}"
    if card.fits:
        return f"fits: {held}"
    return f"DOES NOT FIT: {held}" + (f"; {card.tokens_that_fit:,} tokens would fit" if card.tokens_that_fit else "")


def _ledger(card: Card) -> Iterator[tuple[str, bool]]:
    """The ledger's lines in columns, and whether they are titles."""
    rows = [_cells(line) for section in card.ledger for line in section.lines]
    titles = ("", "shape", "in numbers", "parameters")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]

    def aligned(cells: tuple[str, ...]) -> str:
        *left, last = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        return "  ".join([*left, f"{last.strip():>{widths[-1]}}"]).rstrip()

    yield aligned(titles), True
    for section in card.ledger:
        yield section.title + (f" × {section.times}" if section.layers else ""), True
        for line in section.lines:
            yield aligned(_cells(line)), False


def _cells(line: Line) -> tuple[str, ...]:
    shapes = (f"({', '.join(map(str, axes))})" for axes in (line.symbols, line.shape))
    return f"  {line.name}", *shapes, f"{line.parameters:,}" if line.parameters else ""
