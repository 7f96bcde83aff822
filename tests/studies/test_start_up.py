"""The study of starts, on the CPU, where nothing is captured."""

import pytest

from studies.start_up import main


def test_a_start_and_loads_of_rising_size_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    options = "--kv int4 --kv-memory 16MiB --requests 2 --input-len 8 --output-len 3 --max-model-len 512"
    monkeypatch.setattr("sys.argv", ["start_up", *options.split()])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ready in ") and lines[-1] == "0 graphs captured under load"
    assert [line.split(" requests")[0].strip() for line in lines[-3:-1]] == ["1", "2"]
