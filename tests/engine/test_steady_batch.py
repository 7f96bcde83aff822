"""Facts of a batch that decode steps with the same requests take over: they are those of steps made from nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from qkv_engine.device.backend import StepLimits
from qkv_engine.device.gpu.attention import GpuAttentionPlanner
from qkv_engine.device.gpu.backend import GpuBackend
from qkv_engine.device.gpu.mixed import MixedShape
from qkv_engine.device.gpu.steps import DecodeShape
from qkv_engine.device.steady_batch import SteadyBatch
from qkv_engine.kernels.block_tables import Placed, place, update
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.layers import taken
from qkv_engine.models.ranks import ALONE
from qkv_engine.request import Request, SamplingParams
from qkv_engine.sampling.sample_row import SampleRow
from qkv_engine.scheduler import ScheduledRequest
from qkv_engine.serving.submission import Submission
from qkv_engine.started import Started

from .kv.test_device_tables import check
from .test_run_ahead import begin, make_load, play, seen

ROW_NBYTES = 4


def requests_of(number: int, **params: Any) -> list[Request]:
    return [Request(f"r{i}", [1, 2, 3], SamplingParams(temperature=0.0, **params), 9, floor=0) for i in range(number)]


def step(requests: list[Request], start: int, num_tokens: int = 1) -> list[ScheduledRequest]:
    """Items as the scheduler makes them: what they sample counts as a token from here on."""
    items = [ScheduledRequest.of(request, start, num_tokens) for request in requests]
    for item in items:
        item.request.num_tokens += item.samples
    return items


def steady_batch(items: list[ScheduledRequest]) -> SteadyBatch:
    rows = {i.request: SampleRow(i.request.params, 0, i.request.token_ids, 3) for i in items}
    return SteadyBatch(items, rows)


def test_the_next_tokens_of_the_same_requests_continue_a_batch():
    requests = requests_of(3)
    batch = steady_batch(step(requests, 2))
    assert batch.is_decode and batch.is_plain and batch.sampling == [0, 1, 2]
    assert batch.continues(step(requests, 3)) and batch.continues(step(requests, 4))


@pytest.mark.parametrize("others", ["fewer", "more", "another order", "other requests", "the same step", "one further"])
def test_other_requests_or_positions_continue_nothing(others: str):
    requests = requests_of(4)
    batch = steady_batch(step(requests[:3], 2))
    items = {
        "fewer": lambda: step(requests[:2], 3),
        "more": lambda: step(requests, 3),
        "another order": lambda: step(requests[2::-1], 3),
        "other requests": lambda: step(requests_of(3), 3),
        "the same step": lambda: step(requests[:3], 2),
        "one further": lambda: [*step(requests[:2], 3), *step(requests[2:3], 4)],
    }[others]()
    assert not batch.continues(items)


def test_nothing_continues_prompts():
    requests = requests_of(2)
    chunks = steady_batch(step(requests, 0, 2))
    assert not chunks.is_decode and not chunks.continues(step(requests, 2))
    unsampled = steady_batch(step(requests, 1))  # the prompt's second token of three: the third is not sampled
    assert unsampled.is_decode and not unsampled.sampling and not unsampled.continues(step(requests, 2))


def test_a_step_that_wants_more_than_tokens_is_no_decode():
    asking = requests_of(2, prompt_logprobs=1)
    batch = steady_batch(step(asking, 1))
    assert not batch.is_decode and not batch.continues(step(asking, 2))
    assert steady_batch(step(asking, 3)).is_decode


def test_rows_are_told_how_many_tokens_are_in_flight():
    [request] = requests_of(1, logprobs=1)
    items = step([request], 2)
    batch = steady_batch(items)
    batch.note_positions(items)
    assert batch.states[0].position == 0 and not batch.is_plain
    items = step([request], 3)
    assert batch.continues(items)
    batch.note_positions(items)
    assert (batch.states[0].num_in_flight, batch.states[0].position) == (1, 1)
    request.token_ids.append(7)
    batch.note_positions(items)
    assert (batch.states[0].num_in_flight, batch.states[0].position) == (0, 1)


class NextToken:
    """A model whose likeliest token follows from the one before and its position."""

    def __init__(self, config: ModelConfig):
        self.config, self.vocab_size, self.ranks = config, config.vocab_size, ALONE

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: object, rows: Tensor | None = None) -> Tensor:
        size = self.vocab_size
        return taken(torch.nn.functional.one_hot((input_ids * 31 + positions * 7) % size, size).float(), rows)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return 8 * hidden


def begin_step(planner: GpuAttentionPlanner, step_input: Tensor, num_tokens: int, *args: Any) -> tuple[Placed, None]:
    """The device's part without attention; its tables are the books'."""
    copy = planner.tables
    update(copy.block_words[0], step_input, num_tokens)
    placed = place(copy.block_words[0], step_input, num_tokens, copy.last_tokens, ROW_NBYTES)
    followed = copy.followed
    names = {row.index: name for name, row in followed._rows.items()}
    rows = sorted(set(placed.rows[placed.lengths > 0].tolist()))
    check(copy, followed._tables.main, [names[row] for row in rows], rows)
    return placed, None


class UncapturedGraphs:
    """Runs work as it is and notes its keys."""

    keys: ClassVar[set[Hashable]] = set()

    def __init__(self, device: torch.device):
        self.keys.clear()

    def run(self, key: Hashable, work: Callable[[], None], kernels: object = None) -> None:
        self.keys.add(key)
        work()

    capture = run


def forgo_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("steps", "backend"):
        monkeypatch.setattr(f"qkv_engine.device.gpu.{module}.Graphs", UncapturedGraphs)


def start_steps(kv: str, memory: str, cuda_graphs: bool) -> Started:
    """An engine whose steps are a GPU's, on the CPU."""
    started = begin(kv, memory)
    core, runner = started.core, started.core.runner
    cache, own, core.runs_ahead = runner.cache, runner.backend, True
    backend = GpuBackend(NextToken(started.config), cache.memory, own.steps._tables.layout, cache.ladder, cuda_graphs)
    backend.steps.tables.followed = runner._maker._rows
    runner.backend, backend.mover = backend, own.mover
    return started


def begin_padding(planner: GpuAttentionPlanner, step_input: Tensor, num_tokens: int, *args: Any) -> tuple[Placed, None]:
    """``begin_step`` of padding alone."""
    copy = planner.tables
    placed = place(copy.block_words[0], step_input, num_tokens, copy.last_tokens, ROW_NBYTES)
    assert (placed.rows == copy.spare_row).all() and not placed.lengths.any()
    return placed, None


def answers(memory: str, cuda_graphs: bool = False) -> list[list[Any]]:
    """Of requests of all kinds that join, leave and are preempted, by the GPU's steps on the CPU."""
    started = start_steps("auto", memory, cuda_graphs)
    core, runner = started.core, started.core.runner
    load = make_load(started, 1, 30)
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    load += [Submission(f"long{i}", None, [7 + i] * (40 + i), params, 300, 0, [], i == 1, floor=2) for i in range(3)]
    outputs = play(core, load, {20: "r3", 50: "r7"})
    assert (core.scheduler.num_preemptions > 0) == (memory == "1536KiB")
    assert not any(output.error for output in outputs)
    for output in outputs[-3:]:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        prompt, size = len(output.prompt_token_ids), runner.backend.steps.model.vocab_size
        assert tokens[prompt:] == [(tokens[i] * 31 + i * 7) % size for i in range(prompt - 1, len(tokens) - 1)]
    return [seen(output) for output in outputs]


@pytest.mark.parametrize("memory", ["64MiB", "1536KiB"])
def test_answers_are_those_of_steps_made_from_nothing(memory: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)
    monkeypatch.setattr(GpuAttentionPlanner, "begin", begin_step)
    continues, found = SteadyBatch.continues, list[bool]()

    def noted(batch: SteadyBatch, items: list[ScheduledRequest]) -> bool:
        found.append(continues(batch, items))
        return found[-1]

    monkeypatch.setattr(SteadyBatch, "continues", noted)
    mine = answers(memory)
    assert sum(found) > 100
    monkeypatch.setattr(SteadyBatch, "continues", lambda *args: False)
    assert mine == answers(memory)


def test_answers_of_padded_steps_are_those_of_steps_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GpuAttentionPlanner, "begin", begin_step)
    forgo_captures(monkeypatch)
    expected = answers("64MiB")
    assert expected == answers("64MiB", cuda_graphs=True)
    mixed = [key for key in UncapturedGraphs.keys if isinstance(key, MixedShape)]
    assert {key.num_decodes > 0 for key in mixed} == {False, True}


@pytest.mark.parametrize("kv", ["bf16", "kivi-2", "auto"])
def test_a_full_warm_up_captures_the_shapes_that_are_met(kv: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GpuAttentionPlanner, "begin", begin_padding)
    forgo_captures(monkeypatch)
    started = start_steps(kv, "64MiB", True)
    runner = started.core.runner
    captured = runner.backend.capture(StepLimits(16, 600, 256))
    shapes = set(UncapturedGraphs.keys)
    assert captured.number == len(shapes) <= 60
    assert not started.core.runner.cache.tables.store.live_blocks()
    UncapturedGraphs.keys.clear()
    monkeypatch.setattr(GpuAttentionPlanner, "begin", begin_step)
    play(started.core, make_load(started, 1, 30), {})
    assert {type(key) for key in UncapturedGraphs.keys} == {DecodeShape, MixedShape}
    assert shapes >= UncapturedGraphs.keys
