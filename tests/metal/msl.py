"""Run kernels written for mx.fast.metal_kernel on a CPU, and say what is wrong with them.

`metal_kernel` takes the same arguments as MLX's and its result is called in the same way, but the kernel runs on the
CPU: MLX itself writes out the complete Metal source (it can, on any machine, while a function is being exported), the
source is compiled as C++ against the headers in shim/, and engine.cpp runs the grid thread by thread.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from metal_source import checkable, faulty_line, naked_pointer, translate

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("MLX_TFORMER_TEST_CACHE", Path.home() / ".cache" / "mlx_tformer")) / "metal"
METAL_KERNEL = mx.fast.metal_kernel  # MLX's own, should someone put ours in its place

GPP = """g++ -std=c++17 -O1 -g1 -fPIC -ffp-contract=off -fno-exceptions -fno-rtti -U_FORTIFY_SOURCE
    --param tsan-instrument-func-entry-exit=0 -fsingle-precision-constant -fexcess-precision=16
    -Wno-attributes -Wno-literal-suffix -Wno-unknown-pragmas"""
CLANG = """-std=c++14 -fsyntax-only -x c++ - -ffreestanding -target arm64-apple-macosx -fno-exceptions -fno-rtti
    -Wall -Wextra -Werror=vla -Xclang -cl-single-precision-constant -Wno-user-defined-literals
    -Wno-unknown-attributes -Wno-c++17-extensions -Wno-undefined-inline -Wno-undefined-internal"""

ARGUMENTS = 31  # buffers that a Metal kernel can have, shapes and strides among them


class KernelFault(Exception):
    """The kernel did something that Metal leaves undefined."""


class Refused(Exception):
    """A compiler does not take the kernel."""


@dataclass(frozen=True)
class Settings:
    """How kernels run until `using` says otherwise."""

    strict: bool = False
    """Let clang first look for faulty address spaces and words that Metal forbids."""
    order: int = 0
    """0: threads run in order; 1: in reverse; more: shuffled with this seed."""


settings = Settings()


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Run kernels with other settings inside the block."""
    global settings
    before = settings
    settings = replace(settings, **changes)
    try:
        yield
    finally:
        settings = before


def clang() -> str | None:
    """The newest clang++ here, or None."""
    return next(filter(None, map(shutil.which, ["clang++", *(f"clang++-{n}" for n in range(22, 13, -1))])), None)


# ---- arrays as bytes ----


def _numpy(a: mx.array, as_it_lies: bool = False) -> np.ndarray:
    a = a.view(mx.uint16) if a.dtype == mx.bfloat16 else a
    return np.array(a, copy=False) if as_it_lies else np.array(mx.contiguous(a))


def _mlx(n: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(n).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(n)


def _extent(n: np.ndarray) -> int:
    """Bytes from the first element to the end of the last one."""
    if not n.size:
        return 0
    return n.itemsize + sum((size - 1) * stride for size, stride in zip(n.shape, n.strides, strict=True))


# ---- compilers ----


def check(source: str, name: str) -> None:
    """Ask clang what Apple's compiler would say of a kernel that MLX has written out; raises Refused if it objects."""
    if found := naked_pointer(source, name):
        raise Refused(f"error: a pointer or reference needs an address space: {found}")
    compiler = clang()
    if compiler is None:
        raise Refused("strict mode needs clang++")
    text = checkable(source, name)
    stamp = hashlib.sha256((HERE / "check" / "prelude.h").read_bytes() + (compiler + CLANG).encode())
    stamp.update(text.encode())
    passed = CACHE / f"checked-{stamp.hexdigest()[:16]}"
    if not passed.exists():
        done = subprocess.run(
            [compiler, *CLANG.split(), "-I", str(HERE / "check")], input=text, capture_output=True, text=True
        )
        if done.returncode:
            raise Refused(done.stderr)
        CACHE.mkdir(parents=True, exist_ok=True)
        passed.touch()


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{' '.join(map(str, command))}\n{done.stderr}")


@functools.cache
def _tools() -> str:
    """A hash of everything besides the kernel that its library is made from."""
    files = [HERE / "engine.cpp", HERE / "engine.h", *sorted((HERE / "shim").iterdir())]
    return hashlib.sha256(b"".join(p.read_bytes() for p in files) + GPP.encode()).hexdigest()[:16]


def build(text: str) -> Path:
    """Compile a translation unit with the engine into a shared library, or find it in the cache."""
    engine = CACHE / f"engine-{_tools()}.o"
    library = CACHE / f"kernel-{hashlib.sha256((_tools() + text).encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        if not engine.exists():
            _run([*GPP.split(), "-O2", "-c", HERE / "engine.cpp", "-o", f"{work}/engine.o"])
            Path(f"{work}/engine.o").replace(engine)
        Path(f"{work}/kernel.cpp").write_text(text)
        _run(
            [
                *GPP.split(),
                "-fsanitize=thread,bounds,integer-divide-by-zero",
                "-I",
                HERE / "shim",
                "-c",
                f"{work}/kernel.cpp",
                "-o",
                f"{work}/kernel.o",
            ]
        )
        _run(["g++", "-shared", "-Wl,-Bsymbolic", f"{work}/kernel.o", engine, "-o", f"{work}/kernel.so"])
        Path(f"{work}/kernel.so").replace(library)
    return library


# ---- the engine ----


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("unit", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    )


class _Dispatch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("buffers", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("buffer", ctypes.POINTER(_Buffer)),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("message", ctypes.c_char * 512),
    )


_loaded: dict[Path, ctypes.CDLL] = {}
Buffers = list[tuple[str, np.ndarray, int]]
"""Name, memory, and kind: 0 for an input, 1 for an output, 2 for an output with a first value."""


def _dispatch(library: Path, source: str, buffers: Buffers, grid: Sequence[int], group: Sequence[int]) -> None:
    if library not in _loaded:
        _loaded[library] = ctypes.CDLL(str(library))
    rows = (_Buffer(a.ctypes.data, _extent(a), a.itemsize, kind, name.encode()) for name, a, kind in buffers)
    table, three = (_Buffer * len(buffers))(*rows), ctypes.c_uint32 * 3
    job, result = _Dispatch(three(*grid), three(*group), len(buffers), settings.order, table), _Result()
    if _loaded[library].msl_dispatch(ctypes.byref(job), ctypes.byref(result)):
        where = faulty_line(source, library, result.pc) if result.pc else ""
        raise KernelFault(result.message.decode() + where)


class Kernel:
    """What `metal_kernel` returns: call it as one calls MLX's."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, str] | None = None,
    ):
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.as_it_lies = not ensure_row_contiguous
        self.real: Any = METAL_KERNEL(
            name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs, compile_options
        )

    def write_out(self, inputs: list[mx.array], **launch: Any) -> tuple[str, str, list[int], list[int], Any]:
        """Name, full Metal source, grid, threadgroup, and which shapes are passed, as MLX would send it to the GPU."""
        found: list[Any] = []

        def see(node: dict[str, Any]) -> None:
            if node.get("name") == "CustomKernel":
                found.append(node["arguments"])

        mx.export_function(see, lambda *xs: self.real(inputs=list(xs), **launch), *inputs)
        name, source, *numbers, infos = found[0][:9]
        return name, source, numbers[:3], numbers[3:], infos

    def _inputs(self, inputs: list[mx.array], infos: Any) -> Buffers:
        buffers: Buffers = []
        for var, x, (shape, strides, ndim) in zip(self.input_names, inputs, infos, strict=True):
            data = _numpy(x, self.as_it_lies)
            buffers.append((var, data, 0))
            if x.ndim and shape:
                buffers.append((f"{var}_shape", np.array(x.shape, np.int32), 0))
            if x.ndim and strides:
                buffers.append((f"{var}_strides", np.array(data.strides, np.int64) // data.itemsize, 0))
            if x.ndim and ndim:
                buffers.append((f"{var}_ndim", np.array([x.ndim], np.int32), 0))
        return buffers

    def __call__(
        self,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
        **ignored: Any,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        launch = {"output_shapes": output_shapes, "output_dtypes": output_dtypes} | {"template": list(template)}
        launch = {k: v for k, v in launch.items() if v} | {"grid": grid, "threadgroup": threadgroup}
        name, source, threads, group, infos = self.write_out(arrays, **launch)
        outputs: Buffers = []
        for var, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True):
            filled = _numpy(mx.full(shape, 0 if init_value is None else init_value, dtype))
            if init_value is None:
                filled.view(np.uint8)[...] = 0xFF  # MLX leaves fresh outputs as they are
            outputs.append((var, filled, 1 if init_value is None else 2))
        if settings.strict:
            check(source, name)
        buffers = self._inputs(arrays, infos) + outputs
        if len(buffers) > ARGUMENTS:
            raise KernelFault(f"{len(buffers)} buffers, more than {ARGUMENTS}")
        _dispatch(build(translate(source, name)), source, buffers, threads, group)
        return [_mlx(a, dtype) for (_, a, _), dtype in zip(outputs, output_dtypes, strict=True)]


def metal_kernel(*args: Any, **kwargs: Any) -> Kernel:
    """What stands in for `mx.fast.metal_kernel`."""
    return Kernel(*args, **kwargs)
