"""`mlx-tformer inspect`: what a model looks at, drawn in the terminal, as PNG, as a page, or as numbers."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .generate import prompt_text
from .options import GroupedCommand, grouped, together
from .terminal import Writer, note, one_line, write_json

if TYPE_CHECKING:
    from mlx_tformer.inspect.pictures import Picture

    from .look import View

MODES = ("scores", "lens", "experts", "stats")
LOOK, WHERE, OUT = "What to look at (without any: all heads)", "Where", "Where to put it"
PARTS = click.Choice(["encoder", "decoder", "cross"])

looking = together(
    [
        grouped(LOOK, "--layer", int, "L", "The heads of layer L; with --head one of them, token by token."),
        grouped(LOOK, "--head", int, "H", "Head H of --layer."),
        grouped(LOOK, "--scores", None, "", "Which heads do what: induction, previous token, ...", is_flag=True),
        grouped(LOOK, "--lens", None, "", "What the model would say after each layer.", is_flag=True),
        grouped(LOOK, "--experts", None, "", "Which experts are chosen, how often, with which.", is_flag=True),
        grouped(LOOK, "--stats", None, "", "Statistics of long texts, without any pattern.", is_flag=True),
        grouped(LOOK, "--token", str, "TEXT", "Which heads and layers say that this token comes next."),
        grouped(LOOK, "--minus", str, "TEXT", "With --token: rather than this one."),
        grouped(WHERE, "-n --max-tokens", int, "N", "Write N tokens as well, and look at them too."),
        grouped(WHERE, "--target", str, "TEXT", "With an encoder and a decoder: what the decoder reads."),
        grouped(WHERE, "--part", PARTS, "PART", "encoder, decoder or cross (from decoder to encoder)."),
        grouped(WHERE, "--spans", str, "WAY", "With --stats: N tokens, or line, sentence or kind."),
        grouped(WHERE, "--top", int, "K", "With --lens and --token: the K best.", default=None),
        grouped(OUT, "--png", str, "FILE", "The first picture as PNG (needs matplotlib)."),
        grouped(OUT, "--html", str, "FILE", "All pictures as one page that needs no network."),
        grouped(OUT, "--json", str, "FILE", "The numbers, in full; - is standard output."),
    ]
)


@click.command("inspect", cls=GroupedCommand, short_help="Look at what a model looks at.")
@click.argument("prompt", required=False)
@click.option(
    "-m", "--model", metavar="MODEL", help="A folder, a .gguf file, a name in ./weights, or a name on the hub."
)
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub.")
@click.option("--raw", is_flag=True, help="Read the prompt as it is, without the chat template.")
@click.option("--dtype", metavar="TYPE", help="Compute in float32, float16 or bfloat16 instead of the stored type.")
@looking
def command(**options: Any) -> None:
    """Run a model over PROMPT and show where its attention goes: all heads, one layer, or one head. Other options show
    what heads are for, what the model would say after each layer, its experts, or what makes it say a token.

    Without PROMPT, or if it is -, the text is read from standard input (--scores needs none). For a model that looks at
    images, PROMPT is the file of a picture. Without --model the small bundled model reads it.

    \b
    Examples:
      mlx-tformer inspect "To be, or not to be" --html page.html
      mlx-tformer inspect "To be, or not to be" --layer 1 --head 2
      mlx-tformer inspect -m HuggingFaceTB/SmolLM2-135M-Instruct --scores
      mlx-tformer inspect -m model.gguf --raw "The capital of France is" --lens --top 3
      mlx-tformer inspect -m model.gguf --raw "Mary and John went out. John gave a drink to" \\
        --token " Mary" --minus " John"
      mlx-tformer inspect -m Helsinki-NLP/opus-mt-de-en "Guten Morgen" --part cross --layer 3
      mlx-tformer inspect -m google/vit-base-patch16-224 cat.jpg --layer 11 --head 0
      mlx-tformer inspect --stats --spans 256 -n 32 --json - < long.txt

    A pattern has a row for each token that looks and a column for each that is looked at; a row sums to one, less what
    learned sinks take, which is a column (sink) of its own. With patterns comes their proof, printed below: pattern @
    values against what the model's own fused attention gave, as a share of the largest output. It is about 1e-6 in
    float32 and 1e-2 in bfloat16.

    The page has everything that the mode gives, for the mouse and the keyboard. Statistics (--stats) never hold a
    pattern, so they are the way to look at long texts.
    """
    inspect(Request(**options))


@dataclass(frozen=True)
class Request:
    """What was asked for: an attribute for each option; None is what was not given."""

    prompt: str | None
    model: str | None
    revision: str | None
    raw: bool
    dtype: str | None
    layer: int | None
    head: int | None
    scores: bool
    lens: bool
    experts: bool
    stats: bool
    token: str | None
    minus: str | None
    max_tokens: int | None
    target: str | None
    part: str | None
    spans: str | None
    top: int | None
    png: str | None
    html: str | None
    json: str | None

    @property
    def mode(self) -> str:
        """What to look at: one of MODES, "token", "layer" or "heads"."""
        chosen = [mode for mode in MODES if vars(self)[mode]]
        if len(chosen) > 1:
            raise click.UsageError(f"--{chosen[0]} and --{chosen[1]} are two ways to look; choose one")
        if chosen:
            return chosen[0]
        return "token" if self.token is not None else "heads" if self.layer is None else "layer"


def inspect(asked: Request) -> None:
    """Do what was asked for."""
    check(asked)
    text = None if asked.mode == "scores" and asked.prompt is None else prompt_text(asked.prompt)
    from . import look, views

    lm = loaded(asked)
    found = views.VIEWS[asked.mode](look.Look.of(lm, text, asked))
    save(found, asked)
    for line in [*lm.notes, *found.notes]:
        note(line)
    if asked.json != "-":
        with Writer(ours=True) as out:
            out.write(drawn(found.shown))
            out.write("\n".join(one_line(line) for line in found.lines))


def check(asked: Request) -> None:
    """Raise click.UsageError for options that do not go together, and what would fail only at the end."""
    mode = asked.mode
    needs: dict[str, tuple[bool, str]] = {
        "head": (mode == "layer", "--layer"),
        "layer": (mode in ("layer", "experts"), "no other way to look than --experts"),
        "minus": (asked.token is not None, "--token"),
        "token": (mode in ("token", "lens"), "no other way to look than --lens"),
        "spans": (mode == "stats", "--stats"),
        "top": (mode in ("lens", "token"), "--lens or --token"),
        "part": (mode in ("heads", "layer", "stats", "experts"), "a way to look at one part, and this is none"),
        "max_tokens": (mode not in ("scores", "token"), "a text that is written, and this way to look has none"),
        "target": (mode not in ("scores", "token", "stats"), "a text that is read, and this way to look has none"),
    }
    for name, (fits, needed) in needs.items():
        if vars(asked)[name] is not None and not fits:
            raise click.UsageError(f"--{name.replace('_', '-')} needs {needed}")
    if asked.max_tokens is not None and asked.target is not None:
        raise click.UsageError("--target is what the decoder reads, and --max-tokens writes it; choose one")
    for name in ("max_tokens", "top"):
        if vars(asked)[name] is not None and vars(asked)[name] < 1:
            raise click.UsageError(f"--{name.replace('_', '-')}: found {vars(asked)[name]}, expected 1 or more")
    for name in ("png", "html", "json"):
        if vars(asked)[name] == "":
            raise click.UsageError(f"--{name}: found '', expected the name of a file")
    if asked.png is not None:
        from mlx_tformer.inspect.pictures import needs_matplotlib

        needs_matplotlib()


def loaded(asked: Request) -> Any:
    """The model that is asked for, or the bundled one, which is said in its notes."""
    from mlx_tformer import load
    from mlx_tformer.checkpoint.open import BUNDLED, EXAMPLE, bundled

    where = bundled() if asked.model is None else asked.model
    lm = load(where, asked.dtype, context=0, revision=asked.revision)
    if asked.model is None:
        lm.notes.append(f"using the bundled model {BUNDLED}; a real one to try: --model {EXAMPLE}")
    return lm


def save(found: "View", asked: Request) -> None:
    """Write the files that were asked for."""
    if asked.json == "-":
        write_json(found.numbers)
    elif asked.json is not None:
        try:
            Path(asked.json).write_text(json.dumps(found.numbers, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            error.filename = asked.json  # which a full disk does not tell
            raise
    if asked.png is not None:
        from mlx_tformer.inspect.pictures import png

        png(found.pictures[0], asked.png)
    if asked.html is not None:
        from mlx_tformer.inspect.pictures import write_page

        write_page(found.pictures, asked.html, title=f"{found.numbers['model']}: {found.title}")


def drawn(pictures: "Sequence[Picture]") -> str:
    """Pictures for standard output: in colours on a terminal that wants them, in ASCII where it must be; without their
    notes, which are on standard error."""
    from rich.console import Console

    from mlx_tformer.inspect.pictures import Heads, show

    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as capture:
        for picture in pictures:
            show(replace(picture, notes=()) if isinstance(picture, Heads) else picture, console)
    return capture.get()
