"""What the benchmarks share: a process of its own for each figure, and tables."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_tformer import LanguageModel


def measured(code: str, *arguments: object, env: Mapping[str, str] | None = None) -> Any:
    """The JSON that a Python program prints last, in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    if run.returncode:
        sys.exit(f"failed: {' '.join(command[2:])[:200]}\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def dense(where: str, dtype: str, packed: bool) -> "LanguageModel":
    """A model to write with. Packed weights are unpacked, unless they are to stay: on a CPU MLX multiplies packed ones
    with several tokens in as many times the time of one, so that nothing that reads several at once could gain."""
    import mlx_tformer as mt

    lm = mt.load(where, dtype=dtype)
    if not packed:
        sys.path.append(str(Path(__file__).parents[1]))
        from helpers import unpack

        unpack(lm.model)
    return lm


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need to be, numbers to the right."""
    shown = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(cells[i]) for cells in [list(head), *shown]) for i in range(len(head))]
    for cells in [list(head), ["-" * width for width in widths], *shown]:
        print(
            "  ".join(
                f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            )
        )
