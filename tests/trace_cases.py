"""Traces of calls on ranks, on the host and on devices: every item once, and no other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fastkern import Communicator, Trace
from fastkern.planner.table import QUEUES
from fastkern.tracing import TraceLog
from tests.test_moe_calls import message, routing

WIDTH = 5  # float32 values of a row
SPLITS = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3]]


def exchange(comm: Communicator, num_blocks: int | None = None) -> None:
    """An all-to-all by SPLITS, whose rows are right."""
    mine = SPLITS[comm.rank]
    theirs = [splits[comm.rank] for splits in SPLITS]
    x = torch.full((sum(mine), WIDTH), float(comm.rank), device=comm.device)
    out = torch.empty(sum(theirs), WIDTH, device=comm.device)
    comm.all_to_all_single(out, x, theirs, mine, num_blocks=num_blocks)
    assert out[:, 0].tolist() == [src for src in range(4) for _ in range(theirs[src])]


def log_of(trace: Trace) -> TraceLog:
    found = trace._log
    assert found is not None
    return found


def items_of_table(comm: Communicator) -> Counter[tuple[int, ...]]:
    """This rank's items with rows in a call by SPLITS: queue, stage, chunk, peer, bytes."""
    _, table = comm._calls.plan(SPLITS, WIDTH * 4)
    streams, segments = table.records("streams"), table.records("segments")
    found: Counter[tuple[int, ...]] = Counter()
    for q, queue in enumerate(table.queues):
        for k in range(queue["num_stages"]):
            stage = table.records("stages")[queue["first_stage"] + k]
            for chunk in range(stage["num_chunks"]):
                for stream in streams[stage["first_stream"] :][: stage["num_streams"]]:
                    first = chunk * int(stream["chunk_rows"])
                    rows = min(int(stream["chunk_rows"]), int(stream["num_rows"]) - first)
                    own = segments[stream["first_segment"] :][: stream["num_segments"]]
                    end = first + rows
                    if any(
                        g["stream_row"] < end and g["stream_row"] + g["num_rows"] > first
                        for g in own
                    ):
                        found[q, k, chunk, int(stream["peer"]), rows * WIDTH * 4] += 1
    return found


def traced_calls(comm: Communicator, folder: str) -> dict[str, Any]:
    """Five launches in a span, one before and one after it; what all ranks' events are checked
    for together."""
    exchange(comm)
    with comm.trace() as trace:
        exchange(comm, 1)
        exchange(comm, 3)
        x, idx, weights = routing(comm.rank, 9, 3, 6)
        recv, recv_weights, _, handle = comm.dispatch(x, idx, weights, num_experts=6, num_blocks=2)
        comm.combine(recv, handle, weights=recv_weights)
        work = comm.all_to_all_single(torch.empty(4), torch.ones(4), async_op=True)
    exchange(comm)
    assert work is not None
    work.wait()
    log = log_of(trace)
    assert log.num_dropped == trace.num_dropped == 0
    assert [(launch.op, launch.num_blocks) for launch in log.launches.values()] == [
        ("all_to_all_single", 1),
        ("all_to_all_single", 3),
        ("dispatch", 2),
        ("combine", 3),
        ("all_to_all_single", 3),
    ]
    calls = [launch.call for launch in log.launches.values()]
    assert calls == list(range(calls[0], calls[0] + 5))
    events = trace.events
    assert set(events["epoch"].tolist()) == set(log.launches)
    assert (events["end_ns"] >= events["begin_ns"]).all()
    assert (events["begin_ns"][1:] >= events["begin_ns"][:-1]).all()
    ends = 0
    for epoch, launch in log.launches.items():  # launches follow one another
        mine = events[events["epoch"] == epoch]
        assert int(mine["begin_ns"].min()) >= ends
        ends = int(mine["end_ns"].max())
        assert set(mine["block"].tolist()) <= set(range(launch.num_blocks))
        for block in range(launch.num_blocks):  # a block does one thing at a time
            own = mine[mine["block"] == block]
            assert (own["begin_ns"][1:] >= own["end_ns"][:-1]).all()
    wanted = items_of_table(comm)
    for epoch in list(log.launches)[:2]:
        mine = events[events["epoch"] == epoch]
        keys = mine[["queue", "stage", "chunk", "peer", "bytes"]].tolist()
        assert Counter(keys) == wanted
    first = events[events["epoch"] == min(log.launches)]
    put = first[first["queue"] == QUEUES.index("put")]
    trace.save(Path(folder) / f"rank{comm.rank}.json")
    trace.save(str(Path(folder) / f"rank{comm.rank}.json.gz"))
    return {
        "put_bytes": int(put["bytes"].sum()),
        "begin_ns": events["begin_ns"].tolist(),
        "end_ns": events["end_ns"].tolist(),
        "queues": sorted({QUEUES[queue] for queue, *_ in wanted}),
    }


def bounded(comm: Communicator) -> None:
    """Events past the most are counted, over launches, and the kernels do their work."""
    total = sum(items_of_table(comm).values())
    with comm.trace(max_events=total + 3) as trace:
        for _ in range(3):
            exchange(comm)
    assert len(trace.events) == total + 3
    assert trace.num_dropped == 2 * total - 3
    assert trace.events["end_ns"].all()
    with comm.trace(max_events=1) as trace:  # nothing is left of the last one
        exchange(comm)
    assert (len(trace.events), trace.num_dropped) == (1, total - 1)
    with comm.trace() as trace:
        pass
    assert (len(trace.events), trace.num_dropped) == (0, 0)


def misused(comm: Communicator) -> list[str]:
    """What is said of traces that cannot be; calls work on."""
    trace = comm.trace()
    said = [
        message(trace.stop),
        message(lambda: trace.events),
        message(lambda: trace.save("/nowhere")),
        message(lambda: comm.trace(max_events=0)),
        message(lambda: comm.trace(max_events=1.5)),
    ]
    trace.start()
    said.append(message(comm.trace().start))
    said.append(message(trace.start))
    exchange(comm)
    said.append(message(lambda: trace.events))
    trace.stop()
    assert len(trace.events) == sum(items_of_table(comm).values())
    try:
        with comm.trace() as second:
            exchange(comm)
            raise KeyError("mine")
    except KeyError:
        assert len(second.events) == len(trace.events)
    exchange(comm)
    return said


MISUSE = (
    "FastkernError: no trace of this communicator is on",
    "ValueError: the trace has not been stopped: there are no events yet",
    "ValueError: the trace has not been stopped: there are no events yet",
    "ValueError: max_events must be 1 to 67108864, not 0",
    "TypeError: max_events must be a whole number, not 1.5",
    "FastkernError: a trace of this communicator is on already",
    "FastkernError: a trace of this communicator is on already",
    "ValueError: the trace has not been stopped: there are no events yet",
)


def closed_within(comm: Communicator) -> None:
    """A communicator that ends in the span leaves what there was."""
    with comm.trace() as trace:
        exchange(comm)
        total = sum(items_of_table(comm).values())
        comm.close()
    assert len(trace.events) == total
    assert message(trace.stop).startswith("FastkernError: no trace")
    assert message(comm.trace().start) == "ClosedError: the communicator is closed"


def check_files(folder: Path, ranks: list[dict[str, Any]], one_clock: bool) -> None:
    """What the ranks have saved, alone and merged."""
    import fastkern

    paths = [folder / f"rank{rank}.json" for rank in range(4)]
    fastkern.merge_traces(paths, folder / "all.json.gz")
    fastkern.merge_traces([folder / "all.json.gz"], folder / "all.json")
    whole = json.loads((folder / "all.json").read_text())
    assert whole["fastkern"]["ranks"] == [0, 1, 2, 3]
    first = min(found["begin_ns"][0] for found in ranks)
    for rank, (path, found) in enumerate(zip(paths, ranks, strict=True)):
        alone = json.loads(path.read_text())
        assert {event["pid"] for event in alone["traceEvents"]} == {rank}
        items = check_trace(alone, rank)
        assert [round(e["ts"] * 1e3) for e in items] == [
            t - found["begin_ns"][0] for t in found["begin_ns"]
        ]
        assert [round(e["dur"] * 1e3) for e in items] == [
            end - t for t, end in zip(found["begin_ns"], found["end_ns"], strict=True)
        ]
        within = [e for e in whole["traceEvents"] if e["pid"] == rank]
        assert len(within) == len(alone["traceEvents"])
        shifted = check_trace({**whole, "traceEvents": within}, rank)
        if one_clock:
            starts = [round(e["ts"] * 1e3) for e in shifted]
            assert starts == [t - first for t in found["begin_ns"]]


def check_trace(trace: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """One rank's part of a file; its items."""
    events = trace["traceEvents"]
    names = {(e["name"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert names["process_name", 0] == f"rank {rank}"
    items = [e for e in events if e["ph"] == "X" and e["cat"] != "call"]
    calls = [e for e in events if e["ph"] == "X" and e["cat"] == "call"]
    assert {names["thread_name", e["tid"]] for e in calls} == {"calls"}
    for block in {e["tid"] for e in items}:
        assert names["thread_name", block] == f"block {block}"
    assert [e["name"].split(",")[0] for e in calls] == [
        "all_to_all_single",
        "all_to_all_single",
        "dispatch",
        "combine",
        "all_to_all_single",
    ]
    for call in calls:
        own = [e for e in items if e["args"]["call"] == call["args"]["call"]]
        assert {e["args"]["op"] for e in own} == {call["args"]["op"]}
        assert min(e["ts"] for e in own) == call["ts"]
        assert abs(max(e["ts"] + e["dur"] for e in own) - call["ts"] - call["dur"]) < 0.01
    for e in items:
        args = e["args"]
        arrow = {"put": "->", "pack": "->", "push": "->", "sum": "", "reduce": ""}
        way = arrow.get(args["item"], "<-")
        peer = f" {way} rank {args['peer']}" if way else ""
        assert e["name"] == f"{args['item']}{peer}, chunk {args['chunk']}"
        assert e["cat"] == args["item"]
        assert args["bytes"] % 4 == 0
    return items
