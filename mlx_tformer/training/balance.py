"""Keeping the experts of a mixture busy alike: losses, a bias that is moved, and reports of who is.

`routing` listens to the routers of whatever runs in its block, so nothing has to be threaded through a model:

>>> import mlx_tformer as mt
>>> lm = mt.build("mixtral", dim=16, layers=2, heads=2, experts=4)
>>> with routing() as seen:
...     _ = lm.model(mx.array([[1, 2, 3]]))
>>> {path: load.shape for path, load in seen.load().items()}
{'decoder.layers.0.mlp.op.router': (4,), 'decoder.layers.1.mlp.op.router': (4,)}
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from ..nn import Router, watch


def load_balancing_loss(logits: mx.array, chosen: mx.array, *, real: mx.array | None = None) -> mx.array:
    """E · Σ f_i · p_i of a router's logits (N, E) and the experts chosen (N, top): smallest where load is even.

    p_i is the mean probability of expert i, a softmax over the logits, through which the gradient goes; f_i is the
    number of choices of expert i for each token. For one expert a token this is equation 4 of Switch Transformers
    (Fedus et al. 2021, arXiv 2101.03961), without its factor α, and even load gives 1. For several every choice counts
    whole, as transformers has it for Mixtral, and even load gives `top`. real (N,) is False for padding.
    """
    probabilities = mx.softmax(_wide(logits), axis=-1)
    picked = (chosen[..., None] == mx.arange(logits.shape[-1])).sum(axis=-2)  # (N, E)
    weights = _weights(real, probabilities)
    share, probability = ((weights * x).sum(axis=0) for x in (picked.astype(probabilities.dtype), probabilities))
    return logits.shape[-1] * (share * probability).sum() / weights.sum() ** 2


def router_z_loss(logits: mx.array, *, real: mx.array | None = None) -> mx.array:
    """The mean of log(Σ exp(logits))² over the tokens of a router's logits (N, E), which keeps logits small (ST-MoE,
    Zoph et al. 2022, arXiv 2202.08906, equation 5). real (N,) is False for padding."""
    wide = _wide(logits)
    weights = _weights(real, wide)[:, 0]
    return (weights * mx.logsumexp(wide, axis=-1) ** 2).sum() / weights.sum()


def expert_load(chosen: mx.array, count: int, *, real: mx.array | None = None) -> mx.array:
    """The share of all choices (N, top) that fell on each of `count` experts, (E,); they sum to 1.

    >>> expert_load(mx.array([[0, 2], [2, 3]]), 4).tolist()
    [0.25, 0.0, 0.5, 0.25]
    """
    picked = (chosen[..., None] == mx.arange(count)).sum(axis=-2).astype(mx.float32)
    picked = picked * _weights(real, picked)
    return picked.sum(axis=0) / picked.sum()


@dataclass
class Routing:
    """What the routers did in one pass, by their paths."""

    real: mx.array | None = None
    """False for padding, (N,)."""
    logits: dict[str, mx.array] = field(default_factory=dict)
    """(N, E)"""
    chosen: dict[str, mx.array] = field(default_factory=dict)
    """(N, top)"""
    kept: dict[str, mx.array] = field(default_factory=dict)
    """Which choices an expert of bounded capacity had room for, by the path of the mixture, (N, top) booleans."""

    def balancing_loss(self) -> mx.array:
        """The mean of `load_balancing_loss` over the layers that have experts."""
        losses = [load_balancing_loss(x, self.chosen[at], real=self.real) for at, x in self.logits.items()]
        return mx.stack(losses).mean()

    def z_loss(self) -> mx.array:
        """The mean of `router_z_loss` over the layers that have experts."""
        return mx.stack([router_z_loss(x, real=self.real) for x in self.logits.values()]).mean()

    def load(self) -> dict[str, mx.array]:
        """The share of the choices of each layer that fell on each expert, (E,)."""
        return {at: expert_load(self.chosen[at], x.shape[-1], real=self.real) for at, x in self.logits.items()}

    def dropped(self) -> dict[str, mx.array]:
        """The share of the choices that experts had no room for, by the path of each mixture with a capacity."""
        return {at: _share(~kept, self.real) for at, kept in self.kept.items()}


@contextmanager
def routing(real: mx.array | None = None) -> Iterator[Routing]:
    """What the routers of a model do inside the block; of several passes the last. `real` (B, L) is False for padding.

    The arrays belong to the pass, so losses made of them inside `mx.value_and_grad` have gradients.
    """
    found = Routing(None if real is None else real.flatten())

    def see(path: str, value: mx.array) -> None:
        router, _, name = path.rpartition(".")
        (found.logits if name == "logits" else found.chosen)[router] = value

    def see_kept(path: str, value: mx.array) -> None:
        found.kept[path.removesuffix(".kept")] = value.flatten(0, 1)  # (B, L, top) -> (N, top)

    with watch("*router.logits", see), watch("*router.chosen", see), watch("*.kept", see_kept):
        yield found


def move_corrections(model: nn.Module, load: dict[str, mx.array], rate: float = 1e-3) -> None:
    """Balancing without a loss: after a step each router's `correction`, which takes part in the choice and not in the
    weights, rises by `rate` for experts with less than their share and falls for those with more (Wang et al. 2024,
    arXiv 2408.15664, algorithm 1; DeepSeek V3).

    `load` is `Routing.load` of the step. The corrections are no weights of a loss: keep an optimizer that decays from
    them with `model.freeze(keys="correction")`. Routers without one are passed over.
    """
    for path, module in model.named_modules():
        if isinstance(module, Router) and module.has_correction and path in load:
            share = load[path]
            module.correction = module.correction + rate * mx.sign(share.mean() - share)


def _share(which: mx.array, real: mx.array | None) -> mx.array:
    """The share of choices (N, top) that are True."""
    counts = _weights(real, which.astype(mx.float32))
    return (which * counts).sum() / (counts.sum() * which.shape[-1])


def _wide(x: mx.array) -> mx.array:
    return x if x.dtype == mx.float64 else x.astype(mx.float32)


def _weights(real: mx.array | None, like: mx.array) -> mx.array:
    """1 for each token that counts, (N, 1)."""
    return mx.ones((like.shape[0], 1), dtype=like.dtype) if real is None else real[:, None].astype(like.dtype)
