"""Communicators whose kernels are in Triton and interpreted, for functions that run on ranks."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fastkern import Communicator
from fastkern.device.memory import release_leftovers
from tests.conftest import SharedPools
from tests.processes import Pool


class InterpretingPools(SharedPools):
    """Pools of ranks where Triton, once it is imported, interprets."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        super().__init__(folders)

    def pool(self, num_ranks: int) -> Pool:
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            return super().pool(num_ranks)


@contextmanager
def triton_communicator(servers: int, **options: Any) -> Iterator[Communicator]:
    """A communicator of all ranks; afterwards nothing of it may be left."""
    given = {"buffer_bytes": 0, "entry_timeout_s": 100.0, "progress_timeout_s": 90.0, **options}
    with Communicator(servers=servers, backend="triton", **given) as comm:
        driver: Any = comm._runtime.driver  # type: ignore[attr-defined]
        assert driver.kernels == "triton"
        yield comm  # after an error the other ranks may be elsewhere
    dist.barrier()  # the others have let go of this rank's memory
    gc.collect()
    assert release_leftovers() == 0
    assert driver.leftovers() == []
    threads = [t.name for t in threading.enumerate()]
    assert not [name for name in threads if name.startswith("fastkern-watchdog")]
