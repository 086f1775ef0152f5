"""Device memory of a virtual cluster's calls, and the copies between it and CPU tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import FastkernError
from .driver import Driver

Bytes = npt.NDArray[np.uint8]

_STAGING_BYTES = 8 << 20
_GUARD = 0xE7  # as no float, index or flag of ours


def host_view(address: int, num_bytes: int) -> Bytes:
    """The bytes of pinned host memory, writable; good for as long as that memory is."""
    if num_bytes == 0:
        return np.empty(0, dtype=np.uint8)
    raw = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memoryview(raw), dtype=np.uint8)


class Copier:
    """Copies between Python and the device through one pinned buffer, in order of a stream."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self.driver = driver
        self.stream = stream
        self._address = driver.allocate_host(_STAGING_BYTES)
        self._view = host_view(self._address, _STAGING_BYTES)
        self._used = 0

    def close(self) -> None:
        """Wait for the copies under way, and free the buffer."""
        try:
            self.driver.synchronize(self.stream)
        finally:
            self.driver.free_host(self._address)

    def write(self, address: int, content: Bytes) -> None:
        """To the device. The content may change once this returns, though it may still be on its
        way: what follows in the stream sees it."""
        at = 0
        while at < len(content):
            if self._used == _STAGING_BYTES:
                self.driver.synchronize(self.stream)
                self._used = 0
            size = min(len(content) - at, _STAGING_BYTES - self._used)
            self._view[self._used : self._used + size] = content[at : at + size]
            self.driver.copy(address + at, self._address + self._used, size, self.stream)
            self._used += size
            at += size

    def read(self, address: int, num_bytes: int) -> Bytes:
        """From the device, after all that is in the stream."""
        self.driver.synchronize(self.stream)
        self._used = 0
        content = np.empty(num_bytes, dtype=np.uint8)
        for at in range(0, num_bytes, _STAGING_BYTES):
            size = min(num_bytes - at, _STAGING_BYTES)
            self.driver.copy(self._address, address + at, size, self.stream)
            self.driver.synchronize(self.stream)
            content[at : at + size] = self._view[:size]
        return content


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """uint8 [bytes]: the elements of a contiguous CPU tensor, as they lie there."""
    plain = tensor.detach()
    if not plain.is_contiguous() or plain.device.type != "cpu":
        raise ValueError("only contiguous CPU tensors are uploaded")
    if plain.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    view: Bytes = plain.view(-1).view(torch.uint8).numpy()
    return view


class Allocations:
    """Device memory that is freed together.

    fill_byte: what memory given out by `empty` holds at first, or None for whatever is there.
    guard_bytes: behind each piece, filled with a pattern that `check_guards` looks for.
    """

    def __init__(self, copier: Copier, fill_byte: int | None = None, guard_bytes: int = 0) -> None:
        self.copier = copier
        self._fill_byte = fill_byte
        self._guard_bytes = guard_bytes
        self._pieces: dict[int, tuple[int, str]] = {}  # bytes and name by address

    def empty(self, num_bytes: int, name: str) -> int:
        """Address of as many bytes. name: for messages."""
        driver, stream = self.copier.driver, self.copier.stream
        address = driver.allocate(max(1, num_bytes) + self._guard_bytes, coherent=False)
        self._pieces[address] = num_bytes, name
        if self._fill_byte is not None and num_bytes:
            driver.fill(address, self._fill_byte, num_bytes, stream)
        if self._guard_bytes:
            driver.fill(address + num_bytes, _GUARD, self._guard_bytes, stream)
        return address

    def filled(self, content: npt.NDArray[Any] | torch.Tensor, name: str) -> int:
        """Address of a copy of an array's or a CPU tensor's elements."""
        if isinstance(content, torch.Tensor):
            raw = tensor_bytes(content)
        else:
            raw = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        address = self.empty(len(raw), name)
        self.copier.write(address, raw)
        return address

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU copy of what lies there."""
        result = torch.empty(shape, dtype=dtype)
        num_bytes = result.numel() * result.element_size()
        if num_bytes:
            content = torch.from_numpy(self.copier.read(address, num_bytes))
            result.view(-1).view(torch.uint8).copy_(content)
        return result

    def check_guards(self) -> None:
        """Raise FastkernError naming a piece behind which something was written."""
        if not self._guard_bytes:
            return
        for address, (num_bytes, name) in self._pieces.items():
            guard = self.copier.read(address + num_bytes, self._guard_bytes)
            if (guard != _GUARD).any():
                at = int(np.flatnonzero(guard != _GUARD)[0])
                raise FastkernError(f"byte {at} behind {name} ({num_bytes} bytes) was written")

    def close(self) -> None:
        """Free all of it; nothing in the stream may still use it."""
        while self._pieces:
            address, _ = self._pieces.popitem()
            self.copier.driver.free(address)
