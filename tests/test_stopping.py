"""Stop strings end the text wherever tokens cut them, and nothing of them is shown."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tformer.errors import UsageError
from mlx_tformer.generation.stopping import StopStrings

LETTERS = st.text("ab", max_size=30)


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 30), max_size=6))
def test_however_the_text_is_cut_it_ends_before_the_first_stop_string(text, strings, places):
    first = min((at for at in map(text.find, strings) if at >= 0), default=None)
    stop, shown = StopStrings(strings), ""
    for piece in cut(text, places):
        shown += stop.add(piece)
        assert text.startswith(shown)
        assert all(string not in shown for string in strings)
        if stop.found:
            break
    if not stop.found:
        shown += stop.finish()
    # Cut in pieces, a string that is complete earlier may be seen before one that begins earlier.
    complete = min((text.find(s) + len(s) for s in strings if s in text), default=None)
    assert stop.found == (first is not None)
    if first is None:
        assert shown == text
    else:
        assert first <= len(shown) <= complete


def test_only_what_could_begin_a_stop_string_is_held_back():
    stop = StopStrings(["</s>"])
    assert [stop.add(piece) for piece in ["a <", "b", " <", "/", "s", "x"]] == ["a ", "<b", " ", "", "", "</sx"]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="stop: found an empty string"):
        StopStrings([""])
