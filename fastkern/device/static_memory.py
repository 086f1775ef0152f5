"""Device memory of a static exchange besides its heap: one piece for all ranks that are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import _host
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
from .static_outcome import OUTCOME_BYTES
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
            need = direct.data_bytes()
        else:
            worst = WorstCase(topology, shape.num_max_tokens, shape.topk)
            need = worst.dispatch_bytes(shape.most_dispatch_bytes)
            if shape.has_combine:
                need = max(need, worst.combine_bytes(*shape.most_combine_bytes))
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
    planned: per rank, offsets in what the host's planner writes, where it plans. entries: a word of
    the calls entered through the heap, if others use it too.

    static_args, kernel_args: addresses of arrays with a record for each rank, by the call's name:
    "dispatch", "combine", and those that backwards make. rank: per rank its places. headers: of the
    handles, HEADER. route_kernels: which ones count and fill: one in C++ where the device plans.
    Raises DriverError; then nothing is left allocated.
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
        entries: int = 0,
    ) -> None:
        self._shape = shape
        self._topology = topology
        self._common = common
        self._heap = heap
        self._entry_ns = entry_ns
        self._planned = planned
        self._entries = entries
        self.route_kernels = driver.kernels if direct is None else "cxx"
        self._placement = shape.placement(topology.num_ranks)
        self.num_keys = num_keys(self._placement, topology)
        self.headers = {rank: self._header(rank) for rank in ranks}
        tables = {rank: direct.tables(rank) for rank in ranks} if direct is not None else {}
        self._ranks, self._tables = list(ranks), tables
        calls = ["dispatch", *(["combine"] if shape.has_combine else [])]
        calls += [reverse.name for reverse in shape.reverses]
        at, records = 0, {}
        for name in calls:
            for kind, size in (("static", STATIC_ARGS.itemsize), ("kernel", KERNEL_ARGS.itemsize)):
                records[name, kind] = at
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
            self.static_args = {n: self._base + records[n, "static"] for n in calls}
            self.kernel_args = {n: self._base + records[n, "kernel"] for n in calls}
            content = np.zeros(at, dtype=np.uint8)

            def put(address: int, what: npt.NDArray[Any]) -> None:
                raw = np.ascontiguousarray(what).reshape(-1).view(np.uint8)
                content[address - self._base :][: len(raw)] = raw

            for k, rank in enumerate(ranks):
                mine_at = self.rank[k]
                for name in calls:
                    fixed = new_record(
                        STATIC_ARGS,
                        moe=mine_at[f"{name} moe"],
                        call=self.kernel_args[name] + k * KERNEL_ARGS.itemsize,
                        outcome=mine_at["outcome"],
                    )
                    if name == "dispatch":
                        fixed = self._static_args(k, tables, rank)
                    put(self.static_args[name] + k * STATIC_ARGS.itemsize, fixed)
                    args = self._kernel_args(k, rank, name)
                    put(self.kernel_args[name] + k * KERNEL_ARGS.itemsize, args)
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
        units = num_units(self._shape.num_max_tokens, self.route_kernels)
        sizes = {
            "values": STATIC_VALUES.itemsize,
            "dispatch moe": MOE_ARGS.itemsize,
            "combine moe": MOE_ARGS.itemsize,
            "owner": 4 * experts,
            "local_index": 4 * experts,
            "unit_counts": 8 * units * self.num_keys,
            "totals": 8 * self.num_keys,
            "bad": 8 * (units + 1),
            "entries": 8,
            "outcome": OUTCOME_BYTES + 16,  # and what the host does not look at
            "handle": int(self.headers[rank]["handle_bytes"][0]),
        }
        for reverse in self._shape.reverses:
            room = self._table_bytes(rank, reverse.op, tables)
            sizes |= {f"{reverse.name} moe": MOE_ARGS.itemsize}
            sizes |= {f"{reverse.name} table": room, f"{reverse.name} sizes": 16}
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
        for reverse in self._shape.reverses:
            words = [reverse.row_bytes, reverse.partial_row_bytes]
            contents[f"{reverse.name} sizes"] = np.array(words, dtype=np.uint64)
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
            moe=at["dispatch moe"],
            call=self.kernel_args["dispatch"] + k * KERNEL_ARGS.itemsize,
            records=heap.records_at,
            record_bytes=heap.record_bytes,
            entries=self._entries or at["entries"],
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

    def window_slots(self, k: int) -> tuple[int, int]:
        """Address and bytes of the part of the k-th rank's handle; see kernels/body/handle.h."""
        layout = _host.handle_layout(self.headers[self._ranks[k]].view(np.uint8))
        begin, end = int(layout["window_slots"]), int(layout["touched"])
        return self.rank[k]["handle"] + begin, end - begin

    def table(self, k: int, op: str) -> tuple[int, int]:
        """Address and bytes of the table of the k-th rank's "dispatch" or "combine"."""
        at, rank = self.rank[k], self._ranks[k]
        tables = self._tables.get(rank)
        size = self._table_bytes(rank, op, tables)
        if tables is None:
            return at["planned"] + self._planned[k][f"{op}_table"], size
        return at["tables"] + (tables.combine_at if op == "combine" else 0), size

    def _table_bytes(self, rank: int, op: str, tables: StaticTables | None) -> int:
        if tables is None:
            return self._planned[self._ranks.index(rank)][f"{op}_room"]
        found = tables.dispatch if op == "dispatch" else tables.combine
        assert found is not None
        return len(found.bytes)

    def _kernel_args(self, k: int, rank: int, name: str) -> Any:
        at, common = self.rank[k], self._common
        known = name in ("dispatch", "combine")
        return new_record(
            KERNEL_ARGS,
            table=self.table(k, name)[0] if known else at[f"{name} table"],
            controls=common.controls,
            flags=common.flags,
            data=common.data,
            moe=at[f"{name} moe"],
            progress_ns=self._progress_ns(name),
            num_blocks=common.num_blocks,
            rank=rank,
        )

    def _progress_ns(self, name: str) -> int:
        """All ranks have entered when a dispatch begins; to other calls one may come late."""
        common = self._common.progress_ns
        return common if name == "dispatch" else max(common, self._entry_ns)
