"""A dispatch and a combine of one case, as planner, validator and oracle take them: all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastkern.kernels.oracle import (
    DTYPES,
    CombineRank,
    Dispatched,
    DispatchRank,
    Route,
    route_all,
    run_combine,
    run_dispatch,
    sum_dtype,
)
from fastkern.planner import MoePlan, Policy, StageTable, Topology, plan_moe
from tests.moe_cases import Case, Data
from tests.moe_reference import combine, dispatch

SHAPES = ((1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (4, 2))  # servers x ranks
POLICIES: tuple[Policy, ...] = ("whole", "split", "direct", "spreadout", "auto")
KINDS = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def to_numpy(tensor: Tensor) -> Any:
    """The tensor's values; bfloat16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def rows_of(tensor: Tensor) -> Any:
    """uint8 [rows, bytes of a row]."""
    row_bytes = tensor[:1].nelement() // max(1, len(tensor[:1])) * tensor.element_size()
    if not tensor.nelement():
        row_bytes = int(np.prod(tensor.shape[1:])) * tensor.element_size()
        return np.zeros((len(tensor), row_bytes), dtype=np.uint8)
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().reshape(len(tensor), row_bytes)


def padded(num_bytes: int) -> int:
    """Bytes of a row of sums: a multiple of 16, at least 16."""
    return max(16, -(-num_bytes // 16) * 16)


class Call:
    """A case on `servers` x `per_server` ranks, planned by `policy` in chunks of `chunk_rows`."""

    def __init__(
        self,
        case: Case,
        servers: int,
        per_server: int,
        policy: Policy = "whole",
        *,
        chunk_rows: int = 2,
        chunk_slots: int = 64,
        credit_lead: int = 1,
        alpha_us: float = 5.0,
    ) -> None:
        self.case, self.num_ranks = case, servers * per_server
        self.data = Data(case, servers, self.num_ranks)
        routing = self.data.routing
        self.routes: list[Route] = route_all(
            servers,
            [to_numpy(idx) for idx in routing.topk_idx],
            routing.owner,
            case.layout,
            case.alignment,
            [routing.num_rows(rank) for rank in range(self.num_ranks)],
        )
        weights = self.data.weights
        self.given = [
            DispatchRank(
                [rows_of(x) for x in self.data.inputs[rank]],
                None if weights is None else weights[rank].numpy(),
                self.routes[rank],
            )
            for rank in range(self.num_ranks)
        ]
        self.plan: MoePlan = plan_moe(
            np.stack([route.to_server for route in self.routes]),
            np.stack([route.to_rank for route in self.routes]),
            Topology(servers, per_server, alpha_us=alpha_us),
            self.given[0].form.row_bytes,
            policy,
            chunk_bytes=chunk_rows * self.given[0].form.row_bytes,
            chunk_slots=chunk_slots,
            credit_lead=credit_lead,
        )

    # -- dispatch ----------------------------------------------------------------------------------

    @cached_property
    def tables(self) -> list[StageTable]:
        return [self.plan.table(rank) for rank in range(self.num_ranks)]

    def dispatch(self, rng: np.random.Generator | None = None) -> list[Dispatched]:
        """By the oracle."""
        return run_dispatch(self.tables, self.given, rng)

    def is_dispatched(self, outs: Sequence[Dispatched]) -> bool:
        """Whether every rank has what the definition says, in the rows that are not padding."""
        data, right = self.data, True
        for rank, got in enumerate(outs):
            want = dispatch(data.routing, data.inputs, data.weights, rank)
            filled = self.routes[rank].filled
            pairs = [(a, rows_of(b)) for a, b in zip(got.parts, want.recv, strict=True)]
            if want.weights is not None:
                pairs.append((got.weights, want.weights.numpy()))
            if want.idx is not None:
                pairs.append((got.index, want.idx.numpy()))
            for a, b in pairs:
                right = right and a.dtype == b.dtype and bytes(a[filled]) == bytes(b[filled])
        return right

    # -- combine -----------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        return KINDS[self.data.sum_dtype]

    @property
    def wire(self) -> str:
        return self.kind if self.case.wire_dtype is None else KINDS[self.case.wire_dtype]

    @property
    def sizes(self) -> tuple[int, int]:
        """row_bytes and partial_row_bytes."""
        width = self.case.sum_width
        wire, partial = DTYPES[self.wire].itemsize, sum_dtype(self.kind).itemsize
        return padded(width * wire), padded(width * partial)

    def combine_tables(self, num_partials: int) -> list[StageTable]:
        return [
            self.plan.combine_table(rank, *self.sizes, num_partials, self.data.tokens[rank])
            for rank in range(self.num_ranks)
        ]

    def combine_given(self, handles: Sequence[Dispatched]) -> list[CombineRank]:
        data = self.data
        return [
            CombineRank(
                to_numpy(data.expert_outs[rank]),
                self.kind,
                self.wire,
                None if data.row_weights is None else data.row_weights[rank].numpy(),
                None if data.biases is None else to_numpy(data.biases[rank]),
                self.kind,
                self.routes[rank],
                handles[rank],
            )
            for rank in range(self.num_ranks)
        ]

    def combine(
        self, handles: Sequence[Dispatched], rng: np.random.Generator | None = None
    ) -> list[Any]:
        """By the oracle, after a dispatch."""
        most = max(handle.num_partials for handle in handles)
        return run_combine(self.combine_tables(most), self.combine_given(handles), rng)

    def is_combined(self, results: Sequence[Any]) -> bool:
        """Whether every rank has the sums of the definition, bit for bit."""
        return all(
            np.array_equal(got.view(np.uint8), want.view(np.uint8))
            for got, want in zip(results, self.expected, strict=True)
        )

    @cached_property
    def expected(self) -> list[Any]:
        """The definition's sums, [T, width] per rank."""
        data, wire = self.data, self.case.wire_dtype
        biases = data.biases or [None] * self.num_ranks
        return [
            to_numpy(
                combine(data.routing, data.expert_outs, data.row_weights, biases[rank], wire, rank)
            )
            for rank in range(self.num_ranks)
        ]


def narrowed(case: Case) -> Case:
    """The same in narrow rows, for tests of orders and places: the oracle is slow."""
    return replace(case, width=min(case.width, 5), sum_width=min(case.sum_width, 5))
