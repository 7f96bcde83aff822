"""Tables of a whole comparison: sets of equal weight, pairs with the row above, rows that failed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qkv_engine.bench.forced import TextScore
from qkv_engine.bench.judged import JudgedRow, judged_tables, packed, right_of

NAMES: dict[str, Any] = {"model": "m", "weights": "abc", "settings": "2 texts", "replies": True, "reference": "bf16"}


def scores(*kl: float, exact: str = "11") -> list[TextScore]:
    return [TextScore(10, one, int(one > 1), 0.5, mark == "1") for one, mark in zip(kl, exact, strict=True)]


def row(kv: str, sets: dict[str, list[TextScore]] | None, **values: Any) -> JudgedRow:
    found = {} if sets is None else packed(sets)
    return JudgedRow(**NAMES, kv=kv, **found, **{"status": "failed" if sets is None else "ok", **values})  # type: ignore[arg-type]


ROWS = [
    row("bf16", {"a": scores(0, 0), "b": scores(0, 0, exact="10")}, block_bits=16.0, held_bits=16.0),
    row("x", {"a": scores(0.2, 0.4), "b": scores(2.0, 0.2, exact="10")}, block_bits=2.5, held_bits=8.1, sink=32),
    row("broken", None, detail="no"),
    row("y", {"a": scores(0.1, 0.1), "b": scores(1.0, 0.1, exact="00")}, recent_ratio=0.1, profile="unlike"),
]


def column(table: Any, header: str) -> list[str]:
    return [cells[table.headers.index(header)] for cells in table.cells]


def test_a_file_gives_the_scores_back() -> None:
    again = JudgedRow(**asdict(ROWS[1]))
    assert again.sets() == ROWS[1].sets() == {"a": scores(0.2, 0.4), "b": scores(2.0, 0.2, exact="10")}
    assert ROWS[2].sets() == {}
    assert packed({"a": [TextScore(3, 1 / 3, 0, 0.0, True)]})["kl"] == {"a": [0.3333333]}


def test_right_replies_and_pairs_with_the_row_above() -> None:
    table, _ = judged_tables(ROWS)
    assert right_of(ROWS[1]) == {"a": 1.0, "b": 0.5}
    assert column(table, "a") == ["100", "100", "", "100"] and column(table, "b") == ["50", "50", "", "0"]
    assert column(table, "mean") == ["75.0", "75.0", "", "50.0"]
    assert column(table, "vs row above, p") == ["", "", "", "0 : 1, 1"]  # none against the reference or a failed row
    assert column(table, "windows") == ["", "32 + 0", "0 + 0", "0 + 10%"]
    assert column(table, "profile") == ["", "", "", "unlike"]
    assert column(table, "bits a block")[:2] == ["16.00", "2.50"] and column(table, "bits held")[1] == "8.10"
    assert column(table, "status") == ["", "", "failed", ""] and table.notes == ["broken failed: no"]


def test_divergence_is_the_mean_of_the_sets() -> None:
    _, table = judged_tables(ROWS)
    assert column(table, "a") == ["", "0.030", "", "0.010"] and column(table, "b") == ["", "0.11", "", "0.055"]
    assert column(table, "mean KL") == ["", "0.070", "", "0.033"]
    assert column(table, "vs row above, p")[3] == "4 : 0, .12"
    assert column(table, "first choice changed")[1] == "2.50%"
    assert column(table, "perplexity") == ["1.0513", "1.0513", "", "1.0513"]


def test_texts_without_replies_have_no_table_of_them() -> None:
    rows = [JudgedRow(**{**asdict(one), "replies": False}) for one in ROWS]
    (table,) = judged_tables(rows)
    assert "KL divergence" in table.title
