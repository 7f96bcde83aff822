"""Traces of Mooncake and Azure: lengths and times, and the line of what is wrong."""

from pathlib import Path

import pytest

from qkv_engine.bench.traces import Arrival, read_trace
from qkv_engine.errors import ConfigError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def read(folder: Path, name: str, text: str | bytes, *, limit: int = 10, context: int | None = 4096) -> list[Arrival]:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path, limit=limit, context=context)


def test_mooncake_counts_from_the_first_request_and_passes_other_fields_over(tmp_path: Path) -> None:
    lines = '{"timestamp": 3000, "input_length": 7, "output_length": 2, "hash_ids": [1]}\n\n'
    lines += '{"timestamp": 1500, "input_length": 9, "output_length": 4}\n'
    assert read(tmp_path, "t.jsonl", lines) == [Arrival(9, 4, 0.0), Arrival(7, 2, 1.5)]


def test_times_may_be_missing(tmp_path: Path) -> None:
    assert read(tmp_path, "t.jsonl", '{"input_length": 7, "output_length": 2}') == [Arrival(7, 2, None)]
    assert read(tmp_path, "t.csv", "ContextTokens,GeneratedTokens\n7,2\n") == [Arrival(7, 2, None)]


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azure_has_dates_with_seven_decimals(zone: str, tmp_path: Path) -> None:
    text = HEADER + f"2023-11-16 18:17:03.9799600{zone},4808,10\r\n2023-11-16 18:17:04.2299600{zone},110,27\r\n"
    first, second = read(tmp_path, "t.csv", "\ufeff" + text, context=8192)
    assert first == Arrival(4808, 10, 0.0)
    assert second[:2] == (110, 27) and second.seconds == pytest.approx(0.25)


def test_only_the_first_lines_are_looked_at(tmp_path: Path) -> None:
    assert len(read(tmp_path, "t.jsonl", '{"input_length": 7, "output_length": 2}\n' * 2 + "nonsense", limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", "", "no requests"),
        ("t.csv", HEADER, "no requests"),
        ("t.jsonl", "7", "line 1 is no request: Expected `object`"),
        ("t.jsonl", '\n{"input_length": 7}', "line 2 is no request: .*output_length"),
        ("t.jsonl", '{"input_length": -7, "output_length": 2}', "line 1 .*>= 1.*input_length"),
        ("t.jsonl", '{"input_length": 7, "output_length": 0}', "line 1 .*>= 1.*output_length"),
        ("t.jsonl", '{"input_length": 7, "output_length": 2, "timestamp": -1}', "line 1 .*timestamp"),
        ("t.jsonl", "[" * 100_000, "line 1 is no request"),
        ("t.jsonl", '{"input_length": 4000, "output_length": 97}', r"line 1 4,000 \+ 97 tokens .* context of 4,096"),
        (
            "t.jsonl",
            '{"input_length": 7, "output_length": 2, "timestamp": 0}\n{"input_length": 7, "output_length": 2}',
            "line 2 only some lines have a time",
        ),
        ("t.jsonl", b'{"input_length": 7, "output_length": 2}\n\xff', "line 2 is no text in UTF-8"),
        ("t.csv", "when,ContextTokens\n", "line 1 has no column GeneratedTokens"),
        ("t.csv", HEADER + "2023-11-16 18:17:03,7,2\n2023-11-16 18:17:03,-7,2\n", "line 3 ContextTokens is '-7'"),
        ("t.csv", HEADER + "yesterday,7,2\n", "line 2 TIMESTAMP is 'yesterday'"),
        ("t.csv", HEADER + "2023-11-16 18:17:03,7\n", "line 2 GeneratedTokens is None"),
        ("t.csv", HEADER + '"' + "x" * 200_000, "line 2 is no CSV"),
    ],
)
def test_mistakes_name_the_file_and_the_line(name: str, text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, name, text)
    assert caught.value.field == "trace" and caught.value.value == str(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace=.*cannot be read"):
        read_trace(tmp_path / "none", limit=1, context=None)
