"""What a classifier says: names, with how likely they are."""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from .config import Config

SEVERAL = "multi_label_classification"


@dataclass(frozen=True)
class Label:
    """One of the answers of a classifier."""

    label: str
    probability: float
    logit: float
    index: int
    """Which of the logits it is."""


def labelled(logits: mx.array, config: Config, top: int | None = None) -> list[list[Label]]:
    """The answers to each row of logits (N, labels), the likeliest first; the `top` likeliest alone if that is given.

    Probabilities are a softmax over the labels, or sigmoids one by one where the config says that several can be right
    (`problem_type`) and where there is a single label.
    """
    names, several = config.labels, config.values.get("problem_type") == SEVERAL or logits.shape[1] == 1
    logits = logits.astype(mx.float32)
    shares = mx.sigmoid(logits) if several else mx.softmax(logits, axis=-1, precise=True)
    order = mx.argsort(-logits, axis=-1)[:, :top]
    rows = cast(list[list[list[float]]], [x.tolist() for x in (shares, logits)])
    return [
        [Label(names[i], rows[0][row][i], rows[1][row][i], i) for i in best]
        for row, best in enumerate(cast(list[list[int]], order.tolist()))
    ]
