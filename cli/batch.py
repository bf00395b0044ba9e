"""`mlx-tformer generate --batch`: many prompts from a file of JSON lines, results as JSON lines in the same order."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from .options import constraints, sampling_settings
from .progress import progress_bar
from .terminal import Writer, decoded, is_unicode, note

if TYPE_CHECKING:
    from mlx_tformer import LanguageModel
    from mlx_tformer.generation import Result

    from .generate import Request

PROMPTS = ("prompt", "messages", "ids")
"""The keys of which one says what to continue: a text, a conversation, or token ids."""


@dataclass(frozen=True)
class Line:
    """A line of the file: what it asks for, and a digest of that and of everything else that its result depends on."""

    where: str
    asked: dict[str, Any]
    digest: str


def generate_batch(asked: "Request") -> None:
    """Do what was asked for."""
    from .generate import FREED, decoder, keeping, loaded

    if asked.prompt is not None or asked.as_json or asked.stats or asked.prompt_logprobs:
        raise click.UsageError("--batch reads its prompts from FILE and prints JSON lines; it goes without PROMPT, "
                               "--json, --stats and --prompt-logprobs")  # fmt: skip
    if asked.prompt_cache is not None:
        raise click.UsageError("--batch keeps no cache in a file; leave out --prompt-cache")
    if asked.draft is not None or asked.draft_tokens is not None:
        raise click.UsageError("--batch checks no guesses; leave out --draft and --draft-tokens")
    shape = constraints(asked.json_schema, asked.regex)
    texts = read(str(asked.batch))
    lm = decoder(loaded(asked), "--batch")
    lines = [line_of(lm, asked, f"{asked.batch}: line {i + 1}", text, shape) for i, text in enumerate(texts)]
    from mlx_tformer.memory import bounded_cache, check_fits, wired

    check_fits(lm.model, tokens=min(asked.limit, lm.context), dtype=lm.dtype, how=keeping(asked))
    for told in lm.notes:
        note(told)
    done = 0 if asked.output is None else resumed(Path(asked.output), lines)
    if done:
        note(f"{asked.output} has {done} of {len(lines)} results already; going on from there")
    in_ascii = asked.output is None and not is_unicode()
    with bounded_cache(FREED), wired(asked.wired), output(asked.output) as out:
        try:
            for index, result in continued(lm, asked, lines, done, shape):
                out.write(json.dumps(as_dict(index, lines[index], result), ensure_ascii=in_ascii) + "\n")
                if result.error is not None:
                    note(f"{lines[index].where}: {result.error}")
                done = index + 1
        except KeyboardInterrupt:
            again = "" if asked.output is None else "; the same command goes on from there"
            note(f"{done} of {len(lines)} done{again}")
            raise


def continued(
    lm: "LanguageModel", asked: "Request", lines: list[Line], done: int, shape: dict[str, Any]
) -> Iterator[tuple[int, "Result"]]:
    """The results of the lines that are not done yet, with their numbers; `shape`: what lines are that do not say."""
    settings = sampling_settings(asked.sampling, lm.recommended_sampling)
    requests = (request(lm, asked, line, shape) for line in lines[done:])
    results = lm.batch(
        requests,
        size=asked.size,
        max_tokens=asked.limit,
        stop=asked.stop,
        logprobs=asked.logprobs or 0,
        **asked.keeping,
        names=[line.where for line in lines[done:]],
        **settings,
    )
    with progress_bar("writing", "texts") as progress:
        for index, result in enumerate(results, done):
            yield index, result
            if progress is not None:
                progress(index + 1, len(lines))


def read(file: str) -> list[str]:
    """The lines of a file (-: standard input) that are not empty."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    found = [line for line in decoded(data, file).splitlines() if line.strip()]
    if not found:
        raise click.UsageError(f"{file}: it is empty, expected a JSON object on each line")
    return found


def line_of(lm: "LanguageModel", asked: "Request", where: str, text: str, shape: dict[str, Any]) -> Line:
    """A line, checked; raises click.UsageError for one that is no object with a prompt."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict) or sum(key in found for key in PROMPTS) != 1:
        expected = 'an object with a "prompt", "messages" or "ids"'
        raise click.UsageError(f'{where}: found {text[:60]!r}, expected {expected}, as in {{"prompt": "ROMEO:"}}')
    rest = [asked.system, asked.raw, asked.limit, asked.stop, asked.sampling, asked.keeping, asked.logprobs, shape]
    dependent = json.dumps([found, rest, lm.origin, str(lm.dtype)], sort_keys=True, default=str)
    return Line(where, found, hashlib.sha256(dependent.encode()).hexdigest()[:16])


def request(lm: "LanguageModel", asked: "Request", line: Line, shape: dict[str, Any]) -> dict[str, Any]:
    """What the library takes for a line, which may have a shape of its own."""
    from mlx_tformer.errors import UsageError

    from .generate import conversation, plain

    own = {key: value for key, value in line.asked.items() if key not in (*PROMPTS, "id")}
    own = own if {"json_schema", "regex"} & own.keys() else {**shape, **own}
    try:
        if "ids" in line.asked:
            return {"prompt": line.asked["ids"], **own}
        if "messages" in line.asked:
            return {"prompt": lm.chat(line.asked["messages"]), **own}
        text = line.asked["prompt"]
        if not isinstance(text, str):
            raise UsageError(f"prompt: found {text!r}, expected text")
        chat = lm.has_chat_template and not asked.raw
        return {"prompt": conversation(lm, text, asked.system) if chat else plain(lm, text, asked.system), **own}
    except UsageError as error:
        raise UsageError(f"{line.where}: {error}") from None


def as_dict(index: int, line: Line, result: "Result") -> dict[str, Any]:
    """The result of a line; `request` tells which one it belongs to when the file is gone on with."""
    own = {"id": line.asked["id"]} if "id" in line.asked else {}
    found = {
        "index": index,
        **own,
        "text": result.text,
        "finish": result.finish,
        "prompt_tokens": len(result.prompt),
        "tokens": result.tokens,
        "logprobs": [step.logprob for step in result.steps],
        "request": line.digest,
    }
    found |= {} if result.error is None else {"error": result.error}
    return found | ({"top": [step.top for step in result.steps]} if any(step.top for step in result.steps) else {})


def resumed(path: Path, lines: list[Line]) -> int:
    """How many results a file has; what an interruption left of a line is cut off.

    Raises click.UsageError for a file that holds anything else.
    """
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    found = [_digest(line) for line in whole.splitlines()]
    wrong = next((i for i, made in enumerate(found) if i >= len(lines) or made != lines[i].digest), None)
    if wrong is not None:
        raise click.UsageError(
            f"--output: line {wrong + 1} of {path} is not the result of this request; remove the file, or name another"
        )
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return len(found)


def _digest(line: bytes) -> str | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found.get("request") if isinstance(found, dict) else None


class Lines:
    """A file that lines are added to, each of which is there when `write` returns."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(text.encode())
        self._stream.flush()


@contextmanager
def output(path: str | None) -> "Iterator[Lines | Writer]":
    """Where the results go: the end of a file, or standard output."""
    if path is None:
        with Writer() as out:
            yield out
        return
    with Path(path).open("ab") as stream:
        yield Lines(stream)
