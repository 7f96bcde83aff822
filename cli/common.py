"""Common parts of the sub-commands: options, logging, and messages and exit codes of errors."""

from __future__ import annotations

import argparse
import difflib
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from qkv_engine.config import STATE_DTYPES, WARM_UPS, Fit, KVConfig
from qkv_engine.errors import CapacityError, ConfigError, ModelError, QKVError
from qkv_engine.presets import DEFAULT_KV, preset_families, resolve_kv

from .log import note
from .text import one_line

if TYPE_CHECKING:
    from qkv_engine import Engine

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_CAPACITY = 0, 1, 2, 3
EXIT_TERMINATED, EXIT_INTERRUPTED = 128 + signal.SIGTERM, 130

MODEL = "MODEL"  # what the user types for the field ``model``
DEMO = "demo"  # the MODEL that stands for the one inside the package

# Errors name the engine's fields; this one is never an option of its own.
_OTHER_FIELDS = {"max_num_seqs": "batch_sweep"}

_ENGINE_OPTIONS = (
    *("model", "kv", "state_dtype", "kv_memory", "host_memory", "kv_store", "kv_store_size"),
    *("dtype", "weights", "device"),
    *("max_model_len", "extend_context", "cuda_graphs", "warm_up", "max_itl_ms", "tensor_parallel", "num_threads"),
    *("deterministic", "revision"),
)
_FIT_OPTIONS = ("memory", "context", "requests")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that every sub-command has."""
    group = parser.add_argument_group("messages")
    group.add_argument("-v", "--verbose", action="store_true", help="log what the engine does, on stderr")
    group.add_argument("--debug", action="store_true", help="log everything, and show a traceback when something fails")


def add_model_arguments(
    parser: argparse.ArgumentParser, *, takes_kv_list: bool = False, caches_prefixes: bool = False
) -> None:
    """The model and how its KV cache is kept; a command that compares presets takes a list of them.

    ``caches_prefixes``: requests may begin with the tokens of earlier ones.
    """
    group = add_loading_arguments(parser)
    presets = ", ".join(f"{name} (default)" if name == DEFAULT_KV else name for name in sorted(preset_families()))
    metavar, noun = ("LIST", "KV presets, such as bf16,int4") if takes_kv_list else ("NAME", "KV preset")
    group.add_argument(
        "--kv", metavar=metavar, help=f"{noun}, how KV blocks are stored, or a plan file (.json): {presets}"
    )
    add_state_argument(group)
    group.add_argument("--kv-memory", metavar="SIZE", help='memory for the KV cache, such as "20GiB" or "50%%"')
    if caches_prefixes:
        help = 'memory of the host in which cached prefixes sleep, such as "32GiB" (default: none)'
        group.add_argument("--host-memory", metavar="SIZE", help=help)
        help = "folder in which cached prefixes outlive the engine (default: none)"
        group.add_argument("--kv-store", metavar="FOLDER", help=help)
        help = 'the most that its files may take (default: "20GiB")'
        group.add_argument("--kv-store-size", metavar="SIZE", help=help)
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest context in tokens")
    group.add_argument(
        "--extend-context",
        action="store_const",
        const=True,
        help="allow --max-model-len beyond what the model was made for",
    )
    group.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, help="replay captured steps on a GPU (default)"
    )
    group.add_argument(
        "--warm-up",
        choices=WARM_UPS,
        help="capture steps on a GPU when they are met (lazy) or all of them at start (full; default of serve alone)",
    )
    group.add_argument(
        "--max-itl-ms",
        type=float,
        metavar="MS",
        help="keep the time between two tokens under this, by smaller chunks of prompts (default: no limit)",
    )
    group.add_argument(
        "--deterministic",
        action="store_const",
        const=True,
        help="give a request the same tokens whatever runs beside it, for --kv without pressure (takes more time)",
    )
    group.add_argument(
        *("--tp", "--tensor-parallel"),
        type=int,
        dest="tensor_parallel",
        metavar="N",
        help="GPUs that share the model; --kv-memory is that of each (default: 1)",
    )


def add_state_argument(group: argparse._ArgumentGroup) -> None:
    """``--state-dtype``, of models that keep states."""
    help = (
        f"how recurrent states of a hybrid are stored: {', '.join(STATE_DTYPES)}, or several of them for states that "
        "step down when memory runs short, widest first (default: float32,int16 where blocks do so, else float32)"
    )
    group.add_argument("--state-dtype", metavar="NAME", help=help)


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """``--fit`` and its fields, for commands that start an engine."""
    group = parser.add_argument_group("fit")
    help = "choose formats of weights and KV that fit the memory together: the first row of qkv-engine fit"
    group.add_argument("--fit", action="store_true", help=help)
    add_fit_fields(group)


def add_fit_fields(group: argparse._ArgumentGroup) -> None:
    """The fields of a ``Fit``, which ``fit_of`` makes of them."""
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help='memory for weights and KV cache together, such as "24GiB" (default: what the device has; the workspace '
        "of a GPU comes on top)",
    )
    group.add_argument("--context", type=int, metavar="N", help="tokens of a request (default: the model's context)")
    group.add_argument("--requests", type=int, metavar="N", help="requests that run at once (default: 1)")


def fit_of(args: argparse.Namespace) -> Fit:
    """The ``Fit`` that the options of ``add_fit_fields`` ask for. Raises ``ConfigError`` for a value out of range."""
    return Fit(**given(args, *_FIT_OPTIONS))


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options of ``names`` that were given, by name."""
    found = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def add_loading_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The model and how it is loaded; the group of options for more."""
    parser.add_argument(
        "model",
        nargs="?",
        type=_model,
        metavar=MODEL,
        help=f'folder or Hugging Face name (default: "{DEMO}", the demo model)',
    )
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", help="auto, bfloat16, float16 or float32")
    group.add_argument("--weights", help="quantize a plain checkpoint while it is read: int8, int4 or fp8")
    group.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    group.add_argument(
        "--threads",
        type=int,
        dest="num_threads",
        metavar="N",
        help="CPU threads (default: one a core; of a small model four at most)",
    )
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")
    return group


def _model(word: str) -> str | None:
    """The ``model`` of an engine that ``word`` means."""
    return None if word == DEMO and not Path(word).is_dir() else word


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for ``Engine``: only what was given, so that its defaults stay in one place.

    Raises ``ConfigError`` where MODEL is a mere shape.
    """
    refuse_shape(args.model)
    options, load = given(args, *_ENGINE_OPTIONS), given(args, *_FIT_OPTIONS)
    if getattr(args, "fit", False):
        options["fit"] = Fit(**load)
    elif "fit" in args and load:
        field, value = next(iter(load.items()))
        raise ConfigError("says what is to fit", field=field, value=value, remedy="Give --fit too")
    return options


def refuse_shape(model: str | None) -> None:
    """Raises ``ConfigError`` where MODEL is a mere shape."""
    from qkv_engine.models.shapes import SHAPES

    if model in SHAPES and not Path(model).is_dir():
        remedy = f"To measure it with random weights: qkv-engine bench --shape {model}"
        raise ConfigError("a shape without weights and tokenizer", field="model", value=model, remedy=remedy)


def kv_ladders(
    text: str | None, others: Mapping[str, KVConfig] | None = None, *, state_dtype: str | None = None
) -> dict[str, KVConfig]:
    """The presets and plan files of "bf16,plan.json", each once and by its name; the default for None.

    ``others`` are ladders by names that only the command knows. Raises ``ConfigError`` for an unknown name, and for two
    ladders of one name.
    """
    found: dict[str, KVConfig] = {}
    for word in dict.fromkeys(part.strip() for part in (DEFAULT_KV if text is None else text).split(",")):
        kv = resolve_kv((others or {}).get(word) or word, state_dtype)
        if kv.name in found:
            raise ConfigError(f"there is another {kv.name}", field="kv", value=word, remedy="Rename one of the files")
        found[kv.name] = kv
    return found


def open_engine(args: argparse.Namespace, **options: Any) -> Engine:
    """The engine that ``args`` ask for; ``options`` of the command go first."""
    load_torch()
    from qkv_engine import Engine

    return Engine(**engine_options(args) | options)


def fill_in(args: argparse.Namespace, **values: Any) -> None:
    """Gives the options that were not given these values."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raises ``ConfigError`` for an option that is given below its least value."""
    for field, low in least.items():
        value = getattr(args, field)
        if value is not None and value < low:
            raise ConfigError(f"must be at least {low}", field=field, value=value)


def eval_engines(args: argparse.Namespace, ladders: Mapping[str, KVConfig]) -> Callable[[str], Engine]:
    """Opener of a ladder's engine, by name. No prefix is shared: every question's KV takes its own way down."""
    return lambda kv: open_engine(args, kv=ladders[kv], prefix_caching=False)


def describe_with(args: argparse.Namespace) -> Callable[[QKVError], str]:
    """The function that words an error as a row's detail, in the options of the command line."""
    return lambda error: str(name_options(error, args.options))


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
        note(describe_error(error), logging.ERROR)
        if isinstance(error, OSError):
            _discard_stdout()
        return _exit_code(error)


def describe_error(error: BaseException) -> str:
    """``error`` in one line a user can act on."""
    if isinstance(error, QKVError | OSError):
        return one_line(str(error)) or type(error).__name__
    return one_line(f"{type(error).__name__}: {error} (a bug, or something out of our hands; --debug shows where)")


def name_options(error: QKVError, options: Mapping[str, str]) -> QKVError:
    """``error`` in the words of the command line: ``options`` maps a field to what the user types for it."""

    def option(field: str) -> str | None:
        return options.get(field) or options.get(_OTHER_FIELDS.get(field, field))

    remedy = error.remedy
    if remedy is not None:
        # Only names with an underscore, and dtype, cannot be words of a sentence.
        remedy = re.sub(r"\bdtype\b|\b[a-z]+(?:_[a-z]+)+\b(?!=)", lambda found: option(found[0]) or found[0], remedy)
    field = error.field and (option(error.field) or error.field)
    if field is not None and error.value is None:
        return type(error)(f"{field}: {error.message}", remedy=remedy)
    return type(error)(error.message, field=field, value=error.value, remedy=remedy)


def nearest(word: str, known: Iterable[str], otherwise: str, suffix: str = "") -> str:
    """The remedy for an unknown ``word``: the ``known`` one it is like, followed by ``suffix``, or ``otherwise``."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {f'{found[0]} {suffix}'.rstrip()}?" if found else otherwise


def prepare_streams() -> bool:
    """Let no stray byte, unencodable character or closed stream end the program; returns whether stdout is open.

    A closed one becomes the null device, which thereby takes its number before a file of ours does.
    """
    is_stdout_open = sys.stdout is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    return is_stdout_open


def _exit_code(error: BaseException) -> int:
    if isinstance(error, CapacityError):
        return EXIT_CAPACITY
    is_wrong_word = isinstance(error, ModelError) and error.field == MODEL
    return EXIT_USAGE if is_wrong_word or isinstance(error, ConfigError) else EXIT_FAILURE


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
