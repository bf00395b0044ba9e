"""Activation patching over a grid: what is restored when one activation of one run is put into another (Meng et al.
2022, arXiv 2202.05262; Zhang and Nanda 2023, arXiv 2309.16042)."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ..errors import UsageError
from ..nn import watch
from .drawn import Drawn, numbers
from .edits import Prompt, call
from .lens import token_id
from .places import Numbers, listed
from .sites import Site, resolve, sites_of
from .trace import trace

if TYPE_CHECKING:
    from .pictures import Picture

Metric = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Sweep(Drawn):
    """values: (layers, N), the metric with one activation of the clean run, by layer and by position or head; clean and
    corrupted: the metric of the two runs as they are."""

    layers: list[int]
    across: str
    numbers: list[int]
    values: mx.array
    clean: float
    corrupted: float

    @property
    def recovered(self) -> mx.array:
        """The values with 0 for the corrupted run and 1 for the clean one; raises UsageError where they are equal."""
        if self.clean == self.corrupted:
            raise UsageError(f"the metric is {self.clean:g} in both runs, so there is nothing to recover")
        return (self.values - self.corrupted) / (self.clean - self.corrupted)

    def picture(self) -> "Picture":
        """The share recovered by each cell."""
        from .pictures import Grid

        rows, columns = [str(layer) for layer in self.layers], [str(number) for number in self.numbers]
        return Grid("recovered", numbers(self.recovered), rows, columns, down="layer", across=self.across)

    def top(self, count: int = 10) -> list[tuple[int, int, float]]:
        """Layer, position or head, and share recovered, of the cells that recover most."""
        rows = cast(list[list[float]], self.recovered.tolist())
        cells = [
            (at, n, x)
            for at, row in zip(self.layers, rows, strict=True)
            for n, x in zip(self.numbers, row, strict=True)
        ]
        return sorted(cells, key=lambda cell: -cell[2])[:count]


def sweep(
    lm: Any,
    clean: Prompt,
    corrupted: Prompt,
    metric: str | int | tuple[str | int, str | int] | Metric,
    *,
    site: str = "residual.out",
    over: str = "positions",
    layers: Numbers | None = None,
    positions: Sequence[int] | None = None,
    batch: int = 16,
) -> Sweep:
    """Run `corrupted` with one activation of `clean` at a time: `site` of each layer at each position, or of each head
    (`over="heads"`, at all positions or those given).

    metric: a token, whose logit at the last position counts, two tokens, whose logits' difference does, or a function
    of logits (B, L, V) that gives (B,). The prompts are of one length. batch: cells that run at a time. A bar on stderr
    shows how far it is, if that is a terminal.

    Raises UsageError for prompts of two lengths, a site that has no positions or heads, and positions or a batch of
    none.
    """
    if batch < 1 or (positions is not None and not len(positions)):
        raise UsageError(f"sweep: found positions {positions} and a batch of {batch}, expected one or more of each")
    pair = [mx.array([list(lm.tokens(p))]) if isinstance(p, str) else p for p in (clean, corrupted)]
    good, bad = (p if isinstance(p, mx.array) else mx.array([list(p)]) for p in pair)
    if good.shape != bad.shape or good.shape[0] != 1:
        raise UsageError(f"sweep: found prompts of shapes {good.shape} and {bad.shape}, expected one length and (1, L)")
    measure = _metric(lm, metric)
    sites = _sites(lm, site, over, layers)
    with trace(lm, [s.name for s in sites]) as t:
        clean_value = _number(measure(call(lm, good)))
    rows, numbers = [], _numbers(t[sites[0].name], sites[0], over, positions)
    with _bar(len(sites), f"{site} over {over}") as step:
        for one in sites:
            found = _row(lm, bad, t[one.name], one, over, numbers, positions, measure, batch)
            rows.append(found)
            step()
    corrupted_value = _number(measure(call(lm, bad)))
    return Sweep([cast(int, s.layer) for s in sites], over, numbers, mx.stack(rows), clean_value, corrupted_value)


def _row(
    lm: Any,
    ids: mx.array,
    clean: mx.array,
    site: Site,
    over: str,
    numbers: list[int],
    positions: Sequence[int] | None,
    measure: Metric,
    batch: int,
) -> mx.array:
    """The metric of one layer, (N,): each row of a batch is the same text with another cell restored."""
    found = []
    length = ids.shape[1]
    for start in range(0, len(numbers), batch):
        some = numbers[start : start + batch]
        here = _cells(
            clean, site, over, some, [p % length for p in (range(length) if positions is None else positions)]
        )

        def restore(path: str, value: mx.array, here: mx.array = here) -> mx.array:
            return mx.where(here, clean.astype(value.dtype), value)

        with watch({site.path}, restore):
            found.append(measure(call(lm, mx.repeat(ids, len(some), axis=0))))
            mx.eval(found[-1])
    return mx.concatenate(found)


def _cells(clean: mx.array, site: Site, over: str, some: list[int], positions: list[int]) -> mx.array:
    """Where the clean values go: booleans (n, ...) that broadcast to the activation of n rows."""
    tokens = site.keys if site.tokens is None else site.tokens
    assert tokens is not None
    axis = site.heads if over == "heads" else tokens
    assert axis is not None

    def along(axis: int, flags: mx.array) -> mx.array:
        return flags.reshape([-1 if i == axis else flags.shape[0] if i == 0 else 1 for i in range(clean.ndim)])

    own = along(axis, mx.arange(clean.shape[axis]) == mx.array(some)[:, None])  # (n, .., N, ..)
    if over == "positions":
        return own
    at = mx.arange(clean.shape[tokens])
    return own & along(tokens, mx.any(at == mx.array(positions)[:, None], axis=0)[None])


def _sites(lm: Any, name: str, over: str, layers: Numbers | None) -> list[Site]:
    if over not in ("positions", "heads"):
        raise UsageError(f"over: found {over!r}, expected positions or heads")
    found = [s for s in resolve(sites_of(lm.model), name) if s.layer is not None and not s.path.startswith("drafts.")]
    chosen = [s for s in found if layers is None or s.layer in listed(layers)]
    lacking = "heads" if over == "heads" else "tokens"
    usable = all((s.heads is not None if over == "heads" else True) and (s.tokens or s.keys) for s in chosen)
    if not chosen or not usable or len({s.layer for s in chosen}) != len(chosen):
        raise UsageError(f"site: found {name!r}, expected one activation with {lacking} in each of the layers")
    return chosen


def _numbers(value: mx.array, site: Site, over: str, positions: Sequence[int] | None) -> list[int]:
    axis = site.heads if over == "heads" else site.keys if site.tokens is None else site.tokens
    assert axis is not None
    count = value.shape[axis]
    length = value.shape[(site.keys if site.tokens is None else site.tokens) or 0]
    wrong = next((p for p in positions or () if not -length <= p < length), None)
    if wrong is not None:
        raise UsageError(f"positions: found {wrong}, expected one of {length}")
    return list(range(count)) if over == "heads" or positions is None else [p % count for p in positions]


def _metric(lm: Any, metric: str | int | tuple[str | int, str | int] | Metric) -> Metric:
    """A function of logits (B, L, V) that gives (B,)."""
    if not isinstance(metric, str | int | tuple):
        return metric
    ids = [token_id(lm, one) for one in (metric if isinstance(metric, tuple) else (metric,))]
    if len(ids) > 2:
        raise UsageError(f"metric: found {len(ids)} tokens, expected one or two")
    return lambda logits: logits[:, -1, ids[0]] - (logits[:, -1, ids[1]] if len(ids) == 2 else 0)


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A bar on stderr, for a terminal only."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _number(x: mx.array) -> float:
    if x.size != 1:
        raise UsageError(f"metric: found shape {x.shape} for one text, expected (1,)")
    return float(cast(float, x.item()))
