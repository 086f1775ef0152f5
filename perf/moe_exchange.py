"""Deduplicated dispatch and combine beside one copy per expert, on the shaped transport.

python -m perf.moe_exchange: 4 servers x 2 ranks as processes, recorded routing (`--recorded FILE`,
else of a model trained now) and the named workloads, bf16 rows, both directions apart, sums on the
wire in bf16 and in fp32. Both ways use one communicator and take turns; every call is planned anew
and its counts are exchanged inside the timing; a call's time is the slowest rank's, from a common
start. The copies' local permutes, and their weighing and summing, are left out of their times; all
that dispatch and combine do is inside theirs. What arrives is checked in every repeat.

Predicted before measuring: time = rows of the busiest server over its NICs, times bytes of a row,
over the rate; the ratio is that of copies over that of deduplicated rows. That time is also the
bound.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastkern
from fastkern.moe.placement import Placement
from perf.copies import Copies
from perf.moe_cases import RECORDED, Case, named_cases, obtain_recorded, recorded_cases
from perf.moe_report import COPIES, ONCE, WAYS, Way, csv_rows, predict, row_bytes, show
from perf.ranks import run_ranks
from perf.routed_rows import RoutedRows, routed_rows
from perf.rows import append
from perf.workloads import WORKLOADS, Shape

# -- measurement -----------------------------------------------------------------------------------


@dataclass
class Timer:
    """Begin and end of timed calls on this rank, from a common start each."""

    comm: fastkern.Communicator
    spans: list[tuple[Way, float, float]] = field(default_factory=list)

    def run(self, way: Way, call: Any) -> Any:
        """call()'s result."""
        self.comm.forget_plan()
        self.comm.barrier()
        begin = time.monotonic()
        result = call()
        self.spans.append((way, begin, time.monotonic()))
        return result

    def slowest_us(self) -> list[tuple[Way, float]]:
        """Microseconds of each call, over all ranks. Collective."""
        everyone: list[Any] = [None] * self.comm.num_ranks
        dist.all_gather_object(everyone, self.spans)
        return [
            (each[0][0], (max(e for _, _, e in each) - min(b for _, b, _ in each)) * 1e6)
            for each in zip(*everyone, strict=True)
        ]


def measure(
    rank: int, num_ranks: int, o: argparse.Namespace, cases: list[Case]
) -> list[dict[Way, list[float]]]:
    """For each case and way, microseconds of each repeat."""
    transport = fastkern.shaped(
        scale_up_GBps=o.scale_up * 1e-3, scale_out_GBps=o.scale_out * 1e-3, alpha_us=o.alpha_us
    )
    found = []
    with fastkern.Communicator(servers=o.servers, transport=transport) as comm:
        for case in cases:
            times: dict[Way, list[float]] = {way: [] for way in WAYS}
            placement = Placement(case.num_experts, num_ranks)
            # One more at first, which touches its pages.
            for repeat, routing in enumerate(case.routings[:1] + case.routings):
                topk_idx = torch.from_numpy(routing[rank])
                torch.manual_seed(1000 * repeat + rank)
                x = torch.randn(len(topk_idx), o.hidden).bfloat16()
                weights = torch.rand(topk_idx.shape).masked_fill(topk_idx < 0, float("nan"))
                timer = Timer(comm)
                moved = one_call(timer, placement, x, topk_idx, weights)
                check_moved(moved, routed_rows(routing, placement.owner, o.servers), case.top_k, o)
                if repeat:
                    for way, took in timer.slowest_us():
                        times[way].append(took)
            found.append(times)
    return found


def one_call(
    timer: Timer, placement: Placement, x: torch.Tensor, topk_idx: torch.Tensor, weights: Any
) -> Any:
    """Both directions both ways, checked. Returns what dispatch says it moved from this rank."""
    comm = timer.comm
    copies = Copies(comm, placement, topk_idx)
    rows = copies.permute(x)
    received = copies.by_expert(timer.run(COPIES[0], lambda: copies.send(rows)))
    recv_x, recv_weights, counts, handle = timer.run(
        ONCE[0],
        lambda: comm.dispatch(x, topk_idx, weights, num_experts=placement.num_experts),
    )
    assert torch.equal(recv_x, received), "dispatch and the copies received different rows"

    # Experts multiply by a number of their own, so that each rank knows what must come back.
    gain = 2.0 ** -(torch.arange(placement.num_experts) % 4)
    own_gain = gain[placement.experts_of(comm.rank)].repeat_interleave(counts)
    expert_out = (recv_x.float() * own_gain[:, None]).bfloat16()
    factor = (torch.where(topk_idx >= 0, weights * gain[topk_idx], 0.0)).sum(1, keepdim=True)
    expected = x.float() * factor

    rows = copies.by_source(expert_out)
    returned = timer.run(COPIES[1], lambda: copies.send_back(rows))
    check(copies.weigh(returned, weights.nan_to_num()), expected, "copies")
    for way, wire in zip(ONCE[1:], (torch.bfloat16, torch.float32), strict=True):
        result = timer.run(
            way,
            lambda wire=wire: comm.combine(
                expert_out, handle, weights=recv_weights, wire_dtype=wire
            ),
        )
        check(result, expected, f"combine with {wire} on the wire")
    moved = handle.stats
    handle.release()
    return moved


def check_moved(moved: Any, rows: RoutedRows, top_k: int, o: argparse.Namespace) -> None:
    """What all ranks moved over scale-out is what the prediction counted. Collective."""
    sent = torch.tensor([moved.scale_out_rows])
    dist.all_reduce(sent)
    told = (int(sent), moved.row_bytes)
    counted = (rows.scale_out_rows(True), row_bytes(ONCE[0], o.hidden, top_k))
    assert told == counted, f"dispatch moved (rows, row bytes) {told}, predicted {counted}"


def check(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal up to the rounding of bf16 sums."""
    assert torch.allclose(result.float(), expected, rtol=2**-6, atol=2**-6), f"{what}: wrong sums"


def training_options(o: argparse.Namespace, top_k: int, steps: int) -> list[str]:
    """Of `fastkern train-demo`: a model of the same shape as the measurement."""
    given = {
        "servers": o.servers,
        "ranks-per-server": o.per_server,
        "experts": o.experts,
        "top-k": top_k,
        "tokens-per-rank": o.tokens,
        "steps": steps,
        "seed": o.seed,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def main() -> None:
    """Predict, measure, print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--per-server", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="per rank")
    parser.add_argument("--hidden", type=int, default=2048, help="bf16 numbers in a row")
    parser.add_argument("--experts", type=int, default=64, help="of the named workloads")
    parser.add_argument("--top-k", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--every", action="store_true", help="every workload at every top-k")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these workloads")
    parser.add_argument("--recorded", type=Path, help="file of `fastkern train-demo --record`")
    parser.add_argument("--scale-out", type=float, default=5.0, help="MB/s per rank")
    parser.add_argument("--scale-up", type=float, default=45.0, help="MB/s per rank")
    parser.add_argument("--alpha-us", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls, after one more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few small cases, in seconds")
    parser.add_argument("--csv", action="store_true", help="append rows to perf/results.csv")
    o = parser.parse_args()
    if o.quick:
        o.tokens, o.hidden, o.repeats, o.top_k = 32, 1024, 2, [8]
        o.only = o.only or [RECORDED, "uniform", "hot rank"]
    if o.servers < 2:
        parser.error("nothing is between servers with fewer than 2")
    if unknown := set(o.only or ()) - {RECORDED, *WORKLOADS}:
        parser.error(
            f"no workload {', '.join(unknown)}; there are {RECORDED}, {', '.join(WORKLOADS)}"
        )
    num_ranks, top_ks = o.servers * o.per_server, sorted(o.top_k)
    shape = Shape(num_ranks, o.tokens, o.experts, top_ks[-1], o.seed)
    cases, note = [], "recorded: not asked for"
    if not o.only or RECORDED in o.only:
        steps = 5 if o.quick else 25
        recorded, source = obtain_recorded(o.recorded, training_options(o, top_ks[-1], steps))
        note = f"recorded: {source}"
        if recorded is not None:
            cases = recorded_cases(recorded, num_ranks, o.tokens, top_ks, o.repeats)
    names = [name for name in WORKLOADS if not o.only or name in o.only]
    try:
        cases += named_cases(shape, names, top_ks, o.repeats, o.every)
    except ValueError as error:  # a workload that cannot be had at these sizes
        parser.error(str(error))
    figures = [predict(case, o) for case in cases]
    times = run_ranks(num_ranks, measure, o, cases)[0]
    title = (
        f"one copy per expert (copies) beside one row per server (once): {o.servers} x "
        f"{o.per_server} ranks, {o.tokens} tokens of {2 * o.hidden} bytes, "
        f"{o.scale_out:g} MB/s out and {o.scale_up:g} MB/s up per rank"
    )
    show(figures, times, title)
    print(note)
    if o.csv:
        append(csv_rows(figures, times, o.servers, o.per_server))


if __name__ == "__main__":
    main()
