"""Less memory for longer batches: layers that keep their input alone and are computed again for the gradient."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from ..nn import Block, Context, Stack
from ..nn.model import directly
from ..nn.tap import recorded, watching


def checkpoint(model: nn.Module, on: bool = True) -> None:
    """Keep for the gradient only what goes into each layer of the model's stacks, and compute the rest of it again when
    the gradient is taken (Chen et al. 2016, arXiv 1604.06174); `on=False` undoes that.

    Values and gradients stay the same. Memory for activations falls from that of all layers to that of one, and every
    layer runs once more. Activations can be watched, also for a loss (`routing`), but not edited: a watcher that puts
    another value in the place of one raises UsageError.
    """
    for module in model.modules():
        if isinstance(module, Stack):
            module.run_by(again if on else directly)


def again(stack: Stack, layer: Block, x: mx.array, ctx: Context) -> mx.array:
    """Call a layer of a stack so that it runs again for the gradient.

    Whatever a gradient goes to has to be an argument: the weights of the layer and of a position that all layers share,
    and a decoder's memory. So the activations that somebody watches have to be results.
    """
    watchers, paths = watching(), list[str]()
    shared = [stack.position] if "position" in stack else []
    modules: list[nn.Module] = [layer, *shared]

    def run(weights: list[dict], x: mx.array, memory: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
        before = [module.trainable_parameters() for module in modules]
        # What is shared between layers is made anew: it may depend on the weights.
        own = replace(ctx, memory=memory[0] if memory else None, _masks={}, _biases={})
        for module, values in zip(modules, weights, strict=True):
            module.update(values)
        try:
            with recorded(watchers) as seen:
                out = layer(x, own)
        finally:
            for module, values in zip(modules, before, strict=True):
                module.update(values)
        paths[:] = seen
        return out, list(seen.values())

    given = [module.trainable_parameters() for module in modules]
    out, values = mx.checkpoint(run)(given, x, [] if ctx.memory is None else [ctx.memory])
    for path, value in zip(paths, values, strict=True):
        for watcher in watchers:
            if watcher.wants(layer, path) and watcher.see(path, value) is not None:
                raise UsageError(
                    f"{path}: cannot be edited in a layer that is computed again; checkpoint(model, False)"
                )
    return out
