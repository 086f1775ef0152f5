"""Device memory of a static exchange besides its heap: one piece for all ranks that are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..moe.buffers import WorstCase
from ..moe.counts import first_rows
from ..moe.handle import HEADER
from ..moe.make_handle import HandleOrigin, new_header
from ..moe.static_shape import StaticShape
from ..planner import Topology
from ..planner.api import DEFAULT_CHUNK_SLOTS
from ..planner.table import flag_slots
from .driver import Driver
from .records import KERNEL_ARGS, MOE_ARGS, STATIC_ARGS, STATIC_VALUES, new_record
from .route_records import num_keys, num_units
from .static_tables import DirectPlan, StaticTables, most_counts
from .transfer import upload
from .virtual_launch import CommonArgs

_ALIGNMENT = 256


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class StaticHeap:
    """What a static exchange needs of a heap of its own, equal on all ranks.

    num_slots: flags; those of entry begin at first_slot. data_bytes: staging and window, then, from
    records_at on, the entry records, record_bytes each.
    """

    num_slots: int
    first_slot: int
    records_at: int
    record_bytes: int
    data_bytes: int

    @classmethod
    def of(cls, shape: StaticShape, topology: Topology, direct: DirectPlan | None) -> StaticHeap:
        """direct: the plan, where the device plans."""
        r, n, m = topology.num_ranks, topology.servers, topology.gpus_per_server
        first_slot = flag_slots(n, m, DEFAULT_CHUNK_SLOTS)
        if direct is not None:
            tables = direct.tables(0)
            need = tables.dispatch.data_layout().bytes
            if tables.combine is not None:
                need = max(need, tables.combine.data_layout().bytes)
        else:
            worst = WorstCase(topology, shape.num_max_tokens, shape.topk)
            need = worst.dispatch_bytes(shape.format.row_bytes)
            if shape.expert_dtype is not None:
                sizes = shape.combine_row_bytes, shape.partial_row_bytes
                need = max(need, worst.combine_bytes(*sizes))
        keys = shape.options.num_experts + n + r
        record_bytes = -(-8 * (keys + 1) // 16) * 16
        at = _round_up(need)
        return cls(first_slot + n + r, first_slot, at, record_bytes, at + 2 * r * record_bytes)


class StaticRank:
    """Addresses of what one rank has there, by name; see StaticMemory."""

    def __init__(self, base: int, places: dict[str, int]) -> None:
        self._base = base
        self._places = places

    def __getitem__(self, name: str) -> int:
        return self._base + self._places[name]


class StaticMemory:
    """Records, tables, handles and counts of the `ranks` that are here.

    common: of launches on the heap's addresses. direct: the plan, where the device plans.
    planned: per rank, offsets in what the host's planner writes, where it plans.

    static_args, dispatch_args, combine_args: addresses of arrays with a record for each rank;
    combine_static_args: of what hands a combine its MoeArgs. rank: per rank its places. headers: of
    the handles, HEADER. Raises DriverError; then nothing is left allocated.
    """

    def __init__(
        self,
        driver: Driver,
        shape: StaticShape,
        topology: Topology,
        ranks: Sequence[int],
        common: CommonArgs,
        heap: StaticHeap,
        entry_ns: int,
        direct: DirectPlan | None,
        planned: Sequence[Mapping[str, int]] = (),
    ) -> None:
        self._shape = shape
        self._topology = topology
        self._common = common
        self._heap = heap
        self._entry_ns = entry_ns
        self._planned = planned
        self._placement = shape.placement(topology.num_ranks)
        self.num_keys = num_keys(self._placement, topology)
        self.headers = {rank: self._header(rank) for rank in ranks}
        tables = {rank: direct.tables(rank) for rank in ranks} if direct is not None else {}
        at, offsets = 0, {}
        for name, size in (
            ("static_args", STATIC_ARGS.itemsize),
            ("combine_static_args", STATIC_ARGS.itemsize),
            ("dispatch_args", KERNEL_ARGS.itemsize),
            ("combine_args", KERNEL_ARGS.itemsize),
        ):
            offsets[name] = at
            at += _round_up(size * len(ranks))
        places: list[dict[str, int]] = []
        for rank in ranks:
            mine: dict[str, int] = {}
            planned_bytes = planned[len(places)]["bytes"] if planned else 0
            for name, size in self._sizes(rank, tables.get(rank), planned_bytes).items():
                mine[name] = at
                at += _round_up(size)
            places.append(mine)
        with ExitStack() as made:
            self._base = driver.allocate(at, coherent=False)
            made.callback(driver.free, self._base)
            self.rank = [StaticRank(self._base, mine) for mine in places]
            self.static_args = self._base + offsets["static_args"]
            self.combine_static_args = self._base + offsets["combine_static_args"]
            self.dispatch_args = self._base + offsets["dispatch_args"]
            self.combine_args = self._base + offsets["combine_args"]
            content = np.zeros(at, dtype=np.uint8)

            def put(address: int, what: npt.NDArray[Any]) -> None:
                raw = np.ascontiguousarray(what).reshape(-1).view(np.uint8)
                content[address - self._base :][: len(raw)] = raw

            for k, rank in enumerate(ranks):
                mine_at = self.rank[k]
                step = k * STATIC_ARGS.itemsize
                put(self.static_args + step, self._static_args(k, tables, rank))
                moe_only = new_record(STATIC_ARGS, moe=mine_at["combine_moe"])
                put(self.combine_static_args + step, moe_only)
                for op in ("dispatch", "combine"):
                    array = self.dispatch_args if op == "dispatch" else self.combine_args
                    put(array + k * KERNEL_ARGS.itemsize, self._kernel_args(k, rank, op, tables))
                for name, what in self._contents(rank, tables.get(rank)).items():
                    put(mine_at[name], what)
            upload(driver, self._base, content.tobytes())
            self._owned = made.pop_all()

    def close(self) -> None:
        """Free it; no kernel may use it. A second call does nothing."""
        self._owned.close()

    # -- what is there -----------------------------------------------------------------------------

    def _header(self, rank: int) -> Any:
        """Of the handle, which has room for any call."""
        shape, t = self._shape, self._topology
        most, others = shape.num_max_tokens, t.servers - 1
        return new_header(
            HandleOrigin(0, 0, rank, t),
            shape.options,
            int(self._placement.num_owned[rank]),
            topk=shape.topk,
            plan_row_bytes=shape.format.row_bytes,
            num_tokens=most,
            pack_rows=most * (t.gpus_per_server + others),
            window_rows=most * t.num_ranks,
            receive_rows=most * others,
            num_recv_rows=shape.most_rows(t.num_ranks)[rank],
        )

    def _sizes(self, rank: int, tables: StaticTables | None, planned_bytes: int) -> dict[str, int]:
        """Bytes of each of a rank's places."""
        r, experts = self._topology.num_ranks, self._shape.options.num_experts
        units = num_units(self._shape.num_max_tokens)
        sizes = {
            "values": STATIC_VALUES.itemsize,
            "dispatch_moe": MOE_ARGS.itemsize,
            "combine_moe": MOE_ARGS.itemsize,
            "owner": 4 * experts,
            "local_index": 4 * experts,
            "unit_counts": 8 * units * self.num_keys,
            "totals": 8 * self.num_keys,
            "bad": 8 * (units + 1),
            "entries": 8,
            "outcome": 24,
            "handle": int(self.headers[rank]["handle_bytes"][0]),
        }
        if tables is None:
            return sizes | {"counts": 8 * (r * self.num_keys + 1), "planned": planned_bytes}
        return sizes | {
            "expert_order": 4 * experts,
            "most_rows": 8 * r,
            "expert_rows": 8 * experts,
            "slot_base": 8 * experts,
            "tokens_per_expert": 8 * max(1, int(self._placement.num_owned[rank])),
            "window_base": 8 * r,
            "list_base": 8 * r,
            "return_base": 8 * self._topology.servers,
            "partial_base": 8 * self._topology.gpus_per_server,
            "tables": tables.num_bytes,
            "patches": tables.patches.nbytes,
        }

    def _contents(self, rank: int, tables: StaticTables | None) -> dict[str, npt.NDArray[Any]]:
        """What lies there at first; zeros elsewhere."""
        place = self._placement
        contents: dict[str, npt.NDArray[Any]] = {
            "owner": place.owner.astype(np.uint32),
            "local_index": place.local_index.astype(np.uint32),
            "handle": self.headers[rank].view(np.uint8)[: HEADER.itemsize],
        }
        if tables is None:
            return contents
        shape, t = self._shape, self._topology
        first = first_rows(
            most_counts(shape, t),
            place,
            rank,
            t.servers,
            shape.options.layout,
            shape.options.expert_alignment,
        )
        both = np.zeros(tables.num_bytes, dtype=np.uint8)
        both[: len(tables.dispatch.bytes)] = tables.dispatch.bytes
        if tables.combine is not None:
            both[tables.combine_at :] = tables.combine.bytes
        return contents | {
            "expert_order": np.lexsort((place.local_index, place.owner)).astype(np.uint32),
            "most_rows": np.array(shape.most_rows(t.num_ranks), dtype=np.uint64),
            "window_base": first.window,
            "list_base": first.pack_list,
            "return_base": first.returned,
            "partial_base": first.partial,
            "tables": both,
            "patches": tables.patches,
        }

    def _static_args(self, k: int, tables: dict[int, StaticTables], rank: int) -> Any:
        at, heap = self.rank[k], self._heap
        record = new_record(
            STATIC_ARGS,
            values=at["values"],
            moe=at["dispatch_moe"],
            call=self.dispatch_args + k * KERNEL_ARGS.itemsize,
            records=heap.records_at,
            record_bytes=heap.record_bytes,
            entries=at["entries"],
            outcome=at["outcome"],
            entry_ns=self._entry_ns,
            alignment=self._shape.options.expert_alignment,
            first_slot=heap.first_slot,
        )
        names = ["counts"]
        if rank in tables:
            names = ["expert_order", "most_rows", "expert_rows", "slot_base"]
            names += ["tokens_per_expert", "tables", "patches"]
            record["num_patches"] = len(tables[rank].patches)
        for name in names:
            record[name] = at[name]
        return record

    def _kernel_args(self, k: int, rank: int, op: str, tables: dict[int, StaticTables]) -> Any:
        at, common = self.rank[k], self._common
        table = 0
        if rank in tables:
            table = at["tables"] + (tables[rank].combine_at if op == "combine" else 0)
        elif op == "dispatch" or self._shape.expert_dtype is not None:
            table = at["planned"] + self._planned[k][f"{op}_table"]
        return new_record(
            KERNEL_ARGS,
            table=table,
            controls=common.controls,
            flags=common.flags,
            data=common.data,
            moe=at[f"{op}_moe"],
            progress_ns=common.progress_ns,
            num_blocks=common.num_blocks,
            rank=rank,
        )
