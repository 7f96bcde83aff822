"""A chat as its commands see it: the conversation, how replies are shown, and where remarks go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from .render import ThinkMode

if TYPE_CHECKING:
    from rich.console import Console

    from .session import Conversation, Reply, Turn


class Keyboard:
    """What is typed while a reply streams. Where input comes line by line nothing is to be done about it."""

    def quiet(self) -> AbstractContextManager[None]:
        """Keeps it off the screen for the block."""
        return nullcontext()

    def forget(self) -> None:
        """Drops it."""


@dataclass
class Shell:
    """One user's chat. ``console`` takes remarks of the program; ``make_reply(think, raw)`` the words of the model."""

    conversation: Conversation
    console: Console
    think: ThinkMode
    make_reply: Callable[[ThinkMode, bool], Reply]
    keyboard: Keyboard = field(default_factory=Keyboard)
    raw: bool = False  # on a screen, answers as the model writes them in place of Markdown
    with_figures: bool = True
    path: Path | None = None  # the file this conversation was saved to or loaded from

    def __post_init__(self) -> None:
        self.set_think(self.think)

    def say(self, text: str) -> None:
        """Print a remark of the program, as opposed to the model."""
        self._print(Text(text, style="dim"))

    def complain(self, text: str) -> None:
        """Print an error."""
        self._print(Text(text, style="red"))

    def set_think(self, mode: ThinkMode) -> None:
        """Show thinking in the way of ``mode`` from now on."""
        self.think = mode
        self.conversation.no_thinking = mode is ThinkMode.OFF

    def answer(self, take_turn: Callable[[Reply], Turn]) -> Turn:
        """Show the reply that ``take_turn`` streams; after it its figures, or the limit that cut it off."""
        with self.keyboard.quiet():
            turn = take_turn(self.make_reply(self.think, self.raw))
        if turn.interrupted:
            self.keyboard.forget()
        if self.with_figures:
            self.say(turn.status(self.conversation.engine.max_model_len))
        elif turn.cut_off:
            self.say(turn.cut_off)
        return turn

    def _print(self, text: Text) -> None:
        # A file or a pipe takes lines of any length.
        self.console.print(text, soft_wrap=not self.console.is_terminal)
