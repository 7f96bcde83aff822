"""Free memory under pressure: little, at any size, and more requests than at 16 bits."""

from __future__ import annotations

import pytest

from studies.free_memory import LENGTHS, free_table, measure


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mib", [12, 48])
def test_at_most_12_percent_are_free_while_a_block_stands_below_16_bits(mib: int, lengths: tuple[int, int]) -> None:
    row = measure(mib * 2**20, lengths, 600, "auto")
    assert row.demotions > 0 and row.free_percent is not None and row.free_percent < 12
    assert row.low_steps > 0 and free_table([row]).cells[0][0] == f"{mib}.0 MiB"


def test_more_requests_run_at_once_than_at_16_bits() -> None:
    wide, narrow = (measure(24 * 2**20, LENGTHS[0], 600, kv) for kv in ("bf16", "auto"))
    assert wide.free_percent is None and narrow.mean_running > 1.5 * wide.mean_running
