"""What a classifier says: names, with how likely they are."""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from .config import Config

SEVERAL = "multi_label_classification"
ACTIVATIONS = {"Identity": False, "Sigmoid": True}
"""torch's classes that say what becomes of the logits of a cross-encoder, and whether that is a sigmoid."""


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


def scores(logits: mx.array, config: Config) -> mx.array:
    """Logits (N, labels) as sentence-transformers' CrossEncoder gives them: its own settings in the config say whether
    they become sigmoids; where they say nothing, those of a single label do.

    Raises BadInput for settings that ask for something else.
    """
    inside = config.values.get("sentence_transformers")
    names = [config.values.get("sbert_ce_default_activation_function")]
    names += [inside.get("activation_fn")] if isinstance(inside, dict) else []
    named = next((name for name in names if name is not None), "Sigmoid" if logits.shape[1] == 1 else "Identity")
    kind = str(named).rpartition(".")[2]
    if kind not in ACTIVATIONS:
        raise config.wrong("sbert_ce_default_activation_function", f"one of torch's {', '.join(ACTIVATIONS)}")
    return mx.sigmoid(logits) if ACTIVATIONS[kind] else logits
