"""`mlx-tformer bench`: measures on the reader's machine, and checks what it measures."""

from typing import TYPE_CHECKING, Any

import click

from .terminal import Writer, note, write_json

if TYPE_CHECKING:
    from mlx_tformer.kernels.measure import Figures

WRONG = 1
"""The exit code if a kernel gave another answer than what stands for it otherwise."""


@click.command("bench", short_help="Check and time the Metal kernels on this machine.")
@click.option("--kernels", is_flag=True, required=True, help="Each Metal kernel beside what would run without it.")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Runs of each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, kernels: bool, rounds: int, as_json: bool) -> None:
    """Run each Metal kernel at the size of a known model beside what would run without it: do both give the same, and
    how long does each take?

    Ends with 1 if the answers differ. A machine without Metal has no kernels to run.

    \b
    Examples:
      mlx-tformer bench --kernels
      mlx-tformer bench --kernels --rounds 100 --json
    """
    from mlx_tformer.kernels import place
    from mlx_tformer.kernels.measure import measured, trials

    if place() == "cpu":
        note("nothing to measure: kernels run on Metal, which is not here or switched off (MLX_TFORMER_KERNELS=off)")
        return
    found = [measured(trial, rounds) for trial in trials()]
    if as_json:
        write_json({"kernels": [row(figures) for figures in found]})
    else:
        with Writer() as out:
            out.write(table(found))
    ctx.exit(0 if all(figures.fine for figures in found) else WRONG)


def row(figures: "Figures") -> dict[str, Any]:
    """What was found, for a reader that is a program: seconds, bytes and relative differences."""
    return {
        "kernel": figures.name,
        "same": figures.fine,
        "difference": figures.difference,
        "tolerance": figures.tolerance,
        "seconds": figures.seconds,
        "seconds_otherwise": figures.otherwise,
        "bytes": figures.moved,
        "bytes_at_least": figures.floor,
    }


def table(found: "list[Figures]") -> str:
    """What was found, a line for each kernel."""
    width = max(len(figures.name) for figures in found)
    head = f"{'kernel':{width}}  {'answer':7}  {'apart':>8}  {'ours µs':>9}  {'else µs':>9}  {'GB/s':>6}  moved/least"
    lines = [
        f"{f.name:{width}}  {'same' if f.fine else 'DIFFERS':7}  {f.difference:8.1e}  {f.seconds * 1e6:9.1f}"
        f"  {f.otherwise * 1e6:9.1f}  {f.moved / f.seconds / 1e9:6.1f}  {f.moved / f.floor:11.2f}"
        for f in found
    ]
    return "\n".join([head, *lines])
