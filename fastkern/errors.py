"""The exceptions that fastkern raises besides ValueError and TypeError for bad input."""

from __future__ import annotations

from dataclasses import dataclass


class FastkernError(RuntimeError):
    """Base of fastkern's own errors."""


class AgreementError(FastkernError):
    """Ranks made a communicator with different versions, topologies or options."""


class ClosedError(FastkernError):
    """The communicator was closed."""


class HeapMemoryError(FastkernError, MemoryError):
    """Too little shared memory for a call; raised on every rank. Smaller calls still work."""


class PeerLostError(FastkernError):
    """A rank's process has ended."""


class DeviceUnavailableError(FastkernError):
    """A library that the GPU needs is missing here. The text says which, and how to install it."""


class CompileError(FastkernError):
    """A kernel did not compile when it was needed.

    entry: the kernel's source ("exchange"). target: "cuda" or "hip". arch: "sm_90", "gfx942".
    log: what the compiler said.
    """

    def __init__(self, entry: str, target: str, arch: str, log: str) -> None:
        super().__init__(entry, target, arch, log)  # all of them, so that it can be pickled
        self.entry = entry
        self.target = target
        self.arch = arch
        self.log = log

    def __str__(self) -> str:
        return f"{self.entry} does not compile for {self.target} {self.arch}:\n{self.log.strip()}"


@dataclass(frozen=True)
class WaitRecord:
    """The wait that ran out of time, in a call that all ranks had entered.

    op: the operation. call: its number on this communicator, from 1; of a static exchange, the
    launch on its heap. rank: who waited. peer: whose flag is missing. item: what could not run
    (pack to reduce, see planner/stage_table.h), "end of its puts", or "entry" of a static
    exchange's call. stage, chunk: where in that rank's table, of the former. expected, seen: flag
    values as (call, value). waited_s: seconds.
    """

    op: str
    call: int
    rank: int
    peer: int
    item: str
    stage: int
    chunk: int
    expected: tuple[int, int]
    seen: tuple[int, int]
    waited_s: float

    def __str__(self) -> str:
        return (
            f"{self.op}, call {self.call}: rank {self.rank} waited {self.waited_s:.1f} s for rank "
            f"{self.peer} {self._where()} (flag expected {self.expected[0]}.{self.expected[1]}, "
            f"seen {self.seen[0]}.{self.seen[1]})"
        )

    def _where(self) -> str:
        if self.item == "entry":
            return "to enter"
        if self.item == "end of its puts":
            return f"before the {self.item}"
        return f"before its {self.item} of stage {self.stage}, chunk {self.chunk}"


class DeadlineError(FastkernError):
    """A deadline passed. `record`: the stalled wait; `missing`: ranks that have not entered."""

    def __init__(
        self, text: str, record: WaitRecord | None = None, missing: tuple[int, ...] = ()
    ) -> None:
        super().__init__(text)
        self.record = record
        self.missing = missing
