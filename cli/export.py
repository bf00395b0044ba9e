"""`mlx-tformer export`: a folder of ours as a Hugging Face folder again."""

from typing import TYPE_CHECKING

import click

from .convert import grouped
from .progress import progress_bar
from .terminal import Writer, note

if TYPE_CHECKING:
    from mlx_tformer.checkpoint.export import Export


@click.command("export", short_help="Make a Hugging Face folder again of what convert wrote.")
@click.argument("ours")
@click.argument("dest")
@click.option("--dtype", metavar="TYPE", help="Write float32, float16 or bfloat16, all unpacked.")
def command(ours: str, dest: str, dtype: str | None) -> None:
    """Write OURS, a folder that convert wrote, as the Hugging Face folder DEST.

    Names, orders and files are those of the source. What was neither quantized nor rounded is the same to the bit.
    DEST must be new or empty; it appears when it is complete, and not at all if the export fails.

    \b
    Examples:
      mlx-tformer export weights/SmolLM2-135M-Instruct ./checkpoint
      mlx-tformer export weights/4bit ./checkpoint --dtype float16

    What convert quantized is unpacked, with the values that rounding left. What was quantized in the source already
    stays as it is, in the layout of MLX community checkpoints, unless --dtype says what to unpack it into. Buffers that
    a model computes itself are not written, and what is left out is listed.
    """
    from mlx_tformer.checkpoint.export import export

    with progress_bar("exporting") as progress:
        made = export(ours, dest, dtype=dtype, progress=progress)
    for line in summary(made):
        note(line)
    with Writer() as out:
        out.write(str(made.path))


def summary(made: "Export") -> list[str]:
    """What an export did, line by line."""
    from mlx_tformer.memory import human

    lines = [f"{len(made.tensors)} tensors, {human(made.nbytes)}"]
    lines += [f"left out: {entry}" for entry in grouped(f"{name}: {why}" for name, why in made.left_out.items())]
    return lines + made.notes
