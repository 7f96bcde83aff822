"""Memory of a GPU under one range of addresses, on a driver that checks each call and lacks memory at will."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qkv_engine.device.gpu.mapped import MappedMemory, MappedRange, granule_nbytes
from qkv_engine.errors import CapacityError

GRANULE, DEVICE = 2**21, torch.device("cuda", 3)


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeDriver:
    """The functions of ``cuda.bindings.driver`` that map memory, each checked against what was called before."""

    CUresult = Status
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="both")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="least")

    def __init__(self, nbytes: int):
        self.free = nbytes
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # bytes of each
        self.mapped: dict[int, tuple[int, int]] = {}  # bytes and handle at an address
        self.readable: set[int] = set()
        self.most = self.serial = 0  # bytes of handles at once

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def cuMemGetAllocationGranularity(self, properties: Any, option: str) -> tuple[Status, int]:
        assert option == "least" and self._is_here(properties.location)
        return Status.CUDA_SUCCESS, GRANULE

    def cuMemAddressReserve(self, nbytes: int, align: int, hint: int, flags: int) -> tuple[Status, int]:
        assert nbytes % GRANULE == 0 and (align, hint, flags) == (0, 0, 0)
        self.reserved[2**40] = nbytes
        return Status.CUDA_SUCCESS, 2**40

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Status]:
        assert not self.mapped and self.reserved.pop(address) == nbytes
        return (Status.CUDA_SUCCESS,)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Status, int | None]:
        assert nbytes > 0 and nbytes % GRANULE == 0 == flags
        assert properties.type == "pinned" and self._is_here(properties.location)
        if sum(self.handles.values()) + nbytes > self.free:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self.serial += 1
        self.handles[self.serial] = nbytes
        self.most = max(self.most, sum(self.handles.values()))
        return Status.CUDA_SUCCESS, self.serial

    def cuMemRelease(self, handle: int) -> tuple[Status]:
        assert all(handle != other for _, other in self.mapped.values())
        del self.handles[handle]
        return (Status.CUDA_SUCCESS,)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Status]:
        ((start, size),) = self.reserved.items()
        assert start <= address and address + nbytes <= start + size and address % GRANULE == 0 == offset == flags
        assert self.handles[handle] == nbytes
        for other, (length, used) in self.mapped.items():
            assert used != handle and (other + length <= address or address + nbytes <= other)
        self.mapped[address] = nbytes, handle
        return (Status.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, nbytes: int, accesses: list[Any], number: int) -> tuple[Status]:
        (access,) = accesses
        assert number == 1 and access.flags == "both" and self._is_here(access.location)
        assert self.mapped[address][0] == nbytes
        self.readable.add(address)
        return (Status.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Status]:
        assert self.mapped.pop(address)[0] == nbytes
        self.readable.discard(address)
        return (Status.CUDA_SUCCESS,)

    def _is_here(self, location: Any) -> bool:
        return (location.type, location.id) == ("device", DEVICE.index)


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = FakeDriver(2**40)
    yield driver
    gc.collect()
    assert not driver.reserved and not driver.mapped and not driver.handles, "something is not given back"


def held(driver: FakeDriver) -> list[tuple[int, int]]:
    """What can be read, as ranges of granules."""
    assert driver.readable == driver.mapped.keys()
    return sorted(
        ((address - 2**40) // GRANULE, (address - 2**40 + nbytes) // GRANULE)
        for address, (nbytes, _) in driver.mapped.items()
    )


def test_all_addresses_have_memory_at_first(driver: FakeDriver):
    memory = MappedRange(7 * GRANULE + 5, 2 * GRANULE, DEVICE, driver)
    memory.hold(0, 0)
    assert granule_nbytes(driver, DEVICE) == GRANULE
    assert held(driver) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    found = memory.__cuda_array_interface__
    assert found["data"] == (2**40, False) and found["shape"] == (7 * GRANULE + 5,) and found["typestr"] == "|u1"


def test_a_hole_gives_memory_back_and_moves_without_more(driver: FakeDriver):
    memory = MappedRange(9 * GRANULE, 2 * GRANULE, DEVICE, driver)
    memory.hold(0, 0)
    memory.hold(2 * GRANULE, 6 * GRANULE)
    assert held(driver) == [(0, 2), (6, 8), (8, 9)] and sum(driver.handles.values()) == 5 * GRANULE
    driver.free, driver.most = 5 * GRANULE, 0
    memory.hold(4 * GRANULE, 8 * GRANULE)  # by the memory that there is
    assert held(driver) == [(0, 2), (2, 4), (8, 9)] and driver.most <= 5 * GRANULE
    memory.hold(4 * GRANULE, 8 * GRANULE)
    assert held(driver) == [(0, 2), (2, 4), (8, 9)]


def test_memory_that_is_not_given_changes_nothing(driver: FakeDriver):
    memory = MappedRange(8 * GRANULE, GRANULE, DEVICE, driver)
    memory.hold(0, 0)
    memory.hold(GRANULE, 7 * GRANULE)
    before, driver.free = held(driver), 5 * GRANULE
    with pytest.raises(CapacityError, match="does not give"):
        memory.hold(0, 0)
    assert held(driver) == before and sum(driver.handles.values()) == 2 * GRANULE
    memory.hold(5 * GRANULE, 8 * GRANULE)
    assert len(held(driver)) == 5


@pytest.mark.parametrize("seed", range(20))
def test_any_holes_in_a_row(seed: int, driver: FakeDriver):
    rng = random.Random(seed)
    chunk, number = rng.randint(1, 4) * GRANULE, rng.randint(1, 20)
    rest = rng.randrange(chunk)
    memory = MappedRange(number * chunk + rest, chunk, DEVICE, driver)
    for _ in range(50):
        first, last = sorted((rng.randint(0, number), rng.randint(0, number)))
        memory.hold(first * chunk, last * chunk)
        gone = sum(nbytes for nbytes, _ in driver.mapped.values()) + (last - first) * chunk
        assert gone == number * chunk + -(-rest // GRANULE) * GRANULE
        assert all(end * GRANULE <= first * chunk or start * GRANULE >= last * chunk for start, end in held(driver))


def test_memory_with_a_hole_never_holds_more(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    """An engine that was made smaller wakes in what it had when it fell asleep."""
    monkeypatch.setattr(torch, "as_tensor", lambda source, device: source)
    driver.free = 3 * GRANULE
    memory = MappedMemory(8 * GRANULE, GRANULE, DEVICE, driver, (2 * GRANULE, 7 * GRANULE))
    assert held(driver) == [(0, 1), (1, 2), (7, 8)] and driver.most == 3 * GRANULE
    del memory


def test_what_is_under_way_ends_before_memory_goes(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    found = list[tuple[torch.device, int]]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append((device, len(driver.mapped))))
    memory = MappedRange(4 * GRANULE, GRANULE, DEVICE, driver)
    memory.hold(0, 0)
    del memory
    assert found == [(DEVICE, 4)]
