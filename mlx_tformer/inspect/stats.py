"""Watching statistics of attention while a model runs: what `streamed` takes of each call, kept in bounded memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..errors import UsageError
from ..nn import Call, spectate
from .kept import LayerStatistics
from .streaming import Wants, streamed

if TYPE_CHECKING:
    from ..tokens import Spans
    from .pictures import Grid

KEPT = 4096
"""Rows kept of each layer unless told otherwise."""


def stats(
    *,
    entropy: bool = True,
    distance: bool = True,
    top: int = 0,
    mass: "Spans | None" = None,
    received: bool = False,
    layers: Sequence[int] | str = "*",
    keep: int = KEPT,
) -> "Watch":
    """A watch that takes statistics of each query and head while a model runs in it, and never holds a pattern.

    entropy: logsumexp, entropy, and the key with the largest weight. distance: between query and keys. top: so many
    keys with the largest weights. mass: the weight on each of these spans, as `tokens.spans(every=512)` gives them.
    received: what each key is given by all queries. layers: numbers, or a glob over the paths of attention modules.
    keep: rows of queries that are kept of each layer, the last ones.

    Use it around calls, or hand it to `generate`. Statistics follow from queries and keys: edits of these are in them,
    edits of scores and patterns are not. Those of packed weights, or of a packed cache, are of what is packed. Where
    neither entropy, top nor received is wanted, a GPU takes the rest by value probes, through its fused kernel. Raises
    UsageError for numbers that cannot be meant.

    >>> import mlx_tformer as mt
    >>> lm = mt.load("shakespeare")
    >>> tokens = lm.tokens("To be, or not to be")
    >>> with stats(mass=tokens.spans(by="kind")) as watch:
    ...     logits = lm(tokens.array)
    >>> watch[0].entropy.shape, watch[0].mass.shape  # heads, queries, spans
    ((1, 6, 7), (1, 6, 7, 7))
    """
    for name, value, least in (("top", top, 0), ("keep", keep, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}: found {value!r}, expected a whole number of {least} or more")
    wants = Wants(bool(entropy), bool(distance), top, mass, bool(received))
    return Watch(wants, layers if isinstance(layers, str) else tuple(layers), keep)


class Watch(AbstractContextManager["Watch"]):
    """Statistics of the attention that runs inside, by layer: `watch[3]`, or `watch["decoder.layers.3.attn.op"]`.

    It may be entered again and again, and goes on where it was: a text may be read in chunks, and each token that
    is generated adds a row. A call that begins at an earlier place replaces the rows from there on, and one that
    begins a text begins anew, so that a watch is always of one text, or one batch of them.
    """

    def __init__(self, wants: Wants, layers: Sequence[int] | str, keep: int):
        self.wants, self.keep = wants, keep
        self._layers = layers
        self._found: dict[str, LayerStatistics] = {}
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        see: Callable[[Call], None] = _nothing if self._open else self._see  # each call counts once
        inside = spectate(see)
        inside.__enter__()
        self._open.append(inside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, trace)

    @property
    def paths(self) -> tuple[str, ...]:
        """The attention modules that were seen, in the order in which they ran."""
        return tuple(self._found)

    @property
    def spans(self) -> tuple[str, ...]:
        """The names of the columns of `mass`."""
        return () if self.wants.spans is None else self.wants.spans.columns

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept, room for growth included."""
        return sum(layer.nbytes for layer in self._found.values())

    def __getitem__(self, layer: int | str) -> "LayerStatistics":
        """The statistics of a layer, by its number or the path of its attention; raises UsageError for one not seen,
        and for a number that several modules share."""
        if isinstance(layer, str):
            named = [path for path in self._found if path == layer]
        else:
            named = [path for path in self._found if _is_layer(path, layer)]
        if len(named) != 1:
            found = "attention of it did not run" if not named else f"it has {', '.join(named)}"
            raise UsageError(f"layer {layer}: {found}; seen were {', '.join(self._found) or 'none'}")
        return self._found[named[0]]

    def span_map(self, texts: Sequence[str], *, first: int, row: int = 0) -> "Grid":
        """The weight on each span by the queries from place `first` on, which `texts` names: the mean over all heads,
        to be drawn.

        While a model writes, the query before a token is the one that led to it, so that with `first` at the last token
        of the prompt a column tells where its token was read from. Raises UsageError for rows that are not kept.
        """
        import numpy as np

        from .pictures import Grid

        shown = []
        for path, layer in self._found.items():
            places = layer.queries[row]
            start = int((places < first).sum())
            stop = start + len(texts)
            if stop > len(places) or not texts or places[start] != first:
                kept = f"{places[0]} to {places[-1]}" if len(places) else "none"
                raise UsageError(f"{path}: rows from {first} on for {len(texts)} tokens are not kept, but {kept}")
            shown.append(layer.mass[row, :, start:stop].mean(axis=0))  # (queries, spans)
        if not shown:
            raise UsageError("nothing was seen; run a model inside the watch")
        mean = np.mean(shown, axis=0).T
        return Grid("weight on each span", mean, self.spans, list(texts), "spans", "tokens")

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Watch({len(self)} layers, {self.nbytes} bytes)"

    def _see(self, call: Call) -> None:
        wanted = self._layers
        if fnmatchcase(call.path, wanted) if isinstance(wanted, str) else any(_is_layer(call.path, n) for n in wanted):
            if call.at.queries.start == 0 or call.path not in self._found:
                self._found[call.path] = LayerStatistics(call.path, self.keep)
            self._found[call.path].add(call, streamed(call, self.wants))


def _nothing(call: Call) -> None:
    """What a watch does that is open already."""


def _is_layer(path: str, number: int) -> bool:
    return f".layers.{number}." in f".{path}."
