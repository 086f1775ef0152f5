"""The handles of a virtual cluster's dispatch: on the device, one per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import FastkernError
from ..moe.counts import RouteCounts
from ..moe.dispatch_arguments import DispatchCall
from ..moe.handle import HEADER, MetaInfo, meta_info, tokens_per_expert
from ..moe.make_handle import HandleForm, HandleOrigin, handle_form
from ..moe.placement import Placement
from ..planner import MoePlan, plan_moe
from .virtual_memory import Allocations, tensor_bytes
from .virtual_route import DeviceRoute

if TYPE_CHECKING:
    from .virtual_runtime import VirtualRuntime


class VirtualHandle:
    """What a combine, or a dispatch with the same routing, needs of a dispatch, on all ranks.

    plan: of the dispatch. starts: per rank int64, the handle's header and counts; what follows is
    on the device alone. addresses: of the handles there. It lives until `close`, whatever other
    calls do.
    """

    def __init__(
        self,
        cluster: VirtualRuntime,
        plan: MoePlan,
        forms: Sequence[HandleForm],
    ) -> None:
        self.plan = plan
        self.counts = forms[0].counts
        self.starts: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self._memory: Allocations = cluster.allocations(poisoned=True)
        self._sizes = [form.num_bytes for form in forms]
        for rank, form in enumerate(forms):
            start = torch.empty(form.num_bytes // 8, dtype=torch.int64)
            form.write_start(start)
            address = self._memory.empty(form.num_bytes, f"handle of rank {rank}")
            cluster.copier.write(address, tensor_bytes(start)[: form.num_start_bytes])
            self.starts.append(start)
            self.addresses.append(address)

    def info(self, rank: int) -> MetaInfo:
        """What a rank's header says."""
        self.check()
        return meta_info(self.starts[rank])

    def tokens_per_expert(self, rank: int) -> torch.Tensor:
        """int64 [own experts]: slots of each expert there, without padding."""
        return tokens_per_expert(self.starts[rank])

    def read(self, rank: int) -> torch.Tensor:
        """A copy of a rank's whole handle, as the host's dispatch would have made it."""
        self.check()
        return self._memory.tensor(self.addresses[rank], (self._sizes[rank] // 8,), torch.int64)

    @property
    def num_partials(self) -> int:
        """The most partial rows that any rank gave out as a proxy."""
        self.check()
        offset = HEADER.fields["num_partials"][1] if HEADER.fields else 0
        read = self._memory.copier.read
        return max(int(read(a + offset, 8).view(np.uint64)[0]) for a in self.addresses)

    def check(self) -> None:
        """Raise FastkernError when it was closed; checks its guards otherwise."""
        if not self.addresses:
            raise FastkernError("the handle was closed")
        self._memory.check_guards()

    def close(self) -> None:
        """Free the device's memory. A second call does nothing."""
        self.addresses = []
        self._memory.close()


def routed_handle(cluster: VirtualRuntime, calls: Sequence[DispatchCall]) -> VirtualHandle:
    """Route, plan, and handles filled by route: all that precedes a dispatch.

    Raises ValueError naming rank and index, or the rank that has not room enough.
    """
    handle, route = handle_and_route(cluster, calls)
    route.close()
    return handle


def handle_and_route(
    cluster: VirtualRuntime, calls: Sequence[DispatchCall]
) -> tuple[VirtualHandle, DeviceRoute]:
    """As `routed_handle`, with the route that has filled the handles; both to be closed."""
    options = calls[0].options
    assert options is not None
    placement = Placement(options.num_experts, cluster.num_ranks, options.expert_to_rank)
    route = DeviceRoute(cluster, calls, placement)
    try:
        counts = route.counts()
        plan = planned(cluster, counts, calls[0].format.row_bytes)
        no_outs = np.zeros(cluster.num_ranks, dtype=np.uint64)
        forms = [
            handle_form(call, counts, no_outs, plan, HandleOrigin(0, 1, rank, cluster.topology))
            for rank, call in enumerate(calls)
        ]
        handle = VirtualHandle(cluster, plan, forms)
        try:
            route.fill(handle.addresses, [form.first for form in forms])
        except BaseException:
            handle.close()
            raise
        return handle, route
    except BaseException:
        route.close()
        raise


def planned(cluster: VirtualRuntime, counts: RouteCounts, row_bytes: int) -> MoePlan:
    """The plan for these counts, with the cluster's options."""
    options = cluster.options
    return plan_moe(
        counts.to_server,
        counts.to_rank,
        cluster.topology,
        row_bytes,
        options.policy,
        chunk_bytes=options.chunk_bytes,
    )
