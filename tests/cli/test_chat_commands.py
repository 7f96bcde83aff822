"""Slash commands: what they change, what they print, and how they refuse."""

import io
from base64 import b64decode
from pathlib import Path

import msgspec
import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.console import Console

from qkv_engine.cli.chat.commands import ALIASES, COMMANDS, LeaveChat, parse_command
from qkv_engine.cli.chat.params import SETTABLE, set_param
from qkv_engine.cli.chat.render import PlainReply, ThinkMode
from qkv_engine.cli.chat.shell import Shell
from qkv_engine.cli.chat.terminal import CommandCompleter
from qkv_engine.errors import QKVError, RequestError

from .fake_engine import FakeEngine
from .shells import ask, run


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/help", ("help", "")),
        ("  /save  a b.json ", ("save", "a b.json")),
        ("/system two\nlines", ("system", "two\nlines")),
        ("/", ("", "")),
        ("/HELP", ("help", "")),
        ("/?", ("?", "")),
        ("/Save! A.json", ("save!", "A.json")),
        ("/etc/passwd is what?", None),
        ("/bin/", None),
        ("//help", None),
        ("/.bashrc", None),
        ("hello /help", None),
    ],
)
def test_only_a_slash_and_a_word_make_a_command(line: str, expected: tuple[str, str] | None):
    assert parse_command(line) == expected


def test_help_names_every_command(shell: Shell):
    text = run(shell, "/help")
    assert all(f"/{name}" in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "hint"),
    [("/rest", "mean /reset"), ("/clearr", "mean /clear"), ("/QUITT", "mean /quit"), ("/xyzzy", "/help")],
)
def test_an_unknown_command_suggests_the_nearest(shell: Shell, line: str, hint: str):
    with pytest.raises(QKVError, match=f"{hint}.*second one"):
        run(shell, line)


@pytest.mark.parametrize("width", [40, 80])
def test_help_fits_the_screen_and_breaks_no_word(shell: Shell, width: int):
    shell.console = Console(file=io.StringIO(), width=width)
    lines = run(shell, "/help").splitlines()
    assert max(map(len, lines)) <= width and not any(line.endswith(" ") for line in lines)
    words = set(" ".join(lines).split())
    assert all(set(command.summary.split()) <= words for command in COMMANDS.values())


def test_other_names_of_commands(shell: Shell):
    for name in ("quit", "BYE", "q"):
        with pytest.raises(LeaveChat):
            run(shell, f"/{name}")
    ask(shell, "hello")
    assert "1 turn" in run(shell, "/clear") and shell.conversation.messages == []
    assert run(shell, "/?") == run(shell, "/help")
    assert not set(ALIASES) & set(COMMANDS) and set(ALIASES.values()) <= set(COMMANDS)


def test_undo_takes_back_one_turn_at_a_time(shell: Shell):
    ask(shell, "one")
    ask(shell, "two " * 100)
    assert "two two" in run(shell, "/undo")
    assert [message["content"] for message in shell.conversation.messages] == ["one", "echo: one"]
    assert "no thinking" in run(shell, "/think")
    assert "took back: one" in run(shell, "/undo")
    with pytest.raises(QKVError, match="the conversation is empty"):
        run(shell, "/undo")


def test_retry_asks_again_in_the_place_of_the_first_time(shell: Shell):
    with pytest.raises(QKVError, match="the conversation is empty"):
        run(shell, "/retry")
    ask(shell, "one")
    ask(shell, "two")
    assert "temperature 0" in run(shell, "/retry")
    prompts = shell.conversation.engine.prompts
    assert prompts[-1] == prompts[-2] and shell.conversation.num_turns == 2
    run(shell, "/params temperature 1")
    assert "temperature" not in run(shell, "/retry")


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
        ("/params temperature hot", r"temperature takes a number in \[0, 100\], not 'hot'"),
        ("/params seed x", "seed takes an integer"),
        ("/params logit_bias [1]", "logit_bias takes a JSON object"),
        ("/params ignore_eos 7", "ignore_eos takes true or false"),
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


def test_every_parameter_says_in_words_what_it_takes(shell: Shell):
    texts = ("stop", "kv_floor", "tenant", "cache_salt", "session")  # which take any word
    for name in SETTABLE:
        if name not in texts:
            with pytest.raises(RequestError, match=f"{name} takes an? (number|integer|JSON)|true or false|not a time"):
                set_param(shell.conversation.params, name, "?", shell.conversation.engine)


def test_params_lists_what_can_be_set(shell: Shell):
    text = run(shell, "/params")
    assert all(name in text for name in SETTABLE)
    assert "temperature = 0.0" in run(shell, "/params temperature")


def test_kv_and_stats_print_memory_in_words(shell: Shell):
    ask(shell, "hello")
    text = run(shell, "/kv")
    assert "1.0 GiB, 131,072 tokens" in text and "of 8,192 tokens" in text
    assert "group" not in text


def test_kv_lists_the_blocks_of_two_groups(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    groups = ({"dense16": 3, "int4": 1_200}, {})
    figures = {"kv_group_blocks": groups, "kv_group_bytes": (3 * 2**20, 0), "kv_group_windows": (None, 1_024)}
    stats = msgspec.structs.replace(FakeEngine().stats(), kv_blocks=groups[0], **figures)
    monkeypatch.setattr(FakeEngine, "stats", lambda self: stats)
    rows = [line.split(maxsplit=3) for line in run(shell, "/kv").splitlines() if "of group" in line]
    assert rows == [
        ["of", "group", "0", "3 dense16, 1,200 int4; 3.0 MiB, in layers that see all tokens"],
        ["of", "group", "1", "none; 0 B, in layers that see the last 1,024 tokens"],
    ]


def test_kv_tells_what_states_take(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    assert "states" not in run(shell, "/kv")
    stats = msgspec.structs.replace(FakeEngine().stats(), kv_bytes_state=2**20, kv_bytes_checkpoints=2**19)
    monkeypatch.setattr(FakeEngine, "stats", lambda self: stats)
    rows = [line.split(maxsplit=1) for line in run(shell, "/kv").splitlines() if line.startswith("states")]
    assert rows == [["states", "1.0 MiB of the most so far; 512.0 KiB in checkpoints now"]]


def test_kv_tells_how_far_a_plan_s_bases_are(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    stats = msgspec.structs.replace(FakeEngine().stats(), basis_miss=1.234)
    assert "basis miss" not in run(shell, "/kv")
    monkeypatch.setattr(FakeEngine, "stats", lambda self: stats)
    assert "basis miss" in (text := run(shell, "/kv")) and "1.23 times the energy of calibration" in text


def test_stats_are_grouped_and_in_words(shell: Shell):
    lines = run(shell, "/stats").splitlines()
    found = {line[:21].strip(): line[21:].strip() for line in lines}
    assert len(lines) == len(found) == 11
    assert found["engine"] == "fake on cpu in float32, 1 CPU thread"
    assert found["requests so far"] == "0: 0 finished, 0 failed, 0 refused" and found["context"] == "8,192 tokens"
    assert "_" not in "".join(lines) and "time" not in "".join(lines)


def test_history_lists_messages_a_line_each(shell: Shell):
    with pytest.raises(QKVError, match="the conversation is empty"):
        run(shell, "/history")
    ask(shell, "one\ntwo")
    ask(shell, "long " * 50)
    lines = run(shell, "/history").splitlines()
    assert lines[:2] == ["  1 you   one two", "  1 model echo: one two"]
    assert [line[:15] for line in lines[2:]] == ["  2 you   long ", "  2 model echo:"]
    assert all(len(line) == 100 and line.endswith("…") for line in lines[2:])


def test_copy_sends_the_last_answer_to_the_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(QKVError, match="no answer to copy"):
        run(shell, "/copy")
    ask(shell, "one")
    ask(shell, "zwölf")
    with pytest.raises(QKVError, match="only a terminal has a clipboard"):
        run(shell, "/copy")
    shell.console = Console(force_terminal=True, color_system=None)
    text = run(shell, "/copy")
    code = text[text.index("\x1b]52;c;") + 7 : text.index("\a")]
    assert b64decode(code).decode() == "echo: zwölf" and "sent 11 characters" in text


def test_tokens_counts_the_conversation_and_a_message(shell: Shell):
    with pytest.raises(QKVError, match="nothing to count"):
        run(shell, "/tokens")
    assert run(shell, "/tokens four") == "4 of 8,192 tokens of context with this message\n"
    run(shell, "/system 123")
    ask(shell, "one")
    assert run(shell, "/tokens") == f"{len('123' + 'one' + 'echo: one')} of 8,192 tokens of context\n"


def test_raw_goes_to_and_fro(shell: Shell):
    seen = []
    shell.make_reply = lambda mode, raw: seen.append(raw) or PlainReply(io.StringIO())
    for word in ("as the model writes them", "as Markdown"):
        assert word in run(shell, "/raw")
        shell.answer(lambda reply: shell.conversation.ask("one", reply))
    assert seen == [True, False]


def test_think_prints_the_last_thinking_or_sets_the_mode(shell: Shell):
    assert "no thinking" in run(shell, "/think")
    ask(shell, "What is 47*86?")
    assert "47*80=3760" in run(shell, "/think")
    run(shell, "/think hide")
    assert shell.think is ThinkMode.HIDE
    with pytest.raises(QKVError, match="show, fold, hide, off"):
        run(shell, "/think twice")


def test_think_off_asks_for_none_until_it_is_shown_again(shell: Shell):
    assert run(shell, "/think off") == "thinking: off\n"
    ask(shell, "hello")
    run(shell, "/think fold")
    ask(shell, "hello")
    assert shell.conversation.engine.template_kwargs == [{"enable_thinking": False}, None]


def test_think_off_says_where_the_template_has_no_switch(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeEngine.tokenizer, "chat_template", "{{ messages }}", raising=False)
    assert "hidden only" in run(shell, "/think off")


def test_the_page_shows_the_kv_listing_as_it_is(shell: Shell):
    ask(shell, "hello")
    shown = (Path(__file__).parents[2] / "docs/kv_cache.md").read_text().split("\n> /kv\n")[1].split("```")[0]
    assert [line[:16].strip() for line in shown.splitlines()] == [
        line[:16].strip() for line in run(shell, "/kv").splitlines()
    ]


def test_exit_leaves(shell: Shell):
    with pytest.raises(LeaveChat):
        run(shell, "/exit")


def test_completion(tmp_path: Path):
    (tmp_path / "talk.json").touch()

    def complete(text: str) -> list[str]:
        return [c.text for c in CommandCompleter().get_completions(Document(text), CompleteEvent())]

    assert complete("/s") == complete("/S") == ["save", "save!", "system", "stats"]
    assert complete("/think f") == ["fold"]
    assert complete("/params top") == ["top_p", "top_k"]
    assert complete(f"/load {tmp_path}/ta") == ["lk.json"]
    assert complete("hello /s") == [] and complete("/nothing x") == []
