"""Requests that decode at a context without computed prompts: random KV fills memory, the rest is the engine.

The scheduler, its pressure, the block tables, seals and demotions, the runner and the sampler are the engine's own;
only the prompts' K and V are random numbers. A prompt is found where a cached prefix would be found, when its request
is admitted, and its blocks stand on the rungs on which the ladder's policy puts them at that moment.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from qkv_engine.closable import Closable
from qkv_engine.config import BLOCK_TOKENS
from qkv_engine.device.cpu.threads import computing_with
from qkv_engine.errors import QKVError
from qkv_engine.kv.manager import KVManager
from qkv_engine.serving.snapshot import take_snapshot
from qkv_engine.serving.submission import Submission
from qkv_engine.startup import start

from .runs import greedy

if TYPE_CHECKING:
    from qkv_engine.config import EngineConfig
    from qkv_engine.device.cache import KVCache
    from qkv_engine.device.runner import Runner
    from qkv_engine.kv.arena import Slot
    from qkv_engine.metrics import EngineStats
    from qkv_engine.request import Request
    from qkv_engine.serving.core import EngineCore

PIECE_TOKENS = 32 * BLOCK_TOKENS  # of a prompt filled at once, on the widest rung
NUM_PATTERNS = 8  # different blocks of random numbers, used in turn
MAX_SETTLING = 4096  # rounds of pressure at most, each of which steps a few blocks down
PROMPT_TOKEN = 5  # any id: prompts are not computed


class FilledManager(KVManager):
    """KV memory that finds all of every prompt but the last token, as if the prefix cache held it.

    Prompts take room and step down exactly as if they were computed: widest rung first, under the pressure of the
    scheduler; with an eager ladder, what is older than the recent window goes to its floor.
    """

    def __init__(self, core: EngineCore, patterns: torch.Tensor):
        super().__init__(core.runner.cache.tables, None)
        self._core, self._patterns = core, patterns

    def admits(self, request: Request) -> bool:
        """Always true: the batch was sized by the cache's own admission."""
        return True

    def open(self, request: Request) -> int:
        super().open(request)
        scheduler, wanted = self._core.scheduler, request.num_tokens - 1
        scheduler.running.add(request)  # so that its own older blocks may give way to its newer ones
        try:
            filled = 0
            while filled < wanted:
                scheduler.pressure.forget()
                self.trim(request)
                end = scheduler.pressure.stretch(request, min(wanted, filled + PIECE_TOKENS))
                if end <= filled:
                    break
                self._fill(request, filled, end)
                request.num_computed_tokens = filled = end
            if self.is_eager:
                self.demote([(block, block.floor) for block, age in self.unsettled(request) if age >= 0])
        finally:
            scheduler.running.remove(request)
        return filled

    def _fill(self, request: Request, start: int, end: int) -> None:
        """Random K and V for the blocks that begin at tokens ``start .. end``, and for the request's slots.

        States are zeros.
        """
        apply_moves(self._core.runner)
        for group in self.tables.groups:
            table = group[request.request_id]
            first, last = (group.spec.blocks_for(n) - table.first for n in (start, end))
            for block in table.blocks[max(0, first) : last]:
                self._write(block.slot)
            for block in () if start else table.slots:
                if group.spec.slot_of(block.rung).is_state:
                    self._bytes(block.slot).zero_()
                else:
                    self._write(block.slot)

    def _write(self, slot: Slot) -> None:
        pattern = self._patterns[slot.address // slot.nbytes % len(self._patterns)]
        self._bytes(slot).copy_(pattern[: slot.nbytes])

    def _bytes(self, slot: Slot) -> torch.Tensor:
        return self._core.runner.cache.memory[slot.address : slot.address + slot.nbytes]


class FilledEngine(Closable):
    """An engine stepped by hand, whose prompts are filled.

    Raises ``ConfigError``, ``ModelError`` or ``CapacityError`` as an ``Engine`` of these options does.
    """

    def __init__(self, config: EngineConfig):
        self.started = start(config)
        self._patterns = random_blocks(self.cache, self.started.device)
        self._submissions: list[Submission] = []
        self._is_closed = False
        self._threads = ExitStack()
        if self.started.device.type == "cpu":
            self._threads.enter_context(computing_with(self.started.threads.number))
        self.core.recovery.make_space = lambda: FilledManager(self.core, self._patterns)
        self.core.recover()
        self._stats = take_snapshot(self.started)

    @property
    def core(self) -> EngineCore:
        """Scheduler, runner and counters."""
        return self.started.core

    @property
    def cache(self) -> KVCache:
        """KV memory."""
        return self.core.runner.cache

    @property
    def running(self) -> list[Request]:
        """The requests that decode."""
        return list(self.core.scheduler.running)

    def begin(self, prompt_lens: Sequence[int], num_tokens: int) -> None:
        """Submits greedy requests that end with ``num_tokens`` tokens in memory, and steps until all decode at once.

        Counters and the peak of KV memory begin there. Raises ``QKVError`` if the requests never all decode at once.
        """
        for index, length in enumerate(prompt_lens):
            self._submit(f"bench-{index}", length, num_tokens - length + 1)  # the last token sampled is never stored
        while True:
            self.core.step()
            self._check()
            if not self.core.scheduler.waiting and all(r.num_output_tokens for r in self.core.scheduler.running):
                break
            if self.core.scheduler.num_preemptions:
                raise QKVError("requests were preempted: the batch does not fit at once")
        self._settle()
        gc.collect()  # garbage of the prompts must not be collected in the timed steps
        self.core.reset_counters()  # KV of the prompts at their widest is not the steps' peak
        self._stats = take_snapshot(self.started)

    def end(self) -> None:
        """Ends all requests and gives their blocks back."""
        for submission in self._submissions:
            self.core.abort(submission.request_id)
        self._submissions.clear()
        while self.core.has_work:  # a step may still be under way
            self.core.step()
        self.core.reset_counters()

    def close(self) -> None:
        """Frees model and KV memory, for the next preset."""
        if self._is_closed:
            return
        self._is_closed = True
        self._threads.close()
        self.core.free()
        del self._patterns
        gc.collect()
        if self.started.device.type == "cuda":
            torch.cuda.empty_cache()

    def stats(self) -> EngineStats:
        """Memory and counters after the last steps that were timed; for any thread."""
        return self._stats

    def seconds_per_step(self, number: int) -> float:
        """The mean over ``number`` steps behind one another, without the first one; of a lone step its own.

        The first one waits for the host, which prepares all others while the device works.
        """
        self._wait()
        start, timed = time.perf_counter(), number
        num_calls = 1 + self.core.runs_ahead  # until the first step has ended
        for call in range(1, number + 1):
            self.core.step()
            if call == num_calls and number > 1:
                start, timed = time.perf_counter(), number - 1
        self._wait()
        seconds = time.perf_counter() - start
        self._check()
        self._stats = take_snapshot(self.started)
        return seconds / timed

    def kv_nbytes_read(self) -> int:
        """Bytes of KV that the next step's attention reads: all blocks in sight as far as they are written.

        Codes that two layers share are read by both.
        """
        total = 0
        for group, tables in zip(self.cache.ladder.groups, self.cache.tables.groups, strict=True):
            again = [sum(s.dominant.codes_nbytes for s in r.layout.sides if s.dominant) for r in group.rungs]
            for request in self.core.scheduler.running:
                table, held = tables[request.request_id], tables.held(request.request_id)
                unwritten = (held - request.num_computed_tokens) * group.widest.block_nbytes // BLOCK_TOKENS
                total += sum(block.slot.nbytes for block in table) - unwritten
                total += sum(again[block.rung] for block in table.blocks)
        return total

    def _submit(self, name: str, prompt_len: int, max_tokens: int) -> None:
        params = greedy(max_tokens)
        ids, floor = [PROMPT_TOKEN] * prompt_len, self.cache.ladder.last
        submission = Submission(name, None, ids, params, max_tokens, 0, [], False, floor=floor)
        self._submissions.append(submission)
        self.core.live[submission.request_id] = submission
        self.core.add(submission)

    def _check(self) -> None:
        """Raises ``QKVError`` if a request has ended, with its error if it failed."""
        for submission in self._submissions:
            if submission.request_id not in self.core.live:
                raise QKVError(f"a request ended early: {submission.error or 'it has all its tokens'}")

    def _settle(self) -> None:
        """Applies pressure until it has the room ahead that it wants, so the timed steps do not pay for the prompts."""
        for _ in range(MAX_SETTLING):
            self.core.scheduler.pressure.begin_step()
            if not self.cache.tables.store.waves:
                return
            apply_moves(self.core.runner)

    def _wait(self) -> None:
        if self.started.device.type == "cuda":
            torch.cuda.synchronize(self.started.device)


def apply_moves(runner: Runner) -> None:
    """Carries the moves of blocks out. Raises ``QKVError`` for values that are not finite."""
    if runner.launch_moves().wait():
        raise QKVError("a block that steps down holds values that are not finite")


def random_blocks(cache: KVCache, device: torch.device) -> torch.Tensor:
    """[n, bytes of a block] uint8: standard normal K and V in the dtype of the widest rung."""
    dtype = cache.ladder.widest.dtype
    most = max(group.widest.block_nbytes for group in cache.ladder.groups)
    shape = (NUM_PATTERNS, most // dtype.itemsize)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype).view(torch.uint8)


def spread_prompts(batch: int, context: int, longest: int) -> list[int]:
    """Prompt lengths near ``context``, spread evenly over one block, so that a few steps see their share of seals."""
    offsets = [index * BLOCK_TOKENS // batch - BLOCK_TOKENS // 2 for index in range(batch)]
    return [max(1, min(context + offset, longest)) for offset in offsets]
