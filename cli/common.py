"""What the sub-commands share: options, logging, and how errors become messages and exit codes."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from qkv_engine.config import resolve_kv
from qkv_engine.errors import CapacityError, ConfigError, QKVError

from .text import one_line

if TYPE_CHECKING:
    from qkv_engine import Engine

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_CAPACITY = 0, 1, 2, 3
EXIT_TERMINATED, EXIT_INTERRUPTED = 128 + signal.SIGTERM, 130

_ENGINE_OPTIONS = (
    *("model", "kv", "kv_memory", "dtype", "device"),
    *("max_model_len", "extend_context", "cuda_graphs", "revision"),
)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that every sub-command has."""
    group = parser.add_argument_group("messages")
    group.add_argument("-v", "--verbose", action="store_true", help="log what the engine does, on stderr")
    group.add_argument("--debug", action="store_true", help="log everything, and show a traceback when something fails")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and how its KV cache is kept."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or Hugging Face name (default: the demo model)"
    )
    group = parser.add_argument_group("engine")
    group.add_argument("--kv", metavar="NAME", help="how KV blocks are stored")
    group.add_argument("--kv-memory", metavar="SIZE", help='memory for the KV cache, such as "20GiB" or "50%%"')
    group.add_argument("--dtype", help="auto, bfloat16, float16 or float32")
    group.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest context in tokens")
    group.add_argument(
        "--extend-context",
        action="store_const",
        const=True,
        help="allow --max-model-len beyond what the model was made for",
    )
    group.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, help="replay captured decode steps on a GPU (default)"
    )
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for ``Engine``: only what was given, so that its defaults stay in one place."""
    options = {name: getattr(args, name, None) for name in _ENGINE_OPTIONS}
    return {name: value for name, value in options.items() if value is not None}


def kv_list(text: str) -> tuple[str, ...]:
    """The presets of "bf16,int8", each once. Raises ``ConfigError`` for an unknown one."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        resolve_kv(name)
    return names


def open_engine(args: argparse.Namespace) -> Engine:
    """The engine that ``args`` ask for."""
    load_torch()
    from qkv_engine import Engine

    return Engine(**engine_options(args))


def load_torch() -> None:
    """Import torch and the engine, which takes a while; interrupted inside, torch aborts or loses the signal."""
    with interrupt_later():
        import qkv_engine.engine  # noqa: F401


@contextmanager
def interrupt_later() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block has ended."""
    caught: list[int] = []
    with _handlers(dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, frame: caught.append(number))):
        yield
    if caught:
        signal.raise_signal(caught[0])


def configure_logging(args: argparse.Namespace) -> None:
    """Send the package's log to stderr, one line a record."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter("qkv-engine: %(levelname)s: %(message)s"))
    logger = logging.getLogger("qkv_engine")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if args.debug else logging.INFO if args.verbose else logging.WARNING)


class _OneLineFormatter(logging.Formatter):
    """Keeps a message on one line, so that nothing logged can pose as another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        record.message = one_line(record.message)
        return super().formatMessage(record)


def guarded(command: Callable[[], int], *, debug: bool = False) -> int:
    """Run ``command`` and turn whatever ends it into an exit code and at most one line on stderr."""
    try:
        with _terminable():
            code = command()
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_FAILURE
    except Exception as error:
        if debug:
            raise
        print(f"qkv-engine: error: {describe_error(error)}", file=sys.stderr)
        if isinstance(error, OSError):
            _discard_stdout()
        return _exit_code(error)


def describe_error(error: BaseException) -> str:
    """``error`` in one line a user can act on."""
    if isinstance(error, QKVError | OSError):
        return one_line(str(error)) or type(error).__name__
    return one_line(f"{type(error).__name__}: {error} (a bug, or something out of our hands; --debug shows where)")


def replace_undecodable() -> None:
    """Let no stray byte or unencodable character end the program."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _exit_code(error: BaseException) -> int:
    if isinstance(error, CapacityError):
        return EXIT_CAPACITY
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE


@contextmanager
def _terminable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM unwind the stack, so that the terminal is restored and the engine closed."""

    def unwind(signum: int, frame: object) -> None:
        raise SystemExit(EXIT_TERMINATED)

    with _handlers({signal.SIGINT: signal.default_int_handler, signal.SIGTERM: unwind}):
        yield


@contextmanager
def _handlers(handlers: Mapping[int, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    """Handle signals in the block; one that the program was started to ignore stays ignored."""
    previous = {number: signal.getsignal(number) for number in handlers}
    changed = {number: handler for number, handler in previous.items() if handler not in (None, signal.SIG_IGN)}
    for number in changed:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def _discard_stdout() -> None:
    """Point stdout at nothing: what is still buffered cannot be written, and must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
