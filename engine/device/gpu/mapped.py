"""KV memory of a GPU in chunks under one reserved range of addresses, so that captured graphs stay valid.

By the CUDA driver's virtual memory management: ``cuMemAddressReserve`` for the addresses, ``cuMemCreate`` for memory,
``cuMemMap`` and ``cuMemSetAccess`` to have the one at the other. Needs the package ``cuda-bindings``.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...errors import CapacityError
from ...sizes import format_size

REMEDY = "Install cuda-bindings of the driver's CUDA version, or leave resizable out"


def find_driver(device: torch.device) -> ModuleType | None:
    """The driver's functions; ``None`` without ``cuda-bindings``, or if the device cannot map memory."""
    try:
        driver = import_module("cuda.bindings.driver")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        (number,) = _call(driver, "cuDeviceGet", device.index or 0)
        (supported,) = _call(driver, "cuDeviceGetAttribute", attribute, number)
    except (ImportError, RuntimeError):
        return None
    return driver if supported else None


def granule_nbytes(driver: Any, device: torch.device) -> int:
    """Bytes of which all that is mapped must be a multiple."""
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call(driver, "cuMemGetAllocationGranularity", _properties(driver, device), least)[0])


class MappedMemory:
    """Memory [nbytes] of ``device`` in chunks of ``chunk_nbytes``, a multiple of the granule; the last may be smaller.

    Raises ``CapacityError`` if the device lacks memory. All is given back with the tensor.
    """

    def __init__(
        self, nbytes: int, chunk_nbytes: int, device: torch.device, driver: Any, hole: tuple[int, int] = (0, 0)
    ):
        """``hole``: chunks without memory at first, as in ``dig``; never the first one."""
        self._range = MappedRange(nbytes, chunk_nbytes, device, driver)
        self._device = device
        self._range.hold(*hole)
        self.tensor: Tensor = torch.as_tensor(self._range, device=device)

    def dig(self, start: int, end: int) -> None:
        """See ``KVMemory.dig``."""
        torch.cuda.synchronize(self._device)  # steps under way may still read what goes
        self._range.hold(start, end)


class MappedRange:
    """Reserved addresses, and the memory behind each chunk of them."""

    def __init__(self, nbytes: int, chunk_nbytes: int, device: torch.device, driver: Any):
        granule = granule_nbytes(driver, device)
        assert chunk_nbytes % granule == 0, "chunks are whole granules"
        self._driver, self._chunk, self._device = driver, chunk_nbytes, device
        self._nbytes = -(-nbytes // granule) * granule
        (address,) = _call(driver, "cuMemAddressReserve", self._nbytes, 0, 0, 0)
        self._address = int(address)
        self._handles: dict[int, Any] = {}  # by chunk
        weakref.finalize(self, _free, driver, device, self._address, self._nbytes, chunk_nbytes, self._handles)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (self._address, False), "strides": None, "version": 3,
        }  # fmt: skip

    def hold(self, start: int, end: int) -> None:
        """Has memory behind all chunks but those from byte ``start`` to ``end``. Raises ``CapacityError``."""
        chunk = self._chunk
        hole = range(start // chunk, end // chunk)
        gone = [number for number in hole if number in self._handles]
        new = [n for n in range(-(-self._nbytes // chunk)) if n not in hole and n not in self._handles]
        made = self._make([self._size(number) for number in new[len(gone) :]])
        spare = [self._unmap(number) for number in gone]  # before others are mapped: no more is held than was asked
        for number, handle in zip(new, spare + made, strict=False):
            self._map(number, handle)
        for handle in spare[len(new) :]:
            _call(self._driver, "cuMemRelease", handle)

    def _size(self, number: int) -> int:
        """Bytes of a chunk. The last one, which may be smaller, is never in a hole, so memory that moves fits."""
        return _size(number, self._chunk, self._nbytes)

    def _make(self, sizes: list[int]) -> list[Any]:
        made: list[Any] = []
        try:
            for nbytes in sizes:
                made += _call(self._driver, "cuMemCreate", nbytes, _properties(self._driver, self._device), 0)
        except RuntimeError as error:
            for handle in made:
                _call(self._driver, "cuMemRelease", handle)
            message = f"{self._device} does not give {format_size(sum(sizes))} more of memory"
            raise CapacityError(message, remedy="Lower the size of KV memory") from error
        return made

    def _map(self, number: int, handle: Any) -> None:
        driver, address, nbytes = self._driver, self._address + number * self._chunk, self._size(number)
        _call(driver, "cuMemMap", address, nbytes, 0, handle, 0)
        self._handles[number] = handle
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device.index or 0
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(driver, "cuMemSetAccess", address, nbytes, [access], 1)

    def _unmap(self, number: int) -> Any:
        _call(self._driver, "cuMemUnmap", self._address + number * self._chunk, self._size(number))
        return self._handles.pop(number)


def _size(number: int, chunk_nbytes: int, nbytes: int) -> int:
    return min(chunk_nbytes, nbytes - number * chunk_nbytes)


def _free(
    driver: Any, device: torch.device, address: int, nbytes: int, chunk_nbytes: int, handles: dict[int, Any]
) -> None:
    """Gives everything back, once nothing is under way there; a lost device refuses it, and has lost it."""
    with suppress(RuntimeError):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)  # copies to the host, or a step of an engine that was closed in the middle
        for number, handle in handles.items():
            _call(driver, "cuMemUnmap", address + number * chunk_nbytes, _size(number, chunk_nbytes, nbytes))
            _call(driver, "cuMemRelease", handle)
        _call(driver, "cuMemAddressFree", address, nbytes)


def _properties(driver: Any, device: torch.device) -> Any:
    found = driver.CUmemAllocationProp()
    found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = device.index or 0
    return found


def _call(driver: Any, name: str, *given: Any) -> tuple[Any, ...]:
    """The results of a driver's function. Raises ``RuntimeError``."""
    status, *found = getattr(driver, name)(*given)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {status}")
    return tuple(found)
