"""The parts that time a GPU: figures and their targets, a file that is gone on with, and parts tried on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from studies import gpu_check
from studies.gpu_check import PARTS, Figure, line, main
from studies.gpu_steps import Machine
from tests.kernels.interpreted import run_cases

CPU = Machine("cpu", is_tiny=True)
KERNELS = ("spectral-kernel", "windows-kernel", "tiles")
ON_CPU = [name for name in PARTS if name not in KERNELS and not name.startswith("tests-")]


@pytest.mark.parametrize(
    ("figure", "holds", "said"),
    [
        (Figure("a step", 2.0, "ms", 2.2), True, "a step: 2 ms, at most 2.2: holds"),
        (Figure("a step", 2.3, "ms", 2.2), False, "a step: 2.3 ms, at most 2.2: MISSED"),
        (Figure("gain", 5.3, "times", 5.2, most=False), True, "gain: 5.3 times, at least 5.2: holds"),
        (Figure("gain", 5.1, "times", 5.2, most=False), False, "gain: 5.1 times, at least 5.2: MISSED"),
        (Figure("rate", 40.0, "GB/s"), None, "rate: 40 GB/s"),
    ],
)
def test_a_figure_says_whether_its_target_holds(figure: Figure, holds: bool | None, said: str):
    assert figure.holds is holds and line(figure) == said


def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ran, output = list[str](), tmp_path / "rows.jsonl"

    def part(name: str, value: float) -> gpu_check.Part:
        def figures(machine: Machine) -> Iterator[Figure]:
            ran.append(name)
            yield Figure(name, 1.0, "ms", 2.0)
            if value > 9:
                raise KeyboardInterrupt
            yield Figure(name, value, "ms", 2.0)

        return figures

    monkeypatch.setattr(gpu_check, "PARTS", {"a": part("a", 1.0), "b": part("b", 10.0), "c": part("c", 3.0)})
    words = ["--output", str(output), "--device", "cpu"]
    with pytest.raises(KeyboardInterrupt):
        main(words)
    assert {json.loads(row)["part"] for row in output.read_text().splitlines()} == {"a"}, "a whole part or nothing"
    assert main([*words, "--parts", "a,c"]) == 1 and ran == ["a", "b", "c"]
    rows = [json.loads(row) for row in output.read_text().splitlines()]
    assert [(row["part"], row["value"], row["holds"]) for row in rows[2:]] == [("c", 1.0, True), ("c", 3.0, False)]
    assert "MISSED" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--parts", "a,d"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_parts_run_with_tiny_shapes(name: str):
    figures = list(PARTS[name](CPU))
    assert figures and all(figure.value >= 0 or figure.unit in ("%", "GB more") for figure in figures)


@pytest.mark.slow
def test_changed_launches_are_compared():
    """As the part ``tiles`` compares them, at small sizes."""
    figures = run_cases(Path(__file__).with_name("tiles_cases.py"))
    assert len(figures) == 53 and all(isinstance(error, float) and error <= 1 for error in figures.values())


@pytest.mark.slow
def test_launches_of_delta_nets_agree():
    """As ``bench_states`` times them, at small sizes."""
    figures = run_cases(Path(__file__).with_name("states_cases.py"))
    assert len(figures) == 2 and all(isinstance(error, float) and error < 2**-6 for error in figures.values()), figures


def test_each_file_of_gpu_tests_is_a_part():
    assert {"tests-kernels", "tests-resize", "tests-bases"} <= set(PARTS)
