"""One call from entry to delivered rows, on whichever thread its turn comes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import rounds
from .config import Settings
from .errors import HeapMemoryError
from .planner import Plan, Policy, StageTable, Topology, plan
from .records import OP_ALL_TO_ALL, OP_RESERVE, encode, row_bytes, verdict
from .runtime import Runtime
from .stats import CallStats
from .tensors import RowCall
from .tuning.blocks import BlockCounts

Matrix = npt.NDArray[np.int64]

_MOST_ROUNDS = 1 << 16


class CallRunner:
    """Runs calls of one rank, one at a time; keeps the last plan for the next equal one."""

    def __init__(
        self,
        runtime: Runtime,
        rank: int,
        topology: Topology,
        settings: Settings,
        blocks: BlockCounts,
    ) -> None:
        self.runtime = runtime
        self._blocks = blocks
        self._rank = rank
        self._topology = topology
        self._settings = settings
        self._last: tuple[Matrix, int, Plan, StageTable] | None = None

    def plan(self, traffic: Any, num_bytes: int) -> tuple[Plan, StageTable]:
        """The plan and this rank's table; those of the last call where it was the same."""
        last = self._last
        if last is not None and last[1] == num_bytes and np.array_equal(last[0], traffic):
            return last[2], last[3]
        policy: Policy = self._settings.policy  # type: ignore[assignment]
        made = plan(
            traffic, self._topology, num_bytes, policy, chunk_bytes=self._settings.chunk_bytes
        )
        if self._settings.debug:
            made.validate()
        table = made.table(self._rank)
        self._last = (np.array(traffic), num_bytes, made, table)
        return made, table

    def forget_plan(self) -> None:
        """Have the next call planned, whatever the last one was."""
        self._last = None

    def reserve(self, num_bytes: int) -> None:
        """Grow the heap, all ranks to the same size."""
        size: int | Exception = num_bytes
        if isinstance(num_bytes, bool) or not hasattr(num_bytes, "__index__"):
            size = TypeError(f"num_bytes must be a whole number, not {num_bytes!r}")
        elif not 0 <= num_bytes < 1 << 64:
            size = ValueError(f"num_bytes must be 0 to 2^64 - 1, not {num_bytes}")
        verdict(self.runtime.exchange(self._encode(OP_RESERVE, size), "reserve"))
        self.runtime.guarded(lambda: self.runtime.reserve(num_bytes))

    def run(self, call: RowCall | Exception) -> None:
        """An all-to-all: `call`, or what was wrong with this rank's arguments."""
        begin = time.perf_counter()
        if isinstance(call, RowCall):
            try:
                call.start()
            except Exception as error:  # the other ranks must learn of it
                call = error
        records = self.runtime.exchange(self._encode(OP_ALL_TO_ALL, call), "all_to_all_single")
        traffic = verdict(records)
        assert isinstance(call, RowCall)  # else `verdict` has raised
        good, entered = call, time.perf_counter()
        self.runtime.guarded(lambda: self._move(good, traffic, row_bytes(records), begin, entered))

    def _encode(self, op: int, what: RowCall | Exception | int) -> Any:
        return encode(op, what, self._topology.num_ranks)

    def _move(
        self, call: RowCall, traffic: Matrix, num_bytes: int, begin: float, entered: float
    ) -> None:
        if num_bytes == 0 or not traffic.any():
            call.finish()
            self.runtime.stats = CallStats(None, entry_s=entered - begin)
            return
        made, table = self.plan(traffic, num_bytes)
        planned = time.perf_counter()
        need = max(1, table.data_layout().bytes)  # one rank alone needs no staging
        num_rounds = -(-need // self._settings.max_buffer_bytes)
        try:
            if num_rounds == 1:
                self.runtime.reserve(need)
        except HeapMemoryError:
            num_rounds = 2
        reserved = time.perf_counter()
        if num_rounds == 1:
            self._launch(table, call.source, call.target, call.num_blocks)
        else:
            self._move_in_rounds(call, traffic, num_bytes, num_rounds)
        ended = time.perf_counter()
        call.finish()
        self.runtime.stats = CallStats(
            made, entered - begin, planned - entered, reserved - planned, ended - reserved
        )

    def _launch(
        self,
        table: StageTable,
        source: torch.Tensor,
        target: torch.Tensor,
        num_blocks: int | None,
    ) -> None:
        op, num_bytes = "all_to_all_single", max(source.nbytes, target.nbytes)
        blocks = self._blocks.of(num_blocks, op, num_bytes)
        self.runtime.launch(table, source.data_ptr(), target.data_ptr(), op, blocks)

    def _move_in_rounds(
        self, call: RowCall, traffic: Matrix, num_bytes: int, num_rounds: int
    ) -> None:
        """A share of the rows at a time; more and smaller shares while memory does not suffice."""
        while True:
            parts = list(rounds.cut(traffic, num_rounds))
            most = max(self.plan(p.rows, num_bytes)[1].data_layout().bytes for p in parts)
            try:
                self.runtime.reserve(most)
                break
            except HeapMemoryError:
                if len(parts) < num_rounds or num_rounds >= _MOST_ROUNDS:
                    raise
                num_rounds *= 2
        source = call.source.reshape(-1).view(torch.uint8).view(-1, num_bytes)
        target = call.target.reshape(-1).view(torch.uint8).view(-1, num_bytes)
        for part in parts:
            table = self.plan(part.rows, num_bytes)[1]
            num_rows = int(part.rows[:, self._rank].sum())
            received = source.new_empty((num_rows, num_bytes))
            sent = rounds.gather(source, self._rank, traffic, part)
            self._launch(table, sent, received, call.num_blocks)
            rounds.scatter(target, received, self._rank, traffic, part)
