"""Slash commands: what they change, what they print, and how they refuse."""

import io
import json
import os
import stat
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.console import Console

from qkv_engine.cli.chat_commands import COMMANDS, LeaveChat, Shell, parse_command, run_command
from qkv_engine.cli.chat_params import SETTABLE, chat_params
from qkv_engine.cli.chat_render import PlainReply, ThinkMode
from qkv_engine.cli.chat_session import Conversation
from qkv_engine.cli.terminal import CommandCompleter
from qkv_engine.errors import QKVError, RequestError

from .fake_engine import FakeEngine


@pytest.fixture
def shell() -> Shell:
    engine = FakeEngine()
    talk = Conversation(engine, chat_params(engine, {}))
    return Shell(talk, Console(file=io.StringIO(), width=100), ThinkMode.FOLD)


def ask(shell: Shell, question: str) -> None:
    shell.conversation.ask(question, PlainReply(io.StringIO()))


def run(shell: Shell, line: str) -> str:
    """What the command prints."""
    file = shell.console.file = io.StringIO()
    command = parse_command(line)
    assert command is not None
    run_command(shell, *command)
    return file.getvalue()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/help", ("help", "")),
        ("  /save  a b.json ", ("save", "a b.json")),
        ("/system two\nlines", ("system", "two\nlines")),
        ("/", ("", "")),
        ("/etc/passwd is what?", None),
        ("/Users", None),
        ("hello /help", None),
    ],
)
def test_only_a_slash_and_a_word_make_a_command(line: str, expected: tuple[str, str] | None):
    assert parse_command(line) == expected


def test_help_names_every_command(shell: Shell):
    text = run(shell, "/help")
    assert all(f"/{name}" in text for name in COMMANDS)


def test_an_unknown_command_suggests_the_nearest(shell: Shell):
    with pytest.raises(QKVError, match="Did you mean /reset"):
        run(shell, "/rest")


def test_reset_forgets_the_conversation(shell: Shell):
    ask(shell, "hello")
    assert "1 turn" in run(shell, "/reset")
    ask(shell, "again")
    assert shell.conversation.engine.prompts[-1] == [{"role": "user", "content": "again"}]


def test_system_is_sent_first_until_it_is_removed(shell: Shell):
    run(shell, "/system Be brief.")
    ask(shell, "hello")
    assert shell.conversation.engine.prompts[-1][0] == {"role": "system", "content": "Be brief."}
    assert "Be brief." in run(shell, "/system")
    assert "no system prompt" in run(shell, "/system none")
    ask(shell, "hello")
    assert shell.conversation.engine.prompts[-1][0]["role"] == "user"


def test_params_are_set_by_type(shell: Shell):
    run(shell, "/params temperature 0.5")
    run(shell, "/params top_k 20")
    run(shell, "/params stop END OF IT")
    run(shell, "/params max_tokens none")
    run(shell, '/params logit_bias {"3": 1.5}')
    params = shell.conversation.params
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (
        0.5,
        20,
        ["END OF IT"],
        None,
    )
    assert params.logit_bias == {3: 1.5}
    run(shell, "/params temperature default")
    assert shell.conversation.params.temperature == 0.0


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/params temperature hot", "temperature"),
        ("/params top_p 1.5", "top_p=1.5"),
        ("/params top_k 1.5", "top_k"),
        ("/params temprature 1", "Did you mean temperature"),
        ("/params n 2", "cannot be set in a chat"),
        ("/params nonsense", "not a sampling parameter"),
    ],
)
def test_params_refuse_kindly_and_change_nothing(shell: Shell, line: str, hint: str):
    before = shell.conversation.params
    with pytest.raises(RequestError, match=hint):
        run(shell, line)
    assert shell.conversation.params == before


def test_params_lists_what_can_be_set(shell: Shell):
    text = run(shell, "/params")
    assert all(name in text for name in SETTABLE)
    assert "temperature = 0.0" in run(shell, "/params temperature")


def test_save_and_load_round_trip(shell: Shell, tmp_path: Path):
    path = tmp_path / "chat.json"
    shell.conversation.system = "Be brief."
    ask(shell, "What is 47*86?")
    run(shell, f"/save {path}")
    messages = list(shell.conversation.messages)
    assert messages[1] == {"role": "assistant", "content": "4042", "reasoning_content": "47*80=3760 47*6=282"}
    assert json.loads(path.read_text())["model"] == "fake"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["chat.json"]
    shell.conversation.reset()
    shell.conversation.system = None
    assert "1 turn" in run(shell, f"/load {path}")
    assert (shell.conversation.messages, shell.conversation.system) == (messages, "Be brief.")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"messages": 3}', '{"messages": [{"role": "root", "content": ""}]}']
)
def test_a_malformed_file_changes_nothing(shell: Shell, tmp_path: Path, content: str):
    ask(shell, "hello")
    before = list(shell.conversation.messages)
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(QKVError, match="not a saved conversation"):
        run(shell, f"/load {path}")
    assert shell.conversation.messages == before


def test_a_failed_save_leaves_the_old_file(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "chat.json"
    path.write_text("old")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        run(shell, f"/save {path}")
    assert os.listdir(tmp_path) == ["chat.json"] and path.read_text() == "old"


def test_save_wants_a_name(shell: Shell):
    with pytest.raises(QKVError, match="file name"):
        run(shell, "/save")


def test_kv_and_stats_print_memory_in_words(shell: Shell):
    ask(shell, "hello")
    text = run(shell, "/kv")
    assert "1.0 GiB, 131,072 tokens" in text and "of 8,192 tokens" in text
    assert "num_preemptions" in run(shell, "/stats")


def test_think_prints_the_last_thinking_or_sets_the_mode(shell: Shell):
    assert "no thinking" in run(shell, "/think")
    ask(shell, "What is 47*86?")
    assert "47*80=3760" in run(shell, "/think")
    run(shell, "/think hide")
    assert shell.think is ThinkMode.HIDE
    with pytest.raises(QKVError, match="show, fold, hide"):
        run(shell, "/think twice")


def test_exit_leaves(shell: Shell):
    with pytest.raises(LeaveChat):
        run(shell, "/exit")


def test_completion(tmp_path: Path):
    (tmp_path / "talk.json").touch()

    def complete(text: str) -> list[str]:
        return [c.text for c in CommandCompleter().get_completions(Document(text), CompleteEvent())]

    assert complete("/s") == ["save", "system", "stats"]
    assert complete("/think f") == ["fold"]
    assert complete("/params top") == ["top_p", "top_k"]
    assert complete(f"/load {tmp_path}/ta") == ["lk.json"]
    assert complete("hello /s") == [] and complete("/nothing x") == []
