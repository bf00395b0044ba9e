"""What a model remembers between calls: one state for each stateful module, kept by the module's path.

The caller owns the cache and passes it in; a model keeps nothing itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from .keeping import WHOLE, Keeping
from .tap import Module


class State(ABC):
    """What one module remembers of the tokens seen so far."""

    length: int = 0
    """Tokens seen, forgotten ones included."""
    rewinds: ClassVar[bool] = True
    """Whether `trim` can take back the tokens of the last call."""
    saved: ClassVar[tuple[str, ...]] = ("length",)
    """Attributes that a file keeps: arrays, lists of them, and whole numbers."""

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """Everything kept, for evaluation and for counting bytes."""

    @abstractmethod
    def trim(self, count: int) -> None:
        """Forget the last `count` tokens; raises UsageError where what came before them is gone."""

    def fork(self) -> "State":
        """A state that remembers the same; what is written to one of the two is not seen in the other."""
        twin = copy(self)
        vars(twin).update({name: _handle(value) for name, value in vars(self).items()})
        return twin

    def stored(self) -> dict[str, mx.array | int]:
        """What a file keeps, by name; `restore` takes it back."""
        found: dict[str, mx.array | int] = {}
        for name in self.saved:
            value = vars(self).get(name)
            if isinstance(value, list):
                found |= {f"{name}.{i}": x for i, x in enumerate(value)}
            elif value is not None:
                found[name] = value
        return found

    def restore(self, found: Mapping[str, mx.array | int]) -> None:
        """Remember what a state of this kind had stored."""
        for name in self.saved:
            several = [x for key, x in found.items() if key.startswith(f"{name}.")]
            if name in found or several:
                vars(self)[name] = several or found[name]

    def take(self, rows: mx.array) -> None:
        """Keep these rows of the batch, (N,), in this order; a row may be there several times, as beams begin."""
        raise UsageError(f"the rows of a batch cannot be told apart in {type(self).__name__}")

    def join(self, others: Sequence["State"]) -> None:
        """Take in the rows of other states of this kind, below one's own; all texts end at the same place, that of the
        longest, so shorter ones get padding in front."""
        raise UsageError(f"texts cannot join a batch in {type(self).__name__}")

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens, which are padding in every row, as if they had never been."""
        raise UsageError(f"padding cannot be dropped from {type(self).__name__}")


def _handle(value: Any) -> Any:
    """Another name for an array, which may be written to under one name only; anything else as it is."""
    if isinstance(value, list):
        return [_handle(x) for x in value]
    return value.astype(value.dtype) if isinstance(value, mx.array) else value


class Pair(State):
    """Keys (B, K, S, D) and values (B, K, S, Dv), once there are any."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.length = 0

    @property
    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    def trim(self, count: int) -> None:
        if not 0 <= count <= self.length:
            raise UsageError(f"cannot forget {count} tokens: {self.length} are remembered")
        self.length -= count

    def take(self, rows: mx.array) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class KV(Pair):
    """Keys (B, K, S, D) and values (B, K, S, Dv) of all tokens, in buffers that grow by `STEP` tokens.

    A buffer that grew for every token would be copied for every token.
    """

    STEP = 256
    apart = 0
    """How many of the keys that `append` returned are the first ones of the text, after which some may be missing."""
    saved: ClassVar[tuple[str, ...]] = ("length", "first", "keys", "values")

    def __init__(self) -> None:
        super().__init__()
        self.first = 0  # position of the first token in the buffers

    def stored(self) -> dict[str, mx.array | int]:
        used, found = self.length - self.first, super().stored()
        growing = {name: x[..., :used, :] for name in self.growing if isinstance(x := found.get(name), mx.array)}
        return {**found, **growing}

    @property
    def growing(self) -> tuple[str, ...]:
        """Names of buffers with room for more tokens behind those that count."""
        return ("keys", "values")

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Remember the keys and values of L new tokens; returns those of every token that they may look at."""
        start, stop = self._make_room(keys, values)
        assert self.keys is not None and self.values is not None
        self.keys[..., start:stop, :] = keys
        self.values[..., start:stop, :] = values
        since = self._oldest_for(self.length) - self.first
        self.length += keys.shape[2]
        return self.keys[..., since:stop, :], self.values[..., since:stop, :]

    def turn(self, q: mx.array) -> mx.array:
        """Queries (B, H, L, D) for the keys that `append` returned."""
        return q

    def turn_back(self, z: mx.array) -> mx.array:
        """What attention made (B, H, L, Dv) of the values that `append` returned, as of the values that it got."""
        return z

    def join(self, others: Sequence[State]) -> None:
        states = [self, *(other for other in others if isinstance(other, KV))]
        kept = max(state.length - state.first for state in states)
        self.keys = mx.concatenate([state._padded(state.keys, kept) for state in states])
        self.values = mx.concatenate([state._padded(state.values, kept) for state in states])
        self.length = max(state.length for state in states)
        self.first = self.length - kept

    def _padded(self, buffer: mx.array | None, kept: int) -> mx.array:
        """The tokens in a buffer behind as many zeros as make them `kept`, and room to grow."""
        assert buffer is not None
        count = self.length - self.first
        room = rounded(kept, self.STEP) - kept
        return mx.pad(buffer[..., :count, :], [(0, 0), (0, 0), (kept - count, room), (0, 0)])

    def drop(self, count: int) -> None:
        gone = max(count - self.first, 0)
        if gone and self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[..., gone:, :], self.values[..., gone:, :]
        self.first = max(self.first - count, 0)
        self.length -= count

    def _make_room(self, keys: mx.array, values: mx.array) -> tuple[int, int]:
        """Where in the buffers the new tokens go; grows the buffers where they are full."""
        start = self.length - self.first
        stop = start + keys.shape[2]
        if self.keys is None or self.values is None:
            self.keys, self.values = (
                empty_like(keys, rounded(stop, self.STEP)),
                empty_like(values, rounded(stop, self.STEP)),
            )
        elif stop > self.keys.shape[2]:
            kept = range(self._oldest_for(self.length) - self.first, start)
            self.first += kept.start
            start, stop = len(kept), len(kept) + keys.shape[2]
            self.keys = moved(self.keys, kept, rounded(stop, self.STEP))
            self.values = moved(self.values, kept, rounded(stop, self.STEP))
        return start, stop

    def _oldest_for(self, position: int) -> int:
        """Position of the oldest key that a query at `position` looks at."""
        return self.first


class WindowKV(KV):
    """Keys and values of as many tokens as a window of `size` needs; older ones are dropped whenever the buffer is
    full.

    Tokens stay in order, at most `STEP` more than the window and the largest chunk are kept, and a trim back to
    what is still there works.
    """

    saved: ClassVar[tuple[str, ...]] = (*KV.saved, "lost")

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.lost = 0  # position of the first token that all rows have: some may have dropped more than others

    def _oldest_for(self, position: int) -> int:
        return max(position - self.size + 1, self.first)

    def trim(self, count: int) -> None:
        if self._gone and self.length - count - self.size + 1 < self._gone:
            raise UsageError(f"cannot forget {count} tokens: a window of {self.size} has dropped what came before them")
        super().trim(count)

    @property
    def _gone(self) -> int:
        """Tokens at the beginning that some row has dropped."""
        return max(self.first, self.lost)

    def join(self, others: Sequence[State]) -> None:
        states = [self, *(other for other in others if isinstance(other, WindowKV))]
        kept = [state.length - state._gone for state in states if state._gone]
        super().join(others)
        self.lost = self.length - min(kept) if kept else 0

    def drop(self, count: int) -> None:
        super().drop(count)
        self.lost = max(self.lost - count, 0)


def rounded(size: int, step: int) -> int:
    """The smallest multiple of `step` that `size` fits in."""
    return (size + step - 1) // step * step


def empty_like(like: mx.array, size: int) -> mx.array:
    """Room for `size` tokens shaped as those in `like` (B, K, L, D)."""
    return mx.zeros((*like.shape[:2], size, like.shape[3]), like.dtype)


def moved(buffer: mx.array, kept: range, size: int) -> mx.array:
    """A buffer of `size` tokens that begins with those at `kept` of another one."""
    old = buffer[..., kept.start : kept.stop, :]
    return mx.concatenate([old, empty_like(old, size - len(kept))], axis=2)


class Memory(Pair):
    """Keys (B, K, S, D) and values (B, K, S, D) of a memory, made once; `length` counts the tokens that look at it."""


class Stateful(Module, ABC):
    """A module that remembers something between calls."""

    packs = False  # what remembers one token for another has to see to it

    @property
    def remembers(self) -> bool:
        """Whether there is anything to remember: not in attention that sees what comes later, which runs once."""
        return True

    @abstractmethod
    def new_state(self) -> State:
        """A fresh, empty state."""

    @abstractmethod
    def state_bytes(self, tokens: int, dtype: mx.Dtype) -> int:
        """Bytes that one text of `tokens` tokens needs here if it is kept in `dtype`, room for growth left out."""

    def kept_state(self, how: Keeping) -> State:
        """A fresh state that keeps as asked, where the module can; raises UsageError where that would be wrong."""
        return self.new_state()

    def kept_bytes(self, tokens: int, dtype: mx.Dtype, how: Keeping) -> int:
        """`state_bytes` of such a state."""
        return self.state_bytes(tokens, dtype)


class Apart(Module):
    """A part of a model that keeps a cache of its own, because the model runs without it."""


def stateful(model: nn.Module) -> list[Stateful]:
    """The modules that remember something when `model` runs, without those of parts that stand apart."""
    parts = [part for part in model.modules() if isinstance(part, Apart) and part is not model]
    apart = {id(module) for part in parts for module in part.modules()}
    return [m for m in model.modules() if isinstance(m, Stateful) and m.remembers and id(m) not in apart]


class Cache:
    """The states of one model for one batch of texts.

    `context` is the length that the text is planned to have; only models whose positions depend on that length look
    at it, and keys of different regimes are never mixed. `left` (B,) counts the padding in front of each row, if
    there is any. `real` (B, S) is True where the text that a decoder looks back to is no padding.
    """

    def __init__(self, states: dict[str, State], context: int = 0, how: Keeping = WHOLE):
        self.states = states
        self.context = context
        self.how = how
        self.left: mx.array | None = None
        self.real: mx.array | None = None

    @classmethod
    def of(cls, model: nn.Module, context: int = 0, how: Keeping = WHOLE) -> "Cache":
        """An empty cache for `model`, whose modules must have been named."""
        return cls({m.path: m.kept_state(how) for m in stateful(model)}, context, how)

    def __getitem__(self, path: str) -> State:
        return self.states[path]

    @property
    def length(self) -> int:
        """Tokens seen so far, padding included."""
        return next((state.length for state in self.states.values()), 0)

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that is remembered."""
        return [array for state in self.states.values() for array in state.arrays]

    @property
    def rewinds(self) -> bool:
        """Whether `trim` can take back the tokens of the last call."""
        return all(state.rewinds for state in self.states.values())

    def fork(self) -> "Cache":
        """A cache that remembers the same and goes on by itself; what both have in common is in memory once, until one
        of the two changes it."""
        twin = copy(self)
        twin.states = {path: state.fork() for path, state in self.states.items()}
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, room for growth included."""
        return sum(array.nbytes for array in self.arrays)

    def take(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order; one may be there several times. Raises UsageError for a state
        that cannot be divided by rows."""
        chosen = mx.array(list(rows))
        for state in self.states.values():
            state.take(chosen)
        self.left = None if self.left is None else self.left[chosen]
        self.real = None if self.real is None else self.real[chosen]

    def join(self, others: Sequence["Cache"]) -> None:
        """Take in the texts of other caches of the same model, as rows below one's own that end at the same place.

        Their padding counts too, so that a row remembers and sees what it did alone. Raises UsageError for a state
        that cannot take in rows.
        """
        caches, length = [self, *others], max(self.length, *(other.length for other in others))
        padding = [length - cache.length + _padding(cache) for cache in caches]
        for path, state in self.states.items():
            state.join([other[path] for other in others])
        self.context = max(cache.context for cache in caches)
        left = mx.concatenate(padding)
        self.left = left if mx.any(left).item() else None

    def compact(self) -> None:
        """Drop the padding that all rows have in common, which nobody looks at."""
        common = 0 if self.left is None else self.left.min().item()
        if self.left is None or not isinstance(common, int) or not common:
            return
        for state in self.states.values():
            state.drop(common)
        self.left = self.left - common
        self.left = self.left if mx.any(self.left).item() else None

    def trim(self, count: int) -> None:
        """Forget the last `count` tokens in every layer, or raise UsageError and forget nothing: where what came before
        them is gone, and where a row of the batch has fewer."""
        if self.left is not None and count > (fewest := self.length - cast(int, self.left.max().item())):
            raise UsageError(f"cannot forget {count} tokens: one text of the batch has {fewest}")
        done = []
        try:
            for state in self.states.values():
                state.trim(count)
                done.append(state)
        except UsageError:
            for state in done:
                state.length += count
            raise


def _padding(cache: Cache) -> mx.array:
    """Tokens of padding in front of each row, (B,)."""
    return mx.zeros((cache.arrays[0].shape[0],), mx.int32) if cache.left is None else cache.left
