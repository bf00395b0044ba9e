"""ggml's blocks of quantized numbers: to plain numbers, or exactly into MLX's affine form.

MLX stores w = scale * q + bias for each group of 32 along a row, with unsigned q, packed into uint32 from the low
bits up. Three of ggml's types are the same thing, so their values survive without a rounding (blocks as in ggml's
`ggml-common.h`):

| type | block of 32 | bits | scale | bias |
| --- | --- | --- | --- | --- |
| Q4_1 | d, m (float16), 16 bytes: w = d q + m | 4 | d | m |
| Q4_0 | d (float16), 16 bytes: w = d (q - 8) | 4 | d | -8 d |
| Q8_0 | d (float16), 32 signed bytes: w = d q | 8 | d | -128 d, with q + 128 |

Scales and biases have to stay float16 or become float32 for the values to stay exact. Only the sign of a zero may
differ: where ggml has d * 0 = -0 for a negative d, MLX has +0. In a 4-bit block byte j holds elements j (low half)
and j + 16 (high half).
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

GROUP_SIZE = 32
PACKED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_CENTRE = {"Q4_0": 8, "Q8_0": 128}
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_CHUNK = 1 << 22  # elements that are dequantized at a time, so that intermediate arrays stay small


def dense_dtype(kind: str) -> mx.Dtype:
    """The dtype that holds every value of a type: its own for F32, F16 and BF16, float32 for quantized ones."""
    return PLAIN.get(kind, mx.float32)


def to_dense(raw: np.ndarray, kind: str) -> mx.array:
    """Stored bytes, uint8 (rows, bytes a row), to their values (rows, elements a row) in `dense_dtype(kind)`.

    >>> to_dense(np.array([[0, 0, 128, 63]], np.uint8), "F32")
    array([[1]], dtype=float32)
    """
    match kind:
        case "F32":
            return mx.array(raw.view("<f4"))
        case "F16":
            return mx.array(raw.view("<f2"))
        case "BF16":
            return mx.array(raw.view("<u2")).view(mx.bfloat16)
    return mx.array(dequantize(raw, kind))


def dequantize(raw: np.ndarray, kind: str) -> np.ndarray:
    """Quantized rows, uint8 (rows, bytes a row), to float32 (rows, elements a row), by the `gguf` package."""
    if kind == "Q8_K":
        return _dequantize_q8_k(raw)
    # Not at the top: it takes 0.1 s, and most loads never need it.
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    code = GGMLQuantizationType[kind]
    elements, nbytes = GGML_QUANT_SIZES[code]
    values = np.empty((len(raw), raw.shape[1] // nbytes * elements), np.float32)
    rows = max(1, _CHUNK // values.shape[1])
    # A scale of infinity in a broken file is found by whoever checks the weights; numpy need not warn of it.
    with np.errstate(all="ignore"):
        for start in range(0, len(raw), rows):
            values[start : start + rows] = quants.dequantize(raw[start : start + rows], code)
    return values


def _dequantize_q8_k(raw: np.ndarray) -> np.ndarray:
    """Blocks of d (float32), 256 signed bytes and 16 sums that only speed up products; `gguf` leaves the type out."""
    blocks = raw.reshape(-1, 292)
    scales = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    with np.errstate(all="ignore"):
        return (scales * blocks[:, 4:260].view(np.int8)).reshape(len(raw), -1)


def packs_exactly(raw: np.ndarray, kind: str) -> bool:
    """True if MLX's affine form holds the values: the type is one of the three and its biases fit float16."""
    if kind not in PACKED_BITS:
        return False
    return kind == "Q4_1" or bool(np.isfinite(_biases(raw, kind)).all())


def packed_weight(raw: np.ndarray, kind: str) -> mx.array:
    """Stored bytes, uint8 (rows, bytes a row), as MLX's packed weight, uint32 (rows, elements * bits / 32)."""
    blocks = raw.reshape(-1, _BLOCK_BYTES[kind])
    if kind == "Q8_0":
        packed = blocks[:, 2:] ^ 0x80  # a signed byte with its top bit turned is the unsigned q + 128
    else:
        halves = blocks[:, -16:]
        q = np.concatenate([halves & 0x0F, halves >> 4], axis=1)  # (blocks, 32), in order
        packed = q[:, 0::2] | q[:, 1::2] << 4
    return mx.array(np.ascontiguousarray(packed).view("<u4").reshape(len(raw), -1))


def scales(raw: np.ndarray, kind: str) -> mx.array:
    """The scale of each group of 32, float16 (rows, elements / 32)."""
    return mx.array(_scales(raw, kind))


def biases(raw: np.ndarray, kind: str) -> mx.array:
    """The bias of each group of 32, float16 (rows, elements / 32)."""
    return mx.array(_biases(raw, kind))


PARTS: dict[str, Callable[[np.ndarray, str], mx.array]] = {
    "weight": packed_weight,
    "scales": scales,
    "biases": biases,
}
"""The three arrays that MLX keeps of a packed matrix, by their names in a checkpoint."""


def _scales(raw: np.ndarray, kind: str) -> np.ndarray:
    """(rows, groups) float16."""
    return np.ascontiguousarray(raw.reshape(-1, _BLOCK_BYTES[kind])[:, :2]).view("<f2").reshape(len(raw), -1)


def _biases(raw: np.ndarray, kind: str) -> np.ndarray:
    """(rows, groups) float16; infinite where they do not fit."""
    if kind == "Q4_1":
        return np.ascontiguousarray(raw.reshape(-1, 20)[:, 2:4]).view("<f2").reshape(len(raw), -1)
    with np.errstate(all="ignore"):
        return _scales(raw, kind) * np.float16(-_CENTRE[kind])
