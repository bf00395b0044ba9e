"""GGUF files that are cut, forged or mutated are refused in one line; each has a twin that loads."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_builder import ARRAY, BOOL, DIM, STRING, U32, Gguf, Row, Value, model, row, text, value, weights

from mlx_tformer.checkpoint.gguf.container import read_container
from mlx_tformer.checkpoint.gguf.file import GgufFile
from mlx_tformer.errors import BadInput, InputOutputError

HUGE = [2**40, 2**62, 2**63, 2**64 - 1]


def small(**changes: Any) -> Gguf:
    """Two tensors and two keys, as `changes` have it."""
    rows = [row("first", np.ones((3, 4))), row("second", np.arange(5))]
    metadata = {"general.name": "small", "some.array": [1, 2, 3]}
    return Gguf(**{"metadata": metadata, "rows": rows} | changes)


def refusal(file: Gguf | bytes, tmp_path: Path) -> str:
    """The one line with which a file is refused; it names the file."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(file if isinstance(file, bytes) else file.encode())
    with pytest.raises(BadInput) as caught:
        read_container(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 500
    return message.removeprefix(f"{path}: ")


def test_a_small_file_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = small().write(tmp_path / "a.gguf")
    found, reference = read_container(path), gguf.GGUFReader(path)
    assert found.metadata["general.name"] == "small" and found.metadata["some.array"].tolist() == [1, 2, 3]
    assert found.version == 3
    for tensor in reference.tensors:
        info = found.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape.tolist())[::-1]
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert found.raw(info).tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_both_little_endian_versions_load(version: int, tmp_path: Path) -> None:
    path = small(version=struct.pack("<I", version)).write(tmp_path / "a.gguf")
    assert set(read_container(path).tensors) == {"first", "second"}


def test_every_kind_of_metadata_value_is_read(tmp_path: Path) -> None:
    kinds = {
        0: 255,
        1: -1,
        2: 65535,
        3: -2,
        4: 2**32 - 1,
        5: -3,
        6: 0.5,
        7: 1,
        8: "é",
        10: 2**64 - 1,
        11: -4,
        12: 1e300,
    }
    values = {f"k{kind}": Value(kind, x) for kind, x in kinds.items()}
    arrays = {f"a{kind}": Value(ARRAY, [x, x], kind) for kind, x in kinds.items()}
    found = read_container(small(metadata={**values, **arrays}).write(tmp_path / "a.gguf")).metadata
    assert {key: found[key] for key in values} == {f"k{kind}": x for kind, x in kinds.items()}
    assert {key: list(found[key]) for key in arrays} == {f"a{kind}": [x, x] for kind, x in kinds.items()}
    assert found["k7"] is True


def test_a_file_cut_at_any_byte_of_the_metadata_is_refused(tmp_path: Path) -> None:
    file = model()
    whole = file.encode()
    for cut in range(len(file.header())):
        refusal(whole[:cut], tmp_path)
    (tmp_path / "whole.gguf").write_bytes(whole)
    assert GgufFile(tmp_path / "whole.gguf").config["num_hidden_layers"] == 2


def test_a_file_cut_in_its_data_names_the_tensor(tmp_path: Path) -> None:
    whole = small().encode()
    assert refusal(whole[:-1], tmp_path).startswith("second: found a file of")
    assert refusal(whole[: len(whole) - 20], tmp_path).startswith("second:")  # the data of `second` are 20 bytes
    assert refusal(whole[: len(whole) - 53], tmp_path).startswith("first:")


@pytest.mark.parametrize("size", HUGE)
def test_forged_counts_and_lengths_are_refused_without_memory_for_them(size: int, tmp_path: Path) -> None:
    word = struct.pack("<Q", size)
    forged = {
        "number of tensors": small(tensor_count=size),
        "number of metadata keys": small(key_count=size),
        "metadata key 2": small(key_count=3, more_keys=text("key", size)),
        "key: ": small(key_count=3, more_keys=text("key") + struct.pack("<I", STRING) + word),
        "numbers: ": small(metadata={"numbers": Value(ARRAY, struct.pack("<I", U32) + word)}),
        "strings: ": small(metadata={"strings": Value(ARRAY, struct.pack("<I", STRING) + word)}),
        "strings[1]": small(metadata={"strings": Value(ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + word)}),
        "tensor 0": Gguf({}, [], tensor_count=1, more_keys=text("name", size) + bytes(40)),
        "first: ": Gguf({}, [Row("first", [size], 0, b"")]),
    }
    for where, file in forged.items():
        tracemalloc.start()
        assert where in refusal(file, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
        tracemalloc.stop()


@pytest.mark.parametrize("alignment", [0, 3, 4, 24, 2**31, "32", [32], 32.0, True])
def test_an_alignment_that_is_no_power_of_two_in_bounds_is_refused(alignment: object, tmp_path: Path) -> None:
    message = refusal(small(metadata={"general.alignment": alignment}), tmp_path)
    assert message.startswith("general.alignment: found") and "expected a power of two" in message


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_an_alignment_of_another_power_of_two_is_kept(alignment: int, tmp_path: Path) -> None:
    file = small(metadata={"general.alignment": alignment}, alignment=alignment)
    container = read_container(file.write(tmp_path / "a.gguf"))
    assert all(info.offset % alignment == 0 for info in container.tensors.values())
    assert container.raw(container.tensors["second"]).view("<f4").tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("dims", "ndim", "kind", "found"),
    [
        ([], 0, 0, "0 dimensions"),
        ([1] * 9, 9, 0, "9 dimensions"),
        ([4], 2**32 - 1, 0, "4294967295 dimensions"),
        ([4, 0], 2, 0, "shape (0, 4)"),
        ([2**32, 2**32], 2, 0, "a file of"),  # the product is 0 in 64 bits
        ([2**62, 4], 2, 0, "a file of"),
        ([2**63 + 1, 2], 2, 0, "a file of"),
        ([2**64 - 32] * 4, 4, 2, "a file of"),
        ([48], 1, 2, "shape (48,) of type Q4_0"),
        ([255], 1, 14, "shape (255,) of type Q6_K"),
        ([4], 1, 16, "tensor type IQ2_XXS"),
        ([4], 1, 28, "tensor type F64"),
        ([4], 1, 4, "tensor type 4"),
        ([4], 1, 2**32 - 1, "tensor type 4294967295"),
    ],
)
def test_a_tensor_of_impossible_shape_or_unknown_type_is_refused(
    dims: list[int], ndim: int, kind: int, found: str, tmp_path: Path
) -> None:
    message = refusal(Gguf({}, [Row("odd", dims, kind, bytes(16), ndim=ndim)]), tmp_path)
    assert message.startswith("odd: ") and found in message and "expected" in message


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        ({"version": struct.pack("<I", 1)}, "version", "version 1"),
        ({"version": struct.pack("<I", 4)}, "version", "version 4"),
        ({"version": struct.pack(">I", 3)}, "version", "big-endian"),
        ({"version": bytes(4)}, "version", "version 0"),
        ({"magic": b"GGML"}, "magic", "47 47 4d 4c"),
        ({"magic": b"FUGG"}, "magic", "46 55 47 47"),
        ({"rows": []}, "number of tensors", "0 tensors"),
        ({"metadata": {"k": Value(13, b"")}}, "k", "value type 13"),
        ({"metadata": {"k": Value(BOOL, 2)}}, "k", "truth value"),
        ({"metadata": {"k": Value(ARRAY, [0, 2], BOOL)}}, "k", "truth value"),
        ({"metadata": {"k": Value(ARRAY, struct.pack("<IQ", ARRAY, 1))}}, "k", "elements of type 9"),
        ({"metadata": {"k": Value(STRING, text(b"a\xff"))}}, "k", "0xff at 1"),
        ({"metadata": {"": 1}}, "metadata key 0", "empty"),
        ({"metadata": {"k" * 65536: 1}}, "metadata key 0", "65536 bytes"),
        ({"key_count": 3, "more_keys": text("some.array") + value(1).encode()}, "metadata key 2", "was there before"),
    ],
)
def test_a_header_that_is_not_as_the_format_says_is_refused(
    change: dict[str, Any], where: str, found: str, tmp_path: Path
) -> None:
    message = refusal(small(**change), tmp_path)
    assert message.startswith(f"{where}: found ") and found in message and "expected" in message


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (Row("first", [4], 0, bytes(16)), "was there before"),
        (Row("", [4], 0, bytes(16)), "without a name"),
        (Row("x" * 65, [4], 0, bytes(16)), "65 bytes"),
        (Row(b"\xff", [4], 0, bytes(16)), "0xff"),
        (Row("second", [4], 0, bytes(16), offset=0), "offset 0, expected 64"),
        (Row("second", [4], 0, bytes(16), offset=32), "offset 32, expected 64"),
        (Row("second", [4], 0, bytes(16), offset=52), "offset 52, expected 64"),
        (Row("second", [4], 0, bytes(16), offset=96), "offset 96, expected 64"),
        (Row("second", [4], 0, bytes(16), offset=2**64 - 32), "expected 64"),
    ],
)
def test_a_duplicate_overlapping_or_misaligned_tensor_is_refused(second: Row, found: str, tmp_path: Path) -> None:
    twin = Row("second", [4], 0, bytes(16))
    first = row("first", np.ones((3, 4)))
    assert found in refusal(Gguf({}, [first, second]), tmp_path)
    assert len(read_container(Gguf({}, [first, twin]).write(tmp_path / "twin.gguf")).tensors) == 2


def test_a_name_that_would_break_the_line_is_escaped(tmp_path: Path) -> None:
    assert refusal(Gguf({}, [Row("two\nlines", [0], 0, b"")]), tmp_path).startswith("two\\nlines: ")


def test_a_text_pointer_instead_of_weights_is_named(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98362432\n"
    assert "Git LFS pointer" in refusal(pointer, tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_not_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "odd.gguf")
    with pytest.raises(BadInput, match="not a regular file"):
        GgufFile(tmp_path / "odd.gguf")


def test_a_path_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputOutputError, match=r"none\.gguf: No such file"):
        GgufFile(tmp_path / "none.gguf")


def test_a_file_that_shrinks_or_changes_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = model().write(tmp_path / "a.gguf")
    file = GgufFile(path)
    name = "model.layers.1.mlp.down_proj.weight"
    assert file.read(name).shape == (DIM, 96)
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(BadInput, match=r"a\.gguf: blk\.1\.ffn_down\.weight: the file changed"):
        file.read(name)


def sentencepiece_model() -> Gguf:
    """A file with what the other lacks: scores, frequency tensors, biases, an own alignment."""
    file = model("llama", "Q4_0", tensors=weights(biases=True), attention__key_length=16)
    file.rows.append(row("rope_freqs.weight", np.array([1.0, 1.5, 4, 8, 8, 8, 8, 8])))
    tokenizer = {"model": "llama", "scores": [float(-i) for i in range(12)], "padding_token_id": 3}
    file.metadata |= {f"tokenizer.ggml.{key}": x for key, x in tokenizer.items()}
    file.metadata |= {"general.alignment": 64, "tokenizer.chat_template": "{{ messages }}"}
    file.alignment = 64
    return file


@pytest.mark.parametrize("make", [lambda: model(kind="Q8_0"), sentencepiece_model], ids=["gpt2", "sentencepiece"])
def test_mutated_files_load_or_are_refused(make: Callable[[], Gguf], tmp_path: Path) -> None:
    """Bytes and words of the header are overwritten; nothing but BadInput may come of it, and both outcomes do."""
    file, path = make(), tmp_path / "mutated.gguf"
    use(GgufFile(file.write(path)))
    whole, length = file.encode(), len(file.header())
    rng = np.random.default_rng(int(os.environ.get("MLX_TFORMER_SEED", "0")))
    refused = 0
    rounds = int(os.environ.get("MLX_TFORMER_FUZZ", "300"))
    for _ in range(rounds):
        path.write_bytes(mutated(whole, length, rng))
        try:
            use(GgufFile(path))
        except BadInput as error:
            assert "\n" not in str(error)
            refused += 1
    assert rounds // 4 < refused < rounds


def mutated(whole: bytes, header: int, rng: np.random.Generator) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(header))
        match rng.integers(4):
            case 0:
                data[place] ^= 1 << rng.integers(8)
            case 1:
                data[place] = rng.integers(256)
            case 2:
                word = struct.pack("<Q", int(rng.choice(np.array([0, 1, 2**31, 2**40, 2**63, 2**64 - 1], np.uint64))))
                data[place : place + 8] = word
            case 3:
                del data[place : place + int(rng.integers(1, 9))]
    return bytes(data)


def use(file: GgufFile) -> None:
    """Everything that a loader would ask of the file."""
    for name, tensor in file.tensors.items():
        array = file.read(name)
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype)
    file.tokenizer_files()
