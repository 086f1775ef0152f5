"""Calls on a virtual cluster, each compared with its definition bit for bit.

For every device: tests of the CPU's driver, tests/gpu and perf/gpu use the same ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_moe import VirtualDispatch
from fastkern.device.virtual_runtime import VirtualOptions
from fastkern.moe.dispatch_arguments import DispatchOptions
from fastkern.planner import Policy
from tests.moe_cases import Data
from tests.moe_checks import check_received, dispatch_options, payload, same_bytes, same_numbers
from tests.moe_reference import as_bytes, combine
from tests.reference import Matrix, random_traffic

FILL = 0xAA
POLICIES: tuple[Policy, ...] = ("whole", "split", "direct", "spreadout", "auto")
SHAPES = ((1, 1), (1, 3), (2, 2), (3, 1), (2, 3))  # servers x ranks
DTYPES = (
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def options(**given: Any) -> VirtualOptions:
    """Small chunks, everything poisoned and guarded; `given` over that."""
    return VirtualOptions(**{"fill_byte": FILL, "guard_bytes": 64, "chunk_bytes": 100, **given})


def random_rows(rows: int, shape: tuple[int, ...], dtype: torch.dtype, rng: Any) -> Tensor:
    """[rows, *shape] of random bytes."""
    drawn = torch.empty(rows, *shape, dtype=dtype)
    if drawn.numel():
        most = 2 if dtype == torch.bool else 256
        raw = rng.integers(0, most, drawn.numel() * dtype.itemsize, dtype=np.uint8)
        drawn.view(-1).view(torch.uint8).copy_(torch.from_numpy(raw))
    return drawn


def expected_rows(traffic: Matrix, inputs: list[Tensor]) -> list[Tensor]:
    """The definition: output d holds, for each source in turn, that source's rows for d."""
    ends = np.cumsum(traffic, axis=1)
    ranks = range(len(traffic))
    return [
        torch.cat([inputs[s][ends[s, d] - traffic[s, d] : ends[s, d]] for s in ranks])
        for d in ranks
    ]


def check_all_to_all(
    cluster: VirtualCluster,
    traffic: Matrix,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rng: Any,
) -> None:
    """One call with fresh data."""
    inputs = [random_rows(int(n), shape, dtype, rng) for n in traffic.sum(axis=1)]
    got = cluster.all_to_all(inputs, traffic)
    for rank, (a, b) in enumerate(zip(got, expected_rows(traffic, inputs), strict=True)):
        same_bytes(a, b, f"all-to-all: rank {rank} of {cluster.topology}")


def check_random_traffic(
    cluster: VirtualCluster, rng: Any, max_rows: int, max_width: int, kind: str = ""
) -> None:
    """One call of random traffic, dtype and width."""
    t = cluster.topology
    traffic = random_traffic(t.servers, t.gpus_per_server, rng, max_rows, kind)
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    check_all_to_all(cluster, traffic, (int(rng.integers(1, max_width + 1)),), dtype, rng)


def dispatched(cluster: VirtualCluster, data: Data) -> VirtualDispatch:
    """The case's dispatch on all ranks, compared; what was received."""
    given = dispatch_options(data)
    if given["expert_to_rank"] is not None:
        given["expert_to_rank"] = tuple(given["expert_to_rank"])
    got = cluster.dispatch(
        data.inputs,
        [idx.to(data.case.idx_dtype) for idx in data.routing.topk_idx],
        data.weights,
        DispatchOptions(**given),
    )
    for rank in range(data.num_ranks):
        check_rank(cluster, data, rank, got)
        info = got.handle.info(rank)
        assert info.num_recv_rows == data.routing.num_rows(rank), data.case.name
    return got


def check_rank(
    cluster: VirtualCluster,
    data: Data,
    rank: int,
    got: VirtualDispatch,
    inputs: list[list[Tensor]] | None = None,
) -> None:
    """What one rank received is what the reference says; padding is as it was before."""
    received = (
        payload(got.recv[rank]),
        None if got.weights is None else got.weights[rank],
        got.tokens_per_expert[rank],
        SimpleNamespace(recv_topk_idx=None if got.idx is None else got.idx[rank]),
    )
    check_received(data, rank, received, inputs, data.weights)
    if data.case.zero_padding or cluster.options.fill_byte is None:
        return
    padding = torch.tensor([row is None for row in data.all_rows[rank]], dtype=torch.bool)
    for tensor in got.recv[rank]:
        raw = as_bytes(tensor[padding])
        assert (raw == cluster.options.fill_byte).all(), f"{data.case.name}: padding was written"


def check_dispatch_again(cluster: VirtualCluster, data: Data, got: VirtualDispatch) -> None:
    """Another payload through the same handle."""
    inputs = data.drawn_inputs("again")
    again = cluster.dispatch(inputs, None, data.weights, handle=got.handle)
    for rank in range(data.num_ranks):
        check_rank(cluster, data, rank, again, inputs)


def check_combine(cluster: VirtualCluster, data: Data, got: VirtualDispatch, purpose: str) -> None:
    """The case's combine on all ranks, compared."""
    case, outs = data.case, data.drawn_outs(purpose)
    sums = cluster.combine(got.handle, outs, data.row_weights, data.biases, case.wire_dtype)
    for rank in range(data.num_ranks):
        bias = None if data.biases is None else data.biases[rank]
        expected = combine(data.routing, outs, data.row_weights, bias, case.wire_dtype, rank)
        same_numbers(sums[rank], expected, f"{case.name}: sums of rank {rank}")


def check_moe(cluster: VirtualCluster, data: Data) -> None:
    """Dispatch, a second one through its handle, and two combines."""
    got = dispatched(cluster, data)
    try:
        check_dispatch_again(cluster, data, got)
        check_combine(cluster, data, got, "expert_outs")
        check_combine(cluster, data, got, "other outs")
    finally:
        got.handle.close()
