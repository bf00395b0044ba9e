"""Feed-forward layers, plain and gated."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from .context import Context
from .tap import Module, tap

Activation = Callable[[mx.array], mx.array]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": nn.gelu,
    "gelu_fast": nn.gelu_approx,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "relu2": nn.relu2,
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "swish": nn.silu,
    "tanh": nn.tanh,
}
"""What configs call `hidden_act`. `gelu_new` and its like are the tanh form of GELU, `gelu` is the exact one."""


Gate = Callable[[mx.array, mx.array], mx.array]
"""How a gated layer joins its gate and its other half."""


def joined(act: str | Gate, gate: mx.array, up: mx.array) -> mx.array:
    """act(gate) * up, or whatever else a family does with the two."""
    return ACTIVATIONS[act](gate) * up if isinstance(act, str) else act(gate, up)


class Mlp(Module):
    """down(act(up(x))), dim -> hidden -> dim."""

    sites = ("up", "hidden")

    def __init__(self, dim: int, hidden: int, act: str = "gelu", bias: bool = True):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias), nn.Linear(hidden, dim, bias)
        self.act = act

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        return self.down(tap(self, "hidden", ACTIVATIONS[self.act](tap(self, "up", self.up(x)))))


class GatedMlp(Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202); gate and up are one matrix, gate first."""

    sites = ("gate", "up", "hidden")

    def __init__(self, dim: int, hidden: int, act: str | Gate = "silu", bias: bool = False):
        super().__init__()
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden, bias), nn.Linear(hidden, dim, bias)
        self.act = act

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        gate, up = mx.split(self.gate_up(x), 2, axis=-1)  # (B, L, hidden) each
        gate, up = tap(self, "gate", gate), tap(self, "up", up)
        return self.down(tap(self, "hidden", joined(self.act, gate, up)))
