"""The best row of each preset beside its capacity: throughput and tokens against right answers, and both frontiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qkv_engine.config import KVConfig
from qkv_engine.device.layouts import Ladder
from qkv_engine.device.per_token import per_token
from qkv_engine.errors import CapacityError
from qkv_engine.kv.slabs import make_tables
from qkv_engine.presets import PRESETS
from qkv_engine.sizes import format_size

from .quality import RatedRow, accuracy_cell, answer_notes, interval_cell, right_header, right_title
from .report import number, times
from .sizing import make_ladder
from .status import status_cell, status_notes
from .sweep import SAMPLED
from .table import Column, Table, from_rows, joined

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParetoRow(RatedRow):
    """A rated row, and its KV memory with all blocks on the ladder's last rung.

    ``capacity_tokens`` is the longest request that fits alone; where all layers have windows, tokens of the requests of
    the row's length that fit together. ``floor_bytes_per_token`` and ``floor_bits`` are bytes of a token and bits of a
    KV element in a block there, all metadata counted. Layers with a window count by what they hold of such a request.
    """

    capacity_tokens: int | None = None
    floor_bytes_per_token: float | None = None
    floor_bits: float | None = None


def with_capacity(row: RatedRow, kv: KVConfig, config: ModelConfig) -> ParetoRow:
    """``row`` with the capacity of the KV memory that its engine had; without one if it had none."""
    ladder, length = make_ladder(kv, config, config.dtype), row.input_len + row.output_len
    token = per_token(ladder, ladder.last, length)
    try:
        num_tokens = _capacity(ladder, row.kv_bytes_total or 0, length)
    except CapacityError:
        num_tokens = None
    return ParetoRow(
        **vars(row),
        capacity_tokens=num_tokens,
        floor_bytes_per_token=round(token.nbytes, 3),
        floor_bits=round(token.bits, 4),
    )


def _capacity(ladder: Ladder, nbytes: int, length: int) -> int:
    """Tokens in ``nbytes``, all blocks on the last rung: of one request, or of those of ``length`` if all see windows.

    Raises ``CapacityError`` if no block fits.
    """
    tables = make_tables(ladder.spec, nbytes)
    if ladder.main.visible is None:
        return tables.max_tokens(ladder.last)
    return length * tables.max_requests(length, ladder.last)


def best_rows(rows: Sequence[ParetoRow]) -> list[ParetoRow]:
    """The row of each preset with the highest throughput, in the presets' order."""
    best: dict[str, ParetoRow] = {}
    for row in rows:
        if row.kv not in best or (row.output_tok_s or 0) > (best[row.kv].output_tok_s or 0):
            best[row.kv] = row
    return list(best.values())


def frontier(values: Mapping[str, tuple[float | None, float | None]]) -> list[str]:
    """The names that no other name equals or exceeds in both gain and accuracy, from the highest accuracy down.

    ``values`` has gain and accuracy by name; a name that lacks one is on no frontier. Of equals the first counts.
    """
    whole = [(name, gain, right) for name, (gain, right) in values.items() if gain is not None and right is not None]
    found: list[str] = []
    most = float("-inf")
    for name, gain, _ in sorted(whole, key=lambda point: (-point[2], -point[1])):
        if gain > most:
            found.append(name)
            most = gain
    return found


def speed_frontier(rows: Sequence[ParetoRow]) -> list[str]:
    """The presets on the frontier of output tokens per second and accuracy."""
    return frontier({row.kv: (row.output_tok_s, row.accuracy) for row in rows})


def capacity_frontier(rows: Sequence[ParetoRow]) -> list[str]:
    """The presets on the frontier of tokens of capacity and accuracy."""
    return frontier({row.kv: (row.capacity_tokens, row.accuracy) for row in rows})


def pareto_table(rows: Sequence[ParetoRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The best row of each of ``ladders``, and the frontiers that it is on."""
    rows = best_rows(rows)
    asked = next((row for row in rows if row.accuracy is not None), rows[0])
    fronts = {"speed": speed_frontier(rows), "capacity": capacity_frontier(rows)}
    columns: list[Column[ParetoRow]] = [
        Column("kv", lambda row: row.kv, is_text=True),
        Column("batch", lambda row: number(row.batch, 0), spare=3),
        Column("out tok/s", lambda row: number(row.output_tok_s, 1)),
        Column(f"vs {rows[0].kv}", lambda row: times(row.output_tok_s, rows[0].output_tok_s), spare=4),
        Column("capacity tokens", lambda row: number(row.capacity_tokens, 0)),
        Column("bytes per token", lambda row: number(row.floor_bytes_per_token, 0), spare=1),
        Column("bits", lambda row: number(row.floor_bits, 2), spare=6),
        Column(right_header(asked), accuracy_cell),
        Column("95 %", interval_cell, spare=2),
        Column("frontier", lambda row: ", ".join(name for name, on in fronts.items() if row.kv in on)),
        Column("status", status_cell, spare=5, is_text=True),
    ]
    failed = status_notes(rows, [f"{row.kv} {row.batch:,}" for row in rows])
    return from_rows(_title(rows, asked), rows, columns, [*failed, *answer_notes(rows, ladders)])


def _title(rows: Sequence[ParetoRow], asked: ParetoRow) -> str:
    ran = next((row for row in rows if row.repeats), rows[0])
    parts = [ran.model, ran.machine, ran.dtype, f"{ran.input_len:,} in, {ran.output_len:,} out"]
    if ran.kv_bytes_total:
        parts.append(f"KV memory {format_size(ran.kv_bytes_total)}")
    if ran.method == SAMPLED:
        parts.append("decode steps sampled")
    if asked.accuracy is not None:
        parts.append(right_title(asked))
    return joined(*parts)
