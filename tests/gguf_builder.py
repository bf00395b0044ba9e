"""GGUF files for tests, written byte by byte so that every field can be wrong on purpose."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 4, 5, 6, 7, 8, 9, 10, 12
LAYOUTS = {
    U8: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    U32: "<I",
    I32: "<i",
    F32: "<f",
    BOOL: "<B",
    U64: "<Q",
    11: "<q",
    F64: "<d",
}
TYPE_CODES = {kind.name: kind.value for kind in GGMLQuantizationType}

DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = ["<s>", "</s>", *"abcdefg", "ab", "Ġ", "<tool>"]


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A GGUF string; `length` lies about its size."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def number(kind: int, value: float) -> bytes:
    return struct.pack(LAYOUTS[kind], value)


@dataclass
class Value:
    """A metadata value: its type, and the type of its elements for an array."""

    kind: int
    value: Any
    of: int | None = None

    def encode(self) -> bytes:
        code = struct.pack("<I", self.kind)
        if isinstance(self.value, bytes):  # raw, for broken files
            return code + self.value
        if self.kind == ARRAY and self.of is not None:
            items = (text(x) if self.of == STRING else number(self.of, x) for x in self.value)
            return code + struct.pack("<IQ", self.of, len(self.value)) + b"".join(items)
        return code + (text(self.value) if self.kind == STRING else number(self.kind, self.value))


def value(x: Any) -> Value:
    """A Python value in the type that converters give it."""
    match x:
        case Value():
            return x
        case bool():
            return Value(BOOL, x)
        case int():
            return Value(U32, x)
        case float():
            return Value(F32, x)
        case str():
            return Value(STRING, x)
        case [str(), *_]:
            return Value(ARRAY, x, STRING)
        case [float(), *_]:
            return Value(ARRAY, x, F32)
    return Value(ARRAY, x, I32)


@dataclass
class Row:
    """A row of the table of tensors; `dims` innermost first, `offset` None for the right one."""

    name: str | bytes
    dims: list[int]
    kind: int
    data: bytes
    offset: int | None = None
    ndim: int | None = None

    def encode(self, offset: int) -> bytes:
        dims = struct.pack(f"<I{len(self.dims)}Q", len(self.dims) if self.ndim is None else self.ndim, *self.dims)
        return text(self.name) + dims + struct.pack("<IQ", self.kind, offset if self.offset is None else self.offset)


@dataclass
class Gguf:
    """A file; the fields that are None are computed."""

    metadata: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    version: bytes = struct.pack("<I", 3)
    magic: bytes = b"GGUF"
    tensor_count: int | None = None
    key_count: int | None = None
    alignment: int = 32
    more_keys: bytes = b""

    def header(self) -> bytes:
        """All but the padding and the data."""
        counts = (
            len(self.rows) if self.tensor_count is None else self.tensor_count,
            len(self.metadata) if self.key_count is None else self.key_count,
        )
        keys = b"".join(text(key) + value(x).encode() for key, x in self.metadata.items())
        rows, offset = b"", 0
        for row in self.rows:
            rows += row.encode(offset)
            offset += len(row.data) + -len(row.data) % self.alignment
        return self.magic + self.version + struct.pack("<QQ", *counts) + keys + self.more_keys + rows

    def encode(self) -> bytes:
        whole = self.header()
        for row in self.rows:
            whole += bytes(-len(whole) % self.alignment) + row.data
        return whole

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encode())
        return path


def row(name: str, values: np.ndarray, kind: str = "F32") -> Row:
    """A tensor in any type that the `gguf` package can quantize to."""
    code = GGMLQuantizationType[kind]
    data = values.astype(np.float32) if kind == "F32" else quants.quantize(values.astype(np.float32), code)
    return Row(name, list(values.shape[::-1]), code.value, data.tobytes())


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k of a Llama: neighbours turn together."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """The metadata of a small model; `changes` are keys below the architecture, with `__` for a dot."""
    base = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": DIM,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD_DIM,
    }
    base |= {key.replace("__", "."): x for key, x in changes.items()}
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, *[1] * 9, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    under = {f"{arch}.{key}": x for key, x in base.items() if x is not None}
    return {"general.architecture": arch, **under, **tokenizer}


def weights(seed: int = 0, *, tied: bool = False, biases: bool = False, norms: bool = False) -> dict[str, np.ndarray]:
    """Random weights of the small model under GGUF's names, q and k in Hugging Face's order."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), DIM), "output_norm.weight": (DIM,)}
    if not tied:
        shapes["output.weight"] = (len(TOKENS), DIM)
    for layer in range(LAYERS):
        b = f"blk.{layer}."
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes |= {b + "attn_norm.weight": (DIM,), b + "ffn_norm.weight": (DIM,)}
        shapes |= {b + "attn_q.weight": (q, DIM), b + "attn_k.weight": (kv, DIM), b + "attn_v.weight": (kv, DIM)}
        shapes |= {b + "attn_output.weight": (DIM, q), b + "ffn_down.weight": (DIM, HIDDEN)}
        shapes |= {b + "ffn_gate.weight": (HIDDEN, DIM), b + "ffn_up.weight": (HIDDEN, DIM)}
        if biases:
            shapes |= {b + "attn_q.bias": (q,), b + "attn_k.bias": (kv,), b + "attn_v.bias": (kv,)}
        if norms:
            shapes |= {b + "attn_q_norm.weight": (HEAD_DIM,), b + "attn_k_norm.weight": (HEAD_DIM,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model(
    arch: str = "llama", kind: str = "F32", *, tensors: dict[str, np.ndarray] | None = None, **changes: Any
) -> Gguf:
    """A whole small model whose matrices are of type `kind`."""
    rows = []
    for name, values in (weights() if tensors is None else tensors).items():
        heads = HEADS if "attn_q." in name else KV_HEADS if "attn_k." in name else 0
        stored = interleave(values, heads) if heads and arch == "llama" else values
        rows.append(row(name, stored, kind if values.ndim == 2 else "F32"))
    return Gguf(metadata(arch, **changes), rows)
