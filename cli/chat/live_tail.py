"""The last lines on the screen, which may still change. Everything above them is never touched again."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.cells import chop_cells
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

# Seconds a new width must last. A terminal tells of its width late while a mouse drags its edge, and what is drawn for
# another width than it has cannot be erased.
_SETTLE_SECONDS = 0.3


class LiveTail:
    """Redraws the lines above the cursor by rewriting only those that differ, so that nothing flickers.

    What is drawn may change with the next call; what is committed stays and scrolls away like any output.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console, clock
        self._lines: list[str] = []
        self._width = self._last_width = console.width
        self._quiet_until = 0.0

    def draw(self, lines: list[str]) -> None:
        """Show ``lines`` in place of those drawn before; only the last ones where the screen is too small.

        While the terminal's width changes nothing is drawn.
        """
        if not self._is_resizing():
            self._replace(lines[-max(1, self._console.height - 2) :])

    def commit(self, lines: list[str]) -> None:
        """Leave ``lines`` on the screen for good in place of what was drawn."""
        self._replace(lines)
        self._lines = []

    def insert(self, lines: list[str]) -> None:
        """Leave ``lines`` on the screen for good above what is drawn."""
        drawn = self._lines
        self.commit(lines)
        self.draw(drawn)

    def _is_resizing(self) -> bool:
        """Whether the width differs from the drawing's and has not stayed the same for long enough."""
        width = self._console.width
        if width == self._width:
            return False
        now = self._clock()
        if width != self._last_width:
            self._last_width, self._quiet_until = width, now + _SETTLE_SECONDS
        return now < self._quiet_until

    def _replace(self, lines: list[str]) -> None:
        if self._console.width == self._width:
            pairs = enumerate(zip(self._lines, lines, strict=False))
            kept = next((n for n, (old, new) in pairs if old != new), min(len(self._lines), len(lines)))
            stale = len(self._lines) - kept
        else:
            kept, stale = 0, self._reflowed_rows()
            self._width = self._last_width = self._console.width
        written = _over(stale, lines[kept:]) if stale else "".join(f"{line}\n" for line in lines[kept:])
        self._console.file.write(written)
        self._console.file.flush()
        self._lines = lines

    def _reflowed_rows(self) -> int:
        """Rows on the screen that the drawn lines take since the terminal has wrapped them to its new width."""
        rows = (chop_cells(Text.from_ansi(line).plain, self._console.width) for line in self._lines)
        return min(sum(max(1, len(row)) for row in rows), self._console.height - 1)


def _over(stale: int, lines: list[str]) -> str:
    """``lines`` written over the last ``stale`` rows.

    Each row is erased on its own, before it is written: what ends in the last column would lose a character after it.
    The rest is erased from below the first row, for tmux takes that of a whole screen as a reason to keep it.
    """
    rows = "".join(f"\x1b[K{line}\n" for line in lines) + "\x1b[J" if lines else "\x1b[K\n\x1b[J\x1b[1A"
    return f"\x1b[{stale}A\r{rows}"


def render_lines(console: Console, renderable: RenderableType) -> list[str]:
    """``renderable`` as lines with terminal codes, without blank lines around it or padding on the right."""
    with console.capture() as capture:
        for segments in console.render_lines(renderable, pad=False):
            console.print(Segments([*_without_padding(segments), Segment.line()]), end="")
    lines = capture.get().split("\n")
    full = [number for number, line in enumerate(lines) if line.strip()]
    return lines[full[0] : full[-1] + 1] if full else []


def _without_padding(segments: list[Segment]) -> list[Segment]:
    while segments and not segments[-1].text.strip():
        segments = segments[:-1]
    if segments:
        text, style, control = segments[-1]
        segments = [*segments[:-1], Segment(text.rstrip(), style, control)]
    return segments
