"""The launches of a static exchange, in stream order; nothing here waits, or looks at counts.

A dispatch planned on the device: one kernel routes, exchanges counts and fills the tables in, then
the dispatch follows. Planned on the host: route's counts and their exchange, the counts to pinned
memory, the planner as a function that the stream calls, what it wrote to the device, route's fill,
the dispatch. Both may be captured: what a call is given is part of its first launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..moe.dispatch_arguments import DispatchCall
from ..moe.handle import LAYOUTS
from ..moe.static_shape import Reverse, StaticShape
from ..planner import Topology
from ..planner.table import DTYPES
from .driver import Driver
from .records import LAUNCH_ARGS, STATIC_LAUNCH, new_record, offset_of
from .route_records import launch_route, num_units, route_record
from .static_memory import StaticMemory, StaticRank
from .static_planning import HostPlanning
from .virtual_kernels import Kernels

HEADER = DTYPES["Header"]  # of a table
_COMBINES = {False: "fastkern_combine", True: "fastkern_combine_float64"}
_BASES = ("slot_base", "window_base", "list_base", "return_base", "partial_base")


class StaticLaunches:
    """Launches of the ranks that are in `memory`. planning: per rank, or empty."""

    def __init__(
        self,
        driver: Driver,
        kernels: Kernels,
        shape: StaticShape,
        topology: Topology,
        ranks: Sequence[int],
        memory: StaticMemory,
        num_blocks: int,
        num_lanes: int,
        planning: Sequence[HostPlanning],
    ) -> None:
        self._driver = driver
        self._kernels = kernels
        self._shape = shape
        self._topology = topology
        self._ranks = ranks
        self._memory = memory
        self._num_blocks = num_blocks
        self._num_lanes = num_lanes
        self._planning = planning
        self._placement = shape.placement(topology.num_ranks)

    def route_args(self, k: int, call: DispatchCall, topk_idx: int) -> Any:
        """RouteArgs of the k-th rank's tokens. topk_idx: where the indices are on the device."""
        at = self._memory.rank[k]
        record = route_record(
            call,
            self._placement,
            self._topology,
            self._ranks[k],
            num_units(call.num_tokens, self._memory.route_kernels),
            topk_idx=topk_idx,
            owner=at["owner"],
            local_index=at["local_index"],
            counts=at["unit_counts"],
            totals=at["totals"],
            bad=at["bad"],
            handle=at["handle"],
        )
        record["layout"] = LAYOUTS.index(self._shape.options.layout)
        for name in _BASES:
            record[name] = self._planned_at(k, name) if self._planning else at[name]
        return record

    def tokens_per_expert(self, k: int) -> int:
        """Address of int64 [own experts] after a dispatch."""
        if self._planning:
            return self._planned_at(k, "tokens_per_expert")
        return self._memory.rank[k]["tokens_per_expert"]

    def _planned_at(self, k: int, name: str) -> int:
        return self._memory.rank[k]["planned"] + int(self._planning[k].planner.layout[name])

    # -- dispatch ----------------------------------------------------------------------------------

    def dispatch(self, stream: int, routes: Sequence[Any], moe: Any = None) -> None:
        """Put a dispatch into the stream. routes: RouteArgs of each rank.

        moe: MoeArgs of the only rank here, part of the launch; None where both have been written to
        the ranks' "values" and "dispatch moe".
        """
        launch = new_record(STATIC_LAUNCH, ranks=self._memory.static_args["dispatch"])
        if moe is not None:
            launch["brings_values"] = 1
            launch["values"]["moe"], launch["values"]["route"] = moe, routes[0]
        if not self._planning:
            self._static("fastkern_static_direct", launch, stream)
        else:
            self._plan(stream, routes, launch)
        self._moving("fastkern_dispatch", "dispatch", stream)

    def _plan(self, stream: int, routes: Sequence[Any], launch: Any) -> None:
        for route in routes:
            self._route("fastkern_route_count", route, int(route["num_units"]), stream)
            self._route("fastkern_route_scan", route, self._memory.num_keys, stream)
        self._static("fastkern_static_enter", launch, stream)
        for at, planning in zip(self._memory.rank, self._planning, strict=True):
            self._plan_of(at, planning, stream)
        for route in routes:
            self._route("fastkern_route_fill", route, int(route["num_units"]), stream)

    def _plan_of(self, at: StaticRank, planning: HostPlanning, stream: int) -> None:
        driver, planner = self._driver, planning.planner
        driver.copy(planning.counts, at["counts"], planning.num_count_bytes, stream)
        driver.call_host(stream, planner.function, planner.data)
        driver.copy(at["planned"], planning.out, planning.num_bytes, stream)

    def combine(self, stream: int, doubles: bool, moe: Any = None) -> None:
        """Put a combine into the stream. moe: as in `dispatch`; else "combine moe" is written."""
        if moe is not None:
            self._hand_on("combine", moe, stream)
        self._moving(_COMBINES[doubles], "combine", stream)

    def reverse(self, reverse: Reverse, stream: int, doubles: bool, moe: Any) -> None:
        """Put a call of a backward into the stream, of the only rank here, by the last tables."""
        at, copy = self._memory.rank[0], self._driver.copy
        table, num_bytes = self._memory.table(0, reverse.op)
        own, sizes = at[f"{reverse.name} table"], at[f"{reverse.name} sizes"]
        copy(own, table, num_bytes, stream)
        copy(own + offset_of(HEADER, "row_bytes"), sizes, 8, stream)
        if reverse.op == "combine":
            copy(own + offset_of(HEADER, "scratch_row_bytes"), sizes + 8, 8, stream)
        self._hand_on(reverse.name, moe, stream)
        kernel = "fastkern_dispatch" if reverse.op == "dispatch" else _COMBINES[doubles]
        self._moving(kernel, reverse.name, stream)

    # -- launches ----------------------------------------------------------------------------------

    def _hand_on(self, name: str, moe: Any, stream: int) -> None:
        """MoeArgs to where the kernel of a call finds them."""
        args = self._memory.static_args[name]
        launch = new_record(STATIC_LAUNCH, ranks=args, brings_values=1)
        launch["values"]["moe"] = moe
        self._static("fastkern_static_values", launch, stream)

    def _static(self, kernel: str, launch: Any, stream: int) -> None:
        function = self._kernels.get(kernel, self._num_lanes)
        lanes = self._kernels.lanes_of(kernel, self._num_lanes)
        self._driver.launch(function, len(self._ranks), lanes, stream, launch.tobytes())

    def _route(self, kernel: str, args: Any, num_items: int, stream: int) -> None:
        launch_route(self._driver, self._kernels, kernel, args, num_items, stream)

    def _moving(self, kernel: str, name: str, stream: int) -> None:
        args = self._memory.kernel_args[name]
        function = self._kernels.get(kernel, self._num_lanes)
        n, blocks = len(self._ranks), self._num_blocks
        launch = new_record(LAUNCH_ARGS, ranks=args, num_ranks=n, blocks_per_rank=blocks)
        self._driver.launch(function, n * blocks, self._num_lanes, stream, launch.tobytes())
