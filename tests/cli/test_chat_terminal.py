"""The interactive chat on a real pseudo-terminal."""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .test_live_tail import screen

pty = pytest.importorskip("pty")
termios = pytest.importorskip("termios")

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_engine.py")), "chat"]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
CTRL_C, CTRL_D, CTRL_T = b"\x03", b"\x04", b"\x14"


class Terminal:
    """A chat on the other side of a pty."""

    def __init__(self, home: Path, *options: str, term: str = "xterm-256color", columns: int = 100):
        self.fd, child_fd = pty.openpty()
        termios.tcsetwinsize(child_fd, (40, columns))
        self.before = termios.tcgetattr(child_fd)
        environ = os.environ | {
            "TERM": term,
            "XDG_STATE_HOME": str(home),
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }
        self.child = subprocess.Popen(
            [*PROGRAM, *options],
            stdin=child_fd,
            stdout=child_fd,
            stderr=child_fd,
            env=environ,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(child_fd),
        )
        self.child_fd = child_fd
        self.seen = self.raw = ""

    def send(self, data: bytes) -> None:
        os.write(self.fd, data)

    def expect(self, text: str, timeout: float = 20.0) -> str:
        """Everything up to ``text``, without terminal codes."""
        deadline = time.monotonic() + timeout
        while text not in (plain := CODES.sub("", self.seen)):
            assert time.monotonic() < deadline, f"{text!r} not in {plain!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                came = os.read(self.fd, 65536).decode(errors="replace")
                self.seen, self.raw = self.seen + came, self.raw + came
        self.seen = plain[plain.index(text) + len(text) :]
        return plain

    def interrupt(self, text: str) -> None:
        """Presses Ctrl-C until ``text`` comes: a signal between a prompt and the read behind it ends no read."""
        for _ in range(5):
            self.send(CTRL_C)
            with suppress(AssertionError):
                self.expect(text, 4)
                return
        self.expect(text)

    def drain(self) -> None:
        while select.select([self.fd], [], [], 0.05)[0]:
            try:
                self.raw += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                return

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self.fd)
        os.close(self.child_fd)


def _take_terminal(fd: int) -> None:
    import fcntl

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*options: str, **settings: Any) -> Terminal:
        opened.append(Terminal(tmp_path, *options, **settings))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def wait_for_prompt(terminal: Terminal) -> None:
    terminal.expect("> ")


def test_a_conversation(terminal: Terminal, tmp_path: Path):
    terminal.expect("Model fake on cpu")
    wait_for_prompt(terminal)
    terminal.send(b"What is 47*86?\r")
    terminal.expect("thought for")
    terminal.expect("4042")
    terminal.expect("KV 1.0 MiB")
    wait_for_prompt(terminal)
    terminal.send(CTRL_T)
    terminal.expect("47*80=3760")
    terminal.send(b"first\\\rsecond\x1b\rthird\r")
    terminal.expect("echo: first\nsecond\nthird")
    terminal.expect("KV 1.0 MiB")
    terminal.send(b"fail\r")
    terminal.expect("top_k=-5: out of range")
    wait_for_prompt(terminal)
    terminal.send(b"half a line" + CTRL_C + b"/exit\r")
    assert terminal.child.wait(20) == 0
    history = tmp_path / "qkv-engine" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600 and "47*86" in history.read_text()


def test_ctrl_c_stops_the_reply_and_ctrl_d_leaves(terminal: Terminal):
    wait_for_prompt(terminal)
    terminal.send(b"slow\r")
    terminal.expect("word word")
    terminal.send(CTRL_C)
    terminal.expect("stopped")
    wait_for_prompt(terminal)
    terminal.send(b"hello\r")
    terminal.expect("echo: hello")
    terminal.expect("KV 1.0 MiB")
    wait_for_prompt(terminal)
    terminal.send(CTRL_D)
    terminal.drain()
    assert terminal.child.wait(20) == 0
    assert termios.tcgetattr(terminal.child_fd)[3] == terminal.before[3], "echo is back"


def test_what_is_typed_while_a_reply_streams_waits_for_the_prompt(terminal: Terminal):
    wait_for_prompt(terminal)
    terminal.send(b"slow but short\r")
    terminal.expect("word word")
    terminal.send(b"next question\r")
    terminal.expect("KV 1.0 MiB")
    terminal.expect("echo: next question")


def pasted(text: str) -> bytes:
    """What a terminal sends for a pasted text while it is asked to mark one."""
    return f"\x1b[200~{text}\x1b[201~".replace("\n", "\r").encode()


def test_a_text_pasted_while_a_reply_streams_is_one_message(terminal: Terminal):
    wait_for_prompt(terminal)
    terminal.send(b"slow but short\r")
    terminal.expect("word word")
    assert terminal.raw.rindex("\x1b[?2004h") > terminal.raw.rindex("\x1b[?2004l"), "it is to mark pasted texts"
    terminal.send(b"and " + pasted("first line\nsecond line\nthird") + b" 3\r")
    terminal.expect("KV 1.0 MiB")
    terminal.expect("echo: and first line\nsecond line\nthird 3")
    terminal.expect("KV 1.0 MiB")
    wait_for_prompt(terminal)
    terminal.drain()
    assert terminal.raw.count("echo: ") == 1


def test_ctrl_c_drops_what_was_typed_and_pasted_meanwhile(terminal: Terminal):
    wait_for_prompt(terminal)
    terminal.send(b"slow\r")
    terminal.expect("word word")
    terminal.send(b"one\rtwo\r" + pasted("a line\n" * 1000))  # more than the terminal's own buffer holds
    terminal.expect("word word")
    terminal.send(b"\x1b[200~half of a paste")
    terminal.expect("word word")
    terminal.send(CTRL_C)
    terminal.expect("stopped")
    wait_for_prompt(terminal)
    terminal.send(b"hello\r")
    terminal.expect("echo: hello")
    terminal.expect("KV 1.0 MiB")
    terminal.drain()
    assert terminal.raw.count("echo: ") == 1


def test_sigterm_restores_the_terminal(terminal: Terminal):
    wait_for_prompt(terminal)
    terminal.send(b"slow\r")
    terminal.expect("word word")
    terminal.child.terminate()
    terminal.drain()
    assert terminal.child.wait(20) == 143
    assert termios.tcgetattr(terminal.child_fd)[3] == terminal.before[3]


def test_answers_are_markdown_or_raw(open_terminal: Callable[..., Terminal]):
    raw = "4712*6: 2*6+0=12 1*6+1=7\n\n\n  *so* **28272**\n"
    open_terminal("--raw", "--prompt", "raw").expect(raw)
    terminal = open_terminal()
    wait_for_prompt(terminal)
    terminal.send(b"raw\r")
    terminal.expect("4712*6: 2*6+0=12 1*6+1=7\n\nso 28272\n")
    terminal.expect("KV 1.0 MiB")
    terminal.send(b"/raw\r")
    terminal.expect("as the model writes them")
    terminal.send(b"raw\r")
    terminal.expect(raw)


def test_a_terminal_of_plain_lines_has_commands_and_keeps_the_chat_on_ctrl_c(open_terminal: Callable[..., Terminal]):
    terminal = open_terminal(term="dumb")
    terminal.expect("Model fake on cpu")
    terminal.expect("/help lists the commands, /exit leaves")
    wait_for_prompt(terminal)
    terminal.send(b"/HELP\n")
    terminal.expect("/retry")
    wait_for_prompt(terminal)
    terminal.send(b"slow\n")
    terminal.expect("word word")
    terminal.send(CTRL_C)
    terminal.expect("stopped")
    wait_for_prompt(terminal)
    terminal.send(b"half")
    terminal.interrupt("/exit leaves")
    wait_for_prompt(terminal)
    terminal.send(b"fail\n")
    terminal.expect("top_k=-5: out of range")
    wait_for_prompt(terminal)
    terminal.send(b"/nonsense\n")
    terminal.expect("no command /nonsense")
    wait_for_prompt(terminal)
    terminal.send(b"What is 47*86?\n")
    terminal.expect("4042")
    wait_for_prompt(terminal)
    assert "\x1b" not in terminal.raw
    terminal.send(b"/exit\n")
    assert terminal.child.wait(20) == 0


def test_log_lines_stay_on_the_screen_and_the_start_is_told_once(open_terminal: Callable[..., Terminal]):
    terminal = open_terminal("-v")
    start = terminal.expect("> ")
    assert start.count("Model fake on cpu") == 1
    terminal.send(b"logged\r")
    reply = terminal.expect("KV 1.0 MiB")
    found = [int(number) for number in re.findall(r"block (\d+) stepped down\n", reply)]
    assert found == sorted(found) and set(found) == set(range(5, 30, 5))


def test_the_hint_is_as_long_as_the_screen_is_wide(open_terminal: Callable[..., Terminal]):
    open_terminal(columns=60).expect("Ask something. /help lists the commands, Ctrl-D leaves.")
    open_terminal(columns=40).expect("/help lists commands, Ctrl-D leaves")
    open_terminal(columns=10).expect("/help")


def test_one_answer_on_a_terminal_keeps_warnings_on_the_screen(open_terminal: Callable[..., Terminal]):
    terminal = open_terminal("--prompt", "logged")
    terminal.expect("block 25 stepped down")
    assert terminal.child.wait(20) == 0
    terminal.drain()
    shown = screen(terminal.raw.replace("\r\n", "\n"))
    blocks = [line for line in shown if "stepped down" in line]
    assert blocks == [f"qkv-engine: warning: block {number} stepped down" for number in range(5, 30, 5)]
    assert [line for line in shown if line.startswith("one")] == ["one two three four five"]
