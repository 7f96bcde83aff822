"""``/save`` and ``/load``: what they write and read, what they replace, and how they refuse."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from qkv_engine.cli.chat.shell import Shell
from qkv_engine.errors import QKVError

from .shells import ask, run


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


def test_save_replaces_only_the_conversation_it_goes_on_with(shell: Shell, tmp_path: Path):
    path = tmp_path / "chat.json"
    ask(shell, "one")
    run(shell, f"/save {path}")
    ask(shell, "two")
    assert "2 turns" in run(shell, f"/save {path}")
    run(shell, "/reset")
    ask(shell, "another")
    with pytest.raises(QKVError, match=r"/save! .* replaces it"):
        run(shell, f"/save {path}")
    assert "two" in path.read_text()
    run(shell, f"/save! {path}")
    assert "another" in path.read_text()
    run(shell, f"/load {path}")
    run(shell, f"/save {path}")


@pytest.mark.parametrize("command", ["/save", "/save!"])
@pytest.mark.parametrize("content", ["# Notes", "{}", '{"messages": 1}', ""])
def test_save_never_replaces_a_file_that_is_no_conversation(shell: Shell, tmp_path: Path, command: str, content: str):
    path = tmp_path / "notes.md"
    path.write_text(content)
    ask(shell, "hello")
    with pytest.raises(QKVError, match="is no saved conversation"):
        run(shell, f"{command} {path}")
    assert path.read_text() == content and os.listdir(tmp_path) == ["notes.md"]


def test_an_empty_conversation_is_not_saved(shell: Shell, tmp_path: Path):
    with pytest.raises(QKVError, match="nothing to save"):
        run(shell, f"/save {tmp_path}/chat.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [("{0}", "is a folder"), ("{0}/no/chat.json", "no folder {0}/no"), ("{0}/" + "x" * 300, "too long")],
)
def test_a_name_that_cannot_be_saved_to_is_named_as_given(shell: Shell, tmp_path: Path, name: str, message: str):
    ask(shell, "hello")
    with pytest.raises(QKVError, match=message.format(tmp_path)) as caught:
        run(shell, f"/save {name.format(tmp_path)}")
    assert str(caught.value).startswith(name.format(tmp_path))


def test_load_names_the_file_it_cannot_read(shell: Shell, tmp_path: Path):
    with pytest.raises(QKVError, match=f"{tmp_path}/none.json cannot be read: No such file"):
        run(shell, f"/load {tmp_path}/none.json")


@pytest.mark.parametrize(
    "data", [b'{"messages":[{"role":"user","content":"\xff"}]}', b"\xff\xfe", b"[" * 100_000, b'{"\xc3": 1}', b""]
)
def test_load_refuses_what_no_save_wrote(data: bytes, shell: Shell, tmp_path: Path):
    (tmp_path / "b.json").write_bytes(data)
    with pytest.raises(QKVError, match=r"b\.json is not a saved conversation: "):
        run(shell, f"/load {tmp_path}/b.json")


def test_load_does_not_wait_for_a_device_or_pipe(shell: Shell, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe", tmp_path):
        with pytest.raises(QKVError, match="is not a saved conversation"):
            run(shell, f"/load {path}")


@pytest.mark.parametrize("quote", ['"', "'"])
def test_quotes_round_a_name_are_not_part_of_it(shell: Shell, tmp_path: Path, quote: str):
    ask(shell, "hello")
    run(shell, f"/save {quote}{tmp_path}/my chat.json{quote}")
    assert os.listdir(tmp_path) == ["my chat.json"]


def test_a_system_message_of_another_program_becomes_the_system_prompt(shell: Shell, tmp_path: Path):
    path = tmp_path / "chat.json"
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path.write_text(json.dumps({"messages": [{"role": "system", "content": "Be brief."}, *turn]}))
    assert "1 turn" in run(shell, f"/load {path}")
    assert (shell.conversation.system, shell.conversation.messages) == ("Be brief.", turn)
    path.write_text(json.dumps({"messages": [*turn, {"role": "system", "content": "Be brief."}]}))
    with pytest.raises(QKVError, match="after the conversation has begun"):
        run(shell, f"/load {path}")


def test_a_failed_save_leaves_the_old_file(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "chat.json"
    ask(shell, "hello")
    run(shell, f"/save {path}")
    old = path.read_text()
    ask(shell, "again")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(QKVError, match=r"chat\.json cannot be written: No space"):
        run(shell, f"/save {path}")
    assert os.listdir(tmp_path) == ["chat.json"] and path.read_text() == old


def test_save_wants_a_name(shell: Shell):
    with pytest.raises(QKVError, match="file name"):
        run(shell, "/save")
