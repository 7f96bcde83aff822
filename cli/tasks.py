"""The option that names demo tasks, spelled ``--task`` or ``--tasks`` as anybody likes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.errors import ConfigError

from .model import read_model

if TYPE_CHECKING:
    from qkv_engine.bench.questions import Workload

SPELLINGS = ("task", "tasks")


class Given(NamedTuple):
    """The tasks asked for, and the option they were given by."""

    field: str
    text: str


def add_argument(add: Callable[..., Any], shown: str, **options: Any) -> None:
    """Adds both spellings, of which the help lists ``shown``; ``add`` is an argument group's ``add_argument``."""
    for name in SPELLINGS:
        add(f"--{name}", **(options if name == shown else {"help": argparse.SUPPRESS}))


def given(args: argparse.Namespace) -> Given | None:
    """What was asked for, if anything. Raises ``ConfigError`` if both spellings were used."""
    found = [Given(name, getattr(args, name)) for name in SPELLINGS if getattr(args, name) is not None]
    if len(found) > 1:
        raise ConfigError("cannot be combined with --task, which means the same", field="tasks", value=args.tasks)
    return found[0] if found else None


def workload(
    args: argparse.Namespace, number: int, lengths: Sequence[str] = ("input_len", "output_len")
) -> Workload | None:
    """``number`` questions of the one task that was asked for, if any was.

    Raises ``ConfigError`` for several tasks, and for options ``lengths`` that say how long random requests are.
    """
    from qkv_engine.bench.questions import Workload, ask, parse_tasks

    task = given(args)
    if task is None:
        return None
    for field in lengths:
        if (value := getattr(args, field)) is not None:
            remedy = f"Leave it or --{task.field} out"
            raise ConfigError("questions have lengths of their own", field=field, value=str(value), remedy=remedy)
    found = parse_tasks(task.text, samples=number, seed=args.seed, field=task.field)
    if len(found) > 1:
        raise ConfigError("one task at a time", field=task.field, value=task.text)
    tokenizer = read_model(args, args.shape).tokenizer(task.field)
    return Workload(found[0], ask(tokenizer, found[0].examples))
