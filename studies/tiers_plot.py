"""Where cached blocks stand while conversations come back, in three tiers: ``python -m studies.tiers_plot``.

The books of ``studies.sessions`` with a disk behind host memory, which writes at once and reads within a step.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from qkv_engine.bench.files import write_file
from qkv_engine.bench.plots.panels import COLORS, GREY
from qkv_engine.bench.plots.picture import as_file, new_figure, plain_axes, require_matplotlib
from qkv_engine.kv.host_piece import HostPiece
from qkv_engine.kv.host_tier import HostTier
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.prefix import PrefixCache
from qkv_engine.kv.table import BlockTables

from .sessions import LOADS, RUNGS, Load, Run

LOAD: Final = LOADS[1]  # memory for 3 of 20 conversations
HOST_MEMORY: Final = 1.0  # times KV memory
EVERY: Final = 25  # steps between two samples
SIZE: Final = (10.0, 6.4)  # inches
PICTURE: Final = Path("docs/images/tiers.png")


class Done:
    """A job of a disk that takes no time; see ``kv.disk.DiskJob``."""

    is_over, is_overdue = True, False

    def __init__(self, has_come: bool):
        self.has_come = has_come


class BooksDisk:
    """Pieces by key, without their bytes; implements ``kv.disk.Disk``."""

    can_write = True

    def __init__(self) -> None:
        self.pieces: dict[bytes, dict[int, int]] = {}
        self.nbytes = 0

    def rungs(self, key: bytes) -> Mapping[int, int]:
        return self.pieces.get(key, {})

    def lacks(self, key: bytes, rungs: Mapping[int, int]) -> bool:
        mine = self.rungs(key)
        return mine != rungs and all(group in rungs and rungs[group] <= rung for group, rung in mine.items())

    def has_room(self, nbytes: int) -> bool:
        return True

    def write(self, piece: HostPiece) -> Done:
        self.nbytes += sum(copy.slot.nbytes for copy in piece.held())
        self.pieces[piece.key] = {copy.group: copy.rung for copy in piece.held()}
        return Done(False)

    def read(self, piece: HostPiece) -> Done:
        return Done(True)

    def forget(self, key: bytes) -> None:
        self.pieces.pop(key, None)

    def let_age(self, key: bytes) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        return True


class Tiers(Run):
    """A load on three tiers. ``samples``: bytes by what they are of, and the step."""

    def make_space(self, tables: BlockTables) -> KVManager:
        arena, self.disk, self.samples = tables.arena, BooksDisk(), list[tuple[int, Counter[str]]]()
        self.host = self.tier = HostTier(tables.spec, int(HOST_MEMORY * arena.nbytes), arena.slab_nbytes)
        return KVManager(tables, PrefixCache(tables, "model", self.host, self.disk))

    def _advance(self) -> None:
        super()._advance()
        self.space.ended(self.space.num_commands)  # nothing takes time here
        if self.step >= EVERY * len(self.samples):
            self.samples += [(self.step, self._sample())] * (self.step // EVERY + 1 - len(self.samples))

    def _sample(self) -> Counter[str]:
        found = Counter[str]({"host": self.host.arena.used_nbytes, "disk": self.disk.nbytes})
        for block in self.space.tables.store.live_blocks():
            kind = "used" if block.holders else f"cached {RUNGS[max(0, block.rung)].name}"
            found[kind] += block.slot.nbytes
        return found


def draw(run: Tiers) -> bytes:
    """The picture of a run, a .png: KV memory by what it holds, host memory and disk below."""
    figure = new_figure(SIZE, 150)
    axes: Sequence = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))  # type: ignore[type-arg]
    steps = [step for step, _ in run.samples]
    kinds = ["used", *(f"cached {rung.name}" for rung in RUNGS)]
    parts = [[sample[kind] / 2**20 for _, sample in run.samples] for kind in kinds]
    labels = ["of requests that run", *(f"cached, {rung.name}" for rung in RUNGS)]
    axes[0].stackplot(steps, *parts, labels=labels, colors=[GREY, *COLORS], linewidth=0)
    total = run.space.tables.arena.nbytes / 2**20
    axes[0].axhline(total, color="black", linewidth=1, linestyle="--", label="KV memory")
    axes[0].set_ylabel("KV memory, MiB")
    axes[0].legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    for axis, kind, name in ((axes[1], "host", "host memory, MiB"), (axes[2], "disk", "written to disk, MiB")):
        axis.fill_between(steps, [sample[kind] / 2**20 for _, sample in run.samples], color=COLORS[0], linewidth=0)
        axis.set_ylabel(name)
    axes[1].axhline(run.host.arena.nbytes / 2**20, color="black", linewidth=1, linestyle="--")
    axes[2].set_xlabel("steps")
    for axis in axes:
        plain_axes(axis)
    load = run.load
    title = f"{load.conversations} conversations of {load.turns} turns, KV memory for {load.memory_for:g} at 16 bits"
    figure.suptitle(title, fontsize="medium", fontweight="bold")
    return as_file(figure, "png")


def main(argv: Sequence[str] | None = None, load: Load = LOAD) -> int:
    """Writes the picture and prints what was computed again; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.tiers_plot", description=__doc__)
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    require_matplotlib()
    run = Tiers(load, "three tiers")
    row = run.finish()
    write_file(args.output, draw(run))
    print(f"known {row.known:,}, found {row.hits:,}, computed again {row.recomputed:,}, {row.steps:,} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
