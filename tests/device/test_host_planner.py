"""The planner as a host node: byte for byte what Python makes of the same counts."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastkern.device.graphs import record_graph
from fastkern.device.host_driver import HostDriver
from fastkern.moe.counts import RouteCounts
from fastkern.planner import StageTable
from tests.device.host_planner_cases import (
    ARRAYS,
    LAYOUTS,
    SHAPES,
    Node,
    Setup,
    aligned,
    count_all,
    no_counts,
    random_indices,
)

WIDER = ((5, 2), (2, 8), (8, 4), (1, 8), (6, 1))


def random_setup(shape: tuple[int, int], seed: int, **fields: Any) -> Setup:
    """Experts that do not divide, often in no order; options of the planner."""
    rng = np.random.default_rng(seed)
    num_ranks = shape[0] * shape[1]
    num_experts = int(rng.integers(1, 3 * num_ranks + 2))
    owners = None
    if rng.random() < 0.5:
        owners = tuple(int(r) for r in rng.integers(0, num_ranks, num_experts))
    return Setup(
        *shape,
        num_experts=num_experts,
        expert_to_rank=owners,
        topk=int(rng.integers(1, 9)),
        num_max_tokens=int(rng.integers(1, 30)),
        chunk_bytes=int(rng.choice([1, 100, 1 << 17])),
        chunk_slots=int(rng.choice([2, 32, 64])),
        credit_lead=int(rng.integers(0, 4)),
        topology={
            "alpha_us": float(rng.choice([0.0, 5.0, 200.0])),
            "scale_up": str(rng.choice(["switch", "mesh"])),
            "cross_rail": bool(rng.random() < 0.5),
        },
        **fields,
    )


def check_run(node: Node, counts: RouteCounts, num_tokens: int) -> None:
    assert node.run(counts, num_tokens) == ""
    want = node.setup.by_python(node.rank, counts, num_tokens)
    got = node.made(want)
    assert [name for name in want if got[name] != want[name]] == []


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_python(shape: tuple[int, int], layout: str, alignment: int) -> None:
    for seed in range(3):
        setup = random_setup(shape, seed, layout=layout, alignment=alignment)
        rng = np.random.default_rng(seed)
        nodes = [Node(setup, rank) for rank in range(setup.num_ranks)]
        blocks = [node.planner.arena_blocks for node in nodes]
        for _ in range(6):
            idx = random_indices(setup, rng)
            counts = count_all(setup, idx)
            for node in nodes:
                check_run(node, counts, len(idx[node.rank]))
        assert [node.planner.arena_blocks for node in nodes] == blocks
        assert [node.planner.num_runs for node in nodes] == [6] * len(nodes)


def test_no_run_asks_for_another_block() -> None:
    for shape in (*SHAPES, *WIDER):
        setup = random_setup(shape, 7)
        rng = np.random.default_rng(7)
        node = Node(setup, setup.num_ranks // 2)
        blocks = node.planner.arena_blocks
        for _ in range(60):
            idx = random_indices(setup, rng)
            check_run(node, count_all(setup, idx), len(idx[node.rank]))
        assert node.planner.arena_blocks == blocks


def test_a_dispatch_without_a_combine() -> None:
    setup = Setup(2, 2, num_experts=5, combine_row_bytes=0, partial_row_bytes=0)
    node = Node(setup, 3)
    assert node.layout["combine_room"] == 0
    assert node.layout["bytes"] == node.layout["combine_table"]
    idx = random_indices(setup, np.random.default_rng(3))
    check_run(node, count_all(setup, idx), len(idx[3]))


@pytest.mark.parametrize("shape", [*SHAPES, *WIDER])
def test_the_layout_holds_its_parts(shape: tuple[int, int]) -> None:
    setup = Setup(*shape, num_experts=2 * shape[0] * shape[1] + 1)
    node = Node(setup, 0)
    layout = node.layout
    like = setup.by_python(0, no_counts(setup), 0)
    sizes = {name: len(like[name]) for name in ARRAYS}
    sizes["dispatch_table"] = layout["dispatch_room"]
    sizes["combine_table"] = layout["combine_room"]
    ends = 0
    for name, size in sizes.items():  # in this order
        assert ends <= layout[name]
        assert layout[name] % (256 if "table" in name else 16) == 0
        assert layout[name] - ends < 256
        ends = layout[name] + size
    assert ends <= layout["bytes"] < ends + 256
    assert layout["bytes"] % 256 == 0


# -- the rooms of tables ---------------------------------------------------------------------------


def heaviest(setup: Setup, rank: int) -> tuple[RouteCounts, int]:
    """Counts for which a rank's tables have the most records: see planner/core/table_room.h."""
    n, m, most = setup.servers, setup.gpus_per_server, setup.num_max_tokens
    server, local = divmod(rank, m)
    to_server = np.zeros((n * m, n), dtype=np.int64)
    to_rank = np.zeros((n * m, n * m), dtype=np.int64)
    for other in range(n):
        if other == server:
            continue
        to_rank[rank, other * m] = to_server[rank, other] = most  # none of the others' tokens
        for source in range(m):  # the other way: all sources, most of them rows of the others
            tokens = 1 if source == local else most
            to_rank[other * m + source, rank] = to_server[other * m + source, server] = tokens
    for i in range(m):
        here = server * m + i
        to_rank[here, server * m : (server + 1) * m] = 1
        to_server[here, server] = 1 if m == 1 else 2
    copies = np.zeros((n * m, setup.num_experts), dtype=np.int64)
    for expert in reversed(range(setup.num_experts)):  # all by each rank's first expert
        copies[:, expert] = to_rank[:, setup.placement.owner[expert]]
    for expert in range(1, setup.num_experts):
        if setup.placement.owner[expert] == setup.placement.owner[expert - 1]:
            copies[:, expert] = 0
    return RouteCounts(copies, to_server, to_rank), most


@pytest.mark.parametrize("shape", [*SHAPES, *WIDER])
def test_the_rooms_are_reached_and_never_passed(shape: tuple[int, int]) -> None:
    num_ranks = shape[0] * shape[1]
    setup = Setup(*shape, num_experts=num_ranks, topk=32, num_max_tokens=1000)
    for rank in {0, num_ranks - 1, num_ranks // 2}:
        node = Node(setup, rank)
        counts, num_tokens = heaviest(setup, rank)
        check_run(node, counts, num_tokens)
        want = setup.by_python(rank, counts, num_tokens)
        assert len(want["dispatch_table"]) == node.layout["dispatch_room"]
        assert len(want["combine_table"]) == node.layout["combine_room"]


def test_random_tables_stay_within_their_rooms() -> None:
    rng = np.random.default_rng(5)
    nearest = [0.0, 0.0]
    for k in range(400):
        setup = random_setup((*SHAPES, *WIDER)[k % 12], k)
        rank = int(rng.integers(setup.num_ranks))
        layout = Node(setup, rank).layout
        idx = random_indices(setup, rng)
        made = setup.by_python(rank, count_all(setup, idx), len(idx[rank]))
        for op, part in enumerate(("dispatch", "combine")):
            share = len(made[f"{part}_table"]) / layout[f"{part}_room"]
            nearest[op] = max(nearest[op], share)
            assert share <= 1
    assert min(nearest) > 0.9


# -- as a node -------------------------------------------------------------------------------------


def test_a_graph_replays_it_with_new_counts(clean_driver: HostDriver) -> None:
    """Device -> host -> node -> device, as a captured dispatch does."""
    setup, driver = Setup(2, 2, num_experts=5, topk=3), clean_driver
    node, rank = Node(setup, 1), 1
    stream = driver.create_stream()
    counts = driver.allocate(node.counts.nbytes, coherent=False)
    results = driver.allocate(node.layout["bytes"], coherent=False)

    def work() -> None:
        driver.copy(node.counts.ctypes.data, counts, node.counts.nbytes, stream)
        driver.call_host(stream, node.planner.function, node.planner.data)
        driver.copy(results, node.out.ctypes.data, node.layout["bytes"], stream)

    graph = record_graph(driver, stream, work)
    assert node.planner.num_runs == 0
    rng = np.random.default_rng(2)
    given, seen = aligned(node.counts.nbytes), aligned(node.layout["bytes"])
    for replays in range(1, 5):
        idx = random_indices(setup, rng)
        found = count_all(setup, idx)
        node.give(found, len(idx[rank]))
        given[:] = node.counts.view(np.uint8)
        node.counts[:] = 0
        driver.copy(counts, given.ctypes.data, given.nbytes, stream)
        driver.replay(graph, stream)
        driver.copy(seen.ctypes.data, results, seen.nbytes, stream)
        driver.synchronize(stream)
        assert (node.planner.error, node.planner.num_runs) == ("", replays)
        node.out[:] = seen
        want = setup.by_python(rank, found, len(idx[rank]))
        assert node.made(want) == want
        assert StageTable(np.frombuffer(want["combine_table"], np.uint8)).header["rank"] == rank
    driver.destroy_graph(graph)
    driver.free(counts)
    driver.free(results)
    driver.destroy_stream(stream)


def test_errors_and_runs_are_read_while_it_runs() -> None:
    setup = Setup(4, 2, num_experts=8)
    node = Node(setup, 0)
    good = count_all(setup, random_indices(setup, np.random.default_rng(0)))
    node.give(good, setup.num_max_tokens + 1)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(node.planner.function)
    num_runs = 3000

    def run_all() -> None:
        for _ in range(num_runs):
            call(node.planner.data)

    thread = threading.Thread(target=run_all)
    seen = {node.planner.error}
    thread.start()
    last = 0
    while thread.is_alive() or last < num_runs:
        runs = node.planner.num_runs
        assert last <= runs <= num_runs
        last = runs
        seen.add(node.planner.error)
        node.planner.clear_error()
    thread.join()
    call(node.planner.data)
    assert seen | {node.planner.error} == {"", "rank 0 has 17 tokens, num_max_tokens is 16"}


def test_two_sizes_of_rows_differ_in_the_tables_alone() -> None:
    setup = Setup(2, 2, num_experts=4)
    counts = count_all(setup, random_indices(setup, np.random.default_rng(4)))
    small = setup.by_python(0, counts, 3)
    node = Node(replace(setup, row_bytes=4096, chunk_bytes=8192), 0)
    assert node.run(counts, setup.num_max_tokens) == ""
    got = node.made(small)
    assert [name for name in small if got[name] != small[name]] == [
        "dispatch_table",
        "combine_table",
    ]
