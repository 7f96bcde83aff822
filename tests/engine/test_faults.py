"""Faults in the engine's own thread: the request at fault ends, the others answer as ever, a dead engine says why."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qkv_engine import DeviceLostError, Engine, EngineDeadError, RequestError, SamplingParams
from qkv_engine.device.runner import Runner
from qkv_engine.kv.manager import KVManager
from qkv_engine.serving.loop import MAX_BATCH, MAX_RECOVERIES, MAX_TRIES
from qkv_engine.serving.trials import TRIAL_STEPS

from ..small_demo import small_demo

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(small_demo(), kv="fp32", kv_memory="64MiB", max_num_seqs=64) as engine:
        yield engine


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 1000) for _ in range(rng.randint(1, 60))] for _ in range(number)]


def answers(engine: Engine, work: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(work, GREEDY)]


def test_steps_that_break_off_while_many_threads_submit(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    work = prompts(40)
    expected = answers(engine, work)
    schedule, rng, faults = engine._started.core.scheduler.schedule, random.Random(1), 0

    def faulty() -> Any:
        nonlocal faults
        batch = schedule()
        if rng.random() < 0.05:
            faults += 1
            raise KeyError("injected")
        return batch

    monkeypatch.setattr(engine._started.core.scheduler, "schedule", faulty)
    found: dict[int, list[int]] = {}

    def submit(mine: range) -> None:
        for i in mine:
            found[i] = answers(engine, [work[i]])[0]

    threads = [threading.Thread(target=submit, args=(range(i, 40, 8),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert faults >= 2 and [found[i] for i in range(40)] == expected


@pytest.mark.parametrize("place", ["within_quota", "open"])
def test_a_request_that_breaks_the_scheduler_ends_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str):
    work = prompts(8)
    expected = answers(engine, work)
    at_fault, method = work[3], getattr(KVManager, place)

    def broken(self: KVManager, request: Any, *more: Any) -> Any:
        if request.prompt_token_ids == at_fault:
            raise TypeError("injected")
        return method(self, request, *more)

    monkeypatch.setattr(KVManager, place, broken)
    outputs = engine.generate(work, GREEDY)
    assert [output.finish_reason for output in outputs].count("error") == 1
    assert outputs[3].finish_reason == "error" and "break off" in str(outputs[3].error)
    assert [o.token_ids for i, o in enumerate(outputs) if i != 3] == expected[:3] + expected[4:]
    monkeypatch.undo()
    assert answers(engine, work) == expected


def test_a_request_that_breaks_steps_far_into_its_prompt_ends_alone(monkeypatch: pytest.MonkeyPatch):
    """Good steps come between the broken ones: they compute the prompt again."""
    with Engine(small_demo(), kv="fp32", kv_memory="64MiB", max_num_batched_tokens=64) as engine:
        core, at_fault = engine._started.core, [5 + i % 900 for i in range(400)]
        expected = answers(engine, [[5, 6, 7]])
        accept = core._accept

        def broken(result: Any, *more: Any) -> None:
            for item in result.items:
                if item.samples and item.request.prompt_token_ids == at_fault and item.request.num_output_tokens:
                    raise KeyError("injected")
            accept(result, *more)

        monkeypatch.setattr(core, "_accept", broken)
        outputs = engine.generate([at_fault, [5, 6, 7]], GREEDY)
        assert outputs[0].finish_reason == "error" and "break off" in str(outputs[0].error)
        assert [outputs[1].token_ids] == expected == answers(engine, [[5, 6, 7]])


def test_requests_come_and_go_during_trials(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    work = prompts(5, seed=2)
    expected = answers(engine, work)
    core = engine._started.core
    aborted = engine.stream(work[4], LONG)
    next(aborted)
    schedule, faults = core.scheduler.schedule, iter([KeyError("injected")] * MAX_RECOVERIES)

    def faulty() -> Any:
        for fault in faults:
            raise fault
        return schedule()

    late: list[Any] = []
    recovery = core.recovery
    advance = recovery.go_on_with_trials

    def watched() -> None:
        if recovery.in_trials and not late:
            late.append(engine.stream(work[1], GREEDY))
            aborted.close()
        advance()

    monkeypatch.setattr(recovery, "go_on_with_trials", watched)
    monkeypatch.setattr(core.scheduler, "schedule", faulty)
    assert answers(engine, work) == expected
    *_, last = late[0]
    assert last.token_ids == expected[1] and GREEDY.max_tokens > TRIAL_STEPS
    assert not recovery.in_trials and not engine._loop.call(lambda: dict(core.live))


def test_a_lost_device_ends_the_engine_with_its_cause(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    def lost(self: Runner, *args: Any) -> None:
        raise DeviceLostError("the device cuda:0 is lost: an illegal memory access was encountered")

    def launch(self: Runner, *args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Runner, "check_device", lost)
    monkeypatch.setattr(Runner, "launch", launch)
    stream = engine.stream([5, 6], GREEDY)
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        list(stream)
    calls = {
        "generate": lambda: engine.generate([[5]]),
        "chat": lambda: engine.chat("hi"),
        "stream": lambda: engine.stream([5]),
        "stats": engine.stats,
        "reset_stats": engine.reset_stats,
        "abort": lambda: engine.abort("x"),
        "describe": engine.describe,
        "params": lambda: engine.params(top_k=1),
        "tokenizer": lambda: engine.tokenizer,
        "default_params": lambda: engine.default_params,
        "max_model_len": lambda: engine.max_model_len,
    }
    for call in calls.values():
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            call()
    engine.close()
    assert "closed" in repr(engine)


def test_an_engine_that_cannot_recover_says_why(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    calls = 0

    def broken(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError("the books are burnt")

    core = engine._started.core
    monkeypatch.setattr(core, "step", broken)
    monkeypatch.setattr(core, "recover", broken)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError: the books are burnt"):
        engine.generate([[5]])
    assert calls == MAX_RECOVERIES + 1


def test_a_fault_that_no_trial_reaches_ends_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise ZeroDivisionError("every step")

    monkeypatch.setattr(engine._started.core, "step", broken)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError: every step"):
        engine.generate([[5], [6]])


def test_a_chunk_without_memory_is_halved(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    prompt = [7 + i % 900 for i in range(300)]
    expected = answers(engine, [prompt, [5, 6]])
    launch, sizes = Runner.launch, []

    def small(self: Runner, batch: Any, rows: Any) -> Any:
        sizes.append(batch.num_tokens)
        if batch.num_tokens > 50:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(self, batch, rows)

    monkeypatch.setattr(Runner, "launch", small)
    engine._started.core.space.prefix.clear()
    assert answers(engine, [prompt, [5, 6]]) == expected
    assert max(sizes) > 50

    def none(self: Runner, batch: Any, rows: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Runner, "launch", none)
    output = engine.generate([prompt], GREEDY)[0]
    assert output.finish_reason == "error" and "out of memory" in str(output.error)


def test_a_command_that_always_breaks_off_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    core, calls = engine._started.core, []

    def broken(submission: Any) -> None:
        calls.append(submission)
        raise TypeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(core, "add", broken)
        with pytest.raises(RequestError, match="injected"):
            engine.generate([[5]], GREEDY)
    assert len(calls) == MAX_TRIES
    assert len(answers(engine, [[5]])[0]) == GREEDY.max_tokens


def test_a_refused_twin_leaves_the_first_alone(engine: Engine):
    expected = answers(engine, [[5, 6, 7]])[0]
    first = engine.stream([5, 6, 7], GREEDY, request_id="twin")
    for _ in range(3):
        with pytest.raises(RequestError, match="a live request has this id"):
            engine.generate([[8]], GREEDY, request_id="twin")
        with pytest.raises(RequestError, match="a live request has this id"):
            engine.stream([8], GREEDY, request_id="twin")
    *_, last = first
    assert last.token_ids == expected and last.finish_reason == "length"
    assert engine.generate([[8]], GREEDY, request_id="twin")[0].request_id == "twin"


def test_twins_of_two_threads_never_share_an_answer(engine: Engine):
    """The check at submit may let both pass; the owner thread then refuses one."""
    from qkv_engine.intake import Intake

    intake: Intake = engine._intake
    first, second = (intake.streamed([i], GREEDY, "twin", None) for i in (5, 6))
    engine._loop.submit([first])
    engine._loop._names.clear()  # as if both had looked at once
    engine._loop.submit([second])
    with pytest.raises(RequestError, match="a live request has this id"):
        second.stream.get(30)
    while not (output := first.stream.get(30)).finished:
        pass
    assert output.token_ids == answers(engine, [[5]])[0]


def test_ids_of_a_refused_list_are_free(engine: Engine):
    with pytest.raises(RequestError, match="a live request has this id"):
        engine.generate([[5], [6]], GREEDY, request_id=["a", "a"])
    live = engine.stream([5], LONG, request_id="live")
    with pytest.raises(RequestError, match="a live request has this id") as refused:
        engine.generate([[5], [6]], GREEDY, request_id=["a", "live"])
    live.close()
    assert engine.generate([[5]], GREEDY, request_id="a")[0].finish_reason == "length"
    assert refused.tb  # which holds what was refused


def test_the_id_of_a_dropped_request_that_was_never_queued_is_free(engine: Engine):
    submission = engine._intake.streamed([5], GREEDY, "mine", None)
    engine._loop._names["mine"] = submission  # interrupted here
    engine._loop.drop(submission)
    engine.stats()  # the drop came before it
    assert engine.generate([[5]], GREEDY, request_id="mine")[0].finish_reason == "length"


def test_thousands_at_once_do_not_hold_a_stream_up(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    core, number, added = engine._started.core, 1000, list[int]()
    add, step = core.add, core.step

    def count_added(submission: Any) -> None:
        added[-1] += 1
        add(submission)

    def count_step() -> None:
        added.append(0)
        step()

    stream = engine.stream([5, 6, 7], LONG)
    next(stream)
    engine._loop.call(lambda: added.append(0))
    monkeypatch.setattr(core, "add", count_added)
    monkeypatch.setattr(core, "step", count_step)
    monkeypatch.setattr("qkv_engine.serving.loop.COMMAND_SECONDS", 0.0)
    short = SamplingParams(temperature=0.0, max_tokens=1)
    assert len(engine.generate([[5]] * number, short)) == number == sum(added)
    assert max(added) == MAX_BATCH
    stream.close()


def test_aborts_of_ids_that_are_not_live_cost_the_engine_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    live, post, posted = engine.stream([5], LONG, request_id="live"), engine._loop._post, list[Any]()

    def watched(command: Any) -> None:
        posted.append(command)
        post(command)

    monkeypatch.setattr(engine._loop, "_post", watched)
    engine.abort("nobody")
    assert not posted
    engine.abort("live")
    *_, last = live
    assert last.finish_reason == "abort" and len(posted) == 1


def test_a_stream_that_is_dropped_while_an_interrupt_comes_is_aborted(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    drop, interrupts = engine._loop.drop, iter([KeyboardInterrupt()])

    def interrupted(submission: Any) -> None:
        for interrupt in interrupts:
            raise interrupt
        drop(submission)

    stream = engine.stream([5, 6, 7], LONG)
    next(stream)
    monkeypatch.setattr(engine._loop, "drop", interrupted)
    del stream
    assert engine._loop.call(lambda: len(engine._started.core.live)) == 0


def test_a_stream_keeps_its_engine_alive():
    assert list(Engine(small_demo(), kv_memory="8MiB").stream([5, 6], GREEDY))[-1].finish_reason == "length"

    def stream() -> Any:
        return Engine(small_demo(), kv_memory="8MiB").stream([5, 6], GREEDY)

    found = stream()
    gc.collect()
    assert list(found)[-1].finish_reason == "length"


def test_finalizers_in_the_engines_own_thread_do_not_hang(engine: Engine):
    stream = engine.stream([5, 6, 7], LONG)

    def finalize() -> list[Any]:
        found: list[Any] = [engine.stats().num_requests]
        for call in (lambda: engine.generate([[5]]), lambda: engine.chat("hi"), lambda: next(stream)):
            with pytest.raises(RequestError, match="own thread"):
                call()
        engine.stream([5], GREEDY).close()
        return found

    assert engine._loop.call(finalize)[0] >= 1
    stream.close()
    assert answers(engine, [[5]])
    engine._loop.call(engine.close)  # ends when the step has
    deadline = time.monotonic() + 20
    while engine._loop._thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine._loop._thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_stream_in_a_forked_child_ends_with_an_error(engine: Engine):
    stream = engine.stream([5, 6, 7], LONG)
    next(stream)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                while True:
                    next(stream)
            except EngineDeadError:
                pass
            try:
                engine.stats()
            except EngineDeadError as error:
                code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not next(stream).finished
    stream.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_async_request_in_a_forked_child_ends_with_an_error(engine: Engine):
    outputs, loop = engine.generate_async([5, 6], LONG), asyncio.new_event_loop()
    loop.run_until_complete(anext(outputs))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            while True:
                asyncio.new_event_loop().run_until_complete(anext(outputs))
        except EngineDeadError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    loop.run_until_complete(outputs.aclose())
    loop.close()
