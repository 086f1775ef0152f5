"""Traces as JSON in the Trace Event Format, which Perfetto and Chrome read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .planner.table import QUEUES
from .tracing import Launch, TraceLog

Json = dict[str, Any]

_CALLS_TRACK = 1 << 16  # past every block's
_TO, _FROM = ("pack", "push", "put"), ("receive", "land", "take")
_UNKNOWN = Launch("call", 0, 0)


def trace_json(rank: int, log: TraceLog) -> Json:
    """One rank's events."""
    origin = int(log.events["begin_ns"][0]) if len(log.events) else 0
    made: list[Json] = [_named("process", rank, 0, f"rank {rank}")]
    made.append({**_of("M", rank, 0), "name": "process_sort_index", "args": {"sort_index": rank}})
    spans: dict[int, list[int]] = {}
    items: list[Json] = []
    blocks: set[int] = set()
    for event in log.events.tolist():
        fields = dict(zip(log.events.dtype.names or (), event, strict=True))
        begin, end, epoch = fields["begin_ns"], fields["end_ns"], fields["epoch"]
        launch = log.launches.get(epoch, _UNKNOWN)
        span = spans.setdefault(epoch, [begin, end])
        span[1] = max(span[1], end)
        blocks.add(fields["block"])
        queue = QUEUES[fields["queue"]]
        args = {
            "op": launch.op,
            "call": launch.call,
            "item": queue,
            **{name: fields[name] for name in ("stage", "chunk", "peer", "bytes")},
        }
        place = _of("X", rank, fields["block"])
        times = _times(begin - origin, end - begin)
        items.append({**place, "name": _name(queue, fields), "cat": queue, **times, "args": args})
    made += [_named("thread", rank, block, f"block {block}") for block in sorted(blocks)]
    made.append(_named("thread", rank, _CALLS_TRACK, "calls"))
    sort = {"name": "thread_sort_index", "args": {"sort_index": -1}}
    made.append({**_of("M", rank, _CALLS_TRACK), **sort})
    for epoch, (begin, end) in spans.items():
        launch = log.launches.get(epoch, _UNKNOWN)
        times = _times(begin - origin, end - begin)
        args = {"op": launch.op, "call": launch.call, "num_blocks": launch.num_blocks}
        name = f"{launch.op}, call {launch.call}"
        place = _of("X", rank, _CALLS_TRACK)
        made.append({**place, "name": name, "cat": "call", **times, "args": args})
    return {
        "traceEvents": made + items,
        "displayTimeUnit": "ns",
        "fastkern": {
            "ranks": [rank],
            "clock": log.clock,
            "origin_ns": origin,
            "unix_ns": origin + log.unix_offset_ns,
            "num_dropped": log.num_dropped,
        },
    }


def merged(traces: Sequence[tuple[str, Json]]) -> Json:
    """Several ranks' traces as one; each with a name for errors. See trace.merge_traces."""
    if not traces:
        raise ValueError("no traces to merge")
    notes = [_note(name, trace) for name, trace in traces]
    one_clock = len({note["clock"] for note in notes}) == 1
    key = "origin_ns" if one_clock else "unix_ns"
    first = min(note[key] for note in notes)
    events: list[Json] = []
    seen: dict[int, str] = {}
    for (name, trace), note in zip(traces, notes, strict=True):
        for rank in note["ranks"]:
            if rank in seen:
                raise ValueError(f"{name} is of rank {rank}, and so is {seen[rank]}")
            seen[rank] = name
        shift = (note[key] - first) / 1e3
        for event in trace["traceEvents"]:
            events.append({**event, "ts": event["ts"] + shift} if "ts" in event else event)
    whole = {
        "ranks": sorted(seen),
        "clock": notes[0]["clock"] if one_clock else "time of day",
        "origin_ns": first,
        "unix_ns": min(note["unix_ns"] for note in notes),
        "num_dropped": sum(note["num_dropped"] for note in notes),
    }
    return {"traceEvents": events, "displayTimeUnit": "ns", "fastkern": whole}


def write_json(path: Path, trace: Json) -> None:
    """Write a trace; gzipped where the name ends in .gz."""
    text = json.dumps(trace, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def read_json(path: Path) -> Any:
    """What `write_json` has written, or anything else. Raises ValueError naming the file."""
    content = path.read_bytes()
    try:
        return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None


def _note(name: str, trace: Any) -> Json:
    """What a trace says of itself. Raises ValueError where it is none of ours."""
    note = trace.get("fastkern") if isinstance(trace, dict) else None
    wanted = {"ranks": list, "clock": str, "origin_ns": int, "unix_ns": int, "num_dropped": int}
    if not isinstance(note, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{name}: not a trace that fastkern has saved")
    for field, kind in wanted.items():
        if not isinstance(note.get(field), kind):
            raise ValueError(f"{name}: fastkern.{field} must be of type {kind.__name__}")
    return note


def _name(queue: str, fields: Json) -> str:
    """As "put -> rank 3, chunk 2"."""
    arrow = " -> rank {}" if queue in _TO else " <- rank {}" if queue in _FROM else ""
    return f"{queue}{arrow.format(fields['peer'])}, chunk {fields['chunk']}"


def _of(phase: str, rank: int, track: int) -> Json:
    return {"ph": phase, "pid": rank, "tid": track}


def _named(kind: str, rank: int, track: int, name: str) -> Json:
    return {**_of("M", rank, track), "name": f"{kind}_name", "args": {"name": name}}


def _times(begin_ns: int, duration_ns: int) -> Json:
    return {"ts": begin_ns / 1e3, "dur": duration_ns / 1e3}
