"""What measures are made with: clusters, calls with random data, figures into the record."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from fastkern.device.virtual_all_to_all import AllToAll
from fastkern.device.virtual_cluster import VirtualCluster, VirtualOptions
from fastkern.device.virtual_combine import Combine
from fastkern.device.virtual_moe import Dispatch
from fastkern.moe.dispatch_arguments import DispatchOptions
from fastkern.planner import Policy, Topology
from tests.device.virtual_cases import expected_rows, random_rows

from .session import Session
from .timing import Timer, Times

_TIMEOUT_S = 10.0
_POISON = 0xAA


class Bench:
    """One session's measures. copy_rate: GB/s of a large copy on the device, once measured."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.scale = session.scale
        self.rng = np.random.default_rng(session.seed)
        self.copy_rate = 0.0

    def cluster(
        self,
        shape: tuple[int, int],
        blocks: int,
        policy: Policy = "auto",
        fill_byte: int | None = None,
    ) -> VirtualCluster:
        """Ranks whose staging and outputs are left as they are, unlike in tests. fill_byte: what
        they hold at first, if not."""
        lanes = self.scale.lanes[0]
        options = VirtualOptions(policy, progress_timeout_s=_TIMEOUT_S, fill_byte=fill_byte)
        return VirtualCluster(self.session.driver, Topology(*shape), blocks, lanes, options=options)

    def most_blocks(self) -> int:
        """Blocks per rank that fill the device with all ranks; 1 where blocks are threads."""
        if self.scale.dry:
            return 1
        with self.cluster((1, self.scale.ranks), 1) as cluster:
            return cluster.most_blocks

    def timer(self, cluster: VirtualCluster, flushes: int = 2) -> Timer:
        """A timer for the cluster's stream, to be closed."""
        return Timer(cluster, self.scale.flush_bytes, self.scale.repeats, flushes)

    def inputs(self, splits: npt.NDArray[np.int64], row_bytes: int) -> list[torch.Tensor]:
        """Random rows for every rank."""
        rows = splits.sum(axis=1)
        return [random_rows(int(n), (row_bytes,), torch.uint8, self.rng) for n in rows]

    def check_rows(self, call: AllToAll, inputs: list[torch.Tensor], what: str) -> None:
        """What the call has delivered is right, or the measure is of something else."""
        got = call.read_outputs((call.row_bytes,), torch.uint8)
        for rank, (a, b) in enumerate(zip(got, expected_rows(call.splits, inputs), strict=True)):
            if not torch.equal(a, b):
                raise AssertionError(f"{what}: wrong rows on rank {rank}")

    def settle(self, cluster: VirtualCluster) -> None:
        """Wait for launches that were enqueued without `run`; all ranks must have ended them."""
        cluster.finish("measured launches", int(cluster.controls()[0]["epoch"]))

    def dispatch(
        self, cluster: VirtualCluster, tokens: int, num_experts: int, topk: int
    ) -> Dispatch:
        """bf16 tokens with fp32 weights, distinct experts at random."""
        rng = torch.Generator().manual_seed(self.session.seed)
        ranks = range(cluster.num_ranks)
        x = torch.randn(tokens, self.scale.hidden, generator=rng).to(torch.bfloat16)
        idx = [torch.rand(tokens, num_experts, generator=rng).argsort(1)[:, :topk] for _ in ranks]
        weights = [torch.rand(tokens, topk, generator=rng) for _ in ranks]
        options = DispatchOptions(num_experts=num_experts)
        return Dispatch(cluster, [[x] for _ in ranks], idx, weights, options)

    def combine(self, cluster: VirtualCluster, dispatch: Dispatch) -> Combine:
        """Expert outputs in bf16, weights applied on the way."""
        rng = torch.Generator().manual_seed(self.session.seed + 1)
        rows = [info.num_recv_rows for info in dispatch.infos]
        block = torch.randn(max(rows), self.scale.hidden, generator=rng).to(torch.bfloat16)
        weights = [torch.rand(n, generator=rng) for n in rows]
        return Combine(cluster, dispatch.handle, [block[:n] for n in rows], weights)

    def add(self, name: str, case: str, times: Times, **figures: float) -> None:
        """Record a measure."""
        rounded = {key: round(value, 4) for key, value in figures.items()}
        kernels = self.session.driver.kernels
        self.session.record.add_measure(name, case, kernels=kernels, **times.figures(), **rounded)
        print(name, case, times.figures(), rounded, flush=True)

    def add_share(self, name: str, case: str, times: Times, moved: int) -> None:
        """Record a measure of `moved` bytes copied once each, as a share of the large copy's."""
        rate = moved / times.p50_us / 1e3
        share = {"share_of_copy": rate / self.copy_rate} if self.copy_rate else {}
        self.add(name, case, times, bytes=moved, GBps=rate, **share)


def poison_all(cluster: VirtualCluster, outputs: Iterable[tuple[int, int]]) -> None:
    """Other bytes into every rank's staging and windows, and into outputs: address and bytes."""
    fill, stream = cluster.driver.fill, cluster.stream
    for rank in range(cluster.num_ranks):
        fill(cluster.heap.data_address(rank), _POISON, cluster.heap.data_bytes, stream)
    for address, num_bytes in outputs:
        fill(address, _POISON, num_bytes, stream)


def all_to_all_outputs(call: AllToAll) -> list[tuple[int, int]]:
    """Where every rank's rows go."""
    rows = call.splits.sum(axis=0)
    return [(a, int(n) * call.row_bytes) for a, n in zip(call.output, rows, strict=True)]


def dispatch_outputs(call: Dispatch) -> list[tuple[int, int]]:
    """Where every rank's rows of the first tensor go."""
    parts = call.launch.moe["parts"][:, 0]
    rows = [info.num_recv_rows for info in call.infos]
    return [(int(p["output"]), n * int(p["row_bytes"])) for p, n in zip(parts, rows, strict=True)]
