"""A chat without a terminal: what is asked, and what commands print."""

from __future__ import annotations

import io

from rich.console import Console

from qkv_engine.cli.chat.commands import parse_command, run_command
from qkv_engine.cli.chat.params import chat_params
from qkv_engine.cli.chat.render import PlainReply, ThinkMode
from qkv_engine.cli.chat.session import Conversation
from qkv_engine.cli.chat.shell import Shell

from .fake_engine import FakeEngine


def make_shell() -> Shell:
    engine = FakeEngine()
    talk = Conversation(engine, chat_params(engine, {}))
    console = Console(file=io.StringIO(), width=100)
    return Shell(talk, console, ThinkMode.FOLD, lambda mode, raw: PlainReply(io.StringIO()))


def ask(shell: Shell, question: str) -> None:
    shell.conversation.ask(question, PlainReply(io.StringIO()))


def run(shell: Shell, line: str) -> str:
    """What the command prints."""
    file = shell.console.file = io.StringIO()
    command = parse_command(line)
    assert command is not None
    run_command(shell, *command)
    return file.getvalue()
