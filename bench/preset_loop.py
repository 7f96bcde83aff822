"""The loop of a measurement over KV presets: one engine a preset, and a row for each of its items, whatever befalls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from qkv_engine.errors import CapacityError, ConfigError, ModelError, QKVError

from .status import FAILED, FAILURES, NO_FIT, cause

Item = TypeVar("Item")
EngineType = TypeVar("EngineType")
RowType = TypeVar("RowType")


def measure_presets(
    items: Mapping[str, Sequence[Item]],
    open_engine: Callable[[str], AbstractContextManager[EngineType]],
    begin: Callable[[str, EngineType], Callable[[Item], RowType]],
    failure: Callable[[str, Item, str, str], RowType],
    describe: Callable[[QKVError], str],
) -> Iterator[RowType]:
    """Yields the row of each of a preset's ``items`` as soon as it is known.

    An engine is closed before the next is opened; after an exception it is in doubt, and the items left get a new one.
    ``begin`` takes preset and engine, and returns the function that measures an item on it. ``failure`` makes the row
    of an item that does not fit or breaks: of preset, item, status and cause, as ``describe`` words it. Raises
    ``ConfigError`` and ``ModelError``, which no other item would cure.
    """
    for kv, wanted in items.items():
        left = list(wanted)
        while left:
            try:
                with open_engine(kv) as engine:
                    yield from _measured(kv, left, begin(kv, engine), failure, describe)
            except CapacityError as error:
                yield from (failure(kv, item, NO_FIT, describe(error)) for item in left)
                break


def _measured(
    kv: str,
    left: list[Item],
    measure: Callable[[Item], RowType],
    failure: Callable[[str, Item, str, str], RowType],
    describe: Callable[[QKVError], str],
) -> Iterator[RowType]:
    """Takes items off ``left`` until none is left or one breaks."""
    while left:
        item = left.pop(0)
        try:
            row = measure(item)
        except CapacityError as error:
            row = failure(kv, item, NO_FIT, describe(error))
        except (ConfigError, ModelError):
            raise
        except FAILURES as error:
            yield failure(kv, item, FAILED, cause(error, describe))
            return
        yield row
