"""`mlx-tformer perplexity` and `mlx-tformer compare`: how well models predict a text."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .options import together
from .progress import progress_bar
from .terminal import Writer, decoded, note, write_json

if TYPE_CHECKING:
    from mlx_tformer import LanguageModel

F = TypeVar("F", bound=Callable[..., Any])
shared = together(
    [
        click.option("--window", type=int, metavar="N", help="Tokens read at once (the context, at most 2048)."),
        click.option("--stride", type=int, metavar="N", help="Tokens between two windows (half a window)."),
        click.option("--tokens", type=int, metavar="N", help="The first N tokens alone."),
        click.option("--encoding", default="utf-8", show_default=True, metavar="NAME", help="What FILE is written in."),
        click.option("--dtype", metavar="TYPE", help="Compute in float32, float16 or bfloat16."),
        click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    ]
)


@click.command("perplexity", short_help="Measure how well a model predicts a text.")
@click.argument("model")
@click.argument("file")
@shared
def perplexity(model: str, file: str, window: int | None, stride: int | None, as_json: bool, **options: Any) -> None:
    """Measure how well MODEL predicts the text in FILE (-: standard input): perplexity, and bits per byte, which can be
    compared between models with different tokenizers.

    \b
    Examples:
      mlx-tformer perplexity HuggingFaceTB/SmolLM2-135M-Instruct book.txt
      mlx-tformer perplexity weights/4bit book.txt --window 1024 --stride 512 --json

    A long text is read in windows that overlap, so that each token is predicted from at least window - stride others
    (the first ones apart), and counts once. A smaller stride is slower and a little more favourable.
    """
    from mlx_tformer.generation import perplexity as measure

    text = read(file, options["encoding"])
    lm = loaded(model, options["dtype"], options["revision"])
    ids = beginning(lm, text, options["tokens"])
    with progress_bar("reading", "tokens") as progress:
        found = measure(lm, ids, window=window, stride=stride, progress=progress)
    if as_json:
        write_json({"model": lm.origin, "file": file, **found.to_dict()})
        return
    lines = [f"perplexity: {found.perplexity:.4f}"]
    if found.bits_per_byte is not None:
        lines.append(f"bits per byte: {found.bits_per_byte:.4f}")
    lines.append(f"tokens: {found.tokens}, in windows of {found.window}, {found.stride} apart")
    with Writer() as out:
        out.write("\n".join(lines))


@click.command("compare", short_help="Measure how far two models' predictions are apart.")
@click.argument("a")
@click.argument("b")
@click.argument("file")
@shared
def compare(a: str, b: str, file: str, window: int | None, stride: int | None, as_json: bool, **options: Any) -> None:
    """Measure how far the predictions of model B are from those of model A on the text in FILE (-: standard input):
    what a quantization costs.

    \b
    Examples:
      mlx-tformer compare HuggingFaceTB/SmolLM2-135M-Instruct weights/4bit book.txt --tokens 2000

    Shown are the KL divergence of the next-token distributions in nats, mean and largest, how often both find the same
    token most likely, and the perplexity of both. Both models are in memory at once. --revision is that of A.
    """
    from mlx_tformer.generation import compare as measure

    text = read(file, options["encoding"])
    first = loaded(a, options["dtype"], options["revision"])
    second = loaded(b, options["dtype"], None, beside=first)
    ids = beginning(first, text, options["tokens"])
    with progress_bar("reading", "tokens") as progress:
        found = measure(first, second, ids, window=window, stride=stride, progress=progress)
    if as_json:
        write_json({"file": file, **found.to_dict()})
        return
    lines = [
        f"mean KL divergence: {found.mean_kl:.4g} nats, largest {found.largest_kl:.4g}",
        f"same most likely token: {100 * found.top1:.1f} % of {found.tokens} positions",
        f"perplexity: {found.perplexity_a:.4f} (A), {found.perplexity_b:.4f} (B)",
    ]
    with Writer() as out:
        out.write("\n".join(lines))


def read(file: str, encoding: str) -> str:
    """The text of a file; raises click.UsageError for what is not in this encoding."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    where = "standard input" if file == "-" else file
    if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        return decoded(data, where)
    try:
        return data.decode(encoding)
    except (UnicodeError, LookupError) as error:
        raise click.UsageError(f"{where}: {error}") from None


def loaded(
    model: str, dtype: str | None, revision: str | None, beside: "LanguageModel | None" = None
) -> "LanguageModel":
    """A model, whose notes are printed; raises MemoryRefusal where two do not fit together."""
    from mlx_tformer import memory
    from mlx_tformer.checkpoint.load import load_decoder

    lm = load_decoder(model, dtype, revision=revision)
    for line in lm.notes:
        note(line)
    if beside is not None:
        sizes = [memory.weights_bytes(one.model) for one in (beside, lm)]
        device = memory.of_device()
        if sum(sizes) > device.recommended:
            needed, room = memory.human(sum(sizes)), memory.human(device.recommended)
            raise memory.MemoryRefusal(f"both models need {needed}, {room} {device.source} on this machine")
    return lm


def beginning(lm: "LanguageModel", text: str, tokens: int | None) -> list[int]:
    """The first ids of a text, or all."""
    if tokens is not None and tokens < 2:
        raise click.UsageError(f"--tokens: found {tokens}, expected 2 or more")
    return list(lm.tokens(text))[:tokens]
