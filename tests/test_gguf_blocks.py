"""ggml's blocks: each type is decoded as `gguf` does, and what becomes MLX's packed form keeps its values."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from gguf_builder import TOKENS, Row, model, row, weights

from mlx_tformer.checkpoint.gguf import blocks as gguf_blocks
from mlx_tformer.checkpoint.gguf.container import TENSOR_TYPES
from mlx_tformer.checkpoint.gguf.file import GgufFile

PACKED = ["Q4_0", "Q4_1", "Q8_0"]
BY_THE_PACKAGE = [t.name for t in TENSOR_TYPES.values() if t.name not in ("BF16", "F16", "F32", "Q8_K")]
SCALE_BYTES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q6_K": (208, 210)}  # elsewhere they come first


def blocks(kind: str, rows: int = 5, blocks_a_row: int = 3, seed: int = 0) -> np.ndarray:
    """Random bytes, with scales and minima that are finite float16 numbers of many sizes."""
    rng = np.random.default_rng(seed)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    raw = rng.integers(0, 256, (rows * blocks_a_row, size), dtype=np.uint8)
    start, end = SCALE_BYTES.get(kind, (0, 4 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2))
    halves = rng.standard_normal((len(raw), (end - start) // 2)) * 10.0 ** rng.integers(-7, 2, (len(raw), 1))
    raw[:, start:end] = halves.astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def bits(values: np.ndarray | mx.array) -> np.ndarray:
    """The bits of float32 values, -0 as 0."""
    return (np.array(values, dtype=np.float32) + np.float32(0)).view(np.uint32)


def unpacked(raw: np.ndarray, kind: str) -> mx.array:
    """What MLX makes of the packed form in float32."""
    parts = [gguf_blocks.PARTS[part](raw, kind) for part in ("weight", "scales", "biases")]
    assert [part.dtype for part in parts] == [mx.uint32, mx.float16, mx.float16]
    scales, biases = (part.astype(mx.float32) for part in parts[1:])
    return mx.dequantize(parts[0], scales, biases, group_size=32, bits=gguf_blocks.PACKED_BITS[kind], mode="affine")


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for code, kind in TENSOR_TYPES.items():
        assert (kind.elements, kind.nbytes) == GGML_QUANT_SIZES[GGMLQuantizationType(code)]
        assert GGMLQuantizationType(code).name == kind.name


@pytest.mark.parametrize("kind", BY_THE_PACKAGE)
def test_quantized_types_are_decoded_as_the_gguf_package_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = blocks(kind)
    reference = quants.dequantize(raw, GGMLQuantizationType[kind])
    assert np.isfinite(reference).all() and len(np.unique(reference)) > 50
    assert (bits(gguf_blocks.to_dense(raw, kind)) == bits(reference)).all()
    monkeypatch.setattr(gguf_blocks, "_CHUNK", 1)  # a row at a time
    assert (bits(gguf_blocks.to_dense(raw, kind)) == bits(reference)).all()


def test_q8_k_is_its_scale_times_its_signed_bytes() -> None:
    block = np.zeros(292, np.uint8)
    block[:4] = np.float32(0.37).reshape(1).view(np.uint8)
    block[4:260] = np.arange(256)
    block[260:] = 77  # the sums have no say
    expected = [np.float32(0.37) * np.float32(q if q < 128 else q - 256) for q in range(256)]
    assert np.array(gguf_blocks.to_dense(np.stack([block, block]), "Q8_K")).tolist() == [expected, expected]


@pytest.mark.parametrize(("kind", "size"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_plain_types_keep_every_bit(kind: str, size: int) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (4, 8 * size), dtype=np.uint8)
    found = gguf_blocks.to_dense(raw, kind)
    assert found.dtype == gguf_blocks.dense_dtype(kind) and found.shape == (4, 8)
    assert np.array(found.view(mx.uint8)).tobytes() == raw.tobytes()


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("seed", range(3))
def test_the_packed_form_has_exactly_the_values_of_the_gguf_package(kind: str, seed: int) -> None:
    raw = blocks(kind, rows=7, seed=seed)
    assert gguf_blocks.packs_exactly(raw, kind)
    assert (bits(unpacked(raw, kind)) == bits(quants.dequantize(raw, GGMLQuantizationType[kind]))).all()


@pytest.mark.parametrize("kind", PACKED)
def test_the_smallest_scales_survive_packing(kind: str) -> None:
    raw = blocks(kind)
    raw.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])[:, :2] = np.array([1, 0], np.uint8)  # 2 ** -24
    reference = quants.dequantize(raw, GGMLQuantizationType[kind])
    assert (bits(unpacked(raw, kind)) == bits(reference)).all()


@pytest.mark.parametrize("kind", PACKED)
def test_a_product_with_the_packed_matrix_is_the_product_with_its_values(kind: str) -> None:
    raw = blocks(kind)
    packed, scales, biases = (gguf_blocks.PARTS[part](raw, kind) for part in ("weight", "scales", "biases"))
    dense = quants.dequantize(raw, GGMLQuantizationType[kind]).astype(np.float64)
    x = np.random.default_rng(1).standard_normal((2, dense.shape[1])).astype(np.float32)
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    y = mx.quantized_matmul(mx.array(x), packed, scales, biases, group_size=32, bits=gguf_blocks.PACKED_BITS[kind])
    np.testing.assert_allclose(np.array(y), x @ dense.T, rtol=0, atol=2e-6 * np.abs(x).sum() * np.abs(dense).max())


@pytest.mark.parametrize(("kind", "fits", "overflows"), [("Q8_0", 511.5, 512.0), ("Q4_0", 8184.0, 8192.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_bias_beyond_float16_makes_the_matrix_dense(
    kind: str, fits: float, overflows: float, sign: int, tmp_path: Path
) -> None:
    code = GGMLQuantizationType[kind]
    name = "model.layers.0.mlp.up_proj.weight"
    for scale, packed in ((fits, True), (overflows, False), (np.inf, False)):
        file = model(kind=kind)
        broken = next(r for r in file.rows if r.name == "blk.0.ffn_up.weight")
        raw = np.frombuffer(broken.data, np.uint8).reshape(broken.dims[1], -1).copy()
        last = raw.shape[1] - GGML_QUANT_SIZES[code][1]
        raw[-1, last : last + 2] = np.array([sign * scale], np.float16).view(np.uint8)
        broken.data = raw.tobytes()
        read = GgufFile(file.write(tmp_path / "a.gguf"))
        assert ("model.layers.0.mlp.up_proj" in read.quantization) is packed
        assert "model.layers.0.mlp.down_proj" in read.quantization
        assert read.tensors[name].dtype == (mx.uint32 if packed else mx.float32)
        if scale == overflows:
            assert (bits(read.read(name)) == bits(quants.dequantize(raw, code))).all()


def module_values(file: GgufFile, module: str) -> np.ndarray:
    """The weight of a module in float32, whatever form it has."""
    weight = file.read(f"{module}.weight")
    if module not in file.quantization:
        return np.array(weight.astype(mx.float32))
    scales, biases = (file.read(f"{module}.{part}").astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(weight, scales, biases, **file.quantization[module]))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_file_of_each_type_gives_its_values_in_the_order_of_hugging_face(
    kind: str, packed: bool, tmp_path: Path
) -> None:
    values = weights()
    file = GgufFile(model(kind=kind, tensors=values).write(tmp_path / "a.gguf"), packed=packed)
    assert bool(file.quantization) is (packed and kind in PACKED)
    for theirs, ours in {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "ffn_down": "mlp.down_proj",
    }.items():
        code = GGMLQuantizationType[kind]
        original = values[f"blk.1.{theirs}.weight"]
        expected = original if kind == "F32" else quants.dequantize(quants.quantize(original, code), code)
        assert (bits(module_values(file, f"model.layers.1.{ours}")) == bits(expected)).all()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"])
def test_a_file_of_k_quants_gives_the_values_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    code = GGMLQuantizationType[kind]
    size = GGML_QUANT_SIZES[code][1]
    raw = np.zeros((len(TOKENS), size), np.uint8) if kind == "Q8_K" else blocks(kind, len(TOKENS), 1)
    file = model(tensors={n: x for n, x in weights(tied=True).items() if n != "token_embd.weight"})
    file.rows.append(Row("token_embd.weight", [256, len(TOKENS)], code.value, raw.tobytes()))
    found = GgufFile(file.write(tmp_path / "a.gguf")).read("model.embed_tokens.weight")
    assert found.dtype == mx.float32
    assert (bits(found) == (0 if kind == "Q8_K" else bits(quants.dequantize(raw, code)))).all()


def test_what_tensors_says_is_what_read_gives(
    tmp_path: Path, each_packed_kind: Callable[[Path], list[GgufFile]]
) -> None:
    for file in each_packed_kind(tmp_path):
        for name, tensor in file.tensors.items():
            array = file.read(name)
            assert (array.shape, array.dtype, array.nbytes) == (tensor.shape, tensor.dtype, tensor.nbytes), name
        assert file.origin.keys() == file.tensors.keys()


@pytest.fixture
def each_packed_kind() -> Callable[[Path], list[GgufFile]]:
    return lambda folder: [GgufFile(model(kind=kind).write(folder / f"{kind}.gguf")) for kind in PACKED]


def test_a_vector_is_never_packed(tmp_path: Path) -> None:
    file = model()
    file.rows = [row(r.name, np.ones(64), "Q8_0") if r.name == "output_norm.weight" else r for r in file.rows]
    read = GgufFile(file.write(tmp_path / "a.gguf"))
    assert read.quantization == {} and read.read("model.norm.weight").shape == (64,)
