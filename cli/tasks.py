"""The option that names demo tasks, spelled ``--task`` or ``--tasks`` as anybody likes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.errors import ConfigError

from .model import read_model

if TYPE_CHECKING:
    from qkv_engine.bench.questions import Workload

SPELLINGS = ("task", "tasks")
EXCLUDED = {"task": ("tasks",)}  # which means the same


class Given(NamedTuple):
    """The tasks asked for, and the option they were given by."""

    field: str
    text: str


def add_argument(add: Callable[..., Any], shown: str, **options: Any) -> None:
    """Adds both spellings, of which the help lists ``shown``; ``add`` is an argument group's ``add_argument``."""
    for name in SPELLINGS:
        add(f"--{name}", **(options if name == shown else {"help": argparse.SUPPRESS}))


def given(args: argparse.Namespace) -> Given | None:
    """The tasks asked for, if any."""
    return next((Given(name, getattr(args, name)) for name in SPELLINGS if getattr(args, name) is not None), None)


def workload(args: argparse.Namespace, number: int) -> Workload | None:
    """``number`` questions of the one task that was asked for, if any was. Raises ``ConfigError`` for several tasks."""
    from qkv_engine.bench.questions import Workload, ask, parse_tasks

    task = given(args)
    if task is None:
        return None
    found = parse_tasks(task.text, samples=number, seed=args.seed, field=task.field)
    if len(found) > 1:
        raise ConfigError("one task at a time", field=task.field, value=task.text)
    tokenizer = read_model(args, args.shape).tokenizer(task.field)
    return Workload(found[0], ask(tokenizer, found[0].examples))
