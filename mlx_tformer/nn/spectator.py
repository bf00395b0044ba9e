"""The seam for statistics: what one call of `attend` works on, shown to spectators before it is worked on.

A watcher of a pattern makes attention write the pattern out. A spectator does not: it is handed the queries, keys and
whatever else the scores follow from, takes from them what it wants, and attention goes its usual, fused way. Without
a spectator that costs one look at a context variable, and adds no node to the graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import mlx.core as mx

Slots = range | tuple[int, ...]


def slot_array(slots: Slots) -> mx.array:
    """The same as an array, (N,)."""
    return mx.arange(slots.start, slots.stop) if isinstance(slots, range) else mx.array(slots)


@dataclass(frozen=True)
class Places:
    """Where the queries and the keys of a call stand, counted from the first token of a batch, padding included.

    keys: a range, or one by one where some between are gone. left and keys_left (B,) count the padding in front of each
    row of the text of the queries and that of the keys, which are one text unless a decoder looks at an encoder.
    """

    queries: range
    keys: Slots
    left: mx.array | None = None
    keys_left: mx.array | None = None

    @classmethod
    def plain(cls, queries: int, keys: int) -> "Places":
        """The last `queries` tokens look at all `keys` tokens of one text, or at another text of fewer tokens."""
        start = max(keys - queries, 0)
        return cls(range(start, start + queries), range(keys))


@dataclass(frozen=True)
class Call:
    """The arguments of one call of `attend`: q (B, H, L, D), k (B, K, S, D), v (B, K, S, E), and the rest as there."""

    path: str
    q: mx.array
    k: mx.array
    v: mx.array
    scale: float
    mask: mx.array | str | None
    bias: mx.array | None
    softcap: float | None
    sinks: mx.array | None
    at: Places


Spectator = Callable[[Call], None]

_spectators: ContextVar[tuple[Spectator, ...]] = ContextVar("spectators", default=())


def spectators() -> tuple[Spectator, ...]:
    """Those who want to be shown the calls of `attend`; most of the time nobody."""
    return _spectators.get()


@contextmanager
def spectate(see: Spectator) -> Iterator[None]:
    """Show `see` each call of `attend` inside the block.

    >>> from mlx_tformer.nn import Attention
    >>> seen = []
    >>> with spectate(lambda call: seen.append((call.q.shape, call.at.keys))):
    ...     _ = Attention(32, heads=4)(mx.zeros((1, 5, 32)))
    >>> seen
    [((1, 4, 5, 8), range(0, 5))]
    """
    token = _spectators.set((*_spectators.get(), see))
    try:
        yield
    finally:
        _spectators.reset(token)
