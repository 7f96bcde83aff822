"""Tables for people: fitted to a terminal by leaving columns out, never by shortening a number; or as Markdown."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

PLAIN_WIDTH = 200  # columns of a table that goes to no terminal
GAP = 2  # columns between two cells
FOLD_WIDTH = 16  # columns a text cell keeps at least; longer words fold
NO_BREAK = "\N{NO-BREAK SPACE}"
R = TypeVar("R")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i)?B\b|ms\b|tok/s\b)")


class Table(NamedTuple):
    """A table for people, whose cells are text.

    ``group`` is the column whose change starts a new section, None for a table without any. The columns named in
    ``text`` may fold; the others never break. The first column and those of text are aligned left. ``spare`` names the
    columns that a narrow terminal does without, least important first.
    """

    title: str
    headers: list[str]
    cells: list[list[str]]
    notes: list[str]
    group: int | None = 0
    text: Sequence[str] = ()
    spare: Sequence[str] = ()

    def without(self, headers: Sequence[str]) -> Table:
        """The table less the columns ``headers``."""
        kept = [i for i, header in enumerate(self.headers) if header not in headers]
        cells = [[row[i] for i in kept] for row in self.cells]
        group = None if self.group is None else kept.index(self.group)
        return self._replace(headers=[self.headers[i] for i in kept], cells=cells, group=group)


class Column(NamedTuple, Generic[R]):
    """A column of rows: ``value`` is the text of a row's cell, nothing where the row has none.

    ``spare`` is the rank among the columns that a narrow terminal does without, 1 for the least important; 0 is for a
    column that stays. ``is_text`` says that cells may fold.
    """

    header: str
    value: Callable[[R], str]
    spare: int = 0
    is_text: bool = False


def from_rows(title: str, rows: Sequence[R], columns: Sequence[Column[R]], notes: list[str]) -> Table:
    """A table of ``rows``; ``columns`` with nothing in them are left out."""
    found = {column.header: [column.value(row) for row in rows] for column in columns}
    shown = {header: cells for header, cells in found.items() if any(cells)}
    cells = [list(line) for line in zip(*shown.values(), strict=True)]
    spare = [column.header for column in sorted(columns, key=lambda column: column.spare) if column.spare]
    text = [column.header for column in columns if column.is_text]
    return Table(title, list(shown), cells, notes, text=text, spare=spare)


def joined(*parts: str | None) -> str:
    """A title of ``parts``, empty ones left out."""
    return " · ".join(part for part in parts if part)


def as_markdown(table: Table) -> str:
    """``table`` in Markdown, its columns aligned."""
    body = [[cell.replace("|", "\\|") for cell in row] for row in [table.headers, *table.cells]]
    widths = [max(3, *(cell_len(row[i]) for row in body)) for i in range(len(table.headers))]
    lefts = [_is_left(table, i) for i in range(len(widths))]
    rules = ["-" * width if left else "-" * (width - 1) + ":" for width, left in zip(widths, lefts, strict=True)]
    body.insert(1, rules)
    lines = [f"| {' | '.join(map(_padded, row, widths, lefts))} |" for row in body]
    head = [table.title, ""] if table.title else []
    return "\n".join([*head, *lines, *(f"\n{note}" for note in table.notes)]) + "\n"


def as_text(table: Table, width: int | None = PLAIN_WIDTH) -> str:
    """``table`` in ``width`` columns, plain; None is the terminal's width, with its styles.

    Spare columns are left out until the rest fits, and a line below names them. What is wider even then keeps its
    natural width, for the terminal to wrap.
    """
    console = _console(width)
    width = console.width
    shown, dropped = table, 0
    spare = [header for header in table.spare if header in table.headers]
    while sum(_least_widths(shown)) > width - GAP * (len(shown.headers) - 1) and dropped < len(spare):
        dropped += 1
        shown = table.without(spare[:dropped])
    console.width = max(width, sum(_least_widths(shown)) + GAP * len(shown.headers))
    hidden = [header for header in table.headers if header not in shown.headers]
    with console.capture() as capture:
        for line in wrapped(NO_BREAK.join(table.title.split(" ")).replace(f"·{NO_BREAK}", "· "), width):
            console.print(Text(line, style="bold"))
        if table.title:
            console.print()
        console.print(_grid(shown, width))
        if table.notes or hidden:
            console.print()
        for note in [*table.notes, *_named(hidden)]:
            for line in wrapped(note, width):
                console.print(Text(line))
    return _lines(capture.get())


def as_listing(title: str, entries: Sequence[tuple[str, str]], width: int | None = PLAIN_WIDTH) -> str:
    """``title`` and below it names with their values, which fold; ``width`` as for ``as_text``."""
    console = _console(width)
    grid = Grid.grid(padding=(0, GAP, 0, 0))
    grid.add_column(min_width=GAP + max(cell_len(name) for name, _ in entries))
    grid.add_column(overflow="fold")
    for name, value in entries:
        grid.add_row(Text(" " * GAP + name), Text(value))
    with console.capture() as capture:
        console.print(Text(title, style="bold"), grid, sep="\n")
    return _lines(capture.get())


def _console(width: int | None) -> Console:
    return Console(width=width, file=io.StringIO() if width else None)


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines of ``width``, a number and its unit on one of them."""
    lines = textwrap.wrap(_BEFORE_UNIT.sub(NO_BREAK, text), width, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines]


def _named(hidden: list[str]) -> list[str]:
    if not hidden:
        return []
    number = "1 more column" if len(hidden) == 1 else f"{len(hidden)} more columns"
    return [f"a wider terminal or --format md shows {number}: {', '.join(hidden)}"]


def _grid(table: Table, width: int) -> Grid:
    padding = (0, GAP - 1, 0, 0)  # the box adds a blank between columns
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, header_style="bold")
    for i, (header, column) in enumerate(zip(table.headers, _widths(table, width), strict=True)):
        grid.add_column(Text(header), justify="left" if _is_left(table, i) else "right", width=column, overflow="fold")
    groups = [None if table.group is None else row[table.group] for row in table.cells]
    is_grouped = any(before == after for before, after in pairwise(groups))  # not where each row would be a section
    for row, group, following in zip(table.cells, groups, [*groups[1:], None], strict=False):  # no rows: no groups
        grid.add_row(*map(Text, row), end_section=is_grouped and group != following)
    return grid


def _widths(table: Table, width: int) -> list[int]:
    """The width of each column: the least, and from the left as much more as its header and cells can use."""
    widths = _least_widths(table)
    room = width - sum(widths) - GAP * (len(widths) - 1)
    for i, least in enumerate(widths):
        most = max(map(cell_len, _column(table, i)))
        more = max(0, min(room, most - least))
        widths[i] += more
        room -= more
    return widths


def _least_widths(table: Table) -> list[int]:
    """The least width of each column: headers break between words, text does so too or folds, numbers never break."""
    widths = []
    for header, *cells in (_column(table, i) for i in range(len(table.headers))):
        body = max(map(cell_len, cells), default=0)
        if header in table.text:
            words = (word for cell in cells for word in cell.split())
            body = min(FOLD_WIDTH, max(map(cell_len, words), default=0))
        widths.append(max(body, *map(cell_len, header.split())))
    return widths


def _column(table: Table, i: int) -> list[str]:
    return [table.headers[i], *(row[i] for row in table.cells)]


def _is_left(table: Table, i: int) -> bool:
    return i == 0 or table.headers[i] in table.text


def _padded(cell: str, width: int, left: bool) -> str:
    blanks = " " * (width - cell_len(cell))
    return cell + blanks if left else blanks + cell
