"""Runs with arrivals: figures of made-up times to the digit, failures as rows, and a real engine under pressure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from qkv_engine import Engine
from qkv_engine.bench.arrivals import ArrivalsPlan, Measured, measure
from qkv_engine.bench.arrivals_report import arrivals_tables, load_table
from qkv_engine.bench.arrivals_row import ArrivalsRow, Served, figures, latencies, step_times, throughput
from qkv_engine.bench.load import Rate, parse_rates
from qkv_engine.bench.report import as_csv
from qkv_engine.bench.series import TimedStep
from qkv_engine.bench.sizing import nbytes_for
from qkv_engine.bench.table import as_markdown
from qkv_engine.bench.timing import Timeline
from qkv_engine.bench.traces import Arrival
from qkv_engine.errors import CapacityError, EngineDeadError, RequestError
from qkv_engine.loading import demo_folder
from qkv_engine.models.loader import read_config
from qkv_engine.request import CompletionOutput, KVUsage, RequestMetrics, RequestOutput, SamplingParams

from .fake import FakeEngine


def output(prompt: list[int], tokens: int, lowest_bits: float | None = 16) -> RequestOutput:
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=prompt,
        outputs=[CompletionOutput(index=0, token_ids=[7] * tokens, finish_reason="length")],
        finished=True,
        metrics=RequestMetrics(),
        kv=KVUsage(lowest_bits=lowest_bits),
    )


def served(sent: float, *times: float, lowest_bits: float = 16) -> Served:
    return Served(sent, list(times), output([5] * 10, len(times), lowest_bits))


def test_throughput_is_from_the_first_request_to_the_last_token() -> None:
    requests = [served(100.0, 100.5, 101.0), served(101.0, 103.0, 103.5, 104.0)]
    found = throughput(requests, {"ttft": 1000.0})
    assert found == {
        "output_len": 2.5,
        "seconds": 4.0,
        "output_tok_s": 1.25,
        "total_tok_s": 6.25,
        "requests_s": 0.5,
        "goodput": 0.25,
    }
    assert throughput(requests, {})["goodput"] is None and throughput([], {"ttft": 1.0}) == {}


def test_latencies_to_the_digit() -> None:
    """TTFT of 1 to 101 ms, all tokens 10 ms apart except one pair that came together."""
    timelines = [served(0.0, t / 1e3, t / 1e3 + 0.01).timeline for t in range(1, 102)]
    timelines.append(Timeline(sent=0.0, scheduled=0.0, first_token=0.051, last_token=0.051, num_tokens=1))
    found = latencies(timelines)
    assert (found["ttft_ms_mean"], found["ttft_ms_p50"], found["ttft_ms_p90"]) == (51.0, 51.0, 90.9)
    assert found["ttft_ms_p99"] == 99.99
    assert found["tpot_ms_p50"] == found["itl_ms_p99"] == 10.0
    assert latencies([timelines[-1]])["tpot_ms_mean"] is None


def test_step_times_are_told_apart_by_demotions() -> None:
    found = step_times("decode_steps", [TimedStep(10.0, 0, 0), TimedStep(20.0, 0, 0), TimedStep(30.0, 0, 2)])
    assert (found["decode_steps"], found["decode_steps_ms_p50"], found["decode_steps_ms_p99"]) == (2, 15.0, 19.9)
    assert (found["decode_steps_demoting"], found["decode_steps_demoting_ms_p99"]) == (1, 30.0)
    assert step_times("x", [])["x_ms_p50"] is None


def test_failed_requests_are_counted_apart() -> None:
    from .test_series import sample

    stats = FakeEngine().stats()
    requests = [served(0.0, 1.0, lowest_bits=4), served(0.0, 2.0), Served(0.0, [], None, "no room")]
    samples = [sample(0.0, running=2, waiting=1), sample(1.0, running=1, waiting=5)]
    found = figures(requests, samples, stats, {})
    assert (found["finished"], found["failed"], found["status"], found["detail"]) == (2, 1, "failed", "no room")
    assert (found["max_running"], found["max_waiting"], found["lowest_bits"]) == (2, 5, 4)
    assert found["output_tok_s"] == 1.0


@dataclass
class StreamingFake(FakeEngine):
    """Gives each request two tokens at once, or ``breaks`` with it."""

    breaks: BaseException | None = None
    runs: int = 0

    def reset_stats(self) -> None:
        self.runs += 1

    async def generate_async(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        if self.breaks is not None:
            raise self.breaks
        yield output(prompt, 2)

    def stats(self) -> Any:
        more = {"time": 0.0, "num_running": 0, "num_waiting": 0, "num_steps": 0, "kv_blocks": {}}
        return SimpleNamespace(
            **vars(super().stats()) | more | {"kv_bytes_used": 0, "kv_bytes_cached": 0, "kv_bytes_reserve": 0}
        )


def plan(**values: Any) -> ArrivalsPlan:
    known = {"model": "demo", "kvs": ("bf16", "auto"), "rates": parse_rates("inf,1000", has_times=False)}
    return ArrivalsPlan(**known | {"requests": (Arrival(4, 2), Arrival(6, 2))} | values)


def test_every_preset_at_every_rate_after_one_warm_up_each() -> None:
    engines = [StreamingFake(), StreamingFake()]
    opened = iter(engines)
    found = list(measure(plan(), lambda kv: next(opened)))
    assert [(one.row.kv, one.row.rate) for one in found] == [
        *(("bf16", "inf"), ("bf16", "1000")),
        *(("auto", "inf"), ("auto", "1000")),
    ]
    assert [(engine.runs, engine.closed) for engine in engines] == [(3, 1), (3, 1)]
    assert {(one.row.finished, one.row.input_len, one.row.output_len, one.row.status) for one in found} == {
        (2, 5.0, 2.0, "ok")
    }
    assert {(one.row.demotions, one.row.effective_bits) for one in found} == {(3, 4.5)}


def test_the_warm_up_has_the_highest_rate() -> None:
    rates = parse_rates("2,8,4", has_times=False)
    assert plan(rates=rates).highest_rate == Rate("8", 8.0)
    assert plan(rates=parse_rates("2,inf,trace", has_times=True)).highest_rate.label == "inf"


def test_memory_that_holds_no_block_is_a_row_a_rate() -> None:
    def refuse(kv: str) -> StreamingFake:
        if kv == "bf16":
            raise CapacityError("no room")
        return StreamingFake()

    found = list(measure(plan(), refuse))
    assert [one.row.status for one in found] == ["does not fit"] * 2 + ["ok"] * 2
    assert found[0].row.detail == "no room" and found[0].series == []


@pytest.mark.parametrize("error", [EngineDeadError("lost"), RuntimeError("broken")])
def test_after_a_broken_run_the_next_rate_has_a_new_engine(error: Exception) -> None:
    opened = iter([StreamingFake(breaks=error), StreamingFake()])
    found = list(measure(plan(kvs=("bf16",)), lambda kv: next(opened)))
    assert [one.row.status for one in found] == ["failed", "ok"]
    assert str(error) in (found[0].row.detail or "")


def test_a_request_that_is_refused_fails_alone() -> None:
    (found,) = measure(
        plan(kvs=("bf16",), rates=parse_rates("inf", has_times=False), warmup=0),
        lambda kv: StreamingFake(breaks=RequestError("too long")),
        describe=lambda error: f"described {error}",
    )
    assert (found.row.finished, found.row.failed, found.row.status) == (0, 2, "failed")
    assert found.row.detail == "described too long" and found.row.output_tok_s is None


@pytest.fixture(scope="module")
def pressed() -> list[Measured]:
    """Six requests at once, in the memory of three at 16 bits."""
    wanted = plan(
        kvs=("bf16", "auto-2"),
        rates=parse_rates("inf", has_times=False),
        requests=(Arrival(400, 8),) * 6,
        limits={"e2e": 1e9},
        warmup=0,
    )
    nbytes = nbytes_for(read_config(demo_folder()), 3, wanted.num_tokens)
    return list(measure(wanted, lambda kv: Engine(kv=kv, kv_memory=nbytes, max_model_len=408, prefix_caching=False)))


def test_under_pressure_bf16_queues_and_blocks_step_down(pressed: list[Measured]) -> None:
    wide, narrow = (one.row for one in pressed)
    for row in (wide, narrow):
        assert (row.finished, row.failed, row.output_len, row.status) == (6, 0, 8.0, "ok")
        assert row.goodput == row.requests_s and row.output_tok_s == pytest.approx(8 * row.requests_s, rel=1e-3)
        assert row.ttft_ms_p50 <= row.ttft_ms_p90 <= row.ttft_ms_p99 <= row.e2e_ms_p99
        assert row.decode_steps > 0 and row.decode_steps_ms_p50 > 0
        assert 0 < row.kv_bytes_peak <= row.kv_bytes_total
    assert (wide.max_running, wide.demotions, wide.lowest_bits, wide.effective_bits) == (3, 0, 16, 16)
    assert wide.max_waiting >= 3
    assert narrow.max_running > 3 and narrow.demotions > 0 and narrow.lowest_bits < 16 > narrow.effective_bits


def test_the_series_shows_blocks_move_to_lower_rungs(pressed: list[Measured]) -> None:
    wide, narrow = (one.series for one in pressed)
    assert {name for sample in wide for name in sample.blocks} == {"dense16"}
    assert {name for sample in narrow for name in sample.blocks} > {"dense16"}
    for series in (wide, narrow):
        assert series[0].seconds == 0.0 and series[-1].blocks == {} and series[-1].generation_tokens == 48
        assert min(sample.kv_bytes_free for sample in series) < series[-1].kv_bytes_free
        assert [sample.seconds for sample in series] == sorted(sample.seconds for sample in series)


def test_tables_hold_what_was_measured(pressed: list[Measured]) -> None:
    text = "\n".join(map(as_markdown, arrivals_tables([one.row for one in pressed])))
    load, latency, steps = text.split("\n\n| kv")[1:]
    assert "vs bf16" in load and "goodput" in load and "1.00x" in load and "failed" not in load
    assert "TTFT ms p50/p99" in latency and "with a prompt and demotions" in steps
    rows = as_csv([one.row for one in pressed]).splitlines()
    assert len(rows) == 3 and rows[0].count(",") == rows[1].count(",")


@pytest.mark.parametrize(
    ("auto", "shown"),
    [
        ({"max_running": 4, "demotions": 26, "max_waiting": 4}, True),
        ({"max_running": 5, "demotions": 26, "max_waiting": 3}, False),
        ({"max_running": 4, "demotions": 0, "max_waiting": 4}, False),
        ({"max_running": 4, "demotions": 26, "max_waiting": 0}, False),
    ],
)
def test_a_note_says_where_blocks_stepped_down_and_no_more_requests_ran(auto: dict[str, int], shown: bool) -> None:
    known = {"model": "demo", "rate": "6", "requests": 8, "input_len": 124.0, "output_len": 199.0, "status": "ok"}
    rows = [
        ArrivalsRow(kv="bf16", max_running=4, demotions=0, max_waiting=4, **known),
        ArrivalsRow(kv="auto", **auto, **known),
        ArrivalsRow(kv="int4", max_running=4, demotions=9, max_waiting=4, **known),
    ]
    notes = load_table(rows).notes
    assert any("auto: no more requests ran at once: contexts are too short" in note for note in notes) == shown
    assert not any("int4: no more" in note for note in notes)
