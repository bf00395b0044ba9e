"""Blocks are sequences of residual steps, and the norms sit where a family puts them."""

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from .context import Context
from .tap import Module, tap


class Op(Protocol):
    """What a residual step wraps: attention, an MLP, a mixture of experts."""

    def __call__(self, x: mx.array, ctx: Context) -> mx.array: ...


Norm = Callable[[mx.array], mx.array]


class Residual(Module):
    """after(x + scale * post(op(pre(x)))).

    Pre-norm models use `pre`, the Transformer of 2017 and BERT `after`, OLMo 2 `post`, Gemma 2 `pre` and `post`. A
    norm left out does nothing.
    """

    sites = ("in", "delta", "out")

    def __init__(
        self,
        op: Op,
        *,
        pre: Norm | None = None,
        post: Norm | None = None,
        after: Norm | None = None,
        scale: float = 1.0,
    ):
        super().__init__()
        self.op, self.scale = op, scale
        self.pre: Norm = nn.Identity() if pre is None else pre
        self.post: Norm = nn.Identity() if post is None else post
        self.after: Norm = nn.Identity() if after is None else after

    def delta(self, x: mx.array, ctx: Context) -> mx.array:
        """What this step adds to the residual stream, (B, L, C)."""
        delta = self.post(self.op(tap(self, "in", self.pre(x)), ctx))
        return tap(self, "delta", delta if self.scale == 1.0 else delta * self.scale)

    def __call__(self, x: mx.array, ctx: Context) -> mx.array:
        return tap(self, "out", self.after(x + self.delta(x, ctx)))


class Block(Module):
    """Named residual steps, run in order: `Block(attn=Residual(...), mlp=Residual(...))`."""

    sites = ("in", "out")

    def __init__(self, **steps: Residual):
        super().__init__()
        self.order = tuple(steps)
        for name, step in steps.items():
            setattr(self, name, step)

    @property
    def steps(self) -> list[Residual]:
        """The steps in the order in which they run."""
        return [self[name] for name in self.order]

    def __call__(self, x: mx.array, ctx: Context) -> mx.array:
        x = tap(self, "in", x)
        for step in self.steps:
            x = step(x, ctx)
        return tap(self, "out", x)


class Parallel(Block):
    """Named residual steps that all read the same input: x + delta + delta (GPT-J, GPT-NeoX, Falcon, Cohere).

    `pre` is a norm that they share; steps with norms of their own have none here. `beside` of them do so, all if it is
    None, and the others follow one by one (Falcon-H1: attention and a state space, then an MLP).
    """

    def __init__(self, pre: Norm | None = None, beside: int | None = None, /, **steps: Residual):
        super().__init__(**steps)
        self.pre: Norm = nn.Identity() if pre is None else pre
        self.beside = len(steps) if beside is None else beside

    def __call__(self, x: mx.array, ctx: Context) -> mx.array:
        x = tap(self, "in", x)
        read = self.pre(x)
        x = sum([step.delta(read, ctx) for step in self.steps[: self.beside]], x)
        for step in self.steps[self.beside :]:
            x = step(x, ctx)
        return tap(self, "out", x)
