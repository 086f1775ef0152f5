"""Calls on calls: handles used again and late, repetition, other ways to carry the same call.

All against the reference, bit for bit.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastkern
from fastkern import Communicator
from tests.conftest import SharedPools
from tests.moe_cases import Case, Data
from tests.moe_checks import (
    call_combine,
    call_dispatch,
    check_received,
    dispatch_options,
    payload,
    same_bytes,
)
from tests.moe_reference import as_bytes
from tests.processes import Pool

BOTH = ("expert", "rank")
GRID = {"1x4": 1, "2x2": 2, "4x1": 4}


def some_cases(layout: str) -> list[Case]:
    """Three calls that differ in everything; the second has padding that nobody writes."""
    first = Case("first", 61, topk=3, layout=layout, payload="bfloat16", summed="bfloat16")
    second = Case("second", 62, topk=5, num_experts=11, layout=layout, static=True, bias="row")
    third = Case("third", 63, topk=1, layout=layout, payload="fp8_scales_ids", tokens="some_none")
    return [first, second, third]


# -- handles ---------------------------------------------------------------------------------------


def late_handles(rank: int, num_ranks: int, servers: int, layout: str) -> None:
    """Combines in another order than the dispatches, each twice, other calls in between."""
    with Communicator(servers=servers, chunk_bytes=128, entry_timeout_s=50) as comm:
        calls = [Data(case, servers, num_ranks) for case in some_cases(layout)]
        handles = [call_dispatch(comm, data) for data in calls]
        for which in (1, 2, 0, 1, 0, 2):
            call_combine(comm, calls[which], handles[which])
            out = torch.full((num_ranks,), -1)
            comm.all_to_all_single(out, torch.arange(num_ranks) + 10 * rank)
            assert out.tolist() == [10 * src + rank for src in range(num_ranks)]


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("servers", GRID.values(), ids=GRID)
def test_handles_outlive_other_calls(four: Pool, servers: int, layout: str) -> None:
    four.run(late_handles, servers, layout)


def same_routing(rank: int, num_ranks: int, servers: int, layout: str) -> None:
    """Other payloads, of other dtypes and widths, with and without weights, over one handle."""
    with Communicator(servers=servers, chunk_bytes=256, entry_timeout_s=50) as comm:
        first, other, _ = (Data(case, servers, num_ranks) for case in some_cases(layout))
        handle = call_dispatch(comm, first)
        call_dispatch(comm, other)
        for kind in ("mixed", "float64", "fp8_scales_ids", "int32"):
            case = Case("first", 61, topk=3, layout=layout, payload=kind, width=33)
            data = Data(case, servers, num_ranks)
            for weights in (None, data.weights):
                inputs = data.drawn_inputs(f"again {kind}")
                mine = None if weights is None else weights[rank]
                got = comm.dispatch(payload(inputs[rank]), None, mine, handle=handle)
                check_received(data, rank, got, inputs, weights)
                outs = data.drawn_outs(f"outs {kind}")
                call_combine(comm, data, got[3], outs)
                call_combine(comm, data, handle, outs)


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("servers", GRID.values(), ids=GRID)
def test_a_handle_serves_more_dispatches(four: Pool, servers: int, layout: str) -> None:
    four.run(same_routing, servers, layout)


def handle_is_its_meta(rank: int, num_ranks: int) -> None:
    """A handle made of a copy of the metadata is as good, when the first one's is overwritten."""
    with Communicator(servers=2, entry_timeout_s=50) as comm:
        data = Data(Case("first", 61, topk=3), 2, num_ranks)
        handle = call_dispatch(comm, data)
        kind, meta = type(handle), handle.meta.clone()
        handle.meta.zero_()
        call_combine(comm, data, kind(meta))


def test_the_metadata_is_all_of_a_handle(four: Pool) -> None:
    four.run(handle_is_its_meta)


def received_rows_stay(rank: int, num_ranks: int) -> None:
    """What an earlier call received and summed is never written again; inputs may be."""
    with Communicator(servers=2, entry_timeout_s=50) as comm:
        calls = [Data(case, 2, num_ranks) for case in some_cases("expert")]
        kept: list[tuple[Tensor, Tensor, str]] = []
        for turn in range(3):
            for data in calls:
                x, weights = [t.clone() for t in data.inputs[rank]], data.weights
                assert weights is not None
                recv, recv_weights, _, handle = comm.dispatch(
                    payload(x), data.routing.topk_idx[rank], weights[rank], **dispatch_options(data)
                )
                for tensor in x:
                    tensor.zero_()
                sums = comm.combine(data.expert_outs[rank], handle)
                tensors = [*(recv if isinstance(recv, list) else [recv]), recv_weights, sums]
                kept += [(t, t.clone(), f"{data.case.name}, turn {turn}") for t in tensors]
        for tensor, copy, what in kept:
            same_bytes(tensor, copy, what)


def test_no_later_call_writes_what_was_received(four: Pool) -> None:
    four.run(received_rows_stay)


# -- repetition and independence -------------------------------------------------------------------


def whole_call(comm: Communicator, data: Data) -> list[Tensor]:
    """All that a dispatch and a combine give on this rank, as bytes; padding left out."""
    rank = comm.rank
    weights = None if data.weights is None else data.weights[rank]
    recv, recv_weights, counts, handle = comm.dispatch(
        payload(data.inputs[rank]), data.routing.topk_idx[rank], weights, **dispatch_options(data)
    )
    assert recv_weights is not None
    live = torch.tensor([row is not None for row in data.all_rows[rank]], dtype=torch.bool)
    tensors = [recv] if isinstance(recv, Tensor) else list(recv)
    sums = comm.combine(data.expert_outs[rank], handle, wire_dtype=data.case.wire_dtype)
    given = [t[live] for t in (*tensors, recv_weights)] + [counts, sums]
    return [as_bytes(t) for t in given]


def repeated(rank: int, num_ranks: int, servers: int, policy: str) -> None:
    """Ten rounds of three calls, a rank late in each: every bit is as in the first round."""
    options: dict[str, Any] = {"servers": servers, "policy": policy, "chunk_bytes": 200}
    with Communicator(entry_timeout_s=50, num_blocks=2, buffer_bytes=0, **options) as comm:
        calls = [Data(case, servers, num_ranks) for case in some_cases("expert")]
        first = [whole_call(comm, data) for data in calls]
        for turn in range(10):
            if rank == turn % num_ranks:
                time.sleep(0.01)
            for data, right in zip(calls, first, strict=True):
                for got, kept in zip(whole_call(comm, data), right, strict=True):
                    same_bytes(got, kept, f"{data.case.name}, turn {turn}")


@pytest.mark.parametrize("policy", ["whole", "split", "direct", "spreadout"])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_repeated_calls_are_bitwise_equal(four: Pool, servers: int, policy: str) -> None:
    four.run(repeated, servers, policy)


def every_way(rank: int, num_ranks: int, servers: int) -> None:
    """Sums whose order shows come out the same however the call is cut and carried."""
    ways: list[dict[str, Any]] = [{"policy": p} for p in ("whole", "split", "direct", "spreadout")]
    ways += [{"chunk_bytes": size} for size in (1, 100, 1 << 20)]
    ways += [{"num_blocks": blocks, "chunk_bytes": 300} for blocks in (2, 4, 7)]
    ways += [{"transport": fastkern.shaped(50.0, 5.0), "policy": p} for p in ("whole", "direct")]
    cases = [
        Case("ids", 71, topk=6, payload="fp8_scales_ids", width=40, summed="bfloat16"),
        Case("rows", 72, topk=4, layout="rank", num_tokens=20, summed="float16", sum_width=33),
        Case("wide", 73, topk=8, num_tokens=20, width=200, sum_width=200),
    ]
    calls = [Data(case, servers, num_ranks) for case in cases]
    first: list[list[Tensor]] = []
    for way in ways:
        with Communicator(servers=servers, entry_timeout_s=50, **way) as comm:
            got = [whole_call(comm, data) for data in calls]
        first = first or got
        for case, these, right in zip(cases, got, first, strict=True):
            for tensor, kept in zip(these, right, strict=True):
                same_bytes(tensor, kept, f"{case.name}, {way}")


@pytest.mark.parametrize("topology", [(1, 4), (2, 2), (4, 1), (2, 3), (3, 2)], ids=str)
def test_nothing_depends_on_how_a_call_is_carried(
    shared_pools: SharedPools, topology: tuple[int, int]
) -> None:
    servers, per_server = topology
    shared_pools.pool(servers * per_server).run(every_way, servers, timeout_s=240)


# -- groups ----------------------------------------------------------------------------------------


def subgroups(rank: int, num_ranks: int) -> None:
    """Two communicators, one of ranks that are no neighbours and one of all, in turn."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with (
        Communicator(pairs[rank % 2], servers=2, entry_timeout_s=50) as pair,
        Communicator(servers=2, entry_timeout_s=50) as whole,
    ):
        for seed in range(3):
            few = Data(Case("pair", 80 + seed + rank % 2, topk=3), 2, 2)
            many = Data(Case("all", 90 + seed, topk=3), 2, num_ranks)
            in_pair, in_all = call_dispatch(pair, few), call_dispatch(whole, many)
            call_combine(whole, many, in_all)
            call_combine(pair, few, in_pair)


def test_subgroups_and_several_communicators(four: Pool) -> None:
    four.run(subgroups)
