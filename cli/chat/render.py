"""Streamed replies on their way out: plain text for pipes, live Markdown for terminals."""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Callable
from functools import cache
from typing import IO, TYPE_CHECKING, Any, ClassVar

from markdown_it import MarkdownIt
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text

from .live_tail import LiveTail, render_lines
from .markdown import MarkdownBlocks

if TYPE_CHECKING:
    from markdown_it.rules_inline import StateInline
    from rich.console import Console, ConsoleOptions, RenderResult

    from .log import HeldLog

_REDRAW_INTERVAL = 0.05  # seconds; tokens may come faster than anyone reads
_TIME_FACTOR = 9  # between two drawings passes this times what one took, so a tenth of the time goes into them
# Of products such as 4*6 and (a+b)*(c+d), powers such as 2**10, and names such as *.py; not of **S**upport.
_PLAIN_ASTERISK = re.compile(r"(?<=[\w)\]])(?:\*(?=[\w(\[])|\*\*(?=\d))|(?<![\w*])\*(?=\.\w)", re.ASCII)
_THINKING_LINES = 6  # lines of thinking in sight while it streams


class ThinkMode(enum.StrEnum):
    """Ways to show a reply's thinking in the terminal."""

    SHOW = "show"  # it stays
    FOLD = "fold"  # it streams, then folds to one line
    HIDE = "hide"  # it never shows
    OFF = "off"  # the model is asked for none; one that thinks all the same is not shown

    @property
    def is_hidden(self) -> bool:
        return self in (ThinkMode.HIDE, ThinkMode.OFF)


class PlainReply:
    """Writes the answer as it comes, nothing else; ``with_thinking`` puts the thinking before it, in tags."""

    def __init__(self, file: IO[str], *, with_thinking: bool = False):
        self._file, self._with_thinking = file, with_thinking
        self._is_thinking = False
        self._space = ""  # white space that is written only if more text follows

    def start(self) -> None:
        """Nothing is written before the first text."""

    def think(self, text: str, num_tokens: int) -> None:
        """Write more of the thinking, if it is wanted."""
        if self._with_thinking:
            self._write(text if self._is_thinking else f"<think>\n{text}")
            self._is_thinking = True

    def think_end(self, seconds: float, num_tokens: int) -> None:
        """Close the thinking."""
        if self._is_thinking:
            self._is_thinking, self._space = False, ""
            self._write("\n</think>\n")

    def answer(self, text: str) -> None:
        """Write more of the answer."""
        self._write(text)

    def end(self) -> None:
        """End the last line."""
        self._file.write("\n")
        self._file.flush()

    def _write(self, text: str) -> None:
        text = self._space + text
        written = text.rstrip()
        self._space = text[len(written) :]
        self._file.write(written)
        self._file.flush()


class TerminalReply:
    """Prints finished Markdown blocks for good and redraws only the one in progress; ``log`` goes above it.

    ``on_text`` is called as text comes, at most once a drawing.
    """

    def __init__(
        self,
        console: Console,
        mode: ThinkMode,
        log: HeldLog | None = None,
        on_text: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console, self._mode, self._log, self._on_text, self._clock = console, mode, log, on_text, clock
        self._tail = LiveTail(console)
        self._blocks = MarkdownBlocks()
        self._thinking = ""  # what has been thought and is not printed for good
        self._is_first = True
        self._next_draw = 0.0

    def start(self) -> None:
        """Show that the question has been taken."""
        self._tail.draw(render_lines(self._console, Text("…", style="dim")))

    def think(self, text: str, num_tokens: int) -> None:
        """Show more of the thinking, in the way of the mode."""
        self._thinking += text
        if self._mode is ThinkMode.SHOW and "\n" in text:
            complete, _, self._thinking = self._thinking.rpartition("\n")
            self._tail.commit(thinking_lines(self._console, complete))
        self._draw(lambda: self._thinking_tail(num_tokens))

    def think_end(self, seconds: float, num_tokens: int) -> None:
        """Fold the thinking, or leave it, with a line that says how long it took."""
        self._keep_thinking()
        if not self._mode.is_hidden:
            folded = Text(f"thought for {seconds:.1f} s, {num_tokens:,} tokens", style="dim italic")
            self._tail.commit([*render_lines(self._console, folded), ""])

    def answer(self, text: str) -> None:
        """Show more of the answer."""
        for block in self._blocks.feed(text):
            self._print(block)
        self._draw(lambda: self._block_lines(self._blocks.preview(self._console.height)))

    def end(self) -> None:
        """Print what is unfinished as it stands."""
        self._keep_thinking()
        for block in self._blocks.finish():
            self._print(block)
        self._tail.commit([])
        self._show_log()

    def _draw(self, lines: Callable[[], list[str]]) -> None:
        started = self._clock()
        if started >= self._next_draw:
            self._on_text()
            self._show_log()
            self._tail.draw(lines())
            ended = self._clock()
            self._next_draw = ended + max(_REDRAW_INTERVAL, _TIME_FACTOR * (ended - started))

    def _show_log(self) -> None:
        for line in self._log.take() if self._log else []:
            self._tail.insert(render_lines(self._console, Text(line, style="dim")))

    def _print(self, block: str) -> None:
        if lines := self._block_lines(block):
            self._tail.commit(lines)
            self._is_first = False

    def _block_lines(self, block: str) -> list[str]:
        lines = render_lines(self._console, ChatMarkdown(block))
        return lines if self._is_first or not lines else ["", *lines]

    def _thinking_tail(self, num_tokens: int) -> list[str]:
        header = render_lines(self._console, Text(f"thinking… {num_tokens:,} tokens", style="dim italic"))
        match self._mode:
            case ThinkMode.SHOW:
                return thinking_lines(self._console, self._thinking)
            case ThinkMode.FOLD:
                return header + thinking_lines(self._console, self._thinking, _THINKING_LINES)
            case ThinkMode.HIDE | ThinkMode.OFF:
                return header

    def _keep_thinking(self) -> None:
        if self._mode is ThinkMode.SHOW and self._thinking.strip():
            self._tail.commit(thinking_lines(self._console, self._thinking))
        self._thinking = ""


class RawReply(TerminalReply):
    """Shows the answer as the model writes it, in lines that the terminal alone wraps; the thinking as ever."""

    _text: PlainReply | None = None

    def answer(self, text: str) -> None:
        """Write more of the answer."""
        if self._text is None:
            self._tail.commit([])
            self._text = PlainReply(self._console.file)
        self._text.answer(text)
        self._on_text()

    def end(self) -> None:
        """End the last line."""
        if self._text is not None:
            self._text.end()
        super().end()


def thinking_lines(console: Console, text: str, limit: int | None = None) -> list[str]:
    """``text`` as dim lines that fit the screen, all of them or the last ``limit``."""
    if limit is not None:
        # No more than this can be in sight, and wrapping a long train of thought at every redraw is slow.
        text = text[-limit * console.width :]
    lines = render_lines(console, Text(text, style="dim"))
    return lines if limit is None else lines[-limit:]


class _LeftHeading(Heading):
    """A heading that stands where the text begins."""

    LEVEL_ALIGN: ClassVar[Any] = {}


class _BareCodeBlock(CodeBlock):
    """Highlighted code in the terminal's own colours, without a box around it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip(),
            self.lexer_name,
            theme="ansi_dark",
            background_color="default",
            word_wrap=True,
            padding=(0, 2),
        )


class _LineRule(MarkdownElement):
    """A rule drawn as a line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="dim")


class ChatMarkdown(Markdown):
    """Markdown as models write it: line breaks, sums and HTML tags stay in sight, links say where they lead."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _BareCodeBlock,
        "code_block": _BareCodeBlock,
        "html_block": _BareCodeBlock,
        "hr": _LineRule,
    }

    def __init__(self, markup: str):
        super().__init__("", hyperlinks=False)
        self.markup, self.parsed = markup, _parser().parse(markup)
        for token in self._flatten_tokens(self.parsed):
            if token.type == "softbreak":
                token.type = "hardbreak"  # a model that breaks a line means it
            elif token.type == "html_inline":
                token.type = "text"  # the screen has no HTML, so a tag is text
            elif token.type == "html_block":
                token.info = "html"


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt().enable(["strikethrough", "table"])
    parser.inline.ruler.before("emphasis", "plain_asterisk", _keep_asterisk)
    return parser


def _keep_asterisk(state: StateInline, silent: bool) -> bool:
    """A rule of the parser: asterisks that are text, though CommonMark may begin or end emphasis with them."""
    found = _PLAIN_ASTERISK.match(state.src, state.pos)
    if found is None:
        return False
    if not silent:
        state.pending += found[0]
    state.pos = found.end()
    return True
