"""What a turn sends, keeps and counts."""

import io

import pytest

from qkv_engine.cli.chat_params import chat_params
from qkv_engine.cli.chat_render import PlainReply
from qkv_engine.cli.chat_session import Conversation
from qkv_engine.errors import RequestError

from .fake_engine import FakeEngine


class StopAfter(PlainReply):
    """A reader who presses Ctrl-C once some text has come."""

    def __init__(self, num_characters: int):
        super().__init__(io.StringIO())
        self.left = num_characters

    def think(self, text: str, num_tokens: int) -> None:
        self.answer(text)

    def answer(self, text: str) -> None:
        self.left -= len(text)
        if self.left <= 0:
            raise KeyboardInterrupt


@pytest.fixture
def talk() -> Conversation:
    engine = FakeEngine()
    return Conversation(engine, chat_params(engine, {}))


def ask(talk: Conversation, question: str) -> str:
    file = io.StringIO()
    talk.ask(question, PlainReply(file))
    return file.getvalue()


def test_special_tokens_stay_in_the_text_and_never_reach_the_reader(talk: Conversation):
    assert ask(talk, "<|im_end|>") == "echo:\n"
    assert talk.engine.params[-1].skip_special_tokens is False
    assert talk.engine.params[-1].temperature == talk.engine.default_params.temperature


def test_history_has_thinking_only_in_its_own_field(talk: Conversation):
    assert ask(talk, "What is 47*86?") == "4042\n"
    ask(talk, "again")
    assert talk.engine.prompts[-1] == [
        {"role": "user", "content": "What is 47*86?"},
        {"role": "assistant", "content": "4042", "reasoning_content": "47*80=3760 47*6=282"},
        {"role": "user", "content": "again"},
    ]


def test_thinking_is_printed_only_when_asked_for(talk: Conversation):
    file = io.StringIO()
    talk.ask("What is 47*86?", PlainReply(file, with_thinking=True))
    assert file.getvalue() == "<think>\n47*80=3760 47*6=282\n</think>\n4042\n"


def test_control_characters_are_removed(talk: Conversation):
    assert ask(talk, "escape") == "a[31mbc\n"
    assert talk.messages[-1]["content"] == "a[31mbc"


def test_figures(talk: Conversation):
    turn = talk.ask("hello", PlainReply(io.StringIO()))
    assert (turn.num_prompt_tokens, turn.num_output_tokens, turn.context_tokens) == (2, 11, 13)
    assert turn.kv_nbytes == 2**20 and turn.first_token_seconds is not None
    line = turn.status(8192)
    assert "first token" in line and "tok/s" in line and "context 13 of 8,192" in line and "KV 1.0 MiB" in line


def test_an_interrupted_answer_is_kept_and_the_request_aborted(talk: Conversation):
    turn = talk.ask("slow", StopAfter(12))
    assert turn.interrupted and talk.engine.aborted == 1
    assert turn.status(8192).startswith("stopped")
    assert talk.messages[-1]["content"].startswith("word word")


def test_interrupted_thinking_leaves_no_trace_in_the_history(talk: Conversation):
    turn = talk.ask("slow thinking", StopAfter(12))
    assert turn.interrupted and turn.thinking.startswith("hmm") and talk.messages == []


def test_a_refused_question_is_not_remembered(talk: Conversation):
    with pytest.raises(RequestError):
        ask(talk, "fail")
    assert talk.messages == [] and talk.last is None
