"""Correctness cases one after the other: each is recorded, and the next runs whatever it did."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from fastkern.device.driver import Driver, DriverError
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.errors import WaitRecord
from fastkern.planner import Topology
from tests.device.virtual_cases import POLICIES, check_moe, check_random_traffic, options
from tests.device.virtual_sequences import (
    OPS,
    check_missing_rank,
    check_replays,
    check_withheld_flag,
)
from tests.device.virtual_static_cases import (
    CASES,
    PLANNERS,
    StaticCase,
    check_static_replays,
    check_steps,
)
from tests.device.virtual_static_failures import (
    check_missing_static_rank,
    check_withheld_static_flag,
)
from tests.moe_case_list import NAMED, random_cases
from tests.moe_cases import Case as MoeCase
from tests.moe_cases import Data
from tests.moe_tables import narrowed
from tests.reference import KINDS

from .session import Session

_TIMEOUT_S = 10.0  # of launches that should end
Withheld = Callable[[Driver, int, float], WaitRecord]


@dataclass(frozen=True)
class Case:
    """run raises where something is not right."""

    name: str
    run: Callable[[], None]


def run_cases(session: Session, group: str, cases: Iterable[Case]) -> int:
    """Run them until the time is up. Returns how many were wrong.

    A failure of the driver is recorded and raised: what comes after it in the process would fail
    as well.
    """
    wrong = 0
    for case in cases:
        if session.time_is_up():
            session.record.add_facts(**{f"{group}_cut": f"no more time at {case.name}"})
            break
        start = time.monotonic()
        error: str = ""
        failed: DriverError | None = None
        try:
            case.run()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            failed = failure if isinstance(failure, DriverError) else None
            print(f"\n{group} {case.name}", traceback.format_exc(), sep="\n", flush=True)
        session.record.add_case(group, case.name, not error, time.monotonic() - start, error)
        wrong += bool(error)
        if failed is not None:
            session.record.add_facts(**{f"{group}_cut": f"the driver failed at {case.name}"})
            raise failed
    return wrong


def some_of(cases: Iterable[Case], most: int) -> list[Case]:
    """At most so many of them, the first among them, spread over all."""
    found = list(cases)
    if len(found) <= most:
        return found
    return [found[k * len(found) // most] for k in range(most)]


def all_to_all_cases(session: Session) -> Iterator[Case]:
    """Every shape under every policy, each with another grid: random traffic of all kinds."""
    scale, rng = session.scale, np.random.default_rng(session.seed)
    grids = _grids(session)
    for turn, (shape, policy) in enumerate(itertools.product(scale.shapes, POLICIES)):
        blocks, lanes = next(grids)

        def run(
            shape: tuple[int, int] = shape,
            policy: str = policy,
            blocks: int = blocks,
            lanes: int = lanes,
            turn: int = turn,
        ) -> None:
            given = options(
                policy=policy,
                chunk_bytes=(4096, 100, 131072)[turn % 3],
                progress_timeout_s=_TIMEOUT_S,
            )
            grid = _fitting(session, shape, blocks), lanes
            with VirtualCluster(session.driver, Topology(*shape), *grid, options=given) as cluster:
                for k in range(3):
                    kind = KINDS[(3 * turn + k) % len(KINDS)]
                    check_random_traffic(cluster, rng, scale.max_rows, scale.max_width, kind)

        yield Case(f"{_text(shape)} {policy}, {blocks} blocks, {lanes} lanes", run)


def moe_cases(session: Session) -> Iterator[Case]:
    """One of real width, named calls (every layout, dtype, wire, top-k, map), random ones."""
    scale = session.scale
    named = NAMED[session.seed % 3 :: 3] if scale.dry else NAMED
    drawn = random_cases(session.seed, 10 if scale.dry else 120)
    large = MoeCase(
        "real width",
        session.seed,
        tokens="equal",
        num_tokens=scale.stage_tokens // 16 or 1,
        topk=8,
        num_experts=64,
        choose="distinct",
        payload="bfloat16",
        width=scale.hidden,
        summed="bfloat16",
        sum_width=scale.hidden,
    )
    grids = _grids(session)
    for turn, case in enumerate([large, *named, *map(narrowed, drawn)]):
        shape = scale.shapes[-1 - turn % len(scale.shapes)]
        policy, (blocks, lanes) = POLICIES[turn % len(POLICIES)], next(grids)

        def run(
            case: MoeCase = case,
            shape: tuple[int, int] = shape,
            policy: str = policy,
            blocks: int = blocks,
            lanes: int = lanes,
        ) -> None:
            given = options(policy=policy, chunk_bytes=4096, progress_timeout_s=_TIMEOUT_S)
            grid = _fitting(session, shape, blocks), lanes
            with VirtualCluster(session.driver, Topology(*shape), *grid, options=given) as cluster:
                check_moe(cluster, Data(case, shape[0], shape[0] * shape[1]))

        yield Case(f"{case.name}, {_text(shape)} {policy}, {blocks} blocks, {lanes} lanes", run)


def static_cases(session: Session) -> Iterator[Case]:
    """Static exchanges of every shape and planner: run, and captured and replayed with other
    topk_idx, counts and ranks without tokens, eager calls of the cluster between. One of real
    width first."""
    scale, rng = session.scale, np.random.default_rng(session.seed)
    large = StaticCase(
        topk=8,
        num_experts=64,
        most=max(2, scale.stage_tokens // 128),
        dtypes=(torch.bfloat16,),
        width=scale.hidden,
    )
    first = session.seed % len(CASES)
    turns = itertools.cycle(CASES[first:] + CASES[:first])
    drawn = [(shape, next(turns)) for shape in scale.shapes]
    grids = _grids(session)
    for (shape, given), planner in itertools.product([(scale.shapes[-1], large), *drawn], PLANNERS):
        case, (blocks, lanes) = replace(given, planner=planner), next(grids)

        def run(
            shape: tuple[int, int] = shape,
            case: StaticCase = case,
            blocks: int = blocks,
            lanes: int = lanes,
        ) -> None:
            given = options(chunk_bytes=4096, progress_timeout_s=_TIMEOUT_S)
            grid = _fitting(session, shape, blocks), lanes
            with VirtualCluster(session.driver, Topology(*shape), *grid, options=given) as cluster:
                check_steps(cluster, case, 3, rng)
                check_static_replays(cluster, case, 5, rng)

        what = f"{case.layout} layout, top {case.topk}, {_text(shape)}"
        yield Case(f"{what} planned on the {planner}, {blocks} blocks, {lanes} lanes", run)


def replay_cases(session: Session) -> Iterator[Case]:
    """Captured calls replayed with other rows and tables, eager calls between."""
    scale, rng = session.scale, np.random.default_rng(session.seed)
    for shape, policy in (((2, 2), "whole"), ((1, 3), "auto"), (scale.shapes[-1], "split")):
        if not scale.possible(shape):
            continue

        def run(shape: tuple[int, int] = shape, policy: str = policy) -> None:
            given = options(policy=policy, chunk_bytes=2000, progress_timeout_s=_TIMEOUT_S)
            with VirtualCluster(
                session.driver, Topology(*shape), 2, scale.lanes[0], options=given
            ) as cluster:
                check_replays(cluster, rng, most_rows=scale.max_rows, row_bytes=900)

        yield Case(f"{_text(shape)} {policy}", run)


def deadline_cases(session: Session) -> Iterator[Case]:
    """A rank's blocks do not run, or a flag is not raised: a record, and an end to the cluster.
    None where a cluster has one rank."""
    shapes = [shape for shape in ((2, 2), (1, 3)) if session.scale.possible(shape)]
    for op, shape in itertools.product(OPS, shapes):

        def run(op: str = op, shape: tuple[int, int] = shape) -> None:
            timeout_s = session.scale.deadline_s
            print(check_missing_rank(session.driver, Topology(*shape), op, 2, timeout_s))

        yield Case(f"{op}, {_text(shape)}", run)
    for planner, shape in itertools.product(PLANNERS, shapes):

        def run_static(planner: str = planner, shape: tuple[int, int] = shape) -> None:
            timeout_s = 2 * session.scale.deadline_s  # the others begin within it
            topology = Topology(*shape)
            print(check_missing_static_rank(session.driver, topology, planner, 2, timeout_s))

        yield Case(f"static exchange planned on the {planner}, {_text(shape)}", run_static)
    for blocks, (what, check) in itertools.product(
        (1, 2) if session.scale.possible((2, 2)) else (),
        (("", check_withheld_flag), (" from a static one", check_withheld_static_flag)),
    ):

        def withhold(blocks: int = blocks, check: Withheld = check) -> None:
            print(check(session.driver, blocks, session.scale.deadline_s))

        yield Case(f"a flag is withheld{what}, {blocks} blocks", withhold)


GROUPS: dict[str, Callable[[Session], Iterator[Case]]] = {
    "all_to_all": all_to_all_cases,
    "moe": moe_cases,
    "static": static_cases,
    "replays": replay_cases,
    "deadlines": deadline_cases,
}


def _text(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _grids(session: Session) -> Iterator[tuple[int, int]]:
    """Blocks and lanes in turn: 1 block to as many as fit 8 ranks."""
    lanes, ranks = session.scale.lanes, session.scale.ranks
    with VirtualCluster(session.driver, Topology(1, ranks), num_lanes=lanes[0]) as cluster:
        blocks = session.scale.blocks(cluster.most_blocks)
    torch.manual_seed(session.seed)
    return itertools.cycle(
        (blocks[k % len(blocks)], lanes[(k + k // len(blocks)) % len(lanes)])
        for k in range(len(blocks) * len(lanes))
    )


def _fitting(session: Session, shape: tuple[int, int], blocks: int) -> int:
    """As many blocks per rank where ranks are few as fill the device with 8 of them."""
    num_ranks = shape[0] * shape[1]
    return blocks if session.scale.dry or blocks < 3 else blocks * 8 // num_ranks
