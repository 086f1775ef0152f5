"""The planner on the host as a step of a stream: pinned memory in and out, a C function between."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ..kernels import _host
from ..moe.handle import LAYOUTS
from ..moe.static_shape import StaticShape
from ..planner import Topology
from ..planner.api import DEFAULT_CHUNK_SLOTS, DEFAULT_CREDIT_LEAD
from .driver import Driver
from .virtual_memory import host_view


class HostPlanning:
    """A rank's planner (_host.HostPlanner), and the memory through which it works.

    counts: what it reads, num_count_bytes of u64. out: what it writes, num_bytes, see its layout.
    """

    def __init__(self, driver: Driver, planner: Any, num_counts: int) -> None:
        self.planner = planner
        self._logged = ""
        self.num_count_bytes = 8 * num_counts
        self.num_bytes = int(planner.layout["bytes"])
        with ExitStack() as made:
            self.counts = driver.allocate_host(self.num_count_bytes)
            made.callback(driver.free_host, self.counts)
            self.out = driver.allocate_host(self.num_bytes)
            made.callback(driver.free_host, self.out)
            host_view(self.counts, self.num_count_bytes)[:] = 0
            host_view(self.out, self.num_bytes)[:] = 0
            planner.bind(self.counts, self.out)
            planner.run()  # of nothing: tables with a header are there from the start
            self._owned = made.pop_all()

    def first(self) -> bytes:
        """What was planned of nothing."""
        return host_view(self.out, self.num_bytes).tobytes()

    def news(self) -> str:
        """Why a call could not be planned, for the log, once."""
        text = str(self.planner.error)
        if text == self._logged:
            return ""
        self._logged = text
        return text

    def check(self) -> None:
        """Raise ValueError for a call, since the last look, that could not be planned."""
        if text := self.planner.error:
            self.planner.clear_error()
            raise ValueError(f"static dispatch: {text}; the call moved nothing")

    def close(self) -> None:
        """Free the memory; no call may be under way."""
        self._owned.close()


def make_planning(
    driver: Driver, shape: StaticShape, topology: Topology, rank: int, chunk_bytes: int
) -> HostPlanning:
    """Planning of the exchange's calls on one rank."""
    placement, core = shape.placement(topology.num_ranks), topology._core
    planner = _host.HostPlanner(
        servers=topology.servers,
        gpus_per_server=topology.gpus_per_server,
        scale_up_cost=core.scale_up_cost,
        scale_out_cost=core.scale_out_cost,
        alpha_ps=core.alpha_ps,
        mesh=topology.scale_up == "mesh",
        cross_rail=topology.cross_rail,
        chunk_bytes=chunk_bytes,
        chunk_slots=DEFAULT_CHUNK_SLOTS,
        credit_lead=DEFAULT_CREDIT_LEAD,
        rank=rank,
        num_max_tokens=shape.num_max_tokens,
        topk=shape.topk,
        num_experts=shape.options.num_experts,
        owner=placement.owner.tolist(),
        local_index=placement.local_index.tolist(),
        layout=LAYOUTS.index(shape.options.layout),
        alignment=shape.options.expert_alignment,
        row_bytes=shape.format.row_bytes,
        combine_row_bytes=shape.combine_row_bytes,
        partial_row_bytes=shape.partial_row_bytes,
    )
    num_keys = shape.options.num_experts + topology.servers + topology.num_ranks
    return HostPlanning(driver, planner, topology.num_ranks * num_keys + 1)
