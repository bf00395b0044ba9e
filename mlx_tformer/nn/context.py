"""What every layer may need besides the residual stream: where the new tokens stand, and what is remembered."""

from dataclasses import dataclass, field

import mlx.core as mx

from ..errors import UsageError
from .cache import Cache, State
from .keeping import WHOLE
from .mask import Mask, Recent, visible, visible_apart, window_of
from .position import Position
from .spectator import Places


@dataclass(frozen=True)
class Context:
    """One call of a model: `length` new tokens that follow the `start` tokens already in the cache."""

    start: int
    length: int
    cache: Cache | None = None
    left: mx.array | None = None
    """What stands in each row of the batch before its text: padding, (B,). In a row of several texts, (B, L): for each
    token what stands before the text that it belongs to."""
    context: int = 0
    """Length of the whole text, for positions that depend on it."""
    real: mx.array | None = None
    """Keys that are text and not padding, (B, S) booleans, where padding may stand anywhere (encoders)."""
    memory: mx.array | None = None
    """What cross-attention looks at, (B, S, C); None once its keys and values are in the cache."""
    memory_real: mx.array | None = None
    """Where the memory is text and not padding, (B, S) booleans; None: everywhere."""
    _masks: dict[tuple[Mask, int], mx.array | str | None] = field(default_factory=dict)
    _biases: dict[tuple[int, int], mx.array | None] = field(default_factory=dict)
    _places: dict[tuple[int, int], Places] = field(default_factory=dict)

    @classmethod
    def alone(cls, x: mx.array, memory: mx.array | None = None) -> "Context":
        """For a layer that is called by itself on x (B, L, C), and one that looks at a memory (B, S, C)."""
        return cls(start=0, length=x.shape[1], context=x.shape[1], memory=memory)

    @property
    def offset(self) -> int | mx.array:
        """Position of the first new token; one for each row (B,) if the batch is padded. In rows of several texts,
        (B, L): by how much the position of each token differs from its place among the new ones (`places`)."""
        return self.start if self.left is None else self.start - self.left

    @property
    def text(self) -> mx.array | None:
        """Which of the new tokens are text and not padding, (B, L) booleans; None if all are."""
        if self.real is not None:
            return self.real
        if self.left is None or self.packed:
            return None
        return mx.arange(self.start, self.start + self.length) >= self.left[:, None]

    @property
    def packed(self) -> bool:
        """Whether the rows hold several texts."""
        return self.left is not None and self.left.ndim == 2

    def state(self, path: str) -> State | None:
        """What the module at `path` remembers, or None without a cache."""
        return None if self.cache is None else self.cache[path]

    def visible(self, mask: Mask, keys: int) -> mx.array | str | None:
        """Which of the last `keys` tokens the new ones see; layers with the same mask share the answer."""
        if (mask, keys) not in self._masks:
            self._masks[mask, keys] = self._visible(mask, keys)
        return self._masks[mask, keys]

    def _visible(self, mask: Mask, keys: int) -> mx.array | str | None:
        how = WHOLE if self.cache is None else self.cache.how
        queries, last = self._ranges(keys)
        if how.size is None or not how.bounds(window_of(mask)):
            return visible(mask, queries, last, self.left, self.real)
        mask = mask & Recent(how.size, how.keep)
        if not how.keep:
            return visible(mask, queries, last, self.left, self.real)
        if self.left is not None:
            raise UsageError("kv_keep: the first tokens of a padded batch cannot be kept; leave it out")
        if not last.start:  # nothing has been dropped
            return visible(mask, queries, last)
        return visible_apart(mask, queries, how.keep, range(last.start + how.keep, last.stop))

    def bias(self, position: Position, keys: int) -> mx.array | None:
        """What a position adds to the scores of the new tokens and the last `keys` ones; layers that share it share
        this."""
        at = (id(position), keys)
        if at not in self._biases:
            self._biases[at] = position.bias(*self._ranges(keys), self.left)
        return self._biases[at]

    def places(self, keys: int, first: int = 0) -> Places:
        """Where the new tokens stand, and the keys: the `first` ones of the text and the last ones, `keys` in all. For
        those who watch; layers share the answer."""
        if (keys, first) not in self._places:
            new, last = self._ranges(keys - first)
            seen = last if not first else range(keys) if first == last.start else (*range(first), *last)
            self._places[keys, first] = Places(new, seen, self.left, self.left)
        return self._places[keys, first]

    def _ranges(self, keys: int) -> tuple[range, range]:
        """Positions of the new tokens and of the last `keys` ones."""
        stop = self.start + self.length
        return range(self.start, stop), range(stop - keys, stop)
