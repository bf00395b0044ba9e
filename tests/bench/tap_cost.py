"""What watching costs a decoding step while nobody watches: host time with the taps, beside a model without them.

    python tests/bench/tap_cost.py [MODEL] [--context 64] [--steps 400]

Host time is what the thread needs to build the graph of one token's step, before anything is computed. "None" means
that the taps give back their value at once and nothing looks for watchers. The two take turns, step by step, so that a
busy machine slows both alike; shown are medians, which differ by a few percent either way on such a machine. So the
last line counts instead: how often a step looks for watchers, times what a look takes, beside the fastest step.
"""

import argparse
import gc
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable, Mapping
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
AS_THEY_ARE: dict[str, Callable[..., object]] = {name: getattr(nn, name) for name in PUT_IN_PLACE}


def untapped(instead: Mapping[str, Callable[..., object]] = PUT_IN_PLACE) -> ExitStack:
    """A context in which no module of `nn` offers anything to watchers, or does so through `instead`."""
    stack = ExitStack()
    for module in vars(nn).values():
        if isinstance(module, ModuleType) and module.__name__.startswith(nn.__name__):
            for name in instead.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, instead[name]))
    return stack


def looks(lm: mt.LanguageModel, cache: Cache, token: mx.array) -> Counter[str]:
    """How often a step calls each of the functions that look for watchers."""
    counts: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def count(*arguments: object) -> object:
            counts[name] += 1
            return call(*arguments)

        return count

    with untapped({name: counted(name, call) for name, call in PUT_IN_PLACE.items()}):
        seconds(lm, cache, token, computed=False)
    return counts


def cost() -> dict[str, float]:
    """Seconds of one call of each of these functions, the call itself included."""
    module, value = nn.Module(), mx.array(1.0)
    names = {"tap": "f(module, 'x', value)", "wanted": "f(module, 'x')", "spectators": "f()"}
    found = {}
    for name, call in names.items():
        known = {"f": getattr(nn, name), "module": module, "value": value}
        found[name] = min(timeit.repeat(call, number=10_000, repeat=50, globals=known)) / 10_000
    return found


def seconds(lm: mt.LanguageModel, cache: Cache, token: mx.array, *, computed: bool) -> float:
    """Time of a step; the cache is as it was after it."""
    clock = time.perf_counter if computed else time.thread_time
    begun = clock()
    logits = lm.model(token, cache)
    if computed:
        mx.eval(logits)
    ended = clock()
    mx.eval(logits, cache.arrays)
    cache.trim(1)
    return ended - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="shakespeare")
    parser.add_argument("--context", type=int, default=64, help="tokens before the step")
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    lm = mt.load(given.model, dtype="float32")
    assert isinstance(lm, mt.LanguageModel)
    cache, token = lm.new_cache(given.context + 1), mx.array([[1]])
    mx.eval(lm(mx.ones((1, given.context), mx.int32), cache), cache.arrays)
    rows = []
    gc.disable()
    fastest = 0.0
    for name, computed in (("host time", False), ("whole step", True)):
        with_taps, without = [], []
        for step in range(2 * given.steps):
            if step % 2:
                with untapped(AS_THEY_ARE):  # what it takes to put them there is idle time before a step, so for both
                    with_taps.append(seconds(lm, cache, token, computed=computed))
            else:
                with untapped():
                    without.append(seconds(lm, cache, token, computed=computed))
        taps, none = statistics.median(with_taps), statistics.median(without)
        rows.append((name, 1e6 * taps, 1e6 * none, 100 * (taps / none - 1)))
        fastest = fastest or min(with_taps)
    print_table(["", "taps µs", "none µs", "more %"], rows)
    counts, each = looks(lm, cache, token), cost()
    spent = sum(count * each[name] for name, count in counts.items())
    share = f"{100 * spent / fastest:.2f} % of {1e6 * fastest:.0f} µs"
    print(f"{sum(counts.values())} looks for watchers take {1e6 * spent:.1f} µs, {share}")


if __name__ == "__main__":
    main()
