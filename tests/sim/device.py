"""A fake device: contents of the arena's slots, and tokens that depend on all KV a request can see.

A token's KV is a number that stands for all tokens up to it, as the KV of a real model depends on all that came before.
A record is the content of one slot: how many tokens were written, the number of the last one, the rungs it went
through, its group, its salt, and whether it is spoilt. A bank's record has the tokens that it was mined from; so has
that of a block sealed under a bank. A request's next token is a hash of the records its table names, so any lost, stale
or exchanged block changes the output.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from .broken import Broken
from .options import Group

if TYPE_CHECKING:
    from .host import Host

MASK = (1 << 61) - 1


def mix(*parts: int) -> int:
    """A hash of numbers, equal in every process."""
    return hash(parts) & MASK


@dataclass(slots=True)
class Record:
    """The content of one slot."""

    nbytes: int
    path: tuple[int, ...]  # the rungs it stood on
    group: int = 0
    count: int = 0  # tokens written, from the first
    value: int = 0  # number of the last token
    salt: str = ""
    spoilt: bool = False
    mined: tuple[tuple[int, int], ...] = ()  # blocks that a bank is mined from: tokens, and the last one's number
    windows: tuple[int, ...] = ()  # numbers of the last tokens of windows that added a pattern


class DeviceError(Broken):
    """A request of the books that would mix up or lose bytes."""


class Records:
    """Records at addresses below ``nbytes``, where a ``hole`` has none."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.hole = (0, 0)  # addresses of bytes that are not there
        self._starts: list[int] = []
        self._records: dict[int, Record] = {}

    def dig(self, hole: tuple[int, int]) -> None:
        """Takes the bytes of ``hole`` away, with all that lies there, and gives back those of the one before."""
        if not 0 <= hole[0] <= hole[1] <= self.nbytes:
            raise DeviceError("a hole lies outside the arena")
        self.hole = hole
        for start in [s for s, record in self._records.items() if self._is_gone(s, s + record.nbytes)]:
            del self._records[start]
            self._starts.remove(start)

    def _is_gone(self, start: int, end: int) -> bool:
        return start < self.hole[1] and self.hole[0] < end

    def _at(self, address: int, nbytes: int) -> Record:
        record = self._records.get(address)
        if record is None or record.nbytes != nbytes:
            raise DeviceError(f"nothing of {nbytes} bytes lies at {address}")
        return record

    def _put(self, address: int, record: Record) -> None:
        """Writes a record over all records at its bytes."""
        end = address + record.nbytes
        if address < 0 or end > self.nbytes:
            raise DeviceError(f"bytes {address}:{end} lie outside the arena")
        if self._is_gone(address, end):
            raise DeviceError(f"bytes {address}:{end} are written in a hole")
        first = bisect.bisect_left(self._starts, address)
        if first and self._starts[first - 1] + self._records[self._starts[first - 1]].nbytes > address:
            first -= 1
        last = bisect.bisect_left(self._starts, end)
        for old in self._starts[first:last]:
            del self._records[old]
        self._starts[first:last] = [address]
        self._records[address] = record


class Device(Records):
    """The bytes of an arena, and ``host``, memory that blocks are copied to and from."""

    def __init__(self, nbytes: int, groups: tuple[Group, ...], has_bank: bool, host: Host):
        super().__init__(nbytes)
        self.groups, self.has_bank, self.host = groups, has_bank, host
        self.sealed_bad: set[Any] = set()  # blocks whose bad values were sealed since somebody looked
        self.runs_again = False  # a step broke off: its tokens, and those of a step after it, are written again

    def apply(self, store: Any) -> list[Any]:
        """Carries out waves and clears fresh slots in the order the cache does; returns the moves."""
        waves, store.waves = store.waves, []
        holes, store.holes = store.holes, {}
        self.host.end_step(self)
        outs, beside = self.host.take(store)
        for number, wave in enumerate([*waves, []]):
            self.host.carry_out(self, outs.pop(number, ()))
            if number in holes:
                self.dig(holes[number])
            self._move(wave)
        if outs:
            raise DeviceError("blocks leave behind waves that there are not")
        for slot in store.take_fresh():
            self._put(slot.address, Record(slot.nbytes, ()))
        self.host.begin_step(self, *beside)
        return [move for wave in waves for move in wave]

    def _move(self, wave: list[Any]) -> None:
        spans, sources = list[tuple[int, int]](), {move.src for move in wave}
        banks = {move.bank for move in wave if move.bank is not None}
        spans += [(address, address + self.groups[0].slots[-1]) for address in banks]
        mined = {address for move in wave if move.mining for address in move.mining.addresses}
        mined |= {address for move in wave if move.centres for address in move.centres.addresses}
        spans += [(address, address + self.groups[0].sizes[0]) for address in mined if address not in sources]
        for move in wave:
            group = self.groups[move.block.group]
            spans.append((move.src, move.src + group.size(move.old)))
            spans.append((move.dst, move.dst + group.size(move.new)))
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise DeviceError("a wave both reads and writes a byte, or does one of them twice")
        for move in wave:
            if move.mining is not None:
                self._mine(move)
            if move.centres is not None:
                self._add_centres(move)
        for _, moves in groupby(sorted(wave, key=_rungs), key=_rungs):
            self._launch(list(moves))

    def _launch(self, moves: list[Any]) -> None:
        index = moves[0].block.group
        group = self.groups[index]
        found = [self._at(move.src, group.size(move.old)) for move in moves]
        for move, record in zip(moves, found, strict=True):
            if move.bank is not None:
                bank = self._bank(move.bank)
                if not bank.path:
                    raise DeviceError("a block is sealed before its bank is mined")
                if len(bank.windows) < move.num_windows:
                    raise DeviceError("a block may choose from patterns that are not there")
                record = replace(record, mined=bank.mined, windows=bank.windows[: move.num_windows])
            elif self.has_bank and move.old == 0 < move.new:
                raise DeviceError("a block is sealed under no bank")
            if record.path and record.group != index:
                raise DeviceError("a block is moved as if it were another group's")
            if record.path and record.path[-1] != move.old:
                raise DeviceError(f"a block on rung {record.path[-1]} is moved as if on {move.old}")
            if record.spoilt and move.old == 0 < move.new:
                self.sealed_bad.add(move.block)
            if move.old < move.new <= -1 and not record.path:
                raise DeviceError("a state that nobody wrote is rewritten")
            path = record.path if move.old == move.new else (*record.path, move.new)
            self._put(move.dst, replace(record, nbytes=group.size(move.new), path=path))

    def _mine(self, move: Any) -> None:
        bank, (addresses, num_tokens) = self._bank(move.bank), move.mining
        records = [self._at(address, self.groups[0].sizes[0]) for address in addresses]
        if bank.path:
            raise DeviceError("a bank is mined again")
        if any(record.path != (0,) for record in records):
            raise DeviceError("a bank is mined from other than dense blocks")
        if sum(record.count for record in records) < num_tokens:
            raise DeviceError("a bank is mined from tokens that are not computed")
        bank.path, bank.mined = (-len(self.groups[0].slots),), tuple((record.count, record.value) for record in records)

    def _add_centres(self, move: Any) -> None:
        bank, (first, addresses) = self._bank(move.bank), move.centres
        records = [self._at(address, self.groups[0].sizes[0]) for address in addresses]
        if first != len(bank.windows) or not bank.path:
            raise DeviceError("windows add their patterns out of turn")
        if any(record.path != (0,) for record in records):
            raise DeviceError("a window that adds a pattern is not dense")
        bank.windows += tuple(record.value for record in records)

    def _bank(self, address: int) -> Record:
        return self._at(address, self.groups[0].slots[-1])

    def write(self, block: Any, nbytes: int, start: int, end: int, value: int, salt: str) -> None:
        """Writes tokens ``start:end`` of a block, the last of which is ``value``."""
        self.host.check_write(block.slot.address, nbytes)
        record = self._at(block.slot.address, nbytes)
        if self.runs_again and record.count >= end:
            record.count, record.path = start, record.path if start else ()
        if record.count == 0 and record.path:
            raise DeviceError("a block was not cleared of its earlier owner's bytes")
        if record.count != start or (record.path and record.path != (block.rung,)):
            raise DeviceError(f"tokens {start}:{end} are written behind {record.count}, on rungs {record.path}")
        record.count, record.value, record.salt, record.path = end, value, salt, (block.rung,)
        record.group = block.group

    def go_on(self, slot: Any, start: int, end: int, before: int | None, after: int, salt: str) -> bool:
        """Has a state go on from tokens up to ``start``, where it is ``before``, to ``end``; whether it is spoilt.

        One that begins there may have been anything.
        """
        record = self._at(slot.slot.address, slot.slot.nbytes)
        if start:
            if record.path[-1:] != (slot.rung,):
                raise DeviceError(f"a state goes on from bytes of rungs {record.path}")
            if record.salt != salt:
                raise DeviceError("a state goes on from one of another salt")
            if (record.count, record.value) != (start, before):
                raise DeviceError(f"a state of {record.count} tokens goes on from {start}, or it is of other tokens")
        is_spoilt = record.spoilt and start > 0
        self._put(slot.slot.address, Record(record.nbytes, (slot.rung,), slot.group, end, after, salt, is_spoilt))
        return is_spoilt

    def read(self, block: Any, nbytes: int, salt: str) -> Record:
        """The record of a block, checked as a request with ``salt`` reads it."""
        self.host.check_read(block.slot.address, nbytes)
        record = self._at(block.slot.address, nbytes)
        if record.salt != salt:
            raise DeviceError(f"bytes written under salt {record.salt!r} are read under {salt!r}")
        if record.group != block.group:
            raise DeviceError("bytes of another group are read")
        if not record.path or record.path[-1] != block.rung:
            raise DeviceError(f"a block on rungs {record.path} is read as if on {block.rung}")
        return record

    def spoil(self, block: Any) -> None:
        self._at(block.slot.address, block.slot.nbytes).spoilt = True

    def path(self, block: Any) -> tuple[int, ...]:
        return self._at(block.slot.address, block.slot.nbytes).path


def _rungs(move: Any) -> tuple[int, int, int]:
    """The group and the rungs that all moves of one launch share."""
    return move.block.group, move.old, move.new
