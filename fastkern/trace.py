"""A trace of a communicator's kernels, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

from .errors import ClosedError
from .trace_json import merged, read_json, trace_json, write_json
from .tracing import TraceLog, Tracing
from .turns import Turns

log = logging.getLogger("fastkern")

MOST_EVENTS = 1 << 26


class Trace:
    """What the blocks of this rank's launches did in a span; made by Communicator.trace.

        with comm.trace() as trace:
            ...
        trace.save("rank0.json")

    events: NumPy records, one for each item that a block ran: begin_ns, end_ns, bytes, queue,
    stage, chunk, peer, block, epoch; in order of begin_ns. num_dropped: events past max_events.
    """

    def __init__(self, turns: Turns, tracing: Tracing, rank: int, max_events: int) -> None:
        if isinstance(max_events, bool) or not hasattr(max_events, "__index__"):
            raise TypeError(f"max_events must be a whole number, not {max_events!r}")
        if not 1 <= max_events <= MOST_EVENTS:
            raise ValueError(f"max_events must be 1 to {MOST_EVENTS}, not {max_events}")
        self.rank = rank
        self._turns, self._tracing = turns, tracing
        self._max_events = int(max_events)
        self._log: TraceLog | None = None

    def start(self) -> None:
        """Begin, behind the calls that are queued. Raises FastkernError where another is on."""
        self._log = None
        self._turns.call(lambda: self._tracing.start(self._max_events))

    def stop(self) -> None:
        """End, behind the calls that are queued; waits for the kernels under way."""
        try:
            self._log = self._turns.call(self._tracing.stop)
        except ClosedError:
            self._log = self._tracing.stop()  # what there was when it was closed
        if self._log.num_dropped:
            log.warning(
                "trace of rank %d: %d events dropped, max_events is %d",
                self.rank,
                self._log.num_dropped,
                self._max_events,
            )

    def __enter__(self) -> Trace:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except Exception as failure:
            if error is None:
                raise
            log.warning("trace of rank %d: %s", self.rank, failure)  # the error is what counts

    @property
    def events(self) -> npt.NDArray[Any]:
        """See the class; raises ValueError before `stop`."""
        return self._ended.events

    @property
    def num_dropped(self) -> int:
        """Events that there was no room for."""
        return self._ended.num_dropped

    def save(self, path: str | Path) -> None:
        """Write a JSON trace; gzipped where the name ends in .gz.

        The process is the rank, each block a track, and one track has the calls. Times are
        microseconds from the first event on.
        """
        write_json(Path(path), trace_json(self.rank, self._ended))

    @property
    def _ended(self) -> TraceLog:
        if self._log is None:
            raise ValueError("the trace has not been stopped: there are no events yet")
        return self._log


def merge_traces(paths: Sequence[str | Path], path: str | Path) -> None:
    """Put the saved traces of several ranks into one file.

    On one host's CPUs their times are of one clock. GPUs have a clock each: there, ranks are laid
    beside one another by when the host launched their first kernel, which may be off by as long as
    that kernel waited in its stream. Raises ValueError for what is no trace of fastkern.
    """
    write_json(Path(path), merged([(str(p), read_json(Path(p))) for p in paths]))
