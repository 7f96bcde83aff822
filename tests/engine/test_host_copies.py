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


class Side:
    """A stream beside the main one, whose work is done at once or as late as may be.

    A mark is a stream and how much of its work comes before.
    """

    def __init__(self, is_late: bool):
        self.is_late, self.is_inside = is_late, False
        self._work, self._num_done = list[Callable[[], None]](), 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.is_inside = True
        yield
        self.is_inside = False

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        if not self.is_late:
            self.join()

    def pause(self) -> None:
        pass

    def mark(self) -> tuple[Side, int]:
        return self, len(self._work)

    def follow(self, mark: Any) -> None:
        side, _ = mark
        self.enqueue(lambda: side.join(mark))

    def join(self, mark: Any = None) -> None:
        number = len(self._work) if mark is None else mark[1]
        while self._num_done < number:
            self._work[self._num_done]()
            self._num_done += 1


class LateCopier(HostCopier):
    """Its copies are the work of ``Side``s."""

    def __init__(self, memory: Tensor, host: FileMemory, sides: tuple[Side, Side]):
        super().__init__(memory, host, sides)
        self.late_sides = sides

    def _write(self, runs: Iterable[HostCopy]) -> None:
        self._enqueue(super()._write, list(runs))

    def _fetch(self, runs: Iterable[HostCopy]) -> None:
        self._enqueue(super()._fetch, list(runs))

    def _enqueue(self, work: Callable[[Iterable[HostCopy]], None], runs: list[HostCopy]) -> None:
        (side,) = (side for side in self.late_sides if side.is_inside)
        side.enqueue(partial(work, runs))


class Machine:
    """Eight numbered blocks on a device, eight on the host with 100 more, and a mover between them."""

    def __init__(self, out_is_late: bool | None = None, back_is_late: bool = True):
        """Copies are late, or not, on streams of their own; None: they are in line."""
        self.device = torch.arange(8, dtype=torch.uint8).repeat_interleave(BLOCK)
        self.host = FileMemory(8 * BLOCK)
        self.host.tensor.copy_(self.device + 100)
        self.mover = Mover(self.device, LADDER, dig=self.dig, host=self.host)
        if out_is_late is not None:
            self.sides = Side(out_is_late), Side(back_is_late)
            self.mover._host = LateCopier(self.device, self.host, self.sides)

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
    machine = Machine(out_is_late=True)
    machine.mover.move(MoveCommand([Wave([], [], [move(1, 0)])], [], [copy(0, 3)], [copy(4, 7)]))
    assert machine.on_device()[4] == 4 and machine.on_host()[3] == 103  # under way
    out = Wave([], [], [move(5, 0)], None, [copy(4, 6)])
    machine.mover.move(MoveCommand([out], []))
    assert machine.on_device() == [5, 1, 2, 3, 107, 5, 6, 7]
    assert machine.on_host()[3] == 1 and machine.on_host()[6] == 107


def test_who_leaves_is_waited_for_by_the_wave_and_by_the_step():
    machine = Machine(out_is_late=True)
    machine.mover.move(
        MoveCommand([Wave([], [], [move(1, 0)], None, [copy(0, 5)]), Wave([], [], [], None, [copy(2, 6)])], [])
    )
    assert machine.on_host()[5:7] == [0, 2]
    machine.mover.move(MoveCommand([Wave([], [], [], (3 * BLOCK, 4 * BLOCK), [copy(3, 7)])], []))
    assert machine.on_host()[7] == 3 and machine.on_device()[3] == 255


def test_who_comes_waits_for_those_in_its_place_alone():
    machine = Machine(out_is_late=True, back_is_late=False)
    seen = list[list[int]]()
    fetch = HostCopier._fetch

    def watched(copier: HostCopier, runs: Iterable[HostCopy]) -> None:
        seen.append(machine.on_host()[4:7])
        fetch(copier, runs)

    outs = [copy(0, 4), copy(2, 5), copy(6, 6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopier, "_fetch", watched)
        machine.mover.move(MoveCommand([Wave([], [], [], None, outs)], [], [], [copy(2, 1), copy(4, 3)]))
    assert seen == [[0, 2, 106], [0, 2, 106]], "block 6 left before others came"
    assert machine.on_device() == [0, 1, 101, 3, 103, 5, 6, 7] and machine.on_host()[4:7] == [0, 2, 6]


@pytest.mark.parametrize("out_is_late", [True, False])
@pytest.mark.parametrize("back_is_late", [True, False])
def test_streams_of_any_speed_give_the_bytes_of_copies_in_line(out_is_late: bool, back_is_late: bool):
    draw = random.Random(7)
    for _ in range(200):
        machines = Machine(), Machine(out_is_late, back_is_late)
        for _ in range(4):
            command, written_by_step = draw_command(draw)
            for machine in machines:
                machine.mover.move(command)
                for block in written_by_step:
                    machine.device[block * BLOCK : (block + 1) * BLOCK] = 200 + block
        for machine in machines:
            machine.mover.move(MoveCommand([], []))
        assert machines[0].on_device() == machines[1].on_device()
        assert machines[0].on_host() == machines[1].on_host()


def draw_command(draw: random.Random) -> tuple[MoveCommand, list[int]]:
    """A command that uses no host block twice, and blocks that the step behind it writes."""
    hosts, waves, written, fetched = draw.sample(range(8), 8), list[Wave](), list[HostCopy](), list[HostCopy]()
    for _ in range(draw.randint(0, 3)):
        outs = [copy(device, hosts.pop()) for device in draw.sample(range(8), min(len(hosts), draw.randint(0, 2)))]
        src, dst = draw.sample(range(8), 2)
        waves.append(Wave([], [], [move(src, dst)] if draw.random() < 0.5 else [], None, outs))
    devices = draw.sample(range(8), 8)
    for copies in (written, fetched):
        copies += [copy(devices.pop(), hosts.pop()) for _ in range(min(len(hosts), draw.randint(0, 2)))]
    return MoveCommand(waves, [], written, fetched), devices[: draw.randint(0, 2)]


def test_streams_are_entered_and_joined_only_where_copies_are():
    calls: list[str] = []
    machine = Machine()
    sides: Any = tuple(Noted(name, calls) for name in ("out", "back"))
    machine.mover._host = HostCopier(machine.device, machine.host, sides)
    empty, copies = MoveCommand([], []), MoveCommand([], [], [copy(0, 0)], [copy(1, 1)])
    out = MoveCommand([Wave([], [], [], None, [copy(2, 2)])], [], [], [copy(2, 3)])
    for command in (empty, copies, empty, empty):
        machine.mover.move(command)
    assert calls == ["on back", "back pauses", "off back", "on out", "out pauses", "off out", "join out", "join back"]
    calls.clear()
    for command in (out, empty):
        machine.mover.move(command)
    assert calls == [
        "on out", "mark out", "off out", "on back", "back follows", "back pauses", "off back", "join out at",
        "join out", "join back",
    ]  # fmt: skip


class Noted:
    """A stream that notes what is asked of it."""

    def __init__(self, name: str, calls: list[str]):
        self._name, self._calls = name, calls

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._calls.append(f"on {self._name}")
        yield
        self._calls.append(f"off {self._name}")

    def pause(self) -> None:
        self._calls.append(f"{self._name} pauses")

    def mark(self) -> str:
        self._calls.append(f"mark {self._name}")
        return self._name

    def follow(self, mark: str) -> None:
        self._calls.append(f"{self._name} follows")

    def join(self, mark: str | None = None) -> None:
        self._calls.append(f"join {self._name}" + " at" * (mark is not None))


def test_side_stream_of_a_gpu_waits_for_the_current_one_and_back(monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []

    class Stream:
        def __init__(self, name: object):
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            calls.append((self.name, "waits for", other.name))

        def wait_event(self, event: str) -> None:
            calls.append((self.name, "waits for", event))

        def record_event(self) -> str:
            return "an event"

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        calls.append(("on", stream.name))
        yield
        calls.append(("off", stream.name))

    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    memory: Any = SimpleNamespace(
        device=device,
        record_stream=lambda stream: calls.append(("lent to", stream.name)),
        new_zeros=lambda number: torch.zeros(number),
    )
    side = SideStream(memory)
    with side.beside():
        calls.append("copies")
        side.follow("another event")
    side.join(side.mark())
    side.join()
    assert calls == [
        ("lent to", device), (device, "waits for", "main"), ("on", device), "copies",
        (device, "waits for", "another event"), ("off", device), ("main", "waits for", "an event"),
        ("main", "waits for", device),
    ]  # fmt: skip


def test_copies_wait_until_host_memory_may_be_used():
    machine, asked = Machine(), list[tuple[int, int]]()
    host: Any = SimpleNamespace(
        tensor=machine.host.tensor, piece_nbytes=2 * BLOCK, wait=lambda start, end: asked.append((start, end))
    )
    HostCopier(machine.device, host).leave([copy(1, 1), copy(2, 2), copy(3, 3)])
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
