"""Copies between KV memory and host memory: merged, in order with the waves, beside a step until the next command."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv_engine.config import KVConfig, RungConfig
from qkv_engine.device import cache as cache_module
from qkv_engine.device.cache import KVCache
from qkv_engine.device.host_copier import HostCopier, SideStream, merged
from qkv_engine.device.host_memory import FileMemory
from qkv_engine.device.layouts import ladder_of_layers
from qkv_engine.device.mover import Mover
from qkv_engine.kv.moves import HostCopy, MoveCommand, MoveLaunch, Wave
from qkv_engine.layer_kv import LayerKV
from qkv_engine.parallel.commands import decode, encode

LADDER = ladder_of_layers(
    KVConfig(name="one", rungs=(RungConfig("dense32", "dense32", "dense32"),)), [LayerKV(1, 64, None)], torch.float32
)
BLOCK = LADDER.widest.block_nbytes


def copy(device: int, host: int) -> HostCopy:
    """A block of device memory and one of host memory, by number."""
    return HostCopy(device * BLOCK, host * BLOCK, BLOCK)


class LateSide:
    """A stream beside the main one, whose copies are carried out as late as they may be."""

    def __init__(self) -> None:
        self.is_inside, self.work = False, list[Callable[[], None]]()

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.is_inside = True
        yield
        self.is_inside = False

    def join(self) -> None:
        for each in self.work:
            each()
        self.work.clear()


class LateCopier(HostCopier):
    """Its copies beside a step are under way until somebody waits for them."""

    side: LateSide

    def write(self, copies: Iterable[HostCopy]) -> None:
        self._do(super().write, list(copies))

    def fetch(self, copies: Iterable[HostCopy]) -> None:
        self._do(super().fetch, list(copies))

    def _do(self, work: Callable[[Iterable[HostCopy]], None], copies: list[HostCopy]) -> None:
        if self.side.is_inside:
            self.side.work.append(partial(work, copies))
        else:
            work(copies)


class Machine:
    """Eight numbered blocks on a device, eight on the host with 100 more, and a mover between them."""

    def __init__(self, late: bool = False):
        self.device = torch.arange(8, dtype=torch.uint8).repeat_interleave(BLOCK)
        self.host = FileMemory(8 * BLOCK)
        self.host.tensor.copy_(self.device + 100)
        self.side = LateSide()
        self.mover = Mover(self.device, LADDER, dig=self.dig, host=self.host)
        if late:
            self.mover._host = LateCopier(self.device, self.host, self.side)
            self.mover._host.side = self.side

    def dig(self, start: int, end: int) -> None:
        self.device[start:end] = 255

    def on_device(self) -> list[int]:
        return _numbers(self.device)

    def on_host(self) -> list[int]:
        return _numbers(self.host.tensor)


def _numbers(memory: Tensor) -> list[int]:
    blocks = memory.view(-1, BLOCK)
    assert blocks.eq(blocks[:, :1]).all()
    return blocks[:, 0].tolist()


def move(src: int, dst: int) -> MoveLaunch:
    return MoveLaunch(0, 0, 0, BLOCK, [src * BLOCK], [dst * BLOCK], [], [])


@pytest.mark.parametrize("piece", [64, 100, 10**9])
def test_merged_copies_are_the_same_bytes_within_pieces(piece: int):
    draw = random.Random(piece)
    for _ in range(100):
        places = draw.sample(range(40), 12)
        copies = [HostCopy(place * 16, draw.choice((place, 39 - place)) * 16, 16) for place in places]
        found = merged(copies, piece)
        assert Counter(_bytes(found)) == Counter(_bytes(copies))
        assert all(each.host // piece == (each.host + each.nbytes - 1) // piece for each in found)
        ends = {
            (each.device + each.nbytes, each.host + each.nbytes) for each in found if (each.host + each.nbytes) % piece
        }
        assert not ends & {(each.device, each.host) for each in found}, "neighbours are left"


def _bytes(copies: Iterable[HostCopy]) -> list[tuple[int, int]]:
    return [(each.device + i, each.host + i) for each in copies for i in range(each.nbytes)]


def test_outs_leave_before_their_wave_is_carried_out():
    machine = Machine()
    first = Wave([], [], [move(1, 0)], None, [copy(0, 5), copy(3, 6)])
    second = Wave([], [], [move(2, 3)], (7 * BLOCK, 8 * BLOCK), [copy(0, 1), copy(7, 2)])
    machine.mover.move(MoveCommand([first, second], []))
    assert machine.on_device() == [1, 1, 2, 2, 4, 5, 6, 255]
    assert machine.on_host() == [100, 1, 7, 103, 104, 0, 3, 107]


def test_copies_beside_a_step_come_after_waves_and_fresh_slots():
    machine = Machine()
    command = MoveCommand(
        [Wave([], [], [move(1, 0)])], [(4 * BLOCK, BLOCK), (5 * BLOCK, BLOCK)], [copy(0, 3), copy(6, 4)], [copy(4, 7)]
    )
    machine.mover.move(command)
    assert machine.on_device() == [1, 1, 2, 3, 107, 0, 6, 7]
    assert machine.on_host() == [100, 101, 102, 1, 6, 105, 106, 107]


def test_next_command_waits_for_copies_beside_the_step():
    machine = Machine(late=True)
    machine.mover.move(MoveCommand([Wave([], [], [move(1, 0)])], [], [copy(0, 3)], [copy(4, 7)]))
    assert machine.on_device()[4] == 4 and machine.on_host()[3] == 103  # under way
    out = Wave([], [], [move(5, 0)], None, [copy(4, 6)])
    machine.mover.move(MoveCommand([out], []))
    assert machine.on_device() == [5, 1, 2, 3, 107, 5, 6, 7]
    assert machine.on_host()[3] == 1 and machine.on_host()[6] == 107


def test_streams_are_entered_and_joined_only_where_copies_are():
    calls: list[str] = []
    machine = Machine()
    side = SimpleNamespace(join=lambda: calls.append("join"), beside=lambda: _noting(calls))
    machine.mover._host = HostCopier(machine.device, machine.host, side)
    empty, copies = MoveCommand([], []), MoveCommand([], [], [copy(0, 0)], [copy(1, 1)])
    for command in (empty, copies, copies, empty, empty):
        machine.mover.move(command)
    assert calls == ["in", "out", "join", "in", "out", "join"]


@contextmanager
def _noting(calls: list[str]) -> Iterator[None]:
    calls.append("in")
    yield
    calls.append("out")


def test_side_stream_of_a_gpu_waits_for_the_current_one_and_back(monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []

    class Stream:
        def __init__(self, name: object):
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            calls.append((self.name, "waits for", other.name))

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        calls.append(("on", stream.name))
        yield
        calls.append(("off", stream.name))

    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    memory: Any = SimpleNamespace(device=device, record_stream=lambda stream: calls.append(("lent to", stream.name)))
    side = SideStream(memory)
    with side.beside():
        calls.append("copies")
    side.join()
    assert calls == [
        ("lent to", device), (device, "waits for", "main"), ("on", device), "copies", ("off", device),
        ("main", "waits for", device),
    ]  # fmt: skip


def test_copies_wait_until_host_memory_may_be_used():
    machine, asked = Machine(), list[tuple[int, int]]()
    host: Any = SimpleNamespace(
        tensor=machine.host.tensor, piece_nbytes=2 * BLOCK, wait=lambda start, end: asked.append((start, end))
    )
    HostCopier(machine.device, host).write([copy(1, 1), copy(2, 2), copy(3, 3)])
    assert asked == [(BLOCK, 2 * BLOCK), (2 * BLOCK, 4 * BLOCK)]
    assert machine.on_host()[:5] == [100, 1, 2, 3, 104]


def test_a_command_follows_each_with_copies_beside_its_step(monkeypatch: pytest.MonkeyPatch):
    cache = KVCache(LADDER, 16 * BLOCK, torch.device("cpu"))
    moved: list[MoveCommand] = []
    backend: Any = SimpleNamespace(move=lambda command: moved.append(command) or [])
    empty, copies = MoveCommand([], []), MoveCommand([], [], [], [copy(1, 1)])
    commands = iter([empty, copies, copies, empty, empty])
    monkeypatch.setattr(cache_module, "take_moves", lambda tables: (next(commands), []))
    for _ in range(5):
        assert cache.apply_moves(backend) == set()
    assert moved == [copies, copies, empty]


def test_commands_with_copies_go_to_other_ranks(tmp_path: Path):
    command = MoveCommand([Wave([], [], [], None, [copy(1, 2)])], [(0, 16)], [copy(2, 3)], [copy(3, 4)])
    assert decode(encode(command)) == command
