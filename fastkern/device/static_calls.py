"""What a call of a static exchange puts into the stream, once its arguments have been checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..moe.combine_arguments import CombineCall
from ..moe.dispatch_arguments import DispatchCall
from ..moe.handle import MetaInfo
from ..moe.static_shape import Reverse, StaticShape
from ..moe.tensor_checks import with_target
from .moe_record import MoeRecord
from .static_received import ReceivedRows
from .static_site import StaticSite

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime


@dataclass(frozen=True)
class DispatchMark:
    """Which dispatch a combine or a backward belongs to.

    exchange: its name. anchor: gives a combine a gradient, or None.
    """

    exchange: str
    serial: int
    num_tokens: int
    anchor: torch.Tensor | None


class StaticCalls:
    """Of one rank, in the current stream. info: what all calls have in common for this rank.

    received: what the last dispatch has received. Nothing here waits, but on the CPU.
    """

    def __init__(
        self, runtime: DeviceRuntime, site: StaticSite, shape: StaticShape, info: MetaInfo
    ) -> None:
        self.received = ReceivedRows(runtime, site, shape, info.num_recv_rows)
        self._runtime = runtime
        self._site = site
        self._shape = shape
        self._info = info
        self._serial = 0

    def dispatch(self, call: DispatchCall) -> tuple[list[torch.Tensor], DispatchMark]:
        """Payloads, weights and indices if any, token counts; and which dispatch it is."""
        stream = self._site.begin()
        self._serial += 1
        shape, rows = self._shape, self._info.num_recv_rows
        recv = [x.new_empty((rows, *x.shape[1:])) for x in call.xs]
        weights, idx = None, None
        if call.weights is not None:
            tail = (shape.topk,) if shape.options.layout == "rank" else ()
            weights = call.weights.new_empty((rows, *tail))
            self._site.fill(weights, 0, stream)
        if shape.options.layout == "rank":
            idx = call.xs[0].new_empty((rows, shape.topk), dtype=torch.int64)
            self._site.fill(idx, 0xFF, stream)
        if shape.gradients:
            self.received.forget(stream)
        moe, form = MoeRecord(), call.format
        for x, target, size, offset in zip(
            call.xs, recv, form.part_bytes, form.offsets, strict=True
        ):
            if shape.options.zero_padding:
                self._site.fill(target, 0, stream)
            moe.add_part(x.data_ptr(), target.data_ptr(), size, offset)
        moe.set_dispatch(
            handle=self._site.memory.rank[0]["handle"],
            header_offset=form.header_offset,
            record=True,
            weights_input=0 if call.weights is None else call.weights.data_ptr(),
            weights_output=0 if weights is None else weights.data_ptr(),
            weights_offset=form.weights_offset,
            weight_bytes=form.weight_bytes,
            index_output=0 if idx is None else idx.data_ptr(),
        )
        moe.record["serial"] = self._serial
        assert call.topk_idx is not None
        route = self._site.launches.route_args(0, call, call.topk_idx.data_ptr())
        self._site.launches.dispatch(stream, [route], moe.record)
        tokens = call.topk_idx.new_empty(self._info.num_own_experts, dtype=torch.int64)
        counted = self._site.launches.tokens_per_expert(0)
        self._runtime.driver.copy(tokens.data_ptr(), counted, 8 * tokens.numel(), stream)
        self.received.idx = idx
        made = [t for t in (*recv, weights, idx, tokens) if t is not None]
        used = [t for t in (*call.xs, call.topk_idx, call.weights) if t is not None]
        self._end(stream, [*used, *made])
        return made, DispatchMark(self._site.name, self._serial, call.num_tokens, None)

    def combine(
        self, call: CombineCall, mark: DispatchMark, reverse: Reverse | None
    ) -> torch.Tensor:
        """Of expert outputs, or of a backward's gradients: [T, ...]."""
        stream = self._site.begin()
        read = [call.expert_out, call.weights, call.bias]
        result = with_target(call.out, mark.num_tokens, call.expert_out, read)
        self._site.fill(result, 0, stream)  # what stays of a call that moves nothing
        moe = MoeRecord()
        value, wire, bias_kind = call.kinds
        moe.set_combine(
            handle=self._site.memory.rank[0]["handle"],
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
        moe.record["serial"], moe.record["result_rows"] = mark.serial, mark.num_tokens
        doubles = call.expert_out.dtype == torch.float64
        if reverse is None:
            self._site.launches.combine(stream, doubles, moe.record)
        else:
            self._site.launches.reverse(reverse, stream, doubles, moe.record)
        self._end(stream, [t for t in (*read, result) if t is not None])
        if call.out is not None and call.out is not result:
            call.out.copy_(result)
        return result if call.out is None else call.out

    def again(self, x: torch.Tensor, mark: DispatchMark, reverse: Reverse) -> torch.Tensor:
        """Rows x [T, ...] of the last dispatch's tokens to where they went; zeros elsewhere."""
        stream, form = self._site.begin(), self._shape.again
        target = x.new_empty((self._info.num_recv_rows, *x.shape[1:]))
        self._site.fill(target, 0, stream)
        moe = MoeRecord()
        moe.add_part(x.data_ptr(), target.data_ptr(), form.part_bytes[0], 0)
        moe.set_dispatch(
            handle=self._site.memory.rank[0]["handle"],
            header_offset=form.header_offset,
            record=False,
            weights_offset=form.weights_offset,
        )
        moe.record["serial"] = mark.serial
        self._site.launches.reverse(reverse, stream, False, moe.record)
        self._end(stream, [x, target])
        return target

    def _end(self, stream: int, used: Sequence[torch.Tensor]) -> None:
        """A call has been enqueued, with these tensors."""
        self._site.end(stream)
        if self._runtime.streams.settle(*used):
            self._runtime.check()
