"""Which tokens a model reads while it is watched: the passes that make up a text, and what is kept of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from ..nn.spectator import Slots, slot_array
from .sites import EARLY, STACKS, Site


@dataclass
class Pass:
    """One call of a stack of blocks: `length` tokens from slot `start` on, with padding in front of each row."""

    start: int
    length: int
    ids: mx.array | None
    left: list[int]
    places: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The slots of the keys of modules in which some between are gone."""

    @property
    def stop(self) -> int:
        """The slot after its last token."""
        return self.start + self.length

    def keys(self, site: Site, count: int) -> Slots:
        """The slots of the `count` keys of an activation."""
        if site.crosses:
            return range(count)
        return self.places.get(site.module) or range(self.stop - count, self.stop)

    def slots(self, site: Site, count: int) -> Slots:
        """The slots of the `count` tokens of an activation, or of its keys if it has these alone."""
        return self.keys(site, count) if site.tokens is None else range(self.start, self.start + count)


@dataclass
class Kept:
    """What was kept of an activation in one pass."""

    value: mx.array
    at: Pass


@dataclass
class Text:
    """A text as one stack of blocks read it, in one pass or several."""

    passes: list[Pass] = field(default_factory=list)
    kept: dict[str, list[Kept]] = field(default_factory=dict)

    def keep(self, path: str, value: mx.array) -> None:
        """Keep what an activation is in this pass."""
        self.kept.setdefault(path, []).append(Kept(value, self.passes[-1]))

    @property
    def length(self) -> int:
        """Tokens, padding included."""
        return self.passes[-1].stop if self.passes else 0

    @property
    def ids(self) -> mx.array | None:
        """The ids of the text, (B, L), or None if it began before anybody watched."""
        told = [(one.start, one.ids) for one in self.passes if one.ids is not None]
        whole = len(told) == len(self.passes) and bool(told) and told[0][0] == 0
        return spliced(told, axis=1) if whole else None

    @property
    def left(self) -> list[int]:
        """Padding in front of each row of the batch."""
        return self.passes[0].left if self.passes else []

    def of(self, site: Site) -> mx.array:
        """What was kept of an activation in all passes together: token after token, keys by their place in the
        text."""
        kept = self.kept[site.path]
        if len(kept) == 1 or (site.tokens is None and site.keys is None):
            return kept[-1].value
        if site.tokens is not None:
            return spliced([(one.at.start, self._widened(one, site)) for one in kept], site.tokens)
        assert site.keys is not None
        return spliced([_stretch(one, site, whole=not i) for i, one in enumerate(kept)], site.keys)

    def keys(self, site: Site) -> range:
        """The slots of the keys that `of` gives: those of the encoder's text for cross-attention."""
        every = [_keys(one, site) for one in self.kept[site.path]]
        return range(min(keys[0] for keys in every), max(keys[-1] for keys in every) + 1)

    def _widened(self, kept: Kept, site: Site) -> mx.array:
        """Keys of one pass among those of all passes: where it had none, what hidden keys have."""
        return kept.value if site.keys is None else _among(kept, site, self.keys(site))


def _keys(kept: Kept, site: Site) -> Slots:
    """The slots of the keys that one pass saw."""
    assert site.keys is not None
    return kept.at.keys(site, kept.value.shape[site.keys])


def _among(kept: Kept, site: Site, every: range) -> mx.array:
    """Keys of one pass among `every` one: those that it did not see have no weight, and scores of minus infinity."""
    have, axis = _keys(kept, site), site.keys
    assert axis is not None
    if have == every:
        return kept.value
    index = mx.full(len(every), len(have))
    index[slot_array(have) - every.start] = mx.arange(len(have))
    behind = [(0, int(i == axis)) for i in range(kept.value.ndim)]
    blank = -mx.inf if site.kind == "scores" else 0
    return mx.take(mx.pad(kept.value, behind, constant_values=blank), index, axis=axis)


def _stretch(kept: Kept, site: Site, *, whole: bool) -> tuple[int, mx.array]:
    """Where the keys of one pass begin, and they themselves; of keys with a gap between them those behind it, or the
    `whole` of them with zeros in the gap."""
    keys, axis = _keys(kept, site), site.keys
    assert axis is not None
    if isinstance(keys, range):
        return keys[0], kept.value
    if whole:
        return 0, _among(kept, site, range(keys[-1] + 1))
    first = next(i for i, key in enumerate(keys) if key != i)
    return keys[first], mx.split(kept.value, [first], axis=axis)[1]


def spliced(pieces: list[tuple[int, mx.array]], axis: int) -> mx.array:
    """Pieces that begin at the given slots, put together; a later one replaces what earlier ones say of its slots and
    those behind it.

    >>> spliced([(0, mx.array([1, 2, 3])), (2, mx.array([7])), (3, mx.array([8, 9]))], axis=0).tolist()
    [1, 2, 7, 8, 9]
    """
    parts = []
    for i, (start, value) in enumerate(pieces):
        after = min((later for later, _ in pieces[i + 1 :]), default=start + value.shape[axis])
        count = min(after - start, value.shape[axis])
        if count > 0:
            parts.append(mx.split(value, [count], axis=axis)[0] if count < value.shape[axis] else value)
    return mx.concatenate(parts, axis=axis)


def told(sites: Sequence[Site]) -> set[str]:
    """The paths of all that tells a `Reader` where tokens stand."""
    starts = {site.path for site in sites if site.kind in ("ids", "slots", "left")}
    return starts | {f"{site.module}.places" for site in sites if site.keys is not None}


class Reader:
    """Keeps track of the text that each stack of blocks reads.

    An embedding tells its `slots` and `ids` before it is known which stack they are for; then the stack tells its
    `slots` and how much padding is `left`. Attention tells the `places` of keys that are not simply the last ones.
    """

    def __init__(self) -> None:
        self.texts: dict[str, Text] = {}
        self.latest = ""
        """The stack that ran last."""
        self._ids: mx.array | None = None
        self._start, self._length = 0, 0
        self._early: list[tuple[str, mx.array]] = []

    def heard(self, path: str, value: mx.array) -> None:
        """Take notice of an activation that tells where the tokens stand."""
        module, _, kind = path.rpartition(".")
        if kind == "ids":
            self._ids = value
        elif kind == "left":
            self.texts[module].passes[-1].left = cast(list[int], value.tolist())
        elif kind == "places":
            self.texts[self.latest].passes[-1].places[module] = tuple(cast(list[int], value.tolist()))
        else:
            self._start, self._length = cast(int, value[0].item()) if value.size else 0, value.size
            if module in STACKS:
                self._begin(module)

    def _begin(self, stack: str) -> None:
        if self._start == 0 or stack not in self.texts:
            self.texts[stack] = Text()
        text, self.latest = self.texts[stack], stack
        text.passes.append(Pass(self._start, self._length, self._ids, []))
        for path, value in self._early:
            text.keep(path, value)
        self._early = []

    def now(self, stack: str) -> Pass:
        """The pass that a stack is in; for what belongs to none, the pass that begins or the one that ends."""
        text = self.texts.get(stack)
        return Pass(self._start, self._length, self._ids, []) if text is None else text.passes[-1]

    def keep(self, site: Site, value: mx.array) -> None:
        """Keep an activation with the text that it belongs to."""
        if site.path.startswith(EARLY):
            self._early.append((site.path, value))
        elif site.stack in self.texts:
            self.texts[site.stack].keep(site.path, value)
        elif self.latest:
            self.texts[self.latest].keep(site.path, value)

    def of(self, path: str) -> Text | None:
        """The text that has an activation; where two have, that of the decoder."""
        held = [text for _, text in sorted(self.texts.items()) if path in text.kept]
        return held[0] if held else None

    @property
    def main(self) -> Text | None:
        """The text that the model reads, or that of the decoder where there are two."""
        return self.texts.get("decoder") or self.texts.get(self.latest)
