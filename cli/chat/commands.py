"""The slash commands of a chat: one table, one small function a command."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from qkv_engine.errors import QKVError

from ..common import nearest
from ..text import count, one_line, sanitize
from .params import SETTABLE, set_param
from .render import ThinkMode, thinking_lines
from .reports import print_help, print_history, print_kv, print_params, print_stats
from .shell import Shell
from .store import SavedChat, SavedMessage, load_chat, save_chat

if TYPE_CHECKING:
    from .session import Turn

_COMMAND = re.compile(r"/([^\s/.]*)(?:\s+(.*))?", re.DOTALL)
_PREVIEW_CHARS = 60  # of a question in a remark about it


class LeaveChat(Exception):
    """The user wants to go."""


@dataclass(frozen=True)
class SlashCommand:
    """A slash command: what it is called with, what it does, and what may be completed after it."""

    usage: str
    summary: str
    run: Callable[[Shell, str], Turn | None]
    choices: Iterable[str] = ()
    takes_path: bool = False


def parse_command(line: str) -> tuple[str, str] | None:
    """Name and argument of a command; ``None`` for a message, such as one that begins with a path or two slashes."""
    match = _COMMAND.fullmatch(line.strip())
    return (match[1].lower(), (match[2] or "").strip()) if match else None


def run_command(shell: Shell, name: str, argument: str) -> Turn | None:
    """Run one command and return the turn it took, if any. Raises ``QKVError`` with a hint for an unknown one."""
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        known = [f"/{known}" for known in (*COMMANDS, *ALIASES)]
        hint = nearest(f"/{name}", known, "/help lists them.")
        raise QKVError(f"there is no command /{name}", remedy=f"{hint} A message that begins with / needs a second one")
    return COMMANDS[name].run(shell, argument)


def _help(shell: Shell, argument: str) -> None:
    rows = [(f"/{name} {command.usage}".rstrip(), command.summary) for name, command in COMMANDS.items()]
    print_help(shell.console, [*rows, *KEYS.items()])


def _reset(shell: Shell, argument: str) -> None:
    num_turns = shell.conversation.num_turns
    shell.conversation.reset()
    shell.path = None
    shell.say(f"forgot {count(num_turns, 'turn')}")


def _undo(shell: Shell, argument: str) -> None:
    question = one_line(shell.conversation.undo())
    shell.say(f"took back: {question[:_PREVIEW_CHARS]}{'…' * (len(question) > _PREVIEW_CHARS)}")


def _retry(shell: Shell, argument: str) -> Turn:
    if shell.conversation.params.is_greedy:
        shell.say("at temperature 0 the answer stays the same; /params temperature 0.8 makes it vary")
    return shell.answer(shell.conversation.retry)


def _save(shell: Shell, argument: str) -> None:
    _save_to(shell, _path(argument), replace=False)


def _save_anyway(shell: Shell, argument: str) -> None:
    _save_to(shell, _path(argument), replace=True)


def _save_to(shell: Shell, path: Path, *, replace: bool) -> None:
    talk = shell.conversation
    if not talk.messages:
        raise QKVError("there is nothing to save yet")
    messages = [msgspec.convert(message, SavedMessage) for message in talk.messages]
    chat = SavedChat(model=talk.engine.stats().model, system=talk.system, messages=messages)
    save_chat(path, chat, replace=replace or path == shell.path)
    shell.path = path
    shell.say(f"saved {count(talk.num_turns, 'turn')} to {path}")


def _load(shell: Shell, argument: str) -> None:
    path, talk = _path(argument), shell.conversation
    chat = load_chat(path)
    talk.reset()
    talk.system = chat.system
    talk.messages = [msgspec.to_builtins(message) for message in chat.messages]
    shell.path = path
    shell.say(f"loaded {count(talk.num_turns, 'turn')}")


def _system(shell: Shell, argument: str) -> None:
    talk = shell.conversation
    if argument:
        talk.system = None if argument == "none" else argument
    shell.say(f"system prompt: {sanitize(talk.system)}" if talk.system else "no system prompt")


def _params(shell: Shell, argument: str) -> None:
    talk = shell.conversation
    name, _, value = argument.partition(" ")
    if not name:
        print_params(shell.console, talk.params)
        return
    if value.strip():
        talk.params = set_param(talk.params, name, value.strip(), talk.engine)
    elif name not in SETTABLE:
        set_param(talk.params, name, "default", talk.engine)
    shell.say(f"{name} = {getattr(talk.params, name)!r}")


def _raw(shell: Shell, argument: str) -> None:
    shell.raw = not shell.raw
    shell.say(f"on a screen answers are shown {'as the model writes them' if shell.raw else 'as Markdown'}")


def _copy(shell: Shell, argument: str) -> None:
    answers = [message["content"] for message in shell.conversation.messages if message["role"] == "assistant"]
    if not answers:
        raise QKVError("there is no answer to copy yet")
    if not shell.console.is_terminal or shell.console.is_dumb_terminal:
        raise QKVError("only a terminal has a clipboard", remedy="/save FILE writes the conversation to a file")
    code = b64encode(answers[-1].encode()).decode()
    shell.console.file.write(f"\x1b]52;c;{code}\a")  # xterm's OSC 52, which reaches the user's machine through ssh, too
    shell.say(f"sent {count(len(answers[-1]), 'character')} to the terminal's clipboard")


def _history(shell: Shell, argument: str) -> None:
    messages = shell.conversation.messages
    if not messages:
        raise QKVError("the conversation is empty")
    print_history(shell.console, messages)


def _tokens(shell: Shell, argument: str) -> None:
    talk = shell.conversation
    if not talk.messages and not argument:
        raise QKVError("there is nothing to count yet", remedy="For example /tokens How long is this?")
    number, limit = talk.num_tokens(argument), talk.engine.max_model_len
    shell.say(f"{number:,} of {limit:,} tokens of context{' with this message' * bool(argument)}")


def _stats(shell: Shell, argument: str) -> None:
    print_stats(shell.console, shell.conversation.engine.stats())


def _kv(shell: Shell, argument: str) -> None:
    print_kv(shell.console, shell.conversation.engine.stats(), shell.conversation.last)


def _think(shell: Shell, argument: str) -> None:
    if argument:
        _set_think(shell, argument.lower())
        return
    last = shell.conversation.last
    if last is None or not last.thinking:
        shell.say(f"the last reply has no thinking (mode: {shell.think})")
        return
    for line in thinking_lines(shell.console, last.thinking):
        shell.console.out(line, highlight=False)


def _set_think(shell: Shell, word: str) -> None:
    if word not in list(ThinkMode):
        raise QKVError(f"{word!r} is nothing to do with the thinking", remedy=f"Choose from {', '.join(ThinkMode)}")
    shell.set_think(ThinkMode(word))
    is_only_hidden = shell.think is ThinkMode.OFF and not shell.conversation.can_skip_thinking
    shell.say(f"thinking: {shell.think}{', but hidden only: the template cannot turn it off' * is_only_hidden}")


def _exit(shell: Shell, argument: str) -> None:
    raise LeaveChat


def _path(argument: str) -> Path:
    """The file that ``argument`` names, with or without quotes round it."""
    argument = sanitize(argument)
    if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "\"'":
        argument = argument[1:-1]
    if not argument:
        raise QKVError("a file name is missing", remedy="For example /save chat.json")
    return Path(argument).expanduser()


COMMANDS = {
    "help": SlashCommand("", "this list; so does /?", _help),
    "retry": SlashCommand("", "answer the last question again", _retry),
    "undo": SlashCommand("", "take the last question and its answer back", _undo),
    "reset": SlashCommand("", "forget the conversation, keep the settings; so does /clear", _reset),
    "save": SlashCommand("FILE", "write the conversation to a JSON file", _save, takes_path=True),
    "save!": SlashCommand("FILE", "the same, over another saved conversation", _save_anyway, takes_path=True),
    "load": SlashCommand("FILE", "load a saved conversation", _load, takes_path=True),
    "history": SlashCommand("", "list the messages of the conversation", _history),
    "copy": SlashCommand("", "copy the last answer to the clipboard", _copy),
    "system": SlashCommand("[TEXT | none]", "show, set or remove the system prompt", _system, choices=("none",)),
    "params": SlashCommand("[NAME [VALUE]]", "show or set sampling parameters", _params, choices=SETTABLE),
    "stats": SlashCommand("", "what the engine has done so far", _stats),
    "kv": SlashCommand("", "how the KV memory is used", _kv),
    "tokens": SlashCommand("[TEXT]", "count the conversation's tokens, with TEXT as its next message", _tokens),
    "think": SlashCommand(
        "[show | fold | hide | off]",
        "print the last thinking; or show, fold, hide or switch off the model's thinking",
        _think,
        tuple(ThinkMode),
    ),
    "raw": SlashCommand("", "show answers as the model writes them, or as Markdown again", _raw),
    "exit": SlashCommand("", "leave; so do /quit, /bye, /q and Ctrl-D", _exit),
}

ALIASES = {"?": "help", "clear": "reset", "quit": "exit", "bye": "exit", "q": "exit"}

KEYS = {
    "//TEXT": "send a message that begins with a slash",
    "Enter": "send; after a backslash, or with Alt, begin a new line",
    "Ctrl-T": "unfold or fold the last reply's thinking",
    "Ctrl-C": "stop the reply, or clear the line",
}
