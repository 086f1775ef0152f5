"""Plans of dispatches, kept for their combines, and the launches that go by them."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from ..config import Settings
from ..planner import MoePlan, Policy, StageTable, Topology, plan_moe
from ..runtime import Runtime
from ..stats import CallStats
from ..tuning.blocks import BlockCounts
from .handle import array_of, header_of

_PLANS_KEPT = 256


class PlanKeeper:
    """Plans and launches for one rank's dispatches and combines."""

    def __init__(
        self, runtime: Runtime, topology: Topology, settings: Settings, blocks: BlockCounts
    ) -> None:
        self._runtime = runtime
        self._blocks = blocks
        self._topology = topology
        self._settings = settings
        self._plans: OrderedDict[int, MoePlan] = OrderedDict()

    def make(self, to_server: Any, to_rank: Any, row_bytes: int) -> MoePlan:
        """A plan for these counts, see plan_moe."""
        policy: Policy = self._settings.policy  # type: ignore[assignment]
        made = plan_moe(
            to_server,
            to_rank,
            self._topology,
            row_bytes,
            policy,
            chunk_bytes=self._settings.chunk_bytes,
        )
        if self._settings.debug:
            made.validate()
        return made

    def of(self, meta: torch.Tensor) -> MoePlan:
        """The plan of a handle's dispatch; made again, to the same bits, if it is long ago."""
        header = header_of(meta)
        serial = int(header["serial"])
        found = self._plans.get(serial)
        if found is None:
            found = self.again(meta, int(header["plan_row_bytes"]))
            self.keep(serial, found)
        return found

    def again(self, meta: torch.Tensor, row_bytes: int) -> MoePlan:
        """A plan for the same routing, with rows of this size."""
        r, n = self._topology.num_ranks, self._topology.servers
        to_server = array_of(meta, "to_server", np.int64, r * n).reshape(r, n)
        to_rank = array_of(meta, "to_rank", np.int64, r * r).reshape(r, r)
        return self.make(to_server, to_rank, row_bytes)

    def keep(self, serial: int, plan: MoePlan) -> None:
        """Keep the plan of the handle that call `serial` made."""
        self._plans[serial] = plan
        if len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)

    def launch(
        self, table: StageTable, arguments: Any, op: str, num_blocks: int | None, num_bytes: int
    ) -> float:
        """Reserve the heap, then run; returns when the heap was there.

        num_blocks: None: the usual number for a call in which this rank gives or gets num_bytes.
        """
        need = max(1, table.data_layout().bytes)
        if need > self._settings.max_buffer_bytes:
            raise ValueError(
                f"{op}: needs {need} bytes of staging per rank, max_buffer_bytes is "
                f"{self._settings.max_buffer_bytes}"
            )
        self._runtime.reserve(need)
        reserved = time.perf_counter()
        blocks = self._blocks.of(num_blocks, op, num_bytes)
        self._runtime.launch_moe(table, arguments, op, blocks)
        return reserved

    def note(
        self, plan: MoePlan, begin: float, entered: float, planned: float, reserved: float
    ) -> None:
        """Figures of a call that has just ended, from the times of its steps."""
        self._runtime.stats = CallStats(
            plan,
            entered - begin,
            planned - entered,
            reserved - planned,
            time.perf_counter() - reserved,
        )
