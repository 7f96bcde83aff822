"""Which changes of size ask the device for memory: exact bytes on a tiny arena."""

from __future__ import annotations

from qkv_engine.kv.arena import Arena
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.table import BlockTables
from qkv_engine.serving.resizer import Resizer

from ..scheduler.common import DENSE


class Device:
    """Notes the holes that it is asked for."""

    def __init__(self) -> None:
        self.holes: list[tuple[int, int]] = []

    def check_resize(self, nbytes: int) -> None:
        pass

    def dig(self, hole: tuple[int, int]) -> None:
        self.holes.append(hole)


def test_only_a_chunk_that_comes_is_asked_of_the_device():
    space = KVManager(BlockTables(Arena(320, 16, block_nbytes=16, chunk_nbytes=32), DENSE), None)
    device = Device()
    resizer = Resizer(device, lambda: None)
    resizer.begin(space, 230, [])
    space.shrink()
    assert not device.holes and space.tables.arena.hole.held_nbytes == 224
    resizer.begin(space, 255, [])  # more than is held, by less than a chunk
    assert not device.holes and space.tables.arena.hole.held_nbytes == 224
    resizer.begin(space, 256, [])
    assert len(device.holes) == 1 and space.tables.arena.hole.held_nbytes == 256
