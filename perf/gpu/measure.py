"""Measures on one device: stages as shares of a copy, calls from launch to done, an all-to-all.

All ranks share one device here, its memory and its processors: these are figures of the kernels,
not of a network. GB is 1e9 bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_combine import Combine
from fastkern.device.virtual_launch import PreparedLaunch
from fastkern.device.virtual_moe import Dispatch
from fastkern.planner import Policy

from .bench import Bench, all_to_all_outputs, dispatch_outputs, poison_all
from .session import begin
from .stages import measured_alone, queue_rows
from .static_measures import static_latencies
from .timing import Timer

# Stages of an all-to-all in the order in which rows pass them, and what they are called.
_BETWEEN = {"pack": "pack", "put": "put", "receive": "redistribute", "land": "land"}
_WITHIN = {"push": "intra", "take": "intra"}


def copy(bench: Bench) -> None:
    """A large copy on the device: what the stages are shares of."""
    with bench.cluster((1, 1), 1) as cluster:
        memory, timer, size = cluster.allocations(), bench.timer(cluster), bench.scale.copy_bytes
        source, target = memory.empty(size, "source"), memory.empty(size, "target")
        block = bench.rng.integers(0, 256, min(size, 16 << 20), dtype=np.uint8)
        for at in range(0, size, len(block)):
            cluster.copier.write(source + at, block)
        times = timer.on_device(lambda: cluster.driver.copy(target, source, size, cluster.stream))
        bench.copy_rate = size / times.p50_us / 1e3
        case = f"{size >> 20} MiB on the device"
        bench.add("copy", case, times, bytes=size, GBps=bench.copy_rate)
        timer.close()
        memory.close()


def latencies(bench: Bench) -> None:
    """Dispatch and combine of 1, 16 and 128 tokens per rank on 8 ranks, launch to done."""
    most = bench.most_blocks()
    for blocks in sorted({min(2, most), min(8, most)}):
        with bench.cluster((2, 4), blocks) as cluster:
            timer = bench.timer(cluster)
            for tokens in (1, 16, 128):
                dispatch = bench.dispatch(cluster, tokens, num_experts=64, topk=8)
                dispatch.run()
                combine = bench.combine(cluster, dispatch)
                combine.run()
                for name, launch in (("dispatch", dispatch.launch), ("combine", combine.launch)):
                    enqueue = _enqueuing(cluster, launch)
                    device, host = timer.on_device(enqueue), timer.on_host(enqueue)
                    bench.settle(cluster)
                    case = f"{name}, {tokens} tokens per rank, {blocks} blocks"
                    bench.add("launch to done", case, device, host_p50_us=host.p50_us)
                combine.close()
                dispatch.close()
                dispatch.handle.close()
            timer.close()


def all_to_all(bench: Bench) -> None:
    """8 ranks in 2 servers, uniform but for oneself, several grids: bytes over time, by tier."""
    row_bytes = min(2 * bench.scale.hidden, bench.scale.call_bytes // 7)
    splits = np.full((8, 8), bench.scale.call_bytes // row_bytes // 7, dtype=np.int64)
    np.fill_diagonal(splits, 0)
    per_rank, within = int(splits[0].sum()) * row_bytes, int(splits[0, :4].sum()) * row_bytes
    inputs, most = bench.inputs(splits, row_bytes), bench.most_blocks()
    grids: list[tuple[int, Policy]] = [(max(1, most // 4), "whole"), (max(1, most // 2), "whole")]
    for blocks, policy in dict.fromkeys([*grids, (most, "whole"), (most, "direct")]):
        with bench.cluster((2, 4), blocks, policy) as cluster:
            call, timer = cluster.prepare_all_to_all(splits, row_bytes), bench.timer(cluster)
            call.write_inputs(inputs)
            poison_all(cluster, all_to_all_outputs(call))
            times = timer.on_device(_enqueuing(cluster, call.launch))
            bench.settle(cluster)
            case = f"2x4, {per_rank / 1e6:.1f} MB per rank, {policy}, {blocks} blocks"
            bench.check_rows(call, inputs, case)
            bench.add(
                "all-to-all",
                case,
                times,
                bytes=per_rank,
                algorithmic_GBps=per_rank / times.p50_us / 1e3,
                scale_up_GBps=within / times.p50_us / 1e3,
                scale_out_GBps=(per_rank - within) / times.p50_us / 1e3,
            )
            timer.close()
            call.close()


def all_to_all_stages(bench: Bench) -> None:
    """Each stage alone: of a call between two servers, and of one inside a server."""
    row_bytes, rows = 2 * bench.scale.hidden, bench.scale.stage_rows
    server = np.arange(8) // 4
    between = np.where(server[:, None] != server[None, :], rows // 4, 0)
    inside = np.full((8, 8), rows // 8)
    for shape, splits, queues in (((2, 4), between, _BETWEEN), ((1, 8), inside, _WITHIN)):
        with bench.cluster(shape, bench.most_blocks(), "whole") as cluster:
            call, timer = cluster.prepare_all_to_all(splits, row_bytes), bench.timer(cluster)
            inputs = bench.inputs(splits, row_bytes)
            call.write_inputs(inputs)
            call.run()
            poison_all(cluster, all_to_all_outputs(call))  # what a stage does not move shows
            tables = [call.plan.table(rank) for rank in range(8)]
            for queue, name in queues.items():
                moved = queue_rows(tables, queue) * row_bytes
                times = measured_alone(cluster, call.launch, tables, queue, timer.on_device)
                bench.add_share(name, f"all-to-all, {queue}", times, moved)
            bench.check_rows(call, inputs, "stages alone")
            timer.close()
            call.close()


def moe_stages(bench: Bench) -> None:
    """Stages of a dispatch and a combine in which every token goes once to each of 2x4 ranks."""
    with bench.cluster((2, 4), bench.most_blocks(), "whole") as cluster:
        timer = bench.timer(cluster)
        dispatch = bench.dispatch(cluster, bench.scale.stage_tokens, num_experts=8, topk=8)
        dispatch.run()
        _dispatch_stages(bench, cluster, timer, dispatch)
        combine = bench.combine(cluster, dispatch)
        combine.run()
        _combine_stages(bench, cluster, timer, combine)
        timer.close()
        combine.close()
        dispatch.close()
        dispatch.handle.close()


def _dispatch_stages(
    bench: Bench, cluster: VirtualCluster, timer: Timer, dispatch: Dispatch
) -> None:
    payload, row = 2 * bench.scale.hidden, dispatch.plan.row_bytes
    tables, total = [dispatch.plan.table(rank) for rank in range(8)], 8 * bench.scale.stage_tokens
    before = dispatch.read().recv
    poison_all(cluster, dispatch_outputs(dispatch))
    # A row crosses once, lands in one slot of its proxy and goes to three other ranks there; its
    # own server's ranks get it by push.
    for queue, name, row_size in (
        ("pack", "pack", row),
        ("push", "intra", 3 * row + payload),
        ("put", "put", row),
        ("receive", "redistribute", 3 * row + payload),
        ("land", "land", 3 * payload),
        ("take", "intra", 3 * payload),
    ):
        times = measured_alone(cluster, dispatch.launch, tables, queue, timer.on_device)
        bench.add_share(name, f"dispatch, {queue}", times, total * row_size)
    after = dispatch.read().recv
    if not all(torch.equal(a[0], b[0]) for a, b in zip(before, after, strict=True)):
        raise AssertionError("dispatch: its stages alone give other rows than the whole")


def _combine_stages(bench: Bench, cluster: VirtualCluster, timer: Timer, combine: Combine) -> None:
    values = 8 * bench.scale.stage_tokens * bench.scale.hidden
    before = combine.read()
    results = [int(address) for address in combine.launch.moe["result"]]
    poison_all(cluster, [(address, values // 8 * 2) for address in results])
    # Bytes read and written for a value, bf16 or a sum's fp32, halved: a copy does both.
    for queue, name, value_size in (
        ("pack", "reduce", 3 * (2 + 4) // 2),  # three ranks' sums, for the proxy
        ("push", "reduce", 3 * (2 + 4) // 2),  # and three for the owner
        ("sum", "reduce", (2 + 3 * 4 + 2) // 2),  # own and three ranks', to the wire
        ("put", "put", 2),
        ("receive", "redistribute", 2),
        ("reduce", "reduce", (2 + 3 * 4 + 2 + 2) // 2),  # the other server's too
    ):
        times = measured_alone(cluster, combine.launch, combine.tables, queue, timer.on_device)
        bench.add_share(name, f"combine, {queue}", times, values * value_size)
    if not all(map(torch.equal, before, combine.read())):
        raise AssertionError("combine: its stages alone give other sums than the whole")


def _enqueuing(cluster: VirtualCluster, launch: PreparedLaunch) -> Callable[[], None]:
    return lambda: cluster.enqueue(launch)


PARTS = (copy, latencies, static_latencies, all_to_all, all_to_all_stages, moe_stages)


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the measures one after the other; those that no time is left for are noted."""
    session = begin(argparse.ArgumentParser(description=__doc__), arguments)
    bench = Bench(session)
    try:
        for k, part in enumerate(PARTS):
            if session.time_is_up():
                left = ", ".join(p.__name__ for p in PARTS[k:])
                session.record.add_facts(measures_cut=f"no time for {left}")
                break
            part(bench)
    finally:
        session.driver.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
