"""Rows of a whole comparison of KV ladders on one model, and their tables: one row a ladder, over all sets of texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from .divergence import changed_of, closer, kl_of, nats, nll_of
from .forced import TextScore
from .grading import mean_interval
from .paired import ABOVE, Paired, paired_cell
from .provenance import Provenance
from .report import number
from .status import OK, status_cell, status_notes
from .table import Column, Table, from_rows, joined

DIGITS = 7  # of a float in a file of rows


@dataclass(frozen=True, kw_only=True)
class JudgedRow(Provenance):
    """A ladder on its floor with every set of texts under teacher forcing.

    ``weights`` is the digest of the model's, ``settings`` are the sets, their number of texts and their seed in words.
    ``profile`` says what texts a plan was made from, None for what is no plan; ``method`` made it. ``sink``, ``recent``
    and ``recent_ratio`` are the windows at 16 bits. By set of texts, a number for each text: ``tokens`` that count,
    ``kl`` and ``nll`` in nats and ``changed`` first choices, summed over them; ``exact`` is 1 where every token is a
    first choice. ``replies`` says that the sets are questions with right replies. ``block_bits`` are those of a block
    on the floor, ``held_bits`` when the most was held, the mean of the sets; both with all metadata. ``status`` is
    "ok", "does not fit" or "failed"; ``detail`` says why.
    """

    model: str
    weights: str
    settings: str
    replies: bool
    kv: str
    reference: str
    method: str | None = None
    profile: str | None = None
    sink: int = 0
    recent: int = 0
    recent_ratio: float = 0.0
    tokens: dict[str, list[int]] | None = None
    kl: dict[str, list[float]] | None = None
    changed: dict[str, list[int]] | None = None
    nll: dict[str, list[float]] | None = None
    exact: dict[str, list[int]] | None = None
    block_bits: float | None = None
    held_bits: float | None = None
    lowest_bits: float | None = None
    seconds: float | None = None
    status: str
    detail: str | None = None

    @property
    def windows(self) -> str:
        """Sink and newest tokens at 16 bits, such as "32 + 128"; of a share of the context its per cent."""
        return f"{self.sink} + {f'{self.recent_ratio:.0%}' if self.recent_ratio else self.recent}"

    def sets(self) -> dict[str, list[TextScore]]:
        """The scores of the texts by set; none of a row that failed."""
        if None in (self.tokens, self.kl, self.changed, self.nll, self.exact):
            return {}
        assert self.tokens and self.kl and self.changed and self.nll and self.exact
        return {
            name: [
                TextScore(tokens, kl, changed, nll, bool(exact))
                for tokens, kl, changed, nll, exact in zip(
                    self.tokens[name], self.kl[name], self.changed[name], self.nll[name], self.exact[name], strict=True
                )
            ]
            for name in self.tokens
        }


def packed(found: Mapping[str, Sequence[TextScore]]) -> dict[str, dict[str, list[float]]]:
    """The fields of a row that have a number for each text, floats to ``DIGITS`` digits."""

    def column(value: Callable[[TextScore], float]) -> dict[str, list[float]]:
        return {name: [_rounded(value(score)) for score in scores] for name, scores in found.items()}

    return {
        "tokens": column(lambda score: score.tokens),
        "kl": column(lambda score: score.kl),
        "changed": column(lambda score: score.changed),
        "nll": column(lambda score: score.nll),
        "exact": column(lambda score: int(score.exact)),
    }


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def judged_tables(rows: Sequence[JudgedRow]) -> list[Table]:
    """Right replies, if the texts have any, and divergence: the rows in their order, a column for each set of texts."""
    tables = [_divergences(rows)]
    return [_replies(rows), *tables] if rows[0].replies else tables


def right_of(row: JudgedRow) -> dict[str, float]:
    """The share of right replies by set."""
    return {name: fmean(score.exact for score in scores) for name, scores in row.sets().items()}


class _Line(NamedTuple):
    """A row with its scores by set, none if it failed, and those of the measured row above, all sets together."""

    row: JudgedRow
    sets: dict[str, list[TextScore]]
    above: list[TextScore]

    @property
    def scores(self) -> list[TextScore]:
        return list(chain.from_iterable(self.sets.values()))

    @property
    def is_compared(self) -> bool:
        return bool(self.sets) and self.row.kv != self.row.reference


def _lines(rows: Sequence[JudgedRow]) -> Iterator[_Line]:
    """The rows in their order; nothing is compared with the reference."""
    above = list[TextScore]()
    for row in rows:
        line = _Line(row, row.sets(), above)
        yield line
        above = [] if row.kv == row.reference else line.scores or above


def _replies(rows: Sequence[JudgedRow]) -> Table:
    columns: list[Column[_Line]] = [
        *(Column(name, partial(_right_cell, name)) for name in _set_names(rows)),
        Column("mean", lambda line: f"{100 * fmean(right_of(line.row).values()):.1f}" if line.sets else ""),
        Column("95 %", _right_interval),
        Column(ABOVE, partial(_against_above, lambda mine, other: Paired.of(_exact(mine), _exact(other)))),
    ]
    return _table(rows, "right replies, %", columns)


def _divergences(rows: Sequence[JudgedRow]) -> Table:
    columns: list[Column[_Line]] = [
        *(Column(name, partial(_kl_cell, [name])) for name in _set_names(rows)),
        Column("mean KL", partial(_kl_cell, _set_names(rows))),
        Column("95 %", _kl_interval),
        Column("first choice changed", _changed_cell),
        Column("perplexity", _perplexity_cell),
        Column(ABOVE, partial(_against_above, closer)),
    ]
    return _table(rows, "KL divergence in nats a token", columns)


def _right_cell(name: str, line: _Line) -> str:
    return f"{100 * right_of(line.row)[name]:.0f}" if line.sets else ""


def _right_interval(line: _Line) -> str:
    if not line.sets:
        return ""
    low, high = mean_interval([(sum(s.exact for s in scores), len(scores)) for scores in line.sets.values()])
    return f"{100 * low:.1f} - {100 * high:.1f}"


def _kl_cell(names: Sequence[str], line: _Line) -> str:
    return nats(kl_of(*(line.sets[name] for name in names)).mean) if line.is_compared else ""


def _changed_cell(line: _Line) -> str:
    return f"{changed_of(*line.sets.values()).mean:.2%}" if line.is_compared else ""


def _perplexity_cell(line: _Line) -> str:
    return f"{math.exp(fmean(map(nll_of, line.sets.values()))):.4f}" if line.sets else ""


def _kl_interval(line: _Line) -> str:
    if not line.is_compared:
        return ""
    _, low, high = kl_of(*line.sets.values())
    return f"{nats(low)} - {nats(high)}"


def _set_names(rows: Sequence[JudgedRow]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(row.sets() for row in rows)))


def _exact(scores: Sequence[TextScore]) -> list[bool]:
    return [score.exact for score in scores]


def _against_above(compare: Callable[[Sequence[TextScore], Sequence[TextScore]], Paired], line: _Line) -> str:
    """A row's texts of all sets against those of the measured row above it; nothing against the reference."""
    return paired_cell(*compare(line.scores, line.above)) if line.sets and line.above else ""


def _table(rows: Sequence[JudgedRow], what: str, columns: Sequence[Column[_Line]]) -> Table:
    """``columns`` behind those that name a row."""
    names: list[Column[_Line]] = [
        Column("kv", lambda line: line.row.kv, is_text=True),
        Column("profile", lambda line: line.row.profile or "", is_text=True),
        Column("windows", lambda line: line.row.windows if line.row.kv != line.row.reference else "", is_text=True),
        Column("bits a block", lambda line: number(line.row.block_bits, 2)),
        Column("bits held", lambda line: number(line.row.held_bits, 2)),
    ]
    status = Column[_Line]("status", lambda line: status_cell(line.row), is_text=True)
    ran = next((row for row in rows if row.status == OK), rows[0])
    notes = status_notes(rows, [row.kv for row in rows])
    title = joined(ran.model, ran.machine, ran.dtype, f"{what}, under teacher forcing", ran.settings)
    return from_rows(title, list(_lines(rows)), [*names, *columns, status], notes)._replace(group=None)
