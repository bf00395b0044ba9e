"""Conversations: what is read, what is kept, what the terminal program does."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from cli_models import TEMPLATE, error_line, invoke, run, speaking
from hypothesis import given
from hypothesis import strategies as st

import mlx_tformer as mt
from mlx_tformer.errors import BadInput, InputOutputError, UsageError
from mlx_tformer.generation.conversation import Conversation
from mlx_tformer.generation.reasoning import Part, Reasoning

THINKING = TEMPLATE.replace('" a"', '" <think>"')
FORGETFUL = "{{ 's ' }}{%- for m in messages %}{{ 'u ' }}{{ m['content'] if loop.last else 'x' }}{% endfor %}{{ ' a' }}"


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("models") / "chatting", template=TEMPLATE)


def said(conversation: Conversation, text: str, **settings: int) -> str:
    return "".join(part.text for part in conversation.ask(text, **{"max_tokens": 4, **settings}))


# --- thoughts ---

PARTS = st.lists(st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "<th", "ink>", "a", "<", "/", "b "]))


@given(PARTS, st.lists(st.integers(0, 60)))
def test_thoughts_are_told_apart_however_the_text_comes(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    whole, cut = Reasoning(), Reasoning()
    places = sorted({0, *(min(at, len(text)) for at in cuts), len(text)})
    found = [p for a, b in pairwise(places) for p in cut.add(text[a:b])] + [*cut.finish()]
    wanted = [*whole.add(text), *whole.finish()]
    assert [(c, p.thought) for p in found for c in p.text] == [(c, p.thought) for p in wanted for c in p.text]


def test_a_thought_may_begin_in_the_prompt() -> None:
    reading = Reasoning("user: hi\nassistant: <think>\n")
    assert [*reading.add("Hm</think>Yes")] == [Part("Hm", True), Part("Yes", False)]
    assert [*reading.add("<tool_call>{}</tool_call>"), *reading.finish()] == [Part("<tool_call>{}</tool_call>", False)]


# --- conversations ---


def test_a_second_turn_reads_only_its_own_tokens(smollm2_dense: mt.LanguageModel, read: list[int]) -> None:
    conversation = Conversation(smollm2_dense)
    assert said(conversation, "What is the capital of France?", max_tokens=20) == "The capital of France is Paris."
    before = len(smollm2_dense.chat(conversation.messages, add_generation_prompt=False))
    read.clear()
    said(conversation, "And of Italy?", max_tokens=2)
    question = len(smollm2_dense.chat(conversation.messages[:3])) - before
    assert read[0] == question + 1  # the line end that the template puts behind an answer


def test_answers_are_those_of_a_fresh_reading(chatting: Path) -> None:
    lm = mt.load(chatting)
    conversation, messages = Conversation(lm, system="c "), [{"role": "system", "content": "c "}]
    for text in ("b ", "d e ", "f "):
        messages.append({"role": "user", "content": text})
        wanted = lm.generate(lm.chat(messages), max_tokens=4)
        assert said(conversation, text) == "".join(step.text for step in wanted)
        messages.append({"role": "assistant", "content": wanted.text})
    assert conversation.messages == messages


def test_a_template_that_rewrites_history_keeps_the_common_beginning(tmp_path: Path, read: list[int]) -> None:
    lm = mt.load(speaking(tmp_path / "model", template=FORGETFUL))
    conversation = Conversation(lm)
    said(conversation, "b c d")
    read.clear()
    text = said(conversation, "e f")
    fresh = lm.chat(conversation.messages[:3])
    assert read[0] == len(fresh) - 2  # "s u" is the same
    assert text == "".join(step.text for step in lm.generate(fresh, max_tokens=4))


def test_an_answer_keeps_the_tokens_that_it_was_written_with(smollm2_dense: mt.LanguageModel) -> None:
    conversation = Conversation(smollm2_dense)
    conversation.messages = [{"role": "user", "content": "Hi"}]
    ids = conversation.prompt()
    tokenizer = smollm2_dense.tokenizer
    odd = [i for letter in "Hello" for i in tokenizer.encode(letter, add_bos=False)]  # not as it would be cut
    end = tokenizer.encode("<|im_end|>", special=True, add_bos=False)
    conversation.memory.ids = [*ids, *odd]
    conversation.messages += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    assert conversation.prompt()[: len(ids) + len(odd) + 1] == [*ids, *odd, *end]


def test_messages_can_be_taken_back_and_answered_again(chatting: Path) -> None:
    conversation = Conversation(mt.load(chatting), system="c ")
    first = said(conversation, "b ")
    said(conversation, "d ")
    conversation.undo()
    assert [m["content"] for m in conversation.messages] == ["c ", "b ", first]
    assert "".join(part.text for part in conversation.retry(max_tokens=4)) == first
    conversation.system = "e "
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "e "}]
    for action in (conversation.undo, lambda: list(conversation.retry())):
        with pytest.raises(UsageError, match="there is nothing to"):
            action()


def test_an_answer_that_is_broken_off_is_kept_and_a_question_without_one_is_not(chatting: Path) -> None:
    conversation = Conversation(mt.load(chatting))
    answer = conversation.ask("b ", max_tokens=9)
    came = next(answer).text + next(answer).text
    answer.close()
    assert (conversation.messages[-1]["content"], conversation.finish) == (came, None)
    before = list(conversation.messages)
    with pytest.raises(UsageError, match="leaves no room"):
        said(conversation, "b " * 200)
    assert conversation.messages == before
    assert said(conversation, "d ") != ""


def test_thoughts_are_kept_apart_for_the_template(tmp_path: Path) -> None:
    conversation = Conversation(mt.load(speaking(tmp_path / "model", template=THINKING)))
    parts = list(conversation.ask("b ", max_tokens=4))
    assert all(part.thought for part in parts)
    assert conversation.messages[-1] == {
        "role": "assistant", "content": "", "reasoning_content": "".join(part.text for part in parts)
    }  # fmt: skip


def test_a_saved_conversation_goes_on(chatting: Path, tmp_path: Path) -> None:
    first, second, file = Conversation(mt.load(chatting)), Conversation(mt.load(chatting)), tmp_path / "talk.json"
    said(first, "b ")
    first.save(file)
    second.load(file)
    assert second.messages == first.messages and [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    assert said(second, "d ") == said(first, "d ")
    with pytest.raises(InputOutputError, match="cannot be written"):
        first.save(tmp_path / "nowhere" / "talk.json")
    with pytest.raises(InputOutputError, match="cannot be read"):
        first.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "[" * 100_000, '{"messages": 3}', '{"messages": [{"role": "king", "content": ""}]}',
        '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "user", "content": 3}]}',
    ],
    ids=range(7),
)  # fmt: skip
def test_what_is_no_saved_conversation_is_refused_and_changes_nothing(
    chatting: Path, tmp_path: Path, text: str
) -> None:
    conversation = Conversation(mt.load(chatting), system="c ")
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(BadInput, match=r"talk\.json"):
        conversation.load(tmp_path / "talk.json")
    assert conversation.system == "c "


# --- the command line ---


def test_each_line_of_a_pipe_is_a_message(chatting: Path) -> None:
    result = invoke("chat", "-m", str(chatting), "-n", "4", text="b \n\nd \n")
    conversation = Conversation(mt.load(chatting))
    assert result.stdout == "".join(said(conversation, text) + "\n" for text in ("b ", "d "))
    assert result.exit_code == 0


def test_commands_do_what_help_says(chatting: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    typed = [
        "/help",
        "/system",
        "/system c ",
        "b ",
        "/stats",
        f"/save {file}",
        "/undo",
        "/undo",
        f"/load {file}",
        "/retry",
    ]
    result = invoke("chat", "-m", str(chatting), "-n", "4", text="\n".join([*typed, "/bogus", "/save", "/exit", "d "]))
    conversation = Conversation(mt.load(chatting), system="c")
    answer = said(conversation, "b ")
    assert result.stdout == f"{answer}\n{answer}\n"
    for part in ("/reset", "no system message", "of them known", "nothing to undo", "no /bogus", "a file is missing"):
        assert part in result.stderr
    assert json.loads(file.read_text())["messages"] == conversation.messages


def test_a_message_may_begin_with_a_slash_and_what_does_not_fit_does_not_end_the_program(chatting: Path) -> None:
    result = invoke("chat", "-m", str(chatting), "-n", "2", text="//help\n" + "b " * 200 + "\nb \n")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 2)
    assert "leaves no room" in result.stderr


def test_thoughts_can_be_dropped(tmp_path: Path) -> None:
    model = speaking(tmp_path / "model", template=THINKING)
    assert invoke("chat", "-m", str(model), "-n", "4", text="b \n").stdout.strip() != ""
    assert invoke("chat", "-m", str(model), "-n", "4", "--hide-reasoning", text="b \n").stdout.strip() == ""


@pytest.mark.parametrize(
    ("options", "part"),
    [(["--top-p", "2"], "--top-p: found 2"), (["--kv-bits", "5"], "--kv-bits"), (["--kv-keep", "5"], "--kv-keep")],
)
def test_settings_are_checked_before_anything_is_typed(chatting: Path, options: list[str], part: str) -> None:
    assert part in error_line(invoke("chat", "-m", str(chatting), *options, text=""), 2)


def test_a_model_without_a_template_cannot_talk(tmp_path: Path) -> None:
    assert "no chat template" in error_line(invoke("chat", "-m", str(speaking(tmp_path / "model")), text="b"), 2)


def test_bytes_that_are_no_text_are_a_usage_error(chatting: Path) -> None:
    code, _, err = run("chat", "-m", str(chatting), text=b"\xff\n")
    assert code == 2 and b"expected text in UTF-8" in err


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, *arguments: str):
        self.handle, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        command = [sys.executable, "-m", "mlx_tformer_cli", *arguments]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.handle, text.encode())

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.handle], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.handle, 65536).decode(errors="replace")
                except OSError:
                    break
        assert text in self.seen, self.seen
        self.seen = self.seen.partition(text)[2]

    def end(self) -> int:
        self.process.wait(timeout=60)
        os.close(self.handle)
        return self.process.returncode


def test_on_a_terminal_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    model = speaking(tmp_path / "model", template=THINKING, context=100_000)
    screen = Terminal("chat", "-m", str(model), "-n", "90000")
    screen.wait_for(">")
    screen.type("b \r")
    screen.wait_for("\x1b[2m")  # a thought is dimmed
    time.sleep(0.5)
    screen.type("\x03")
    screen.wait_for(">")
    screen.type("/stats\r")
    screen.wait_for("of them known")
    screen.type("/exit\r")
    assert screen.end() == 0


def test_ctrl_d_ends_the_program_and_ctrl_c_drops_the_line(chatting: Path) -> None:
    screen = Terminal("chat", "-m", str(chatting), "-n", "3")
    screen.wait_for(">")
    screen.type("bbb\x03")
    screen.wait_for("Ctrl-D or /exit ends")
    screen.wait_for(">")
    screen.type("\x04")
    assert screen.end() == 0
