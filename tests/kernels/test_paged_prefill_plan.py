"""Plan and compiled size of prefill attention: the order of tiles, what each sees, and room for two programs."""

from __future__ import annotations

import random

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


def make_tables(rng: random.Random, sink: int) -> tuple[list[int], list[int], list[list[int]]]:
    """Starts and counts of a few chunks, and the rungs, out of three, of their entries, some ``ABSENT``."""
    starts = [rng.choice((0, rng.randrange(700))) for _ in range(3)]
    counts = [rng.randint(1, 200) for _ in starts]
    width = max((start + count - 1) // 64 for start, count in zip(starts, counts, strict=True)) + 2
    rungs = []
    for start, count in zip(starts, counts, strict=True):
        row = list[int]()
        for entry in range(width):
            first, end = borders(entry, sink)
            own = 0 if end > start else rng.randrange(3)
            row.append(ABSENT if first >= start + count else 0 if sink and not entry else own)
        rungs.append(row)
    return starts, counts, rungs


def borders(entry: int, sink: int) -> tuple[int, int]:
    """The first token of an entry of 64 tokens, behind a sink if there is one, and the one behind its last."""
    if sink and not entry:
        return 0, sink
    first = sink + (entry - bool(sink)) * 64
    return first, first + 64


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sink", [0, 32])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_each_tile_sees_what_it_should(seed: int, sink: int, window: int | None) -> None:
    """Its runs, entry by entry: the address of each lies there, and the others come behind one another."""
    starts, counts, rungs = make_tables(random.Random(seed), sink)
    width = len(rungs[0])
    addresses = torch.arange(3 * width).view(3, width)
    work = PrefillWork.build(
        addresses,
        torch.tensor(rungs),
        torch.tensor(starts),
        torch.tensor(counts),
        num_rungs=3,
        tile_tokens=16,
        sink_tokens=sink,
        block_tokens=64,
        window=window,
    )
    rows = [sum(counts[:chunk]) for chunk in range(3)]
    assert sum(work.tiles[:, 1].tolist()) == sum(counts)
    for number, (row, tokens, first) in enumerate(work.tiles.tolist()):
        chunk = max(each for each in range(3) if rows[each] <= row)
        assert first == starts[chunk] + row - rows[chunk]
        least = 0 if window is None else max(0, first + 1 - window)
        for rung, (start, sinks, others, position) in enumerate(work.runs[:, number].tolist()):
            seen = [
                entry
                for entry in range(width)
                if rungs[chunk][entry] == rung
                and borders(entry, sink)[0] < first + tokens
                and borders(entry, sink)[1] > least
            ]
            found = work.addresses[start : start + sinks + others].tolist()
            assert found == [chunk * width + entry for entry in seen]
            assert sinks == sum(bool(sink) and not entry for entry in seen)
            full = sum(borders(entry, sink)[1] <= first + 1 for entry in seen if entry or not sink)
            assert position == sink + max(0, first + 1 - sink) // 64 * 64 - 64 * full


@pytest.mark.parametrize("name", ["", " window"])
def test_two_programs_fit_a_multiprocessor(name: str) -> None:
    """A few bytes more and only one does, at two thirds of the speed."""
    pytest.importorskip("triton")
    from studies.kernels.compiled import compile_kernel, compiled_kernels, describe

    cases = {name: case for name, *case in compiled_kernels()}
    found = describe(compile_kernel(*cases[f"prefill dense bf16 D128 G4{name}"]))
    assert 2 * (found["shared"] + RESERVED_NBYTES) <= SHARED_NBYTES
    assert found["spilled"] == 0 and found["registers"] <= 255 and found["HGMMA"] > 0
