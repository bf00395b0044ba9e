"""Rotary positions: from GGUF's `rope.*` metadata and frequency tensors to the `rope_parameters` of transformers 5.

llama.cpp multiplies what YaRN does to the amplitude of q and k, 0.1 ln(factor) + 1, by `attn_factor`; its converter
notes transformers' `attention_factor`, which is the whole amplitude, as `yarn_attn_factor`. For Llama 3.1 it stores
no parameters but the resulting divisor of each frequency as the tensor `rope_freqs.weight`, from which
`llama3_parameters` recovers them.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .fields import Fields

FREQUENCY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LONGEST = 1 << 31
_TOLERANCE = 2e-6  # the divisors are float32 and were computed from float32 frequencies


def rope_parameters(fields: Fields, head_dim: int, divisors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """`rope_parameters` of a config; `divisors` holds those of FREQUENCY_TENSORS that the file has, each (head_dim /
    2,).

    Raises BadInput for a scaling that is unknown, incomplete or more than one at once.
    """
    theta = fields.number("rope.freq_base", 10000.0)
    if theta <= 1:
        raise fields.wrong("rope.freq_base", "a number above 1")
    for name, values in divisors.items():
        if values.shape != (head_dim // 2,) or not np.all(np.isfinite(values) & (values > 0)):
            raise fields.wrong_tensor(name, f"shape {values.shape}", f"{head_dim // 2} finite numbers above 0")
    if "rope_freqs.weight" in divisors:
        scaling = _frequency_tensor(fields, head_dim, theta, divisors)
    elif divisors:
        scaling = _longrope(fields, divisors)
    else:
        scaling = _by_type(fields)
    return {**scaling, "rope_theta": theta}


def _by_type(fields: Fields) -> dict[str, Any]:
    kind, factor = _type_and_factor(fields)
    if kind == "yarn":
        return _yarn(fields, factor)
    if kind == "longrope":
        raise fields.wrong_tensor(FREQUENCY_TENSORS[1], "no such tensor", "the frequencies that longrope needs")
    _unit_amplitude(fields)
    if kind == "none" or factor == 1:
        return {"rope_type": "default"}
    return {"rope_type": "linear", "factor": factor}


def _type_and_factor(fields: Fields) -> tuple[str, float]:
    """The kind of scaling, linear where none is named as in llama.cpp, and its factor, 1 where there is none."""
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise fields.wrong("rope.scaling.type", "one of none, linear, yarn, longrope")
    old = fields.number("rope.scale_linear", 1.0)  # how files of 2023 call it
    return kind, fields.number("rope.scaling.factor", old)


def _unit_amplitude(fields: Fields) -> None:
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if fields.number(key, 1.0) != 1:
            raise fields.wrong(key, "1 without yarn or longrope")


def _yarn(fields: Fields, factor: float) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise fields.wrong("rope.scaling.yarn_ext_factor", "1")
    for key in ("beta_fast", "beta_slow"):
        if fields.has(f"rope.scaling.yarn_{key}"):
            parameters[key] = fields.number(f"rope.scaling.yarn_{key}")
    if fields.has("rope.scaling.original_context_length"):
        parameters["original_max_position_embeddings"] = fields.whole("rope.scaling.original_context_length")
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    amplitude = fields.number("rope.scaling.yarn_attn_factor", usual) * fields.number("rope.scaling.attn_factor", 1.0)
    return parameters if amplitude == usual else {**parameters, "attention_factor": amplitude}


def _longrope(fields: Fields, divisors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    kind, factor = _type_and_factor(fields)
    if kind == "yarn" or factor != 1:
        raise fields.wrong("rope.scaling.factor", "none beside the frequency tensors of longrope")
    for name in FREQUENCY_TENSORS[1:]:
        if name not in divisors:
            raise fields.wrong_tensor(name, "no such tensor", "the short and the long frequencies of longrope")
    return {
        "rope_type": "longrope",
        "long_factor": [_shortest(value) for value in divisors["rope_factors_long.weight"]],
        "short_factor": [_shortest(value) for value in divisors["rope_factors_short.weight"]],
        "original_max_position_embeddings": fields.whole("rope.scaling.original_context_length"),
        "attention_factor": fields.number("rope.scaling.attn_factor", 1.0),
    }


def _shortest(value: np.floating) -> float:
    """The decimal with the fewest digits that is this float32."""
    return float(str(value))


def _frequency_tensor(
    fields: Fields, head_dim: int, theta: float, divisors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    kind, factor = _type_and_factor(fields)
    _unit_amplitude(fields)
    if len(divisors) > 1 or kind in ("yarn", "longrope") or factor != 1:
        raise fields.wrong_tensor("rope_freqs.weight", "a second scaling of positions", "one alone")
    found = divisors["rope_freqs.weight"].astype(np.float64)
    if np.all(found == 1):
        return {"rope_type": "default"}
    parameters = llama3_parameters(found, theta)
    if parameters is None:
        raise fields.wrong_tensor("rope_freqs.weight", "frequencies of no known formula", "those of Llama 3.1 (llama3)")
    return parameters


def llama3_parameters(divisors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """The parameters of llama3 scaling that give these divisors of the frequencies, (head_dim / 2,), or None if none
    do.

    Only low / original and high / original have an effect, so low is put at 1 where the data allow it.

    >>> factors = llama3_divisors(64, 500000.0, factor=32.0, low=1.0, high=4.0, original=8192)
    >>> found = llama3_parameters(factors, 500000.0)
    >>> found["factor"], found["low_freq_factor"], found["high_freq_factor"], found["original_max_position_embeddings"]
    (32.0, 1.0, 4.0, 8192)
    """
    turns = _turns(2 * len(divisors), theta)
    factor = _shortest(np.float32(divisors.max()))
    if factor <= 1:
        return None
    share = (1 / divisors - 1 / factor) / (1 - 1 / factor)  # 0 where slowed in full, 1 where left alone
    for low, high, original in _llama3_candidates(turns, share):
        if not 1 <= original <= _LONGEST or not 0 < low < high:
            continue
        guess = llama3_divisors(2 * len(divisors), theta, factor=factor, low=low, high=high, original=original)
        if np.allclose(guess, divisors, rtol=_TOLERANCE, atol=0):
            limits = {"low_freq_factor": low, "high_freq_factor": high}
            return {"rope_type": "llama3", "factor": factor, **limits, "original_max_position_embeddings": original}
    return None


def llama3_divisors(
    head_dim: int, theta: float, *, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """What Llama 3.1 divides each frequency by, (head_dim / 2,) float64.

    By 1 where the original context holds more than `high` turns, by `factor` where it holds fewer than `low`, and in
    between such that the frequency goes from one to the other linearly (transformers' `rope_type` "llama3").
    """
    share = np.clip((original * _turns(head_dim, theta) - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / factor + share)


def _turns(head_dim: int, theta: float) -> np.ndarray:
    """Full turns that each pair of features makes from one token to the next, (head_dim / 2,)."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)


def _llama3_candidates(turns: np.ndarray, share: np.ndarray) -> list[tuple[float, float, int]]:
    """(low, high, original) to try, from share = (original * turns - low) / (high - low) between 0 and 1."""
    between = (share > 1e-5) & (share < 1 - 1e-5)
    x, y = turns[between].tolist(), share[between].tolist()
    if len(x) > 1:
        if x[0] == x[-1]:
            return []
        slope = (y[0] - y[-1]) / (x[0] - x[-1])
        shift = y[0] - slope * x[0]
        if not (slope > 0 > shift):
            return []
        original = round(-slope / shift)
        low = -shift * original / slope
        high = low + original / slope
        return [(1.0, round(high / low, 3), original), (low, high, original)]
    if len(x) == 1:
        # One equation: the usual limits, or the usual lower one with the upper that fits.
        original = round((3 * y[0] + 1) / x[0])
        return [(1.0, 4.0, original), (1.0, 1 + (original * x[0] - 1) / y[0], original)]
    slowed, kept = turns[share < 0.5], turns[share > 0.5]
    if len(slowed) == 0 or len(kept) == 0:
        return []
    # Nothing in between: any border between the two groups gives the same frequencies.
    return [(1.0, high, round(math.sqrt(high / (kept.min() * slowed.max())))) for high in (4.0, 2.0, 1.1)]
