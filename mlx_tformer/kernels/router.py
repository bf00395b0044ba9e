"""The router of a mixture of experts in one launch, where plain operations take a dozen.

Scores by softmax or sigmoid, a correction that takes part in the choice alone (DeepSeek V3, arXiv 2412.19437), groups
of which few may be used, the best experts, and their weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from .launch import Kernel, Place, place

KERNEL = Kernel("router", ("logits", "correction", "scale"), ("weights", "chosen"))
MOST_EXPERTS, MOST_TOP, MOST_GROUPS = 512, 32, 32
SCORES: dict[str, Callable[[mx.array], mx.array]] = {
    "none": lambda logits: logits,
    "softmax": lambda logits: mx.softmax(logits, axis=-1),
    "sigmoid": mx.sigmoid,
}
"""What turns logits into scores, in the order in which the kernel counts them."""


@dataclass(frozen=True)
class Rules:
    """How a router chooses `top` experts and weighs them: see `nn.Router`.

    groups: how many there are, how many of them may be used, and how many of a group's best scores say what it is
    worth.
    """

    top: int
    score: str = "softmax"
    after: str = "none"
    normalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int, int] = (1, 1, 1)


def chosen_route(where: Place, tokens: int, experts: int, rules: Rules) -> bool:
    """True if the kernel does it.

    >>> chosen_route("metal", 1, 256, Rules(8)), chosen_route("cpu", 1, 256, Rules(8))
    (True, False)
    """
    count, _, best = rules.groups
    fits = experts <= MOST_EXPERTS and rules.top <= MOST_TOP and count <= MOST_GROUPS and best <= experts // count
    return where != "cpu" and tokens > 0 and fits


def worth_routing(tokens: int, experts: int, rules: Rules) -> bool:
    """`chosen_route`, here and now."""
    return chosen_route(place(), tokens, experts, rules)


def route(logits: mx.array, rules: Rules, correction: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Logits (N, E) in float32 and a correction (E,) -> weights (N, top) and numbers (N, top) of the chosen experts,
    the best first and the first of equals first; with the gradient of the twin, to which the choice is a constant."""
    tokens, experts = logits.shape
    count, keep, best = rules.groups
    names = list(SCORES)

    def fused(logits: mx.array) -> list[mx.array]:
        return KERNEL(
            [logits, _none() if correction is None else correction.astype(mx.float32), _scalar(rules.scale)],
            template={
                "EXPERTS": experts,
                "TOP": rules.top,
                "SCORE": names.index(rules.score),
                "AFTER": names.index(rules.after),
                "NORMALISE": rules.normalise,
                "CORRECTED": correction is not None,
                "GROUPS": count,
                "KEEP": keep,
                "BEST": best,
            },
            grid=(32, tokens, 1),
            group=(32, min(tokens, 4), 1),
            outputs=[((tokens, rules.top), mx.float32), ((tokens, rules.top), mx.uint32)],
        )

    function = mx.custom_function(fused)

    @function.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> Any:
        logits = primals[0] if isinstance(primals, (tuple, list)) else primals
        _, gradient = mx.vjp(lambda x: [_weights(SCORES[rules.score](x), outputs[1], rules)], [logits], [cotangents[0]])
        return gradient[0]

    found: Any = function(logits)
    return found[0], found[1]


def plain_route(logits: mx.array, rules: Rules, correction: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """The same in plain operations."""
    scores = SCORES[rules.score](logits)  # (N, E)
    choice = scores if correction is None else scores + correction.astype(mx.float32)
    count, keep, best = rules.groups
    if count > 1:
        groups = mx.unflatten(choice, -1, (count, -1))  # (N, G, E / G)
        worth = mx.topk(groups, best, axis=-1).sum(axis=-1)
        rank = mx.argsort(mx.argsort(-worth, axis=-1), axis=-1)
        choice = mx.where((rank < keep)[..., None], groups, -mx.inf).flatten(-2)
    chosen = mx.stop_gradient(mx.argsort(-choice, axis=-1)[..., : rules.top])
    return _weights(scores, chosen, rules), chosen


def _weights(scores: mx.array, chosen: mx.array, rules: Rules) -> mx.array:
    """The weights (N, top) of chosen experts."""
    weights = SCORES[rules.after](mx.take_along_axis(scores, chosen, axis=-1))
    if rules.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * rules.scale


@lru_cache(maxsize=1)
def _none() -> mx.array:
    return mx.zeros((1,))


@lru_cache(maxsize=64)
def _scalar(value: float) -> mx.array:
    return mx.array(value, mx.float32)
