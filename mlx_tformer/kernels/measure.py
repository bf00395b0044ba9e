"""Every kernel at the size of a known model: held against what would run without it, and timed beside it.

Nothing here claims a speed: figures come from the machine that it runs on, and tests check the answers alone.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .asked import Asked, Sight, Slopes, Wanted
from .attention import attention, attention_statistics, plan
from .keys import Keys, Latent, Packed, Plain
from .rope import rope
from .router import Rules, plain_route, route
from .twin import plain_attention, plain_statistics

Answers = Sequence[mx.array]
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}
"""How far answers may be from each other, relative to the largest."""


@dataclass(frozen=True)
class Trial:
    """One kernel at one size: `ours` and what stands for it otherwise, and the bytes that each launch reads and
    writes, at least and as the kernel does it."""

    name: str
    ours: Callable[[], Answers]
    otherwise: Callable[[], Answers]
    dtype: mx.Dtype
    floor: int
    moved: int


@dataclass(frozen=True)
class Figures:
    """What a trial found: the largest relative difference, which is fine up to `tolerance`, and median seconds."""

    name: str
    difference: float
    tolerance: float
    seconds: float
    otherwise: float
    floor: int
    moved: int

    @property
    def fine(self) -> bool:
        """True if both gave the same."""
        return self.difference <= self.tolerance


def measured(trial: Trial, rounds: int = 20) -> Figures:
    """Run a trial, `rounds` times each way."""
    pairs = list(zip(trial.ours(), trial.otherwise(), strict=True))
    difference = max(_apart(found, wanted) for found, wanted in pairs)
    ours, otherwise = _seconds(trial.ours, rounds), _seconds(trial.otherwise, rounds)
    return Figures(trial.name, difference, TOLERANCE[trial.dtype], ours, otherwise, trial.floor, trial.moved)


def _apart(found: mx.array, wanted: mx.array) -> float:
    a, b = found.astype(mx.float32), wanted.astype(mx.float32)
    apart = (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1)).item()
    assert isinstance(apart, float)
    return apart if apart == apart else float("inf")


def _seconds(run: Callable[[], Answers], rounds: int) -> float:
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])  # without those that compile


def trials(shrink: int = 1) -> list[Trial]:
    """All of them; `shrink` divides the number of keys."""
    keys = 4096 // shrink
    return [
        _rope_trial("RoPE with YaRN (Qwen 2.5 7B)", 28, 4, 128, 1.2),
        _attention_trial("soft cap (Gemma 2 9B)", (16, 1, 256), _plain(8, keys, 256), softcap=50.0),
        _attention_trial("ALiBi (BLOOM 7B)", (32, 1, 128), _plain(32, keys, 128), alibi=True),
        _attention_trial("heads of 80 (Phi 2)", (32, 1, 80), _plain(32, keys, 80)),
        _attention_trial("packed keys, 4 bit (Llama 3 8B)", (32, 1, 128), Packed.pack(*_both(8, 4 * keys, 128))),
        _attention_trial("latents (DeepSeek V2 Lite)", (16, 1, 576), _latent(2 * keys)),
        _statistics_trial("statistics (Llama 3 8B)", (32, max(128 // shrink, 1), 128), _plain(8, keys, 128)),
        _router_trial("router (DeepSeek V3)", 256, Rules(8, "sigmoid", normalise=True, scale=2.5, groups=(8, 4, 2))),
    ]


def _random(*shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def _both(heads: int, length: int, width: int) -> tuple[mx.array, mx.array]:
    return _random(1, heads, length, width), _random(1, heads, length, width) * 0.5


def _plain(heads: int, length: int, width: int) -> Plain:
    return Plain(*_both(heads, length, width))


def _latent(length: int) -> Latent:
    return Latent(_random(1, 1, length, 512), _random(1, 1, length, 64))


def _rope_trial(name: str, heads: int, kv_heads: int, width: int, amplitude: float) -> Trial:
    q, k = _random(1, heads, 1, width), _random(1, kv_heads, 1, width)
    table = mx.array([1e4 ** -(2 * i / width) for i in range(width // 2)])

    def otherwise() -> Answers:
        return [
            mx.fast.rope(x * amplitude, width, traditional=False, base=None, scale=1.0, offset=4095, freqs=1 / table)
            for x in (q, k)
        ]

    moved = 2 * (q.nbytes + k.nbytes) + table.nbytes
    return Trial(name, lambda: rope(q, k, 4095, table, amplitude=amplitude), otherwise, q.dtype, moved, moved)


def _attention_trial(
    name: str, query: tuple[int, int, int], keys: Keys, *, softcap: float | None = None, alibi: bool = False
) -> Trial:
    heads, length, width = query
    q = _random(1, heads, length, width)
    slopes = Slopes(tuple(2.0 ** -(8 * (i + 1) / heads) for i in range(heads))) if alibi else None
    asked = Asked(width**-0.5, Sight(), softcap, slopes)

    def otherwise() -> Answers:
        if softcap is not None:
            return [plain_attention(q, keys, asked).astype(q.dtype)]
        k, v = keys.plain()
        apart = mx.arange(keys.length) - (keys.length - 1)
        mask = None if slopes is None else (mx.array(slopes.values)[:, None, None] * apart).astype(q.dtype)
        return [mx.fast.scaled_dot_product_attention(q, k, v, scale=asked.scale, mask=mask)]

    floor, moved = traffic(q, keys)
    return Trial(name, lambda: [attention(q, keys, asked)], otherwise, q.dtype, floor, moved)


def _statistics_trial(name: str, query: tuple[int, int, int], keys: Plain) -> Trial:
    heads, length, width = query
    q, asked = _random(1, heads, length, width), Asked(width**-0.5, Sight(causal=True))
    wanted = Wanted(((0, keys.length // 2), (keys.length // 2, keys.length)))

    def of(how: Callable[..., object]) -> Answers:
        found = vars(how(q, keys, asked, wanted))
        return [found[field] for field in ("out", "logsumexp", "entropy", "distance", "mass")]

    floor, moved = traffic(q, keys)
    return Trial(name, lambda: of(attention_statistics), lambda: of(plain_statistics), q.dtype, floor, moved)


def _router_trial(name: str, experts: int, rules: Rules) -> Trial:
    logits, correction = _random(1, experts, dtype=mx.float32), _random(experts, dtype=mx.float32) * 0.1
    moved = logits.nbytes + correction.nbytes + 8 * rules.top
    return Trial(
        name,
        lambda: route(logits, rules, correction),
        lambda: plain_route(logits, rules, correction),
        mx.float32,
        moved,
        moved,
    )


def traffic(q: mx.array, keys: Keys) -> tuple[int, int]:
    """Bytes of attention: each input read once and the output written once; and as the kernel's plan has it, which
    reads the keys once for each tile of rows, and writes and reads the sums of its splits.

    >>> traffic(mx.zeros((1, 16, 1, 256), mx.float16), Plain(*[mx.zeros((1, 8, 4096, 256), mx.float16)] * 2))
    (33570816, 33833984)
    """
    batch, heads, queries, width = q.shape
    rows = heads // keys.heads * queries
    how = plan(batch, keys.heads, rows, keys.length, width, keys.value)
    kept, out = sum(x.nbytes for x in keys.arrays), batch * heads * queries * keys.value
    ends = q.nbytes + out * q.itemsize
    sums = 2 * how.splits * 4 * (out + batch * heads * queries) if how.splits > 1 else 0
    return ends + kept, ends + kept * -(-rows // how.rows) + sums
