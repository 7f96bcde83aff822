"""The program of a sandbox: answers requests by one worker, in a process of its own under limits.

Run by path, without ``site`` and without this package, so that it starts in a tenth of a second. Its arguments are the
number of a socket, the path of the worker's source, bytes of memory, and folders for Python's path. The source has a
class ``Worker``, made of the setup, whose ``answer`` turns a request into bytes. Messages have a length of four bytes
before them: first the setup, answered by ``{}`` once the worker is made, then requests, each answered by an error as
JSON, or by ``{}`` and a second message, the answer. The end of the input ends the program.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, BinaryIO, cast

MAX_CPU_SECONDS = 1  # of one exchange, rounded up to a full second; the kernel ends the process then
MAX_ERROR_CHARS = 500  # of a stranger's own message, so that it cannot flood a log
FRAME = struct.Struct(">I")  # length of a message in bytes, sent before it


def main() -> None:
    """Makes the worker and answers requests, until the end of the input or of the memory."""
    number, source, memory, *folders = sys.argv[1:]
    forbid_files()
    sys.path += folders
    stream = cast(BinaryIO, socket.socket(fileno=int(number)).makefile("rwb"))
    setup = read_frame(stream)
    if setup is None:
        return
    worker = load(source).Worker(setup)
    limit_memory(int(memory))
    reply(stream)  # ready
    while (request := read_frame(stream)) is not None:
        limit_cpu()
        try:
            answer = worker.answer(request)
        except MemoryError:  # this process may be in pieces: the next request gets a new one
            return reply(stream, error=f"it needs more than {int(memory) >> 20} MiB of memory", is_broken=False)
        except BaseException as error:  # panics of libraries in Rust are no Exception
            reply(stream, error=describe(error), is_broken=getattr(error, "is_broken", False))
        else:
            reply(stream, answer)


def load(path: str) -> Any:
    """The module of a source file."""
    spec = spec_from_file_location("worker", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """The error's own words on one line, or its type where it has none."""
    try:
        return " ".join(str(error)[: 4 * MAX_ERROR_CHARS].split())[:MAX_ERROR_CHARS] or type(error).__name__
    except Exception:  # a template raised a value that cannot be written out
        return type(error).__name__


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message; ``None`` at the end of the input."""
    head = stream.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    return stream.read(FRAME.unpack(head)[0])


def reply(stream: BinaryIO, answer: bytes | None = None, **error: str | bool) -> None:
    """Sends an error, or ``{}`` and the answer if there is one."""
    frames = [json.dumps(error).encode()] + ([] if answer is None else [answer])
    for frame in frames:
        stream.write(FRAME.pack(len(frame)))
        stream.write(frame)
    stream.flush()


# ---- limits


def forbid_files() -> None:
    """Forbids files and core dumps, where the system can."""
    if sys.platform != "win32":
        import resource

        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, 0)


def limit_memory(number: int) -> None:
    """Bounds the address space to ``number`` bytes more than now; beyond it Python raises a MemoryError."""
    if sys.platform != "win32":
        import resource

        _limit(resource.RLIMIT_AS, _address_space() + number)


def limit_cpu() -> None:
    """Gives the next exchange its CPU time; ends the program even if nobody is left to kill it."""
    if sys.platform != "win32":
        import resource

        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + MAX_CPU_SECONDS)


def _address_space() -> int:
    """Bytes of it that are in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _limit(kind: int, value: int) -> None:
    import resource

    hard = resource.getrlimit(kind)[1]
    try:
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    except (OSError, ValueError):  # macOS has limits that cannot be set; the parent's deadline holds there
        return


if __name__ == "__main__":
    main()
