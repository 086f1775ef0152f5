"""The calls that a search measures, prepared on a virtual cluster for an operation and a size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ..device.virtual_cluster import VirtualCluster
from ..device.virtual_combine import Combine
from ..device.virtual_launch import PreparedLaunch
from ..device.virtual_moe import Dispatch
from ..moe.dispatch_arguments import DispatchOptions

_ROW_BYTES = 14336  # 7168 values of bfloat16
_TOPK = 8
_EXPERTS_PER_RANK = 8


@dataclass(frozen=True)
class PreparedCall:
    """A call that has run once. num_bytes: that a rank gives or gets, of the rank with most."""

    launch: PreparedLaunch
    num_bytes: int


@contextmanager
def prepared_call(cluster: VirtualCluster, op: str, size: int, seed: int) -> Iterator[PreparedCall]:
    """A call of `op` in which a rank gives or gets about `size` bytes.

    An all-to-all is uniform. Dispatch and combine are those of tokens with top-8 of 8 experts per
    rank, distinct ones at random, with weights; rows are bfloat16.
    """
    with ExitStack() as made:
        if op == "all_to_all_single":
            yield _all_to_all(made, cluster, size)
            return
        width = min(_ROW_BYTES, max(16, size // _TOPK)) // 2
        dispatch = _dispatch(made, cluster, max(1, size // _TOPK // width // 2), width, seed)
        num_bytes = max(info.num_recv_rows for info in dispatch.infos) * width * 2
        launch = dispatch.launch
        if op == "combine":
            launch = _combine(made, cluster, dispatch, width, seed)
        yield PreparedCall(launch, num_bytes)


def _all_to_all(made: ExitStack, cluster: VirtualCluster, size: int) -> PreparedCall:
    row_bytes = min(_ROW_BYTES, max(16, size // cluster.num_ranks))
    rows = max(1, size // cluster.num_ranks // row_bytes)
    splits = np.full((cluster.num_ranks, cluster.num_ranks), rows, dtype=np.int64)
    call = cluster.prepare_all_to_all(splits, row_bytes)
    made.callback(call.close)
    call.run()
    return PreparedCall(call.launch, rows * row_bytes * cluster.num_ranks)


def _dispatch(
    made: ExitStack, cluster: VirtualCluster, num_tokens: int, width: int, seed: int
) -> Dispatch:
    num_experts = _EXPERTS_PER_RANK * cluster.num_ranks
    rng = torch.Generator().manual_seed(seed)
    ranks = range(cluster.num_ranks)
    x = torch.randn(num_tokens, width, generator=rng).to(torch.bfloat16)
    idx = [torch.rand(num_tokens, num_experts, generator=rng).argsort(1)[:, :_TOPK] for _ in ranks]
    weights = [torch.rand(num_tokens, _TOPK, generator=rng) for _ in ranks]
    call = Dispatch(cluster, [[x] for _ in ranks], idx, weights, DispatchOptions(num_experts))
    made.callback(call.handle.close)
    made.callback(call.close)
    call.run()
    return call


def _combine(
    made: ExitStack, cluster: VirtualCluster, dispatch: Dispatch, width: int, seed: int
) -> PreparedLaunch:
    rng = torch.Generator().manual_seed(seed + 1)
    rows = [info.num_recv_rows for info in dispatch.infos]
    block = torch.randn(max(rows), width, generator=rng).to(torch.bfloat16)
    weights = [torch.rand(n, generator=rng) for n in rows]
    call = Combine(cluster, dispatch.handle, [block[:n] for n in rows], weights)
    made.callback(call.close)
    call.run()
    return call.launch
