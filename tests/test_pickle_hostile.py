"""Pickles that want more than plain tensors are refused, take little memory, and nothing of them runs."""

import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest
from pickle_builder import (
    FILES,
    FOUR,
    MADE,
    ONE,
    SOUND,
    call,
    legacy_head,
    named,
    number,
    pickled,
    refused,
    series,
    storage,
    table,
    tensor,
    text,
    write,
    write_zip,
)

from mlx_tformer.checkpoint.pickle_file import PickleFile
from mlx_tformer.errors import BadInput

# --- row 10: nothing runs ---

GLOBALS = [
    *(
        "os.system",
        "posix.system",
        "nt.system",
        "builtins.eval",
        "builtins.exec",
        "builtins.getattr",
        "__builtin__.eval",
    ),
    *("subprocess.Popen", "runpy._run_code", "importlib.import_module", "pickle.loads", "operator.attrgetter"),
    *("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.core.multiarray.scalar", "_codecs.encode"),
    *("torch.load", "torch.hub.load", "torch.os.system", "torch._utils.os.system", "torch.jit._load", "torch.Tensor"),
    *("torch.ComplexFloatStorage", "torch.QInt8Storage", "torch.float8_e4m3fn", "torch.complex64"),
    *("torch._utils._rebuild_qtensor", "torch._utils._rebuild_sparse_tensor", "torch._tensor._rebuild_from_type_v2"),
    *("collections.OrderedDict.fromkeys", "collections.Counter", "argparse.Namespace", "mlx_tformer.load"),
]


@pytest.mark.parametrize("name", GLOBALS)
def test_a_pickle_that_asks_for_anything_else_is_refused_by_name(tmp_path: Path, name: str) -> None:
    module, _, leaf = name.rpartition(".")
    arguments = series(text(f"touch {tmp_path}/ran"))
    asked = {
        "call": named(name) + arguments + b"R",
        "call by text on the stack": text(module) + text(leaf) + b"\x93" + arguments + b"R",
        "new object": named(name) + arguments + b"\x81",
        "state": call("collections.OrderedDict") + named(name) + b"b",
        "named only": named(name),
    }
    for how, content in asked.items():
        program = table({"a": tensor(storage(4), [2, 2], [2, 1]), how: content})
        refused(write(tmp_path / "x.bin", program), f"asks for {name}, but only plain tensors", "float32", "bfloat16")
        (tmp_path / "y.bin").write_bytes(legacy_head(pickled(program), "0") + number(4)[1:] + bytes(4) + FOUR)
        refused(tmp_path / "y.bin", f"asks for {name}, but only plain tensors")
    assert {path.name for path in tmp_path.iterdir()} == {"x.bin", "y.bin"}


def test_the_same_pickle_runs_in_pythons_own_unpickler(tmp_path: Path) -> None:
    pickle.loads(pickled(call("os.system", text(f"touch {tmp_path}/ran"))))
    assert (tmp_path / "ran").exists()


OPCODES = {
    "INST": b"(" + text("true") + b"ios\nsystem\n",
    "OBJ": b"(" + named("torch.Size") + series(number(1)) + b"o",
    "EXT1": b"\x82\x01",
    "PERSID": b"P0\n",
    "REDUCE": b"\x8f",
    "DUP": b"2",
    "STRING": b"S'x'\n",
    "LONG4": b"\x8b\x01\x00\x00\x00\x01",
    "BYTEARRAY8": b"\x96" + bytes(8),
    "NEWOBJ_EX": named("torch.Size") + b")}\x92",
}


@pytest.mark.parametrize("name", ["INST", "EXT1", "PERSID", "DUP", "STRING", "LONG4", "BYTEARRAY8", "NEWOBJ_EX"])
def test_an_opcode_that_no_state_dict_needs_is_refused(tmp_path: Path, name: str) -> None:
    refused(write(tmp_path / "x.bin", OPCODES[name]), f"found the pickle opcode {name}")


UNSOUND = {
    "an empty stack": b"",
    "a missing operand": b"a",
    "a missing mark": b"u",
    "an unknown memo": b"h\x07",
    "an odd number of entries": b"}(" + text("a") + b"u",
    "a list for a dict": b"](" + text("a") + text("b") + b"u",
    "a dict for a list": b"}K\x01a",
    "a tuple as a key": b"}" + series() + b"K\x01s",
    "a float as a key": b"}G" + bytes(8) + b"K\x01s",
    "a large number as a key": b"}" + number(2**61 - 1) + b"K\x01s",
    "a key that stands twice": b"}(" + (text("a") + b"K\x01") * 2 + b"u",
    "a call of text": text("a") + series() + b"R",
    "a call of a kind": named("torch.float32") + series() + b"R",
    "arguments that are no tuple": named("torch.Size") + b"]R",
    "too few arguments": call("torch._utils._rebuild_tensor_v2"),
    "too many arguments": call("collections.OrderedDict", b"]"),
    "a tensor of nothing": tensor(b"N", [2], [1]),
    "a tensor of a tensor": tensor(tensor(storage(4), [4], [1]), [2], [1]),
    "a tensor of bytes": tensor(storage(16, kind="torch.storage.UntypedStorage"), [2], [1]),
    "a parameter of nothing": call("torch._utils._rebuild_parameter", b"N", b"\x88", b"N"),
    "a storage of text": text("storage") + b"Q",
    "a storage that is none": series(text("module"), named("torch.FloatStorage"), text("0"), text("cpu"), b"K\x04")
    + b"Q",
    "a storage of no class": series(text("storage"), text("x"), text("0"), text("cpu"), b"K\x04") + b"Q",
    "a negative count": storage(-4),
    "one storage of two sizes": series(storage(4), storage(3)),
    "one storage of two kinds": series(storage(4), storage(4, kind="torch.IntStorage")),
    "attributes of a list": b"]}b",
    "attributes of a tensor": tensor(storage(4), [4], [1]) + b"}b",
    "a negative offset": tensor(storage(4), [1], [1], -1),
    "a negative side": tensor(storage(4), [-1], [1]),
    "a negative stride": tensor(storage(4), [2], [-1], 3),
    "fewer strides than sides": tensor(storage(4), [2, 2], [1]),
    "a negated tensor": call(
        "torch._utils._rebuild_tensor_v2",
        *(storage(4), number(0), series(number(4)), series(number(1)), b"\x89", b"N", table({"neg": b"\x88"})),
    ),
    "nine axes": tensor(storage(4), [1] * 9, [1] * 9),
}


@pytest.mark.parametrize("content", UNSOUND.values(), ids=UNSOUND)
def test_a_pickle_that_is_no_sound_program_is_refused(tmp_path: Path, content: bytes) -> None:
    refused(write(tmp_path / "x.bin", content), "not a sound pickle of a state dict: ")


FAR = {
    "offset": ([4], [1], 1, "found values up to byte 20 of a storage of 16"),
    "stride": ([2, 2], [3, 1], 0, "found values up to byte 20"),
    "a far offset": ([1], [1], 2**70, "found values up to byte"),
    "a far stride": ([2, 1], [2**62, 1], 0, "found values up to byte"),
    "more than there are": ([5], [1], 0, "found values up to byte 20"),
    "a product that overflows": ([2**31 - 1] * 8, [1] * 8, 0, "found values up to byte"),
    "a repeated value": ([5], [0], 0, "found shape (5,) over a storage of 16 bytes, expected no value to be repeated"),
    "endless repetition": ([2**31 - 1] * 8, [0] * 8, 0, "found shape"),
    "a long side": ([2**31], [0], 0, "found shape (2147483648,), expected sides of at most 2147483647"),
    "a long empty side": ([0, 2**80], [1, 1], 0, "found shape"),
}


@pytest.mark.parametrize("case", FAR)
def test_a_tensor_that_does_not_lie_in_its_storage_is_refused(tmp_path: Path, case: str) -> None:
    shape, strides, offset, problem = FAR[case]
    path = write(tmp_path / "x.bin", table({"some.weight": tensor(storage(4), shape, strides, offset)}))
    refused(path, f"some.weight: {problem}")


def test_the_stride_of_an_axis_of_one_means_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bin", table({"a": tensor(storage(4), [1, 4, 1], [2**70, 1, 0])}))
    assert PickleFile(path).read("a").tolist() == [[[1], [2], [3], [4]]]
    assert next(PickleFile(path).blocks("a", 1)).shape == (1, 4, 1)


SHAPES = {
    "a number": (b"K\x07", "expected a state dict"),
    "a tensor": (ONE["a"], "holds a tensor, expected a state dict"),
    "a list": (b"](" + ONE["a"] + b"e", "holds a list"),
    "nothing": (b"}", "found nothing; expected tensors by name"),
    "no tensors": (table({"x": b"K\x01"}), "found x; expected tensors by name"),
    "an unknown key": (table({"weights": table(ONE)}), "found weights; expected tensors by name"),
    "two state dicts": (table({"model": table(ONE), "module": table(ONE)}), "found model, module; expected"),
    "two levels": (table({"model": table({"state_dict": table(ONE)})}), "found model; expected"),
    "a dict among tensors": (table(ONE | {"b": table(ONE)}), "b: found a dict, expected a tensor"),
    "a list among tensors": (table(ONE | {"b": b"]"}), "b: found a list, expected a tensor"),
    "a name that is a number": (table(ONE) + b"K\x07" + ONE["a"] + b"s", "found 7 for a name, expected text"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, case: str) -> None:
    content, problem = SHAPES[case]
    refused(write(tmp_path / "x.bin", content), problem)


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_a_state_dict_may_lie_one_level_down(tmp_path: Path, key: str) -> None:
    file = PickleFile(write(tmp_path / "x.bin", table({"epoch": b"K\x07", key: table(ONE)})))
    assert file.read("a").tolist() == [1, 2, 3, 4]
    assert file.notes == [f"ignored epoch in x.bin, which lies beside {key}"]


def test_names_of_any_length_and_kind_give_messages_of_one_short_line(tmp_path: Path) -> None:
    odd = "\x1b[2J\n" + "n" * 10**6
    path = write(tmp_path / "x.bin", table({odd: tensor(storage(4), [5], [1]), "b": b"K\x01"}))
    assert len(refused(path, "\\x1b[2J\\nnnn")) < 1000
    file = PickleFile(write(tmp_path / "x.bin", table(ONE | {odd: b"K\x01"})))
    assert len(file.notes[0]) < 1000 and file.notes[0].isprintable()


# --- bombs and noise ---

PROBE = """
import resource, sys
from pathlib import Path
from mlx_tformer.checkpoint.pickle_file import PickleFile
from mlx_tformer.errors import BadInput

def peak():
    status = Path("/proc/self/status")
    if status.exists():  # Linux counts in what the parent had before it started this process
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

PickleFile(Path(sys.argv[1]))
before = peak()
try:
    PickleFile(Path(sys.argv[2]))
    print("read", peak() - before)
except BadInput as error:
    print("refused:", error, peak() - before)
"""
"""Reads a sound file to be warm, then another one, in a process that may well end."""

BOMBS = {
    "a memo at four billion": b"}r\xff\xff\xff\xff",
    "text of four gigabytes": b"X\xff\xff\xff\xff",
    "text of 2^62 bytes": b"\x8d" + struct.pack("<Q", 2**62),
    "a million nested lists": b"]" * 999_000 + b"a" * 900,
    "a key of nested tuples": b"})" + b"\x85" * 900_000 + b"K\x01s",
    "a deep tuple for a shape": named("torch.Size") + b")" + b"\x85" * 900_000 + b"\x85R",
    "a million marks": b"(" * 999_000,
    "too many opcodes": b"N" * 1_100_000,
    "a long shape again and again": b"("
    + b"K\x01" * 300_000
    + b"tq\x00"
    + (named("torch.Size") + b"h\x00\x85R") * 9_000,
    "a list of itself": b"]q\x00" + b"h\x00a" * 300_000,
    "lists of lists of lists": b"]q\x00" + (b"](h\x00h\x00h\x00h\x00eq\x00") * 100_000,
    "many tensors": table({"a": ONE["a"] + b"q\x00"}) + b"".join(text(f"{i}") + b"h\x00s" for i in range(250_000)),
    "a pickle of 17 MB": text("x" * 17 * 2**20),
    "text that takes four times its length": text("x" * 15 * 2**20 + "\U0001f600"),
}


WORDS = {
    "many tensors": "read",
    "too many opcodes": "found a pickle of more than 1000000 opcodes",
    "a pickle of 17 MB": "data.pkl: found 17825800 bytes, expected at most 16777216",
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_bomb_is_refused_with_little_memory(tmp_path: Path, case: str) -> None:
    path, sound = write(tmp_path / "x.bin", BOMBS[case]), write(tmp_path / "sound.bin", SOUND)
    probe = [sys.executable, "-c", PROBE, str(sound), str(path)]
    run = subprocess.run(probe, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-500:]
    assert WORDS.get(case, "refused: ") in run.stdout, run.stdout
    assert int(run.stdout.split()[-1]) < 200e6 + path.stat().st_size


def test_a_directory_of_many_entries_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bin", SOUND)
    content = path.read_bytes()
    start, end = content.index(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    directory = content[start:end] * (9 * 2**20 // (end - start))
    ending = bytearray(content[end:])
    ending[12:20] = struct.pack("<II", len(directory), start)
    path.write_bytes(content[:start] + directory + ending)
    refused(path, "found a directory of", "expected at most 8388608")


def test_a_huge_sparse_file_is_opened_without_reading_it(tmp_path: Path) -> None:
    path, count = tmp_path / "x.bin", 2**35
    program = pickled(table({"a": tensor(storage(count), [2**10, 2**25], [2**25, 1])}))
    head = legacy_head(program, "0") + struct.pack("<q", count)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 4 * count)
    assert PickleFile(path).tensors["a"].nbytes == 4 * count
    assert next(PickleFile(path).blocks("a", 1)).shape == (1, 2**25)


def mutated(rng: random.Random, content: bytes) -> bytes:
    """The content with one to three random changes."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(changed))
        match rng.randrange(5):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at : at + rng.randint(1, 9)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 9))
            case 4:
                changed[at:at] = changed[rng.randrange(len(changed)) :][: rng.randint(1, 30)]
    return bytes(changed)


def test_two_thousand_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    rng, path, read = random.Random(3), tmp_path / "x.bin", 0
    small = [(MADE / name).read_bytes() for name in FILES if name != "kinds.bin"]
    with zipfile.ZipFile(MADE / "views.bin") as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    program = entries.pop("data.pkl")
    for i in range(2000):
        if i % 2:
            path.write_bytes(mutated(rng, rng.choice(small)))
        else:
            write_zip(path, mutated(rng, program), others=entries)
        try:
            file = PickleFile(path)
            for name in file.tensors:
                mx.eval(file.read(name), *file.blocks(name, 2))
            read += 1
        except BadInput as error:
            assert "\n" not in str(error)
    assert 100 < read < 1900, read
