"""Memory of the driver that works on the CPU: files without a name, which processes can share."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import threading
from bisect import bisect_right, insort
from dataclasses import asdict, dataclass

from ..heap import ProcessIdentity, own_identity
from .driver import DeviceMemoryError, DriverError

_POISON = 0xA5  # nobody zeroes a device's memory either
_MOST_POISON_BYTES = 4 << 20  # the rest of a large allocation stays untouched, and free of cost


@dataclass(frozen=True)
class Region:
    """One mapping. kind: "device", "pinned" or "opened"."""

    kind: str
    address: int
    num_bytes: int
    file: int | None
    mapping: mmap.mmap


@dataclass(frozen=True)
class _Handle:
    """How another process finds a region: the file, as its maker holds it open."""

    pid: int
    start: int
    namespace: int
    file: int
    device: int
    inode: int
    num_bytes: int


class HostMemory:
    """What one driver has allocated, pinned and opened. Usable from any thread.

    limit_bytes: of device memory in all.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._starts: list[int] = []

    def allocate(self, num_bytes: int) -> int:
        """Device memory, page aligned, not zero."""
        _check_size("allocate", num_bytes)
        with self._lock:
            if self._used_bytes + num_bytes > self._limit_bytes:
                left = self._limit_bytes - self._used_bytes
                text = f"{num_bytes} bytes wanted, {left} left"
                raise DeviceMemoryError("allocate", "out of memory", text)
            self._used_bytes += num_bytes
        try:
            file = os.memfd_create("fastkern", os.MFD_CLOEXEC)
            try:
                os.ftruncate(file, num_bytes)
                return self._map("device", file, num_bytes)
            except BaseException:
                os.close(file)
                raise
        except BaseException as error:
            with self._lock:
                self._used_bytes -= num_bytes
            if isinstance(error, OSError):
                raise DeviceMemoryError("allocate", "out of memory", str(error)) from error
            raise

    def allocate_pinned(self, num_bytes: int) -> int:
        """Host memory, page aligned, not zero."""
        _check_size("allocate_host", num_bytes)
        try:
            return self._map("pinned", None, num_bytes)
        except OSError as error:
            raise DeviceMemoryError("allocate_host", "out of memory", str(error)) from error

    def release(self, operation: str, kind: str, address: int) -> None:
        """Unmap a region of this kind that begins at the address."""
        with self._lock:
            region = self._regions.get(address)
            if region is None or region.kind != kind:
                raise DriverError(operation, "invalid value", f"no {kind} memory at {address:#x}")
            del self._regions[address]
            self._starts.remove(address)
            if kind == "device":
                self._used_bytes -= region.num_bytes
        region.mapping.close()
        if region.file is not None:
            os.close(region.file)

    def export(self, address: int) -> bytes:
        """A handle for `open` in other processes of this user, on this host."""
        with self._lock:
            region = self._regions.get(address)
        if region is None or region.file is None:
            text = f"no device memory begins at {address:#x}"
            raise DriverError("export_memory", "invalid value", text)
        me, status = own_identity(), os.fstat(region.file)
        return json.dumps(
            asdict(
                _Handle(
                    pid=me.pid,
                    start=me.start,
                    namespace=me.namespace,
                    file=region.file,
                    device=status.st_dev,
                    inode=status.st_ino,
                    num_bytes=region.num_bytes,
                )
            )
        ).encode()

    def open(self, handle: bytes) -> int:
        """Map another process's region. As on GPUs, not one of this process's own."""
        try:
            found = _Handle(**json.loads(handle))
        except (ValueError, TypeError) as error:
            raise DriverError("open_memory", "invalid handle", str(error)) from error
        owner = ProcessIdentity(found.pid, found.start, found.namespace)
        if owner == own_identity():
            raise DriverError("open_memory", "invalid handle", "this process made it")
        if not owner.alive():
            raise DriverError("open_memory", "invalid handle", f"process {found.pid} has ended")
        try:
            file = os.open(f"/proc/{found.pid}/fd/{found.file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DriverError("open_memory", "invalid handle", str(error)) from error
        try:
            status = os.fstat(file)
            if (status.st_dev, status.st_ino) != (found.device, found.inode):
                raise DriverError("open_memory", "invalid handle", "the memory has been freed")
            return self._map("opened", None, found.num_bytes, file)
        except OSError as error:
            raise DriverError("open_memory", "out of memory", str(error)) from error
        finally:
            os.close(file)  # the mapping holds it

    def check(self, operation: str, address: int, num_bytes: int) -> None:
        """Raises where a range is null, or begins in a region and ends outside of it.

        What is not a region may be a tensor's memory.
        """
        if num_bytes < 0:
            raise DriverError(operation, "invalid value", f"{num_bytes} bytes")
        if not address:
            raise DriverError(operation, "invalid value", "null address")
        with self._lock:
            k = bisect_right(self._starts, address) - 1
            region = self._regions[self._starts[k]] if k >= 0 else None
        if region is None or address >= region.address + region.num_bytes:
            return
        if address + num_bytes > region.address + region.num_bytes:
            text = f"{num_bytes} bytes at {address - region.address} of {region.num_bytes}"
            raise DriverError(operation, "invalid value", f"{text} of {region.kind} memory")

    def leftovers(self) -> list[str]:
        """What is still mapped."""
        with self._lock:
            return [f"{r.num_bytes} bytes of {r.kind} memory" for r in self._regions.values()]

    def close(self) -> None:
        """Unmap all."""
        for address, region in list(self._regions.items()):
            with contextlib.suppress(DriverError):
                self.release("close", region.kind, address)

    def _map(self, kind: str, kept: int | None, num_bytes: int, file: int | None = None) -> int:
        file = kept if file is None else file
        mapping = mmap.mmap(-1 if file is None else file, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if kind != "opened":
            ctypes.memset(address, _POISON, min(num_bytes, _MOST_POISON_BYTES))
        with self._lock:
            self._regions[address] = Region(kind, address, num_bytes, kept, mapping)
            insort(self._starts, address)
        return address


def _check_size(operation: str, num_bytes: int) -> None:
    if num_bytes < 1:
        raise DriverError(operation, "invalid value", f"{num_bytes} bytes")
