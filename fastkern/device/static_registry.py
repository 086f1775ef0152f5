"""The static exchanges of one runtime: made together, looked at, closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..errors import FastkernError, WaitRecord
from ..moe.static_shape import StaticShape
from ..planner import Topology
from ..records import OP_STATIC, agreed_bodies, encode_call
from ..turns import Turns
from .memory import SymmetricHeap
from .static_exchange import StaticExchange

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime


class StaticRegistry:
    """Those that have not been closed. lock: held by whoever looks, so that none is closed then."""

    def __init__(self, runtime: DeviceRuntime, lock: threading.RLock) -> None:
        self._runtime = runtime
        self._lock = lock
        self._num_made = 0
        self._open: list[StaticExchange] = []

    def make(
        self,
        shape: StaticShape,
        topology: Topology,
        turns: Turns,
        chunk_bytes: int,
        num_blocks: int,
        beside: StaticExchange | None = None,
    ) -> StaticExchange:
        """One more; a step of a call that all ranks have entered. beside: its sibling."""
        made = StaticExchange(
            self._runtime, turns, shape, topology, chunk_bytes, num_blocks, beside
        )
        with self._lock:
            self._open.append(made)
        return made

    def make_beside(
        self,
        other: StaticExchange,
        topology: Topology,
        turns: Turns,
        chunk_bytes: int,
        num_blocks: int,
    ) -> StaticExchange:
        """One more on the other's heap; all ranks call it."""
        text: str | Exception = f"{other.name}, a sibling"
        if other.closed:  # here, or on all ranks: all must learn of it
            text = ValueError(f"sibling: {other.name} is closed")
        record = encode_call(OP_STATIC, text, "", np.zeros(0, dtype=np.uint64))
        agreed_bodies(self._runtime.exchange(record, "static_exchange"))
        return self._runtime.guarded(
            lambda: self.make(other.shape, topology, turns, chunk_bytes, num_blocks, other)
        )

    def next_name(self) -> str:
        """What messages call the next one: alike on all ranks."""
        self._num_made += 1
        return f"static exchange {self._num_made}"

    def forget(self, exchange: StaticExchange) -> None:
        """It is being closed; nobody looks at it when this returns, or later."""
        with self._lock:
            if exchange in self._open:
                self._open.remove(exchange)

    def __iter__(self) -> Iterator[StaticExchange]:
        with self._lock:
            return iter(list(self._open))

    def __bool__(self) -> bool:
        return bool(self._open)

    def looks(self) -> list[Callable[[], FastkernError | None]]:
        """What to call to learn what made a kernel give up."""
        return [exchange.look for exchange in self]

    def record(self) -> WaitRecord | None:
        """What the first kernel that is found to have given up has left."""
        records = (exchange.record() for exchange in self)
        return next((record for record in records if record is not None), None)

    def heaps(self) -> list[SymmetricHeap]:
        """Theirs, each once: siblings share one."""
        return list({id(exchange.heap): exchange.heap for exchange in self}.values())

    def close(self) -> None:
        """Close all."""
        for exchange in self:
            exchange.close()
