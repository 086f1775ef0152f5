"""What one rank's memory holds that blocks, host and peers share."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from .items import QUEUE_NAMES, Plan
from .memory import Heap, Region
from .network import UnderWay

# An actor yields True to sleep until something changes at its rank, False to let others go first.
Steps = Generator[bool, None, None]


@dataclass(eq=False)
class Actor:
    rank: Rank
    steps: Steps


@dataclass(eq=False)
class Kernel:
    """One launch of one rank."""

    call: int
    plan: Plan
    epoch: int
    heaps: list[Heap]  # of all ranks as they were mapped at launch
    output: Region
    done: bool = False


@dataclass(eq=False)
class Rank:
    number: int
    flags: list[int]
    heap: Heap
    num_ranks: int
    puts: UnderWay
    signals: UnderWay
    tickets: list[int] = field(default_factory=lambda: [0] * len(QUEUE_NAMES))
    blocks_out: int = 0
    epoch: int = 0  # calls completed
    abort: int = 0  # origin + 1
    queued: int = 0  # kernels given to the stream
    calls_done: int = 0
    host_done: bool = False
    stopped: bool = False
    deadline_passed: bool = False
    left: bool = False  # because of an abort
    turns_given: set[tuple[int, int]] = field(default_factory=set)  # (call, turn) of posted credits
    kernel: Kernel | None = None  # running or last run
    acknowledged: bool = False  # after an abort: writes nothing any more
    asleep: list[Actor] = field(default_factory=list)
    record_words: list[list[int]] = field(default_factory=list)  # [parity][writer] epoch
    records: list[list[tuple[int, int]]] = field(
        default_factory=list
    )  # [parity][writer] (call, writer)
    grow_words: list[list[int]] = field(default_factory=list)  # [step][writer] call

    def __post_init__(self) -> None:
        self.record_words = [[0] * self.num_ranks for _ in range(2)]
        self.records = [[(-1, -1)] * self.num_ranks for _ in range(2)]
        self.grow_words = [[0] * self.num_ranks for _ in range(2)]

    @property
    def finished(self) -> bool:
        return self.host_done or self.left or self.stopped
