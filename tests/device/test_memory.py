"""Memory that ranks share, in one process: slices, PyTorch's provider, a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastkern.device import peer_memory, torch_memory
from fastkern.device.driver import DeviceMemoryError, DriverError
from fastkern.device.hip_driver import HipDriver
from fastkern.device.host_driver import HostDriver
from fastkern.device.memory import SliceHeap, SymmetricHeap
from fastkern.device.transfer import download, fill, upload
from fastkern.errors import FastkernError
from tests.device.memory_cases import (
    DATA_BYTES,
    RECORD_BYTES,
    ROUNDED,
    SLOTS,
    FailingDriver,
    check_tables,
)
from tests.device.recording_hip import RecordedHip


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    made = HostDriver(memory_bytes=32 << 20)
    yield made
    left = made.leftovers()
    made.close()
    assert not left


def test_slices_are_apart_and_control_is_zero(driver: HostDriver) -> None:
    heap = SliceHeap(driver, 5, SLOTS, RECORD_BYTES, DATA_BYTES)
    layout = heap.layout
    check_tables(driver, heap)
    ranges = []
    for rank in range(5):
        control, data = heap.control_address(rank), heap.data_address(rank)
        assert heap.flags_address(rank) - control == layout["flags"]
        assert control % 256 == data % 256 == 0
        assert download(driver, control, layout["bytes"]) == bytes(layout["bytes"])
        ranges += [(control, layout["bytes"]), (data, DATA_BYTES)]
    ranges.sort()
    assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges))
    heap.close()
    heap.close()


def test_slices_grow_and_keep_control(driver: HostDriver) -> None:
    heap = SliceHeap(driver, 3, SLOTS, RECORD_BYTES, DATA_BYTES)
    fill(driver, heap.flags_address(2), 9, 8)
    heap.grow(3 * DATA_BYTES)
    assert heap.data_bytes == 3 * DATA_BYTES
    check_tables(driver, heap)
    assert download(driver, heap.flags_address(2), 8) == b"\t" * 8
    with pytest.raises(DeviceMemoryError):
        heap.grow(11 << 20)
    assert heap.data_bytes == 0
    heap.grow(1000)
    check_tables(driver, heap)
    heap.close()


def test_guards_tell_where_something_was_written(driver: HostDriver) -> None:
    heap = SliceHeap(driver, 3, SLOTS, RECORD_BYTES, DATA_BYTES, guard_bytes=100)
    for rank in range(3):  # all of what belongs to the ranks
        fill(driver, heap.control_address(rank), 1, heap.layout["bytes"])
        fill(driver, heap.data_address(rank), 1, DATA_BYTES)
    assert heap.damaged_guards() == []
    upload(driver, heap.data_address(1) + DATA_BYTES + 3, b"x")
    upload(driver, heap.control_address(0) - 1, b"x")
    assert heap.damaged_guards() == [
        "control: byte 255 before rank 0",  # guards are as large as the alignment
        "data: byte 3 behind rank 1",
    ]
    heap.close()


@pytest.mark.parametrize(
    "operation", ["allocate", "allocate_host", "create_stream", "fill", "copy", "synchronize"]
)
def test_slices_that_fail_leave_nothing(operation: str) -> None:
    at, failed = 1, 0
    while True:
        driver = FailingDriver(operation, at)
        try:
            heap = SliceHeap(driver, 2, SLOTS, RECORD_BYTES, DATA_BYTES, guard_bytes=256)
        except DriverError as error:
            failed += error.code == "as wished"
        else:
            assert driver.calls < at  # all places have been tried
            heap.close()
        assert driver.leftovers() == []
        driver.close()
        if failed < at:
            break
        at += 1
    assert failed > 0


# -- PyTorch's symmetric memory --------------------------------------------------------------------


@dataclass
class FakeSymmetricMemory:
    """torch.distributed._symmetric_memory, as far as it is used, on the CPU."""

    num_ranks: int = 1
    calls: list[str] = field(default_factory=list)
    zeroed: list[bool] = field(default_factory=list)

    def empty(self, *size: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        assert isinstance(size[0], int)
        assert (dtype, device) == (torch.uint8, torch.device("cuda", 0))
        self.calls.append(f"empty {size[0]}")
        return torch.full(size, 7, dtype=dtype)

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any:
        self.calls.append("rendezvous")
        self.zeroed.append(not tensor.any())
        return SimpleNamespace(
            buffer_ptrs=[tensor.data_ptr() + 1000 * k for k in range(self.num_ranks)]
        )


class CudaLookalike(HostDriver):
    target = "cuda"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_torch_symmetric_memory_is_a_provider() -> None:
    driver, fake = CudaLookalike(), FakeSymmetricMemory()
    provider = torch_memory.TorchPeerMemory(driver, None, fake)
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES, provider)
    layout = heap.layout["bytes"]
    assert fake.calls == [f"empty {layout}", "rendezvous", f"empty {ROUNDED}", "rendezvous"]
    assert fake.zeroed == [True, False]  # control before it is shared; data never
    check_tables(driver, heap)
    assert heap.close()
    assert driver.leftovers() == []
    driver.close()


@pytest.mark.usefixtures("alone")
def test_torch_symmetric_memory_out_of_reach_is_refused() -> None:
    driver = CudaLookalike()
    provider = torch_memory.TorchPeerMemory(driver, None, FakeSymmetricMemory(num_ranks=2))
    with pytest.raises(FastkernError, match="2 of 1 ranks can be mapped"):
        SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES, provider)
    assert driver.leftovers() == []
    driver.close()
    with pytest.raises(ValueError, match="needs target cuda, not host"):
        torch_memory.TorchPeerMemory(HostDriver(), None)


def test_the_real_symmetric_memory_has_what_is_used() -> None:
    real = torch_memory._import_module()
    assert callable(real.empty)
    assert callable(real.rendezvous)


@pytest.mark.usefixtures("alone")
def test_what_peers_write_is_uncached_on_amd() -> None:
    fake = RecordedHip()
    driver = HipDriver(1, fake)
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    for address in (heap.control_address(0), heap.data_address(0)):
        assert fake.buffers[address].kind == "uncached"
        assert fake.buffers[address].num_bytes % ROUNDED == 0  # shares no page that is mapped
    heap.grow(2 * ROUNDED)
    assert fake.buffers[heap.data_address(0)].kind == "uncached"
    assert heap.close()
    assert fake.leftovers() == []


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_needs_no_peers() -> None:
    driver = HostDriver()
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, 0)
    assert heap.data_bytes == ROUNDED
    assert isinstance(heap._provider, peer_memory.IpcPeerMemory)
    check_tables(driver, heap)
    assert heap.close()
    assert heap.close()
    assert driver.leftovers() == []
    driver.close()
