"""What calls need of a runtime: the same on the host and on devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from .moe.static_shape import StaticShape
from .planner import StageTable, Topology
from .records import Words
from .stats import CallStats
from .tracing import Tracing
from .transports import Transport
from .turns import Fork, Turns

if TYPE_CHECKING:
    from .device.static_exchange import StaticExchange

T = TypeVar("T")


@dataclass(frozen=True)
class RuntimeOptions:
    """What a runtime is made with; see Communicator. num_blocks: the most of a launch.
    num_lanes: of a block. tile_bytes: that a block of a kernel in Triton moves at a time."""

    transport: Transport
    num_blocks: int
    num_lanes: int
    tile_bytes: int
    buffer_bytes: int
    entry_timeout_s: float
    progress_timeout_s: float


class Runtime(Protocol):
    """One rank's heap and launches.

    device: where tensors are. call: entered so far. epoch: of the last launch; calls in rounds
    launch more than once. Both count from 1, and all ranks count alike. data_bytes: staging and
    window per rank. tracing: of its launches.
    """

    rank: int
    num_ranks: int
    device: torch.device
    stats: CallStats
    tracing: Tracing

    @property
    def call(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def data_bytes(self) -> int: ...

    def exchange(self, record: Words, op: str) -> Words:
        """Enter the next call and return all ranks' records [R, words], as long as this one's.

        Raises what broke the communicator, DeadlineError or PeerLostError.
        """

    def reserve(self, num_bytes: int) -> None:
        """Have at least this much staging and window per rank; all ranks ask for the same.

        Raises HeapMemoryError on every rank where there is not so much; smaller calls still work.
        """

    def launch(
        self,
        table: StageTable,
        input_address: int,
        output_address: int,
        op: str,
        num_blocks: int | None = None,
    ) -> None:
        """Run the kernel of an all-to-all. On a device it has only been started on return.

        num_blocks: up to the most that there are, which is the default; ranks may differ.
        """

    def launch_moe(
        self, table: StageTable, arguments: Any, op: str, num_blocks: int | None = None
    ) -> None:
        """Run the kernel of a dispatch or combine, as `launch`. arguments: see moe/backend.py."""

    def load_static(self) -> None:
        """Load what static exchanges need besides other calls. Not collective.

        Raises DeviceUnavailableError, CompileError or DriverError.
        """

    def make_static(
        self,
        shape: StaticShape,
        topology: Topology,
        turns: Turns,
        chunk_bytes: int,
        num_blocks: int,
    ) -> StaticExchange:
        """A static exchange, a step of a call that all ranks have entered.

        Raises ValueError where tensors are not on a device.
        """

    def guarded(self, body: Callable[[], T]) -> T:
        """Errors that all ranks meet alike pass; any other means that this rank leaves alone."""

    def fork(self, own_lane: bool) -> Fork:
        """For a call that runs on a queue's thread; see Turns."""

    def check(self) -> None:
        """Raise what broke this runtime, if anything did, here or at a peer."""

    def fail(self, error: BaseException) -> None:
        """This rank left a call midway: no rank can go on, so all are told."""

    def close(self) -> None:
        """Let go of the heap."""
