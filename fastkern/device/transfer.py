"""Small transfers between Python and a device: pointer tables, control words, error records.

For set-up and for what is read after a failure, not for calls: memory is pinned for each, and its
release waits until the whole device is idle.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from .driver import Driver


@contextlib.contextmanager
def own_stream(driver: Driver) -> Iterator[int]:
    """A stream for what is done within; it has ended when the block is left."""
    stream = driver.create_stream()
    try:
        yield stream
    finally:
        try:
            driver.synchronize(stream)
        finally:
            driver.destroy_stream(stream)


@contextlib.contextmanager
def pinned(driver: Driver, num_bytes: int) -> Iterator[int]:
    """Pinned host memory for what is done within."""
    address = driver.allocate_host(num_bytes)
    try:
        yield address
    finally:
        driver.free_host(address)


def upload(driver: Driver, address: int, content: bytes) -> None:
    """Write bytes to device memory; they are there when this returns."""
    if not content:
        return
    with pinned(driver, len(content)) as staging, own_stream(driver) as stream:
        ctypes.memmove(staging, content, len(content))
        driver.copy(address, staging, len(content), stream)


def download(driver: Driver, address: int, num_bytes: int) -> bytes:
    """Read device memory, which no kernel may be writing."""
    if not num_bytes:
        return b""
    with pinned(driver, num_bytes) as staging:
        with own_stream(driver) as stream:
            driver.copy(staging, address, num_bytes, stream)
        return ctypes.string_at(staging, num_bytes)


def fill(driver: Driver, address: int, value: int, num_bytes: int) -> None:
    """Set device memory to one byte value; it is when this returns."""
    if not num_bytes:
        return
    with own_stream(driver) as stream:
        driver.fill(address, value, num_bytes, stream)
