"""Host memory: a file that leaves nothing behind, and memory whose pieces are pinned in the background."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread, Timer

import pytest
import torch

from qkv_engine.device import host_memory
from qkv_engine.device.host_memory import FileMemory, PinnedMemory, allocate_host
from qkv_engine.errors import CapacityError

PIECE = 4 * 4096


class FakePins:
    """Pins that go through once they are allowed to, but for those that are ``refused``."""

    def __init__(self, refused: int = 0):
        self.allowed, self.refused = Event(), refused
        self.pinned: dict[int, int] = {}
        self.is_over = False

    def pin(self, address: int, nbytes: int) -> None:
        self.allowed.wait(10)
        assert address not in self.pinned and not self.is_over
        if len(self.pinned) < self.refused:
            self.refused -= 1
            raise RuntimeError("no more")
        self.pinned[address] = nbytes

    def unpin(self, addresses: Sequence[int]) -> None:
        assert sorted(addresses) == sorted(self.pinned)
        self.is_over = True


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE_NBYTES", PIECE)


def test_file_has_no_name_and_keeps_bytes(tmp_path: Path):
    memory = allocate_host(10_000, torch.device("cpu"), str(tmp_path))
    assert isinstance(memory, FileMemory) and memory.tensor.shape == (10_000,) and not os.listdir(tmp_path)
    memory.tensor[9_000:] = 7
    memory.wait(0, 10_000)
    assert memory.tensor[9_000:].eq(7).all() and memory.tensor[:9_000].eq(0).all()


@pytest.mark.parametrize(("nbytes", "folder"), [(2**61, None), (2**60, None), (4096, "no such folder")])
def test_memory_that_the_system_lacks_is_a_typed_error(tmp_path: Path, nbytes: int, folder: str | None):
    with pytest.raises(CapacityError, match=r"host_memory='.* in .*: .*\. Lower host_memory") as found:
        allocate_host(nbytes, torch.device("cpu"), folder or str(tmp_path))
    assert found.value.field == "host_memory" and not os.listdir(tmp_path)


def test_addresses_that_the_system_lacks_are_a_typed_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "CudaPins", lambda device: FakePins())
    with pytest.raises(CapacityError, match=r"host_memory='.*TiB': the system does not give"):
        allocate_host(2**61, torch.device("cuda"))


@pytest.mark.parametrize("nbytes", [1, PIECE, 9 * PIECE + 100])
def test_each_byte_is_pinned_once_and_let_go(nbytes: int):
    pins = FakePins()
    pins.allowed.set()
    memory = PinnedMemory(nbytes, pins)
    memory.wait(0, nbytes)
    start = memory.tensor.data_ptr()
    pieces = [(start + i, min(PIECE, nbytes - i)) for i in range(0, nbytes, PIECE)]
    assert sorted(pins.pinned.items()) == pieces and not pins.is_over and memory.tensor.eq(0).all()
    del memory
    gc.collect()
    assert pins.is_over


def test_copies_wait_for_their_pieces_and_the_ends_come_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "MOST_THREADS", 1)
    pins = FakePins()
    memory = PinnedMemory(5 * PIECE, pins)
    waiting = Thread(target=memory.wait, args=(2 * PIECE - 1, 2 * PIECE + 1))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    pins.allowed.set()
    waiting.join(10)
    assert not waiting.is_alive()
    memory.wait(0, 5 * PIECE)
    assert [(address - memory.tensor.data_ptr()) // PIECE for address in pins.pinned] == [0, 4, 1, 3, 2]


def test_what_cannot_be_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture):
    pins = FakePins(refused=2)
    pins.allowed.set()
    with caplog.at_level(logging.WARNING):
        memory = PinnedMemory(6 * PIECE, pins)
        memory.wait(0, 6 * PIECE)
    assert len(pins.pinned) == 4 and len(caplog.messages) == 2
    assert caplog.messages[0] == "16.0 KiB of host memory are not pinned, copies are slow: no more"


def test_memory_that_is_let_go_early_is_not_pinned_to_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "MOST_THREADS", 2)
    pins = FakePins()
    memory = PinnedMemory(1000 * PIECE, pins)
    Timer(0.05, pins.allowed.set).start()
    del memory
    gc.collect()
    assert pins.is_over and len(pins.pinned) <= 2
