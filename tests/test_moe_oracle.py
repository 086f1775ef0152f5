"""The oracle of dispatch and combine against their definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkern.kernels.oracle import (
    NONE,
    CombineRank,
    DispatchRank,
    RowForm,
    narrow,
    route_all,
    run_combine,
    run_dispatch,
    run_tables,
    widen,
)
from fastkern.moe.dispatch_arguments import RowFormat
from fastkern.planner import Topology, plan, plan_moe
from tests.moe_case_list import NAMED, random_cases
from tests.moe_cases import Case
from tests.moe_tables import POLICIES, SHAPES, Call, narrowed, to_numpy


def check(call: Call, rng: np.random.Generator | None = None) -> None:
    """Dispatch and combine by the oracle give what the definition says."""
    outs = call.dispatch(rng)
    assert call.is_dispatched(outs)
    assert call.is_combined(call.combine(outs, rng))


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_every_named_call(case: Case) -> None:
    shape, policy = SHAPES[2 + case.seed % 5], POLICIES[case.seed % 4]
    check(Call(case, *shape, policy, chunk_rows=1 + case.seed % 3))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_policy_and_shape_in_orders_that_flags_allow(
    policy: Any, shape: tuple[int, int]
) -> None:
    seed = 10 * SHAPES.index(shape) + POLICIES.index(policy)
    for case in random_cases(900 + seed, 2):
        call = Call(narrowed(case), *shape, policy, chunk_rows=1 + seed % 2, credit_lead=seed % 3)
        check(call)
        for order in range(2):
            check(call, np.random.default_rng(order))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(SHAPES),
    policy=st.sampled_from(POLICIES),
    chunk_rows=st.integers(1, 4),
    chunk_slots=st.sampled_from([32, 64]),
    credit_lead=st.integers(0, 3),
    alpha_us=st.sampled_from([0.0, 5.0]),
    order=st.none() | st.integers(0, 100),
)
def test_any_call(
    seed: int, shape: tuple[int, int], policy: Any, order: int | None, **options: Any
) -> None:
    call = Call(narrowed(random_cases(seed, 1)[0]), *shape, policy, **options)
    check(call, None if order is None else np.random.default_rng(order))


def test_bits_depend_on_neither_order_nor_chunks_nor_policy() -> None:
    """Also the negative control: a sum whose order does show, and other numbers, do not pass."""
    case = Case("sums", topk=24, num_experts=12, num_tokens=9, seed=4)
    results = []
    for policy in POLICIES:
        for chunk_rows in (1, 5):
            call = Call(case, 2, 3, policy, chunk_rows=chunk_rows)
            results.append(call.combine(call.dispatch(np.random.default_rng(chunk_rows))))
    for result in results:
        assert [bytes(rows) for rows in result] == [bytes(rows) for rows in results[0]]
    assert call.is_combined(results[0])
    outs = call.dispatch()
    ranks = call.combine_given(outs)
    swapped = []
    for rank in ranks:  # every rank sums its choices the other way round
        handle = replace(rank.handle, window_slots=rank.handle.window_slots[:, ::-1])
        swapped.append(replace(rank, handle=handle))
    tables = call.combine_tables(max(out.num_partials for out in outs))
    assert not call.is_combined(run_combine(tables, swapped))
    other = [replace(rank, expert_out=rank.expert_out * np.float32(1.5)) for rank in ranks]
    assert not call.is_combined(run_combine(tables, other))
    outs[0].parts[0][np.flatnonzero(call.routes[0].filled)[0], 0] ^= 1
    assert not call.is_dispatched(outs)


# -- written out by hand ---------------------------------------------------------------------------


def one_token(kind: str, outputs: list[float], wire: str = "") -> Any:
    """The sum of rank 0's one token with a choice on each of 8 ranks, 2 servers x 4."""
    idx = [np.zeros((0, 8), np.int64) for _ in range(8)]
    idx[0] = np.arange(8)[None]
    routes = route_all(2, idx, list(range(8)))
    counts = np.stack([r.to_server for r in routes]), np.stack([r.to_rank for r in routes])
    given = [DispatchRank([np.zeros((r.num_tokens, 4), np.uint8)], None, r) for r in routes]
    made = plan_moe(*counts, Topology(2, 4), given[0].form.row_bytes, "whole")
    outs = run_dispatch([made.table(rank) for rank in range(8)], given)
    most = max(out.num_partials for out in outs)
    ranks = [
        CombineRank(
            narrow(np.array([[outputs[rank]]], np.float32), kind),
            kind,
            wire or kind,
            None,
            None,
            kind,
            routes[rank],
            outs[rank],
        )
        for rank in range(8)
    ]
    tables = [made.combine_table(rank, 16, 16, most, int(rank == 0)) for rank in range(8)]
    return float(widen(run_combine(tables, ranks)[0], kind, np.dtype(np.float32))[0, 0])


def test_bfloat16_sums_are_rounded_once_per_server_and_once_more() -> None:
    ones = [1.0] * 7
    # 256 + 3 stay unrounded on the own server; 4 comes from the other one: 263, rounded to 264.
    assert one_token("bfloat16", [256.0, *ones]) == 264.0
    # Now 256 + 3 = 259 is rounded to 260 for the way: 264 again, from 264 exactly.
    assert one_token("bfloat16", [*ones, 256.0]) == 264.0
    # 256 + 1.25 twice, on both servers: 258 + 256.25 + ... shows where the rounding was.
    values = [0.25, 0.0, 0.0, 0.0, 256.0, 1.25, 0.0, 0.0]
    assert one_token("float32", values) == 257.5
    assert one_token("bfloat16", values) == 258.0  # 257.25 -> 258, 258.25 -> 258
    values = [1.0, 0.0, 0.0, 0.0, 256.0, 0.75, 0.0, 0.0]
    assert one_token("bfloat16", values) == 256.0  # 256.75 -> 256, 257 -> 256 (even)
    assert one_token("bfloat16", values, wire="float32") == 258.0  # 257.75 -> 258


def example() -> tuple[list[Any], list[DispatchRank], Any]:
    """The docstring's: rank 0 has one token, with experts 4 and 6."""
    idx = [np.array([[4, 6]]), *(np.zeros((0, 2), np.int64) for _ in range(3))]
    routes = route_all(2, idx, [0, 0, 1, 1, 2, 2, 3, 3])
    parts = [np.full((r.num_tokens, 3), 7 + k, np.uint8) for k, r in enumerate(routes)]
    given = [DispatchRank([part], None, r) for part, r in zip(parts, routes, strict=True)]
    to_server, to_rank = (
        np.stack([getattr(r, n) for r in routes]) for n in ("to_server", "to_rank")
    )
    made = plan_moe(to_server, to_rank, Topology(2, 2), given[0].form.row_bytes, "whole")
    return routes, given, made


def test_the_example_of_the_docstring() -> None:
    routes, given, made = example()
    assert routes[0].pack_list.tolist() == [0]
    assert routes[0].entries.tolist() == [[[0, 0, 0], [0, 0, 1]]]
    assert routes[0].token_map.tolist() == [[NONE, 0, NONE, NONE]]
    assert [made.puts(rank) for rank in range(4)] == [[], [(3, 1)], [], []]
    outs = run_dispatch([made.table(rank) for rank in range(4)], given)
    assert [out.parts[0].tolist() for out in outs] == [[], [], [[7, 7, 7]], [[7, 7, 7]]]
    assert outs[2].window_slots.tolist() == [[0, NONE]]
    assert outs[3].window_slots.tolist() == [[NONE, 0]]
    assert outs[3].touched.tolist() == [[0, 0]]
    assert [out.num_partials for out in outs] == [0, 0, 0, 1]
    told = [record for record in outs[2].arrivals.tolist() if record[0][1] == 1]
    assert told == [[[0, 1, 0, 0], [0, 0, 0, 0]]]
    values = [np.zeros((0, 1)), np.zeros((0, 1)), np.array([[256.0]]), np.array([[1.5]])]
    ranks = [
        CombineRank(narrow(v, "bfloat16"), "bfloat16", "bfloat16", None, None, "bfloat16", r, out)
        for v, r, out in zip(values, routes, outs, strict=True)
    ]
    tables = [made.combine_table(rank, 16, 16, 1, len(given[rank].parts[0])) for rank in range(4)]
    results = run_combine(tables, ranks)
    assert widen(results[0], "bfloat16", np.dtype(np.float32)).tolist() == [[258.0]]
    assert [len(rows) for rows in results] == [1, 0, 0, 0]


def test_the_example_of_route() -> None:
    empty = np.zeros((0, 2), np.int64)
    idx = [np.array([[0, 2], [3, 2], [-1, 1]]), empty, empty, empty]
    route = route_all(2, idx, [0, 1, 2, 3])[0]
    assert route.to_rank.tolist() == [1, 1, 2, 1]
    assert route.to_server.tolist() == [2, 2]
    assert route.pack_list.tolist() == [0, 2, 0, 1]
    assert route.entries[:, :, 2].tolist() == [[0, NONE], [NONE, 1], [NONE, 0], [1, 0]]
    assert route.token_map.tolist() == [
        [NONE, 0, 0, NONE],
        [NONE, 1, NONE, NONE],
        [NONE, NONE, NONE, 0],
    ]


# -- values and rows -------------------------------------------------------------------------------


def test_every_16_bit_value_is_widened_and_narrowed_as_torch_does() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    for kind, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        held = bits if kind == "bfloat16" else bits.view(np.float16)
        tensor = torch.from_numpy(bits.view(np.int16)).view(dtype)
        wide = widen(held, kind, np.dtype(np.float32))
        assert np.array_equal(wide, tensor.float().numpy(), equal_nan=True)
        back = narrow(wide, kind).view(np.uint16)
        finite = ~np.isnan(wide)
        assert np.array_equal(back[finite], bits[finite])
        assert np.isnan(widen(narrow(wide, kind), kind, np.dtype(np.float32))[~finite]).all()


def test_floats_are_narrowed_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    ties = (words & 0xFFFF0000) | 0x8000  # halfway between two bfloat16
    near = (words & 0xFFFFE000) | rng.choice([0, 0xFFF, 0x1000, 0x1001], len(words)).astype(
        np.uint32
    )
    values = np.concatenate([words, ties, near, [0x7F7FFFFF, 0x477FEFFF, 0x477FF000, 0x33000000]])
    floats = values.astype(np.uint32).view(np.float32)
    floats = floats[~np.isnan(floats)]
    for kind, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        want = to_numpy(torch.from_numpy(floats).to(dtype))
        assert bytes(narrow(floats, kind)) == bytes(want), kind


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=8),
    st.sampled_from([0, 4, 8]),
    st.integers(1, 32),
)
def test_rows_are_laid_out_as_the_library_lays_them_out(
    parts: list[int], weight_bytes: int, topk: int
) -> None:
    mine, theirs = RowForm.of(parts, weight_bytes, topk), RowFormat.of(parts, weight_bytes, topk)
    for name in ("part_bytes", "offsets", "weights_offset", "header_offset", "row_bytes"):
        assert getattr(mine, name) == getattr(theirs, name), name


# -- what does not belong together -----------------------------------------------------------------


def test_tables_and_ranks_must_belong_together() -> None:
    call = Call(Case("plain", seed=1, tokens="equal"), 2, 2)
    outs = call.dispatch()
    most = max(out.num_partials for out in outs)
    combines, ranks = call.combine_tables(most), call.combine_given(outs)
    with pytest.raises(ValueError, match="is for dispatch, not combine"):
        run_combine(call.tables, ranks)
    with pytest.raises(ValueError, match="is for combine, not dispatch"):
        run_dispatch(combines, call.given)
    plain = plan(np.ones((4, 4), np.int64), Topology(2, 2), 16)
    with pytest.raises(ValueError, match="is for all_to_all, not dispatch"):
        run_dispatch([plain.table(rank) for rank in range(4)], call.given)
    with pytest.raises(ValueError, match="is for dispatch, not all_to_all"):
        run_tables(call.tables, [])
    with pytest.raises(ValueError, match="for rank 0 of 4"):
        run_dispatch(call.tables[::-1], call.given)
    with pytest.raises(ValueError, match="shorter"):
        run_dispatch(call.tables, call.given[:3])
    with pytest.raises(ValueError, match=r"rank 1 sends .* its table is for"):
        run_dispatch(call.tables, [call.given[0], call.given[0], *call.given[2:]])
    with pytest.raises(ValueError, match="differ in scratch_rows"):
        run_combine([*combines[:3], call.combine_tables(most + 1)[3]], ranks)
    double = replace(ranks[0], expert_out=ranks[0].expert_out.astype(np.float64))
    with pytest.raises(ValueError, match="is held as"):
        run_combine(combines, [double, *ranks[1:]])
    wide = [replace(rank, expert_out=np.repeat(rank.expert_out, 9, axis=1)) for rank in ranks]
    with pytest.raises(ValueError, match="larger than the table's"):
        run_combine(combines, wide)
    more = route_all(2, [np.zeros((50, 2), np.int64)] * 4, [0] * 8)[0]
    with pytest.raises(ValueError, match="rank 1 has 50 tokens, its table is for"):
        run_combine(combines, [ranks[0], replace(ranks[1], route=more), *ranks[2:]])
