"""Host planners, the counts that they are given, and what Python makes of the same counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fastkern.kernels._host import HostPlanner
from fastkern.moe.counts import RouteCounts, first_rows
from fastkern.moe.placement import Placement
from fastkern.planner import MoePlan, Topology, plan_moe
from fastkern.planner.api import DEFAULT_CHUNK_BYTES, DEFAULT_CHUNK_SLOTS, DEFAULT_CREDIT_LEAD

Words = npt.NDArray[np.uint64]
LAYOUTS = ("expert", "rank")
SHAPES = ((1, 1), (1, 4), (2, 2), (3, 1), (2, 4), (4, 2), (3, 3))  # servers x ranks
ARRAYS = {
    "slot_base": "slot",
    "window_base": "window",
    "list_base": "pack_list",
    "return_base": "returned",
    "partial_base": "partial",
    "tokens_per_expert": "tokens_per_expert",
}


@dataclass(frozen=True)
class Setup:
    """What is fixed when a dispatch is captured."""

    servers: int
    gpus_per_server: int
    num_experts: int
    topk: int = 4
    num_max_tokens: int = 16
    expert_to_rank: tuple[int, ...] | None = None
    layout: str = "expert"
    alignment: int = 1
    row_bytes: int = 48
    combine_row_bytes: int = 32
    partial_row_bytes: int = 64
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    chunk_slots: int = DEFAULT_CHUNK_SLOTS
    credit_lead: int = DEFAULT_CREDIT_LEAD
    topology: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.servers * self.gpus_per_server

    @property
    def placement(self) -> Placement:
        return Placement(self.num_experts, self.num_ranks, self.expert_to_rank)

    @property
    def machine(self) -> Topology:
        return Topology(self.servers, self.gpus_per_server, **self.topology)

    def fields(self, rank: int) -> dict[str, Any]:
        """Arguments of this rank's planner."""
        machine, placement = self.machine, self.placement
        return {
            "servers": self.servers,
            "gpus_per_server": self.gpus_per_server,
            "scale_up_cost": machine._core.scale_up_cost,
            "scale_out_cost": machine._core.scale_out_cost,
            "alpha_ps": machine._core.alpha_ps,
            "mesh": machine.scale_up == "mesh",
            "cross_rail": machine.cross_rail,
            "chunk_bytes": self.chunk_bytes,
            "chunk_slots": self.chunk_slots,
            "credit_lead": self.credit_lead,
            "rank": rank,
            "num_max_tokens": self.num_max_tokens,
            "topk": self.topk,
            "num_experts": self.num_experts,
            "owner": placement.owner.tolist(),
            "local_index": placement.local_index.tolist(),
            "layout": LAYOUTS.index(self.layout),
            "alignment": self.alignment,
            "row_bytes": self.row_bytes,
            "combine_row_bytes": self.combine_row_bytes,
            "partial_row_bytes": self.partial_row_bytes,
        }

    def plan(self, counts: RouteCounts) -> MoePlan:
        return plan_moe(
            counts.to_server,
            counts.to_rank,
            self.machine,
            self.row_bytes,
            "whole",
            chunk_bytes=self.chunk_bytes,
            chunk_slots=self.chunk_slots,
            credit_lead=self.credit_lead,
        )

    def by_python(self, rank: int, counts: RouteCounts, num_tokens: int) -> dict[str, bytes]:
        """First rows and tables as an eager dispatch makes them, each as its bytes."""
        placement, plan = self.placement, self.plan(counts)
        first = first_rows(counts, placement, rank, self.servers, self.layout, self.alignment)
        made = {name: getattr(first, source).tobytes() for name, source in ARRAYS.items()}
        made["dispatch_table"] = plan.table(rank).bytes.tobytes()
        if self.partial_row_bytes:
            most_partials = max(plan.staging_rows_of(r)[1] for r in range(self.num_ranks)) * min(
                self.topk, self.gpus_per_server - 1
            )
            made["combine_table"] = plan.combine_table(
                rank, self.combine_row_bytes, self.partial_row_bytes, most_partials, num_tokens
            ).bytes.tobytes()
        return made


def count_all(setup: Setup, topk_idx: Sequence[npt.NDArray[np.int64]]) -> RouteCounts:
    """Counts of all ranks; topk_idx: of each rank, int64 [T, K]."""
    owner, m = setup.placement.owner, setup.gpus_per_server
    copies = np.zeros((setup.num_ranks, setup.num_experts), dtype=np.int64)
    chosen = np.zeros((setup.num_ranks, setup.num_ranks), dtype=np.int64)
    servers = np.zeros((setup.num_ranks, setup.servers), dtype=np.int64)
    for rank, idx in enumerate(topk_idx):
        token, k = np.nonzero(idx >= 0)
        experts = idx[token, k]
        copies[rank] = np.bincount(experts, minlength=setup.num_experts)
        ranks = np.zeros((len(idx), setup.num_ranks), dtype=bool)
        ranks[token, owner[experts]] = True
        chosen[rank] = ranks.sum(axis=0)
        servers[rank] = ranks.reshape(len(idx), setup.servers, m).any(axis=2).sum(axis=0)
    return RouteCounts(copies, servers, chosen)


def random_indices(setup: Setup, rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """Choices of each rank; some ranks have no tokens, some choices are none, some experts hot."""
    kind = rng.choice(["even", "hot", "one"])
    heat = rng.dirichlet(np.full(setup.num_experts, {"even": 100.0, "hot": 0.1, "one": 1.0}[kind]))
    one = int(rng.integers(setup.num_experts))
    found = []
    for _ in range(setup.num_ranks):
        tokens = int(rng.integers(0, setup.num_max_tokens + 1) * (rng.random() < 0.8))
        idx = np.full((tokens, setup.topk), -1, dtype=np.int64)
        for t in range(tokens):
            if kind == "one":
                idx[t, 0] = one
            elif setup.topk <= setup.num_experts and rng.random() < 0.9:
                idx[t] = np.argsort(-np.log(heat + 1e-9) * rng.exponential(size=len(heat)))[
                    : setup.topk
                ]
            else:  # duplicates too, as far as there is room for them
                idx[t, 0] = rng.integers(setup.num_experts)
        idx[rng.random(idx.shape) < 0.15] = -1
        found.append(idx)
    return found


def aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes, all 0xA5, from a multiple of 256."""
    room = np.full(num_bytes + 256, 0xA5, dtype=np.uint8)
    begin = -room.ctypes.data % 256
    return room[begin : begin + num_bytes]


class Node:
    """One rank's planner with its memory."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup, self.rank = setup, rank
        self.planner = HostPlanner(**setup.fields(rank))
        self.layout: dict[str, int] = self.planner.layout
        r = setup.num_ranks
        self.counts: Words = aligned((r * (setup.num_experts + setup.servers + r) + 1) * 8).view(
            np.uint64
        )
        self.out = aligned(self.layout["bytes"])
        self.planner.bind(self.counts.ctypes.data, self.out.ctypes.data)

    def give(self, counts: RouteCounts, num_tokens: int) -> None:
        parts = (counts.copies, counts.to_server, counts.to_rank)
        self.counts[:-1] = np.concatenate([p.astype(np.uint64) for p in parts], axis=1).ravel()
        self.counts[-1] = num_tokens

    def run(self, counts: RouteCounts, num_tokens: int) -> str:
        """Run once; the error, if any, which is cleared."""
        self.give(counts, num_tokens)
        self.planner.run()
        error = str(self.planner.error)
        self.planner.clear_error()
        return error

    def made(self, like: dict[str, bytes]) -> dict[str, bytes]:
        """The results, as many bytes of each as `like` has."""
        begin = self.layout
        return {
            name: self.out[begin[name] : begin[name] + len(part)].tobytes()
            for name, part in like.items()
        }


def no_counts(setup: Setup) -> RouteCounts:
    """Of no tokens."""
    return count_all(setup, [np.empty((0, setup.topk), np.int64)] * setup.num_ranks)


def with_entry(counts: RouteCounts, name: str, index: tuple[int, int], value: int) -> RouteCounts:
    """The same counts with one entry changed."""
    array = getattr(counts, name).astype(np.uint64)
    array[index] = value
    return replace(counts, **{name: array})
