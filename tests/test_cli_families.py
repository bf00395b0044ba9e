"""`mlx-tformer families`: what is supported, from the code."""

import json

import pytest
from cli_models import invoke
from helpers import CASES, config_of
from mlx_tformer_cli import families, reference

from mlx_tformer.checkpoint.language_part import KINDS
from mlx_tformer.families import family, known


def test_every_family_is_listed_with_what_it_says_about_itself() -> None:
    found = json.loads(invoke("families", "--json").stdout)
    assert found.keys() == {*known(), *KINDS}
    assert list(found)[: len(known())] == known()
    assert all(found[name] == " ".join(family(name).about.split()) for name in known())
    assert {config_of(case)["model_type"] for case in CASES} <= found.keys()


def test_the_list_has_a_line_for_each() -> None:
    found = json.loads(invoke("families", "--json").stdout)
    lines = invoke("families").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(found)
    assert all(line.endswith(text) for line, text in zip(lines, found.values(), strict=True))


def test_the_table_has_a_row_for_each() -> None:
    rows = families.table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(families.about())
    assert all(row.count("|") == 3 for row in rows)


@pytest.mark.parametrize("page", ["", "<!-- commands: begin --><!-- commands: end -->", "<!-- families: begin -->"])
def test_a_page_without_the_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="expected <!-- "):
        reference.updated(page)
