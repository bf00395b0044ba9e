"""Options in groups, which `--help` shows under a heading each, and the ones that several commands share."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
SAMPLING = "Sampling"
PENALTIES = "Penalties and constraints, applied before the sampling options"


class Grouped(click.Option):
    """An option with a heading."""

    def __init__(self, *args: Any, group: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose options stand under headings, in the order in which the headings come."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; those without a heading first."""
        rows: dict[str, list[tuple[str, str]]] = {"Options": []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None and isinstance(option, click.Option):
                heading = option.group if isinstance(option, Grouped) else "Options"
                rows.setdefault(heading, []).append(record)
        for heading, records in rows.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def together(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    """Several options as one decorator, in their order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class Bias(click.ParamType):
    """TOKEN=NUMBER, where TOKEN is an id or a text that is one token."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str | int, float]:
        """The token and what to add to its logit."""
        token, _, number = str(value).rpartition("=")
        try:
            bias = float(number)
        except ValueError:
            bias = math.nan
        if not token or math.isnan(bias):
            self.fail(f"found {value!r}, expected TOKEN=NUMBER, as in ' the=-2' or 17=inf", param, ctx)
        return (int(token) if token.isdecimal() else token), bias


def grouped(group: str, names: str, kind: Any, metavar: str, text: str, **more: Any) -> Callable[[F], F]:
    """An option under a heading."""
    return click.option(*names.split(), type=kind, metavar=metavar, help=text, cls=Grouped, group=group, **more)


sampling_options = together(
    [
        grouped(SAMPLING, "--temperature", float, "T", "0: always the most likely token; higher: more variety."),
        grouped(SAMPLING, "--top-k", int, "K", "Choose among the K most likely tokens (0: all)."),
        grouped(SAMPLING, "--top-p", float, "P", "Choose among the likeliest tokens that make up P."),
        grouped(SAMPLING, "--min-p", float, "P", "Choose among tokens at least P times as likely as the best."),
        grouped(SAMPLING, "--typical-p", float, "P", "Choose among the tokens of usual surprise that make up P."),
        grouped(SAMPLING, "--xtc-probability", float, "P", "So often, exclude the top choices but the least of them."),
        grouped(SAMPLING, "--xtc-threshold", float, "P", "What is a top choice: this probability or more (0.1)."),
        grouped(SAMPLING, "--seed", int, "N", "The same seed gives the same text."),
        grouped(PENALTIES, "--repetition-penalty", float, "R", "Above 1: against tokens of prompt and text."),
        grouped(PENALTIES, "--presence-penalty", float, "X", "Taken from logits of tokens that were written."),
        grouped(PENALTIES, "--frequency-penalty", float, "X", "The same, for each time."),
        grouped(PENALTIES, "--dry-multiplier", float, "X", "Against repeating sequences (0: off, 0.8: usual)."),
        grouped(PENALTIES, "--dry-base", float, "X", "How that grows with the sequence's length (1.75)."),
        grouped(PENALTIES, "--dry-allowed-length", int, "N", "Tokens that may repeat without it (2)."),
        grouped(
            PENALTIES, "--logit-bias", Bias(), "TOKEN=X", "Add X to a token's logit; several times.", multiple=True
        ),
        grouped(
            PENALTIES,
            "--bad-word bad_words",
            str,
            "TEXT",
            "Never write this; can be given several times.",
            multiple=True,
        ),
        grouped(PENALTIES, "--min-tokens", int, "N", "Do not end before N tokens."),
    ]
)
SHAPE = "Shape of the text"
shape_options = together(
    [
        grouped(SHAPE, "--json-schema", str, "SCHEMA", "Write JSON of this schema: a file, or the schema itself."),
        grouped(SHAPE, "--regex", str, "PATTERN", "Write text that PATTERN matches as a whole."),
    ]
)
CACHE = "Cache"
cache_options = together(
    [
        grouped(CACHE, "--kv-bits", int, "BITS", "Keep keys and values in 4 or 8 bits."),
        grouped(CACHE, "--kv-start", int, "N", "Only in texts of more than N tokens (0).", default=0),
        grouped(CACHE, "--kv-size", int, "N", "Keep no more than N tokens in each layer."),
        grouped(CACHE, "--kv-keep", int, "N", "The first N tokens among these (0).", default=0),
    ]
)
KEEPING = ("kv_bits", "kv_start", "kv_size", "kv_keep")
NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "min_tokens"),
)
FILTERS = {"top_k", "top_p", "min_p", "typical_p", "xtc_probability"}
NEEDED = {"xtc_threshold": "xtc_probability", "dry_base": "dry_multiplier", "dry_allowed_length": "dry_multiplier"}
"""Options that say nothing without another one."""


def constraints(schema: str | None, regex: str | None) -> dict[str, Any]:
    """What the text must be, as settings for `generate`: `schema` is JSON, or names a file of it.

    Raises click.UsageError for one that is neither.
    """
    if schema is None:
        return {} if regex is None else {"regex": regex}
    if regex is not None:
        raise click.UsageError("--json-schema and --regex: give one of them")
    inline = schema.lstrip().startswith("{") or schema.strip() in ("true", "false")
    text = schema if inline else Path(schema).read_text(encoding="utf-8", errors="replace")
    try:
        return {"json_schema": json.loads(text)}
    except (ValueError, RecursionError) as error:
        where = "" if inline else f" {schema}:"
        raise click.UsageError(f"--json-schema:{where} not JSON: {error}") from None


def sampling_settings(options: dict[str, Any], recommended: dict[str, Any]) -> dict[str, Any]:
    """The settings for `generate`: what was given, then what the model's authors recommend.

    Raises click.UsageError for an option that does nothing without another one.
    """
    given = {name: options[name] for name in NAMES if options[name] is not None}
    for name, other in NEEDED.items():
        if name in given and other not in given:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --{other.replace('_', '-')}")
    if options["logit_bias"]:
        given["logit_bias"] = dict(options["logit_bias"])
    if options["bad_words"]:
        given["bad_words"] = list(options["bad_words"])
    settings = {**recommended, **given}
    if given.keys() & FILTERS:
        settings.setdefault("temperature", 1.0)
    return settings
