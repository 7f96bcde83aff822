"""The option that names demo tasks, spelled ``--task`` or ``--tasks`` as anybody likes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from qkv_engine.errors import ConfigError

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
