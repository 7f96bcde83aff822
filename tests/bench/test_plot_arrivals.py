"""The picture of runs with arrivals: a column a preset, whatever runs there are."""

from __future__ import annotations

import html
import re
import struct
from typing import Any

import pytest

from qkv_engine.bench.arrivals import Measured
from qkv_engine.bench.arrivals_row import ArrivalsRow
from qkv_engine.bench.plots.arrivals import COLUMN_WIDTH, HEIGHT, plot_arrivals
from qkv_engine.bench.series import StatsSample

from .test_series import sample

BITS = {"dense16": 16.0, "int8": 8.2, "int4": 4.3, "kitty-pro": 2.6}


def series(*blocks: dict[str, int]) -> list[StatsSample]:
    free = {"kv_bytes_free": 2**20}
    return [sample(i / 10, blocks=found, running=i, waiting=2, preemptions=i, **free) for i, found in enumerate(blocks)]


def measured(kv: str, samples: list[StatsSample] | None = None, **values: Any) -> Measured:
    known: dict[str, Any] = {"model": "demo", "rate": "8", "requests": 12, "input_len": 916.0, "output_len": 14.0}
    ran = {"output_tok_s": 1234.4, "demotions": 0, "preemptions": 0, "kv_bytes_total": 4 * 2**20, "status": "ok"}
    return Measured(ArrivalsRow(kv=kv, **known | ran | values), samples or [])


def texts(*found: Measured) -> list[str]:
    """Every piece of text in the picture."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        svg = plot_arrivals(found, BITS, kind="svg").decode()
    return [html.unescape(text).strip() for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg)]


WIDE = measured("bf16", series({}, {"dense16": 4}, {"dense16": 3}), preemptions=7)
AUTO = measured("auto", series({}, {"dense16": 2, "int8": 3}, {"dense16": 1, "int4": 6}), demotions=2762)


def test_a_column_a_preset_and_the_legend_once() -> None:
    drawn = texts(WIDE, AUTO)
    assert {"1,234 tok/s · 7 preemptions", "1,234 tok/s · 2,762 demotions", "bf16", "auto"} <= set(drawn)
    legend = [drawn.count(name) for name in ("dense16", "int8", "int4", "running", "waiting", "preempted")]
    assert legend == [1] * 6 and "kitty-pro" not in drawn
    assert drawn.count("seconds") == 2 and drawn.count("blocks of 128 tokens") == 1
    assert any("12 requests, 8 a second: 916 tokens in, 14 out; KV memory 4.0 MiB" in text for text in drawn)


def test_the_reserve_is_a_line_where_there_is_one() -> None:
    assert "reserve" not in texts(WIDE, AUTO)
    assert texts(WIDE, measured("auto", AUTO.series, kv_bytes_reserve=2**20)).count("reserve") == 1


def test_its_size_follows_the_presets() -> None:
    png = plot_arrivals([WIDE, AUTO, WIDE, AUTO], BITS, dpi=50)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == (int(50 * (4 * COLUMN_WIDTH + 1)), int(50 * HEIGHT))


def test_the_highest_rate_is_drawn() -> None:
    slow, fast = (
        measured("bf16", WIDE.series, rate=rate, output_tok_s=tok_s) for rate, tok_s in (("8", 1.0), ("16", 2.0))
    )
    at_once = measured("bf16", WIDE.series, rate="inf", output_tok_s=3.0)
    trace = measured("bf16", WIDE.series, rate="trace", output_tok_s=4.0)
    assert any("2 tok/s" in text for text in texts(fast, slow, trace))
    assert any("all at once" in text for text in texts(fast, at_once, slow, trace))
    assert any("at the times of a trace" in text for text in texts(trace))


@pytest.mark.parametrize(
    "found",
    [
        [measured("bf16", output_tok_s=None, status="does not fit")],
        [measured("bf16", series({}))],
        [WIDE, measured("weird $name_", output_tok_s=None, status="failed")],
        [measured(f"plan-{i}", AUTO.series, kv_bytes_total=2**31, task="ledger 20") for i in range(9)],
    ],
)
@pytest.mark.filterwarnings("error")  # of a layout that did not work out
def test_odd_runs_can_be_drawn(found: list[Measured]) -> None:
    plot_arrivals(found, BITS, dpi=40)


def test_a_run_that_never_began_says_so() -> None:
    assert "does not fit" in texts(WIDE, measured("fp32", output_tok_s=None, status="does not fit"))
