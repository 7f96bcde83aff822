"""Rows of a whole comparison of KV ladders on one model, and their tables: one row a ladder, over all sets of texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean

from .divergence import Mean, changed_of, closer, kl_of, nats, nll_of
from .forced import TextScore
from .grading import mean_interval
from .paired import ABOVE, Paired, paired_cell
from .provenance import Provenance
from .report import number
from .status import OK, status_cells, status_notes
from .table import Table, from_columns, joined

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


def _replies(rows: Sequence[JudgedRow]) -> Table:
    columns = _names(rows)
    for name in _set_names(rows):
        columns[name] = ["" if not row.sets() else f"{100 * right_of(row)[name]:.0f}" for row in rows]
    counts = [[(sum(s.exact for s in scores), len(scores)) for scores in row.sets().values()] for row in rows]
    columns["mean"] = ["" if not row.sets() else f"{100 * fmean(right_of(row).values()):.1f}" for row in rows]
    columns["95 %"] = [_interval(mean_interval(of)) if of else "" for of in counts]
    columns[ABOVE] = _against_above(rows, lambda mine, other: Paired.of(_exact(mine), _exact(other)))
    return _table(rows, "right replies, %", columns)


def _divergences(rows: Sequence[JudgedRow]) -> Table:
    columns = _names(rows)
    for name in _set_names(rows):
        columns[name] = _measured(rows, partial(_kl_cell, name))
    columns["mean KL"] = _measured(rows, lambda row: nats(_kl(row).mean))
    columns["95 %"] = _measured(rows, lambda row: f"{nats(_kl(row).low)} - {nats(_kl(row).high)}")
    columns["first choice changed"] = _measured(rows, lambda row: f"{changed_of(*row.sets().values()).mean:.2%}")
    columns["perplexity"] = [
        "" if not row.sets() else f"{math.exp(fmean(map(nll_of, row.sets().values()))):.4f}" for row in rows
    ]
    columns[ABOVE] = _against_above(rows, closer)
    return _table(rows, "KL divergence in nats a token", columns)


def _kl_cell(name: str, row: JudgedRow) -> str:
    return nats(kl_of(row.sets()[name]).mean)


def _kl(row: JudgedRow) -> Mean:
    return kl_of(*row.sets().values())


def _measured(rows: Sequence[JudgedRow], cell: Callable[[JudgedRow], str]) -> list[str]:
    """The cells of the rows that were compared with the reference; nothing for the others."""
    return [cell(row) if row.sets() and row.kv != row.reference else "" for row in rows]


def _names(rows: Sequence[JudgedRow]) -> dict[str, list[str]]:
    return {
        "kv": [row.kv for row in rows],
        "profile": [row.profile or "" for row in rows],
        "windows": [row.windows if row.kv != row.reference else "" for row in rows],
        "bits a block": [number(row.block_bits, 2) for row in rows],
        "bits held": [number(row.held_bits, 2) for row in rows],
    }


def _set_names(rows: Sequence[JudgedRow]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(row.sets() for row in rows)))


def _exact(scores: Sequence[TextScore]) -> list[bool]:
    return [score.exact for score in scores]


def _against_above(
    rows: Sequence[JudgedRow], compare: Callable[[Sequence[TextScore], Sequence[TextScore]], Paired]
) -> list[str]:
    """Each row's texts of all sets against those of the measured row above it; nothing against the reference."""
    cells, above = list[str](), None
    for row in rows:
        mine = list(chain.from_iterable(row.sets().values()))
        cells.append(paired_cell(*compare(mine, above)) if mine and above else "")
        above = None if row.kv == row.reference else mine or above
    return cells


def _interval(ends: tuple[float, float]) -> str:
    return f"{100 * ends[0]:.1f} - {100 * ends[1]:.1f}"


def _table(rows: Sequence[JudgedRow], what: str, columns: dict[str, list[str]]) -> Table:
    ran = next((row for row in rows if row.status == OK), rows[0])
    notes = status_notes(rows, [row.kv for row in rows])
    title = joined(ran.model, ran.machine, ran.dtype, f"{what}, under teacher forcing", ran.settings)
    table = from_columns(title, {**columns, "status": status_cells(rows)}, notes)
    return table._replace(text=("kv", "profile", "windows", "status"), group=None)
