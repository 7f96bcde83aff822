"""Warm-up: a made-up request through every kernel of a ladder, so that no real one waits for a kernel's compilation."""

from __future__ import annotations

from itertools import product

from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ...request import Request, SamplingParams
from ...sampling.sample_row import SampleRow
from ..runner import Runner

REQUEST_ID = "warm-up"


def warm_up(runner: Runner) -> None:
    """Writes, seals and demotes blocks, prefills and decodes over blocks on every rung, samples, frees the blocks.

    Does nothing where KV memory cannot hold a dense block for each rung.
    """
    tables, ladder = runner.cache.tables, runner.cache.ladder
    last = max(len(group.rungs) for group in ladder.groups) - 1
    num_tokens = tables.spec.main.tokens_in(last + 1) + 3
    if num_tokens > tables.max_tokens(0):
        return
    request = Request(REQUEST_ID, [0] * num_tokens, SamplingParams(temperature=0.0), 1, floor=ladder.last)
    rows = {request: SampleRow(request.params, 0, request.token_ids, num_tokens)}
    tables.open(REQUEST_ID, ladder.last, num_prompt_tokens=num_tokens)
    tables.reserve(REQUEST_ID, num_tokens)
    _run(runner, request, rows, 0, num_tokens - 3)
    for rung in range(1, last + 1):
        # The same steps as in earnest: one rung down at a time, and straight to the last one for an eager ladder.
        tables.coldest(REQUEST_ID, num_tokens - 3)  # as the scheduler asks first: it notes how much can be mined
        for group in tables.groups:
            most = len(group.spec.rungs) - 1
            target = most if ladder.eager else min(rung, most)
            full = group[REQUEST_ID].blocks[: last + 1 - rung]
            tables.demote([(block, target) for block in full if block.rung < target])
        _run(runner, request, rows, num_tokens - 3, 2)
        _run(runner, request, rows, num_tokens - 1, 1)
    _run(runner, request, rows, num_tokens - 3, 2)
    _run(runner, request, rows, num_tokens - 1, 1)
    for temperature, top_k, repetition_penalty in product((0.0, 1.0), (0, 2), (1.0, 2.0)):
        params = SamplingParams(temperature=temperature, top_k=top_k, repetition_penalty=repetition_penalty)
        rows[request] = SampleRow(params, 0, request.token_ids, num_tokens)
        _run(runner, request, rows, num_tokens - 1, 1)
    tables.release(REQUEST_ID)
    runner.cache.reset_counters()


def _run(runner: Runner, request: Request, rows: dict[Request, SampleRow], start: int, num_tokens: int) -> None:
    runner.launch_moves().wait()
    runner.run(ScheduledBatch([ScheduledRequest.of(request, start, num_tokens)]), rows)
