"""Requests with a bank of patterns, alone or behind other slots: every invariant, as elsewhere."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from .options import LADDERS, Options, draw
from .patch import Patch
from .simulator import Simulation
from .spy import Broken
from .test_many_rungs import LADDERS as LONG_LADDERS
from .test_simulator import describe, swarm

# A bug, and a seed that shows it.
BUGS = (
    (Patch("a bank is mined again", "bank", "Bank.mine", "self.is_mined", "False"), 601),
    (Patch("a bank is not mined", "bank", "Bank.mine", "self.is_mined", "True"), 601),
    (
        Patch(
            "a bank is mined from what is not computed",
            "bank",
            "Bank.mine",
            "num_tokens = min(max(self.num_prompt_tokens, self.block_tokens), self.num_computed_tokens)",
            "num_tokens = min(max(self.num_prompt_tokens, self.block_tokens), 10 ** 6)",
        ),
        602,
    ),
    (
        Patch(
            "a bank is mined from the output, too",
            "bank",
            "Bank.mine",
            "num_tokens = min(max(self.num_prompt_tokens, self.block_tokens), self.num_computed_tokens)",
            "num_tokens = self.num_computed_tokens",
        ),
        601,
    ),
    (
        Patch(
            "a short prompt is mined alone",
            "bank",
            "Bank.mine",
            "num_tokens = min(max(self.num_prompt_tokens, self.block_tokens), self.num_computed_tokens)",
            "num_tokens = min(self.num_prompt_tokens, self.num_computed_tokens)",
        ),
        600,
    ),
    (
        Patch(
            "the output counts as prompt after a preemption",
            "manager",
            "KVManager.open",
            "self.tables.open(request.request_id, floor, shared, num_prompt_tokens=request.num_prefill_tokens)",
            "self.tables.open(request.request_id, floor, shared, num_prompt_tokens=request.num_tokens)",
        ),
        601,
    ),
    (
        Patch(
            "a prompt begins in the sink",
            "table",
            "BlockTables.reserve",
            "in_blocks = table.num_prompt_tokens - self.group.sink",
            "in_blocks = table.num_prompt_tokens",
        ),
        605,
    ),
    (
        Patch(
            "windows begin in the prompt",
            "bank",
            "Bank._first_window",
            "return max(1, self.num_prompt_tokens // self.block_tokens)",
            "return max(1, 0)",
        ),
        601,
    ),
    (Patch("a window adds no pattern", "bank", "Bank.add_centres", "num_windows <= self.num_windows", "True"), 601),
    (
        Patch(
            "a window adds its pattern again",
            "bank",
            "Bank.add_centres",
            "first, self.num_windows = (self.num_windows, num_windows)",
            "first, _ = (self.num_windows, num_windows)",
        ),
        605,
    ),
    (
        Patch(
            "a window has no pattern of its own",
            "bank",
            "Bank.windows_until",
            "return min(max(0, self.blocks.index(block) + 1 - self._first_window), self.most_windows)",
            "return min(max(0, self.blocks.index(block) - self._first_window), self.most_windows)",
        ),
        601,
    ),
    (
        Patch(
            "windows add patterns without end",
            "bank",
            "Bank.windows_until",
            "return min(max(0, self.blocks.index(block) + 1 - self._first_window), self.most_windows)",
            "return min(max(0, self.blocks.index(block) + 1 - self._first_window), 10 ** 6)",
        ),
        605,
    ),
    (
        Patch(
            "all windows so far are open to a block",
            "bank",
            "Bank.windows_until",
            "return min(max(0, self.blocks.index(block) + 1 - self._first_window), self.most_windows)",
            "return min(max(0, len(self.blocks) - self._first_window), self.most_windows)",
        ),
        601,
    ),
    (
        Patch(
            "blocks under patterns are shared",
            "manager",
            "KVManager.__init__",
            "self.prefix = None if self.group.has_bank else prefix",
            "self.prefix = prefix",
        ),
        601,
    ),
)


def with_bank(options: Options) -> Options:
    """The same options with patterns and rungs to seal on, sometimes many, and the slabs that slots begin."""
    rng = random.Random(options.seed)
    sizes = rng.choice([sizes for sizes in LADDERS if len(sizes) > 1] + [*LONG_LADDERS[:2]])
    slots = tuple(rng.choice((1, 3, *sizes)) for _ in range(rng.randint(1, 2)))
    least = 2 + len(sizes) + (options.sink > 0)
    num_windows = random.Random(f"windows {options.seed}").choice((0, 1, 3, 100))  # the other draws stay as they were
    return replace(
        options, sizes=sizes, slabs=max(options.slabs, least) + len(slots), other_slots=slots,
        has_bank=True, num_windows=num_windows,
        admit_at=rng.choice((len(sizes) - 1, rng.randrange(len(sizes)))), eager=rng.random() < 0.5,
    )  # fmt: skip


def check(report: list[str], seeds: range, num_events: int) -> None:
    started = time.monotonic()
    total, digest = swarm(seeds, num_events, with_bank)
    report.append(f"{total['mined']:,} banks mined; " + describe(seeds, total, digest, time.monotonic() - started))
    assert not total["hit"]
    for kind in ("mined", "demotion", "copy", "preempted", "recover", "refused", "end of"):
        assert total[kind], f"the loads show no {kind}"


def test_banks_keep_every_invariant(report: list[str]):
    check(report, range(610, 640), 400)


@pytest.mark.slow
def test_banks_for_long(report: list[str]):
    check(report, range(2000, 2500), 500)


@pytest.mark.parametrize(("bug", "seed"), BUGS, ids=lambda value: value.name if isinstance(value, Patch) else "")
def test_a_seeded_bug_is_found(bug: Patch, seed: int):
    simulation = Simulation(with_bank(draw(seed)), bug)
    with pytest.raises(Broken):
        simulation.run(400)
