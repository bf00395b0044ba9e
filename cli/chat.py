"""`mlx-tformer chat`: a conversation in the terminal, or one message a line through a pipe."""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .generate import FREED, TEXTS
from .options import KEEPING, NAMES, GroupedCommand, cache_options, sampling_options, sampling_settings
from .terminal import SHOWN, Writer, decoded, note

if TYPE_CHECKING:
    from mlx_tformer.generation.conversation import Conversation
    from mlx_tformer.generation.reasoning import Part

DIM, PLAIN = "\x1b[2m", "\x1b[22m"
HELP = """\
/help         this list
/reset        begin again
/system TEXT  set the system message, or show it
/save FILE    write the conversation as JSON
/load FILE    go on with one that was saved
/undo         forget the last message and its answer
/retry        answer the last message again
/stats        tokens, speed and memory of the last answer
/exit         end; so does Ctrl-D
Ctrl-C stops an answer. A message that begins with a slash is written with two."""


@click.command("chat", cls=GroupedCommand, short_help="Talk with a model.")
@click.option("-m", "--model", required=True, metavar="MODEL", help="A folder, a .gguf file, or a name on the hub.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub.")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("-n", "--max-tokens", type=int, default=1024, show_default=True, metavar="N", help="Longest answer.")
@click.option("--hide-reasoning", is_flag=True, help="Do not show what the model thinks before it answers.")
@click.option("--history", metavar="FILE", help="Keep typed lines in FILE from one time to the next.")
@click.option("--dtype", metavar="TYPE", help="Compute in float32, float16 or bfloat16 instead of the stored type.")
@cache_options
@sampling_options
def command(model: str, revision: str | None, dtype: str | None, **options: Any) -> None:
    """Talk with MODEL, which must have a chat template. /help lists what else can be typed.

    \b
    Examples:
      mlx-tformer chat -m HuggingFaceTB/SmolLM2-135M-Instruct
      mlx-tformer chat -m Qwen/Qwen3-0.6B --system "Answer in one line." --hide-reasoning
      printf 'Hello\\nAnd in French?\\n' | mlx-tformer chat -m weights/NAME

    What the model has read stays in its cache, so that a message reads only its own tokens. Where the template writes
    the history anew, as those do that drop old thoughts, what is the same at the beginning is kept. Through a pipe each
    line is a message, and answers go to standard output.
    """
    from mlx_tformer.checkpoint.load import load_decoder
    from mlx_tformer.generation.conversation import Conversation
    from mlx_tformer.generation.settings import sampling_of
    from mlx_tformer.memory import bounded_cache
    from mlx_tformer.nn import Keeping

    lm = load_decoder(model, dtype, revision=revision)
    settings = sampling_settings({name: options[name] for name in (*NAMES, *TEXTS)}, lm.recommended_sampling)
    keeping = {name: options[name] for name in KEEPING}
    sampling_of(settings), Keeping(*keeping.values())  # so that what cannot be is said before anything is typed
    conversation = Conversation(lm, options["system"])
    for line in lm.notes:
        note(line)
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    told = {"max_tokens": options["max_tokens"], **keeping, **settings}
    with bounded_cache(FREED):
        Chat(conversation, told, terminal, options["hide_reasoning"]).run(lines(terminal, options["history"]))


def lines(terminal: bool, history: str | None) -> Iterator[str]:
    """What is typed, line by line, with line editing on a terminal; Ctrl-C drops the line, Ctrl-D ends."""
    if not terminal:
        if sys.stdin is not None:
            yield from (decoded(line, "standard input").rstrip("\r\n") for line in sys.stdin.buffer)
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    kept = InMemoryHistory() if history is None else FileHistory(str(Path(history).expanduser()))
    session: PromptSession[str] = PromptSession(history=kept)
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            note("Ctrl-D or /exit ends")
        except EOFError:
            return


@dataclass
class Chat:
    """A conversation with what the terminal program needs around it."""

    conversation: "Conversation"
    settings: dict[str, Any]
    terminal: bool
    hide: bool

    def run(self, typed: Iterator[str]) -> None:
        """Answer line by line, until there are no more or one says so."""
        for line in typed:
            if not line.strip():
                continue
            if line.startswith("/") and not line.startswith("//"):
                if line.split()[0] in ("/exit", "/quit"):
                    return
                self.obey(line)
            else:
                self.show(self.conversation.ask(line.removeprefix("/"), **self.settings))

    def obey(self, line: str) -> None:
        """Do what a line that begins with a slash says."""
        name, _, rest = line.partition(" ")
        actions: dict[str, Callable[[str], None]] = {
            "/help": lambda _: click.echo(HELP, err=True),
            "/reset": lambda _: self.conversation.reset(),
            "/system": self.system,
            "/save": lambda file: self.conversation.save(self.file(file)),
            "/load": lambda file: self.conversation.load(self.file(file)),
            "/undo": lambda _: self.conversation.undo(),
            "/retry": lambda _: self.show(self.conversation.retry(**self.settings)),
            "/stats": lambda _: self.stats(),
        }
        if name not in actions:
            note(f"there is no {name}; /help lists what there is")
            return
        with self.errors():
            actions[name](rest.strip())

    def show(self, parts: "Generator[Part]") -> None:
        """Print an answer as it comes. On a terminal Ctrl-C ends it and not the program."""
        with self.errors():
            try:
                with Writer(ours=True) as out:
                    self.write(out, parts)
            except KeyboardInterrupt:
                parts.close()
                if not self.terminal:
                    raise
                click.echo()
        if self.conversation.finish == "length":
            note("the answer is as long as --max-tokens allows, or the context is full (/undo and /reset make room)")

    def write(self, out: Writer, parts: "Generator[Part]") -> None:
        """Print parts: thoughts dimmed on a terminal, or not at all; and nothing that the terminal would obey."""
        thinking = False
        try:
            for part in parts:
                if part.thought and self.hide:
                    continue
                if self.terminal and part.thought != thinking:
                    out.write(DIM if part.thought else PLAIN)
                    thinking = part.thought
                out.write(part.text.translate(SHOWN) if self.terminal else part.text)
        finally:
            if thinking:
                out.write(PLAIN)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What cannot be done is said, and the conversation goes on."""
        from mlx_tformer import MlxTformerError

        try:
            yield
        except MlxTformerError as error:
            note(f"error: {error}")

    def system(self, text: str) -> None:
        """Set the system message, or show it."""
        if text:
            self.conversation.system = text
        else:
            note(self.conversation.system or "there is no system message")

    def file(self, name: str) -> Path:
        """The file that a command names."""
        from mlx_tformer import UsageError

        if not name:
            raise UsageError("a file is missing, as in /save talk.json")
        return Path(name).expanduser()

    def stats(self) -> None:
        """Figures of the last answer, on standard error."""
        from mlx_tformer.memory import human

        found = self.conversation.stats
        if found is None:
            note("there was no answer yet")
            return
        known = f"{found.prompt_tokens} tokens, {found.known_tokens} of them known"
        note(f"prompt: {known}, {found.prompt_rate:.1f} tokens/s")
        note(f"answer: {found.tokens} tokens, {found.rate:.1f} tokens/s, cache {human(found.cache_bytes)}")
