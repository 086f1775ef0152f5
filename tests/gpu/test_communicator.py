"""The communicator on a GPU's tensors: ranks as processes, which share this machine's GPU.

Kernels of several processes take turns on one GPU, by its time slices: slow, but the same steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastkern import Communicator
from tests.conftest import SharedPools
from tests.device.communicator_cases import call_once, check_step
from tests.device.virtual_cases import DTYPES, POLICIES
from tests.reference import random_traffic

SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))


def on_gpu(servers: int, kernels: str, **options: Any) -> Communicator:
    """kernels: "cxx" or "triton", see driver.Driver."""
    torch.cuda.set_device(0)
    given = {"num_blocks": 2, "buffer_bytes": 0, "progress_timeout_s": 60.0, **options}
    if kernels == "triton":
        given["backend"] = "triton"
    return Communicator(servers=servers, transport="peer", **given)


def random_calls(rank: int, ranks: int, servers: int, kernels: str) -> None:
    rng = np.random.default_rng(11)
    for policy in POLICIES:
        with on_gpu(servers, kernels, policy=policy) as comm:
            assert comm.device == torch.device("cuda", 0)
            for k, dtype in enumerate(DTYPES[:6]):
                traffic = random_traffic(servers, ranks // servers, rng, 4000 if k == 3 else 30)
                call_once(comm, traffic, dtype, k, ("plain", "strided", "queued")[k % 3])
            comm.barrier()


def steps(rank: int, ranks: int, servers: int, kernels: str) -> None:
    with on_gpu(servers, kernels) as comm, Communicator(servers=servers) as host:
        for layout in ("expert", "rank"):
            check_step(comm, host, layout, exactly=False)


@pytest.mark.parametrize("body", [random_calls, steps])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_calls(pools: SharedPools, kernels: str, shape: tuple[int, int], body: Any) -> None:
    pools.pool(shape[0] * shape[1]).run(body, shape[0], kernels, timeout_s=240)


def in_stream_order(rank: int, ranks: int, kernels: str) -> None:
    """What is before a call in its stream comes before it, and what follows comes after."""
    with on_gpu(1, kernels) as comm:
        for queued in (False, True):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                source, out = (torch.zeros(ranks * 1000, device="cuda") for _ in range(2))
                torch.cuda._sleep(100_000_000)
                source.fill_(rank + 1)
                work = comm.all_to_all_single(out, source, async_op=queued)
                if work is not None:
                    work.wait()
                source.fill_(-1)
                result = out.clone()
            comm.all_to_all_single(torch.empty_like(source), source)  # in another stream
            side.synchronize()
            expected = torch.arange(1.0, ranks + 1).repeat_interleave(1000)
            assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stream_order(pools: SharedPools, kernels: str, num_ranks: int) -> None:
    pools.pool(num_ranks).run(in_stream_order, kernels, timeout_s=120)


def captured(rank: int, ranks: int, kernels: str) -> str:
    with on_gpu(1, kernels) as comm:
        x = torch.zeros(4, device="cuda")
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                comm.all_to_all_single(x.clone(), x)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_call_is_not_captured(pools: SharedPools, kernels: str) -> None:
    (text,) = pools.pool(1).run(captured, kernels, timeout_s=120)
    assert "cannot be captured into a graph" in text
