"""Communicators whose kernels are in Triton, interpreted, with a network between servers.

Servers are hosts of their own that share no memory with one another as far as kernels know: what
KernelArgs say of ranks of another server is null, so that whoever reads from one, or stores there
by itself, ends the process. The library between them is the shared network of tests/device, or a
fake one that is late.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fastkern import Communicator
from fastkern.device.interpreter_driver import InterpreterDriver
from fastkern.device.memory import release_leftovers
from fastkern.device.triton_library import interpreting
from tests.device.shared_network import SharedNetwork, hosts_of, on_network
from tests.triton.fake_libraries import Library, library_of


@contextmanager
def far_communicator(
    servers: int, make: Any = SharedNetwork, library: Library | None = None, **options: Any
) -> Iterator[Communicator]:
    """A communicator of all ranks; afterwards nothing of it may be left."""
    ranks = dist.get_world_size()
    assert interpreting()  # imports Triton, which threads had better not do at once
    driver = InterpreterDriver()
    given = {"num_blocks": 1, "entry_timeout_s": 100.0, "progress_timeout_s": 90.0, **options}
    with hosts_of(dist.get_rank(), ranks // servers, make):
        with Communicator(**on_network(driver, servers, given)) as comm:
            runtime: Any = comm._runtime
            reached = [r for r in range(ranks) if runtime._heap.data_address(r)]
            assert len(reached) == ranks // servers, "mapped across servers"
            yield comm  # after an error the other ranks may be elsewhere
            if library is not None:
                library.nic.wait()
            dist.barrier()  # nothing is on its way any more
        dist.barrier()  # all have left, so what could not be freed before can be now
    gc.collect()
    assert release_leftovers() == 0
    left = driver.leftovers()
    driver.close()
    assert left == []


@contextmanager
def late_communicator(
    transport: str,
    servers: int,
    delay_s: float = 0.0,
    faults: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[tuple[Communicator, Library]]:
    """The same over a transport's own wire and a fake of its library."""
    rank = dist.get_rank()
    with (
        library_of(transport, rank, delay_s, faults) as (library, make),
        far_communicator(servers, make, library, **options) as comm,
    ):
        yield comm, library
