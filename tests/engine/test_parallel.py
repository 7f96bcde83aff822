"""Tensor parallelism over two processes on a CPU: tokens as with one, and an engine that ends when a rank does."""

from __future__ import annotations

import logging
import os
import signal
import time
import weakref
from typing import Any

import pytest

from qkv_engine import CapacityError, ConfigError, Engine, EngineDeadError, RankLostError, SamplingParams
from qkv_engine.parallel import process, worker_group
from qkv_engine.parallel.watch import Patience, StallClock
from qkv_engine.serving import loop

from ..small_demo import small_demo

PROMPTS = [[number * seed % 200 + 10 for number in range(seed * 60)] for seed in (1, 3, 5)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=40, seed=3, max_tokens=24, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, seed=4, max_tokens=24, ignore_eos=True, prompt_logprobs=0),
]


def engine(ranks: int, **options: Any) -> Engine:
    return Engine(small_demo(), tensor_parallel=ranks, num_threads=1, **{"kv": "fp32", "max_model_len": 1024} | options)


def workers(found: Engine) -> list[process.WorkerProcess]:
    assert found._started is not None and found._started.workers is not None
    return found._started.workers._workers


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_tokens_are_those_of_one_process_and_workers_end_with_their_engine():
    with engine(1) as one:
        expected = one.generate(PROMPTS, PARAMS)
    with engine(2) as two:
        found, pids = two.generate(PROMPTS, PARAMS), [worker.process.pid for worker in workers(two)]
    assert all(map(has_ended, pids))
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert found[1].outputs[0].cumulative_logprob == pytest.approx(expected[1].outputs[0].cumulative_logprob, abs=1e-3)
    pairs = zip(found[2].prompt_logprobs or (), expected[2].prompt_logprobs or (), strict=True)
    for ours, theirs in pairs:
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.keys() == theirs.keys()


def test_blocks_step_down_on_every_rank():
    with (
        engine(2, kv="auto", kv_memory="512KiB", max_model_len=768) as short,
        engine(1, kv="auto", kv_memory="1MiB", max_model_len=768) as one,
    ):
        params = SamplingParams(temperature=0.0, max_tokens=40)
        question = [f"What is {a}*86?" for a in (12, 47, 9)] + ["Sort: 5 99 23 11 8 7 1 2 3 4 5 6 7 8 9 10 11 12 13 14"]
        conversations = [[{"role": "user", "content": text * 6}] for text in question]
        found = [output.token_ids for output in short.chat(conversations, params)]
        assert found == [output.token_ids for output in one.chat(conversations, params)]
        assert short.stats().num_demotions == one.stats().num_demotions > 0


def test_a_rank_that_dies_ends_the_engine_at_once_and_frees_its_memory(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL + 1, logger="qkv_engine")  # a record would hold its error's frames
    with engine(2) as found:
        assert found._started is not None
        runner, pid = weakref.ref(found._started.core.runner), workers(found)[0].process.pid
        stream = found.stream(PROMPTS[0], SamplingParams(max_tokens=600, ignore_eos=True))
        next(stream)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RankLostError, match="rank 1 ended with code -9"):
            for _ in stream:
                pass
        assert time.monotonic() - start < 5
        with pytest.raises(EngineDeadError, match="rank 1"):
            found.generate([[1, 2, 3]])
        found._loop._thread.join(10)
        assert runner() is None  # before it is closed
    assert has_ended(pid)


def test_a_worker_that_is_gone_refuses_messages_and_says_why_it_ended():
    with engine(2) as found:
        worker = workers(found)[0]
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1 ended with code -9"):
            for _ in range(100):
                worker.send(bytes(100_000))


def test_a_rank_that_stands_still_ends_the_engine_and_a_long_step_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_group, "PATIENCE", Patience(silent=1, tick=0.05))
    with engine(2) as found:
        assert found._started is not None
        own = found._started.core.runner.backend.own
        with monkeypatch.context() as slow:
            step = own.step
            slow.setattr(own, "step", lambda command: (time.sleep(1.3), step(command))[1])
            assert len(found.generate([PROMPTS[0]], SamplingParams(max_tokens=1))[0].outputs[0].token_ids) == 1
        pid = workers(found)[0].process.pid
        stream = found.stream(PROMPTS[0], SamplingParams(max_tokens=600, ignore_eos=True))
        next(stream)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankLostError, match="rank 1 stands still: no answer for 1 s"):
            for _ in range(100):  # between two steps it is answered
                found.stats()
        with pytest.raises(RankLostError, match="rank 1 stands still"):
            for _ in stream:
                pass
    assert has_ended(pid)


def test_close_breaks_off_a_step_that_a_rank_holds_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(loop, "CLOSE_SECONDS", 0.2)
    found = engine(2)
    pid = workers(found)[0].process.pid
    stream = found.stream(PROMPTS[0], SamplingParams(max_tokens=600, ignore_eos=True))
    next(stream)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)  # until the other rank waits for this one
    found.close()
    assert has_ended(pid) and not found._loop._thread.is_alive() and not caplog.records
    with pytest.raises(EngineDeadError, match="closed"):
        for _ in stream:
            pass


def test_a_rank_is_silent_only_while_nothing_goes_on():
    clock = StallClock(3, Patience(silent=4, still=10, tick=2))
    for number in (None, None, None, 1, 1, 2, 2, None, 2):
        assert clock.tick(number, False) is None
    assert clock.tick(2, False) is None
    assert clock.tick(2, True) is None
    assert clock.tick(2, False) is None
    assert clock.tick(2, False) == "rank 3 stands still: no answer for 4 s in the middle of a step"
    clock = StallClock(3, Patience(silent=4, still=10, tick=2))
    assert [clock.tick(5, True) for _ in range(5)] == [None] * 5
    assert clock.tick(5, True) == "a step stands still: no exchange between the ranks has ended for 10 s"


def test_a_worker_that_does_not_start_is_a_typed_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_CODE", "import sys; sys.exit('no torch here')")
    with pytest.raises(RankLostError, match="rank 1 ended with code 1: no torch here"):
        engine(2)


def test_a_worker_that_gets_no_memory_is_a_typed_error(monkeypatch: pytest.MonkeyPatch):
    patch = """
import errno, mmap
def no_pages(*args, **options):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")
mmap.mmap = no_pages
"""
    monkeypatch.setattr(process, "_CODE", process._CODE.replace("from qkv", patch + "from qkv"))
    with pytest.raises(CapacityError, match=r"kv_memory='.* MiB': the system does not give so much memory on cpu"):
        engine(2, kv_memory="8MiB")


@pytest.mark.parametrize("ranks", [0, 65, 2.0, True])
def test_numbers_of_ranks_that_make_no_sense_are_refused(ranks: Any):
    with pytest.raises(ConfigError, match="tensor_parallel"):
        engine(ranks)


def test_a_model_that_ranks_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="neither split nor repeated") as caught:
        engine(3)
    assert caught.value.field == "tensor_parallel"
