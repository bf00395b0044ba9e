"""Cases of attention for the tests of its kernel: random shapes, and every rule of who sees whom and what is added."""

import random as python_random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from float64 import random

from mlx_tformer.kernels import Asked, Buckets, Sight, Slopes

ROWS = mx.array([3, 3, 2, 2, 1, 0, 4, 5, 5])
"""A row of the table for each distance from -4 to 4."""

Shape = tuple[int, int, int, int, int]
"""B, H, K, L, S"""

OPTIONS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "softcap": lambda shape: {"softcap": 1.5},
    "alibi": lambda shape: {"distances": Slopes(tuple(2.0 ** -(1 + i) for i in range(shape[1])))},
    "buckets": lambda shape: {"distances": Buckets(random(6, shape[1], seed=7), ROWS)},
    "sinks": lambda shape: {"sinks": random(shape[1], seed=8)},
    "padding": lambda shape: {"left": mx.array([(3 * b + 1) % 5 for b in range(shape[0])])},
    "one mask": lambda shape: {"mask": random(shape[3], shape[4], seed=9) > -0.5},
    "masks of rows": lambda shape: {"mask": random(shape[0], 1, shape[3], shape[4], seed=9) > -0.5},
    "masks of heads": lambda shape: {"mask": random(shape[0], shape[1], shape[3], shape[4], seed=9) > -0.5},
    "masked keys": lambda shape: {"mask": random(shape[0], 1, 1, shape[4], seed=9) > -0.5},
}
SIGHTS = {
    "everything": Sight(),
    "causal": Sight(causal=True),
    "window": Sight(causal=True, window=4),
    "window alone": Sight(window=1),
    "around": Sight(reach=3),
    "itself": Sight(reach=0),
    "chunk": Sight(causal=True, chunk=5),
    "chunk of a later text": Sight(causal=True, chunk=6, first=8),
    "all": Sight(causal=True, window=7, reach=5, chunk=8, first=3),
}
SHAPES: list[Shape] = [
    (2, 6, 2, 3, 17),
    (1, 4, 4, 9, 9),
    (2, 5, 1, 1, 33),
    (1, 16, 1, 2, 5),
    (3, 2, 2, 7, 11),
    (1, 1, 1, 1, 1),
]


def asked(sight: str, options: list[str], shape: Shape) -> Asked:
    """A case in words; `shape` as in SHAPES."""
    given: dict[str, Any] = {}
    for name in options:
        given |= OPTIONS[name](shape)
    return Asked(0.3, SIGHTS[sight], **given)


def drawn(seed: int) -> tuple[Shape, str, list[str]]:
    """A case by chance, the same for the same seed."""
    dice = python_random.Random(seed)
    masks = dice.choice([[], [], ["one mask"], ["masks of rows"], ["masks of heads"], ["masked keys"]])
    biases = dice.choice([[], ["alibi"], ["buckets"]])
    others = [name for name in ("softcap", "sinks", "padding") if dice.random() < 0.5]
    return dice.choice(SHAPES), dice.choice(list(SIGHTS)), [*masks, *biases, *others]
