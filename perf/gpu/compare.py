"""The kernels in Triton beside those in C++: each operation by both, taking turns on one device.

A turn is a few runs of one, waited for before the other begins: two persistent kernels that wait
for their blocks to be resident must not share the device. What both have given is equal bit by bit,
or the measure is of something else. Each has blocks of as many lanes as it has by default.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_handle import handle_and_route
from fastkern.device.virtual_launch import PreparedLaunch
from fastkern.device.virtual_moe import Dispatch
from fastkern.moe.dispatch_arguments import DispatchOptions, prepare_dispatch

from .bench import Bench
from .cases import Case, run_cases
from .session import Session, begin, open_kernels, scale_of
from .timing import Timer, times_of

_ROUNDS = 5
_TOPK, _NUM_EXPERTS = 8, 64
_POISON = 0xAA


@dataclass(frozen=True)
class Side:
    """One of the two at work on an operation.

    enqueue: puts it into the cluster's stream. results: what it has given, every rank's; waits.
    """

    bench: Bench
    cluster: VirtualCluster
    enqueue: Callable[[], None]
    results: Callable[[], Sequence[torch.Tensor]]


def all_to_all(bench: Bench, made: ExitStack) -> Side:
    """8 ranks in 2 servers, uniform but for oneself, on as many blocks as fit."""
    ranks = bench.scale.ranks
    row_bytes = min(2 * bench.scale.hidden, bench.scale.call_bytes // 7)
    splits = np.full((ranks, ranks), bench.scale.call_bytes // row_bytes // 7, dtype=np.int64)
    if ranks > 1:
        np.fill_diagonal(splits, 0)
    cluster = made.enter_context(bench.cluster(_shape(bench), bench.most_blocks(), "whole"))
    call = cluster.prepare_all_to_all(splits, row_bytes)
    made.callback(call.close)
    inputs = bench.inputs(splits, row_bytes)
    call.write_inputs(inputs)

    def results() -> Sequence[torch.Tensor]:
        bench.settle(cluster)
        bench.check_rows(call, inputs, f"all-to-all, {bench.session.driver.kernels}")
        return call.read_outputs((row_bytes,), torch.uint8)

    return Side(bench, cluster, _enqueuing(cluster, call.launch), results)


def route(bench: Bench, made: ExitStack) -> Side:
    """The three kernels of one rank, for 4096 tokens, top-8 of 64 experts."""
    cluster = made.enter_context(bench.cluster(_shape(bench), 1, fill_byte=_POISON))
    tokens, rng = bench.scale.stage_rows, torch.Generator().manual_seed(bench.session.seed)
    x, options = torch.zeros(tokens, 1), DispatchOptions(num_experts=_NUM_EXPERTS)
    calls = []
    for _ in range(cluster.num_ranks):
        idx = torch.rand(tokens, _NUM_EXPERTS, generator=rng).argsort(1)[:, :_TOPK].contiguous()
        calls.append(prepare_dispatch([x], idx, None, options, None, None, None, bench.scale.ranks))
    handle, routed = handle_and_route(cluster, calls)
    made.callback(handle.close)
    made.callback(routed.close)

    def results() -> Sequence[torch.Tensor]:
        cluster.driver.synchronize(cluster.stream)
        return [handle.read(rank) for rank in range(cluster.num_ranks)]

    return Side(bench, cluster, lambda: routed.enqueue(0), results)


def dispatch(bench: Bench, made: ExitStack, tokens: int, blocks: int) -> Side:
    """Of bf16 tokens, top-8 of 64 experts."""
    cluster = made.enter_context(bench.cluster(_shape(bench), blocks))
    call = _dispatched(bench, made, cluster, tokens)

    def results() -> Sequence[torch.Tensor]:
        bench.settle(cluster)
        return [tensor for recv in call.read().recv for tensor in recv]

    return Side(bench, cluster, _enqueuing(cluster, call.launch), results)


def combine(bench: Bench, made: ExitStack, tokens: int, blocks: int) -> Side:
    """The combine of such a dispatch, weights applied."""
    cluster = made.enter_context(bench.cluster(_shape(bench), blocks))
    call = bench.combine(cluster, _dispatched(bench, made, cluster, tokens))
    made.callback(call.close)
    call.run()

    def results() -> Sequence[torch.Tensor]:
        bench.settle(cluster)
        return call.read()

    return Side(bench, cluster, _enqueuing(cluster, call.launch), results)


def _dispatched(bench: Bench, made: ExitStack, cluster: VirtualCluster, tokens: int) -> Dispatch:
    call = bench.dispatch(cluster, tokens, _NUM_EXPERTS, _TOPK)
    made.callback(call.handle.close)
    made.callback(call.close)
    call.run()
    return call


def _shape(bench: Bench) -> tuple[int, int]:
    return (2, bench.scale.ranks // 2) if bench.scale.ranks > 1 else (1, 1)


def _enqueuing(cluster: VirtualCluster, launch: PreparedLaunch) -> Callable[[], None]:
    return lambda: cluster.enqueue(launch)


Operation = Callable[[Bench, ExitStack], Side]


def operations(sides: Sequence[Bench]) -> Iterator[tuple[str, str, list[Operation]]]:
    """Names, cases, and how each side does it: of many rows on all blocks that fit, of few rows on
    as many blocks on both sides."""
    scale, most = sides[0].scale, [bench.most_blocks() for bench in sides]
    few = [min(8, *most)] * len(sides)
    megabytes = f"{scale.call_bytes / 1e6:.1f} MB per rank"
    yield "all-to-all", f"{megabytes}, {_blocks(most)}", [all_to_all] * len(sides)
    yield "route", f"{scale.stage_rows} tokens of a rank", [route] * len(sides)
    for tokens, blocks in ((max(1, scale.stage_tokens // 8), few), (scale.stage_tokens, most)):
        for name, operation in (("dispatch", dispatch), ("combine", combine)):
            done = [partial(operation, tokens=tokens, blocks=n) for n in blocks]
            yield name, f"{tokens} tokens per rank, {_blocks(blocks)}", done


def _blocks(blocks: Sequence[int]) -> str:
    return f"{' and '.join(map(str, dict.fromkeys(blocks)))} blocks"


def compare(name: str, case: str, given: Sequence[tuple[Bench, Operation]]) -> None:
    """One operation, by C++ and then Triton. Raises AssertionError where they give other bits."""
    with ExitStack() as made:
        sides = [operation(bench, made) for bench, operation in given]
        timers = [side.bench.timer(side.cluster) for side in sides]
        for timer in timers:
            made.callback(timer.close)
        for side, timer in zip(sides, timers, strict=True):
            timer.warm_up(side.enqueue)
        values_us = _take_turns(sides, timers)
        cxx, triton = (side.results() for side in sides)
        if len(cxx) != len(triton) or not all(map(torch.equal, cxx, triton)):
            raise AssertionError(f"{name}, {case}: C++ and Triton give other bits")
    before, times = map(times_of, values_us)
    figures = {f"cxx_{key}": value for key, value in before.figures().items()}
    given[-1][0].add(name, case, times, **figures, over_cxx=times.p50_us / before.p50_us)


def _take_turns(sides: Sequence[Side], timers: Sequence[Timer]) -> list[list[float]]:
    repeats = sides[0].bench.scale.repeats
    rounds = min(_ROUNDS, repeats)
    values_us: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds):
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for k in order:
            values_us[k] += timers[k].samples_us(sides[k].enqueue, repeats // rounds)
    return values_us


@contextmanager
def both(session: Session) -> Iterator[list[Bench]]:
    """The session's kernels, those in C++, and those in Triton on the same device, in sizes that
    both can do."""
    driver = open_kernels(session.args.target, "triton")
    try:
        other = replace(session, driver=driver, scale=scale_of(driver))
        scale = replace(other.scale, lanes=session.scale.lanes)
        yield [Bench(replace(session, scale=scale)), Bench(other)]
    finally:
        driver.close()


def cases(sides: Sequence[Bench]) -> Iterator[Case]:
    """A case for each measure: it is right where both give the same bits."""
    for name, case, done in operations(sides):
        given = list(zip(sides, done, strict=True))
        yield Case(f"{name}, {case}", partial(compare, name, case, given))


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes one measure after the other. Returns 1 where the two gave other bits."""
    session = begin(argparse.ArgumentParser(description=__doc__), arguments)
    try:
        if session.driver.kernels != "cxx":
            raise SystemExit("both kernels are measured: leave --kernels out")
        with both(session) as sides:
            return 1 if run_cases(session, "same_bits", cases(sides)) else 0
    finally:
        session.driver.close()


if __name__ == "__main__":
    raise SystemExit(main())
