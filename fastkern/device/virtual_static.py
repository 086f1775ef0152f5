"""A static exchange of a virtual cluster: tensors stay in place, launches are run or captured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import FastkernError
from ..moe.combine_arguments import prepare_combine
from ..moe.dispatch_arguments import DispatchCall, prepare_dispatch
from ..moe.static_shape import StaticShape
from .graphs import record_graph
from .moe_record import MoeRecord
from .records import CONTROL, STATIC_VALUES, new_record
from .slice_heap import SliceHeap
from .static_launches import StaticLaunches
from .static_memory import StaticHeap, StaticMemory
from .static_outcome import OUTCOME_BYTES, outcome_error
from .static_planning import HostPlanning, make_planning
from .static_tables import DirectPlan
from .virtual_errors import control_record, launch_error
from .virtual_memory import tensor_bytes

if TYPE_CHECKING:
    from .virtual_runtime import VirtualRuntime


@dataclass(frozen=True)
class StaticResult:
    """Per rank what a dispatch and the combine of its first payload have given.

    recv: its payloads, the worst case of rows. weights, idx: or None. tokens_per_expert: int64 [own
    experts]. sums: [T, ...], or None without a combine.
    """

    recv: list[list[torch.Tensor]]
    weights: list[torch.Tensor] | None
    idx: list[torch.Tensor] | None
    tokens_per_expert: list[torch.Tensor]
    sums: list[torch.Tensor] | None


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
        self._graph: int | None = None
        self._calls: list[DispatchCall] = []
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
            self._memory = StaticMemory(
                driver,
                shape,
                topology,
                self._ranks,
                common,
                needs,
                int(entry_timeout_s * 1e9),
                direct,
                [planning.planner.layout for planning in self._planning],
            )
            made.callback(self._memory.close)
            for k, planning in enumerate(self._planning):
                first_plan = np.frombuffer(planning.first(), dtype=np.uint8)
                cluster.copier.write(self._memory.rank[k]["planned"], first_plan)
            self._launches = StaticLaunches(
                driver,
                cluster.kernels,
                shape,
                topology,
                self._ranks,
                self._memory,
                common.num_blocks,
                cluster.num_lanes,
                self._planning,
            )
            self._tensors = cluster.allocations(poisoned=True)
            made.callback(self._tensors.close)
            self._places = [self._allocated(rank) for rank in self._ranks]
            made.callback(self._drop_graph)
            self._owned = made.pop_all()

    def close(self) -> None:
        """Free its memory. A second call does nothing."""
        self._owned.close()

    def _allocated(self, rank: int) -> dict[str, tuple[int, int]]:
        """Address and bytes of a rank's tensors, for the most tokens and rows there can be."""
        shape, most = self.shape, self.shape.num_max_tokens
        rows = shape.most_rows(self._cluster.num_ranks)[rank]
        form, weight_bytes = shape.format, shape.format.weight_bytes
        per_row = 1 if shape.options.layout == "expert" else shape.topk
        sizes = {"topk_idx": most * shape.topk * 8}
        for p, size in enumerate(form.part_bytes):
            sizes |= {f"x {p}": most * size, f"recv {p}": rows * size}
        if weight_bytes:
            sizes["weights"] = most * shape.topk * weight_bytes
            sizes["recv weights"] = rows * per_row * weight_bytes
        if shape.options.layout == "rank":
            sizes["recv idx"] = rows * shape.topk * 8
        if shape.expert_dtype is not None:
            sizes["sums"] = most * form.part_bytes[0]
        empty = self._tensors.empty
        return {name: (empty(size, f"{name} of rank {rank}"), size) for name, size in sizes.items()}

    # -- inputs ------------------------------------------------------------------------------------

    def write(
        self,
        xs: Sequence[Sequence[torch.Tensor]],
        topk_idx: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Inputs of the next run or replay, per rank; see Communicator.dispatch."""
        self._calls = []
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
            self._calls.append(call)
            self._write_rank(rank, call)

    def _write_rank(self, rank: int, call: DispatchCall) -> None:
        at, memory = self._places[rank], self._memory.rank[rank]
        write = self._cluster.copier.write
        assert call.topk_idx is not None
        for p, x in enumerate(call.xs):
            write(at[f"x {p}"][0], tensor_bytes(x))
        write(at["topk_idx"][0], tensor_bytes(call.topk_idx))
        if call.weights is not None:
            write(at["weights"][0], tensor_bytes(call.weights))
        values = new_record(STATIC_VALUES, moe=self._dispatch_args(rank, call))
        values["route"] = self._route_args(rank, call)
        write(memory["values"], np.frombuffer(values.tobytes(), dtype=np.uint8))
        moe = np.frombuffer(values["moe"].tobytes(), dtype=np.uint8)
        write(memory["dispatch_moe"], moe)
        if self.shape.expert_dtype is not None:
            combine = self._combine_args(rank, call).tobytes()
            write(memory["combine_moe"], np.frombuffer(combine, dtype=np.uint8))

    def _route_args(self, rank: int, call: DispatchCall) -> Any:
        return self._launches.route_args(rank, call, self._places[rank]["topk_idx"][0])

    def _dispatch_args(self, rank: int, call: DispatchCall) -> Any:
        at, form, made = self._places[rank], call.format, MoeRecord()
        for p, (size, offset) in enumerate(zip(form.part_bytes, form.offsets, strict=True)):
            made.add_part(at[f"x {p}"][0], at[f"recv {p}"][0], size, offset)
        nowhere = (0, 0)
        made.set_dispatch(
            handle=self._memory.rank[rank]["handle"],
            header_offset=form.header_offset,
            record=True,
            weights_input=at.get("weights", nowhere)[0],
            weights_output=at.get("recv weights", nowhere)[0],
            weights_offset=form.weights_offset,
            weight_bytes=form.weight_bytes,
            index_output=at.get("recv idx", nowhere)[0],
        )
        return made.record

    def _combine_args(self, rank: int, call: DispatchCall) -> Any:
        at, made, shape = self._places[rank], MoeRecord(), self.shape
        info = shape.info(rank, self._cluster.topology, call.num_tokens)
        like = torch.empty((info.num_recv_rows, *shape.expert_shape), dtype=shape.expert_dtype)
        args = prepare_combine(like, info, like, None, None, shape.wire_dtype, None)
        value, wire, bias = args.kinds
        made.set_combine(
            handle=self._memory.rank[rank]["handle"],
            expert_out=at["recv 0"][0],
            row_weights=self._row_weights(rank),
            result=at["sums"][0],
            width=args.width,
            value_kind=value,
            wire_kind=wire,
            bias_kind=bias,
        )
        return made.record

    def _row_weights(self, rank: int) -> int:
        """The weights received, where the combine can read them; else 0."""
        sums = torch.float64 if self.shape.expert_dtype == torch.float64 else torch.float32
        if self.shape.options.layout == "rank" or self.shape.weights_dtype != sums:
            return 0
        return self._places[rank]["recv weights"][0]

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Dispatch and combine, and wait for the end."""
        self._cluster.check()
        self._poison()
        self._enqueue()
        self._finish()

    def capture(self) -> None:
        """Record both into a graph, for `replay`. Nothing runs."""
        self._cluster.check()
        driver, stream = self._cluster.driver, self._cluster.stream
        driver.synchronize(stream)
        self._drop_graph()
        self._graph = record_graph(driver, stream, self._enqueue)

    def replay(self) -> None:
        """Run what was captured on the inputs of now, and wait for the end."""
        if self._graph is None:
            raise FastkernError("nothing was captured")
        self._cluster.check()
        self._poison()
        self._cluster.driver.replay(self._graph, self._cluster.stream)
        self._finish()

    def _poison(self) -> None:
        value = self._cluster.options.fill_byte
        if value is None:
            return
        driver, stream = self._cluster.driver, self._cluster.stream
        for at in self._places:
            for name, (address, size) in at.items():
                if name.startswith("recv") or name == "sums":
                    driver.fill(address, value, size, stream)

    def _enqueue(self) -> None:
        stream = self._cluster.stream
        for at in self._places:
            self._clear(at)
        routes = [self._route_args(rank, self._calls[rank]) for rank in self._ranks]
        self._launches.dispatch(stream, routes)
        if self.shape.expert_dtype is not None:
            self._launches.combine(stream, self.shape.expert_dtype == torch.float64)

    def _clear(self, at: dict[str, tuple[int, int]]) -> None:
        """Rows that nothing is received into: weights 0, indices -1, payloads zero on request."""
        for name, (address, size) in at.items():
            payload = name.startswith("recv ") and name not in ("recv weights", "recv idx")
            if name in ("recv weights", "recv idx") or (
                payload and self.shape.options.zero_padding
            ):
                value = 0xFF if name == "recv idx" else 0
                self._cluster.driver.fill(address, value, size, self._cluster.stream)

    def _finish(self) -> None:
        """Wait; raise DeadlineError, FastkernError or ValueError saying what went wrong."""
        cluster = self._cluster
        read, size = cluster.copier.read, CONTROL.itemsize
        controls = [
            control_record(read(self.heap.control_address(rank), size)) for rank in self._ranks
        ]
        self._epoch += 1 if self.shape.expert_dtype is None else 2
        found: Exception | None = launch_error(controls, "static exchange", self._epoch)
        if found is None and (where := self.heap.damaged_guards()):
            found = FastkernError(f"a static exchange wrote outside of its memory: {where}")
        if found is not None:
            cluster.break_off(found)
            raise found
        for rank in self._ranks:
            outcome = read(self._memory.rank[rank]["outcome"], OUTCOME_BYTES).view(np.uint64)
            if error := outcome_error(outcome, self.shape):
                for other in self._ranks:
                    nothing = np.zeros(OUTCOME_BYTES, dtype=np.uint8)
                    cluster.copier.write(self._memory.rank[other]["outcome"], nothing)
                raise error
        for planning in self._planning:
            planning.check()

    def _drop_graph(self) -> None:
        if self._graph is not None:
            self._cluster.driver.destroy_graph(self._graph)
            self._graph = None

    # -- outputs -----------------------------------------------------------------------------------

    def read(self) -> StaticResult:
        """What the last run or replay has given, as CPU tensors; checks the guards."""
        self._tensors.check_guards()
        shape, tensor, ranks = self.shape, self._tensors.tensor, self._ranks
        rows = shape.most_rows(self._cluster.num_ranks)
        owned = shape.placement(self._cluster.num_ranks).num_owned
        by_rank = shape.options.layout == "rank"

        def at(rank: int, name: str) -> int:
            return self._places[rank][name][0]

        parts = [
            (p, *form) for p, form in enumerate(zip(shape.row_shapes, shape.dtypes, strict=True))
        ]
        recv = [
            [tensor(at(rank, f"recv {p}"), (rows[rank], *row), dtype) for p, row, dtype in parts]
            for rank in ranks
        ]
        weights, idx, sums = None, None, None
        if (dtype := shape.weights_dtype) is not None:
            tail = (shape.topk,) if by_rank else ()
            weights = [tensor(at(r, "recv weights"), (rows[r], *tail), dtype) for r in ranks]
        if by_rank:
            tail = (shape.topk,)
            idx = [tensor(at(r, "recv idx"), (rows[r], *tail), torch.int64) for r in ranks]
        if (dtype := shape.expert_dtype) is not None:
            sums = [
                tensor(at(r, "sums"), (call.num_tokens, *shape.expert_shape), dtype)
                for r, call in enumerate(self._calls)
            ]
        tokens = [
            tensor(self._launches.tokens_per_expert(r), (int(owned[r]),), torch.int64)
            for r in ranks
        ]
        return StaticResult(recv, weights, idx, tokens, sums)
