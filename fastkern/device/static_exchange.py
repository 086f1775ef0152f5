"""Dispatches and combines of one shape that the host only enqueues: for graphs, and low latency."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ClosedError, DeadlineError, FastkernError, WaitRecord
from ..moe.combine_arguments import CombineCall, prepare_combine
from ..moe.dispatch_arguments import DispatchCall, prepare_dispatch
from ..moe.static_shape import Reverse, StaticShape
from ..moe.tensor_checks import with_target
from ..planner import Topology
from ..turns import Turns
from ..wait_records import abort_epoch, abort_origin, wait_record
from .memory import SymmetricHeap
from .moe_record import MoeRecord
from .records import CONTROL
from .static_gradients import differentiable_combine, differentiable_dispatch
from .static_launches import StaticLaunches
from .static_memory import StaticHeap, StaticMemory
from .static_outcome import OUTCOME_BYTES, outcome_error
from .static_planning import HostPlanning, make_planning
from .static_tables import DirectPlan
from .together import logged, together
from .transfer import download, upload
from .virtual_errors import RECORD_WRITTEN, control_record
from .virtual_launch import CommonArgs
from .virtual_memory import host_view

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime

_OP = "static exchange"


@dataclass(frozen=True)
class StaticDispatched:
    """What a static dispatch gives; see StaticExchange.dispatch.

    tokens_per_expert: int64 [own experts] on the device.
    """

    recv_x: Any
    recv_topk_weights: torch.Tensor | None
    recv_topk_idx: torch.Tensor | None
    tokens_per_expert: torch.Tensor


class StaticExchange:
    """Dispatches and combines with memory and epochs of their own; made by all ranks together.

    Made by Communicator.static_exchange. Each call is enqueued into the current stream and returns
    at once: no count comes to the host. So both may be captured into a CUDA or HIP graph, with any
    replays, and with eager calls of the communicator in between. A combine belongs to the dispatch
    before it. All ranks make the same calls, captured or not, in the same order, and the calls and
    replays of one exchange follow one another in stream order, whatever streams they are in; its
    memory is used by the next call.

    Where errors appear: what the host can see of its arguments, at once, on this rank alone. A bad
    index, and more rows than there is room for (duplicates of an expert in a token's choices): the
    call moves nothing on any rank, outputs hold anything, and the next call or check() of every
    rank raises ValueError. Deadlines as the communicator's, which they break.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        turns: Turns,
        shape: StaticShape,
        topology: Topology,
        chunk_bytes: int,
    ) -> None:
        self.shape = shape
        self._runtime = runtime
        self._turns = turns
        self._topology = topology
        self._rank = runtime.rank
        self._info = shape.info(runtime.rank, topology, 0)
        self.serial = 0  # of the last dispatch
        self._recv_idx: torch.Tensor | None = None
        self._num_tokens: int | None = None  # of the last dispatch
        self._closed = False
        self._recorded = False
        driver, group = runtime.driver, runtime.group
        direct = DirectPlan(shape, topology, chunk_bytes) if shape.planner == "device" else None
        needs = StaticHeap.of(shape, topology, direct)
        with ExitStack() as made:
            self.heap = SymmetricHeap(driver, group, needs.num_slots, 8, needs.data_bytes)
            made.callback(lambda: runtime.freed(self.heap.close()))

            def allocate() -> None:
                self._status = driver.allocate_host(CONTROL.itemsize + OUTCOME_BYTES)
                made.callback(driver.free_host, self._status)
                host_view(self._status, CONTROL.itemsize + OUTCOME_BYTES)[:] = 0
                self._event = driver.create_event()
                made.callback(driver.destroy_event, self._event)
                self._planning: list[HostPlanning] = []
                if direct is None:
                    planning = make_planning(driver, shape, topology, self._rank, chunk_bytes)
                    made.callback(planning.close)
                    self._planning.append(planning)
                self._memory = self._make_memory(needs, direct)
                made.callback(self._memory.close)

            together(group, "memory of a static exchange", allocate)
            self._launches = StaticLaunches(
                driver,
                runtime.kernels,
                shape,
                topology,
                [self._rank],
                self._memory,
                runtime.num_blocks,
                runtime.num_lanes,
                self._planning,
            )
            made.callback(self._drain)
            self._owned = made.pop_all()

    def _make_memory(self, needs: StaticHeap, direct: DirectPlan | None) -> StaticMemory:
        runtime = self._runtime
        common = CommonArgs(
            controls=self.heap.controls_table,
            flags=self.heap.flags_table,
            data=self.heap.data_table,
            progress_ns=runtime.progress_ns,
            num_blocks=runtime.num_blocks,
            traces=[],
            trace_capacity=0,
        )
        layouts = [planning.planner.layout for planning in self._planning]
        memory = StaticMemory(
            runtime.driver,
            self.shape,
            self._topology,
            [self._rank],
            common,
            needs,
            runtime.entry_ns,
            direct,
            layouts,
        )
        for at, planning in zip(memory.rank, self._planning, strict=False):  # none, or all
            upload(runtime.driver, at["planned"], planning.first())
        return memory

    @property
    def device(self) -> torch.device:
        """Where the tensors of calls are."""
        return self._runtime.device

    @property
    def num_recv_rows(self) -> int:
        """Rows of this rank's outputs: the worst case."""
        return self._info.num_recv_rows

    # -- calls -------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
    ) -> StaticDispatched:
        """Send each token to the ranks of its experts, as Communicator.dispatch does.

        x: [T, ...], or as many tensors as the exchange was made for; T up to
        num_max_tokens_per_rank, any on each rank. topk_idx: [T, K]; -1 for no choice. topk_weights:
        [T, K].

        Returns tensors of the worst case of rows. Layout "expert": as Communicator.dispatch, expert
        after expert, tokens_per_expert rows each, padded to the alignment. Layout "rank": the rows
        of source rank s from row s * num_max_tokens_per_rank on (planner "host": one source after
        the other). Rows in which nothing was received have weight 0, index -1, and zeros where
        zero_padding asks for them. They may be used in stream order.

        Raises TypeError or ValueError for bad arguments, on this rank; and what went wrong in
        earlier calls, as far as it is known.
        """
        one = isinstance(x, torch.Tensor)
        xs: list[Any] = [x] if one else list(x)
        call = prepare_dispatch(
            xs,
            topk_idx,
            topk_weights,
            self.shape.options,
            None,
            None,
            None,
            self._topology.num_ranks,
            self._runtime.device,
        )
        self.shape.check_dispatch(call)
        if self._differentiated([*xs, topk_weights]):
            made = differentiable_dispatch(self, call, xs, topk_weights)
        else:
            made = self.run_dispatch(call)
        *rest, tokens = made
        recv, rest = rest[: len(xs)], rest[len(xs) :]
        weights = None if topk_weights is None else rest.pop(0)
        idx = rest.pop() if rest else None
        return StaticDispatched(recv[0] if one else recv, weights, idx, tokens)

    def run_dispatch(self, call: DispatchCall) -> list[torch.Tensor]:
        """A dispatch that has been checked: payloads, weights and indices if any, token counts."""
        return self._turns.call(lambda: self._dispatch(call))

    def _dispatch(self, call: DispatchCall) -> list[torch.Tensor]:
        stream = self._begin()
        self.serial += 1
        shape, rows = self.shape, self._info.num_recv_rows
        recv = [x.new_empty((rows, *x.shape[1:])) for x in call.xs]
        weights, idx = None, None
        if call.weights is not None:
            tail = (shape.topk,) if shape.options.layout == "rank" else ()
            weights = call.weights.new_empty((rows, *tail))
            self._fill(weights, 0, stream)
        if shape.options.layout == "rank":
            idx = call.xs[0].new_empty((rows, shape.topk), dtype=torch.int64)
            self._fill(idx, 0xFF, stream)
        if shape.gradients:  # rows that a backward looks for among all
            at, num_bytes = self._memory.window_slots(0)
            self._runtime.driver.fill(at, 0xFF, num_bytes, stream)
        moe, form = MoeRecord(), call.format
        for x, target, size, offset in zip(
            call.xs, recv, form.part_bytes, form.offsets, strict=True
        ):
            if shape.options.zero_padding:
                self._fill(target, 0, stream)
            moe.add_part(x.data_ptr(), target.data_ptr(), size, offset)
        moe.set_dispatch(
            handle=self._memory.rank[0]["handle"],
            header_offset=form.header_offset,
            record=True,
            weights_input=0 if call.weights is None else call.weights.data_ptr(),
            weights_output=0 if weights is None else weights.data_ptr(),
            weights_offset=form.weights_offset,
            weight_bytes=form.weight_bytes,
            index_output=0 if idx is None else idx.data_ptr(),
        )
        assert call.topk_idx is not None
        route = self._launches.route_args(0, call, call.topk_idx.data_ptr())
        self._launches.dispatch(stream, [route], moe.record)
        tokens = call.topk_idx.new_empty(self._info.num_own_experts, dtype=torch.int64)
        counted = self._launches.tokens_per_expert(0)
        self._runtime.driver.copy(tokens.data_ptr(), counted, 8 * tokens.numel(), stream)
        self._num_tokens = call.num_tokens
        self._recv_idx = idx
        made = [t for t in (*recv, weights, idx, tokens) if t is not None]
        used = [t for t in (*call.xs, call.topk_idx, call.weights) if t is not None]
        self._end(stream, [*used, *made])
        return made

    def combine(
        self,
        expert_out: torch.Tensor,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring expert outputs back to the tokens of the last dispatch, summed: [T, ...].

        expert_out: [num_recv_rows, ...], with the rows of recv_x. weights, bias, out: as of
        Communicator.combine, which gives the same sums, bit by bit.
        """
        if self._num_tokens is None:
            raise ValueError("combine: there was no dispatch before")
        self.shape.check_combine(expert_out)
        info = self.shape.info(self._rank, self._topology, self._num_tokens)
        call = prepare_combine(
            expert_out,
            info,
            torch.empty(0, dtype=torch.int64),
            weights,
            bias,
            self.shape.wire_dtype,
            out,
            self._runtime.device,
        )
        if self._differentiated([expert_out, weights, bias]):
            if out is not None:
                raise ValueError("combine: out cannot be given where gradients are wanted")
            return differentiable_combine(self, call, expert_out, weights, bias)
        return self.run_combine(call)

    def run_combine(self, call: CombineCall, reverse: Reverse | None = None) -> torch.Tensor:
        """A combine that has been checked: of expert outputs, or of a backward's gradients."""
        return self._turns.call(lambda: self._combine(call, reverse))

    def _combine(self, call: CombineCall, reverse: Reverse | None) -> torch.Tensor:
        stream = self._begin()
        assert self._num_tokens is not None
        read = [call.expert_out, call.weights, call.bias]
        result = with_target(call.out, self._num_tokens, call.expert_out, read)
        moe = MoeRecord()
        value, wire, bias_kind = call.kinds
        moe.set_combine(
            handle=self._memory.rank[0]["handle"],
            expert_out=call.expert_out.data_ptr(),
            row_weights=0 if call.weights is None else call.weights.data_ptr(),
            bias=0 if call.bias is None else call.bias.data_ptr(),
            result=result.data_ptr(),
            width=call.width,
            bias_stride=call.bias_stride,
            value_kind=value,
            wire_kind=wire,
            bias_kind=bias_kind,
        )
        doubles = call.expert_out.dtype == torch.float64
        if reverse is None:
            self._launches.combine(stream, doubles, moe.record)
        else:
            self._launches.reverse(reverse, stream, doubles, moe.record)
        self._end(stream, [t for t in (*read, result) if t is not None])
        if call.out is not None and call.out is not result:
            call.out.copy_(result)
        return result if call.out is None else call.out

    def run_again(self, x: torch.Tensor, reverse: Reverse) -> torch.Tensor:
        """Rows of the last dispatch's tokens to where they went; zeros where nothing is received.

        x: [T, ...] contiguous. In the rank layout each token's row once.
        """
        return self._turns.call(lambda: self._again(x, reverse))

    def _again(self, x: torch.Tensor, reverse: Reverse) -> torch.Tensor:
        stream, form = self._begin(), self.shape.again
        target = x.new_empty((self.num_recv_rows, *x.shape[1:]))
        self._fill(target, 0, stream)
        moe = MoeRecord()
        moe.add_part(x.data_ptr(), target.data_ptr(), form.part_bytes[0], 0)
        moe.set_dispatch(
            handle=self._memory.rank[0]["handle"],
            header_offset=form.header_offset,
            record=False,
            weights_offset=form.weights_offset,
        )
        self._launches.reverse(reverse, stream, False, moe.record)
        self._end(stream, [x, target])
        return target

    # -- rows of the last dispatch, for gradients --------------------------------------------------

    def missing_rows(self) -> torch.Tensor:
        """bool [num_recv_rows]: nothing was received there."""
        if self._recv_idx is not None:
            return (self._recv_idx < 0).all(1)
        return self._slot_choices() < 0

    def by_choice(self, values: torch.Tensor) -> torch.Tensor:
        """[num_recv_rows, K]: a row's value in the column of the choice that it stands for.

        values: [num_recv_rows]; rank layout: [num_recv_rows, K], kept where there is a choice.
        """
        if self._recv_idx is not None:
            return torch.where(self._recv_idx >= 0, values, 0)
        columns = torch.arange(self.shape.topk, device=values.device)
        choice = self._slot_choices().unsqueeze(1)
        return torch.where(choice == columns, values.unsqueeze(1), 0)

    def _slot_choices(self) -> torch.Tensor:
        """int64 [num_recv_rows]: which of its token's choices a row is; -1: none. Expert layout."""
        rows, topk = self.num_recv_rows, self.shape.topk
        slots = self._window_slots().to(torch.int64)
        choices = torch.arange(topk, device=slots.device).repeat(len(slots) // topk)
        made = torch.full((rows + 1,), -1, dtype=torch.int64, device=slots.device)
        # Those that are not there, -1 as signed numbers, go to the row past the end.
        return made.scatter_(0, torch.where(slots < 0, rows, slots), choices)[:rows]

    def _window_slots(self) -> torch.Tensor:
        """int32 [window rows * K], a copy of the handle's."""
        at, num_bytes = self._memory.window_slots(0)
        made = torch.empty(num_bytes // 4, dtype=torch.int32, device=self._runtime.device)
        stream = self._runtime.streams.current()
        self._runtime.driver.copy(made.data_ptr(), at, num_bytes, stream)
        self._runtime.streams.settle(made)
        return made

    def _differentiated(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        if not torch.is_grad_enabled() or not any(
            t is not None and t.requires_grad for t in tensors
        ):
            return False
        if not self.shape.gradients:
            raise RuntimeError(
                "this static exchange was made without gradients=True: call it under "
                "torch.no_grad()"
            )
        return True

    def _fill(self, tensor: torch.Tensor, value: int, stream: int) -> None:
        """Every byte, in stream order."""
        size = tensor.numel() * tensor.element_size()
        self._runtime.driver.fill(tensor.data_ptr(), value, size, stream)

    def _begin(self) -> int:
        """The stream of a call."""
        if self._closed:
            raise ClosedError("the static exchange is closed")
        streams = self._runtime.streams
        stream = streams.current()
        if not streams.capturing():
            self.check()
            if self._recorded:
                self._runtime.driver.wait_event(stream, self._event)
        return stream

    def _end(self, stream: int, used: Sequence[torch.Tensor]) -> None:
        """What follows the kernels: how they ended, for whoever looks."""
        runtime, driver = self._runtime, self._runtime.driver
        control = self.heap.control_address(self._rank)
        driver.copy(self._status, control, CONTROL.itemsize, stream)
        outcome = self._memory.rank[0]["outcome"]
        driver.copy(self._status + CONTROL.itemsize, outcome, OUTCOME_BYTES, stream)
        if runtime.streams.capturing():
            return
        driver.record(self._event, stream)
        self._recorded = True
        if runtime.streams.settle(*used):
            self.check()

    # -- failures ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what went wrong in calls and replays, as far as they have ended; never waits.

        Of what moved nothing once; what broke the communicator each time.
        """
        runtime = self._runtime
        runtime.check()
        raw = host_view(self._status + CONTROL.itemsize, OUTCOME_BYTES)
        error: Exception | None = outcome_error(raw.view(np.uint64).copy(), self.shape)
        if error is not None:
            outcome = self._memory.rank[0]["outcome"]
            runtime.driver.fill(outcome, 0, OUTCOME_BYTES, runtime.streams.current())
            raw[:] = 0
            raise error
        for planning in self._planning:
            planning.check()

    def look(self) -> FastkernError | None:
        """What made a kernel give up, as far as the host's memory says."""
        if self._closed:
            return None
        word = int(control_record(host_view(self._status, CONTROL.itemsize))["abort"])
        if not word:
            return None
        record = self.record()
        if record is not None:
            return DeadlineError(str(record), record)
        return DeadlineError(
            f"{_OP}: rank {abort_origin(word)} gave up waiting for other ranks, or left the call"
        )

    def record(self) -> WaitRecord | None:
        """What the kernel that gave up has left, as the device's memory says."""
        word = int(self._control_of(self._rank)["abort"])
        if not word:
            return None
        origin = abort_origin(word)
        fields = self._control_of(origin)["record"]
        if int(fields["state"]) != RECORD_WRITTEN:
            return None
        return wait_record(_OP, abort_epoch(word), origin, fields)

    def _control_of(self, rank: int) -> Any:
        address = self.heap.control_address(rank)
        raw = download(self._runtime.driver, address, CONTROL.itemsize)
        return control_record(np.frombuffer(raw, dtype=np.uint8))

    # -- end ---------------------------------------------------------------------------------------

    def _drain(self) -> None:
        if self._recorded:
            self._runtime.driver.wait_for(self._event)

    def close(self) -> None:
        """Give its memory back, once its calls have ended. Not collective; may be repeated.

        No graph that captured its calls may be replayed, here or on another rank, from now on.
        """
        if not self._closed:
            self._closed = True
            self._runtime.forget_static(self)
            logged("closing a static exchange", self._owned.close)

    def __enter__(self) -> StaticExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
