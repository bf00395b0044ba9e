"""Mixtures of experts: a router chooses a few of many feed-forward layers for each token.

Few tokens gather the weights of their experts; many are sorted by expert first, so that the tokens of one expert stand
together and its weights are read once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from .context import Context
from .mlp import ACTIVATIONS, Gate, joined
from .tap import Module, tap, wanted

SORTED_FROM = 4
"""Tokens for each expert, on average, from which sorting pays."""


@dataclass(frozen=True)
class Groups:
    """Experts fall into `count` groups, of which a token may use the `keep` best; a group is as good as the sum of
    its `best` highest scores (DeepSeek V2: 1; V3: 2)."""

    count: int
    keep: int
    best: int

    def __call__(self, scores: mx.array) -> mx.array:
        """Scores (N, E) with -inf for the experts of the other groups."""
        groups = mx.unflatten(scores, -1, (self.count, -1))  # (N, G, E / G)
        worth = mx.topk(groups, self.best, axis=-1).sum(axis=-1)  # (N, G)
        rank = mx.argsort(mx.argsort(-worth, axis=-1), axis=-1)
        return mx.where((rank < self.keep)[..., None], groups, -mx.inf).flatten(-2)


SCORES: dict[str, Callable[[mx.array], mx.array]] = {
    "softmax": lambda logits: mx.softmax(logits, axis=-1),
    "sigmoid": mx.sigmoid,
    "none": lambda logits: logits,
}
"""What turns a router's logits into scores."""


class Router(Module):
    """Chooses `top` of `count` experts for each token and weighs them; all in float32.

    Scores of the logits (`score`), plus a learned `correction` that takes part in the choice and not in the
    weights, within `groups`; the weights are the chosen scores, once more through `after`, made to sum to one if
    `normalise`, times `scale`.
    """

    precise = ("correction",)  # rounded, it would choose other experts
    sites = ("logits", "chosen", "weights")

    def __init__(
        self,
        dim: int,
        count: int,
        top: int,
        *,
        score: str = "softmax",
        after: str = "none",
        normalise: bool = False,
        scale: float = 1.0,
        groups: Groups | None = None,
        correction: bool = False,
        bias: bool = False,
    ):
        super().__init__()
        if not 1 <= top <= count:
            raise ValueError(f"a router cannot choose {top} of {count} experts")
        if groups is not None and (count % groups.count or groups.keep > groups.count):
            raise ValueError(f"{count} experts cannot be {groups.count} groups of which {groups.keep} are kept")
        self.weight = mx.zeros((count, dim))
        if bias:
            self.bias = mx.zeros((count,))
        if correction:
            self.correction = mx.zeros((count,))
        self.count, self.top, self.score, self.after, self.normalise = count, top, score, after, normalise
        self.scale, self.groups, self.has_correction, self.has_bias = scale, groups, correction, bias
        grouped = (1, 1, 1) if groups is None else (groups.count, groups.keep, groups.best)
        self.rules = kernels.Rules(top, score, after, normalise, scale, grouped)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x (N, C) -> the weights (N, top) and the numbers (N, top) of the chosen experts."""
        logits = x.astype(mx.float32) @ self.weight.astype(mx.float32).T
        logits = tap(self, "logits", logits + self.bias.astype(mx.float32) if self.has_bias else logits)
        if not wanted(self, "chosen") and kernels.worth_routing(len(x), self.count, self.rules):
            weights, chosen = kernels.route(logits, self.rules, self.correction if self.has_correction else None)
            return tap(self, "weights", weights), chosen
        scores = SCORES[self.score](logits)  # (N, E)
        choice = scores + self.correction.astype(mx.float32) if self.has_correction else scores
        choice = choice if self.groups is None else self.groups(choice)
        best = mx.argpartition(-mx.stop_gradient(choice), self.top - 1, axis=-1)[..., : self.top]
        chosen = tap(self, "chosen", best)
        weights = SCORES[self.after](mx.take_along_axis(scores, chosen, axis=-1))
        if self.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return tap(self, "weights", weights * self.scale), chosen


class ExpertLinear(nn.Module):
    """One matrix for each expert, stacked: weight (E, out, in), bias (E, out)."""

    def __init__(self, count: int, width: int, out: int, bias: bool = False):
        super().__init__()
        self.weight = mx.zeros((count, out, width))
        if bias:
            self.bias = mx.zeros((count, out))
        self.has_bias = bias

    def __call__(self, x: mx.array, expert: mx.array, ordered: bool) -> mx.array:
        """x (M, in) -> (M, out), row by row through the expert (M,) that it is for; `ordered` if experts ascend."""
        y = self._product(x[:, None], expert, ordered)[:, 0]
        return y + self.bias[expert] if self.has_bias else y

    def _product(self, x: mx.array, expert: mx.array, ordered: bool) -> mx.array:
        weight = self.weight
        if mx.default_device() == mx.cpu:  # whose gather_mm knows float32 alone
            out = mx.gather_mm(
                x.astype(mx.float32),
                weight.astype(mx.float32).swapaxes(1, 2),
                rhs_indices=expert,
                sorted_indices=ordered,
            )
            return out.astype(x.dtype)
        return mx.gather_mm(x, weight.swapaxes(1, 2), rhs_indices=expert, sorted_indices=ordered)

    def to_quantized(
        self, group_size: int = 64, bits: int = 4, mode: str = "affine", **other: Any
    ) -> "QuantizedExpertLinear":
        """The same with packed weights."""
        count, out, width = self.weight.shape
        packed = QuantizedExpertLinear(count, width, out, self.has_bias, group_size=group_size, bits=bits, mode=mode)
        packed.weight, packed.scales, *biases = mx.quantize(self.weight, group_size, bits, mode=mode)
        if biases:
            packed.biases = biases[0]
        if self.has_bias:
            packed.bias = self.bias
        return packed


class QuantizedExpertLinear(ExpertLinear):
    """`ExpertLinear` with weights packed along the last axis, and scales and biases beside them."""

    def __init__(self, count: int, width: int, out: int, bias: bool, *, group_size: int, bits: int, mode: str):
        super().__init__(count, width, out, bias)
        self.group_size, self.bits, self.mode = group_size, bits, mode

    def _product(self, x: mx.array, expert: mx.array, ordered: bool) -> mx.array:
        return mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            rhs_indices=expert,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=ordered,
        )


class Feedforwards(Module, ABC):
    """`count` feed-forward layers side by side."""

    sites = ("hidden",)
    count: int

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x (N, C), or for each of its experts (N, top, C), and the experts chosen for each token (N, top) -> what each
        of them says, (N, top, C)."""
        top, expert, alike = chosen.shape[-1], chosen.flatten(), x.ndim == 2
        x = x if alike else x.flatten(0, 1)
        if expert.size < SORTED_FROM * self.count:
            rows = mx.repeat(x, top, axis=0) if alike else x
            return mx.unflatten(self._rows(rows, expert, top, None), 0, (-1, top))
        order = mx.argsort(expert)
        y = self._rows(x[order // top] if alike else x[order], expert[order], top, order)
        return mx.unflatten(y[mx.argsort(order)], 0, (-1, top))

    @abstractmethod
    def _rows(self, x: mx.array, expert: mx.array, top: int, order: mx.array | None) -> mx.array:
        """One row for each pair of a token and an expert, (M, C) -> (M, C), sorted by `order`, or not at all."""

    def _shown(self, hidden: mx.array, top: int, order: mx.array | None) -> mx.array:
        """Offer hidden rows (M, F) by token and choice, (N, top, F), however they are sorted."""
        if not wanted(self, "hidden"):
            return hidden
        rows = mx.unflatten(hidden if order is None else hidden[mx.argsort(order)], 0, (-1, top))
        shown = tap(self, "hidden", rows)
        if shown is rows:
            return hidden
        return shown.flatten(0, 1) if order is None else shown.flatten(0, 1)[order]


class Experts(Feedforwards):
    """`count` gated feed-forward layers side by side; gate and up are one matrix, gate first."""

    def __init__(self, dim: int, hidden: int, count: int, *, act: str | Gate = "silu", bias: bool = False):
        super().__init__()
        self.gate_up = ExpertLinear(count, dim, 2 * hidden, bias)
        self.down = ExpertLinear(count, hidden, dim, bias)
        self.act, self.count, self.hidden = act, count, hidden

    def _rows(self, x: mx.array, expert: mx.array, top: int, order: mx.array | None) -> mx.array:
        ordered = order is not None
        gate, up = mx.split(self.gate_up(x, expert, ordered), 2, axis=-1)
        return self.down(self._shown(joined(self.act, gate, up), top, order), expert, ordered)


class PlainExperts(Feedforwards):
    """`count` feed-forward layers without a gate side by side, down(act(up(x))) (Switch)."""

    def __init__(self, dim: int, hidden: int, count: int, *, act: str = "relu", bias: bool = False):
        super().__init__()
        self.up, self.down = ExpertLinear(count, dim, hidden, bias), ExpertLinear(count, hidden, dim, bias)
        self.act, self.count, self.hidden = act, count, hidden

    def _rows(self, x: mx.array, expert: mx.array, top: int, order: mx.array | None) -> mx.array:
        hidden = ACTIVATIONS[self.act](self.up(x, expert, order is not None))
        return self.down(self._shown(hidden, top, order), expert, order is not None)


class Mixture(Module):
    """The weighted sum of the chosen experts, plus `shared`, an MLP that every token goes through, if there is one.

    `shared_gate` makes one number of a token, whose sigmoid the shared part is multiplied by (Qwen 2 MoE). `capacity`
    is how many tokens of a text an expert takes in one call, the first ones; for the others it says nothing (Switch,
    Fedus et al. 2021, arXiv 2101.03961, section 2.2). Padding takes no place.
    """

    sites = ("kept", "said")

    def __init__(
        self,
        router: Router,
        experts: Feedforwards,
        *,
        shared: Module | None = None,
        shared_gate: nn.Module | None = None,
        capacity: int | None = None,
    ):
        super().__init__()
        self.router, self.experts, self.capacity = router, experts, capacity
        if shared is not None:
            self.shared = shared
        if shared_gate is not None:
            self.shared_gate = shared_gate
        self.has_shared, self.has_shared_gate = shared is not None, shared_gate is not None

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        tokens = x.flatten(0, 1)  # (B, L, C) -> (N, C)
        weights, chosen = self.router(tokens)
        if self.capacity is not None:
            kept = tap(self, "kept", taken(chosen.reshape(*x.shape[:2], -1), self.experts.count, self.capacity, ctx))
            weights = mx.where(kept.flatten(0, 1), weights, 0)
        y = self.routed(tokens, weights, chosen)
        if self.has_shared:
            shared = self.shared(tokens, ctx)
            y = y + (mx.sigmoid(self.shared_gate(tokens)) * shared if self.has_shared_gate else shared)
        return y.reshape(x.shape)

    def routed(self, x: mx.array, weights: mx.array, chosen: mx.array) -> mx.array:
        """What the chosen experts say together: (N, C), (N, top), (N, top) -> (N, C)."""
        said = tap(self, "said", self.experts(x, chosen))  # (N, top, C)
        return (said * weights[..., None].astype(said.dtype)).sum(axis=1)


def taken(chosen: mx.array, count: int, capacity: int, ctx: Context | None = None) -> mx.array:
    """Which of the experts chosen for each token, (B, L, top), still have room for it, as booleans of that shape.

    A text fills its own places, token by token, and those of padding take none.

    >>> taken(mx.array([[[1], [0], [1], [1]]]), count=2, capacity=2).flatten().tolist()
    [True, True, True, False]
    """
    pairs = chosen.flatten(1)[..., None] == mx.arange(count)  # (B, L * top, E)
    real = None if ctx is None else ctx.text
    if real is not None:
        pairs = pairs & mx.repeat(real, chosen.shape[-1], axis=1)[..., None]
    places = mx.cumsum(pairs.astype(mx.int32), axis=1)
    if ctx is not None and ctx.left is not None and ctx.packed:
        first = mx.repeat(ctx.left * chosen.shape[-1], chosen.shape[-1], axis=1)[..., None]
        places = places - mx.take_along_axis(places - pairs, first, axis=1)  # without those of the texts before
    place = (places * pairs).sum(axis=-1)
    return (place <= capacity).reshape(chosen.shape)
