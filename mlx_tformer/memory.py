"""Memory: how much a model needs, how much this machine has, and MLX's own limits.

On Apple silicon the CPU and the GPU share one memory, and Metal recommends how much of it the GPU should use at most:
beyond that everything slows down or dies. So what is needed is added up before anything is loaded, and what cannot fit
is refused.
"""

import os
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .errors import MlxTformerError, UsageError
from .nn import WHOLE, Keeping, stateful
from .nn.moe import QuantizedExpertLinear

if TYPE_CHECKING:
    from .lm import LanguageModel

CGROUPS, MEMBERSHIP, MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")
# What the two generations of control groups call the limit, the usage, and the cached files that give way.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedExpertLinear)


class MemoryRefusal(MlxTformerError, MemoryError):
    """What was asked for does not fit this machine."""

    exit_code = 4


@dataclass(frozen=True)
class Memory:
    """The memory of a machine, in bytes."""

    total: int
    recommended: int
    """What MLX should hold at most: weights, caches and everything else, what it holds already included."""
    source: str
    """Where `recommended` comes from, in a few words."""


def of_device() -> Memory:
    """The memory of this machine.

    With Metal it is what the GPU recommends (`max_recommended_working_set_size`). Elsewhere it is what MLX holds and
    what is free now, within the limits of the control groups that a container sets; and three quarters of the memory
    where nobody says what is free.
    """
    if mx.metal.is_available():
        info = mx.device_info(mx.gpu)
        return Memory(int(info["memory_size"]), int(info["max_recommended_working_set_size"]), "recommended by Metal")
    total, source = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "available now"
    free = _available()
    if free is None:
        return Memory(total, total // 4 * 3, "three quarters of the physical memory")
    held = mx.get_active_memory() + mx.get_cache_memory()
    for limit, room in _groups():
        if room < free:
            free, source = room, "available now in this container"
        total = min(total, limit)
    return Memory(total, min(max(free, 0) + held, total), source)


def arrays(model: nn.Module) -> list[mx.array]:
    """All weights, the scales of quantized ones among them."""
    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]


def weights_bytes(model: nn.Module, dtype: mx.Dtype | None = None) -> int:
    """Bytes of all weights as they are; with `dtype`, as if those that are floating-point numbers were of that type.

    Nothing is evaluated: shapes and types are known before.

    >>> weights_bytes(nn.Linear(4, 3, bias=False)), weights_bytes(nn.Linear(4, 3, bias=False), mx.bfloat16)
    (48, 24)
    """
    return sum(
        array.size * dtype.size if dtype is not None and mx.issubdtype(array.dtype, mx.floating) else array.nbytes
        for array in arrays(model)
    )


def parameter_count(model: nn.Module) -> int:
    """Numbers in all weights: those that were trained, so a quantized matrix counts as the one that it stands for.

    >>> linear = nn.Linear(64, 32)
    >>> parameter_count(linear), parameter_count(linear.to_quantized(group_size=32, bits=4))
    (2080, 2080)
    """
    stored = sum(array.size for array in arrays(model))
    return stored + sum(_unpacked(m) for m in model.modules() if isinstance(m, QUANTIZED))


def _unpacked(module: nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedExpertLinear) -> int:
    """How many more numbers a quantized matrix stands for than its arrays hold; its scales and offsets do not count."""
    biases = module.get("biases")
    packed = module.weight.size + module.scales.size + (0 if biases is None else biases.size)
    return module.weight.size * 32 // module.bits - packed


def compute_dtype(model: nn.Module) -> mx.Dtype:
    """The type that the model computes in, and so that its cache keeps: that of its first floating-point weights."""
    return next((array.dtype for array in arrays(model) if mx.issubdtype(array.dtype, mx.floating)), mx.float32)


def kv_bytes(model: nn.Module, tokens: int, dtype: mx.Dtype, how: Keeping = WHOLE) -> int:
    """Bytes that the caches of all layers keep of one text of `tokens` tokens, in `dtype`.

    Layers with a window keep no more than the window, and `how` may bound or pack the others. Buffers grow in steps, so
    that up to `KV.STEP` tokens more are held in each layer, and in a window the chunk that was read last.
    """
    if tokens < 0:
        raise UsageError(f"tokens: found {tokens}, expected 0 or more")
    return sum(m.kept_bytes(tokens, dtype, how) for m in stateful(model))


def tokens_that_fit(model: nn.Module, budget: int, most: int, dtype: mx.Dtype, how: Keeping = WHOLE) -> int:
    """The longest text, of at most `most` tokens, whose cache needs no more than `budget` bytes."""
    remembering = stateful(model)
    lengths = range(min(most + 1, sys.maxsize))
    return max(
        bisect_right(lengths, budget, key=lambda n: sum(m.kept_bytes(n, dtype, how) for m in remembering)) - 1, 0
    )


def check_fits(
    model: nn.Module, *, tokens: int, dtype: mx.Dtype, device: Memory | None = None, how: Keeping = WHOLE
) -> None:
    """Raise MemoryRefusal, with both figures, if weights and a cache for `tokens` tokens need more than is recommended.

    Both are counted in `dtype`, so a model that was built and has not got its weights yet is counted as it will be.
    """
    device = of_device() if device is None else device
    weights, cache = weights_bytes(model, dtype), kv_bytes(model, tokens, dtype, how)
    needed, limit = weights + cache, device.recommended
    if needed <= limit:
        return
    fit = tokens_that_fit(model, limit - weights, tokens, dtype, how)
    advice = f"ask for fewer tokens ({fit} fit) or quantize" if fit else "quantize or take a smaller model"
    # Figures that read alike would not explain anything.
    show = human if human(needed) != human(limit) else "{:,} bytes".format
    parts = f"weights {human(weights)} + cache {human(cache)} for {tokens} tokens"
    raise MemoryRefusal(f"needs {show(needed)} ({parts}), {show(limit)} {device.source} on this machine; {advice}")


def check_both_fit(lm: "LanguageModel", draft: "LanguageModel", *, tokens: int, how: Keeping = WHOLE) -> None:
    """Raise MemoryRefusal, with the figures, if a model and the smaller one that guesses for it need more together than
    is recommended, each with a cache for `tokens` tokens; only that of the first is kept as `how` says."""
    device = of_device()
    sizes = [
        weights_bytes(one.model, one.dtype) + kv_bytes(one.model, tokens, one.dtype, kept)
        for one, kept in ((lm, how), (draft, WHOLE))
    ]
    if sum(sizes) > device.recommended:
        parts = f"{human(sizes[0])} for the model + {human(sizes[1])} for its draft, {tokens} tokens each"
        limit = f"{human(device.recommended)} {device.source} on this machine"
        raise MemoryRefusal(f"needs {human(sum(sizes))} ({parts}), {limit}; take a smaller draft, or lookup")


def human(size: int) -> str:
    """Bytes as Apple shows them, in powers of 1000.

    >>> human(999), human(23_040), human(340_000_000), human(999_960_000), human(5_190_000_000)
    ('999 bytes', '23.0 kB', '340 MB', '1.0 GB', '5.2 GB')
    """
    if size < 1000:
        return f"{size} bytes"
    value, units = float(size), ["EB", "PB", "TB", "GB", "MB", "kB", ""]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop()
    unit = units[-1]
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


@contextmanager
def bounded_cache(limit: int) -> Iterator[None]:
    """Inside the block MLX keeps no more than `limit` bytes of freed buffers for reuse; then the old limit comes back.

    Without a bound, a long prefill leaves buffers of every length that it went through.
    """
    before = mx.set_cache_limit(limit)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


@contextmanager
def wired(enabled: bool) -> Iterator[None]:
    """If `enabled` and on Metal, inside the block as much memory stays resident as Metal recommends; then the old limit
    comes back, even after an error.

    It helps where weights barely fit. It is for the user to ask for, because a raised limit has been involved in kernel
    panics that take down the whole Mac (ml-explore/mlx#3186).
    """
    if not enabled or not mx.metal.is_available():
        yield
        return
    before = mx.set_wired_limit(of_device().recommended)
    try:
        yield
    finally:
        mx.synchronize()  # the limit must not fall under work that is still running
        mx.set_wired_limit(before)


def _available() -> int | None:
    """Bytes that Linux could give to programs now, or None where there is no such figure."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _groups() -> Iterator[tuple[int, int]]:
    """The limit and the room below it, in bytes, of each control group that this process is in."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (CGROUPS / "memory", V1) if controllers else (CGROUPS, V2)
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            found = _group(group, *files) if group.is_relative_to(base) else None
            if found is not None:
                yield found


def _group(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> tuple[int, int] | None:
    """Limit and room of one group; None if it has no limit. Cached files do not count: they give way."""
    try:
        limit, usage = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit), int(limit) - usage + int(stat.get(reclaimable, 0))
    except (OSError, ValueError):  # not there, not readable, or "max"
        return None
