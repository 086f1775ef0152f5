"""The planner as a host node: counts that cannot be, limits that are passed, wrong arguments.

After a refusal every rank has first rows and tables of no tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastkern.kernels._host import HostPlanner
from fastkern.moe.counts import RouteCounts, first_rows
from fastkern.moe.sizes import worst_case_rows
from tests.device.host_planner_cases import (
    LAYOUTS,
    Node,
    Setup,
    count_all,
    no_counts,
    random_indices,
    with_entry,
)

SETUP = Setup(2, 2, num_experts=4, topk=2, num_max_tokens=16)
MOST = (1 << 31) - 1  # of top 2, the most that 32 bits number


def of_idx(setup: Setup, rows: dict[int, Any]) -> RouteCounts:
    """Counts of these choices of some ranks, the others without tokens."""
    empty = np.empty((0, setup.topk), dtype=np.int64)
    return count_all(
        setup, [np.array(rows.get(r, empty), dtype=np.int64) for r in range(setup.num_ranks)]
    )


ONE_EACH = of_idx(SETUP, {r: [[r, 3 - r], [3, -1]] for r in range(4)})


def wrapping() -> tuple[Setup, RouteCounts]:
    """Choices of two experts of a rank whose sum, 2^64 + 1, is 1 in 64 bits."""
    setup = replace(SETUP, num_experts=8)
    counts = of_idx(setup, {0: [[0, -1]]})
    for expert, choices in ((0, 1 << 63), (1, (1 << 63) + 1)):
        counts = with_entry(counts, "copies", (0, expert), choices)
    return setup, counts


def changed(name: str, index: tuple[int, int], value: int) -> RouteCounts:
    return with_entry(ONE_EACH, name, index, value)


def many_rows_of_one_rank() -> tuple[Setup, RouteCounts]:
    """All tokens of three ranks to one: 3 (2^31 - 1) rows."""
    setup = Setup(3, 1, num_experts=3, topk=2, num_max_tokens=MOST, layout="rank")
    row = np.zeros((3, 3), dtype=np.int64)
    row[:, 0] = MOST
    return setup, RouteCounts(row, row, row)


def many_partial_rows() -> tuple[Setup, RouteCounts]:
    """Proxies that may give out 2^32 - 2 partial rows, and an owner that gets one."""
    setup = Setup(2, 3, num_experts=6, topk=2, num_max_tokens=MOST, layout="rank")
    to_rank = np.zeros((6, 6), dtype=np.int64)
    to_server = np.zeros((6, 2), dtype=np.int64)
    for source in range(3):
        to_rank[source, 3 + source] = to_server[source, 1] = MOST
    to_rank[3, 4] = to_server[3, 1] = 1
    return setup, RouteCounts(to_rank.copy(), to_server, to_rank)


REFUSED = {
    "tokens for a server": (
        SETUP,
        changed("to_server", (2, 1), 17),
        "rank 2 counts 17 tokens for server 1, num_max_tokens is 16",
    ),
    "tokens for a rank": (
        SETUP,
        changed("to_rank", (3, 0), 17),
        "rank 3 counts 17 tokens for rank 0, num_max_tokens is 16",
    ),
    "a negative number": (
        SETUP,
        changed("to_server", (1, 0), (1 << 64) - 1),
        "rank 1 counts 18446744073709551615 tokens for server 0",
    ),
    "more servers than choices": (
        SETUP,
        changed("to_server", (0, 1), 3),
        "tokens of rank 0 for server 1: 3 for the server, but up to",
    ),
    "fewer for a server than for a rank of it": (
        SETUP,
        changed("to_server", (2, 0), 0),
        "tokens of rank 2 for server 0: 0 for the server, but up to 1",
    ),
    "choices of no token": (
        SETUP,
        changed("copies", (1, 0), 5),
        "rank 1 counts 0 tokens for rank 0, and 5 choices of its experts, of 2 a token",
    ),
    "tokens without a choice": (
        SETUP,
        changed("copies", (0, 0), 0),
        "rank 0 counts 1 tokens for rank 0, and 0 choices of its experts",
    ),
    "sums past 64 bits": (
        SETUP,
        changed("copies", (3, 3), 1 << 63),
        "rank 3 counts 2 tokens for rank 3, and more than 274877906943 choices",
    ),
    "sums that wrap": (
        *wrapping(),
        "rank 0 counts 1 tokens for rank 0, and more than 274877906943 choices",
    ),
    "choices of a rank": (
        replace(SETUP, num_max_tokens=2),
        RouteCounts(
            np.array([[2, 2, 2, 0]] + [[0] * 4] * 3),
            np.array([[2, 2]] + [[0] * 2] * 3),
            np.array([[2, 2, 2, 0]] + [[0] * 4] * 3),
        ),
        "rank 0 counts 6 choices, num_max_tokens 2 of 2 are 4",
    ),
    "rows received": (
        SETUP,
        of_idx(SETUP, {r: [[1, 1]] * 16 for r in range(4)}),
        "rank 1 would receive 128 rows, but num_max_tokens 16 makes room for 64",
    ),
    "rows past 32 bits": (*many_rows_of_one_rank(), "6442450941 rows on one rank, more than"),
    "partial rows past 32 bits": (
        *many_partial_rows(),
        "combine: 4294967295 partial rows on one rank, 2^32 - 1 or more",
    ),
}


def check_nothing(node: Node) -> None:
    """First rows and tables of no tokens."""
    want = node.setup.by_python(node.rank, no_counts(node.setup), 0)
    got = node.made(want)
    assert [name for name in want if got[name] != want[name]] == []


@pytest.mark.parametrize("case", REFUSED)
def test_all_ranks_refuse_alike(case: str) -> None:
    setup, counts, text = REFUSED[case]
    nodes = [Node(setup, rank) for rank in range(setup.num_ranks)]
    errors = {node.run(counts, setup.num_max_tokens) for node in nodes}
    assert len(errors) == 1
    assert text in errors.pop()
    for node in nodes:
        check_nothing(node)
        blocks = node.planner.arena_blocks
        good = count_all(setup, [np.zeros((1, setup.topk), np.int64)[:, :1]] * setup.num_ranks)
        assert node.run(good, 1) == ""
        want = setup.by_python(node.rank, good, 1)
        assert node.made(want) == want
        assert node.planner.arena_blocks == blocks


def test_without_a_combine_partial_rows_do_not_count() -> None:
    setup, counts = many_partial_rows()
    node = Node(replace(setup, partial_row_bytes=0), 0)
    assert node.run(counts, MOST) == ""


@pytest.mark.parametrize(
    ("num_tokens", "text"),
    [
        (17, "rank 1 has 17 tokens, num_max_tokens is 16"),
        (1 << 63, "rank 1 has 9223372036854775808 tokens"),
        (1, "rank 1 has 1 tokens, but counts 2 for server 1"),
    ],
)
def test_own_tokens(num_tokens: int, text: str) -> None:
    node = Node(SETUP, 1)
    assert text in node.run(ONE_EACH, num_tokens)
    check_nothing(node)
    assert node.run(ONE_EACH, 2) == ""


def test_the_first_error_stays_until_it_is_cleared() -> None:
    node = Node(SETUP, 0)
    for num_tokens in (17, 18, 2):
        node.give(ONE_EACH, num_tokens)
        node.planner.run()
        assert (
            node.planner.error
            == node.planner.error
            == ("rank 0 has 17 tokens, num_max_tokens is 16")
        )
    node.planner.clear_error()
    assert node.planner.error == ""
    node.give(ONE_EACH, 18)
    node.planner.run()
    assert "18 tokens" in node.planner.error
    assert node.planner.num_runs == 4


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_refused_where_python_refuses_them(layout: str, alignment: int) -> None:
    """Duplicate choices pass the room that was promised; `_recv_rows` of make_handle.py."""
    seen = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        setup = Setup(
            2,
            2,
            num_experts=int(rng.integers(3, 7)),
            topk=int(rng.integers(1, 6)),
            num_max_tokens=int(rng.integers(1, 90)),
            layout=layout,
            alignment=alignment,
        )
        expert = int(rng.integers(setup.num_experts))
        idx = random_indices(setup, rng)
        for i in idx:
            i[rng.random(i.shape) < rng.random()] = expert
        counts = count_all(setup, idx)
        rows = first_rows(counts, setup.placement, 0, 2, layout, alignment).rows_on
        room = [
            worst_case_rows(4, setup.num_max_tokens, setup.topk, int(own), alignment, layout)
            for own in setup.placement.num_owned
        ]
        passed = [rank for rank in range(4) if rows[rank] > room[rank]]
        error = Node(setup, 3).run(counts, len(idx[3]))
        if passed:
            rank = passed[0]
            assert f"rank {rank} would receive {rows[rank]} rows" in error
            assert error.endswith(f"room for {room[rank]}")
        else:
            assert error == ""
        seen.add(bool(passed))
    assert seen == ({False} if layout == "rank" else {False, True})


@pytest.mark.parametrize("rows", [64, 65])
def test_exactly_the_room_is_enough(rows: int) -> None:
    counts = of_idx(SETUP, {r: [[2, -1]] * 16 for r in range(3)})
    more = of_idx(SETUP, {3: [[2, -1]] * 15 + ([[2, -1]] if rows == 64 else [[2, 2]])})
    total = RouteCounts(
        counts.copies + more.copies,
        counts.to_server + more.to_server,
        counts.to_rank + more.to_rank,
    )
    total.copies[3, 2] = rows - 48
    assert bool(Node(SETUP, 0).run(total, 16)) == (rows == 65)


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"servers": 0}, "servers \\* gpus_per_server"),
        ({"servers": 300, "gpus_per_server": 300}, "servers \\* gpus_per_server"),
        ({"rank": 4}, "rank"),
        ({"topk": 33}, "topk is at most 32"),
        ({"num_max_tokens": 0}, "num_max_tokens"),
        ({"num_max_tokens": 1 << 31}, "num_max_tokens"),
        ({"num_experts": 5}, "num_experts"),
        ({"num_experts": 0, "owner": [], "local_index": []}, "owner"),
        ({"owner": [0, 1, 2, 4]}, "owner\\[3\\] is 4"),
        ({"local_index": [0, 0, 0]}, "local_index"),
        ({"local_index": [0, 0, 1, 0]}, "local_index\\[2\\] is 1"),
        ({"layout": 2}, "layout"),
        ({"alignment": 0}, "alignment"),
        ({"row_bytes": 0}, "row_bytes"),
        ({"row_bytes": 1 << 61}, "2\\^63 - 1"),
        ({"combine_row_bytes": 0}, "combine_row_bytes"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"chunk_slots": 1}, "chunk_slots"),
    ],
)
def test_what_it_is_made_of(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HostPlanner(**{**SETUP.fields(0), **fields})


def test_arguments_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        HostPlanner(*SETUP.fields(0).values())


@pytest.mark.parametrize(
    ("counts", "out", "text"),
    [(0, 16, "counts"), (12, 16, "counts"), (16, 0, "out"), (16, 8, "out")],
)
def test_addresses(counts: int, out: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HostPlanner(**SETUP.fields(0)).bind(counts, out)


def test_a_run_before_bind() -> None:
    planner = HostPlanner(**SETUP.fields(0))
    planner.run()
    assert (planner.error, planner.num_runs) == ("run before bind", 1)
