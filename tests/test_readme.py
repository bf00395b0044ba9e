"""README is true: its commands are the two that CI runs, its Python runs, and the files that it sends readers to
exist."""

import re
from pathlib import Path

import pytest

from mlx_tformer.families import family, known

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMED = sorted({name for name in re.findall(r"`([\w./]+)`", PAGE) if "/" in name and not name.startswith("weights/")})


def test_it_opens_with_one_sentence_and_two_commands():
    title, sentence, *_ = PAGE.split("\n\n")
    assert title.startswith("# ")
    assert sentence.count(". ") == 0
    first_block = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert first_block is not None
    generate, test = first_block[1].strip().splitlines()
    assert generate.endswith('mlx-tformer generate "ROMEO:"')
    assert test.endswith("pytest")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_its_python_runs(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", NAMED)
def test_what_it_names_exists(name):
    assert (ROOT / name).exists()


@pytest.mark.parametrize("name", known())
def test_its_table_has_each_family_as_that_says_itself(name):
    assert f"| `{name}` | {' '.join(family(name).about.split())} |" in PAGE
