"""The interactive chat: read, answer, repeat, until the user leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from qkv_engine import __version__
from qkv_engine.errors import EngineDeadError, QKVError

from .chat_commands import LeaveChat, Shell, parse_command, run_command
from .chat_render import TerminalReply, ThinkMode
from .common import describe_error
from .terminal import ChatInput, quiet_keyboard

if TYPE_CHECKING:
    from .chat_session import Conversation


def chat_in_terminal(conversation: Conversation, think: ThinkMode) -> None:
    """Talk until Ctrl-D or ``/exit``. No error of a single turn or command ends the chat."""
    shell = Shell(conversation, terminal_console(), think)
    prompt = ChatInput(lambda: conversation.last.thinking if conversation.last else "")
    _greet(shell)
    while True:
        try:
            _take_turn(shell, prompt.read())
        except (EOFError, LeaveChat):
            return
        except EngineDeadError:
            raise
        except KeyboardInterrupt:
            shell.say("stopped")
        except (QKVError, OSError) as error:
            shell.console.print(Text(describe_error(error), style="red"))


def terminal_console() -> Console:
    """A console that prints text as it is: no markup, no emoji codes, nothing highlighted by guess."""
    return Console(markup=False, emoji=False, highlight=False)


def _take_turn(shell: Shell, line: str) -> None:
    if not line.strip():
        return
    if command := parse_command(line):
        run_command(shell, *command)
        return
    with quiet_keyboard():
        turn = shell.conversation.ask(line.strip(), TerminalReply(shell.console, shell.think))
    shell.say(turn.status(shell.conversation.engine.max_model_len))
    shell.console.print()


def _greet(shell: Shell) -> None:
    engine = shell.conversation.engine
    shell.console.print(Text.assemble(("qkv-engine", "bold"), f" {__version__}, {engine.stats().model}"))
    for line in engine.describe():
        shell.say(line)
    shell.console.print()
