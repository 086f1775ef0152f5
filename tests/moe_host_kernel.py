"""The host kernel of dispatch and combine in one process: a thread per rank."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fastkern.heap import fresh_name
from fastkern.kernels import _host
from fastkern.kernels.oracle import DTYPES, Dispatched
from fastkern.moe.counts import RouteCounts, first_rows
from fastkern.moe.handle import HEADER, LAYOUTS, MAGIC
from fastkern.moe.placement import Placement
from fastkern.planner import StageTable
from fastkern.planner.table import flag_slots
from tests.moe_tables import Call, to_numpy

PROGRESS_NS = 20_000_000_000
POISON = 0xAA


def poisoned(*shape: int) -> Any:
    return np.full(shape, POISON, dtype=np.uint8)


class Handle:
    """A handle's memory, filled by the host's route."""

    def __init__(self, call: Call, rank: int, num_units: int = 1) -> None:
        routing, route, table = call.data.routing, call.routes[rank], call.tables[rank]
        servers, m = int(table.header["servers"]), int(table.header["gpus_per_server"])
        self.counts = {
            "pack_list": (len(route.pack_list),),
            "entries": (len(route.pack_list), route.topk, 3),
            "token_map": (route.num_tokens, servers + m),
            "window_slots": (route.window_rows, route.topk),
            "touched": (call.plan.staging_rows_of(rank)[1], m),
            "arrivals": (int(table.header["scratch_rows"]), m, 4),
        }
        placement = Placement(routing.num_experts, call.num_ranks, routing.expert_to_rank)
        header: Any = np.zeros(1, dtype=HEADER)
        header["magic"] = MAGIC
        header["num_tokens"] = route.num_tokens
        header["pack_rows"] = len(route.pack_list)
        header["window_rows"] = route.window_rows
        header["receive_rows"] = self.counts["touched"][0]
        header["num_recv_rows"] = len(route.filled)
        header["rank"] = rank
        header["num_ranks"] = call.num_ranks
        header["servers"] = servers
        header["gpus_per_server"] = m
        header["topk"] = route.topk
        header["num_experts"] = routing.num_experts
        header["num_own_experts"] = placement.num_owned[rank]
        header["layout"] = LAYOUTS.index(route.layout)
        header["num_arrivals"] = self.counts["arrivals"][0]
        self.offsets = _host.handle_layout(header.view(np.uint8))
        self.memory = poisoned(int(self.offsets["bytes"]) + 8)
        self.memory = self.memory[-self.memory.ctypes.data % 8 :][: int(self.offsets["bytes"])]
        self.memory[: HEADER.itemsize] = header.view(np.uint8)
        self._route(call, rank, placement, num_units)

    def _route(self, call: Call, rank: int, placement: Placement, num_units: int) -> None:
        idx = np.ascontiguousarray(to_numpy(call.data.routing.topk_idx[rank]), dtype=np.int64)
        route = call.routes[rank]
        made = _host.HostRoute(
            topk_idx=idx.ctypes.data,
            idx_bytes=8,
            num_tokens=route.num_tokens,
            topk=route.topk,
            owner=placement.owner.tolist(),
            local_index=placement.local_index.tolist(),
            servers=len(route.to_server),
            gpus_per_server=len(route.to_rank) // len(route.to_server),
            rank=rank,
            num_units=num_units,
        )
        assert made.bad >= idx.size
        routing, experts = call.data.routing, call.data.routing.num_experts
        copies = [np.bincount(i[i >= 0].numpy(), minlength=experts) for i in routing.topk_idx]
        counts = RouteCounts(
            np.stack(copies),
            np.stack([r.to_server for r in call.routes]),
            np.stack([r.to_rank for r in call.routes]),
        )
        assert np.array_equal(made.totals.astype(np.int64), counts.row(rank))
        first = first_rows(
            counts, placement, rank, len(route.to_server), route.layout, routing.alignment
        )
        made.fill(
            handle=self.address,
            slot=first.slot,
            window=first.window,
            list=first.pack_list,
            returned=first.returned,
            partial=first.partial,
            layout=LAYOUTS.index(route.layout),
        )

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def array(self, name: str) -> Any:
        """One of the arrays, uint32."""
        shape = self.counts[name]
        begin = int(self.offsets[name])
        num_bytes = 4 * int(np.prod(shape))
        return self.memory[begin : begin + num_bytes].view(np.uint32).reshape(shape)

    @property
    def num_partials(self) -> int:
        return int(self.memory[: HEADER.itemsize].view(HEADER)[0]["num_partials"])


class Ranks:
    """All ranks of a call in one process; each launch is a thread per rank."""

    def __init__(self, call: Call, options: _host.LaunchOptions) -> None:
        h = call.tables[0].header
        slots = flag_slots(int(h["servers"]), int(h["gpus_per_server"]), int(h["chunk_slots"]))
        self._control = _segment(call.num_ranks * _host.control_bytes(call.num_ranks, slots, 8))
        self._hosts = [
            _host.HostRank(rank, call.num_ranks, slots, 8, self._control)
            for rank in range(call.num_ranks)
        ]
        self._options, self._epoch = options, 0

    def launch(self, tables: Sequence[StageTable], arguments: Sequence[_host.MoeArgs]) -> None:
        self._epoch += 1
        per_rank = max(256, -(-tables[0].data_layout().bytes // 256) * 256)
        data = _segment(per_rank * len(tables))
        for host in self._hosts:
            host.map_data(data, per_rank)

        def one(rank: int) -> bool:
            ended = self._hosts[rank].launch_moe(
                tables[rank].bytes, arguments[rank], self._epoch, PROGRESS_NS, self._options
            )
            return bool(ended)

        with ThreadPoolExecutor(len(tables)) as pool:
            assert all(pool.map(one, range(len(tables)))), "a rank gave up"


def _segment(num_bytes: int) -> _host.SharedMemory:
    segment = _host.SharedMemory(fresh_name(), num_bytes, create=True)
    segment.unlink()
    return segment


def dispatch(call: Call, ranks: Ranks, handles: Sequence[Handle]) -> list[Dispatched]:
    """By the kernel; num_partials is left to compare with."""
    arguments, outs, keep = [], [], []
    for mine, handle in zip(call.given, handles, strict=True):
        form, route, rows = mine.form, mine.route, len(mine.route.filled)
        made = _host.MoeArgs()
        parts = [poisoned(rows, size) for size in form.part_bytes]
        inputs = [np.ascontiguousarray(part) for part in mine.parts]
        for source, target, offset in zip(inputs, parts, form.offsets, strict=True):
            made.add_part(source.ctypes.data, target.ctypes.data, target.shape[1], offset)
        by_rank = route.layout == "rank"
        weights_in, weights = mine.weights, None
        if weights_in is not None:
            weights_in = np.ascontiguousarray(weights_in)
            weights = poisoned(rows, (route.topk if by_rank else 1) * form.weight_bytes)
            weights = weights.view(weights_in.dtype)
        index = poisoned(rows, 8 * route.topk).view(np.int64) if by_rank else None
        made.set_dispatch(
            handle=handle.address,
            header_offset=form.header_offset,
            record=True,
            weights_input=0 if weights_in is None else weights_in.ctypes.data,
            weights_output=0 if weights is None else weights.ctypes.data,
            weights_offset=form.weights_offset,
            weight_bytes=form.weight_bytes,
            index_output=0 if index is None else index.ctypes.data,
        )
        arguments.append(made)
        keep.append((inputs, weights_in))
        if weights is not None and not by_rank:
            weights = weights[:, 0]
        arrays = [handle.array(name) for name in ("window_slots", "touched", "arrivals")]
        outs.append(Dispatched(parts, weights, index, *arrays, num_partials=0))
    ranks.launch(call.tables, arguments)
    return outs


def combine(call: Call, ranks: Ranks, handles: Sequence[Handle]) -> list[Any]:
    """By the kernel."""
    kinds = list(DTYPES)
    arguments, results, keep = [], [], []
    given = call.combine_given([None] * call.num_ranks)  # type: ignore[list-item]
    for rank, handle in zip(given, handles, strict=True):
        made, width = _host.MoeArgs(), rank.expert_out.shape[1]
        outs = np.ascontiguousarray(rank.expert_out)
        weights, bias = rank.weights, rank.bias
        stride = width * outs.dtype.itemsize if bias is not None and bias.ndim == 2 else 0
        result = poisoned(rank.route.num_tokens, width * outs.dtype.itemsize).view(outs.dtype)
        made.set_combine(
            handle=handle.address,
            expert_out=outs.ctypes.data,
            row_weights=0 if weights is None else weights.ctypes.data,
            bias=0 if bias is None else bias.ctypes.data,
            result=result.ctypes.data,
            width=width,
            bias_stride=stride,
            value_kind=kinds.index(rank.kind),
            wire_kind=kinds.index(rank.wire),
            bias_kind=kinds.index(rank.bias_kind),
        )
        arguments.append(made)
        keep.append((outs, weights, bias))
        results.append(result)
    ranks.launch(call.combine_tables(max(h.num_partials for h in handles)), arguments)
    return results
