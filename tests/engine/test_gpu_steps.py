"""Steps on a GPU: captured or not, whoever joins, leaves, steps down or is preempted, the tokens are the same."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from qkv_engine import SamplingParams
from qkv_engine.config import BLOCK_TOKENS, EngineConfig, resolve_kv
from qkv_engine.device.gpu_steps import padded_batch
from qkv_engine.device.runner import Runner
from qkv_engine.kernels.paged_decode.split import GRADED, GRADED_SHORT, ItemBlocks
from qkv_engine.kv.attention_gpu import GpuAttentionPlanner
from qkv_engine.request import Request
from qkv_engine.sampling.sampler import SampleRow
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest
from qkv_engine.serving.core import EngineCore
from qkv_engine.serving.submission import Submission
from qkv_engine.startup import start

gpu = pytest.mark.gpu
LENGTHS = [5, 300, 40, 1, 129, 700, 64, 20]
OUTPUTS = [40, 5, 200, 17, 90, 30, 1, 150]


def test_batches_are_padded_to_few_sizes():
    sizes = sorted({padded_batch(n) for n in range(1, 257)})
    assert sizes == [1, 2, 4, *range(8, 257, 8)]
    assert all(n <= padded_batch(n) for n in range(1, 5000))
    assert all(padded_batch(n) <= 1.0625 * n for n in range(128, 5000))
    assert all(padded_batch(padded_batch(n)) == padded_batch(n) for n in range(1, 5000))


@pytest.mark.parametrize(
    ("counts", "num_decodes", "expected"),
    [
        ([1], 1, ((1, 1), (2,), (True,))),  # a lone short request: an item a block
        ([8], 1, ((1, 1), (16,), (False,))),
        ([65], 1, ((4, 4), (32,), (False,))),  # fewer parts to merge
        ([1024], 1, ((16, 16), (128,), (False,))),
        ([2, 63, 0], 1, ((4, 4), (32, 32, 0), (True, False, False))),
        ([65 * 32], 32, ((16, 16), (256,), (False,))),
        ([9 * 256], 256, (GRADED_SHORT, (512,), (False,))),  # many: the last requests in smaller items
        ([65 * 64], 64, (GRADED, (256,), (False,))),  # dense pages
        ([406, 203 * 63], 203, (GRADED, (256, 768), (True, False))),
        ([128, 64 * 63], 64, ((16, 16), (256, 384), (True, False))),  # codes have room for twice as many
    ],
)
def test_attention_is_cut_into_enough_items(counts: list[int], num_decodes: int, expected: tuple):
    positions = [BLOCK_TOKENS * sum(counts) // num_decodes - 200] * num_decodes
    assert planner(counts).cut(num_decodes, positions) == expected


def test_few_shapes_serve_blocks_that_step_down():
    """Twenty requests grow to twenty blocks each while these step down, and end one after the other."""
    counts = [20, 0, 0]
    one, shapes = planner(counts), set()
    for step in range(400):
        counts[0] = 20 + min(step, 380) - (step > 100) * (step - 100)
        counts[1], counts[2] = max(0, step - 100) - max(0, step - 250), max(0, step - 250)
        shapes.add(one.cut(24, [6 * step] * 20))
    assert len(shapes) <= 12


def planner(counts: list[int]) -> GpuAttentionPlanner:
    """One that only cuts, on 132 multiprocessors and 8 KV heads; ``counts`` are the blocks by rung."""
    shape = SimpleNamespace(num_kv_heads=8)
    ladder = SimpleNamespace(widest=SimpleNamespace(shape=shape))
    found = object.__new__(GpuAttentionPlanner)
    found.tables = SimpleNamespace(num_entries=lambda: counts, ladder=ladder)
    found.num_multiprocessors, found._item_blocks = 132, ItemBlocks(1, 1)
    return found


def serve(params: SamplingParams, *, kv: str, **options: Any) -> tuple[list[list[int]], EngineCore]:
    """Tokens of a few requests, four at a time, stepped by hand so that every run schedules alike.

    The youngest is preempted after thirty steps.
    """
    config = EngineConfig(kv=resolve_kv(kv), max_num_seqs=4, max_num_batched_tokens=256, **options)
    core = start(config).core
    rng = random.Random(0)
    submissions = []
    for index, (length, max_tokens) in enumerate(zip(LENGTHS, OUTPUTS, strict=True)):
        prompt = [rng.randrange(5, 1000) for _ in range(length)]
        submission = Submission(f"r{index}", None, prompt, params, max_tokens, index, [], False)
        submissions.append(submission)
        core.live[submission.request_id] = submission
        core.add(submission)
    while core.has_work:
        core.step()
        if core.counters.num_steps == 30 and not core.scheduler.num_preemptions:
            while core._in_flight:  # a request is scheduled anew with all of its tokens known
                core._collect()
            core.scheduler._preempt(list(core.scheduler.running)[-1])
    assert [s.error for s in submissions] == [None] * len(submissions)
    return [s.completions[0].request.output_token_ids for s in submissions], core


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


@gpu
@pytest.mark.parametrize("kv", ["bf16", "int4", "kivi-2", "auto"])
@pytest.mark.parametrize("memory", ["1GiB", "9MiB"])
def test_graphs_do_not_change_tokens(kv: str, memory: str):
    captured, core = serve(GREEDY, kv=kv, kv_memory=memory, device="cuda")
    assert len(core.runner._gpu._graphs) >= 3 and core.runner._gpu._graphs._works
    assert core.scheduler.num_preemptions
    if memory == "9MiB":
        assert kv == "bf16" or core.runner.cache.tables.num_demotions
    plain, _ = serve(GREEDY, kv=kv, kv_memory=memory, device="cuda", cuda_graphs=False)
    assert captured == plain
    core.runner.cache.tables.check_integrity()


@gpu
@pytest.mark.parametrize("kv", ["fp32", "auto"])
def test_tokens_are_the_cpus(kv: str):
    """In float32, where both compute the same but for the order of sums."""
    on_gpu, _ = serve(GREEDY, kv=kv, kv_memory="256MiB", device="cuda", dtype="float32")
    on_cpu, _ = serve(GREEDY, kv=kv, kv_memory="256MiB", device="cpu", dtype="float32")
    same = [a == b for a, b in zip(on_gpu, on_cpu, strict=True)]
    assert all(same) if kv == "fp32" else sum(same) >= 6  # in float16 pages a tie may fall otherwise


@gpu
def test_sampled_tokens_and_logprobs_come_from_kept_logits():
    params = SamplingParams(temperature=0.9, top_p=0.9, ignore_eos=True, detokenize=False, logprobs=2)
    captured, core = serve(params, kv="bf16", kv_memory="1GiB", device="cuda")
    assert any(shape.keeps_logits for shape in core.runner._gpu._graphs._graphs)
    plain, _ = serve(params, kv="bf16", kv_memory="1GiB", device="cuda", cuda_graphs=False)
    assert captured == plain


@gpu
def test_a_step_reads_what_the_one_before_sampled():
    """Steps launched before the tokens of the one before are on the host."""
    core = start(EngineConfig(kv=resolve_kv("bf16"), kv_memory="1GiB", max_num_seqs=8, device="cuda")).core
    prompts, number = [[7, 8, 9], [30] * 200, [5]], 12
    assert decode(core.runner, prompts, number, ahead=False) == decode(core.runner, prompts, number, ahead=True)


def decode(runner: Runner, prompts: list[list[int]], number: int, ahead: bool) -> list[list[int]]:
    """``number`` tokens of each prompt; ``ahead`` launches each step before the last one is waited for."""
    params = SamplingParams(temperature=0.0)
    requests = [Request(f"{ahead}-{i}", list(prompt), params, number) for i, prompt in enumerate(prompts)]
    rows = {r: SampleRow(params, i, r.token_ids, r.num_prompt_tokens) for i, r in enumerate(requests)}
    tables = runner.cache.tables
    for request in requests:
        tables.open(request.request_id, 0)
        assert tables.reserve(request.request_id, request.num_tokens + number)
    runner.cache.apply_moves()
    found: list[list[int]] = [[] for _ in requests]

    def take(pending: Any) -> None:
        result = pending.wait()
        for item, token_id in zip(result.items, result.token_ids, strict=True):
            found[requests.index(item.request)].append(token_id)
            item.request.token_ids.append(token_id)

    def launch(starts: list[int]) -> Any:
        items = [ScheduledRequest.of(r, start, r.num_tokens - start) for r, start in zip(requests, starts, strict=True)]
        for request in requests:
            request.num_tokens += 1  # one is in flight
        return runner.launch(ScheduledBatch(sorted(items, key=lambda item: item.num_tokens > 1)), rows)

    pending = launch([0] * len(requests))
    for _ in range(number - 1):
        if not ahead:
            take(pending)
        following = launch([request.num_tokens - 1 for request in requests])
        if ahead:
            take(pending)
        pending = following
    take(pending)
    for request in requests:
        tables.release(request.request_id)
    return found
