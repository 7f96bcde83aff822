"""What a turn sends, keeps and counts."""

import io
from functools import partial

import msgspec
import pytest

from qkv_engine.cli.chat.params import chat_params
from qkv_engine.cli.chat.render import PlainReply
from qkv_engine.cli.chat.session import Conversation
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


def test_the_models_parameters_are_used(talk: Conversation):
    assert ask(talk, "hi") == "echo: hi\n"
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


def test_a_retry_sends_the_same_prompt_and_takes_the_place_of_the_reply(talk: Conversation):
    ask(talk, "one")
    ask(talk, "two")
    first = list(talk.messages)
    turn = talk.retry(PlainReply(io.StringIO()))
    assert turn.answer == "echo: two" and talk.messages == first
    assert talk.engine.prompts[-1] == talk.engine.prompts[-2]


def test_each_retry_of_a_seeded_chat_has_a_seed_of_its_own(talk: Conversation):
    talk.params = msgspec.structs.replace(talk.params, temperature=1.0, seed=7)
    ask(talk, "one")
    for _ in range(2):
        talk.retry(PlainReply(io.StringIO()))
    ask(talk, "two")
    assert [params.seed for params in talk.engine.params] == [7, 8, 9, 7]


def test_a_retry_that_is_stopped_leaves_the_first_reply(talk: Conversation):
    ask(talk, "What is 47*86?")
    before = list(talk.messages)
    assert talk.retry(StopAfter(3)).interrupted
    assert talk.messages == before


def test_a_question_that_went_wrong_can_be_asked_or_taken_back(talk: Conversation):
    ask(talk, "one")
    with pytest.raises(RequestError):
        ask(talk, "fail")
    with pytest.raises(RequestError):
        talk.retry(PlainReply(io.StringIO()))
    assert talk.engine.prompts[-1][-1]["content"] == "fail"
    assert (talk.undo(), talk.undo(), talk.messages) == ("fail", "one", [])


@pytest.mark.parametrize(
    ("question", "max_tokens", "limit"),
    [
        ("hello", 3, "cut off by max_tokens=3"),
        ("What is 47*86?", 12, "cut off by max_tokens=12 while thinking"),
        ("hello", None, None),
    ],
)
def test_a_reply_that_was_cut_off_says_where(talk: Conversation, question: str, max_tokens: int, limit: str | None):
    talk.params = msgspec.structs.replace(talk.params, max_tokens=max_tokens)
    turn = talk.ask(question, PlainReply(io.StringIO()))
    assert turn.cut_off == limit
    assert turn.status(8192).startswith(limit or "first token")


@pytest.mark.parametrize(
    ("max_model_len", "limit"),
    [(10, "cut off: the context is full (10 tokens)"), (11, "cut off: the KV memory is full")],
)
def test_a_reply_that_met_the_end_of_the_memory_says_so(talk: Conversation, max_model_len: int, limit: str):
    talk.engine.stream = partial(talk.engine.stream, end=8)  # after two tokens of prompt
    talk.engine.max_model_len = max_model_len
    assert talk.ask("hello there", PlainReply(io.StringIO())).cut_off == limit


def test_a_full_context_is_told_in_the_words_of_a_chat(talk: Conversation):
    with pytest.raises(RequestError, match="the prompt leaves no room"):
        ask(talk, "long")
    ask(talk, "hello")
    with pytest.raises(RequestError, match=r"the context is full \(8,192 tokens\). /reset, /undo, or start with --max"):
        ask(talk, "long")
    assert talk.num_turns == 1


def test_no_thinking_is_asked_of_the_template(talk: Conversation):
    talk.no_thinking = True
    ask(talk, "hello")
    assert talk.engine.template_kwargs == [{"enable_thinking": False}] and talk.can_skip_thinking
