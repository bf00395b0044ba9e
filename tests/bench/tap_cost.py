"""What watching costs a decoding step while nobody watches: host time with the taps, beside a model without them.

    python tests/bench/tap_cost.py [MODEL] [--context 64] [--steps 400] [--rounds 15]

Host time is what the thread needs to build the graph of one token's step, before anything is computed. "None" means
that the taps give back their value at once and nothing looks for watchers. The two take turns in one process, and the
fastest of many rounds counts, so that a busy machine weighs little. The last row is the whole step on the clock, which
such a machine makes noisy.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from unittest.mock import patch

import mlx.core as mx
from measuring import print_table

import mlx_tformer as mt  # before mlx.core, for a fast BLAS
from mlx_tformer import nn
from mlx_tformer.nn import Cache

PUT_IN_PLACE: dict[str, Callable[..., object]] = {
    "tap": lambda module, name, value: value,
    "wanted": lambda module, name: False,
    "spectators": lambda: (),
}


def untapped() -> ExitStack:
    """A context in which no module of `nn` offers anything to watchers."""
    stack = ExitStack()
    for module in vars(nn).values():
        if isinstance(module, ModuleType) and module.__name__.startswith(nn.__name__):
            for name in PUT_IN_PLACE.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, PUT_IN_PLACE[name]))
    return stack


def seconds(lm: mt.LanguageModel, cache: Cache, token: mx.array, steps: int, *, computed: bool) -> float:
    """Time of a step, the median of `steps`; the cache is as it was after it."""
    found, clock = [], time.perf_counter if computed else time.thread_time
    gc.disable()
    for _ in range(steps):
        begun = clock()
        logits = lm.model(token, cache)
        if computed:
            mx.eval(logits)
        found.append(clock() - begun)
        mx.eval(logits, cache.arrays)
        cache.trim(1)
    gc.enable()
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="shakespeare")
    parser.add_argument("--context", type=int, default=64, help="tokens before the step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    lm = mt.load(given.model, dtype="float32")
    assert isinstance(lm, mt.LanguageModel)
    cache, token = lm.new_cache(given.context + 1), mx.array([[1]])
    mx.eval(lm(mx.ones((1, given.context), mx.int32), cache), cache.arrays)
    rows = []
    for name, computed in (("host time", False), ("whole step", True)):
        with_taps, without = [], []
        for _ in range(given.rounds):
            with_taps.append(seconds(lm, cache, token, given.steps, computed=computed))
            with untapped():
                without.append(seconds(lm, cache, token, given.steps, computed=computed))
        rows.append((name, 1e6 * min(with_taps), 1e6 * min(without), 100 * (min(with_taps) / min(without) - 1)))
    print_table(["", "taps µs", "none µs", "more %"], rows)


if __name__ == "__main__":
    main()
