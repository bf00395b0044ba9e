"""What a watch keeps of a layer: the last rows, in NumPy arrays, and what each key received."""

from typing import TYPE_CHECKING

from ..errors import UsageError
from ..nn import Call
from .streaming import Statistics

if TYPE_CHECKING:
    import numpy as np

ASKED_BY = {
    **dict.fromkeys(("logsumexp", "entropy", "peak", "peak_weight"), "entropy=True"),
    **dict.fromkeys(("top_keys", "top_weights"), "top=N"),
    "distance": "distance=True",
    "mass": "mass=SPANS",
    "received": "received=True",
}
"""The argument of `stats` by which each statistic is asked for."""


class Rows:
    """The last `keep` rows of an array that grows along its third axis; its buffer holds twice as many at most."""

    def __init__(self, keep: int):
        self.keep = keep
        self._buffer: np.ndarray | None = None
        self._stop = 0

    @property
    def array(self) -> "np.ndarray":
        """The rows that are kept."""
        assert self._buffer is not None
        return self._buffer[:, :, max(0, self._stop - self.keep) : self._stop]

    @property
    def held(self) -> "np.ndarray":
        """The rows that are in the buffer, with older ones whose room was not needed yet."""
        assert self._buffer is not None
        return self._buffer[:, :, : self._stop]

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def add(self, rows: "np.ndarray") -> None:
        """Append rows (B, H, L, ...)."""
        import numpy as np

        rows = rows[:, :, -self.keep :]
        if self._buffer is None:
            self._buffer = rows.copy()
        elif self._stop + rows.shape[2] > self._buffer.shape[2]:
            kept = self.array
            size = min(2 * (kept.shape[2] + rows.shape[2]), 2 * self.keep)
            buffer = np.empty((*kept.shape[:2], size, *kept.shape[3:]), kept.dtype)
            kept = kept[:, :, max(0, kept.shape[2] + rows.shape[2] - size) :]
            buffer[:, :, : kept.shape[2]] = kept
            self._buffer, self._stop = buffer, kept.shape[2]
        self._buffer[:, :, self._stop : self._stop + rows.shape[2]] = rows
        self._stop += rows.shape[2]

    def drop(self, count: int) -> None:
        """Forget the last `count` rows, or all there are."""
        self._stop = max(0, self._stop - count)


class Received:
    """Sums for each key of a text, (B, H, keys), that more keys may join."""

    def __init__(self) -> None:
        self._buffer: np.ndarray | None = None
        self._stop = 0

    @property
    def array(self) -> "np.ndarray":
        assert self._buffer is not None
        return self._buffer[..., : self._stop]

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def add(self, sums: "np.ndarray", places: "np.ndarray", left: "np.ndarray") -> None:
        """Add sums (B, H, S) of keys at places (S,) in rows with padding (B,) in front."""
        import numpy as np

        stop = int(places[-1]) + 1 - int(left.min())
        if self._buffer is None or stop > self._buffer.shape[2]:
            buffer = np.zeros((*sums.shape[:2], 2 * stop), sums.dtype)
            if self._buffer is not None:
                buffer[..., : self._stop] = self.array
            self._buffer = buffer
        self._stop = max(self._stop, stop)
        for row, padding in enumerate(left.tolist()):
            real = places >= padding
            self._buffer[row][:, places[real] - padding] += sums[row][:, real]


class LayerStatistics:
    """Statistics of one layer, as NumPy arrays with a row for each query that is kept: B texts, H heads.

    `seen` counts the queries that came by, of which the last ones are kept. Raises UsageError where what was not asked
    for is read.
    """

    def __init__(self, path: str, keep: int):
        self.path, self.seen = path, 0
        self._next = 0
        self._rows: dict[str, Rows] = {}
        self._received = Received()
        self._keep = keep

    def add(self, call: Call, found: Statistics) -> None:
        """Append the rows of a call, whose place they take if they were there before."""
        import numpy as np

        batch, _, length, _ = call.q.shape
        here = np.arange(call.at.queries.start, call.at.queries.stop)
        zeros = np.zeros(batch, int)
        left = zeros if call.at.left is None else np.array(call.at.left)
        keys_left = zeros if call.at.keys_left is None else np.array(call.at.keys_left)
        new = {name: np.array(value) for name, value in found.arrays().items()}
        if "received" in new:
            self._received.add(new.pop("received"), np.array(call.at.keys), keys_left)
        new |= {"place": here[None, None], "query": (here - left[:, None])[:, None]}
        self._forget_from(call.at.queries.start, batch)
        for name, rows in new.items():
            self._rows.setdefault(name, Rows(self._keep)).add(rows)
        self.seen += length
        self._next = call.at.queries.stop

    def _forget_from(self, place: int, batch: int) -> None:
        """Drop the rows of queries at `place` and behind it."""
        if not self._rows:
            return
        if batch != len(self._rows["query"].array):
            problem = f"found a batch of {batch} after one of {len(self._rows['query'].array)}; use a new watch"
            raise UsageError(f"{self.path}: {problem}")
        count = int((self._rows["place"].held >= place).sum())
        for rows in self._rows.values():
            rows.drop(count)
        self.seen -= min(self.seen, max(0, self._next - place))

    @property
    def nbytes(self) -> int:
        """Bytes kept, room for growth included."""
        return sum(rows.nbytes for rows in self._rows.values()) + self._received.nbytes

    @property
    def queries(self) -> "np.ndarray":
        """Places of the queries in their texts, (B, rows); negative in padding."""
        return self._rows["query"].array[:, 0]

    @property
    def entropy(self) -> "np.ndarray":
        """Entropy of each row in nats, the sink's share included, (B, H, rows)."""
        return self._read("entropy")

    @property
    def logsumexp(self) -> "np.ndarray":
        """log Σ exp(score), the sink's included: exp(score - logsumexp) is a weight; (B, H, rows)."""
        return self._read("logsumexp")

    @property
    def peak(self) -> "np.ndarray":
        """Place of the key with the largest weight, -1 where there is nothing to see, (B, H, rows)."""
        return self._read("peak")

    @property
    def peak_weight(self) -> "np.ndarray":
        """The largest weight, (B, H, rows)."""
        return self._read("peak_weight")

    @property
    def distance(self) -> "np.ndarray":
        """Mean number of tokens between the query and its keys, (B, H, rows)."""
        return self._read("distance")

    @property
    def sink(self) -> "np.ndarray":
        """What a learned sink takes of each row, 0 without one, (B, H, rows)."""
        return self._read("sink")

    @property
    def top_keys(self) -> "np.ndarray":
        """Places of the keys with the largest weights, the largest first, (B, H, rows, top)."""
        return self._read("top_keys")

    @property
    def top_weights(self) -> "np.ndarray":
        """The largest weights, (B, H, rows, top)."""
        return self._read("top_weights")

    @property
    def mass(self) -> "np.ndarray":
        """The weight on each span, (B, H, rows, spans)."""
        return self._read("mass")

    @property
    def received(self) -> "np.ndarray":
        """What each key was given by all queries together, (B, H, keys): dropped ones too, and twice by a part of a
        text that was read again."""
        return self._read("received")

    def _read(self, name: str) -> "np.ndarray":
        if name == "received" and self._received.nbytes:
            return self._received.array
        if name not in self._rows:
            raise UsageError(f"{name} was not asked for; use stats({ASKED_BY[name]})")
        return self._rows[name].array
