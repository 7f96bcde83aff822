"""The slash commands of a chat: one table, one small function a command."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table
from rich.text import Text

from qkv_engine.config import format_size
from qkv_engine.errors import QKVError
from qkv_engine.request import SamplingParams

from .chat_params import SETTABLE, set_param
from .chat_render import ThinkMode, thinking_lines
from .chat_session import Conversation
from .chat_store import SavedChat, SavedMessage, load_chat, save_chat
from .text import sanitize

if TYPE_CHECKING:
    from rich.console import Console

_COMMAND = re.compile(r"/([a-z]*)(?:\s+(.*))?", re.DOTALL)


@dataclass
class Shell:
    """What the commands act on: the conversation, and how it is shown."""

    conversation: Conversation
    console: Console
    think: ThinkMode

    def say(self, text: str) -> None:
        """Print a remark of the program, as opposed to the model."""
        self.console.print(Text(text, style="dim"))


class LeaveChat(Exception):
    """The user wants to go."""


@dataclass(frozen=True)
class Command:
    """A slash command: what it is called with, what it does, and what may be completed after it."""

    usage: str
    summary: str
    run: Callable[[Shell, str], None]
    choices: Iterable[str] = ()
    takes_path: bool = False


def parse_command(line: str) -> tuple[str, str] | None:
    """Name and argument of a command; ``None`` for a message, even one that begins with a path."""
    match = _COMMAND.fullmatch(line.strip())
    return (match[1], (match[2] or "").strip()) if match else None


def run_command(shell: Shell, name: str, argument: str) -> None:
    """Run one command. Raises ``QKVError`` with a hint for one that does not exist."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean /{near[0]}?" if near else "/help lists the commands"
        raise QKVError(f"there is no command /{name}", remedy=hint)
    COMMANDS[name].run(shell, argument)


def _help(shell: Shell, argument: str) -> None:
    table = _table()
    for name, command in COMMANDS.items():
        table.add_row(f"/{name} {command.usage}".rstrip(), command.summary)
    for keys, meaning in KEYS.items():
        table.add_row(keys, meaning)
    shell.console.print(table)


def _reset(shell: Shell, argument: str) -> None:
    num_turns = len(shell.conversation.messages) // 2
    shell.conversation.reset()
    shell.say(f"forgot {_count(num_turns, 'turn')}")


def _save(shell: Shell, argument: str) -> None:
    path, talk = _path(argument), shell.conversation
    messages = [msgspec.convert(message, SavedMessage) for message in talk.messages]
    save_chat(path, SavedChat(model=talk.engine.stats().model, system=talk.system, messages=messages))
    shell.say(f"saved {_count(len(messages) // 2, 'turn')} to {path}")


def _load(shell: Shell, argument: str) -> None:
    chat, talk = load_chat(_path(argument)), shell.conversation
    talk.reset()
    talk.system = chat.system
    talk.messages = [msgspec.to_builtins(message) for message in chat.messages]
    shell.say(f"loaded {_count(len(chat.messages) // 2, 'turn')}")


def _system(shell: Shell, argument: str) -> None:
    talk = shell.conversation
    if argument:
        talk.system = None if argument == "none" else argument
    shell.say(f"system prompt: {sanitize(talk.system)}" if talk.system else "no system prompt")


def _params(shell: Shell, argument: str) -> None:
    talk = shell.conversation
    name, _, value = argument.partition(" ")
    if not name:
        _show_params(shell)
        return
    if value.strip():
        talk.params = set_param(talk.params, name, value.strip(), talk.engine)
    elif name not in SETTABLE:
        set_param(talk.params, name, "default", talk.engine)
    shell.say(f"{name} = {getattr(talk.params, name)!r}")


def _show_params(shell: Shell) -> None:
    table, plain = _table(), SamplingParams()
    for name in SETTABLE:
        value = getattr(shell.conversation.params, name)
        table.add_row(name, Text(repr(value), style="" if value == getattr(plain, name) else "bold"))
    shell.console.print(table)


def _stats(shell: Shell, argument: str) -> None:
    table = _table()
    for name, value in msgspec.to_builtins(shell.conversation.engine.stats()).items():
        table.add_row(name, _value(name, value))
    shell.console.print(table)


def _kv(shell: Shell, argument: str) -> None:
    stats, last = shell.conversation.engine.stats(), shell.conversation.last
    table = _table()
    table.add_row("preset", stats.kv)
    floor = f", {stats.kv_tokens_floor:,} at its floor" if stats.kv_tokens_floor > stats.kv_tokens_capacity else ""
    table.add_row("memory", f"{format_size(stats.kv_bytes_total)}, {stats.kv_tokens_capacity:,} tokens{floor}")
    table.add_row(
        "in use now", f"{format_size(stats.kv_bytes_used)}, at most {format_size(stats.kv_bytes_peak)} so far"
    )
    table.add_row("kept for reuse", format_size(stats.kv_bytes_cached))
    blocks = ", ".join(f"{number:,} {rung}" for rung, number in stats.kv_blocks.items())
    table.add_row("blocks", blocks or "none")
    steps = ", ".join(f"{number:,} {step}" for step, number in stats.demotions.items())
    table.add_row("stepped down", steps or "none")
    table.add_row("precision", f"{stats.effective_bits:.4g} bits an element, metadata counted")
    if last is not None:
        share = last.context_tokens / stats.max_model_len
        context = f"{last.context_tokens:,} of {stats.max_model_len:,} tokens ({share:.0%} of the context)"
        table.add_row("this chat", f"{format_size(last.kv_nbytes)}, {context}")
    shell.console.print(table)


def _think(shell: Shell, argument: str) -> None:
    if argument:
        if argument not in list(ThinkMode):
            raise QKVError(f"cannot {argument!r} the thinking", remedy=f"Choose from {', '.join(ThinkMode)}")
        shell.think = ThinkMode(argument)
        shell.say(f"thinking: {shell.think}")
        return
    last = shell.conversation.last
    if last is None or not last.thinking:
        shell.say(f"the last reply has no thinking (mode: {shell.think})")
        return
    for line in thinking_lines(shell.console, last.thinking):
        shell.console.out(line, highlight=False)


def _exit(shell: Shell, argument: str) -> None:
    raise LeaveChat


def _table() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    return table


def _value(name: str, value: Any) -> str:
    if isinstance(value, int) and "bytes" in name:
        return format_size(value)
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _path(argument: str) -> Path:
    if not argument:
        raise QKVError("a file name is missing", remedy="For example /save chat.json")
    return Path(argument).expanduser()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


COMMANDS = {
    "help": Command("", "this list", _help),
    "reset": Command("", "forget the conversation, keep the settings", _reset),
    "save": Command("FILE", "write the conversation to a JSON file", _save, takes_path=True),
    "load": Command("FILE", "go on with a saved conversation", _load, takes_path=True),
    "system": Command("[TEXT | none]", "show, set or remove the system prompt", _system, choices=("none",)),
    "params": Command("[NAME [VALUE]]", "show or set sampling parameters", _params, choices=SETTABLE),
    "stats": Command("", "what the engine has done so far", _stats),
    "kv": Command("", "how the KV memory is used", _kv),
    "think": Command(
        "[show | fold | hide]", "print the last thinking, or say what becomes of it", _think, tuple(ThinkMode)
    ),
    "exit": Command("", "leave, as does Ctrl-D", _exit),
}

KEYS = {
    "Enter": "send; after a backslash, or with Alt, begin a new line",
    "Ctrl-T": "unfold or fold the last reply's thinking",
    "Ctrl-C": "stop the reply, or clear the line",
}
