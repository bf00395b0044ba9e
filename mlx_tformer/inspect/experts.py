"""What a mixture of experts did with a text: loads, how sure the router was, who is chosen together."""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from ..errors import UsageError
from .trace import Trace

SITES = ("router.logits", "router.chosen", "router.weights")


@dataclass(frozen=True)
class ExpertReport:
    """One layer's experts over all tokens of a trace that are no padding.

    load: (E,), how many tokens chose each expert. weight: (E,), the sum of its weights. entropy: (B, L), that of the
    softmax of the router's logits, in nats. together: (E, E), how many tokens chose both; the diagonal is the load.
    dropped: tokens whose weights are all zero. tokens: how many there were.
    """

    layer: int
    load: mx.array
    weight: mx.array
    entropy: mx.array
    together: mx.array
    dropped: int
    tokens: int

    @property
    def unused(self) -> list[int]:
        """Experts that no token chose."""
        return [i for i, count in enumerate(cast(list[int], self.load.tolist())) if count == 0]

    @property
    def balance(self) -> float:
        """The entropy of the loads as a share of the largest possible one: 1 where all experts have the same load."""
        share = self.load / mx.maximum(self.load.sum(), 1)
        entropy = -mx.where(share > 0, share * mx.log(mx.maximum(share, 1e-30)), 0).sum()
        count = self.load.shape[0]
        return (
            float(cast(float, entropy.item())) / float(cast(float, mx.log(mx.array(float(count))).item()))
            if count > 1
            else 1.0
        )


def experts(t: Trace) -> list[ExpertReport]:
    """A report for each layer with experts; raises UsageError for a trace without `SITES` ("router.*" reads them), and
    for one of two stacks.

    >>> from mlx_tformer.inspect import trace
    >>> SITES
    ('router.logits', 'router.chosen', 'router.weights')
    """
    missing = next((name for name in SITES if name not in t), None)
    if missing is not None:
        raise UsageError(f'experts: {missing} was not read; trace a mixture of experts with read=["router.*"]')
    names = list(t.all(SITES[0]))
    if len({t.site(name).stack for name in names}) > 1:
        raise UsageError('experts: encoder and decoder were read; trace one, as with read=["encoder.*.router.*"]')
    logits, chosen, weights = (t.by_layer(name) for name in SITES)
    real = {layer: t.real(name) for layer, name in zip(logits, names, strict=True)}
    return [_report(layer, logits[layer], chosen[layer], weights[layer], real[layer]) for layer in logits]


def _report(layer: int, logits: mx.array, chosen: mx.array, weights: mx.array, real: mx.array | None) -> ExpertReport:
    """logits (B, L, E), chosen and weights (B, L, top), real (B, L) what is no padding."""
    count = logits.shape[-1]
    real = mx.ones(logits.shape[:2], mx.bool_) if real is None else real
    one_hot = (chosen[..., None] == mx.arange(count)) & real[..., None, None]  # (B, L, top, E)
    picked = mx.any(one_hot, axis=2).astype(mx.float32).reshape(-1, count)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    dropped = real & mx.all(weights == 0, axis=-1)
    return ExpertReport(
        layer,
        picked.sum(axis=0).astype(mx.int32),
        mx.where(one_hot, weights[..., None], 0).sum(axis=(0, 1, 2)),
        -(mx.exp(logprobs) * logprobs).sum(axis=-1),
        (picked.T @ picked).astype(mx.int32),
        cast(int, dropped.sum().item()),
        cast(int, real.sum().item()),
    )
