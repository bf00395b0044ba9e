"""The ways to look of `mlx-tformer inspect`: each gives pictures, lines below them, and all numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect.drawn import numbers
from mlx_tformer.inspect.pictures import Grid, Heads
from mlx_tformer.inspect.sites import main_stack
from mlx_tformer.nn import Patches
from mlx_tformer.tokens.spans import WAYS

from .look import TITLES, Look, View, counted, fits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_tformer.inspect.pictures import Picture


SMALL = 40
"""Heads that are shown as maps; of more than these a number each."""
BEST, STRETCHES = 5, 16
"""Best tokens, and spans of a text, unless told otherwise."""
MEASURES: "dict[str, Callable[[inspect.Pattern], mx.array]]" = {
    "entropy": lambda one: inspect.entropy(one.values),
    "distance": lambda one: inspect.distance(one.values, first_query=one.first_query, first_key=one.first_key),
    "sink_mass": lambda one: inspect.sink_mass(one.values),
}
"""What a row of a pattern is measured by; `sink` of statistics is what learned sinks take, without the first token."""
KINDS = ("induction", "previous", "duplicate", "current", "sink", "local")


def heads(look: Look) -> View:
    """All heads of all parts."""
    parts, lens = look.parts, _lens_sites(look) if look.asked.html is not None else []
    sites = [site for found in parts.values() for site in found]
    fits(look, sites)
    t = look.traced([*(site.name for site in sites), *lens])
    pictures: list[Picture] = []
    grids: list[Picture] = []
    lines, measured = [], {}
    for part, found in parts.items():
        drawn = _picture(t, part)
        pictures.append(drawn)
        measured[part] = _measured(t, found, _units(look, "sink_mass"))
        table = _table(measured[part]["entropy"])
        columns = [str(head) for head in range(table.shape[1])]
        title = f"{TITLES[part]}: entropy (nats), mean over all queries"
        grids.append(Grid(title, table, list(drawn.patterns), columns, "layer", "head"))
        lines += _sinks(t, part)
    few = sum(len(layer) for found in measured.values() for layer in found["entropy"]) <= SMALL
    if not few:
        lines.append("the heads of one layer as maps: --layer L; of all layers: --html FILE or --png FILE")
    several = [*pictures, *([_best_everywhere(t)] if lens else [])]
    lines += _proof(t)
    told = look.about("heads") | {"read": t.labels(), "check": _check(t), "parts": measured}
    return View("attention", several, lines, told, t.notes, pictures if few else grids)


def layer(look: Look) -> View:
    """The heads of one layer, or one of them."""
    part, sites = _one_part(look)
    asked = look.asked
    have = [site.layer for site in sites]
    if asked.layer not in have:
        raise mt.UsageError(f"layer: found {asked.layer}, expected one of {_ranges(have)} ({TITLES[part]})")
    chosen = [site for site in sites if site.layer == asked.layer]
    fits(look, chosen)
    t = look.traced([site.name for site in chosen])
    (found,) = t.patterns(asked.layer, asked.head, stack=chosen[0].stack, crosses=chosen[0].crosses)
    every = _picture(t, part)
    pictures: list[Picture] = [every]
    if asked.head is not None:
        assert asked.layer is not None
        one = every.head(asked.layer, asked.head)
        pictures = [one, every] if look.pixels is None else [one, _placed(one, look.lm.model.embed), every]
    told = look.about("layer") | {
        "part": part,
        "layer": found.layer,
        "head": found.head,
        "queries": found.queries,
        "keys": found.keys,
        "first_query": found.first_query,
        "first_key": found.first_key,
        "pattern": _numbers(found.values),
        "deficit": _numbers(found.deficit),
        "check": _check(t),
    }
    shown = pictures[:-1] or pictures
    return View(f"{TITLES[part]}, layer {asked.layer}", pictures, _sinks(t, part) + _proof(t), told, t.notes, shown)


def scores(look: Look) -> View:
    """What heads do, on built-in probes."""
    kinds = [*KINDS, "next"] if isinstance(look.lm, mt.EncoderModel) else list(KINDS)
    if not isinstance(look.lm, mt.Seq2SeqModel):
        _ = look.parts  # says what is missing
    with counted(look.lm.model, 1):
        found = inspect.head_scores(look.lm, kinds)
    lines = ["the best heads (layer.head and their mean weight where such a head looks):", *str(found).splitlines()]
    if found.losses is not None:
        first, again = found.losses
        lines.append(f"cross-entropy of random tokens: {first:.2f} nats, said again {again:.2f}")
    told = look.about("scores") | {
        "layers": found.layers,
        "scores": {kind: _numbers(found[kind]) for kind in kinds},
        "losses": found.losses,
    }
    return View("head scores", [found.picture(kind) for kind in kinds], lines, told)


def lens(look: Look) -> View:
    """The best tokens after each layer."""
    sites = _lens_sites(look)
    if not sites:
        raise mt.UsageError(f"lens: {look.lm.origin} has no head that says which token comes: there is nothing to read")
    t = look.traced(sites)
    found = inspect.lens(t, -1, top=look.asked.top or BEST, of=look.asked.token)
    lines = [f"the best tokens after '{t.labels()[-1]}', layer by layer:", *str(found).splitlines()]
    ranks = None if found.ranks is None else numbers(found.ranks[:, 0]).astype(int).tolist()
    if ranks is not None:
        listed = ", ".join(f"{rank} ({n})" for n, rank in zip(found.layers, ranks, strict=True))
        lines.append(f"rank of {look.asked.token!r} after each (layer), 0 for the best: {listed}")
    told = look.about("lens") | {
        "layers": found.layers,
        "position": found.positions[0],
        "best": [line[0] for line in found.texts],
        "ids_of_best": found.tokens[:, 0].tolist(),
        "probabilities": _numbers(found.probabilities[:, 0]),
        "ranks": ranks,
    }
    return View("lens", [_best_everywhere(t)], lines, told, notes=t.notes)


def experts(look: Look) -> View:
    """What a mixture of experts did with the text."""
    stack = main_stack(look.lm.model) if look.asked.part is None else look.asked.part
    sites = [s for s in inspect.sites_of(look.lm.model) if s.stack == stack and ".router." in s.path]
    wanted = [site.name for site in sites if site.kind in ("logits", "chosen", "weights") and site.layer is not None]
    if not wanted:
        kind = look.lm.config.model_type
        raise mt.UsageError(f"experts: {look.lm.origin} has none ({kind}); this looks at mixtures such as Mixtral")
    t = look.traced(wanted)
    found = inspect.experts(t)
    if look.asked.layer is not None:
        have = [one.layer for one in found]
        found = [one for one in found if one.layer == look.asked.layer]
        if not found:
            raise mt.UsageError(f"layer: found {look.asked.layer}, expected one of {_ranges(have)}, which have experts")
    names = [str(i) for i in range(found[0].load.shape[0])]
    loads = Grid("load", np.array([one.load for one in found]), [str(o.layer) for o in found], names, "layer", "expert")
    pairs: list[Picture] = [
        Grid(f"layer {o.layer}: tokens that chose both", np.array(o.together), names, names, "expert", "expert")
        for o in found
    ]
    told = look.about("experts") | {"layers": [_expert_numbers(one) for one in found]}
    shown: list[Picture] = [loads] if look.asked.layer is None else [loads, *pairs]
    return View("experts", [loads, *pairs], [_expert_line(one) for one in found], told, t.notes, shown)


def stats(look: Look) -> View:
    """Statistics of each head while the text is read and written, without any pattern."""
    parts, two = look.parts, isinstance(look.lm, mt.Seq2SeqModel)
    if look.asked.spans is not None and (two or look.ids is None):
        raise mt.UsageError(f"spans: there {'are two texts' if two else 'is no text'}, and spans are of one")
    paths, one = [site.module for found in parts.values() for site in found], look.ids is not None and not two
    watching = inspect.stats(mass=_spans(look) if one else None, layers="*")
    if look.asked.max_tokens is None or two:
        with watching:
            written = look.run()
    else:
        written = look.run(watching)
    units = _units(look, "sink")
    told = {path: _row(watching[path], units) for path in watching.paths if path in paths}
    if one:
        told = {path: row | {"mass": _means(watching[path].mass)} for path, row in told.items()}
    grids: list[Picture] = []
    for part, found in parts.items():
        rows = [site for site in found if site.module in told]
        for name, unit in units.items():
            table = _table([told[site.module][name] for site in rows])
            if name != "sink" or table.max() > 0:
                title = f"{TITLES[part]}: {name} ({unit}), mean over all queries"
                heads = [str(i) for i in range(table.shape[1])]
                grids.append(Grid(title, table, [str(site.layer) for site in rows], heads, "layer", "head"))
    pictures, last = grids, look.length - 1
    if one:
        steps = [look.lm.tokenizer.token_text(i) for i in written] or [look.lm.tokenizer.token_text(look.tokens[-1])]
        pictures = [watching.span_map(steps, first=last), *grids]
    read = f"tokens read: {look.length}, written: {len(written)}"
    lines = [f"{read}; kept: {watching.nbytes:,} bytes, and no pattern"]
    result = look.about("stats") | {"written": written, "spans": list(watching.spans), "attention": told}
    return View("statistics", pictures, lines, result, terminal=pictures[:2])


def token(look: Look) -> View:
    """What every head and every other part adds to the logit of a token."""
    asked = look.asked
    assert asked.token is not None
    if not isinstance(look.lm, mt.LanguageModel):
        raise mt.UsageError(f"token: {look.lm.origin} is no decoder, whose logits are made of its residual stream")
    with counted(look.lm.model, 1):
        t = inspect.trace(look.lm, read=["embed.out", "*.delta", "residual.out", *_heads_out(look)])
        with t:
            look.lm(look.tokens)
    found = inspect.attribution(t, asked.token, minus=asked.minus)
    what = repr(asked.token) if asked.minus is None else f"{asked.token!r} less {asked.minus!r}"
    total = f"{found.logit:.4f} is the logit of {what}; the parts add up to {found.total:.4f}"
    best = [f"{share.value:+9.3f}  {share.name}" for share in found.top(asked.top or 20)]
    told = look.about("token") | {
        "token": asked.token,
        "minus": asked.minus,
        "logit": found.logit,
        "shares": [vars(share) for share in found.shares],
    }
    grid = _shares(found, f"what each part adds to {what}")
    return View("attribution", [grid], [total, *best], told, notes=[*t.notes, *found.notes])


VIEWS: dict[str, Callable[[Look], View]] = {
    "heads": heads,
    "layer": layer,
    "scores": scores,
    "lens": lens,
    "experts": experts,
    "stats": stats,
    "token": token,
}


def _one_part(look: Look) -> tuple[str, list[inspect.Site]]:
    """The part whose layers are numbered: the one that was asked for, or the one that the logits are made of."""
    parts = look.parts
    name = look.asked.part or main_stack(look.lm.model)
    return name, parts[name]


def _picture(t: inspect.Trace, part: str) -> Heads:
    """The heads of a part, with its name."""
    stack = "decoder" if part == "cross" else part
    drawn = t.picture(stack=stack, crosses=part == "cross")
    assert isinstance(drawn, Heads)
    return replace(drawn, title=TITLES[part])


def _units(look: Look, sink: str) -> dict[str, str]:
    """What is measured of each query, and its unit. Between patches of a picture there is no distance in tokens."""
    distance = {"distance": "tokens"} if look.pixels is None else {}
    return {"entropy": "nats", **distance, sink: "mass"}


def _placed(pattern: Grid, patches: Patches) -> Grid:
    """What the first token of a picture gives to its patches, each where it is in the picture."""
    table = pattern.values[0, 1:].reshape(patches.rows, patches.columns)
    rows, columns = map(str, range(patches.rows)), map(str, range(patches.columns))
    return Grid(f"{pattern.title}: from [CLS] to each patch", table, list(rows), list(columns), "row", "column")


def _measured(t: inspect.Trace, sites: list[inspect.Site], names: "Iterable[str]") -> dict[str, Any]:
    """Means over all queries of each head of some layers."""
    found: dict[str, Any] = {"layers": [site.layer for site in sites], **{name: [] for name in names}}
    for site in sites:
        (one,) = t.patterns(site.layer, stack=site.stack, crosses=site.crosses)
        for name in names:
            found[name].append(_numbers(MEASURES[name](one).mean(axis=-1)))
    return found


def _check(t: inspect.Trace) -> float:
    """The proof of the patterns, as a number."""
    return t.check(float("inf"))


def _proof(t: inspect.Trace) -> list[str]:
    return [f"check: pattern @ values differs from the fused output by {_check(t):.1e} of its largest value"]


def _sinks(t: inspect.Trace, part: str) -> list[str]:
    """How much learned sinks take, if there are any."""
    found = t.patterns(stack="decoder" if part == "cross" else part, crosses=part == "cross")
    taken = [np.array(one.deficit)[np.array(one.values.sum(axis=-1)) > 0] for one in found]
    share = float(np.concatenate([x.ravel() for x in taken]).mean())
    return [f"learned sinks take {share:.1%} of the weights of the {TITLES[part]}"] if share > 1e-4 else []


def _lens_sites(look: Look) -> list[str]:
    """The residual streams that a lens reads; none for a model whose head says something else than tokens."""
    lm = look.lm
    if isinstance(lm, mt.VisionModel) or (isinstance(lm, mt.EncoderModel) and (not lm.has_head or lm.labels)):
        return []
    return [f"{main_stack(lm.model)}.layers.*.residual.out"]


def _best_everywhere(t: inspect.Trace) -> Grid:
    """The best next token at each position, with the tokens as labels."""
    drawn = inspect.lens(t, None, top=1).picture()
    assert isinstance(drawn, Grid)
    labels = t.labels(main_stack(t.lm.model))
    return replace(drawn, columns=labels) if len(labels) == len(drawn.columns) else drawn


def _spans(look: Look) -> Any:
    """The spans that were asked for."""
    wanted = look.asked.spans
    if wanted is None:
        return look.tokens.spans(every=max(1, -(-len(look.tokens) // STRETCHES)))
    if wanted.isdecimal() and int(wanted) > 0:
        return look.tokens.spans(every=int(wanted))
    if wanted not in WAYS:
        raise mt.UsageError(f"spans: found {wanted!r}, expected a number of tokens, or one of {', '.join(WAYS)}")
    return look.tokens.spans(by=wanted)


def _row(found: inspect.LayerStatistics, names: "Iterable[str]") -> dict[str, Any]:
    """Means over all queries of each head of a layer."""
    return {name: _means(getattr(found, name)) for name in names}


def _means(rows: np.ndarray) -> list[Any]:
    return rows[0].mean(axis=1).tolist()


def _shares(found: inspect.Attribution, title: str) -> Grid:
    """What heads, and other steps beside them, add by layer."""
    layers = sorted({share.layer for share in found.shares if share.layer is not None})
    count = max((share.head for share in found.shares if share.head is not None), default=-1) + 1
    kinds = list(dict.fromkeys(s.kind for s in found.shares if s.layer is not None and s.kind not in ("head", "bias")))
    columns = [*(str(i) for i in range(count)), *kinds]
    table = np.zeros((len(layers), len(columns)), np.float32)
    for share in found.shares:
        name = str(share.head) if share.head is not None else share.kind
        if share.layer is not None and name in columns:
            table[layers.index(share.layer), columns.index(name)] = share.value
    return Grid(title, table, [str(i) for i in layers], columns, "layer", "head or step")


def _heads_out(look: Look) -> list[str]:
    """What heads give, if there are any."""
    sites = inspect.sites_of(look.lm.model)
    return ["attn.z"] if any(site.kind == "pattern" for site in sites) else []


def _expert_numbers(one: inspect.ExpertReport) -> dict[str, Any]:
    return {
        "layer": one.layer,
        "tokens": one.tokens,
        "load": one.load.tolist(),
        "weight": _numbers(one.weight),
        "entropy": _numbers(one.entropy[0]),
        "together": one.together.tolist(),
        "dropped": one.dropped,
        "unused": one.unused,
        "balance": one.balance,
    }


def _expert_line(one: inspect.ExpertReport) -> str:
    """A layer in a line: how sure its router was, how even the loads, which experts come together most."""
    pairs = np.triu(np.array(one.together), 1)
    a, b = np.unravel_index(int(pairs.argmax()), pairs.shape)
    most = f"; most often together: {a} and {b}, {pairs[a, b]} times" if pairs.max() > 0 else ""
    sure = f"entropy {numbers(one.entropy).mean():.3f} nats, balance {one.balance:.3f}"
    return f"layer {one.layer}: {sure}, {len(one.unused)} experts unused, {one.dropped} tokens dropped{most}"


def _numbers(values: Any) -> Any:
    """An array as numbers that lose nothing."""
    return numbers(values).tolist()


def _table(rows: "Sequence[Sequence[float]]") -> "np.ndarray":
    """Rows of heads; what a layer with fewer heads lacks is NaN."""
    table = np.full((len(rows), max(len(row) for row in rows)), np.nan, np.float32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _ranges(layers: "Sequence[int | None]") -> str:
    from mlx_tformer.card import ranges

    return ranges(layer for layer in layers if layer is not None)
