"""Dispatch and combine on a virtual cluster of the CPU's driver: routed and kept on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastkern.device.host_driver import HostDriver
from fastkern.device.route_records import TOKENS_PER_UNIT
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_moe import Dispatch
from fastkern.errors import FastkernError
from fastkern.kernels import _host
from fastkern.moe.dispatch_arguments import DispatchOptions
from fastkern.moe.handle import NONE
from fastkern.planner import Policy, Topology
from tests.device.virtual_cases import (
    POLICIES,
    SHAPES,
    check_combine,
    check_moe,
    check_random_traffic,
    check_rank,
    dispatched,
    options,
)
from tests.moe_case_list import NAMED, random_cases
from tests.moe_cases import Case, Data
from tests.moe_tables import Call, narrowed

BF16 = torch.bfloat16


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_random_calls(clean_driver: HostDriver, shape: tuple[int, int], policy: Policy) -> None:
    servers, num_ranks = shape[0], shape[0] * shape[1]
    seed = 10 * SHAPES.index(shape) + POLICIES.index(policy)
    with VirtualCluster(
        clean_driver,
        Topology(*shape),
        1 + seed % 3,
        1 + seed // 10 % 3,
        options=options(policy=policy, chunk_bytes=(60, 300, 4000)[seed % 3]),
    ) as cluster:
        for case in random_cases(800 + seed, 3):
            check_moe(cluster, Data(narrowed(case), servers, num_ranks))


@pytest.mark.parametrize("part", range(4))
def test_named_calls_in_full_width(clean_driver: HostDriver, part: int) -> None:
    """Every layout, dtype, wire, map and kind of tokens, on one cluster each."""
    shape = SHAPES[1 + part]
    with VirtualCluster(
        clean_driver, Topology(*shape), 1 + part % 3, 1 + part % 2, options=options(chunk_bytes=900)
    ) as cluster:
        for case in NAMED[part::4]:
            check_moe(cluster, Data(case, shape[0], shape[0] * shape[1]))


@pytest.mark.parametrize("topk", range(1, 9))
def test_every_top_k(clean_driver: HostDriver, topk: int) -> None:
    with VirtualCluster(clean_driver, Topology(2, 2), 2, options=options()) as cluster:
        for layout, choose in (("expert", "masked"), ("rank", "random")):
            case = Case(
                f"top-{topk}", topk, topk=topk, choose=choose, layout=layout, num_experts=12
            )
            check_moe(cluster, Data(case, 2, 4))


def test_more_units_than_tokens_and_fewer(clean_driver: HostDriver) -> None:
    """Units of several tokens, the last ones shorter, and ranks with one token or none."""
    for tokens, kind in ((3 * TOKENS_PER_UNIT["cxx"] + 5, "ragged"), (1, "some_none")):
        case = Case("units", tokens=kind, num_tokens=tokens, topk=3, choose="masked")
        with VirtualCluster(clean_driver, Topology(2, 2), options=options()) as cluster:
            check_moe(cluster, Data(case, 2, 4))


def test_the_handle_is_what_the_host_would_have_made(clean_driver: HostDriver) -> None:
    case = Case("handle", topk=3, tokens="equal", choose="masked", num_tokens=19)
    call = Call(case, 2, 2, "whole")
    given = options(policy="whole")
    with VirtualCluster(clean_driver, Topology(2, 2), options=given) as cluster:
        got = dispatched(cluster, call.data)
        for rank, route in enumerate(call.routes):
            raw = got.handle.read(rank).numpy().view(np.uint8)
            offsets = _host.handle_layout(raw)
            for name in ("pack_list", "entries", "token_map"):
                right = np.ascontiguousarray(getattr(route, name), dtype=np.uint32)
                begin = int(offsets[name])
                assert bytes(raw[begin : begin + right.nbytes]) == right.tobytes(), name
        assert got.handle.num_partials == max(rank.num_partials for rank in call.dispatch()) > 0
        got.handle.close()
        with pytest.raises(FastkernError, match="the handle was closed"):
            cluster.combine(got.handle, call.data.expert_outs)


def test_runs_again_and_other_payloads_leave_the_handle_as_it_is(clean_driver: HostDriver) -> None:
    data = Data(Case("again", topk=4, tokens="equal"), 2, 4)
    idx = data.routing.topk_idx
    with VirtualCluster(clean_driver, Topology(2, 2), 2, options=options()) as cluster:
        call = Dispatch(cluster, data.inputs, idx, data.weights, DispatchOptions(num_experts=8))
        call.run()
        first, partials = call.handle.read(0), call.handle.num_partials
        call.run()
        got = call.read()
        assert torch.equal(call.handle.read(0), first)
        assert call.handle.num_partials == partials
        for rank in range(4):
            check_rank(cluster, data, rank, got)
        call.close()
        # Rows of another size, so another plan; the token's number says which row is which.
        numbers = [[torch.arange(len(i)).repeat(50, 1).T + 100 * r] for r, i in enumerate(idx)]
        wide = cluster.dispatch(numbers, None, handle=call.handle)
        for rank in range(4):
            rows = data.routing.rows(rank)
            right = [100 * row.source + row.token for row in rows if row is not None]
            assert wide.recv[rank][0].tolist() == [[number] * 50 for number in right]
        check_combine(cluster, data, got, "expert_outs")
        call.handle.close()


def test_handles_outlive_other_calls_and_growth(clean_driver: HostDriver) -> None:
    rng = np.random.default_rng(3)
    with VirtualCluster(clean_driver, Topology(2, 2), 2, options=options()) as cluster:
        first = Data(Case("first", 1, topk=4, summed="bfloat16", bias="token"), 2, 4)
        wide = Case("second", 2, "equal", 60, layout="rank", width=3000)
        second = Data(wide, 2, 4)
        kept = dispatched(cluster, first)
        before = cluster.heap.data_bytes
        other = dispatched(cluster, second)
        assert cluster.heap.data_bytes > before
        check_random_traffic(cluster, rng, max_rows=9, max_width=9)
        check_combine(cluster, first, kept, "expert_outs")
        check_combine(cluster, second, other, "expert_outs")
        check_combine(cluster, first, kept, "other outs")
        for got in (kept, other):
            got.handle.close()


def test_bad_arguments_are_refused_and_leave_the_cluster_usable(clean_driver: HostDriver) -> None:
    xs = [[torch.zeros(2, 4)], [torch.zeros(2, 4)]]
    idx = [torch.tensor([[0], [1]]), torch.tensor([[1], [0]])]
    good = DispatchOptions(num_experts=2)
    with VirtualCluster(clean_driver, Topology(1, 2), options=options()) as cluster:
        bad = [idx[0], torch.tensor([[1], [5]])]
        text = r"rank 1: topk_idx\[1\]\[0\] is 5, neither -1 nor one of 2 experts"
        with pytest.raises(ValueError, match=text):
            cluster.dispatch(xs, bad, None, good)
        with pytest.raises(ValueError, match="ranks 0 and 1 disagree"):
            cluster.dispatch([xs[0], [torch.zeros(2, 5)]], idx, None, good)
        small = DispatchOptions(num_experts=2, num_max_tokens_per_rank=1)
        with pytest.raises(ValueError, match="2 tokens, but num_max_tokens_per_rank is 1"):
            cluster.dispatch(xs, idx, None, small)
        got = cluster.dispatch(xs, idx, None, good)
        with pytest.raises(ValueError, match="must have the 2 rows that the dispatch received"):
            cluster.combine(got.handle, [torch.zeros(3, 4)] * 2)
        with pytest.raises(ValueError, match="ranks 0 and 1 disagree"):
            cluster.combine(got.handle, [torch.zeros(2, 4), torch.zeros(2, 4, dtype=BF16)])
        sums = cluster.combine(got.handle, [torch.ones(2, 4)] * 2)
        assert all(torch.equal(s, torch.ones(2, 4)) for s in sums)
        got.handle.close()


def test_the_comparison_can_fail(clean_driver: HostDriver) -> None:
    """Negative control: two slots of one handle change places on the device."""
    data = Data(Case("changed", tokens="equal", topk=3, choose="distinct"), 2, 2 * 2)
    with VirtualCluster(clean_driver, Topology(2, 2), options=options()) as cluster:
        got = dispatched(cluster, data)
        raw = got.handle.read(0).numpy().view(np.uint8)
        offsets, info = _host.handle_layout(raw), got.handle.info(0)
        begin, num_bytes = int(offsets["window_slots"]), 4 * info.window_rows * info.topk
        slots = raw[begin : begin + num_bytes].view(np.uint32).reshape(-1, info.topk).copy()
        rows = [int(np.flatnonzero(slot != NONE)[0]) for slot in slots]
        first, last = slots[0, rows[0]], slots[-1, rows[-1]]
        slots[0, rows[0]], slots[-1, rows[-1]] = last, first
        cluster.copier.write(got.handle.addresses[0] + begin, slots.reshape(-1).view(np.uint8))
        with pytest.raises(AssertionError, match=r"sums of rank \d"):
            check_combine(cluster, data, got, "expert_outs")
        got.handle.close()
