"""Dispatch and combine on a device: route and handles there, counts and header on the host."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..moe.device_blocks import keeping
from ..moe.dispatch_arguments import DispatchCall
from ..moe.handle import LAYOUTS, block_of, header_of, raw_bytes
from ..moe.make_handle import HandleForm
from ..moe.placement import Placement
from ..planner import Topology
from .device_runtime import DeviceRuntime
from .moe_record import MoeRecord
from .route_records import base_rows, launch_route, num_keys, num_units, route_record

_PLACEMENTS_KEPT = 16


class DeviceRoute:
    """Route of this rank's tokens. totals: uint64 [E + N + R]. bad: see Route.

    The host waits for both. placement: owner and local_index of the experts, on the device.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        topology: Topology,
        call: DispatchCall,
        placement: Placement,
        maps: torch.Tensor,
    ) -> None:
        idx = call.topk_idx
        assert idx is not None
        self._runtime = runtime
        self._units = num_units(call.num_tokens, runtime.driver.kernels)
        keys, experts = num_keys(placement, topology), placement.num_experts
        counted = self._units * keys
        # counts [units][keys] | totals [keys] | bad [units + 1]
        self._words = idx.new_empty(counted + keys + self._units + 1, dtype=torch.int64)
        self._maps, self._idx = maps, idx
        first = self._words.data_ptr()
        self._args = route_record(
            call,
            placement,
            topology,
            runtime.rank,
            self._units,
            topk_idx=idx.data_ptr(),
            owner=maps.data_ptr(),
            local_index=maps.data_ptr() + 4 * experts,
            counts=first,
            totals=first + 8 * counted,
            bad=first + 8 * (counted + keys),
        )
        self._launch("fastkern_route_count", self._units)
        self._launch("fastkern_route_scan", keys)
        found = runtime.streams.download(self._words[counted:]).view(np.uint64)
        self.totals: npt.NDArray[np.uint64] = found[:keys]
        self.bad = int(found[-1])

    def fill(self, form: HandleForm, layout: str) -> torch.Tensor:
        """The metadata of a new handle, which has been filled in stream order."""
        block = self._idx.new_empty(form.num_bytes, dtype=torch.uint8)
        key = int(form.header["communicator"][0]), int(form.header["serial"][0])
        meta = keeping(key, form.num_bytes // 8, block)
        form.write_start(meta)
        start = form.num_start_bytes
        bases = base_rows(form.first)
        at = -(-start // 8) * 8
        content = np.zeros(at + sum(rows.nbytes for _, rows in bases), dtype=np.uint8)
        content[:start] = raw_bytes(meta)[:start]
        places = {}
        for name, rows in bases:
            content[at : at + rows.nbytes] = rows.view(np.uint8)
            places[name] = at
            at += rows.nbytes
        header_of(meta)["num_partials"] = form.most_partials
        uploaded = self._runtime.streams.upload(content)
        block[:start].copy_(uploaded[:start])
        for name, place in places.items():
            self._args[name] = uploaded.data_ptr() + place
        self._args["handle"] = block.data_ptr()
        self._args["layout"] = LAYOUTS.index(layout)
        self._launch("fastkern_route_fill", self._units)
        self._runtime.streams.settle(self._words, self._maps, self._idx, uploaded, block)
        return meta

    def _launch(self, kernel: str, num_items: int) -> None:
        runtime = self._runtime
        launch_route(
            runtime.driver,
            runtime.kernels,
            kernel,
            self._args,
            num_items,
            runtime.streams.current(),
        )


class DeviceMoe:
    """See MoeBackend."""

    def __init__(self, runtime: DeviceRuntime, topology: Topology) -> None:
        self.device = runtime.device
        self._runtime = runtime
        self._topology = topology
        self._maps: OrderedDict[tuple[int, bytes], torch.Tensor] = OrderedDict()

    def route(self, call: DispatchCall, placement: Placement) -> DeviceRoute:
        """Count this rank's tokens on the device; waits for the counts."""
        maps = self._maps_of(placement)
        return DeviceRoute(self._runtime, self._topology, call, placement, maps)

    def new_handle(self, call: DispatchCall, form: HandleForm, route: Any) -> torch.Tensor:
        """The metadata of a dispatch; its memory on the device is filled in stream order.

        How many partial rows a proxy gives out is counted by the kernel, and not waited for: the
        header on the host holds the most that there can be on any rank.
        """
        assert call.options is not None
        filled: DeviceRoute = route
        return filled.fill(form, call.options.layout)

    def check_handle(self, meta: torch.Tensor) -> None:
        """Raise ValueError where the memory on the device is gone."""
        if block_of(meta) is None:
            raise ValueError(
                "handle: its memory on the device is gone: this is a copy of the metadata, and the "
                "tensor that the dispatch returned no longer exists"
            )

    def handle_address(self, meta: torch.Tensor) -> int:
        """Where the kernels find the handle; it is used in the current stream."""
        block = block_of(meta)
        assert block is not None
        self._runtime.streams.use(block)
        return block.data_ptr()

    def arguments(self) -> MoeRecord:
        """New arguments of a launch."""
        return MoeRecord()

    def _maps_of(self, placement: Placement) -> torch.Tensor:
        """uint8: owner [E] and local_index [E], uint32, on the device."""
        key = placement.num_experts, placement.owner.tobytes()
        found = self._maps.get(key)
        if found is None:
            both = np.concatenate([placement.owner, placement.local_index]).astype(np.uint32)
            found = self._maps[key] = self._runtime.streams.upload(both.view(np.uint8))
            self._runtime.streams.wait()  # later calls may be in other streams
            if len(self._maps) > _PLACEMENTS_KEPT:
                self._maps.popitem(last=False)
        return found
