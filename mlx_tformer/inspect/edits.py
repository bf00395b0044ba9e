"""Edits: put other values in place of activations while a model runs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import mlx.core as mx

from ..errors import UsageError
from ..nn import watch
from ..nn.spectator import slot_array
from .places import Places, Where
from .sites import Site, resolve, sites_of
from .texts import Pass, Reader, told
from .trace import Inspectable, Trace, by_text, trace

Prompt = str | Sequence[int] | mx.array
Source = Trace | Prompt


@dataclass(frozen=True)
class Edit:
    """One change to an activation: `change(value, what is known beside it)` gives the values that go where it applies.
    With `aligned` it is given of its source what stands at the same positions, else all of it."""

    name: str
    site: str
    change: Callable[[mx.array, "Known"], mx.array]
    where: Where
    source: Source | None = None
    aligned: bool = False


@dataclass(frozen=True)
class Known:
    """What an edit knows beside the value: the site, the pass, and what its source has."""

    site: Site
    now: Pass
    source: mx.array | None


def zero(site: str, **where: Unpack[Where]) -> Edit:
    """Zeros: `zero("attn.z", heads={18: [6, 7]})` ablates two heads of layer 18. For the places see `Where`."""
    return Edit("zero", site, lambda value, known: mx.zeros_like(value), where)


def scale(site: str, by: float, **where: Unpack[Where]) -> Edit:
    """The value times a number."""
    return Edit("scale", site, lambda value, known: value * by, where)


def assign(site: str, to: float | mx.array, **where: Unpack[Where]) -> Edit:
    """A number, or an array that broadcasts to the activation. Scores of minus infinity hide keys, and what is left of
    the pattern sums to one again: `set("attn.scores", -inf, keys=[0])`."""
    return Edit("set", site, lambda value, known: _fitting(mx.array(to), value, known.site, "to"), where)


def steer(site: str, vector: mx.array, by: float = 1.0, **where: Unpack[Where]) -> Edit:
    """The value plus a vector (C,), times a number: `steer("residual.out", direction, 4.0, layers=12)` (Turner et al.
    2023, arXiv 2308.10248)."""
    return Edit("steer", site, lambda value, known: value + by * _fitting(vector, value, known.site, "vector"), where)


def mean(site: str, over: Source | None = None, **where: Unpack[Where]) -> Edit:
    """The mean over all tokens of a trace or prompt, or of the very text that is read.

    A call that reads a single token has no mean of its own: that raises UsageError, so generation needs `over`.
    """
    return Edit("mean", site, _mean if over is None else _mean_of_source, where, over)


def patch(site: str, source: Source, **where: Unpack[Where]) -> Edit:
    """What the same activation is in a trace, or in the run of another prompt, position by position.

    positions may say where from: `positions={5: 7}` puts what stands at 7 in the source at 5. What the source has not
    stays as it is. Raises UsageError where the shapes do not fit, or the trace has not read the activation.
    """
    return Edit("patch", site, _patched, where, source, aligned=True)


def rewrite(site: str, change: Callable[[mx.array], mx.array], **where: Unpack[Where]) -> Edit:
    """What a function makes of the value, in the same shape."""
    return Edit("rewrite", site, lambda value, known: _fitting(change(value), value, known.site, "change"), where)


def _fitting(given: mx.array, value: mx.array, site: Site, name: str) -> mx.array:
    try:
        return mx.broadcast_to(given.astype(value.dtype), value.shape)
    except ValueError:
        found = f"found shape {given.shape}, expected one that broadcasts to {value.shape}"
        raise UsageError(f"{site.name}: {name}: {found}") from None


def _mean(value: mx.array, known: Known) -> mx.array:
    axis = known.site.keys if known.site.tokens is None else known.site.tokens
    if axis is None or value.shape[axis] < 2:
        raise UsageError(
            f"{known.site.name}: a mean over {value.shape}, of one token; give a trace or prompt as `over`"
        )
    if not any(known.now.left):
        return mx.broadcast_to(value.mean(axis=axis, keepdims=True), value.shape)
    slots = slot_array(known.now.slots(known.site, value.shape[axis]))
    real = slots >= mx.array(known.now.left)[:, None]  # (B, L)
    real = real.reshape([n if i in (0, axis) else 1 for i, n in enumerate(value.shape)])
    total = mx.where(real, value, 0).sum(axis=axis, keepdims=True)
    return mx.broadcast_to(total / mx.maximum(real.sum(axis=axis, keepdims=True), 1), value.shape)


def _mean_of_source(value: mx.array, known: Known) -> mx.array:
    assert known.source is not None
    axis = known.site.keys if known.site.tokens is None else known.site.tokens
    axes = [0] if axis is None else [0, axis]
    return _fitting(known.source.mean(axis=axes, keepdims=True), value, known.site, "over")


def _patched(value: mx.array, known: Known) -> mx.array:
    assert known.source is not None
    return _fitting(known.source, value, known.site, "source")


class Editing:
    """Edits that apply to everything a model runs inside a `with` block."""

    def __init__(self, lm: Inspectable, edits: Sequence[Edit]):
        self.lm, self.edits = lm, list(edits)
        sites = sites_of(lm.model)
        self._told = told(sites)
        self._places = [Places(edit.where) for edit in self.edits]
        self._sites = [
            {site.path: site for site in places.sites(resolve(sites, edit.site), edit.site)}
            for edit, places in zip(self.edits, self._places, strict=True)
        ]
        self._reader = Reader()
        self._stack = ExitStack()

    def __enter__(self) -> "Editing":
        sources = [self._source(edit, sites) for edit, sites in zip(self.edits, self._sites, strict=True)]
        self._stack.enter_context(watch(self._told, self._reader.heard, last=True))
        for edit, places, sites, source in zip(self.edits, self._places, self._sites, sources, strict=True):
            self._stack.enter_context(watch(set(sites), partial(self._apply, edit, places, sites, source)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is not None:
            return
        for edit, places in zip(self.edits, self._places, strict=True):
            if places.waiting:
                raise UsageError(f"{edit.name} {edit.site!r}: no token stood at position {min(places.waiting)}")
            if not places.touched:
                raise UsageError(f"{edit.name} {edit.site!r} touched nothing: what it names was never computed")

    def _source(self, edit: Edit, sites: dict[str, Site]) -> dict[str, mx.array]:
        """What an edit takes values from, by path: those of its trace, or of the run of its prompt."""
        if edit.source is None:
            return {}
        names = {path: site.name for path, site in sites.items()}
        if isinstance(edit.source, Trace):
            found = edit.source
            missing = next((name for name in names.values() if name not in found.names), None)
            if missing is not None:
                raise UsageError(f"{edit.name} {edit.site!r}: the trace has not read {missing}")
        else:
            with trace(self.lm, list(names.values())) as found:
                call(self.lm, edit.source)
        return {path: found[name] for path, name in names.items()}

    def _apply(
        self,
        edit: Edit,
        places: Places,
        sites: dict[str, Site],
        source: dict[str, mx.array],
        path: str,
        value: mx.array,
    ) -> mx.array | None:
        site = sites[path]
        now = self._reader.now(site.stack)
        shown = by_text(value, site, now)
        mask = places.chosen(shown, site, now)
        there = source.get(path)
        if there is not None and edit.aligned:
            there, has = aligned(there, shown, site, now, places)
            mask = has if mask is None else mask if has is None else mask & has
        changed = edit.change(shown, Known(site, now, there)).astype(value.dtype)
        changed = changed if mask is None else mx.where(mask, changed, shown)
        return changed.reshape(value.shape)


def aligned(
    source: mx.array, value: mx.array, site: Site, now: Pass, places: Places
) -> tuple[mx.array, mx.array | None]:
    """What a source has at the positions of a pass, and where it has anything (None: everywhere)."""
    axis = site.keys if site.tokens is None else site.tokens
    if axis is None:
        return source, None
    count, moved = value.shape[axis], places.moved or {}
    wanted = [moved.get(slot, moved.get(i - count, slot)) for i, slot in enumerate(now.slots(site, count))]
    wanted = [at + source.shape[axis] if at < 0 else at for at in wanted]
    has = [0 <= at < source.shape[axis] for at in wanted]
    for to, at in moved.items():
        if not -source.shape[axis] <= at < source.shape[axis]:
            raise UsageError(f"{site.name}: positions {{{to}: {at}}}: the source has {source.shape[axis]} tokens")
    taken = mx.take(source, mx.array([at if ok else 0 for at, ok in zip(wanted, has, strict=True)]), axis=axis)
    if all(has):
        return taken, None
    return taken, mx.array(has).reshape([-1 if i == axis else 1 for i in range(value.ndim)])


def editing(lm: Inspectable, edits: Sequence[Edit]) -> Editing:
    """Apply edits to everything that `lm` runs inside the block: calls, and every step of a generation.

    Raises UsageError for a site, layer or head that the model does not have, and at the end of the block for an edit
    that touched nothing, or a position that no token stood at.

    >>> import mlx_tformer as mt
    >>> lm = mt.load("shakespeare")
    >>> with editing(lm, [scale("attn.z", 0.5, layers=0)]):
    ...     steps = list(lm.generate("ROMEO:", max_tokens=3))
    """
    return Editing(lm, edits)


def run(lm: Any, tokens: Prompt, edit: Sequence[Edit], **arguments: Any) -> mx.array:
    """What `lm(tokens)` gives, logits (B, L, V) for a decoder, while the edits apply; see `editing`."""
    with editing(lm, edit):
        return call(lm, tokens, **arguments)


def call(lm: Any, tokens: Prompt, **arguments: Any) -> mx.array:
    """One pass over a prompt in any form."""
    ids = lm.tokens(tokens) if isinstance(tokens, str) else tokens
    logits = lm(ids, **arguments)
    mx.eval(logits)
    return logits
