"""For the tests of the command line: tiny checkpoints with tokenizers, and the program, in this process or another."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from helpers import GOLDEN
from mlx_tformer_cli.main import program
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import mlx_tformer as mt

CASE = "llama-bias"  # 67 ids, 128 tokens of context
CONTEXT = 128
LETTERS = "éüßñøæåçö→λπ中文👩—"
TEMPLATE = (
    """{%- for m in messages %}{{ "r " if m["role"] == "system" else "u " }}{{ m["content"] }}{% endfor %}{{ " a" }}"""
)


def speaking(
    folder: Path, *, template: str | None = None, generation: dict[str, Any] | None = None, context: int = CONTEXT
) -> Path:
    """A model with random weights whose words are letters: the first ones ASCII, most others not."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", *LETTERS]
    words = letters + [f"{letter}{letter}" for letter in letters]
    vocabulary = {word: index for index, word in enumerate(words[:67])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((GOLDEN / CASE / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "eos_token_id"}
    # In float32: in bfloat16 the two best letters are often a rounding apart, and runs need not agree.
    config |= {"max_position_embeddings": context, "dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDEN / CASE / "model.safetensors", folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def process(*arguments: str | bytes, code: str | None = None, **settings: Any) -> subprocess.Popen[bytes]:
    """`mlx-tformer` with these arguments, or the Python program `code`, its three streams piped."""
    program = ["-m", "mlx_tformer_cli"] if code is None else ["-c", code]
    environment = {**os.environ, **settings.pop("env", {})}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # Without buffers on this side: what one reads ahead, `communicate` does not see.
    command = [sys.executable, *program, *arguments]
    return subprocess.Popen(command, env=environment, bufsize=0, **{**pipes, **settings})


def run(*arguments: str | bytes, text: bytes = b"", **settings: Any) -> tuple[int, bytes, bytes]:
    """The exit code, standard output and standard error of `mlx-tformer`; `text` is its standard input."""
    with process(*arguments, **settings) as started:
        out, err = started.communicate(text, timeout=120)
    return started.returncode, out or b"", err or b""


def invoke(*arguments: str, text: str | bytes | None = None) -> Result:
    """What `mlx-tformer` does with these arguments, in this process."""
    return CliRunner().invoke(program, arguments, input=text)


def error_line(result: Result, code: int) -> str:
    """The one line of an error, which must be all that is printed."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("mlx-tformer: error: ")
    return line


def written(model: Path, prompt: str | Sequence[int], **settings: Any) -> str:
    """What the library writes."""
    return "".join(step.text for step in mt.load(model).generate(prompt, **settings))
