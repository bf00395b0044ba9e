"""How a kernel is made and started: its source read from the `.metal` file beside this one, by a factory that tests
replace.

`MLX_TFORMER_KERNELS=off` leaves everything to MLX and to the plain twins.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

Place = Literal["metal", "cpu", "trial"]
"""Where a kernel would run: on Metal, nowhere (the CPU has none), or on trial, where it runs whether or not it pays."""


@dataclass(frozen=True)
class Maker:
    """What makes kernels (`mx.fast.metal_kernel` or something that is called in the same way), and where they run."""

    make: Callable[..., Any]
    place: Place | None = None
    """None: wherever MLX's default device is."""


MLX = Maker(mx.fast.metal_kernel)
_maker: ContextVar[Maker] = ContextVar("maker", default=MLX)


@contextmanager
def made_by(make: Callable[..., Any], place: Place = "trial") -> Iterator[None]:
    """Inside the block, kernels are made by `make` and said to run at `place`."""
    token = _maker.set(Maker(make, place))
    try:
        yield
    finally:
        _maker.reset(token)


def place() -> Place:
    """Where kernels run now; "cpu" too where the user switched them off."""
    chosen = _maker.get().place
    if chosen is not None:
        return chosen
    if os.environ.get("MLX_TFORMER_KERNELS", "").lower() == "off":
        return "cpu"
    return "metal" if mx.metal.is_available() and mx.default_device() == mx.gpu else "cpu"


@dataclass(frozen=True)
class Kernel:
    """One `.metal` file with the names of what goes in and comes out; `flags` are macros that choose between variants
    of one file."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What Metal calls it: MLX keeps compiled kernels by name."""
        return "_".join(["mlx_tformer", self.file, *map(str.lower, self.flags)])

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        template: dict[str, mx.Dtype | int | bool],
        grid: tuple[int, int, int],
        group: tuple[int, int, int],
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        """Start it on `inputs`, which may lie in memory as they like; `grid` counts threads, and `outputs` are shapes
        and dtypes."""
        return _made(_maker.get().make, self)(
            inputs=list(inputs),
            template=list(template.items()),
            grid=grid,
            threadgroup=group,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )


@cache
def source(file: str) -> str:
    """The body of a kernel."""
    return (Path(__file__).parent / f"{file}.metal").read_text(encoding="utf-8")


@cache
def _made(make: Callable[..., Any], kernel: Kernel) -> Any:
    return make(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=source(kernel.file),
        header="".join(f"#define {flag} 1\n" for flag in kernel.flags),
        ensure_row_contiguous=False,
    )


def with_gradient(fused: Callable[..., Any], twin: Callable[..., Any], arrays: Sequence[mx.array]) -> Any:
    """fused(*arrays), with the gradient of `twin`: a Metal kernel has none of its own."""
    function = mx.custom_function(fused)

    @function.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> Any:
        given = [cotangents] if isinstance(cotangents, mx.array) else list(cotangents)
        return tuple(mx.vjp(twin, list(primals), given)[1])

    return function(*arrays)
