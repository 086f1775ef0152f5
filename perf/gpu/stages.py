"""One stage of a call by itself: the same tables with all queues but one emptied.

A call is run once. Its flags stay, and carry its number: a launch that is given that number finds
every wait over. So the items of one queue, in tables whose other queues have none, run at once, on
the rows that the call has left in staging and windows; as often as wanted, with the same result.
Gates are taken out, since a launch posts its first credits anew, lower ones than the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_launch import PreparedLaunch, copied_args
from fastkern.planner import StageTable
from fastkern.planner.table import NO_SLOT, QUEUES


def only_queue(table: StageTable, queue: str) -> StageTable:
    """A copy of the table in which no other queue has items."""
    cut = StageTable(table.bytes.copy())
    for k, name in enumerate(QUEUES):
        if name != queue:
            cut.queues[k]["num_items"] = 0
    cut.streams["gate_slot"] = NO_SLOT
    return cut


def queue_rows(tables: Sequence[StageTable], queue: str) -> int:
    """Rows of an all-to-all that all ranks move in a queue."""
    total = 0
    for table in tables:
        k = QUEUES.index(queue)
        first = int(table.queues[k]["first_stage"])
        for stage in table.stages[first : first + int(table.queues[k]["num_stages"])]:
            at = int(stage["first_stream"])
            for s in table.streams[at : at + int(stage["num_streams"])]:
                begin, count = int(s["first_segment"]), int(s["num_segments"])
                rows = table.segments[begin : begin + count]["num_rows"]
                total += int(s["num_rows"]) if queue == "put" else int(rows.sum())
    return total


class StageAlone:
    """A queue of a call that has just been run, to be enqueued again and again.

    source: the call's launch. tables: its tables. The cluster's epoch must be that of the call.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        source: PreparedLaunch,
        tables: Sequence[StageTable],
        queue: str,
    ) -> None:
        self._cluster = cluster
        cut = [only_queue(table, queue) for table in tables]
        self.launch = cluster.prepare(source.kernel, cut)
        copied_args(self.launch, source)
        self.launch.args["epoch"] = cluster.epoch
        self.launch.moe["record"] = 0
        self._function: Any = cluster.kernels.get(source.kernel, cluster.num_lanes)
        self.launch.enqueue_upload(cluster.stream)

    def enqueue(self) -> None:
        """The kernel, on the tables brought over before."""
        c = self._cluster
        self.launch.enqueue_kernel(self._function, c.num_lanes, c.stream, c.num_ranks)

    def finish(self) -> None:
        """Wait for all of them. Raises where one did not end as it should."""
        self._cluster.finish("a stage alone", self._cluster.epoch)

    def close(self) -> None:
        """Free its memory."""
        self.launch.close()


def measured_alone(
    cluster: VirtualCluster,
    source: PreparedLaunch,
    tables: Sequence[StageTable],
    queue: str,
    measure: Callable[[Callable[[], None]], Any],
) -> Any:
    """What `measure` finds of the queue's launches."""
    stage = StageAlone(cluster, source, tables, queue)
    try:
        found = measure(stage.enqueue)
        stage.finish()
        return found
    finally:
        stage.close()
