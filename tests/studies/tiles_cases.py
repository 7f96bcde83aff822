"""Changed launches of ``studies/kernels/bench_tiles.py`` at small sizes for Triton's interpreter: their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from studies.kernels import bench_tiles
from studies.kernels.bench_tiles import WEIGHTS, attention, compare, compared
from tests.kernels.interpreted import report

SMALL = {
    "WEIGHTS": {name: (num_out // 128, 128 * (size // 1024)) for name, (num_out, size) in WEIGHTS.items()},
    "RUNS": 2,
    "TURNS": 1,
    "CONTEXT": 700,
    "ITEMS": {2: (2, 3)},
    "copies": lambda make, nbytes: [make(), make()],
}


def counted(calls: Sequence[Callable[[], Any]]) -> float:
    """Runs one call; as many seconds as there are."""
    calls[0]()
    return float(len(calls))


def error(find: Callable[[], bench_tiles.Found], kind: str = bench_tiles.BF16) -> float:
    """Of what ``find`` gives, in units of what is allowed."""
    with patch.multiple(bench_tiles, time_calls=counted, **SMALL):
        return find().error / bench_tiles.MAX_ERRORS[kind]


def cases() -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {"attention": lambda: error(lambda: attention(2))}
    for case in compared():
        name = f"{case.what} {case.kind} {case.weight} {case.num_rows}"
        found[name] = lambda c=case: error(lambda: compare(c), c.kind)  # type: ignore[misc]
    return found


if __name__ == "__main__":
    report(cases())
