"""Where an edit applies: layers, heads, positions of a text, keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import mlx.core as mx

from ..errors import UsageError
from ..nn.spectator import Slots
from .sites import Site
from .texts import Pass

Numbers = int | Sequence[int]
Heads = Numbers | Mapping[int, Numbers]
Positions = Numbers | slice | Mapping[int, int]


class Where(TypedDict, total=False):
    """Keywords that all edits take.

    layers: numbers of layers. heads: numbers of heads in all layers, or for each layer; key heads for keys and values.
    positions: places in the text, counted from its beginning, padding too, or from the end of what is read in one
    call (-1: the last token; in generation each new one). keys: the same for the keys of a pattern or of scores.
    Left out: everywhere.
    """

    layers: Numbers
    heads: Heads
    positions: Positions
    keys: Numbers | slice


@dataclass
class Places:
    """The places of one edit, and which of its positions have come up."""

    where: Where
    waiting: set[int] = field(default_factory=set)
    touched: bool = False

    def __post_init__(self) -> None:
        positions = self.where.get("positions")
        self.waiting = set() if positions is None or isinstance(positions, slice) else set(listed(positions))

    @property
    def moved(self) -> Mapping[int, int] | None:
        """Position -> position in the source, where a patch comes from elsewhere."""
        positions = self.where.get("positions")
        return positions if isinstance(positions, Mapping) else None

    def sites(self, found: Sequence[Site], name: str) -> list[Site]:
        """Those of the sites that stand in the layers asked for; raises UsageError for a layer that has none."""
        heads, layers = self.where.get("heads"), self.where.get("layers")
        if isinstance(heads, Mapping):
            if layers is not None and set(listed(layers)) != set(heads):
                raise UsageError(f"{name}: found layers {layers} and heads of layers {list(heads)}; give one of them")
            layers = list(heads)
        if heads is not None and not all(site.heads is not None for site in found):
            raise UsageError(f"{name}: found heads, but it has none")
        if "keys" in self.where and not all(site.tokens is not None and site.keys is not None for site in found):
            raise UsageError(f"{name}: found keys, but only patterns and scores have them; use positions")
        if layers is None:
            return list(found)
        missing = set(listed(layers)) - {site.layer for site in found}
        if missing or not listed(layers):
            have = ", ".join(sorted({str(site.layer) for site in found}, key=lambda n: (len(n), n)))
            raise UsageError(f"{name}: found layers {sorted(missing)}, expected some of {have}")
        return [site for site in found if site.layer in listed(layers)]

    def chosen(self, value: mx.array, site: Site, now: Pass) -> mx.array | None:
        """Booleans that broadcast to an activation (B, ...), True where the edit applies; None: everywhere."""
        parts = [self._heads(value, site), self._positions(value, site, now), self._keys(value, site, now)]
        kept = [part for part in parts if part is not None]
        mask = None
        for part in kept:
            mask = part if mask is None else mask & part
        self.touched |= mask is None or bool(mx.any(mask).item())
        return mask

    def _heads(self, value: mx.array, site: Site) -> mx.array | None:
        heads = self.where.get("heads")
        if heads is None or site.heads is None:
            return None
        if isinstance(heads, Mapping):
            assert site.layer is not None
            heads = heads[site.layer]
        count = value.shape[site.heads]
        wrong = [head for head in listed(heads) if not 0 <= head < count]
        if wrong:
            raise UsageError(f"{site.name}: found head {wrong[0]}, expected 0 to {count - 1}")
        return _along(site.heads, value, [i in listed(heads) for i in range(count)])

    def _positions(self, value: mx.array, site: Site, now: Pass) -> mx.array | None:
        positions, axis = self.where.get("positions"), site.keys if site.tokens is None else site.tokens
        if positions is None:
            return None
        if axis is None:
            raise UsageError(f"{site.name}: found positions, but it has none")
        count = value.shape[axis]
        slots = now.slots(site, count)
        hits = [_hit(positions, slots, i) for i in range(count)]
        self.waiting -= {hit for hit in hits if hit is not None}
        return _along(axis, value, [hit is not None for hit in hits])

    def _keys(self, value: mx.array, site: Site, now: Pass) -> mx.array | None:
        keys = self.where.get("keys")
        if keys is None or site.keys is None:
            return None
        count = value.shape[site.keys]
        slots = now.keys(site, count)
        return _along(site.keys, value, [_hit(keys, slots, i) is not None for i in range(count)])


def listed(numbers: Numbers | Mapping[int, int]) -> list[int]:
    """One number or several, as a list."""
    return [numbers] if isinstance(numbers, int) else list(numbers)


def _hit(positions: Positions, slots: Slots, index: int) -> int | None:
    """The position asked for that the token at `index` of a pass stands at."""
    slot, back = slots[index], index - len(slots)
    if isinstance(positions, slice):
        if min(positions.start or 0, 0 if positions.stop is None else positions.stop) < 0:
            raise UsageError(f"positions: found {positions}, expected a slice that counts from the beginning")
        after = positions.stop is not None and slot >= positions.stop
        return None if slot < (positions.start or 0) or after else slot
    asked = listed(positions)
    return slot if slot in asked else back if back in asked else None


def _along(axis: int, value: mx.array, flags: list[bool]) -> mx.array:
    """Flags along one axis, ready to broadcast."""
    return mx.array(flags).reshape([-1 if i == axis else 1 for i in range(value.ndim)])
