"""The last lines on the screen, which may still change. Everything above them is never touched again."""

from __future__ import annotations

from rich.cells import chop_cells
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text


class LiveTail:
    """Redraws the lines above the cursor by rewriting only those that differ, so that nothing flickers.

    What is drawn may change with the next call; what is committed stays and scrolls away like any output.
    """

    def __init__(self, console: Console):
        self._console = console
        self._lines: list[str] = []
        self._width = console.width

    def draw(self, lines: list[str]) -> None:
        """Show ``lines`` in place of those drawn before; only the last ones where the screen is too small."""
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

    def _replace(self, lines: list[str]) -> None:
        if self._console.width == self._width:
            pairs = enumerate(zip(self._lines, lines, strict=False))
            kept = next((n for n, (old, new) in pairs if old != new), min(len(self._lines), len(lines)))
            stale = len(self._lines) - kept
        else:
            kept, stale, self._width = 0, self._reflowed_rows(), self._console.width
        back = f"\x1b[{stale}A\r\x1b[J" if stale else ""
        self._console.file.write(back + "".join(f"{line}\n" for line in lines[kept:]))
        self._console.file.flush()
        self._lines = lines

    def _reflowed_rows(self) -> int:
        """Rows on the screen that the drawn lines take since the terminal has wrapped them to its new width."""
        rows = (chop_cells(Text.from_ansi(line).plain, self._console.width) for line in self._lines)
        return min(sum(max(1, len(row)) for row in rows), self._console.height - 1)


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
