"""The worker process starts once, is replaced when it dies or is interrupted, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkv_engine.errors import RequestError, UnavailableError
from qkv_engine.sandbox import process
from qkv_engine.text import chat_template
from qkv_engine.text.chat_template import ChatTemplate

SOURCE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SLOW = "{% for a in range(messages[0].passes) %}{% for b in range(1000) %}{% endfor %}{% endfor %}" + SOURCE


def say(text: str, passes: int = 0) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text, "passes": passes}]}


def pid_of(template: ChatTemplate) -> int:
    assert template._sandbox._process is not None
    return template._sandbox._process._process.pid


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def template() -> Iterator[ChatTemplate]:
    template = ChatTemplate(SLOW)
    yield template
    template.close()


def test_one_process_for_all_renders(template: ChatTemplate) -> None:
    assert template._sandbox._process is None  # not before the first render
    assert template.render(say("a")) == "a"
    pid = pid_of(template)
    assert [template.render(say(str(i))) for i in range(100)] == [str(i) for i in range(100)]
    assert pid_of(template) == pid


def test_killed_between_renders(template: ChatTemplate) -> None:
    for i in range(3):
        assert template.render(say(str(i))) == str(i)
        os.kill(pid_of(template), signal.SIGKILL)
        if i == 1:
            time.sleep(0.1)  # dead for a while, and not yet dead


def test_killed_while_it_renders(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template._sandbox, "_job", replace(chat_template.JOB, seconds=60))
    template.render(say("a"))
    first = pid_of(template)
    threading.Timer(0.03, os.kill, (first, signal.SIGKILL)).start()
    assert template.render(say("b", passes=9000)) == "b"  # asked again of a new process
    assert pid_of(template) != first


def test_stopped_process_is_given_up(template: ChatTemplate) -> None:
    template.render(say("a"))
    os.kill(pid_of(template), signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RequestError, match="more than"):
        template.render(say("b" * 8_000_000))
    assert time.monotonic() - begin < 2
    assert template.render(say("c")) == "c"


def test_limits_hold_without_a_parent(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a worker that nobody waits for any more."""
    monkeypatch.setattr(template._sandbox, "_job", replace(chat_template.JOB, seconds=60))
    with pytest.raises(RequestError, match="ends its process"):
        template.render(say("a", passes=90_000))


def test_memory_is_given_back(template: ChatTemplate) -> None:
    greedy = ChatTemplate("{% set x = messages[0].content * 10**9 %}{{ x[0] }}")
    with pytest.raises(RequestError, match="memory"):
        greedy.render(say("ab"))
    with pytest.raises(RequestError, match="memory"):
        greedy.render(say("ab"))
    assert greedy.render(say("")) == ""  # the process that ran out of memory is gone
    greedy.close()


class Interrupt(Exception):
    """Raised by a signal handler, as KeyboardInterrupt is."""


def raise_interrupt(*args: object) -> None:
    raise Interrupt


@pytest.mark.parametrize("number", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_interrupts_never_put_messages_out_of_step(template: ChatTemplate, number: int) -> None:
    """A signal at a random moment of a render, mostly by a process that runs, or of the start, as Ctrl-C would."""
    rng, interrupted = random.Random(0), 0
    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        for i in range(number):
            if rng.random() < 0.7:
                assert template.render(say("between")) == "between"
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.choice((0.0002, 0.001, 0.03)) * rng.random() + 1e-6)
                text = template.render(say(f"{i}" * 1000))
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert text == f"{i}" * 1000
            except Interrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > number / 4
    with ThreadPoolExecutor(1) as pool:  # no lock is left that this thread could take again, but no other
        assert pool.submit(template.render, say("last")).result(timeout=10) == "last"
        assert pool.submit(ChatTemplate(SOURCE).render, say("new")).result(timeout=10) == "new"


def test_ctrl_c_in_a_terminal_does_not_reach_it(template: ChatTemplate) -> None:
    template.render(say("a"))
    assert os.getsid(pid_of(template)) == pid_of(template)


def test_many_threads(template: ChatTemplate) -> None:
    texts = [str(i) * (i % 7 + 1) for i in range(400)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda text: template.render(say(text)), texts)) == texts


@pytest.mark.parametrize("call", ["render", "close"])
def test_a_finalizer_in_the_middle_of_a_render(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    receive, found = process.SandboxProcess._receive, list[object]()

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            found.append(template.render(say("inner")) if call == "render" else template.close())

    def collects(self: Any, deadline: float) -> bytearray:
        if not found:
            Cycle()
            gc.collect(0)  # the young alone: a whole collection may outlast the limit of a render
        return receive(self, deadline)

    template.render(say("first"))
    monkeypatch.setattr(process.SandboxProcess, "_receive", collects)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(template.render, say("outer")).result(timeout=30) == "outer"
    assert found == (["inner"] if call == "render" else [None])
    assert template.render(say("last")) == "last"


def test_a_thread_that_ends_leaves_the_process_running(template: ChatTemplate) -> None:
    thread = threading.Thread(target=template.render, args=(say("a"),))
    thread.start()
    thread.join()
    pid = pid_of(template)
    time.sleep(0.05)
    assert template.render(say("b")) == "b" and pid_of(template) == pid


def test_a_forked_child_starts_its_own(template: ChatTemplate) -> None:
    template.render(say("a"))
    pid = pid_of(template)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fine = (
                template._sandbox._process is None
                and template.render(say("child")) == "child"
                and pid_of(template) != pid
            )
            template.close()
            status = 0 if fine else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(say("parent")) == "parent" and pid_of(template) == pid


def test_a_fork_while_another_thread_renders(template: ChatTemplate) -> None:
    template.render(say("a"))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(template.render, say("slow", passes=3000))
        time.sleep(0.05)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if template.render(say("child")) == "child" else 2
                template.close()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert slow.result() == "slow"


def test_nothing_is_left_behind() -> None:
    ChatTemplate(SOURCE).render(say("warm up"))
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    pids = []
    for i in range(6):
        template = ChatTemplate(SOURCE if i % 2 else "{{ 1 / 0 }}")
        try:
            template.render(say("a"))
        except RequestError:
            assert i % 2 == 0
        pids.append(pid_of(template))
        if i < 3:
            template.close()
            template.close()
        del template
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before  # what other tests left may be closed meanwhile
    assert not any(is_running(pid) for pid in pids)  # nor a zombie


SCRIPT = f"""
import os, sys
from qkv_engine.text.chat_template import ChatTemplate
template = ChatTemplate({SOURCE!r})
text = template.render({say("hello")!r})
assert text == "hello"
os.write(int(sys.argv[1]), str(template._sandbox._process._process.pid).encode())
"""


def run_script(end: str, *, closed: bool = False) -> int:
    """Runs the script in a process of its own; returns the worker's process id after its end."""
    read, write = os.pipe()
    options: dict[str, Any] = {"preexec_fn": lambda: os.closerange(0, 3)} if closed else {}
    try:
        subprocess.run([sys.executable, "-c", SCRIPT + end, str(write)], pass_fds=(write,), timeout=60, **options)
    finally:
        os.close(write)
    with os.fdopen(read) as pipe:
        return int(pipe.read())


def wait_for_end(pid: int) -> bool:
    for _ in range(100):
        if not is_running(pid):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)", "template.close()"])
def test_it_ends_with_its_parent(end: str) -> None:
    assert wait_for_end(run_script(end))


def test_standard_streams_may_be_closed() -> None:
    assert wait_for_end(run_script("", closed=True))


def test_a_python_that_cannot_start(monkeypatch: pytest.MonkeyPatch, template: ChatTemplate) -> None:
    for executable in ("/nonexistent/python", "/bin/true"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(UnavailableError, match="start"):
            template.render(say("a"))
    monkeypatch.undo()
    monkeypatch.setattr(template._sandbox, "_job", replace(chat_template.JOB, start_seconds=0))
    with pytest.raises(UnavailableError, match="start"):
        template.render(say("a"))
    monkeypatch.undo()
    assert template.render(say("a")) == "a"
