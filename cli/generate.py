"""`mlx-tformer generate`: text from a prompt, as it comes."""

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    FILTERS,
    KEEPING,
    NAMES,
    GroupedCommand,
    cache_options,
    constraints,
    sampling_options,
    sampling_settings,
    shape_options,
)
from .terminal import Writer, note, read_input, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlx_tformer import LanguageModel, Seq2SeqModel
    from mlx_tformer.generation import Generation, PromptCache, Step
    from mlx_tformer.nn import Keeping

    Model = LanguageModel | Seq2SeqModel

FREED = 2**29
"""Bytes of freed buffers that MLX may keep for reuse."""
LENGTH = 256
"""Tokens of a text where neither the caller nor the model says how many."""
TEXTS = ("logit_bias", "bad_words")
SEARCH = ("beams", "length_penalty", "early_stopping", "first")


@click.command("generate", cls=GroupedCommand, short_help="Continue a text, or answer a message.")
@click.argument("prompt", required=False)
@click.option(
    "-m", "--model", metavar="MODEL", help="A folder, a .gguf file, a name in ./weights, or a name on the hub."
)
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub.")
@click.option("--system", metavar="TEXT", help="System message, for a model with a chat template.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option(
    "-n",
    "--max-tokens",
    type=int,
    metavar="N",
    help="Stop after N tokens (256; T5, BART and others: what the model says).",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; can be given several times.")
@click.option(
    "--beams", type=int, metavar="N", help="Search for the likeliest text with N beams (T5, BART and others)."
)
@click.option(
    "--length-penalty", type=float, metavar="P", help="Of a search: above 0 for longer texts, below for short."
)
@click.option("--first", metavar="TOKEN", help="Token that the text begins with, such as a language (mBART, M2M-100).")
@click.option("--dtype", metavar="TYPE", help="Compute in float32, float16 or bfloat16 instead of the stored type.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of the text.")
@click.option("--logprobs", type=int, metavar="N", help="With --json: the N likeliest tokens in place of each.")
@click.option("--prompt-logprobs", is_flag=True, help="With --json: log-probabilities of the prompt's tokens.")
@click.option("--prompt-cache", metavar="FILE", help="Keep in FILE what was read; what it has is not read again.")
@shape_options
@click.option("--draft", metavar="MODEL", help="Guess tokens with a smaller MODEL, or with lookup or ahead, see above.")
@click.option("--draft-tokens", type=int, metavar="N", help="Guess N tokens at a time at most (16).")
@cache_options
@click.option("--stats", is_flag=True, help="Speed and memory, on standard error.")
@click.option("--batch", metavar="FILE", help="Continue the prompt of each line of FILE (JSON lines), see above.")
@click.option(
    "--batch-size", "size", type=int, default=16, show_default=True, metavar="N", help="So many texts at once."
)
@click.option("--output", metavar="FILE", help="With --batch: write to FILE, and go on where it ends.")
@click.option("--wired", is_flag=True, help="Keep the model resident (Metal); has caused kernel panics, see above.")
@sampling_options
def command(**options: Any) -> None:
    """Continue PROMPT, or answer it if the model has a chat template. A model with an encoder (T5, BART, Marian and
    others) reads it as a whole and writes what it was trained to: a translation, a summary, an answer.

    Without PROMPT, or if it is -, the text is read from standard input (a line end at its end does not count). Without
    --model the small bundled model continues it in the manner of Shakespeare.

    \b
    Examples:
      mlx-tformer generate "ROMEO:"
      mlx-tformer generate -m HuggingFaceTB/SmolLM2-135M-Instruct "What is the capital of France?"
      mlx-tformer generate -m model.gguf --raw --temperature 0 --stop $'\\n' "The capital of France is"
      mlx-tformer generate -m weights/NAME --system "Answer in one line." < question.txt
      mlx-tformer generate -- "- a prompt that begins with a dash"

    Sampling options that are not given take what the authors of the model recommend in its generation_config.json.
    Where that says nothing, the most likely token is taken each time (temperature 0), or, if a filter is given,
    temperature is 1. --beams and --length-penalty, for models with an encoder, likewise; with beams the text comes at
    the end.

    --batch reads a JSON object on each line of FILE: a "prompt", or "messages" (a conversation), or "ids", and, if it
    likes, an "id" that comes back and settings of its own, such as "max_tokens", "temperature" or "seed". Each result
    is a line in the same order. With --output an interrupted batch goes on where it was when it is started again:

    \b
      mlx-tformer generate -m NAME --batch questions.jsonl --output answers.jsonl

    --draft guesses several tokens that the model then checks at once; the text is what it would be without. lookup
    takes them from the text so far, which helps where a text is quoted or edited; ahead from a module of the model's
    own (DeepSeek-V3); anything else is a smaller model with the same tokens, found as --model is.

    --json-schema and --regex let nothing else be written, whatever the model would like (pip install
    'mlx-tformer[grammar]'). The text is whole unless --max-tokens, --stop or the context end it before.

    --wired keeps weights and caches in memory that macOS cannot page out. It helps where a model barely fits; it has
    also been part of kernel panics that take down the whole Mac, so it is off unless you ask for it.

    --stats shows prompt tokens per second until the first new token, and generated tokens per second after it; with
    --draft, how many guesses were right, and tokens per pass of the model.
    """
    sampling = {name: options.pop(name) for name in (*NAMES, *TEXTS)}
    keeping = {name: options.pop(name) for name in KEEPING}
    asked = Request(**options, sampling=sampling, keeping=keeping)
    if asked.batch is None:
        generate(asked)
        return
    from .batch import generate_batch

    generate_batch(asked)


@dataclass(frozen=True)
class Request:
    """What was asked for: an attribute for each option; None is what was not given."""

    prompt: str | None
    model: str | None
    revision: str | None
    system: str | None
    raw: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    beams: int | None
    length_penalty: float | None
    first: str | None
    dtype: str | None
    as_json: bool
    logprobs: int | None
    prompt_logprobs: bool
    stats: bool
    batch: str | None
    size: int
    output: str | None
    wired: bool
    prompt_cache: str | None
    json_schema: str | None
    regex: str | None
    draft: str | None
    draft_tokens: int | None
    sampling: dict[str, Any]
    keeping: dict[str, Any]

    @property
    def limit(self) -> int:
        """Tokens of a text at most, for a model that recommends no number."""
        return LENGTH if self.max_tokens is None else self.max_tokens


def generate(asked: Request) -> None:
    """Do what was asked for."""
    if asked.output is not None:
        raise click.UsageError("--output is where --batch writes; the text of one prompt goes to standard output")
    text = prompt_text(asked.prompt)
    if asked.raw and asked.system is not None:
        raise click.UsageError("--system needs the chat template, which --raw leaves out")
    if (asked.logprobs is not None or asked.prompt_logprobs) and not asked.as_json:
        raise click.UsageError("--logprobs and --prompt-logprobs need --json, which they are printed in")
    if asked.draft_tokens is not None and asked.draft is None:
        raise click.UsageError("--draft-tokens needs --draft")
    lm = loaded(asked)
    more = shape(lm, asked)
    ids, chat = prompt_ids(lm, text, asked)
    settings = sampling(lm, asked) | searching(lm, asked)
    from mlx_tformer.memory import bounded_cache, check_fits, wired

    limit = longest(lm, asked)
    check_fits(lm.model, tokens=max(0, min(len(ids) + limit, lm.context)), dtype=lm.dtype, how=keeping(asked))
    told = {name: value for name in ("logprobs", "prompt_logprobs") if (value := vars(asked)[name])}
    told |= {name: value for name, value in asked.keeping.items() if value} | more | guesses(lm, asked, len(ids))
    with bounded_cache(FREED), wired(asked.wired), remembered(lm, asked) as memory:
        told |= {} if memory is None else {"memory": memory}
        generation = lm.generate(ids, max_tokens=limit, stop=asked.stop, **told, **settings)
        for line in lm.notes:
            note(line)
        try:
            print_json(lm, generation, settings) if asked.as_json else print_text(generation)
        finally:
            generation.close()
            if asked.stats and generation.stats.tokens:
                print_stats(generation)
    if generation.finish == "length":
        why_it_ended(lm, generation, chat, cut=next(iter(more), ""))


def longest(lm: "Model", asked: Request) -> int:
    """Tokens of a text at most: as many as were asked for, else as an encoder-decoder's configs say."""
    from mlx_tformer import Seq2SeqModel

    found = lm.recommended_length if isinstance(lm, Seq2SeqModel) and asked.max_tokens is None else None
    return asked.limit if found is None else found


def decoder(lm: "Model", option: str) -> "LanguageModel":
    """The model, if it continues texts; raises click.UsageError for one that answers a source."""
    from mlx_tformer import LanguageModel

    if not isinstance(lm, LanguageModel):
        raise click.UsageError(f"{option} is for models that continue a text, and {lm.origin} has an encoder")
    return lm


def shape(lm: "Model", asked: Request) -> dict[str, Any]:
    """What the text must be, by --json-schema or --regex."""
    found = constraints(asked.json_schema, asked.regex)
    if found:
        decoder(lm, f"--{next(iter(found)).replace('_', '-')}")
    return found


def guesses(lm: "Model", asked: Request, length: int) -> dict[str, Any]:
    """The settings of --draft for a prompt of so many tokens; a model must fit beside the other, cache included."""
    if asked.draft is None:
        return {}
    target = decoder(lm, "--draft")
    more = {} if asked.draft_tokens is None else {"draft_tokens": asked.draft_tokens}
    if asked.draft in ("lookup", "ahead"):
        return {"draft": asked.draft, **more}
    from mlx_tformer.checkpoint.load import load_writer
    from mlx_tformer.memory import check_both_fit

    draft = decoder(load_writer(asked.draft, asked.dtype, context=0), "--draft")
    tokens = max(0, min(length + longest(lm, asked), target.context))
    check_both_fit(target, draft, tokens=tokens, how=keeping(asked))
    return {"draft": draft, **more}


def keeping(asked: Request) -> "Keeping":
    """What the cache keeps."""
    from mlx_tformer.nn import Keeping

    return Keeping(*(asked.keeping[name] for name in KEEPING))


@contextmanager
def remembered(lm: "Model", asked: Request) -> "Iterator[PromptCache | None]":
    """What the file of `--prompt-cache` has; what was read in the block is written to it, also after Ctrl-C."""
    if asked.prompt_cache is None:
        yield None
        return
    from mlx_tformer.generation import PromptCache

    lm = decoder(lm, "--prompt-cache")
    file = Path(asked.prompt_cache)
    memory = PromptCache.load(file, lm, keeping(asked)) if file.exists() else PromptCache()
    try:
        yield memory
    finally:
        if memory.cache is not None:
            memory.save(file, lm)


def prompt_text(prompt: str | None) -> str:
    """The prompt as an argument or from standard input."""
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        command = click.get_current_context().command_path
        raise click.UsageError(f'no prompt: give one, as in {command} "ROMEO:", or pipe it in')
    if prompt is None or prompt == "-":
        prompt = "" if sys.stdin is None else read_input(sys.stdin.buffer)
        if not prompt:
            raise click.UsageError("no prompt: standard input is empty")
    if not prompt:
        raise click.UsageError("the prompt is empty")
    return prompt


def loaded(asked: Request) -> "Model":
    """The model that is asked for, or the bundled one, which is said in its notes."""
    from mlx_tformer.checkpoint.load import load_writer
    from mlx_tformer.checkpoint.open import BUNDLED, EXAMPLE, bundled

    # Whether the asked length fits is checked when the prompt has been counted.
    where = bundled() if asked.model is None else asked.model
    lm = load_writer(where, asked.dtype, context=0, revision=asked.revision)
    if asked.model is None:
        lm.notes.append(f"using the bundled model {BUNDLED}; a real one to try: --model {EXAMPLE}")
    return lm


def prompt_ids(lm: "Model", text: str, asked: Request) -> "tuple[Sequence[int], bool]":
    """The ids of the prompt, and whether a chat template is around them."""
    from mlx_tformer import Seq2SeqModel

    if isinstance(lm, Seq2SeqModel):
        if asked.system is not None or asked.raw:
            given = "--system" if asked.system is not None else "--raw"
            raise click.UsageError(f"{given} is about a chat template, and {lm.origin} is a model with an encoder")
        return lm.tokens(text), False
    chat = lm.has_chat_template and not asked.raw
    return (conversation(lm, text, asked.system) if chat else plain(lm, text, asked.system)), chat


def conversation(lm: "LanguageModel", text: str, system: str | None) -> "Sequence[int]":
    """The ids of a message with the chat template around it."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return lm.chat([*before, {"role": "user", "content": text}])


def plain(lm: "LanguageModel", text: str, system: str | None) -> "Sequence[int]":
    """The ids of a text as it is."""
    if system is not None:
        raise click.UsageError(f"--system needs a chat template, and {lm.origin} has none")
    return lm.tokens(text)


def sampling(lm: "Model", asked: Request) -> dict[str, Any]:
    """The sampling settings: what was given, then what the model's authors recommend."""
    searches = asked.beams is not None and asked.beams > 1
    return sampling_settings(asked.sampling, {} if searches else lm.recommended_sampling)


def searching(lm: "Model", asked: Request) -> dict[str, Any]:
    """The settings of a search: what was given, then what the model's authors recommend, unless tokens are drawn."""
    from mlx_tformer import Seq2SeqModel

    given = {name: value for name, value in vars(asked).items() if name in SEARCH and value is not None}
    if not isinstance(lm, Seq2SeqModel):
        if given:
            option = next(iter(given)).replace("_", "-")
            raise click.UsageError(f"--{option} is for models with an encoder, such as T5, and {lm.origin} has none")
        return {}
    if asked.prompt_logprobs:
        raise click.UsageError(f"--prompt-logprobs: {lm.origin} reads its prompt as a whole and predicts none of it")
    drawn = any(asked.sampling[name] is not None for name in (*FILTERS, "temperature", "seed"))
    found = given if drawn or lm.recommended_sampling else {**lm.recommended_search, **given}
    if "length_penalty" in given and found.get("beams", 1) == 1:
        raise click.UsageError("--length-penalty is for a search; give --beams as well, 2 or more")
    return found


def print_text(generation: "Generation") -> None:
    """The text as it comes."""
    with Writer() as out:
        for step in generation:
            out.write(step.text)


def print_json(lm: "Model", generation: "Generation", settings: dict[str, Any]) -> None:
    """Everything about a generation in one object; after Ctrl-C, everything up to there."""
    steps: list[Step] = []
    try:
        steps.extend(generation)
    except KeyboardInterrupt:
        write_json(as_dict(lm, generation, settings, steps))
        raise
    write_json(as_dict(lm, generation, settings, steps))


def as_dict(lm: "Model", generation: "Generation", settings: dict[str, Any], steps: "list[Step]") -> dict[str, Any]:
    """What `--json` tells; `finish` is null if the generation was interrupted."""
    from mlx_tformer.generation import Found

    score = {"score": generation.score} if isinstance(generation, Found) else {}
    found: dict[str, Any] = {
        "model": lm.origin,
        "text": generation.text,
        "finish": generation.finish,
        "prompt_tokens": len(generation.prompt),
        "tokens": generation.tokens,
        "logprobs": [step.logprob for step in steps],
        **score,
        "sampling": settings,
        "stats": generation.stats.to_dict(),
    }
    if any(step.top for step in steps):
        found["top"] = [step.top for step in steps]
    if generation.prompt_scores:
        found["prompt"] = [score._asdict() for score in generation.prompt_scores]
    return found


def print_stats(generation: "Generation") -> None:
    """Speed and memory, on standard error."""
    from mlx_tformer.memory import human

    stats = generation.stats
    first = f"first token after {stats.first_token_seconds:.2f} s"
    known = f" ({stats.known_tokens} of them known)" if stats.known_tokens else ""
    note(f"prompt: {stats.prompt_tokens} tokens{known}, {stats.prompt_rate:.1f} tokens/s, {first}")
    note(f"generation: {stats.tokens} tokens, {stats.rate:.1f} tokens/s")
    if stats.speculation.passes:
        counts = stats.speculation
        right = f"{counts.accepted} of {counts.proposed} guesses right ({counts.rate:.0%})"
        note(f"draft: {right}, {(stats.tokens - 1) / counts.passes:.2f} tokens per pass")
    note(f"memory: peak {human(stats.peak_bytes)}, KV cache {human(stats.cache_bytes)}")


def why_it_ended(lm: "Model", generation: "Generation", chat: bool, cut: str = "") -> None:
    """Say that a text was cut off, where that may not be what was meant; `cut`: the setting that it may be short of."""
    from mlx_tformer import Seq2SeqModel

    reads = isinstance(lm, Seq2SeqModel)
    if (0 if reads else len(generation.prompt)) + len(generation.tokens) >= lm.context:
        note(f"stopped, because the context of {lm.context} tokens is full")
    elif cut:
        ended = f"stopped after {len(generation.tokens)} tokens, so it may be short of its --{cut.replace('_', '-')}"
        note(f"{ended}; --max-tokens allows more")
    elif chat or reads:
        note(f"stopped after {len(generation.tokens)} tokens; --max-tokens allows more")
