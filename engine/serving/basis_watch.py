"""A watch over bases while they serve: measures now and then how far KV is from calibration, and warns once."""

from __future__ import annotations

import logging
import math
import time
from itertools import islice

from ..device.basis_miss import MissMeter, Variances
from ..device.cache import KVCache
from ..device.host_copy import CopyToHost
from ..kv.block import Block

logger = logging.getLogger("qkv_engine")

PERIOD = 1.0  # seconds between two measurements: each is a few small kernels on a GPU, and nothing waits for them
NUM_BLOCKS = 8  # that a measurement reads, spread over the newest: enough that own texts stay below the limit
NEWEST = 64  # graded blocks from which these are taken
# Times the calibrated energy. Of the demo model own tasks come up to 2.1, tasks that a plan fails on mostly above 2.8.
# A lower one warns of texts that come to no harm, a higher one is silent while answers become wrong.
LIMIT = 2.5
LEAST_STEPS = 16  # blocks that step down while the miss stays above the limit, before it is told


class BasisWatch:
    """The miss of an engine's newest graded blocks. For the engine's own thread."""

    def __init__(self, cache: KVCache, meter: MissMeter, plan: str):
        """``plan``: the ladder's name, for the warning."""
        self._cache, self._meter, self._plan = cache, meter, plan
        self._miss: float | None = None
        self._under_way: tuple[CopyToHost, bool] | None = None  # whether it is of enough blocks to warn of
        self._next_at = 0.0  # in seconds of ``time.monotonic()``
        self._num_steps = 0  # steps down to graded rungs, as of the last measurement
        self._above_since: int | None = None  # the same when the miss came above the limit
        self._has_warned = False

    def look(self) -> None:
        """Takes in the measurement before and begins another, once a period if blocks stepped down. Waits for nothing.

        A copy to the host that was begun a period ago is complete.
        """
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + PERIOD
            self._take()
            self._begin()

    def read(self) -> float | None:
        """The latest miss, waiting for its measurement; None as long as there was no graded block."""
        self.look()
        if self._miss is None and self._under_way is None:
            self._begin()
        self._take()
        return self._miss

    def _begin(self) -> None:
        store = self._cache.tables.store
        num_steps = sum(number for (_, new), number in store.num_demotions.items() if new in self._meter.rungs)
        # The books may be ahead of the bytes: moves are carried out with the next step.
        if num_steps == self._num_steps or store.waves:
            return
        blocks = self._newest()
        if blocks:
            self._under_way = self._meter.begin(blocks), len(blocks) == NUM_BLOCKS
            self._num_steps = num_steps

    def _newest(self) -> list[Block]:
        """Graded blocks, evenly spread over the newest."""
        graded = filter(self._meter.is_graded, self._cache.tables.store.newest_blocks())
        newest = list(islice(graded, NEWEST))
        number = min(len(newest), NUM_BLOCKS)
        return [newest[i * len(newest) // number] for i in range(number)]

    def _take(self) -> None:
        """Waits for the measurement under way, if there is one."""
        if self._under_way is None:
            return
        (copy, is_judged), self._under_way = self._under_way, None
        miss = float(copy.wait()[0])
        if math.isfinite(miss):  # the ranges of values that are not finite say nothing
            self._miss = miss
            if is_judged:
                self._judge(miss)

    def _judge(self, miss: float) -> None:
        """Warns once if the miss stays above the limit."""
        if miss <= LIMIT:
            self._above_since = None
            return
        since = self._num_steps if self._above_since is None else self._above_since
        self._above_since = min(since, self._num_steps)  # which counts anew after ``reset_stats``
        if self._num_steps - self._above_since >= LEAST_STEPS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "texts are far from those that %s was made with: the last channels of K and V that it stores vary "
                "%.1f times as much, and answers may suffer above %g. Make a plan with texts like yours: "
                "qkv-engine plan --method spectral --data FILE.jsonl",
                self._plan, miss, LIMIT,
            )  # fmt: skip


def watch_bases(cache: KVCache, variances: Variances | None) -> BasisWatch | None:
    """The watch of a model whose KV has calibrated ``variances``; None without any, or without graded rungs."""
    meter = None if variances is None else MissMeter(cache.memory, cache.ladder, variances)
    return BasisWatch(cache, meter, cache.ladder.name) if meter is not None and meter.rungs else None
