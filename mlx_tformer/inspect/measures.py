"""What can be said of a pattern in one number a row, and attention through all layers: rollout and flow."""

from collections import deque
from itertools import pairwise
from typing import cast

import mlx.core as mx

from ..errors import UsageError
from .sites import main_stack
from .trace import Trace, check_row, deficit

NOTHING = 1e-9
"""Room in an edge that is rounding."""
MOST = 256
"""Tokens for which `flow` is computed: it looks at each pair in each layer."""


def entropy(pattern: mx.array) -> mx.array:
    """The entropy of each row of a pattern (..., L, S) in nats, (..., L): 0 where one key has everything. The mass of a
    learned sink counts as one more key.

    >>> entropy(mx.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [0.0, 0.6931471824645996]
    """
    rest = mx.maximum(deficit(pattern), 0)
    whole = mx.concatenate([pattern, mx.where(pattern.sum(axis=-1) > 0, rest, 0)[..., None]], axis=-1)
    return mx.where(whole > 0, whole * -mx.log(mx.maximum(whole, 1e-38)), 0).sum(axis=-1)


def distance(pattern: mx.array, *, first_query: int | None = None, first_key: int = 0) -> mx.array:
    """How far back each row of a pattern (..., L, S) looks on average, in tokens, (..., L): its mass on keys decides; a
    row without any has 0. The last query stands at the last key, unless it is said where they begin.

    >>> distance(mx.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [0.0, 0.5]
    """
    length, keys = pattern.shape[-2:]
    start = first_key + keys - length if first_query is None else first_query
    apart = mx.abs(mx.arange(start, start + length)[:, None] - mx.arange(first_key, first_key + keys))
    mass = pattern.sum(axis=-1)
    return mx.where(mass > 0, (pattern * apart).sum(axis=-1) / mx.maximum(mass, 1e-30), 0)


def sink_mass(pattern: mx.array, tokens: int = 1) -> mx.array:
    """What each row of a pattern (..., L, S) gives to the first `tokens` keys and to a learned sink, (..., L)."""
    seen = pattern.sum(axis=-1)
    return pattern[..., :tokens].sum(axis=-1) + mx.where(seen > 0, 1 - seen, 0)


def rollout(t: Trace, *, residual: float = 0.5) -> mx.array:
    """Attention rollout (Abnar and Zuidema 2020, arXiv 2005.00928): (layers, B, L, L), row i of layer n how much of
    each input token has come to token i after that layer.

    The mean pattern of a layer's heads is mixed with the residual connection (`residual` of it), and layers are
    multiplied; those without attention, as state spaces, are passed over. Raises UsageError for a trace without the
    patterns of all layers of a whole text.
    """
    found, so_far = [], None
    for mixed in _mixed(t, residual):
        so_far = mixed if so_far is None else mixed @ so_far
        found.append(so_far)
    return mx.stack(found)


def flow(t: Trace, *, position: int = -1, row: int = 0, residual: float = 0.5) -> list[float]:
    """Attention flow (Abnar and Zuidema 2020, arXiv 2005.00928): for each input token the most that can flow from the
    token at `position` of the last layer down to it, each weight of the patterns being a capacity.

    Raises UsageError as `rollout` does, and for texts of more than 256 tokens.
    """
    found = _mixed(t, residual)
    check_row(row, found[0].shape[0])
    layers = [cast(list[list[float]], mixed[row].tolist()) for mixed in found]
    length = len(layers[0])
    if length > MOST:
        raise UsageError(f"flow: found a text of {length} tokens, expected at most {MOST}; use rollout")
    if not -length <= position < length:
        raise UsageError(f"position: found {position}, expected one of {length}")
    graph = _graph(layers)
    source = len(layers) * length + position % length
    return [most(graph, source, token) for token in range(length)]


def _mixed(t: Trace, residual: float) -> list[mx.array]:
    """The mean pattern of each layer and the residual connection, with rows that sum to one, (B, L, L)."""
    if not 0 <= residual <= 1:
        raise UsageError(f"residual: found {residual}, expected 0 to 1")
    stack = main_stack(t.lm.model)
    names = [site.name for site in t.sites if site.kind == "pattern" and site.stack == stack and not site.crosses]
    missing = next((name for name in names if name not in t.names), None)
    if missing is not None or not names:
        raise UsageError(f'{missing or "patterns"}: not read; trace with read=["attn.pattern"]')
    mixed = []
    for name in names:
        pattern = t[name].mean(axis=1)
        length, keys = pattern.shape[-2:]
        if length != keys:
            raise UsageError(f"{name}: found {length} queries and {keys} keys, expected those of a whole text")
        pattern = pattern / mx.maximum(pattern.sum(axis=-1, keepdims=True), 1e-30)
        whole = residual * mx.eye(length) + (1 - residual) * pattern
        mixed.append(whole / whole.sum(axis=-1, keepdims=True))
    return mixed


Graph = dict[int, dict[int, float]]


def _graph(layers: list[list[list[float]]]) -> Graph:
    """Node n · L + i is token i after n layers; edges lead from a token to what it looked at."""
    length = len(layers[0])
    graph: Graph = {node: {} for node in range((len(layers) + 1) * length)}
    for n, weights in enumerate(layers):
        for i, row in enumerate(weights):
            for j, weight in enumerate(row):
                if weight > 0:
                    graph[(n + 1) * length + i][n * length + j] = weight
    return graph


def most(graph: Graph, source: int, sink: int) -> float:
    """The largest flow from one node to another (Dinic 1970): blocking flows along shortest paths.

    >>> most({0: {1: 0.5, 2: 0.5}, 1: {3: 0.2}, 2: {3: 1.0}, 3: {}}, 0, 3)
    0.7
    """
    rest: Graph = {node: dict(edges) for node, edges in graph.items()}
    for node, ends in graph.items():
        for to in ends:
            rest[to].setdefault(node, 0.0)
    total = 0.0
    while (level := _levels(rest, source)).get(sink) is not None:
        edges = {node: list(to) for node, to in rest.items()}
        while (pushed := _push(rest, level, edges, source, sink)) > 0:
            total += pushed
    return total


def _levels(rest: Graph, source: int) -> dict[int, int]:
    level, waiting = {source: 0}, deque([source])
    while waiting:
        node = waiting.popleft()
        for to, room in rest[node].items():
            if room > NOTHING and to not in level:
                level[to] = level[node] + 1
                waiting.append(to)
    return level


def _push(rest: Graph, level: dict[int, int], edges: dict[int, list[int]], source: int, sink: int) -> float:
    """One path of the blocking flow; returns what went along it, 0 if there is none left. Edges that lead nowhere
    leave `edges`."""
    path = [source]
    while path:
        node = path[-1]
        if node == sink:
            amount = min(rest[a][b] for a, b in pairwise(path))
            for a, b in pairwise(path):
                rest[a][b] -= amount
                rest[b][a] += amount
            return amount
        ahead = edges[node]
        while ahead and not (rest[node][ahead[-1]] > NOTHING and level.get(ahead[-1]) == level[node] + 1):
            ahead.pop()
        if ahead:
            path.append(ahead[-1])
        else:
            path.pop()
            if path:
                edges[path[-1]].pop()
    return 0.0
