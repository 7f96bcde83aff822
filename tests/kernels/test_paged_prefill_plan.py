"""Plan and compiled size of prefill attention: the order of tiles, what each sees, and room for two programs."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.kernels.paged_decode.plan import ABSENT
from qkv_engine.kernels.paged_prefill.plan import PrefillWork

SHARED_NBYTES = 228 << 10  # of a Hopper multiprocessor
RESERVED_NBYTES = 1 << 10  # of each program on it


def test_heaviest_tiles_start_first() -> None:
    """Chunks 0 to 33 and 300 to 340, blocks of 128 tokens after a sink of 32; the second block stands on rung 1."""
    work = PrefillWork.build(
        torch.arange(8).view(2, 4) * 1000,
        torch.tensor([[0, 0, ABSENT, ABSENT], [0, 0, 1, 0]]),
        torch.tensor([0, 300]),
        torch.tensor([33, 40]),
        num_rungs=2,
        tile_tokens=32,
        sink_tokens=32,
        block_tokens=128,
    )
    assert work.tiles.tolist() == [[65, 8, 332], [33, 32, 300], [32, 1, 32], [0, 32, 0]]
    # Rung 0 of the second chunk holds positions 32 and 288; the first lies as if it came just before the other.
    assert work.runs[0].tolist() == [[4, 1, 2, 160], [4, 1, 2, 160], [0, 1, 1, 32], [0, 1, 0, 32]]
    assert work.runs[1, :2].tolist() == [[7, 0, 1, 160]] * 2
    assert work.addresses[4:].tolist() == [4000, 5000, 7000, 6000]
    assert work.rungs == (0, 1) and work.blocks[1].tolist() == [7]


    some = work.of_rows(torch.tensor([72, 31, -1, 31]))
    assert some.tiles.tolist() == [[65, 8, 332], [0, 32, 0]]
    assert some.runs.tolist() == work.runs[:, [0, 3]].tolist() and some.blocks is work.blocks
    assert not len(work.of_rows(torch.tensor([-1, 73])).tiles)
def test_a_run_begins_with_the_first_block_of_a_window() -> None:
    """Tokens 300 to 340 with a window of 130 over blocks of 128 tokens: the first one's entry is not read."""
    work = PrefillWork.build(
        torch.arange(3).view(1, 3) * 1000,
        torch.tensor([[7, 0, 0]]),
        torch.tensor([300]),
        torch.tensor([40]),
        num_rungs=2,
        tile_tokens=32,
        sink_tokens=0,
        block_tokens=128,
        window=130,
    )
    assert work.tiles.tolist() == [[32, 8, 332], [0, 32, 300]]
    assert work.runs[0].tolist() == [[0, 0, 2, 128], [0, 0, 2, 128]]
    assert work.addresses[:2].tolist() == [1000, 2000] and work.blocks[0].tolist() == [0, 1]
    assert work.positions is not None and work.positions[:2].tolist() == [128, 256] and work.rungs == (0,)


@pytest.mark.parametrize("name", ["", " window"])
def test_two_programs_fit_a_multiprocessor(name: str) -> None:
    """A few bytes more and only one does, at two thirds of the speed."""
    pytest.importorskip("triton")
    from studies.kernels.compiled import compile_kernel, compiled_kernels, describe

    cases = {name: case for name, *case in compiled_kernels()}
    found = describe(compile_kernel(*cases[f"prefill dense bf16 D128 G4{name}"]))
    assert 2 * (found["shared"] + RESERVED_NBYTES) <= SHARED_NBYTES
    assert found["spilled"] == 0 and found["registers"] <= 255 and found["HGMMA"] > 0
