"""`mlx-tformer verify`: do two checkpoints compute the same?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .terminal import Writer, note, write_json

if TYPE_CHECKING:
    from mlx_tformer.checkpoint.verify import Verification

SHOWN = 10
"""Modules that are shown without `--json`."""


@click.command("verify", short_help="Compare the logits and the weights of two checkpoints.")
@click.argument("a")
@click.argument("b")
@click.option("--limit", type=float, metavar="NATS", help="Mean KL divergence to allow, instead of the usual one.")
@click.option("--text", metavar="TEXT", help="The prompt, instead of the usual one.")
@click.option("--ids", metavar="IDS", help="The prompt as ids with blanks or commas between.")
@click.option("--dtype", default="float32", show_default=True, metavar="TYPE", help="What both compute in.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of A on the hub.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every module.")
def command(a: str, b: str, ids: str | None, as_json: bool, **settings: Any) -> None:
    """Compare checkpoint B with checkpoint A, which it was made from: what both compute of one prompt, and their
    weights.

    \b
    Examples:
      mlx-tformer verify HuggingFaceTB/SmolLM2-135M-Instruct weights/SmolLM2-135M-Instruct
      mlx-tformer verify ./checkpoint weights/4bit --limit 0.05
      mlx-tformer verify model.gguf weights/mine --ids "1 2 3" --json

    Shown are the largest difference between two logits, the mean KL divergence of the next-token distributions in nats,
    how often both find the same token most likely, and the relative error of the weights of each module, the worst
    first. A mean KL divergence above the limit ends the program with exit code 3. The limit is 1e-8 for weights that
    are stored alike, 0.001 for those in another dtype, and 0.1 where they are quantized otherwise.

    Models of images get noise. Hidden states, and the output of a model that has a single one, are no logits: there the
    limits are those of the mean square of the relative error.

    The two are loaded one after the other. --dtype bfloat16 halves the memory that this needs, and rounds.
    """
    from mlx_tformer.checkpoint.verify import verify

    found = verify(a, b, ids=None if ids is None else numbers(ids), **settings)
    if as_json:
        write_json(found.to_dict())
    else:
        with Writer() as out:
            out.write("\n".join(lines(found)))
    found.check()


def numbers(text: str) -> list[int]:
    """Ids as they are typed."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise click.UsageError(f"--ids: found {text!r}, expected whole numbers") from None


def verified(source: str | Path, made: Path, *, revision: str | None) -> None:
    """Compare a conversion with its source: figures on standard error, or an error."""
    from mlx_tformer.checkpoint.verify import verify

    found = verify(source, made, revision=revision)
    for line in lines(found):
        note(line)
    found.check()


def lines(found: "Verification") -> list[str]:
    """The figures, line by line."""
    errors = f"largest error {found.largest_error:.3g}, their standard deviation {found.deviation:.3g}"
    if found.are_logits:
        shown = [
            f"logits at {found.tokens} positions: {errors}",
            f"mean KL divergence: {found.mean_kl:.3g} nats, limit {found.limit:g}",
            f"same most likely token: {100 * found.top1:.1f} % of the positions",
        ]
    else:
        shown = [f"{found.tokens} outputs: {errors}", f"{found.measure}: {found.distance:.3g}, limit {found.limit:g}"]
    wrong = [(path, error) for path, error in found.modules.items() if error != 0][:SHOWN]
    if not wrong:
        return [*shown, f"weights: equal in all {len(found.modules)} modules"]
    width = max(len(path) for path, _ in wrong)
    return [*shown, "relative error of weights, worst first:", *(f"  {path:{width}}  {e:.3g}" for path, e in wrong)]
