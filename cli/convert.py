"""`mlx-tformer convert`: a checkpoint into our own layout."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from .progress import progress_bar
from .terminal import Writer, note

if TYPE_CHECKING:
    from mlx_tformer import Conversion


@click.command("convert", short_help="Make a folder that loads fast, from a checkpoint of any kind.")
@click.argument("source")
@click.argument("dest", required=False)
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub.")
@click.option("--dtype", metavar="TYPE", help="Store float32, float16 or bfloat16 instead of the source's type.")
@click.option("--quantize", type=int, metavar="BITS", help="Pack matrices into 2, 3, 4, 5, 6 or 8 bits a weight.")
@click.option("--group-size", type=int, metavar="N", help="Weights that share a scale: 32, 64 (usual) or 128.")
@click.option("--mode", metavar="MODE", help="Pack as affine (usual), mxfp4, mxfp8 or nvfp4, see above.")
@click.option("--recipe", metavar="NAME", help="More bits where they matter: mixed-3-6, mixed-4-6 or mixed-4-8.")
@click.option("--keep", default="", metavar="PATTERNS", help="Modules that are not quantized, such as head,layers.0.")
@click.option("--allow-nonfinite", is_flag=True, help="Convert weights that are NaN or infinite as they are.")
@click.option("--verify", is_flag=True, help="Compare the logits of DEST with those of SOURCE.")
def command(source: str, dest: str | None, verify: bool, **settings: Any) -> None:
    """Convert SOURCE into the folder DEST (by default weights/NAME, here).

    SOURCE is a folder, a .gguf file, or a name on the Hugging Face hub. DEST must be new or empty; it appears when it
    is complete, and not at all if the conversion fails. What the source has quantized already keeps its values.

    \b
    Examples:
      mlx-tformer convert HuggingFaceTB/SmolLM2-135M-Instruct
      mlx-tformer convert model.gguf weights/mine --dtype float16
      mlx-tformer convert ./checkpoint --quantize 4 --group-size 32
      mlx-tformer convert ./checkpoint --quantize 4 --keep "lm_head,layers.0" --verify
      mlx-tformer convert ./checkpoint --recipe mixed-4-6
      mlx-tformer generate --model SmolLM2-135M-Instruct "Hello"

    A recipe mixed-4-6 packs most matrices into 4 bits a weight, and into 6 the down projections and what makes the
    logits: the head, or the embedding where that serves as one; mixed-3-6 and mixed-4-8 likewise.

    --mode affine has scales and offsets that are floats. The others have small floats instead of whole numbers, with a
    scale of 8 bits: mxfp4 (4 bits in groups of 32), mxfp8 (8 in groups of 32) and nvfp4 (4 in groups of 16; groups
    of values below 0.006 become zero, and nothing above 2688 fits).

    --keep takes patterns with commas between: globs over paths, ours or the checkpoint's (*.layers.1?.mlp.*), or words
    of them (head, embed, layers.0). Routers, gates of shared experts, norms and positions are never quantized. Every
    matrix that is not is listed.

    DEST is printed on standard output, a summary on standard error. DEST/conversion.json says for each tensor what it
    came from and the largest error. With --verify, logits that differ by more than `mlx-tformer verify` allows end
    the program with exit code 3; DEST stays.
    """
    from mlx_tformer import convert

    with progress_bar() as progress:
        made = convert(source, dest, progress=progress, **settings)
    for line in summary(made):
        note(line)
    if verify:
        from .verify import verified

        verified(source, made.path, revision=settings["revision"])
    with Writer() as out:
        out.write(str(made.path))


def summary(made: "Conversion") -> list[str]:
    """What a conversion did, line by line."""
    from mlx_tformer.checkpoint.language_part import REASON
    from mlx_tformer.memory import human

    size = f"{human(made.nbytes)}, {made.bits_per_weight:.2f} bits per weight"
    lines = [f"{len(made.tensors)} tensors, {made.parameters:,} weights, {size}"]
    lines.append(f"largest error of a value: {made.largest_error:.3g}")
    lines += [f"not quantized: {entry}" for entry in grouped(made.unquantized)]
    dropped = {name: why for name, why in made.dropped.items() if why != REASON}  # those are in a note, as one
    lines += [f"left out: {entry}" for entry in grouped(f"{name}: {why}" for name, why in dropped.items())]
    return lines + made.notes


def grouped(entries: Iterable[str]) -> list[str]:
    """Entries that differ only in their first number, the layer's, as one.

    >>> grouped(["layers.0.down: 80 wide", "layers.1.down: 80 wide", "head: 48 wide"])
    ['layers.0-1.down: 80 wide', 'head: 48 wide']
    """
    from mlx_tformer.card import ranges

    groups: dict[tuple[str, str], list[int]] = {}
    for entry in entries:
        before, *rest = re.split(r"(\d+)", entry, maxsplit=1)
        groups.setdefault((before, "".join(rest[1:])), []).extend(map(int, rest[:1]))
    return [f"{before}{ranges(sorted(numbers))}{after}" for (before, after), numbers in groups.items()]
