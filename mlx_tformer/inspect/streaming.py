"""Statistics of attention without the pattern: what each query's row says, taken from the row and let go.

A pattern of n tokens has n × n weights for each head, but what one asks of it is often a few numbers a row. A row needs
its own scores alone, so `streamed` goes through the queries in blocks and holds the scores of one block at a time. Of
the scores s of a row, with lse = log Σ exp(s), the weights are p = exp(s - lse), and

    entropy = Σ p (lse - s),  mass of a span = Σ p over its keys,  distance = Σ p |i - j| / Σ p.

With learned sinks (gpt-oss) lse counts the sink's score as one more, the row of p sums to less than one, and what is
missing is what the sink takes; it is part of the entropy, and no key.

Two ways to the same numbers:

Written out: scores, then the sums. A kernel need not hold a row either: it goes over the keys in tiles with a running
maximum and running sums, which it scales whenever the maximum grows (the online softmax of Milakov and Gimelshein 2018,
arXiv 1805.02867, by which FlashAttention, Dao et al. 2022, arXiv 2205.14135, avoids the matrix).

Value probes: attention's output is Σ p v, whatever v is. With v one-hot in its span the fused kernel gives the mass of
each span, with v = 1 the sum of the row, and with v a key's place the mean place, exactly, and without any scores in
memory. As many probes fit into a pass as a key has features. They cannot give what is no weighted mean over keys: lse,
entropy, the largest weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from .. import kernels
from ..nn import Call, Places
from ..nn.attention import asked_of, booleans, fused, scores_of
from ..nn.spectator import Slots, slot_array
from .peaks import largest, places_of

if TYPE_CHECKING:
    from ..tokens import Spans

BLOCK = 2**20
"""Scores held at a time: 4 MB in float32, and a few times that while their sums are taken."""
LOWEST = -200.0
"""A score so far below the highest one of its row has no weight in float32, and the product with it is zero."""


@dataclass(frozen=True)
class Wants:
    """What to take of each row: see `Statistics`."""

    entropy: bool = True
    distance: bool = True
    top: int = 0
    spans: "Spans | None" = None
    received: bool = False

    @property
    def scores(self) -> bool:
        """True if something is wanted that probes cannot give."""
        return self.entropy or self.top > 0 or self.received


@dataclass(frozen=True)
class Statistics:
    """What the rows of a pattern say, in float32; places of keys are those in their text, padding left out.

    sink (B, H, L): what a learned sink takes; 0 without one. Where wanted, else None: logsumexp, entropy in nats, peak
    (the key with the largest weight, -1 for a query that sees nothing) and peak_weight, all (B, H, L); distance
    (B, H, L), the mean number of tokens between query and key; top_keys and top_weights (B, H, L, top), the largest
    weight first, -1 and 0 where there are fewer keys; mass (B, H, L, spans); received (B, H, S), the weights that a
    key is given by all queries together.
    """

    sink: mx.array
    logsumexp: mx.array | None = None
    entropy: mx.array | None = None
    peak: mx.array | None = None
    peak_weight: mx.array | None = None
    distance: mx.array | None = None
    top_keys: mx.array | None = None
    top_weights: mx.array | None = None
    mass: mx.array | None = None
    received: mx.array | None = None

    def arrays(self) -> dict[str, mx.array]:
        """Those that are there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def streamed(call: Call, wants: Wants) -> Statistics:
    """The statistics of one call of attention, in memory that grows with L + S and not with L × S.

    This is the one place that turns a call into statistics: a kernel that writes them itself takes its place.
    """
    exact = replace(call, q=call.q.astype(mx.float32), k=call.k.astype(mx.float32))
    if _kernel_suffices(exact, wants):
        return _by_kernel(exact, wants)
    take = _probed if probes_pay() and _probes_suffice(exact, wants) else _written_out
    rows: dict[str, list[mx.array]] = {}
    received = mx.zeros((*call.q.shape[:2], call.k.shape[2]))
    for block in _blocks(exact):
        found = take(block, wants).arrays()
        if wants.received:
            first = call.at.keys.index(block.at.keys[0])
            received[..., first : first + block.k.shape[2]] += found.pop("received")
        mx.eval(found, received)  # before the next block, so that the scores of this one are let go
        for name, value in found.items():
            rows.setdefault(name, []).append(value)
    joined = {name: mx.concatenate(values, axis=2) for name, values in rows.items()}
    mx.eval(joined)
    return Statistics(**joined, received=received if wants.received else None)


def _kernel_suffices(call: Call, wants: Wants) -> bool:
    """True if the kernel that takes statistics runs here and tells all that is wanted: it has masses of stretches of
    keys alone, and no sums over queries."""
    at = call.at
    aligned = isinstance(at.keys, range) and at.queries.stop == at.keys.stop and at.left is at.keys_left
    aligned = aligned and (at.left is None or at.left.ndim == 1)
    told = wants.spans is None and not wants.received and wants.top <= kernels.MOST_TOP
    return aligned and told and call.bias is None and kernels.place() != "cpu"


def _by_kernel(call: Call, wants: Wants) -> Statistics:
    """By the kernel, in one pass over the keys; its output is not looked at, and is kept narrow."""
    keys = kernels.Plain(call.k, call.k[..., :8])
    asked = asked_of(call.scale, call.mask, None, call.softcap, call.sinks)
    found = kernels.attention_statistics(call.q, keys, asked, kernels.Wanted(top=max(wants.top, 1)))
    assert found.top_keys is not None and found.top_weights is not None
    top = mx.where(found.top_keys < 0, -1, places_of(found.top_keys, call.at))
    lse = found.logsumexp
    sinks = None if call.sinks is None else call.sinks.astype(mx.float32)[:, None]
    some = wants.entropy
    return Statistics(
        sink=mx.zeros_like(lse) if sinks is None else mx.exp(sinks - lse),
        logsumexp=lse if some else None,
        entropy=found.entropy if some else None,
        peak=top[..., 0] if some else None,
        peak_weight=found.top_weights[..., 0] if some else None,
        distance=found.distance if wants.distance else None,
        top_keys=top if wants.top else None,
        top_weights=found.top_weights if wants.top else None,
    )


def probes_pay() -> bool:
    """True where there is a fused kernel: on a CPU MLX writes the scores out as well."""
    return mx.default_device() == mx.Device(mx.gpu)


def _probes_suffice(call: Call, wants: Wants) -> bool:
    """True if all that is wanted is a weighted mean over keys, of scores that the kernel can make."""
    return not wants.scores and call.softcap is None and (not wants.distance or _looks_back(call))


def _blocks(call: Call) -> Iterator[Call]:
    """The call in blocks of queries, each with the keys that it may see."""
    batch, heads, length, _ = call.q.shape
    size = max(1, BLOCK // max(batch * heads * call.k.shape[2], 1))
    if size >= length:
        yield call
        return
    for start in range(0, length, size):
        yield _part(call, start, min(start + size, length))


def _part(call: Call, start: int, stop: int) -> Call:
    """Queries `start` to `stop` of a call."""
    mask = call.mask if not isinstance(call.mask, mx.array) else _rows(call.mask, start, stop)
    first, last = 0, call.k.shape[2]
    if isinstance(mask, mx.array):
        first, last = _columns(mask)
    elif mask is not None:  # causal
        last -= call.q.shape[2] - stop
    keys = slice(first, last)
    return replace(
        call,
        q=call.q[:, :, start:stop],
        k=call.k[:, :, keys],
        mask=mask[..., keys] if isinstance(mask, mx.array) else mask,
        bias=None if call.bias is None else _rows(call.bias, start, stop)[..., keys],
        at=replace(call.at, queries=call.at.queries[start:stop], keys=call.at.keys[keys]),
    )


def _rows(x: mx.array, start: int, stop: int) -> mx.array:
    """Rows of (..., L, S), or all of (..., 1, S), which counts for each query."""
    return x if x.shape[-2] == 1 else x[..., start:stop, :]


def _columns(mask: mx.array) -> tuple[int, int]:
    """Where the keys begin and end that somebody sees, and one key if nobody sees any."""
    seen = mask.any(axis=tuple(range(mask.ndim - 1)))
    places = mx.where(seen, mx.arange(seen.size), seen.size)
    first, last = places.min().item(), mx.where(seen, places, 0).max().item()
    assert isinstance(first, int) and isinstance(last, int)
    return min(first, last), last + 1


def _looks_back(call: Call) -> bool:
    """True if no query sees a key behind it, so that a mean place gives the mean distance."""
    same = call.at.left is call.at.keys_left
    return same and (call.mask == "causal" if isinstance(call.mask, str) else call.at.keys[-1] <= call.at.queries[0])


def _written_out(call: Call, wants: Wants) -> Statistics:
    """By the scores of all queries in the call, (B, H, L, S)."""
    scores = scores_of(call.q * call.scale, call.k, _added(call), call.softcap)
    sinks = None if call.sinks is None else call.sinks.astype(mx.float32)[:, None, None]
    highest = scores.max(axis=-1, keepdims=True)
    highest = highest if sinks is None else mx.maximum(highest, sinks)
    highest = mx.where(mx.isinf(highest), 0, highest)  # a query that sees nothing
    below = mx.maximum(scores - highest, LOWEST)
    shares = mx.exp(below)  # their sum makes weights of them
    taken = mx.zeros_like(highest) if sinks is None else mx.exp(sinks - highest)
    total = shares.sum(axis=-1, keepdims=True) + taken  # (B, H, L, 1)
    weights = shares / mx.where(total > 0, total, 1)
    found = {"sink": (taken / mx.where(total > 0, total, 1))[..., 0]}
    if wants.top or wants.entropy:
        keys, largest_weights = largest(weights, max(wants.top, 1), call.at)
    if wants.entropy:
        found |= {"peak": keys[..., 0], "peak_weight": largest_weights[..., 0]}
        found["logsumexp"] = (highest + mx.log(total))[..., 0]
        spent = (weights * below).sum(axis=-1)  # Σ p (s - highest)
        spent = spent if sinks is None else spent + found["sink"] * (sinks - highest)[..., 0]
        found["entropy"] = mx.where(total > 0, mx.log(total), 0)[..., 0] - spent
    if wants.distance:
        found["distance"] = _mean((weights * _distances(call.at)).sum(axis=-1), weights.sum(axis=-1))
    if wants.top:
        found |= {"top_keys": keys, "top_weights": largest_weights}
    if wants.spans is not None:
        found["mass"] = weights @ wants.spans.one_hot(_places(call.at.keys, call.at.keys_left))
    if wants.received:
        found["received"] = weights.sum(axis=2)
    return Statistics(**found)


def _added(call: Call) -> mx.array | None:
    """What is added to the scores, -inf where a key is hidden: one pass over them, where a choice takes several."""
    seen = booleans(call.mask, call.q, call.k)
    if seen is None:
        return call.bias
    hidden = mx.where(seen, 0, -mx.inf)
    return hidden if call.bias is None else call.bias + hidden


def _probed(call: Call, wants: Wants) -> Statistics:
    """By value probes: the sum of each row, the mean place of the keys, the mass of each span."""
    keys = _places(call.at.keys, call.at.keys_left)[..., None]  # (1, S, 1) or (B, 1, S, 1)
    here = call.at.queries[-1]
    here_in_text = here if call.at.left is None else here - call.at.left[:, None, None, None]
    columns = [mx.ones_like(keys).astype(mx.float32)]
    if wants.distance:
        columns.append((here_in_text - keys).astype(mx.float32))  # from a place nearby, so that few digits are lost
    if wants.spans is not None:
        columns.append(wants.spans.one_hot(keys[..., 0]))
    found = _through(call, mx.concatenate(columns, axis=-1))  # (B, H, L, probes)
    total, places, mass = mx.split(found, [1, 1 + wants.distance], axis=-1)
    sink = mx.zeros_like(total) if call.sinks is None else 1 - total
    if wants.distance:
        back = mx.arange(len(call.at.queries))[::-1].astype(mx.float32)  # from each query to the last
        distance = _mean(places[..., 0] - total[..., 0] * back, total[..., 0])
    return Statistics(
        sink=sink[..., 0],
        distance=distance if wants.distance else None,
        mass=None if wants.spans is None else mass,
    )


def _through(call: Call, probes: mx.array) -> mx.array:
    """Attention over probes (1, S, N) or (B, 1, S, N) for values, as many of them at a time as a key has features."""
    batch, kv_heads, keys, width = call.k.shape
    outputs = []
    for start in range(0, probes.shape[-1], width):
        some = probes[..., start : start + width]
        padding = [(0, 0)] * (some.ndim - 1) + [(0, width - some.shape[-1])]  # kernels want values as wide as keys
        v = mx.broadcast_to(mx.pad(some, padding), (batch, kv_heads, keys, width))
        outputs.append(fused(call.q, call.k, v, call.scale, call.mask, call.bias, call.sinks))
    return mx.concatenate(outputs, axis=-1)[..., : probes.shape[-1]]


def _places(tokens: Slots, left: mx.array | None) -> mx.array:
    """Places in the text: (1, S), or (B, 1, S) where padding stands in front; negative in padding."""
    places = slot_array(tokens)
    return places[None] if left is None else places - left[:, None, None]


def _distances(at: Places) -> mx.array:
    """Tokens between each query and each key: (1, L, S), or (B, 1, L, S) where padding stands in front."""
    queries, keys = _places(at.queries, at.left), _places(at.keys, at.keys_left)
    return mx.abs(queries[..., None] - keys[..., None, :]).astype(mx.float32)


def _mean(weighted: mx.array, total: mx.array) -> mx.array:
    return mx.where(total > 0, weighted / mx.where(total > 0, total, 1), 0)


def statistics_of(
    pattern: mx.array, wants: Wants | None = None, at: Places | None = None, *, sinks: bool = False
) -> Statistics:
    """The same of a pattern (B, H, L, S) that is there, as a trace shows it: the long way, which specifies the others.

    at: where queries and keys stand; None: the queries are the last tokens of the keys' text. sinks: the layer has
    learned sinks, which take what a row leaves to one. There are no scores to give a logsumexp.

    >>> found = statistics_of(mx.array([[[[1.0, 0.0], [0.5, 0.5]]]]))
    >>> [round(x, 4) for x in found.entropy[0, 0].tolist()], found.distance[0, 0].tolist()
    ([0.0, 0.6931], [0.0, 0.5])
    """
    wants = Wants() if wants is None else wants
    at = Places.plain(*pattern.shape[2:]) if at is None else at
    total = pattern.sum(axis=-1)
    sink = mx.maximum(1 - total, 0) if sinks else mx.zeros_like(total)
    order = mx.argsort(-pattern, axis=-1)[..., : max(wants.top, 1)]
    weights = mx.take_along_axis(pattern, order, axis=-1)
    place = _places(at.keys, at.keys_left)
    keys = mx.where(
        weights > 0, mx.take_along_axis(mx.broadcast_to(place[..., None, :], pattern.shape), order, axis=-1), -1
    )
    return Statistics(
        sink=sink,
        entropy=_surprise(pattern).sum(axis=-1) + _surprise(sink) if wants.entropy else None,
        peak=keys[..., 0] if wants.entropy else None,
        peak_weight=weights[..., 0] if wants.entropy else None,
        distance=_mean((pattern * _distances(at)).sum(axis=-1), total) if wants.distance else None,
        top_keys=keys if wants.top else None,
        top_weights=weights if wants.top else None,
        mass=None if wants.spans is None else pattern @ wants.spans.one_hot(place),
        received=pattern.sum(axis=2) if wants.received else None,
    )


def _surprise(share: mx.array) -> mx.array:
    """-p log p, and 0 for 0."""
    return mx.where(share > 0, -share * mx.log(mx.where(share > 0, share, 1)), 0)
