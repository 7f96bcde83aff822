"""``qkv-engine bench --arrivals`` over a fake engine: options, exit codes, files; and once over the real one."""

import json
from pathlib import Path

import pytest

from qkv_engine.cli.bench import arrivals as bench_arrivals
from qkv_engine.cli.main import main

from .test_arrivals import StreamingFake


def use(monkeypatch: pytest.MonkeyPatch, *breaks: BaseException | None) -> None:
    """Engines of which each breaks as told, the last one for ever."""
    opened = iter(breaks[:-1])
    last = breaks[-1] if breaks else None
    monkeypatch.setattr(bench_arrivals, "_open_engine", lambda args, plan, kv: StreamingFake(breaks=next(opened, last)))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--arrivals 0", "--arrivals='0'"),
        ("--arrivals=-1", "--arrivals='-1'"),
        ("--arrivals nan", "--arrivals='nan'"),
        ("--arrivals 4,x", "--arrivals='x'"),
        ("--arrivals trace", "--arrivals='trace'"),
        ("--arrivals 4 --requests 0", "--requests=0"),
        ("--arrivals 4 --warmup -1", "--warmup=-1"),
        ("--arrivals 4 --goodput tpot", "--goodput='tpot'"),
        ("--arrivals 4 --goodput ttft:-5", "--goodput='ttft:-5'"),
        ("--arrivals 4 --input-len 9..3", "--input-len='9..3'"),
        ("--arrivals 4 --output-len 0", "--output-len='0'"),
        ("--arrivals 4 --input-len 9000", "--input-len + --output-len=9128"),
        ("--arrivals 4 --batch-sweep 2", "--batch-sweep='2'"),
        ("--arrivals 4 --repeats 2", "--repeats=2"),
        ("--arrivals 4 --task ledger --input-len 4", "--input-len=4"),
        ("--arrivals 4 --task ledger --trace x", "--task='ledger'"),
        ("--arrivals 4 --task ledger:2,lookup:2", "--task='ledger:2,lookup:2'"),
        ("--arrivals 4 --task poetry", "--task='poetry'"),
        ("--arrivals 4 --trace /nowhere", "--trace='/nowhere'"),
        ("--arrivals 4 --trace x --output-len 4", "--output-len=4"),
        ("--arrivals 4 --timeline x.csv", "--timeline='x.csv'"),
        ("--arrivals 4 --timeline /nowhere/x.jsonl", "--timeline='/nowhere/x.jsonl'"),
        ("--arrivals 4 --kv-memory 0x", "--kv-memory='0x'"),
        ("--requests 4", "--requests=4"),
        ("--goodput ttft:4", "--goodput='ttft:4'"),
        ("--trace x", "--trace='x'"),
        ("--timeline x.jsonl", "--timeline='x.jsonl'"),
        ("--input-len 4..8", "--input-len='4..8'"),
    ],
)
def test_mistakes_name_the_option(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"error: {named}: " in err and len(err.splitlines()) == 1


def test_a_trace_line_beyond_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 8000, "output_length": 193}\n')
    assert main(["bench", "--arrivals", "inf", "--trace", str(path)]) == 2
    assert "line 1 8,000 + 193 tokens are more than the context of 8,192" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("breaks", "code", "statuses"),
    [
        ([None], 0, ["ok", "ok"]),
        ([RuntimeError("broken"), None], 1, ["failed", "ok"]),
        ([None, KeyboardInterrupt()], 130, ["ok"]),
    ],
)
def test_exit_codes_and_the_rows_there_are(
    breaks: list[BaseException | None],
    code: int,
    statuses: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(monkeypatch, *breaks)
    words = ["--arrivals", "inf", "--requests", "3", "--kv", "bf16,auto", "-o", "json", "--goodput", "ttft:1000,e2el:5"]
    assert main(["bench", *words]) == code
    rows = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in rows] == statuses
    assert (rows[-1]["kv"], rows[-1]["requests"], rows[-1]["limits"]) == (
        ["bf16", "auto"][len(rows) - 1],
        3,
        "ttft:1000,e2e:5",
    )


def test_a_trace_with_its_own_times_and_all_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch)
    trace = tmp_path / "t.csv"
    moment = "2023-11-16 18:17:03.9"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{moment}0,30,2\n{moment}1,10,2\n{moment}2,90,2\n")
    rows, plot, series = (tmp_path / name for name in ("rows.csv", "plot.png", "series.jsonl"))
    words = ["--arrivals", "trace", "--trace", trace, "--requests", "2", "--kv", "auto"]
    words += ["--output", rows, "--plot", plot, "--timeline", series]
    assert main(["bench", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "qkv-engine: 1 of 1: auto, at the times of the trace"
    assert err.splitlines()[-1] == f"qkv-engine: wrote 1 row to {rows}, a timeline to {series}, a plot to {plot}"
    assert "2 requests · 20 in, 2 out" in out and plot.read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(line) for line in series.read_text().splitlines()]
    assert {(one["kv"], one["rate"]) for one in samples} == {("auto", "trace")}
    assert samples[0]["seconds"] == 0 and "blocks" in samples[0] and "kv_bytes_free" in samples[0]


def test_questions_with_the_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--arrivals", "50", "--requests", "4", "--task", "lookup:10", "--kv", "bf16", "--warmup", "0"]
    assert main(["bench", *words, "--kv-memory", "2x", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["task"], row["rate"], row["finished"], row["right"]) == ("lookup 10", "50", 4, 4)
    assert row["max_running"] <= 2 and 0 < row["output_len"] < 40 and row["model"] == "demo"
