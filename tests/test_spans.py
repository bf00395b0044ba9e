"""Parts of a text that attention is counted by."""

import re

import mlx.core as mx
import numpy as np
import pytest

import mlx_tformer as mt
from mlx_tformer.errors import UsageError
from mlx_tformer.tokens import Spans, Tokens

TEXT = "ROMEO:\nO, speak! 12 times. What?\n\nJULIET:\nAy me."


def parts(tokens: Tokens, spans: Spans) -> list[str]:
    """The text of each span, whose tokens stand side by side."""
    assert tokens.tokenizer is not None and list(spans.labels) == sorted(spans.labels)
    return [
        tokens.tokenizer.decode(i for i, label in zip(tokens, spans.labels, strict=True) if label == number)
        for number in range(len(spans.names))
    ]


def test_stretches_cover_the_text_and_the_last_may_be_short() -> None:
    spans = Tokens(range(10)).spans(every=4)
    assert spans.names == ("0-3", "4-7", "8-9") and spans.labels == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2)
    assert spans.columns == ("0-3", "4-7", "8-9", "(after)")
    assert Tokens(range(3)).spans(every=10).names == ("0-2",)


def test_lines_and_sentences_take_the_token_that_ends_them(shakespeare: mt.LanguageModel) -> None:
    tokens = shakespeare.tokens(TEXT)
    lines = tokens.spans("line")
    assert parts(tokens, lines) == ["ROMEO:\n", "O, speak! 12 times. What?\n\n", "JULIET:\n", "Ay me."]
    assert lines.names == ("ROMEO:", "O, speak! 12 times. Wha…", "JULIET:", "Ay me.")
    sentences = tokens.spans("sentence")
    assert sentences.names == ("ROMEO:", "O, speak!", "12 times.", "What?", "JULIET:", "Ay me.")
    assert "".join(parts(tokens, sentences)) == TEXT


def test_kinds_tell_first_special_words_numbers_punctuation_and_space_apart(smollm2: mt.LanguageModel) -> None:
    tokens = smollm2.chat([{"role": "user", "content": "Buy 12 eggs, please!\n\nSoon"}])
    spans = tokens.spans("kind")
    assert spans.names == ("first", "special", "word", "number", "punctuation", "space")
    assert tokens.tokenizer is not None
    found = {
        tokens.tokenizer.token_text(i): spans.names[n] for i, n in list(zip(tokens, spans.labels, strict=True))[1:]
    }
    wanted = {"<|im_end|>": "special", " eggs": "word", "1": "number", ",": "punctuation", "\\n": "space"}
    assert {text: found[text] for text in wanted} == wanted
    assert spans.labels[0] == 0 and spans.labels.count(0) == 1


def test_characters_of_several_tokens_are_in_one_line(shakespeare: mt.LanguageModel) -> None:
    tokens = shakespeare.tokens("日本\n語")
    assert parts(tokens, tokens.spans("line")) == ["日本\n", "語"]
    kinds = tokens.spans("kind")
    assert {kinds.names[label] for label in kinds.labels} == {"first", "word", "space"}


def test_one_hot_has_a_column_for_what_comes_after() -> None:
    spans = Spans(("a", "b"), (1, 0, 1))
    wanted = [[0, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert np.array_equal(np.array(spans.one_hot(mx.arange(5))), wanted)
    assert spans.one_hot(mx.arange(6).reshape(2, 3)).shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("ids", "settings", "problem"),
    [
        ([1, 2], {"every": 0}, "every: found 0, expected a whole number of 1 or more"),
        ([1, 2], {"every": True}, "every: found True, expected a whole number"),
        ([1, 2], {"by": "verse"}, "spans: found 'verse', expected every=N or one of line, sentence, kind"),
        ([1, 2], {}, "spans: found None, expected every=N or one of"),
        ([1, 2], {"by": "line", "every": 2}, "spans: found 'line', expected every=N or one of"),
        ([1, 2], {"by": "line"}, "there is no tokenizer, so these ids have no text"),
        ([], {"every": 2}, "spans: the text is empty"),
    ],
)
def test_what_divides_no_text_is_refused(ids: list[int], settings: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        Tokens(ids).spans(**settings)


@pytest.mark.parametrize("labels", [(), (0, 2), (-1,)])
def test_labels_are_numbers_of_names(labels: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="expected a label from 0 to 1 for each token"):
        Spans(("a", "b"), labels)
