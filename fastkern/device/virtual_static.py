"""A static exchange of a virtual cluster: tensors stay in place, launches are run or captured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import FastkernError
from ..moe.dispatch_arguments import DispatchCall, prepare_dispatch
from ..moe.static_shape import StaticShape
from .driver import DriverError
from .graphs import record_graph
from .records import CONTROL
from .slice_heap import SliceHeap
from .static_launches import StaticLaunches
from .static_memory import StaticHeap, StaticMemory
from .static_outcome import OUTCOME_BYTES, Refusals
from .static_planning import HostPlanning, make_planning
from .static_tables import DirectPlan
from .virtual_errors import control_record, launch_error
from .virtual_static_tensors import StaticResult, StaticTensors

if TYPE_CHECKING:
    from .virtual_runtime import VirtualRuntime


class VirtualStatic:
    """Dispatches of one shape on all ranks, each with a combine of its first payload.

    The experts do nothing: the combine sums what was received, with the weights received if there
    are any. shape: see StaticShape; expert_out must be like x[0], or not given. entry_timeout_s:
    how long a rank waits for the others to enter.

    Inputs lie at fixed places, so that a captured sequence works on what was last written. Where
    the host plans, it is for as many tokens as were written when it was captured.
    """

    def __init__(self, cluster: VirtualRuntime, shape: StaticShape, entry_timeout_s: float) -> None:
        first = shape.row_shapes[0], shape.dtypes[0]
        if shape.expert_dtype and (shape.expert_shape, shape.expert_dtype) != first:
            raise ValueError("expert_out must be like x[0], which the combine sums")
        self.shape = shape
        self._cluster = cluster
        self._ranks = range(cluster.num_ranks)
        self._epoch = 0
        self._refusals = [Refusals(shape) for _ in range(cluster.num_ranks)]
        self._graph: int | None = None
        self._calls: list[DispatchCall] = []
        self._routes: list[Any] = []  # RouteArgs
        self._captured: list[tuple[int, int]] = []
        topology, driver, options = cluster.topology, cluster.driver, cluster.options
        direct = None
        if shape.planner == "device":
            direct = DirectPlan(shape, topology, options.chunk_bytes)
        needs = StaticHeap.of(shape, topology, direct)
        with ExitStack() as made:
            self.heap = SliceHeap(
                driver,
                cluster.num_ranks,
                needs.num_slots,
                8,
                needs.data_bytes,
                options.guard_bytes,
            )
            made.callback(self.heap.close)
            common = cluster.common_args(self.heap)
            self._planning: list[HostPlanning] = []
            if direct is None:
                for rank in self._ranks:
                    planning = make_planning(driver, shape, topology, rank, options.chunk_bytes)
                    made.callback(planning.close)
                    self._planning.append(planning)
            self.memory = StaticMemory(
                driver,
                shape,
                topology,
                self._ranks,
                common,
                needs,
                int(min(entry_timeout_s * 1e9, 2.0**62)),
                direct,
                [planning.planner.layout for planning in self._planning],
            )
            made.callback(self.memory.close)
            for k, planning in enumerate(self._planning):
                first_plan = np.frombuffer(planning.first(), dtype=np.uint8)
                cluster.copier.write(self.memory.rank[k]["planned"], first_plan)
            for kernel in self._kernels():  # a capture may not load them
                cluster.kernels.get(kernel, cluster.num_lanes)
            self._num_blocks = common.num_blocks
            self._launches = self._launches_of(cluster.num_ranks)
            self._tensors = StaticTensors(cluster, shape, self.memory, self._launches)
            made.callback(self._tensors.close)
            made.callback(self._drop_graph)
            self._owned = made.pop_all()

    def _kernels(self) -> list[str]:
        """Names of those that a call launches."""
        names = ["fastkern_static_direct", "fastkern_dispatch"]
        if self._planning:
            route = [f"fastkern_route_{step}" for step in ("count", "scan", "fill")]
            names = ["fastkern_static_enter", "fastkern_dispatch", *route]
        if self.shape.expert_dtype == torch.float64:
            names.append("fastkern_combine_float64")
        elif self.shape.expert_dtype is not None:
            names.append("fastkern_combine")
        return names

    def _launches_of(self, num_ranks: int) -> StaticLaunches:
        """Of the first ranks."""
        cluster = self._cluster
        return StaticLaunches(
            cluster.driver,
            cluster.kernels,
            self.shape,
            cluster.topology,
            self._ranks[:num_ranks],
            self.memory,
            self._num_blocks,
            cluster.num_lanes,
            self._planning,
        )

    def close(self) -> None:
        """Free its memory. A second call does nothing."""
        self._owned.close()

    def write(
        self,
        xs: Sequence[Sequence[torch.Tensor]],
        topk_idx: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Inputs of the next run or replay, per rank; see Communicator.dispatch.

        Raises TypeError or ValueError for bad ones; then those of before stay.
        """
        calls = []
        for rank in self._ranks:
            given = None if topk_weights is None else topk_weights[rank]
            call = prepare_dispatch(
                xs[rank],
                topk_idx[rank],
                given,
                self.shape.options,
                None,
                None,
                None,
                self._cluster.num_ranks,
            )
            self.shape.check_dispatch(call)
            calls.append(call)
        self._calls = calls
        self._routes = [self._tensors.write(rank, call) for rank, call in enumerate(calls)]

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Dispatch and combine, and wait for the end.

        Raises ValueError or FastkernError where a call moved nothing, after which the next may be
        made; DeadlineError and the like where the cluster is of no more use.
        """
        self._cluster.check()
        self._poison()
        self.enqueue()
        self.finish()

    def capture(self, cleared: Sequence[int] | None = None) -> None:
        """Record both into a graph, for `replay`. Nothing runs. cleared: as of `enqueue`."""
        self._cluster.check()
        driver, stream = self._cluster.driver, self._cluster.stream
        driver.synchronize(stream)
        self._drop_graph()
        self._graph = record_graph(driver, stream, lambda: self._put(cleared))
        self._captured = self._kept_by_host_plans()

    def replay(self) -> None:
        """Run what was captured on the inputs of now, and wait for the end; raises as `run`."""
        self._check_captured()
        self._cluster.check()
        self._poison()
        self.enqueue_replay()
        self.finish()

    def _check_captured(self) -> None:
        if self._graph is None:
            raise FastkernError("nothing was captured")
        if self._captured != (now := self._kept_by_host_plans()):
            raise ValueError(
                f"captured for (tokens, bytes of an index) {self._captured} per rank, not {now}: "
                "where the host plans they stay the same"
            )

    def _kept_by_host_plans(self) -> list[tuple[int, int]]:
        """What route's kernels are launched with, and a graph keeps."""
        if not self._planning:
            return []
        kept = []
        for call in self._calls:
            assert call.topk_idx is not None
            kept.append((call.num_tokens, call.topk_idx.element_size()))
        return kept

    def _poison(self) -> None:
        """Staging and outputs; entry records too, which each call writes before it reads them."""
        value = self._cluster.options.fill_byte
        if value is None:
            return
        driver, stream = self._cluster.driver, self._cluster.stream
        for rank in self._ranks:
            driver.fill(self.heap.data_address(rank), value, self.heap.data_bytes, stream)
        self._tensors.poison(value)

    def enqueue(self, cleared: Sequence[int] | None = None) -> None:
        """Put both into the stream, to be followed by `finish` some time. cleared: the ranks whose
        outputs are cleared before: all, but where times are to be those of a rank that has a device
        of its own."""
        self._put(cleared)
        self._epoch += self._launches_per_call

    def enqueue_replay(self) -> None:
        """Put what was captured into the stream, as `enqueue`."""
        self._check_captured()
        assert self._graph is not None
        self._cluster.driver.replay(self._graph, self._cluster.stream)
        self._epoch += self._launches_per_call

    def _put(self, cleared: Sequence[int] | None) -> None:
        if not self._calls:
            raise FastkernError("no inputs were written")
        stream, num_ranks, launches = self._cluster.stream, self._cluster.num_ranks, self._launches
        if self._cluster.launched_ranks != num_ranks:
            num_ranks = self._cluster.launched_ranks
            launches = self._launches_of(num_ranks)
        self._tensors.clear(self._ranks if cleared is None else cleared)
        launches.dispatch(stream, self._routes[:num_ranks])
        if self.shape.expert_dtype is not None:
            launches.combine(stream, self.shape.expert_dtype == torch.float64)

    @property
    def _launches_per_call(self) -> int:
        """Of the kernels that count them."""
        return 1 if self.shape.expert_dtype is None else 2

    def finish(self) -> None:
        """Wait for all that was enqueued; raises as `run`."""
        try:
            found = self._ended()
        except DriverError as failure:
            self._cluster.break_off(failure)
            raise
        if found is not None:
            self._cluster.break_off(found)
            raise found
        if (refused := self._refusal()) is not None:
            raise refused

    def _ended(self) -> Exception | None:
        """What has broken the cluster."""
        read, size = self._cluster.copier.read, CONTROL.itemsize
        controls = [
            control_record(read(self.heap.control_address(rank), size)) for rank in self._ranks
        ]
        if error := launch_error(controls, "static exchange", self._epoch):
            return error
        if where := self.heap.damaged_guards():
            return FastkernError(f"a static exchange wrote outside of its memory: {where}")
        return None

    def _refusal(self) -> Exception | None:
        """Why a call moved nothing, by the first rank that says so."""
        found: list[Exception] = []
        for rank, refusals in zip(self._ranks, self._refusals, strict=True):
            outcome = self.memory.rank[rank]["outcome"]
            said = self._cluster.copier.read(outcome, OUTCOME_BYTES).view(np.uint64)
            if error := refusals.news(said):
                found.append(error)
        for planning in self._planning:
            try:
                planning.check()
            except (FastkernError, ValueError) as refused:
                found.append(refused)
        return found[0] if found else None

    def _drop_graph(self) -> None:
        if self._graph is not None:
            self._cluster.driver.destroy_graph(self._graph)
            self._graph = None

    # -- outputs -----------------------------------------------------------------------------------

    def read(self) -> StaticResult:
        """What the last run or replay has given, as CPU tensors; checks the guards."""
        return self._tensors.read(self._calls)

    def read_sums(self) -> list[torch.Tensor]:
        """Per rank the sums [T, ...] alone."""
        return [self._tensors.sums(rank, call) for rank, call in enumerate(self._calls)]

    def read_tokens_per_expert(self) -> list[torch.Tensor]:
        """Per rank int64 [own experts] alone."""
        return [self._tensors.tokens_per_expert(rank) for rank in self._ranks]
