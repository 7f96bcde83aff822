"""Behind the last attention a step computes the tokens that its results are read from, which stay the same."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qkv_engine import Engine, RequestOutput, SamplingParams
from qkv_engine.device.command import PromptScores, StepCommand
from qkv_engine.device.cpu.attention import CpuAttentionPlanner
from qkv_engine.device.logits import CausalLM, wanted_rows
from qkv_engine.kernels.linear import padded_rows
from qkv_engine.kernels.paged_prefill import paged_prefill
from qkv_engine.kernels.request_pages import LayerPages

from ..small_demo import small_demo

CPU = torch.device("cpu")
RNG = Random(0)
# Prompts of one token decode from the second step on, beside chunks of the others.
PROMPTS = [[RNG.randrange(5, 1000) for _ in range(length)] for length in (1, 1, 1, 1, 1, 21, 90, 33)]
SCORED = (6, 7)


def command(lengths: list[int], sampling: list[int], scored: dict[int, int]) -> StepCommand:
    """Of items with so many tokens; ``scored``: numbers of targets by item."""
    scores = [PromptScores(item, [7] * number, 0, []) for item, number in scored.items()]
    zeros = [0] * len(lengths)
    return StepCommand([], [], False, zeros, zeros, lengths, [0] * sum(lengths), sampling, None, scores)


@pytest.mark.parametrize(
    ("lengths", "sampling", "scored", "expected"),
    [
        ([40], [0], {}, [39]),
        ([40], [], {}, [0]),
        ([1, 1, 40], [0, 1], {}, [0, 1]),
        ([1, 1, 40, 9], [0, 1, 3], {}, [0, 1, 50]),
        ([1] * 8 + [40], list(range(9)), {}, [*range(8), 47, 0, 0, 0]),
        ([1, 1, 1], [0, 1, 2], {}, None),
        ([1, 1, 1], [0, 2], {}, [0, 2]),
        ([6], [], {0: 6}, None),
        ([6], [0], {0: 5}, [5, 0, 1, 2, 3, 4, 0, 5]),
        ([1, 4, 5], [1], {2: 5}, [4, 5, 6, 7, 8, 9, 5, 4]),
    ],
    ids=str,
)
def test_rows_are_those_that_results_are_read_from(
    lengths: list[int], sampling: list[int], scored: dict[int, int], expected: list[int] | None
):
    found = wanted_rows(command(lengths, sampling, scored), lengths, CPU)
    assert (None if found is None else found.tolist()) == expected


class Seen(NamedTuple):
    """A step: tokens and sampling items of its command, whether it scores, and rows of the first and the last MLP."""

    lengths: list[int]
    sampling: list[int]
    scores: bool
    first: int
    last: int


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """The steps that ``engine`` takes from now on."""
    backend: Any = engine._started.core.runner.backend
    steps, step, seen, rows = backend.steps, backend.step, list[Seen](), dict[int, int]()

    def spied(layer: int, call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def spy(x: Tensor) -> Any:
            rows[layer] = len(x)
            return call(x)

        return spy

    def noting(command: StepCommand) -> Any:
        computed = step(command)
        seen.append(Seen(steps._lengths, command.sampling, bool(command.prompt_scores), rows[0], rows[-1]))
        return computed

    for layer in (0, -1):
        mlp = steps.model.model.layers[layer].mlp
        vars(mlp)["sums"] = spied(layer, mlp.sums)
    monkeypatch.setattr(backend, "step", noting)
    return seen


def all_then_some(model: CausalLM, *args: Any) -> Tensor:
    """``compute_hidden`` by a model that leaves no token out."""
    hidden = model(*args[:-1])
    return hidden if args[-1] is None else hidden[args[-1]]


def params_of(number: int) -> SamplingParams:
    scores = 1 if number in SCORED else None
    temperature = 0.9 if number % 2 else 0.0
    return SamplingParams(temperature=temperature, seed=number, max_tokens=40, ignore_eos=True, prompt_logprobs=scores)


def open_engine(**options: Any) -> Engine:
    return Engine(small_demo(), kv="fp32", kv_memory="32MiB", num_threads=1, prefix_caching=False, **options)


def scores(output: RequestOutput) -> list[float]:
    entries = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    return [entry[token].logprob for token, entry in entries]


def test_tokens_and_scores_are_those_of_requests_alone(monkeypatch: pytest.MonkeyPatch):
    """In chunks of 1 to 17 tokens beside others, single tokens in another order than they are asked for."""
    params = [params_of(number) for number in range(len(PROMPTS))]
    with monkeypatch.context() as patch, open_engine() as engine:
        patch.setattr("qkv_engine.device.cpu.steps.compute_hidden", all_then_some)
        patch.setattr("qkv_engine.device.cpu.steps.asked_tokens", lambda command, lengths: None)
        expected = [engine.generate(*pair)[0] for pair in zip(PROMPTS, params, strict=True)]
    monkeypatch.setattr(CpuAttentionPlanner, "order", lambda self, rows, starts: list(range(len(rows)))[::-1])
    seen = list[Seen]()
    found = []
    for budget in (6, 17):
        with open_engine(max_num_batched_tokens=budget) as engine:
            steps = watch(engine, monkeypatch)
            found.append(engine.generate(PROMPTS, params))
            seen += steps
    for outputs in found:
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        for number in SCORED:
            assert scores(outputs[number]) == pytest.approx(scores(expected[number]), abs=1e-4)
    for step in seen:
        assert step.first == padded_rows(sum(step.lengths), CPU) >= step.last
        assert step.scores or step.last == min(step.first, padded_rows(max(1, len(step.sampling)), CPU))
    assert any(set(step.lengths) == {1} and len(step.sampling) < len(step.lengths) for step in seen)
    assert any(len(step.sampling) < len(step.lengths) and step.last < step.first for step in seen if not step.scores)
    assert any(step.scores and len(step.sampling) < step.last < step.first for step in seen)


def test_a_prompt_alone_computes_one_row_a_step(monkeypatch: pytest.MonkeyPatch):
    with open_engine(max_num_batched_tokens=48) as engine:
        seen = watch(engine, monkeypatch)
        engine.generate(PROMPTS[6], SamplingParams(max_tokens=2, ignore_eos=True))
    assert seen == [Seen([48], [], False, 48, 1), Seen([42], [0], False, 48, 1), Seen([1], [0], False, 1, 1)]


@pytest.mark.parametrize(("scores", "last"), [(None, [1]), (1, [48, 42])])
def test_the_last_layer_attends_to_what_is_asked_for(
    scores: int | None, last: list[int], monkeypatch: pytest.MonkeyPatch
):
    """A prompt in two chunks, the first of which gives no token."""
    seen: dict[int, list[int]] = {}

    def spy(q: Tensor, k: Tensor, v: Tensor, pages: LayerPages, *args: Any, **options: Any) -> Tensor:
        seen.setdefault(pages.layer, []).append(len(q))
        return paged_prefill(q, k, v, pages, *args, **options)

    monkeypatch.setattr("qkv_engine.device.cpu.attention.paged_prefill", spy)
    with open_engine(max_num_batched_tokens=48) as engine:
        engine.generate(PROMPTS[6], SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=scores))
    assert seen.pop(max(seen)) == last and set(map(tuple, seen.values())) == {(48, 42)}
