"""For the tests of quantized formats: what stores a matrix in each, what reads it as its specification says, and the
checkpoints that `data/formats/make.py` wrote."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from checkpoints import entry, file_bytes, make_folder
from helpers import tensors

from mlx_tformer.checkpoint.safetensors_file import SafetensorsFile

DATA = Path(__file__).parent / "data" / "formats"
STORED = sorted(path.parent.name for path in DATA.glob("*/config.json"))
TIGHT = 3e-5
"""Logits that are sums in another order; what was seen is a third of it."""
Array = np.ndarray


def matrices(kind: str) -> dict[str, Array]:
    """One of the matrices that make.py wrote, whatever its dtype as numpy has it."""
    file = SafetensorsFile(DATA / "matrices.safetensors")
    found = {name.removeprefix(f"{kind}."): name for name in file.tensors if name.startswith(f"{kind}.")}
    return {leaf: np.array(file.read(name)) for leaf, name in found.items()}


def model_of(case: str) -> dict[str, mx.array]:
    """The tensors of a stored checkpoint."""
    file = SafetensorsFile(DATA / case / "model.safetensors")
    return {name: file.read(name) for name in file.tensors}


def stored_logits(case: str) -> tuple[mx.array, mx.array]:
    found = tensors(DATA / case / "expected.safetensors")
    return found["input_ids"], found["logits"]


# --- each format, bit by bit, as its specification says (float64) ---


def small_float(byte: int, exponent_bits: int, fraction_bits: int, bias: int) -> float:
    """A float of few bits without infinities."""
    sign = -1.0 if byte >> (exponent_bits + fraction_bits) else 1.0
    exponent, fraction = byte >> fraction_bits & (2**exponent_bits - 1), byte & (2**fraction_bits - 1)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - fraction_bits)
    return sign * (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias)


E4M3 = np.array([np.nan if b & 127 == 127 else small_float(b, 4, 3, 7) for b in range(256)])
E5M2 = np.array([small_float(b, 5, 2, 15) if b & 127 < 124 else np.nan for b in range(256)])
E2M1 = np.array([small_float(b, 2, 1, 1) for b in range(16)])


def by_block(weight: Array, scale: Array, block: tuple[int, int], table: Array = E4M3) -> Array:
    """8-bit floats with a scale for each block, element by element."""
    out = np.empty(weight.shape)
    for i, j in np.ndindex(*weight.shape):
        out[i, j] = table[weight[i, j]] * np.float64(scale[i // block[0], j // block[1]])
    return out


def of_blocks(blocks: Array, scales: Array) -> Array:
    """MXFP4 (..., groups, 16) -> (..., groups * 32)."""
    out = np.empty((*blocks.shape[:-1], 32))
    for at in np.ndindex(*blocks.shape):
        power = 2.0 ** (int(scales[at[:-1]]) - 127)
        for half in (0, 1):
            out[(*at[:-1], 2 * at[-1] + half)] = E2M1[blocks[at] >> 4 * half & 15] * power
    return out.reshape(*blocks.shape[:-2], -1)


def bits_of(words: Array, bits: int) -> Array:
    """The numbers in words along the last axis, those of the lowest bits first."""
    return np.stack([words.view(np.uint32) >> at & (2**bits - 1) for at in range(0, 32, bits)], -1).reshape(
        len(words), -1
    )


def awq_values(part: Mapping[str, Array]) -> Array:
    """(out, in) of an AWQ matrix."""

    def numbers(words: Array) -> Array:
        out = np.empty((len(words), 8 * words.shape[1]), int)
        for row, column in np.ndindex(*words.shape):
            for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                out[row, 8 * column + output] = int(words.view(np.uint32)[row, column]) >> 4 * place & 15
        return out

    q, z, s = numbers(part["qweight"]), numbers(part["qzeros"]), part["scales"].astype(np.float64)
    each = len(q) // len(s)
    return np.stack([s[i // each] * (q[i] - z[i // each]) for i in range(len(q))], axis=1)


def gptq_values(part: Mapping[str, Array], bits: int, too_low: int = 1) -> Array:
    """(out, in) of a GPTQ matrix."""
    q = bits_of(np.ascontiguousarray(part["qweight"].T), bits).T.astype(int)  # (in, out)
    z, s = bits_of(part["qzeros"], bits).astype(int) + too_low, part["scales"].astype(np.float64)
    order = part["g_idx"] if "g_idx" in part else np.arange(len(q)) // (len(q) // len(s))
    return np.stack([s[order[i]] * (q[i] - z[order[i]]) for i in range(len(q))], axis=1)


# --- a small Llama in each format ---

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}
PROJECTIONS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (192, 128),
    "mlp.up_proj": (192, 128),
    "mlp.down_proj": (128, 192),
}
"""Matrices (out, in)."""
Encoder = Callable[[np.random.Generator, int, int], tuple[dict[str, Any], Array]]
"""What is stored of a matrix, and what it stands for."""


def others(random: np.random.Generator) -> dict[str, mx.array]:
    """The tensors that nobody quantizes."""
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    found = {f"{name}.weight": 1 + 0.3 * random.standard_normal(128) for name in norms}
    found |= {f"{name}.weight": 0.3 * random.standard_normal((64, 128)) for name in ("model.embed_tokens", "lm_head")}
    return {name: mx.array(value.astype(np.float32)) for name, value in found.items()}


def llama(folder: Path, encode: Encoder, said: Any, **settings: Any) -> tuple[Path, Path]:
    """The same model twice: stored in a format, and as the floats that it stands for."""
    random = np.random.default_rng(7)
    stored: dict[str, Any] = others(random)
    dense: dict[str, mx.array] = dict(stored)
    for name, (rows, width) in PROJECTIONS.items():
        leaves_of, values = encode(random, rows, width)
        module = f"model.layers.0.{name}"
        stored |= {f"{module}.{leaf}": value for leaf, value in leaves_of.items()}
        dense[f"{module}.weight"] = mx.array(values.astype(np.float32))
    settings = {**SIZES, "dtype": None, **settings}
    there = make_folder(folder / "stored", weights={}, quantization_config=said, **settings)
    write_any(there / "model.safetensors", stored)
    return there, make_folder(folder / "dense", weights=dense, **settings)


def write_any(path: Path, arrays: Mapping[str, Any]) -> None:
    """A safetensors file; a pair of a code and bytes is a tensor of a dtype that MLX does not have."""
    header, data = {}, b""
    codes = {"float32": "F32", "float16": "F16", "int32": "I32", "uint8": "U8", "uint32": "U32"}
    for name, value in arrays.items():
        code, array = value if isinstance(value, tuple) else (None, np.array(value))
        raw = array.tobytes()
        header[name] = entry(code or codes[array.dtype.name], list(array.shape), len(data), len(data) + len(raw))
        data += raw
    path.write_bytes(file_bytes(header, data))


def fp8_blocks(block: tuple[int, int], leaf: str = "weight_scale_inv", code: str = "F8_E4M3") -> Encoder:
    def encode(random: np.random.Generator, rows: int, width: int) -> tuple[dict[str, Any], Array]:
        weight = random.integers(0, 256, (rows, width), dtype=np.uint8)
        weight[weight & 127 >= 120] = 0x38  # neither NaN nor so large that nothing else counts
        scale = random.uniform(0.001, 0.003, (-(-rows // block[0]), -(-width // block[1]))).astype(np.float32)
        values = by_block(weight, scale, block, E4M3 if code == "F8_E4M3" else E5M2)
        return {"weight": (code, weight), leaf: scale}, values

    return encode


def fp8_powers(code: str | None) -> Encoder:
    """Scales that are powers of two, as bytes that say so or, with None, as any bytes."""

    def encode(random: np.random.Generator, rows: int, width: int) -> tuple[dict[str, Any], Array]:
        stored, _ = fp8_blocks((64, 64))(random, rows, width)
        powers = random.integers(116, 120, stored["weight_scale_inv"].shape, dtype=np.uint8)
        values = by_block(stored["weight"][1], 2.0 ** (powers - 127.0), (64, 64))
        return stored | {"weight_scale_inv": powers if code is None else (code, powers)}, values

    return encode


def fp8_rows(shape: Callable[[int], tuple[int, ...]], leaf: str) -> Encoder:
    def encode(random: np.random.Generator, rows: int, width: int) -> tuple[dict[str, Any], Array]:
        stored, _ = fp8_blocks((1, width))(random, rows, width)
        weight, scale = stored["weight"][1], stored.pop("weight_scale_inv")
        scale = np.ascontiguousarray(np.broadcast_to(scale if len(shape(rows)) else scale[:1], (rows, 1)))
        kept = scale.reshape(-1)[: int(np.prod(shape(rows)))].reshape(shape(rows))
        whole = np.broadcast_to(kept.reshape(-1, 1), (rows, 1))
        return {**stored, leaf: kept}, by_block(weight, whole, (1, width))

    return encode


def words_of(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Numbers along the last axis into words, in this order of those of one word."""
    count = 32 // bits
    groups = numbers.reshape(len(numbers), -1, count).astype(np.uint64)
    if order is not None:
        groups = groups[..., list(order)]
    packed = sum(groups[..., i] << np.uint64(bits * i) for i in range(count))
    return np.asarray(packed).astype(np.uint32).view(np.int32)


def whole_numbers(
    random: np.random.Generator, rows: int, width: int, bits: int, group: int, order: Array | None
) -> tuple[Array, Array, Array, Array]:
    """q (in, out), z (groups, out), s (groups, out) and what they stand for (out, in)."""
    groups = -(-width // group)
    q, z = random.integers(0, 2**bits, (width, rows)), random.integers(1, 2**bits, (groups, rows))
    s = (random.uniform(0.5, 1.5, (groups, rows)) / 2**bits / width**0.5).astype(np.float16)
    of = np.arange(width) // group if order is None else order
    return q, z, s, (s.astype(np.float64)[of] * (q - z[of])).T


def awq(group: int) -> Encoder:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def encode(random: np.random.Generator, rows: int, width: int) -> tuple[dict[str, Any], Array]:
        q, z, s, values = whole_numbers(random, rows, width, 4, group if group > 0 else width, None)
        return {"qweight": words_of(q, 4, order), "qzeros": words_of(z, 4, order), "scales": s}, values

    return encode


def gptq(
    group: int,
    bits: int = 4,
    too_low: int = 1,
    g_idx: str | None = None,
    zero: int | None = None,
    stored_zero: int | None = None,
) -> Encoder:
    def encode(random: np.random.Generator, rows: int, width: int) -> tuple[dict[str, Any], Array]:
        each = group if group > 0 else width
        straight = np.arange(width) // each
        order = random.permutation(straight) if g_idx == "mixed" else straight
        q, z, s, values = whole_numbers(random, rows, width, bits, each, order)
        if zero is not None:
            z = np.full_like(z, zero)
            values = (s.astype(np.float64)[order] * (q - z[order])).T
        kept = z - too_low if stored_zero is None else np.full_like(z, stored_zero)
        found = {"qweight": words_of(q.T, bits).T.copy(), "qzeros": words_of(kept, bits), "scales": s}
        return found | ({} if g_idx is None else {"g_idx": order.astype(np.int32)}), values

    return encode


def whole_said(method: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "group_size": 64, **more}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FORMATS: dict[str, tuple[Encoder, dict[str, Any], int | None]] = {
    "fp8 in blocks": (fp8_blocks((64, 64)), FP8 | {"weight_block_size": [64, 64]}, None),
    "fp8 in blocks that the sides cut": (fp8_blocks((48, 80)), FP8 | {"weight_block_size": [48, 80]}, None),
    "fp8 in blocks larger than the matrix": (fp8_blocks((999, 128)), FP8 | {"weight_block_size": [999, 128]}, None),
    "fp8 of the other kind": (
        fp8_blocks((64, 64), code="F8_E5M2"),
        FP8 | {"fmt": "e5m2", "weight_block_size": [64, 64]},
        None,
    ),
    "fp8 with powers of two": (fp8_powers("F8_E8M0"), FP8 | {"weight_block_size": [64, 64]}, None),
    "fp8 with powers of two in bytes": (
        fp8_powers(None),
        FP8 | {"weight_block_size": [64, 64], "scale_fmt": "ue8m0"},
        None,
    ),
    "fp8 with one scale": (fp8_rows(lambda rows: (), "weight_scale"), FP8, None),
    "fp8 with one scale in a list": (fp8_rows(lambda rows: (1,), "weight_scale_inv"), FP8, None),
    "fp8 with a scale for each row": (fp8_rows(lambda rows: (rows, 1), "weight_scale"), FP8, None),
    "fp8 with a list of scales": (fp8_rows(lambda rows: (rows,), "weight_scale"), FP8, None),
    "awq": (awq(64), whole_said("awq", version="gemm", zero_point=True), 64),
    "awq in groups of 32": (awq(32), whole_said("awq", group_size=32, version="GEMM"), 32),
    "awq in small groups": (awq(16), whole_said("awq", group_size=16), None),
    "awq with a group a row": (awq(-1), whole_said("awq", group_size=-1), 64),
    "awq of the older config": (awq(64), {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 64),
    "gptq": (gptq(64), whole_said("gptq", sym=False, desc_act=False), 64),
    "gptq with its order": (gptq(64, g_idx="straight"), whole_said("gptq", sym=False, desc_act=True), 64),
    "gptq in another order": (gptq(64, g_idx="mixed"), whole_said("gptq", sym=False, desc_act=True), None),
    "gptq of the second format": (gptq(64, too_low=0), whole_said("gptq", checkpoint_format="gptq_v2"), 64),
    "gptq that is symmetric": (gptq(64, zero=8), whole_said("gptq", sym=True), 64),
    "gptq that names the wrong format": (gptq(64, zero=8, stored_zero=8), whole_said("gptq", sym=True), 64),
    "gptq of 8 bits": (gptq(32, bits=8), whole_said("gptq", bits=8, group_size=32), 32),
    "gptq of 2 bits": (gptq(32, bits=2), whole_said("gptq", bits=2, group_size=32), 32),
    "gptq with a group a row": (gptq(-1), whole_said("gptq", group_size=-1), 64),
    "gptq in groups that the sides cut": (gptq(80), whole_said("gptq", group_size=80), None),
    "gptq in groups of 96": (gptq(96), whole_said("gptq", group_size=96), 32),
}
"""Encoder, what the config says, and the group of MLX's in which `down_proj`, 192 wide, stays packed."""
