"""What is drawn, as numbers and labels: a `Grid` of values, or the `Heads` of some layers. Terminal, PNG and page take
the same two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError

Values = NDArray[np.float32]
SINK = "(sink)"
"""The label of the column for the mass that learned sinks take, which no key gets."""
DEFICIT = 1e-4
"""From here on what a row lacks of one is no rounding."""


@dataclass(frozen=True)
class Grid:
    """Values (R, C) with a label for each row and column, such as scores by layer and head.

    down, across: what the rows and the columns are. text: what stands in the cells instead of the values, as the tokens
    of a lens do. Values of both signs get two colours around zero.

    >>> Grid("scores", [[0.0, 0.5]], ["layer 0"], ["head 0", "head 1"]).bounds
    (0.0, 0.5)
    """

    title: str
    values: Values
    rows: Sequence[str]
    columns: Sequence[str]
    down: str = ""
    across: str = ""
    text: Sequence[Sequence[str]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _floats(self.values))
        expected = (len(self.rows), len(self.columns))
        if self.values.shape != expected or not self.values.size:
            raise UsageError(f"{self.title}: found values of shape {self.values.shape} for labels of {expected}")
        if self.text is not None and [len(row) for row in self.text] != [expected[1]] * expected[0]:
            raise UsageError(f"{self.title}: found texts of another shape than {expected}")

    @property
    def bounds(self) -> tuple[float, float]:
        """The values that the ends of the colour scale stand for; around zero where there are both signs."""
        finite = self.values[np.isfinite(self.values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        if low < 0:
            most = max(-low, high)
            return -most, most
        return 0.0, high if high > 0 else 1.0


@dataclass(frozen=True)
class Heads:
    """Attention patterns (H, L, S) of some layers, by the layer's name, with labels for the L queries and S keys.

    first: the place of the first query among the keys; None where there is none, as in cross-attention and among the
    patches of an image.

    Where rows sum to less than one, learned sinks took the rest: it becomes a column of its own behind the keys. A
    query that sees nothing has no sink.

    >>> heads = Heads("", {"0": np.array([[[0.5, 0.25]]])}, ["b"], ["a", "b"])
    >>> heads.keys, heads.patterns["0"].tolist()
    (('a', 'b', '(sink)'), [[[0.5, 0.25, 0.25]]])
    """

    title: str
    patterns: Mapping[str, Values]
    queries: Sequence[str]
    keys: Sequence[str]
    notes: Sequence[str] = field(default=())
    first: int | None = 0

    def __post_init__(self) -> None:
        found = {layer: _floats(pattern) for layer, pattern in self.patterns.items()}
        expected = (len(self.queries), len(self.keys))
        for layer, pattern in found.items():
            if pattern.ndim != 3 or pattern.shape[1:] != expected or not pattern.size:
                raise UsageError(f"layer {layer}: found a pattern {pattern.shape}, expected (heads, *{expected})")
        if not found:
            raise UsageError(f"{self.title or 'attention'}: found no patterns, expected those of a layer or more")
        keys, lacking = tuple(self.keys), {layer: deficit(pattern) for layer, pattern in found.items()}
        if keys[-1] != SINK and any(float(rest.max()) > DEFICIT for rest in lacking.values()):
            keys = (*keys, SINK)
            found = {k: np.concatenate([p, lacking[k][..., None]], axis=-1) for k, p in found.items()}
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "patterns", found)

    def of(self, layer: str | int) -> "Heads":
        """Those of one layer; raises UsageError that names the layers that there are."""
        name = str(layer)
        if name not in self.patterns:
            raise UsageError(f"layer: found {layer}, expected one of {', '.join(self.patterns)}")
        return replace(self, patterns={name: self.patterns[name]})

    def head(self, layer: str | int, head: int) -> Grid:
        """The pattern of one head, queries down and keys across."""
        pattern = self.of(layer).patterns[str(layer)]
        if not 0 <= head < len(pattern):
            raise UsageError(f"head: found {head}, expected 0 to {len(pattern) - 1}")
        title = f"{self.title}{', ' if self.title else ''}layer {layer}, head {head}"
        return Grid(title, pattern[head], self.queries, self.keys, down="query", across="key")


Picture = Grid | Heads


def deficit(pattern: Values) -> Values:
    """What each row (..., S) lacks of one, (...); zero for a row that sees nothing."""
    total = pattern.sum(axis=-1)
    return np.where(total > 0, np.maximum(1 - total, 0), 0).astype(np.float32)


def pooled(values: Values, rows: int, columns: int) -> tuple[Values, int, int]:
    """At most so many rows and columns, each cell the largest of a block (by size, keeping its sign), and the size of
    the blocks.

    >>> pooled(np.array([[1.0, -3.0, 2.0]], np.float32), 10, 2)
    (array([[-3.,  2.]], dtype=float32), 1, 2)
    """
    down, across = -(-values.shape[0] // rows), -(-values.shape[1] // columns)
    spare = (-values.shape[0] % down, -values.shape[1] % across)
    padded = np.pad(values, ((0, spare[0]), (0, spare[1])))
    blocks = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // across, across)
    most, least = blocks.max(axis=(1, 3)), blocks.min(axis=(1, 3))
    return np.where(-least > most, least, most), down, across


def printable(label: str) -> str:
    """A token's text on one line: line ends and tabs as signs, other controls spelled out.

    >>> printable("a\\nb"), printable("")
    ('a⏎b', '∅')
    """
    signs = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
    return "".join(signs.get(c, c) if c.isprintable() or c in signs else f"\\x{ord(c):02x}" for c in label) or "∅"


def _floats(values: object) -> Values:
    return np.asarray(values, dtype=np.float32)
