"""Work in a thread of its own that an interrupt waits for.

A process that ends while a thread of Python is inside torch is aborted ("terminate called without an active
exception"): the thread is ended on its way back into Python, and C++ does not let it through.
"""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import sleep
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(work: Callable[[Callable[[], bool]], T]) -> T:
    """Runs ``work`` in a thread that ends with it; an interrupt makes its argument true and waits for the end.

    A thread that computes on the CPU keeps OpenMP workers for life, and as soon as the workers of all threads
    outnumber the cores OpenMP makes each wait for its work asleep: the engine's owner thread decodes at half speed.
    A process that ended while a thread is inside torch would be aborted, so the thread is waited for in any case.
    """
    stop, begun, results, errors = list[bool](), list[bool](), list[T](), list[BaseException]()
    ended = Lock()

    def run() -> None:
        begun.append(True)
        try:
            if not stop:
                results.append(work(lambda: bool(stop)))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    # Nothing of ``threading`` but a bare lock: interrupted, an Event, a Future and the start of a Thread can stay
    # locked for ever, and a Thread that is joined is taken for ended.
    ended.acquire()
    try:
        start_new_thread(run, ())
        ended.acquire()
    except BaseException:
        stop.append(True)
        is_over = False
        while not is_over:
            with suppress(BaseException):  # one more Ctrl-C, also between two sleeps: the load ends soon enough
                while begun and not (results or errors):
                    sleep(0.01)
                is_over = True
        raise
    if errors:
        raise errors.pop()
    return results.pop()
