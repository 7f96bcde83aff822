"""An engine that stopped by a fault lets go of its memory, whatever its error and steps hold."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from typing import Any

import pytest

from qkv_engine import Engine, EngineDeadError, SamplingParams

from ..small_demo import small_demo

LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


def test_an_engine_that_stopped_holds_no_memory(monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise EngineDeadError("gone")

    engine = Engine(small_demo(), kv_memory="16MiB", host_memory="16MiB")
    runner = engine._started.core.runner
    held = [weakref.ref(x) for x in (runner.cache.memory, runner.backend.mover._host._host)]
    del runner
    monkeypatch.setattr(engine._started.core, "step", broken)
    with pytest.raises(EngineDeadError, match="gone"):
        engine.generate([[5]])
    engine._loop._thread.join()
    gc.collect()
    assert [x() for x in held] == [None, None]
    engine.close()


def test_no_step_that_was_never_launched_holds_memory(caplog: pytest.LogCaptureFixture):
    """A step under way breaks off when the next one could not be launched, as on a GPU that runs ahead."""
    caplog.set_level(logging.CRITICAL + 1, logger="qkv_engine")  # a record would hold its error's frames
    engine = Engine(small_demo(), kv_memory="16MiB")
    backend = weakref.ref(engine._started.core.runner.backend)
    calls = []

    def gone(*args: Any) -> Any:
        raise EngineDeadError("gone")

    def step(command: Any, launch: Any = engine._started.core.runner.backend.step) -> Any:
        calls.append(command)
        if len(calls) == 4:
            engine._started.core.runs_ahead = True
            engine._started.core.runner.backend.wait = gone
        return launch(command) if len(calls) < 5 else gone()

    engine._started.core.runner.backend.step = step
    gc.disable()
    try:
        with pytest.raises(EngineDeadError, match="gone"):
            engine.generate([[5]], LONG)
        engine._loop._thread.join()
        step.__defaults__ = None
        assert len(calls) == 5 and backend() is None
    finally:
        gc.enable()
    engine.close()


def test_a_step_that_breaks_off_while_closing_holds_no_memory(caplog: pytest.LogCaptureFixture):
    """The step under way ends well, the one ahead of it does not, as where another rank stands still."""
    caplog.set_level(logging.CRITICAL + 1, logger="qkv_engine")
    engine = Engine(small_demo(), kv_memory="16MiB")
    core = engine._started.core
    backend = weakref.ref(core.runner.backend)
    stream_began, closing = threading.Event(), threading.Event()
    core.runs_ahead = True

    def wait(computed: Any, own: Any = core.runner.backend.wait) -> Any:
        if engine._loop._closing:
            raise EngineDeadError("gone")
        found = own(computed)
        if stream_began.is_set():
            closing.set()
            while not engine._loop._closing:
                time.sleep(0.001)
        return found

    core.runner.backend.wait = wait
    del core
    gc.disable()
    try:
        stream = engine.stream([5], LONG)
        next(stream)
        stream_began.set()
        closing.wait()
        engine.close()
        wait.__defaults__ = None
        with pytest.raises(EngineDeadError, match="closed"):
            list(stream)
        assert backend() is None
    finally:
        gc.enable()
