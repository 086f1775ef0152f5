"""Traces on the host: what blocks did, when, and how it is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fastkern
from fastkern import Communicator
from tests.processes import Pool
from tests.trace_cases import (
    MISUSE,
    SPLITS,
    WIDTH,
    bounded,
    check_files,
    closed_within,
    exchange,
    misused,
    traced_calls,
)


def on_host(rank: int, num_ranks: int, body: Any, *args: Any) -> Any:
    options: dict[str, Any] = {"policy": "whole", "num_blocks": 3, "chunk_bytes": 64}
    with Communicator(servers=2, entry_timeout_s=50, **options) as comm:
        return body(comm, *args)


def test_every_item_of_a_span_is_there(four: Pool, tmp_path: Path) -> None:
    ranks = four.run(on_host, traced_calls, str(tmp_path))
    crossing = sum(SPLITS[a][b] for a in range(4) for b in range(4) if a // 2 != b // 2)
    assert sum(found["put_bytes"] for found in ranks) == crossing * WIDTH * 4
    seen = {queue for found in ranks for queue in found["queues"]}
    assert seen == {"pack", "push", "put", "receive", "land", "take"}
    check_files(tmp_path, ranks, one_clock=True)


def test_events_are_bounded(four: Pool) -> None:
    four.run(on_host, bounded)


def test_misuse(four: Pool) -> None:
    assert four.run(on_host, misused) == [list(MISUSE)] * 4


def test_a_communicator_that_is_closed_in_the_span(four: Pool) -> None:
    four.run(on_host, closed_within)


def mapped() -> int:
    """Segments of fastkern's that this process maps."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/fastkern")


def let_go(rank: int, num_ranks: int) -> None:
    """A closed communicator, which is still there, keeps no memory for its traces."""
    before = mapped()
    comm = Communicator(servers=2, entry_timeout_s=50)
    with comm.trace() as trace:
        exchange(comm)
    assert mapped() > before
    comm.close()
    assert mapped() == before
    assert len(trace.events)


def test_nothing_is_kept_of_a_closed_communicator(four: Pool) -> None:
    four.run(let_go)


def off(comm: Communicator) -> None:
    """Kernels are told of no trace before one and after it."""
    runtime: Any = comm._runtime
    exchange(comm)
    assert runtime._host.trace_count() == 0
    with comm.trace() as trace:
        exchange(comm)
    exchange(comm)
    assert runtime._host.trace_count() == len(trace.events) > 0
    assert runtime._host.stop_trace() == b""


def test_off_is_off(four: Pool) -> None:
    four.run(on_host, off)


# -- files -----------------------------------------------------------------------------------------


def saved(rank: int, clock: str, origin_ns: int, unix_ns: int) -> dict[str, Any]:
    """A file with one event, 2 us after its origin."""
    note = {
        "ranks": [rank],
        "clock": clock,
        "origin_ns": origin_ns,
        "unix_ns": unix_ns,
        "num_dropped": rank,
    }
    event = {"ph": "X", "pid": rank, "tid": 0, "name": "put", "ts": 2.0, "dur": 1.0}
    return {"traceEvents": [event, {"ph": "M", "pid": rank}], "fastkern": note}


@pytest.mark.parametrize("clocks", ["aa", "ab"])
def test_ranks_are_laid_side_by_side(clocks: str, tmp_path: Path) -> None:
    """By one clock where they have one, else by the time of day."""
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    paths[0].write_text(json.dumps(saved(0, clocks[0], 9_000, 70_000)))
    paths[1].write_text(json.dumps(saved(1, clocks[1], 4_000, 71_000)))
    fastkern.merge_traces(paths, tmp_path / "both.json")
    whole = json.loads((tmp_path / "both.json").read_text())
    assert [e.get("ts") for e in whole["traceEvents"]] == (
        [7.0, None, 2.0, None] if clocks == "aa" else [2.0, None, 3.0, None]
    )
    assert whole["fastkern"]["ranks"] == [0, 1]
    assert whole["fastkern"]["num_dropped"] == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "Expecting value"),
        ("[]", "not a trace that fastkern has saved"),
        ('{"traceEvents": []}', "not a trace that fastkern has saved"),
        ('{"fastkern": {}}', "not a trace that fastkern has saved"),
        ('{"fastkern": {"ranks": [1]}, "traceEvents": []}', "fastkern.clock must be of type str"),
        (json.dumps(saved(0, "a", 0, 0)), "is of rank 0, and so is "),
    ],
)
def test_what_cannot_be_merged(content: str, words: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(saved(0, "a", 0, 0)))
    bad.write_text(content)
    with pytest.raises(ValueError, match=str(bad)) as caught:
        fastkern.merge_traces([good, bad], tmp_path / "all.json")
    assert words in str(caught.value)
    assert not (tmp_path / "all.json").exists()


def test_a_file_that_is_not_gzipped(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json\.gz"):
        fastkern.merge_traces([tmp_path / "a.json.gz"], tmp_path / "all.json")
    with pytest.raises(ValueError, match="no traces"):
        fastkern.merge_traces([], tmp_path / "all.json")
