"""Commands are all that a backend needs: a second one, which gets them as bytes, computes the same."""

from __future__ import annotations

import pickle

import msgspec
import pytest
import torch

from qkv_engine.device.command import StepCommand
from qkv_engine.device.cpu.backend import CpuBackend
from qkv_engine.device.logits import Computed
from qkv_engine.device.pinned import RowsCopy
from qkv_engine.device.runner import Runner
from qkv_engine.device.sampler import SampledTokens
from qkv_engine.kv.moves import MoveCommand

from .test_run_ahead import begin, make_load, play


class Twin:
    """Another backend over memory of its own, told of nothing but commands."""

    def __init__(self, runner: Runner):
        cache = runner.cache
        self.own, steps = runner.backend, runner.backend.steps
        memory = torch.full_like(cache.memory, 0xFF)
        self.other = CpuBackend(steps.model, memory, steps._tables.layout, cache.ladder)
        self.num_groups = self.num_gone_on = 0

    def move(self, command: MoveCommand) -> list[RowsCopy]:
        self.num_groups += sum(len(wave.launches) for wave in command.waves)
        self.other.move(msgspec.msgpack.decode(as_bytes(command), type=MoveCommand))
        return self.own.move(command)

    def step(self, command: StepCommand) -> Computed:
        data = as_bytes(command)
        self.num_gone_on += command.goes_on
        assert not command.goes_on or command.tables is not None or len(data) < 128 + 10 * len(command.changes)
        mine, theirs = self.own.step(command), self.other.step(msgspec.msgpack.decode(data, type=StepCommand))
        assert mine.prompt_logprobs == theirs.prompt_logprobs and (mine.tokens is None) == (theirs.tokens is None)
        if mine.tokens is not None and theirs.tokens is not None:
            assert torch.equal(mine.tokens.token_ids, theirs.tokens.token_ids)
        return mine

    def wait(self, computed: Computed) -> SampledTokens:
        return self.own.wait(computed)


def as_bytes(command: StepCommand | MoveCommand) -> bytes:
    assert pickle.loads(pickle.dumps(command)) == command
    return msgspec.msgpack.encode(command)


@pytest.mark.parametrize(
    ("kv", "memory"), [("auto", "1536KiB"), pytest.param("patternkv", "8MiB", marks=pytest.mark.slow)]
)
def test_commands_carry_all_that_a_step_depends_on(kv: str, memory: str):
    started = begin(kv, memory)
    core, runner = started.core, started.core.runner
    twin = Twin(runner)
    runner.backend = twin  # type: ignore[assignment]
    outputs = play(core, make_load(started, 1, 20), {20: "r3"})
    assert not any(output.error for output in outputs) and twin.num_groups and twin.num_gone_on
