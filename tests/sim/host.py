"""Host memory of the fake device: copies that leave with waves, and those beside a step, each at a random moment."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from .device import Device, DeviceError, Records


class Host(Records):
    """Records of host memory. A copy beside a step may come at once, or as late as with the next command."""

    def __init__(self, nbytes: int, seed: int):
        super().__init__(nbytes)
        self._rng = random.Random(f"host {seed}")
        self._late: list[tuple[Any, bool]] = []  # copies of this step to be done still, and whether each comes back
        self._sources: list[tuple[int, int]] = []  # device bytes that are read beside this step
        self._targets: list[tuple[int, int]] = []  # those that are written

    def take(self, store: Any) -> tuple[dict[int, Any], tuple[Sequence[Any], Sequence[Any]]]:
        """Takes the copies of a command: those with waves by number, and those beside the step, out and back."""
        if store.host is None:
            return {}, ((), ())
        outs, written, fetched = store.host.take()
        spans = [(c.host, c.host + c.nbytes) for copies in (*outs.values(), written, fetched) for c in copies]
        _check_apart(spans, "a command uses bytes of host memory twice")
        return dict(outs), (written, fetched)

    def carry_out(self, device: Device, copies: Iterable[Any]) -> None:
        """Copies blocks out before a wave."""
        for copy in copies:
            self._copy(device, copy, False)

    def begin_step(self, device: Device, written: Sequence[Any], fetched: Sequence[Any]) -> None:
        """Begins the copies beside a step."""
        self._sources = [(copy.device, copy.device + copy.nbytes) for copy in written]
        self._targets = [(copy.device, copy.device + copy.nbytes) for copy in fetched]
        _check_apart([*self._sources, *self._targets], "bytes are fetched where others are, or are written")
        for copy, comes in [(copy, False) for copy in written] + [(copy, True) for copy in fetched]:
            if self._rng.random() < 0.5:
                self._copy(device, copy, comes)
            else:
                self._late.append((copy, comes))

    def end_step(self, device: Device) -> None:
        """Does the copies that are late."""
        late, self._late = self._late, []
        for copy, comes in late:
            self._copy(device, copy, comes)
        self._sources, self._targets = [], []

    def is_late(self, address: int) -> bool:
        """Whether bytes for that address of host memory are on their way still."""
        return any(copy.host == address and not comes for copy, comes in self._late)

    def is_fetched(self, address: int) -> bool:
        """Whether bytes for that address of the device are on their way still."""
        return any(copy.device == address and comes for copy, comes in self._late)

    def is_used(self, address: int, nbytes: int, by_reads: bool) -> bool:
        """Whether bytes there are on their way to host memory still; ``by_reads``: or from there."""
        late = [(copy.host, copy.host + copy.nbytes) for copy, comes in self._late if by_reads or not comes]
        return _overlaps(late, address, nbytes)

    def check_read(self, address: int, nbytes: int) -> None:
        """Raises ``DeviceError`` for a step that reads what is fetched beside it."""
        if _overlaps(self._targets, address, nbytes):
            raise DeviceError("a block is read while it is fetched")

    def check_write(self, address: int, nbytes: int) -> None:
        """Raises ``DeviceError`` for a step that writes what is copied beside it."""
        if _overlaps([*self._sources, *self._targets], address, nbytes):
            raise DeviceError("a block is written while it is copied")

    def _copy(self, device: Device, copy: Any, comes: bool) -> None:
        if comes:
            device._put(copy.device, replace(self._at(copy.host, copy.nbytes)))
        else:
            record = device._at(copy.device, copy.nbytes)
            if not record.path:
                raise DeviceError("a block leaves before it is written")
            self._put(copy.host, replace(record))


def _overlaps(spans: Iterable[tuple[int, int]], address: int, nbytes: int) -> bool:
    return any(start < address + nbytes and address < end for start, end in spans)


def _check_apart(spans: list[tuple[int, int]], message: str) -> None:
    for (_, end), (start, _) in pairwise(sorted(spans)):
        if start < end:
            raise DeviceError(message)
