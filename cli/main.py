"""The command `mlx-tformer`, and how it ends: with a result, or with one line that says why not.

Exit codes: 0 done, 1 a fault of this program, 2 usage, 3 bad input, 4 input or output, 130 Ctrl-C, 141 nobody reads on,
143 terminated. Commands import the library when they run, so that `--help` is there at once.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click

from . import bench, card, chat, classify, convert, embed, export, families, fill, generate, inspect, scoring, verify
from .terminal import argument, end_line, note, prepare

INTERRUPTED, UNREAD = 128 + signal.SIGINT, 128 + signal.SIGPIPE


class Program(click.Group):
    """A group of commands whose errors are one line, with the exit code that belongs to them."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> Any:
        """Run a command line and end the process."""
        extra["standalone_mode"] = False  # so that errors come here
        try:
            typed = [argument(text, i) for i, text in enumerate(sys.argv[1:] if args is None else args, 1)]
            code = super().main(typed, prog_name or "mlx-tformer", **extra)
        except BaseException as error:
            code = ended_by(error)
        sys.exit(code if isinstance(code, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which a newcomer needs them."""
        return list(self.commands)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Read the arguments; `--help` and `--version` are done in here."""
        with plain_ends():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that `ctx` names."""
        with plain_ends():
            return super().invoke(ctx)


@contextmanager
def plain_ends() -> Iterator[None]:
    """Exit codes for Ctrl-C and for a reader that has gone, before click has its own way with them."""
    try:
        yield
    except KeyboardInterrupt:
        end_line()
        raise click.exceptions.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise click.exceptions.Exit(UNREAD) from None


def ended_by(error: BaseException) -> int:
    """Say in one line why the program ends, if that needs saying; returns the exit code."""
    if os.environ.get("MLX_TFORMER_DEBUG") == "1" and not isinstance(error, SystemExit):
        import traceback

        traceback.print_exception(error)
    match error:
        case SystemExit():
            return error.code if isinstance(error.code, int) else 0
        case KeyboardInterrupt() | click.Abort():
            return INTERRUPTED
        case click.UsageError():
            return ended(spelled(error), 2)
    return failed(error)


def failed(error: BaseException) -> int:
    """Say what went wrong; an exit code of its own for what a user can mend."""
    library = sys.modules.get("mlx_tformer.errors")  # not imported here: that may be what failed
    if library is not None and isinstance(error, library.MlxTformerError):
        return ended(as_option(str(error)), error.exit_code)
    match error:
        case ImportError():
            return ended(f"this installation is not complete: {error}", 1)
        case OSError():
            what = "" if error.filename is None else f"{error.filename}: "
            return ended(f"{what}{error.strerror or error}", 4)
        case MemoryError():
            return ended("out of memory", 4)
    report = "please report it, with what MLX_TFORMER_DEBUG=1 shows"
    return ended(f"unexpected {type(error).__name__}: {error}; {report}", 1)


def ended(problem: str, code: int) -> int:
    """One line about an error; returns `code`."""
    note(f"error: {problem}")
    return code


def spelled(error: click.UsageError) -> str:
    """What click found wrong, in one line that says where to look."""
    command = "mlx-tformer" if error.ctx is None else error.ctx.command_path
    problem = error.format_message()
    return f"{problem[:1].lower()}{problem[1:].rstrip('.')} (see {command} --help)"


def as_option(problem: str) -> str:
    """A complaint of the library about an argument, about the option that it came from.

    >>> as_option("top_p: found 2.0, expected a number above 0, at most 1")
    '--top-p: found 2.0, expected a number above 0, at most 1'
    >>> as_option("prompt: it is empty")
    'prompt: it is empty'
    """
    name, colon, rest = problem.partition(":")
    options = [p for c in program.commands.values() for p in c.params if isinstance(p, click.Option)]
    spelled = {p.name: max(p.opts, key=len) for p in options}
    return f"{spelled[name]}{colon}{rest}" if name in spelled else problem


def version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the version and end."""
    if not wanted or ctx.resilient_parsing:
        return
    from mlx_tformer import __version__

    click.echo(f"mlx-tformer {__version__}")
    ctx.exit()


@click.group(
    cls=Program,
    commands=[
        generate.command,
        chat.command,
        embed.command,
        fill.command,
        classify.command,
        inspect.command,
        convert.command,
        card.command,
        verify.command,
        scoring.perplexity,
        scoring.compare,
        export.command,
        families.command,
        bench.command,
    ],
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=version, help="Show the version.")
@click.pass_context
def program(ctx: click.Context) -> None:
    """Generate text with transformer language models on this machine, convert their checkpoints, and look at what they
    are made of.

    \b
    Examples:
      mlx-tformer generate "ROMEO:"
      mlx-tformer generate --model HuggingFaceTB/SmolLM2-135M-Instruct "What is the capital of France?"
      mlx-tformer COMMAND --help

    A MODEL is a folder, a .gguf file, the name of a folder in ./weights, or a name on the Hugging Face hub.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main() -> None:
    """What the command runs: the program, with the manners of a process."""
    prepare()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, terminate)
    try:
        program.main()
    finally:
        leave()


def terminate(number: int, _: FrameType | None) -> NoReturn:
    """Leave as after Ctrl-C, so that whatever cleans up does."""
    sys.exit(128 + number)


def leave() -> None:
    """Keep Python's own farewell quiet: an impatient second Ctrl-C, and text that could not be written before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
