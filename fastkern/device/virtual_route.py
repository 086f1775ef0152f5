"""Route of a virtual cluster's dispatch, on the device: counts of all ranks, then handles filled.

Launches per rank: count, for each run of tokens; scan, for each key; fill, as count, once the
counts of all ranks are known (route_records.py). The totals come to the host between scan and fill:
the plan follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..moe.counts import FirstRows, RouteCounts
from ..moe.dispatch_arguments import DispatchCall
from ..moe.handle import LAYOUTS
from ..moe.placement import Placement
from .route_records import base_rows, launch_route, num_keys, num_units, route_record

if TYPE_CHECKING:
    from .virtual_runtime import VirtualRuntime


class DeviceRoute:
    """Route of one dispatch. calls: one per rank, of the same options.

    Its memory is freed by `close`, once the handles are filled.
    """

    def __init__(
        self, cluster: VirtualRuntime, calls: Sequence[DispatchCall], placement: Placement
    ) -> None:
        self._cluster = cluster
        self._calls = calls
        self._memory = cluster.allocations()
        self._topology = cluster.topology
        self._num_keys = num_keys(placement, self._topology)
        kernels = cluster.driver.kernels
        self._num_units = [num_units(call.num_tokens, kernels) for call in calls]
        try:
            self._args = self._make_args(placement)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free its memory."""
        self._memory.close()

    def _make_args(self, placement: Placement) -> list[Any]:
        put, empty = self._memory.filled, self._memory.empty
        owner = put(placement.owner.astype(np.uint32), "owner")
        local_index = put(placement.local_index.astype(np.uint32), "local_index")
        num_ranks = len(self._calls)
        self._totals = empty(num_ranks * self._num_keys * 8, "totals")
        self._bad = [empty((units + 1) * 8, "bad") for units in self._num_units]
        made = []
        for rank, (call, units) in enumerate(zip(self._calls, self._num_units, strict=True)):
            assert call.topk_idx is not None
            made.append(
                route_record(
                    call,
                    placement,
                    self._topology,
                    rank,
                    units,
                    topk_idx=put(call.topk_idx, "topk_idx"),
                    owner=owner,
                    local_index=local_index,
                    counts=empty(units * self._num_keys * 8, "counts"),
                    totals=self._totals + rank * self._num_keys * 8,
                    bad=self._bad[rank],
                )
            )
        return made

    def counts(self) -> RouteCounts:
        """Counts of all ranks. Raises ValueError naming the first index that is no expert's."""
        for rank in range(len(self._calls)):
            self._enqueue_counts(rank)
        read = self._cluster.copier.read
        num_ranks = len(self._calls)
        rows = read(self._totals, num_ranks * self._num_keys * 8).view(np.uint64)
        for rank, (call, units) in enumerate(zip(self._calls, self._num_units, strict=True)):
            bad = int(read(self._bad[rank] + units * 8, 8).view(np.uint64)[0])
            idx = call.topk_idx
            assert idx is not None
            assert call.options is not None
            if bad < idx.numel():
                token, k = divmod(bad, call.topk)
                raise ValueError(
                    f"rank {rank}: topk_idx[{token}][{k}] is {int(idx[token, k])}, neither -1 nor "
                    f"one of {call.options.num_experts} experts"
                )
        return RouteCounts.from_rows(
            rows.reshape(num_ranks, self._num_keys),
            self._num_keys - num_ranks - self._topology.servers,
            self._topology.servers,
        )

    def fill(self, handles: Sequence[int], firsts: Sequence[FirstRows]) -> None:
        """Fill the handles at these addresses, whose headers are there; returns when it is done."""
        for args, address, first, call in zip(
            self._args, handles, firsts, self._calls, strict=True
        ):
            assert call.options is not None
            args["handle"] = address
            args["layout"] = LAYOUTS.index(call.options.layout)
            for name, rows in base_rows(first):
                args[name] = self._memory.filled(rows, name)
            self._launch("fastkern_route_fill", args, int(args["num_units"]))
        self._cluster.driver.synchronize(self._cluster.stream)
        self._memory.check_guards()

    def _enqueue_counts(self, rank: int) -> None:
        args = self._args[rank]
        self._launch("fastkern_route_count", args, self._num_units[rank])
        self._launch("fastkern_route_scan", args, self._num_keys)

    def enqueue(self, rank: int) -> None:
        """Put a rank's three kernels into the stream once more, after `fill`; to be measured."""
        self._enqueue_counts(rank)
        self._launch("fastkern_route_fill", self._args[rank], self._num_units[rank])

    def _launch(self, kernel: str, args: Any, num_items: int) -> None:
        cluster = self._cluster
        launch_route(cluster.driver, cluster.kernels, kernel, args, num_items, cluster.stream)
