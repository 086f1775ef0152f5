"""The host kernel and its route against the oracle: dispatch and combine, ranks as threads.

Whole outputs are compared, padding included: neither writes it. Handles are compared but for the
numbers of partial rows, which a proxy gives out in the order of its items.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkern.kernels import _host
from fastkern.kernels.oracle import NONE, Route, run_combine
from tests.moe_case_list import NAMED, random_cases
from tests.moe_cases import Case
from tests.moe_host_kernel import Handle, Ranks, combine, dispatch
from tests.moe_tables import POLICIES, SHAPES, Call, narrowed


def same_route(handle: Handle, route: Route) -> bool:
    return all(
        np.array_equal(handle.array(name), getattr(route, name))
        for name in ("pack_list", "entries", "token_map")
    )


def check(call: Call, options: _host.LaunchOptions, num_units: int = 1) -> None:
    """Route, dispatch, handle and combine of the kernel are the oracle's."""
    handles = [Handle(call, rank, num_units) for rank in range(call.num_ranks)]
    for handle, route in zip(handles, call.routes, strict=True):
        assert same_route(handle, route)
    ranks = Ranks(call, options)
    got, want = dispatch(call, ranks, handles), call.dispatch()
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        assert [bytes(x) for x in a.parts] == [bytes(x) for x in b.parts], f"rank {rank}"
        for name in ("weights", "index", "window_slots"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None)
            assert x is None or bytes(x) == bytes(y), f"rank {rank}: {name}"
        local = rank % b.touched.shape[1]
        assert np.array_equal(a.touched == NONE, b.touched == NONE)
        assert np.array_equal(a.touched[:, local], b.touched[:, local])
        others = np.delete(a.touched, local, axis=1)
        assert handles[rank].num_partials == b.num_partials
        assert sorted(others[others != NONE].tolist()) == list(range(b.num_partials))
        assert np.array_equal(a.arrivals[..., :2], b.arrivals[..., :2])
    sums = combine(call, ranks, handles)
    assert call.is_combined(sums)
    # The kernel's handle serves the oracle as well.
    tables = call.combine_tables(max(h.num_partials for h in handles))
    assert call.is_combined(run_combine(tables, call.combine_given(got)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_policy_and_shape(policy: Any, shape: tuple[int, int]) -> None:
    seed = 10 * SHAPES.index(shape) + POLICIES.index(policy)
    for k, case in enumerate(random_cases(700 + seed, 2)):
        call = Call(narrowed(case), *shape, policy, chunk_rows=1 + k, credit_lead=seed % 3)
        check(call, _host.LaunchOptions(1 + seed % 3, 1 + seed % 2, "shuffled", seed=seed))


@pytest.mark.parametrize("case", NAMED[::3], ids=lambda case: case.name)
def test_named_calls_in_full_width(case: Case) -> None:
    shape, policy = SHAPES[2 + case.seed % 5], POLICIES[case.seed % 4]
    check(Call(case, *shape, policy), _host.LaunchOptions(2, 3), num_units=3)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(SHAPES),
    policy=st.sampled_from(POLICIES),
    blocks=st.integers(1, 3),
    lanes=st.integers(1, 3),
    transport=st.sampled_from(["shm", "shuffled", "shaped"]),
    num_units=st.integers(1, 9),
    chunk_rows=st.integers(1, 4),
    credit_lead=st.integers(0, 3),
)
def test_any_call(
    seed: int,
    shape: tuple[int, int],
    policy: Any,
    blocks: int,
    lanes: int,
    transport: str,
    num_units: int,
    **options: int,
) -> None:
    rates = (50_000, 500_000) if transport == "shaped" else (0, 0)
    call = Call(narrowed(random_cases(seed, 1)[0]), *shape, policy, **options)
    check(call, _host.LaunchOptions(blocks, lanes, transport, *rates, seed), num_units)


def test_a_changed_table_shows() -> None:
    """Negative control: the comparison can fail."""
    call = Call(Case("changed", tokens="equal", topk=3), 2, 2)
    handles = [Handle(call, rank) for rank in range(4)]
    handles[0].array("entries")[:] = np.roll(handles[0].array("entries"), 1, axis=1)
    assert not same_route(handles[0], call.routes[0])
    assert same_route(handles[1], call.routes[1])
    got = dispatch(call, Ranks(call, _host.LaunchOptions()), handles)
    assert not call.is_dispatched(got)
