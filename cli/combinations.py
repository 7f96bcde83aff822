"""Options of a command that exclude each other, and options that are of no use without another one."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

from qkv_engine.errors import ConfigError

Fields = Mapping[str, Iterable[str]]  # other options by option, as fields of the arguments


def check_combinations(args: argparse.Namespace, *, excluded: Fields, needed: Fields) -> None:
    """Raises ``ConfigError`` for an option beside one that it excludes, and for one without any that it needs."""
    for field, others in excluded.items():
        if is_given(args, field):
            for other in others:
                if is_given(args, other):
                    name = args.options[field]
                    raise _wrong(args, other, f"cannot be combined with {name}", f"Leave it or {name} out")
    for field, others in needed.items():
        if is_given(args, field) and not any(is_given(args, other) for other in others):
            names = " or ".join(args.options[other] for other in others)
            raise _wrong(args, field, f"needs {names}", f"Add {names}, or leave it out")


def is_given(args: argparse.Namespace, field: str) -> bool:
    """Whether the command line has the option ``field``, whose default is None or False."""
    value = getattr(args, field, None)
    return value is not None and value is not False


def _wrong(args: argparse.Namespace, field: str, message: str, remedy: str) -> ConfigError:
    value = getattr(args, field)
    shown = None if value is True else value if isinstance(value, int) else str(value)
    return ConfigError(message, field=field, value=shown, remedy=remedy)
