"""The ways to chat: on a screen, line by line where someone types, and one way from stdin to stdout."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from qkv_engine import __version__
from qkv_engine.errors import EngineDeadError, QKVError

from .. import common
from ..demo_questions import QUESTIONS
from .commands import LeaveChat, parse_command, run_command
from .log import HeldLog, held_log
from .render import PlainReply, RawReply, TerminalReply, ThinkMode
from .shell import Shell

if TYPE_CHECKING:
    from .session import Conversation, Turn


def chat_on_screen(talk: Conversation, think: ThinkMode, *, raw: bool) -> int:
    """Talk on a terminal that can move its cursor, until the user leaves. Returns the exit code."""
    from .terminal import ChatInput

    with held_log() as log:
        console = terminal_console()
        prompt = ChatInput(lambda: talk.last.thinking if talk.last else "")
        shell = Shell(talk, console, think, _replies(console, log, prompt.read_ahead), prompt, raw)
        _greet(shell)

        def read() -> str:
            for line in log.take():
                shell.say(line)
            return prompt.read()

        return _converse(shell, read)


def chat_in_lines(talk: Conversation, think: ThinkMode, *, with_figures: bool) -> int:
    """Talk with someone who types, though the screen or stdout takes plain text only. Returns the exit code."""
    shell = _plain_shell(talk, think, with_figures)
    _greet(shell)
    shell.say("Ask something. /help lists the commands, /exit leaves.")

    def read() -> str:
        print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line

    return _converse(shell, read)


@contextmanager
def one_way(talk: Conversation, think: ThinkMode, on_screen: bool, *, raw: bool, with_figures: bool) -> Iterator[Shell]:
    """A shell that nobody types into: answers go to stdout, everything else to stderr."""
    shell = _plain_shell(talk, think, with_figures)
    if not on_screen:
        yield shell
        return
    with held_log() as log:
        shell.make_reply, shell.raw = _replies(terminal_console(), log), raw
        yield shell


def answer_question(shell: Shell, question: str) -> int:
    """Answer one question and return the exit code."""
    turn = shell.answer(lambda reply: shell.conversation.ask(question, reply))
    return common.EXIT_INTERRUPTED if turn.interrupted else common.EXIT_OK


def answer_lines(shell: Shell) -> int:
    """Take each line of stdin as a turn or a command and return the exit code. The first error ends it."""
    try:
        for line in sys.stdin:
            turn = _take_line(shell, line)
            if turn is not None and turn.interrupted:
                return common.EXIT_INTERRUPTED
    except LeaveChat:
        pass
    return common.EXIT_OK


def terminal_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: no markup, no emoji codes, nothing highlighted by guess."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def _replies(
    console: Console, log: HeldLog, on_text: Callable[[], object] = lambda: None
) -> Callable[[ThinkMode, bool], TerminalReply]:
    """What makes the replies of a chat on a screen."""
    return lambda mode, raw: (RawReply if raw else TerminalReply)(console, mode, log, on_text)


def _plain_shell(talk: Conversation, think: ThinkMode, with_figures: bool) -> Shell:
    def make_reply(mode: ThinkMode, raw: bool) -> PlainReply:
        return PlainReply(sys.stdout, with_thinking=mode is ThinkMode.SHOW)

    return Shell(talk, terminal_console(stderr=True), think, make_reply, with_figures=with_figures)


def _converse(shell: Shell, read: Callable[[], str]) -> int:
    """Take lines until the user leaves. No error of a single turn or command ends the chat."""
    while True:
        try:
            line = read()
        except EOFError:
            return common.EXIT_OK
        except KeyboardInterrupt:
            shell.say("/exit leaves")
            continue
        try:
            turn = _take_line(shell, line)
            if turn is not None and turn.interrupted and not shell.with_figures:
                shell.say("stopped")
            if turn is not None and shell.with_figures:
                shell.console.print()
        except LeaveChat:
            return common.EXIT_OK
        except EngineDeadError:
            raise
        except KeyboardInterrupt:
            shell.say("stopped")
        except (QKVError, OSError) as error:
            shell.complain(common.describe_error(error))


def _take_line(shell: Shell, line: str) -> Turn | None:
    """The turn that ``line`` asks for; a command or an empty line is none."""
    line = line.strip()
    if command := parse_command(line):
        return run_command(shell, *command)
    # Two slashes begin a message that begins with one.
    question = line.removeprefix("/") if line.startswith("//") else line
    return shell.answer(lambda reply: shell.conversation.ask(question, reply)) if question else None


def _greet(shell: Shell) -> None:
    engine = shell.conversation.engine
    model = engine.stats().model
    shell.console.print(Text.assemble(("qkv-engine", "bold"), f" {__version__}, {model}"))
    if not logging.getLogger("qkv_engine").isEnabledFor(logging.INFO):  # else the log has said it already
        for line in engine.describe():
            shell.say(line)
    if shell.think is ThinkMode.OFF and not shell.conversation.can_skip_thinking:
        shell.say("this model's template cannot turn thinking off, so it is only hidden")
    if model == common.DEMO:
        shell.say(f"Try: {QUESTIONS[0]}")
    shell.console.print()
