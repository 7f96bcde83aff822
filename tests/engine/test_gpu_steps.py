"""Steps on a GPU: captured or not, whoever joins, leaves, steps down or is preempted, the tokens are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from qkv_engine import SamplingParams
from qkv_engine.config import EngineConfig, KVConfig, RungConfig
from qkv_engine.device.gpu import steps
from qkv_engine.device.gpu.steps import padded_batch
from qkv_engine.device.runner import Runner
from qkv_engine.kernels.formats import PageLayout
from qkv_engine.kernels.formats.pattern.presets import pattern_rung
from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.split import Bounds
from qkv_engine.kernels.paged_decode.triton import launches
from qkv_engine.presets import resolve_kv
from qkv_engine.request import Request
from qkv_engine.sampling.sample_row import SampleRow
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest
from qkv_engine.serving.core import EngineCore
from qkv_engine.serving.submission import Submission
from qkv_engine.startup import start
from studies.kernels.inputs import dense_page, uniform_page

from .test_wanted_rows import all_then_some

gpu = pytest.mark.gpu
LENGTHS = [5, 300, 40, 1, 129, 700, 64, 20]
OUTPUTS = [40, 5, 200, 17, 90, 30, 1, 150]


def test_batches_are_padded_to_few_sizes():
    sizes = sorted({padded_batch(n) for n in range(1, 257)})
    assert sizes == [1, 2, 4, 8, 16, 32, 48, 64, 96, *range(128, 257, 16)]
    assert all(n <= padded_batch(n) for n in range(1, 5000))
    assert all(padded_batch(n) < 1.125 * n for n in range(128, 5000))
    assert all(padded_batch(padded_batch(n)) == padded_batch(n) for n in range(1, 5000))


def nested_pages(num_rungs: int, num_layers: int = 24) -> list[list[PageLayout]]:
    """Pages by layer and rung of a ladder from 16 bits over 8 to 2 bits in all layers, more layers narrower on each."""
    pages = {bits: uniform_page(bits, 8, 128) for bits in (8, 4, 2)}
    layers = [[dense_page(torch.bfloat16, 8, 128)] for _ in range(num_layers)]
    for number in range(num_rungs - 1):
        narrowed = 2 * num_layers * number // (num_rungs - 2)  # one layer after the other goes to 4 bits, then to 2
        for i, layer in enumerate(layers):
            layer.append(pages[(8, 4, 2)[(narrowed > i) + (narrowed > num_layers + i)]])
    return layers


def test_a_layer_launches_once_a_format():
    bounds = Bounds(64, 512)
    for layer in nested_pages(12):
        found = launches(LayerFormats.of(layer, torch.device("cpu")).ranges, bounds, 8)
        assert len(found) == len({page.k.nbytes for page in layer}) <= 4
        assert sorted(r for f, _ in found for r in range(f.first, f.end)) == list(range(12))
        assert {num_programs for f, num_programs in found if f.first} == {512 * 8}


def make_prompts() -> list[list[int]]:
    """Those of ``serve``."""
    rng = random.Random(0)
    return [[rng.randrange(5, 1000) for _ in range(length)] for length in LENGTHS]


def serve(
    params: SamplingParams, *, kv: str | KVConfig, seqs: int = 4, preempts: bool = True, **options: Any
) -> tuple[list[list[int]], EngineCore]:
    """Tokens of a few requests, ``seqs`` at a time, stepped by hand so that every run schedules alike.

    The youngest is preempted after thirty steps.
    """
    config = EngineConfig(kv=resolve_kv(kv), max_num_seqs=seqs, max_num_batched_tokens=256, **options)
    core = start(config).core
    submissions, floor = [], core.scheduler.space.num_rungs - 1
    for index, (prompt, max_tokens) in enumerate(zip(make_prompts(), OUTPUTS, strict=True)):
        submission = Submission(f"r{index}", None, prompt, params, max_tokens, index, [], False, floor=floor)
        submissions.append(submission)
        core.live[submission.request_id] = submission
        core.add(submission)
    while core.has_work:
        core.step()
        if preempts and core.counters.num_steps == 30 and not core.scheduler.num_preemptions:
            while core._in_flight:  # a request is scheduled anew with all of its tokens known
                core._collect(is_followed=False)
            core.scheduler._preempt(list(core.scheduler.running)[-1])
    assert [s.error for s in submissions] == [None] * len(submissions)
    return [s.completions[0].request.output_token_ids for s in submissions], core


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


@gpu
@pytest.mark.parametrize("kv", ["bf16", "int4", "kivi-2", "patternkv", "auto"])
@pytest.mark.parametrize("memory", ["1GiB", "9MiB"])
def test_graphs_do_not_change_tokens(kv: str, memory: str, monkeypatch: pytest.MonkeyPatch):
    # Captured steps compute all rows, and padding. A product of fewer rounds otherwise in bfloat16: a tie may fall.
    monkeypatch.setattr(steps, "compute_hidden", all_then_some)
    captured, core = serve(GREEDY, kv=kv, kv_memory=memory, device="cuda")
    assert len(core.runner.backend.steps._graphs) >= 3 and core.runner.backend.steps._graphs._works
    assert core.scheduler.num_preemptions
    if memory == "9MiB":
        assert kv == "bf16" or core.runner.cache.tables.store.num_demotions
    plain, _ = serve(GREEDY, kv=kv, kv_memory=memory, device="cuda", cuda_graphs=False)
    same = [a == b for a, b in zip(captured, plain, strict=True)]
    assert sum(same) >= len(same) - (kv == "bf16")
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
def test_patterns_give_the_same_tokens_alone_and_in_a_batch():
    """In float32, where a request's values hardly depend on the others."""
    dense = RungConfig("dense32", "dense32", "dense32")
    kv = KVConfig(name="patterns", rungs=(dense, pattern_rung(2)), recent=128, eager=True)
    options = {"kv_memory": "512MiB", "device": "cuda", "dtype": "float32", "preempts": False}
    together, core = serve(GREEDY, kv=kv, **options)
    assert core.runner.cache.tables.store.num_demotions["dense32", "int2-patterns"] >= 5
    assert core.runner.cache.arena.used_nbytes == 0
    alone, _ = serve(GREEDY, kv=kv, seqs=1, **options)
    assert alone == together


@gpu
def test_sampled_tokens_and_logprobs_come_from_kept_logits():
    params = SamplingParams(temperature=0.9, top_p=0.9, ignore_eos=True, detokenize=False, logprobs=2)
    captured, core = serve(params, kv="bf16", kv_memory="1GiB", device="cuda")
    assert len(core.runner.backend.steps._graphs) >= 3
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
    requests = [Request(f"{ahead}-{i}", list(prompt), params, number, floor=0) for i, prompt in enumerate(prompts)]
    rows = {r: SampleRow(params, i, r.token_ids, r.num_prompt_tokens) for i, r in enumerate(requests)}
    tables = runner.cache.tables
    for request in requests:
        tables.open(request.request_id, 0)
        assert tables.reserve(request.request_id, request.num_tokens + number)
    runner.launch_moves().wait()
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
