"""The terminal as an input: a prompt with history and completion, and the keyboard while a reply streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import clear_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style
from rich.console import Console
from rich.text import Text

from .commands import ALIASES, COMMANDS
from .shell import Keyboard

_STYLE = Style.from_dict({"prompt": "bold ansicyan", "hint": "ansibrightblack", "thinking": "ansibrightblack italic"})
_HINTS = (  # the longest that fits beside the prompt is shown
    "Ask something. /help lists the commands, Ctrl-D leaves.",
    "/help lists commands, Ctrl-D leaves",
    "Ask something, or /help",
    "/help",
)
_PASTE_MARKS_ON, _PASTE_MARKS_OFF = "\x1b[?2004h", "\x1b[?2004l"
_CURSOR_ON, _CURSOR_OFF = "\x1b[?25h", "\x1b[?25l"
_ROWS_KEPT = 6  # rows left for the input and its completions below unfolded thinking


class ChatInput(Keyboard):
    """Reads messages and commands. ``thinking`` gives the text that Ctrl-T unfolds above the prompt.

    What is typed while a reply streams waits for the next prompt; a pasted text stays whole.
    """

    def __init__(self, thinking: Callable[[], str]):
        self._thinking = thinking
        self._is_unfolded = False
        self._is_new = True  # nothing has been typed yet
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            completer=CommandCompleter(),
            key_bindings=self._bindings(),
            style=_STYLE,
            multiline=True,
            enable_open_in_editor=True,
            prompt_continuation=lambda width, number, wrapped: " " * width,
            reserve_space_for_menu=4,
        )

    def read(self) -> str:
        """One message. Raises ``EOFError`` on Ctrl-D."""
        self._is_unfolded = False
        line = self._session.prompt(self._message, placeholder=self._placeholder)
        self._is_new = False
        return line

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """For a reply: no echo, no cursor, and pasted texts still come between marks; Ctrl-C works."""
        with _without_echo():
            sys.stdout.write(_PASTE_MARKS_ON + _CURSOR_OFF)
            try:
                yield
            finally:
                sys.stdout.write(_CURSOR_ON + _PASTE_MARKS_OFF)
                sys.stdout.flush()

    def read_ahead(self) -> None:
        """Takes in what has been typed: the terminal would not see Ctrl-C behind its own buffer, which is small."""
        store_typeahead(self._session.input, self._session.input.read_keys())

    def forget(self) -> None:
        """Drops what has been typed, even the first half of a pasted text."""
        clear_typeahead(self._session.input)
        parser = getattr(self._session.input, "vt100_parser", None)  # Windows has none
        if parser is not None:
            parser.reset()

    def _message(self) -> StyleAndTextTuples:
        message: StyleAndTextTuples = [("class:prompt", "> ")]
        if not self._is_unfolded or get_app().is_done:
            return message
        size = get_app().output.get_size()
        lines = _wrap(self._thinking(), size.columns)[-max(1, size.rows - _ROWS_KEPT) :]
        return [("class:thinking", "".join(f"{line}\n" for line in lines)), *message]

    def _placeholder(self) -> StyleAndTextTuples:
        if not self._is_new or get_app().is_done:
            return []
        room = get_app().output.get_size().columns - len("> ") - 1
        return [("class:hint", next((hint for hint in _HINTS if len(hint) <= room), ""))]

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def send(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.document.text_before_cursor.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.newline(copy_margin=False)
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @keys.add("c-c")
        def clear(event: KeyPressEvent) -> None:
            event.current_buffer.reset()

        @keys.add("c-t")
        def unfold(event: KeyPressEvent) -> None:
            self._is_unfolded = not self._is_unfolded

        return keys


class CommandCompleter(Completer):
    """Completes commands, then the names, words or paths that a command takes."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        name, space, argument = text[1:].partition(" ")
        name = name.lower()
        if not space:
            commands = ((key, command.summary) for key, command in COMMANDS.items())
            yield from (_completion(key, name, meta) for key, meta in commands if key.startswith(name))
        elif command := COMMANDS.get(ALIASES.get(name, name)):
            yield from (_completion(word, argument) for word in command.choices if word.startswith(argument))
            if command.takes_path:
                yield from self._paths.get_completions(Document(argument), complete_event)


@contextmanager
def _without_echo() -> Iterator[None]:
    try:
        import termios
    except ImportError:  # Windows has no termios, and consoles there do not echo into the output
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    silent = termios.tcgetattr(keyboard)
    silent[0] &= ~termios.ICRNL  # as at the prompt, where Enter is a carriage return
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    silent[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell without echo and cursor
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _wrap(text: str, columns: int) -> list[str]:
    console = Console(width=columns)
    return [line.plain.rstrip() for line in Text(text.strip()).wrap(console, columns)] if text.strip() else []


def _completion(word: str, typed: str, meta: str = "") -> Completion:
    return Completion(word, start_position=-len(typed), display_meta=meta)


def _history() -> History:
    """The history of the prompt, in a file that its owner alone can read; in memory where no file can be written."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "qkv-engine" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return FileHistory(str(path))
