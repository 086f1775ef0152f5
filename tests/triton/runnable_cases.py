"""Of items after a head, how many can run: found together, and one by one as of heads."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import triton
import triton.language as tl

from fastkern.kernels.triton import layout as at
from fastkern.kernels.triton.access import store64
from fastkern.kernels.triton.call import open_call
from fastkern.kernels.triton.items import items_from, nth_item
from fastkern.kernels.triton.waits import can_run, num_runnable
from fastkern.planner import Topology, plan
from fastkern.planner import table as tables
from tests.moe_cases import Case
from tests.moe_tables import Call

NEXT = 8
EPOCH = 5
MOST_WORDS = 4096  # of a rank's flags, and of its control words


@triton.jit
def look_ahead(ranks, out, queue, ticket):
    """out: what num_runnable says; then of each item 1 or 0 for whether there is one, whether it
    has rows, and whether it can run."""
    call = open_call(ranks, 1, 0)
    zero = call.rank * 0
    found = items_from(call, zero + queue, zero + ticket)
    store64(zero + out, num_runnable(call, zero + queue, found))
    lane = tl.arange(0, 8)
    for k in range(8):
        here = tl.sum(tl.where(lane == k, found.here.to(tl.int64), 0))
        full = tl.sum(tl.where(lane == k, found.full.to(tl.int64), 0))
        runs = zero
        if full != 0:
            runs = can_run(call, nth_item(call, zero + queue, found, zero + k))
        store64(zero + out + 8 + k * 24, here)
        store64(zero + out + 16 + k * 24, full)
        store64(zero + out + 24 + k * 24, runs)


class Rank:
    """What a kernel reads of a rank, with flags and tickets to set."""

    def __init__(self, table: Any, rank: int, num_ranks: int) -> None:
        self.bytes = np.frombuffer(table.bytes.tobytes() + bytes(64), dtype=np.uint8)
        queues = tables.DTYPES["Header"].itemsize
        end = queues + at.NUM_QUEUES.value * tables.DTYPES["Queue"].itemsize
        self.queues: Any = self.bytes[queues:end].view(tables.DTYPES["Queue"])
        self.flags = np.zeros(MOST_WORDS, dtype=np.uint64)
        self.control = np.zeros(MOST_WORDS, dtype=np.uint64)
        self._lists = [
            np.full(num_ranks, words.ctypes.data, dtype=np.uint64)
            for words in (self.control, self.flags)
        ]
        self.args = np.zeros(at.SIZEOF_ARGS.value, dtype=np.uint8)
        self._set(at.ARGS_TABLE, self.bytes.ctypes.data)
        self._set(at.ARGS_CONTROLS, self._lists[0].ctypes.data)
        self._set(at.ARGS_FLAGS, self._lists[1].ctypes.data)
        self._set(at.ARGS_EPOCH, EPOCH)
        self._set(at.ARGS_RANK, rank)

    def _set(self, field: Any, value: int) -> None:
        first, width = field.value >> at.WIDTH_BITS, field.value & (1 << at.WIDTH_BITS) - 1
        self.args[first : first + width].view(f"u{width}")[0] = value

    def exhaust(self) -> None:
        """Nothing is left to claim of any queue."""
        first = (at.CONTROL_TICKETS.value >> at.WIDTH_BITS) // 8
        self.control[first : first + len(self.queues)] = self.queues["num_items"]


def made() -> list[tuple[Any, int, int]]:
    """Tables with their rank and number of ranks: of a dispatch and its combine, and of all-to-alls
    whose streams differ in length, so that there are items without rows among others."""
    moe = Call(Case("some", num_tokens=12, topk=3, tokens="equal"), 2, 2, "whole", chunk_rows=1)
    most = max(rank.num_partials for rank in moe.dispatch())
    uneven = np.array([[0, 0, 30, 2], [1, 0, 0, 3], [0, 9, 0, 0], [4, 0, 1, 0]])
    direct = plan(uneven, Topology(2, 2), 16, "direct", chunk_bytes=16)
    return [
        (moe.tables[3], 3, 4),
        (moe.combine_tables(most)[1], 1, 4),
        *((direct.table(rank), rank, 4) for rank in (0, 1)),
    ]


def run(seed: int) -> tuple[list[Any], dict[str, list[int]], int]:
    """Where the two differ; by queue, how often so many could run; chains past an empty item."""
    rng, wrong, past_empty = random.Random(seed), list[Any](), 0
    counts: dict[str, list[int]] = {}
    out = np.zeros(1 + 3 * NEXT, dtype=np.int64)
    for table, number, num_ranks in made():
        rank = Rank(table, number, num_ranks)
        rank.exhaust()
        for queue, name in enumerate(tables.QUEUES):
            num_items = int(rank.queues[queue]["num_items"])
            for _ in range(2 if num_items else 0):
                late = rng.choice((0.0, 0.03, 0.1, 0.4))
                raised = [(EPOCH - (rng.random() < late)) << tables.VALUE_BITS for _ in rank.flags]
                rank.flags[:] = np.array(raised, dtype=np.uint64) + rng.choice((1, 60000))
                ticket = rng.randrange(num_items)
                look_ahead[(1,)](rank.args.ctypes.data, out.ctypes.data, queue, ticket)
                goes_on = [h and (not full or runs) for h, full, runs in out[1:].reshape(-1, 3)]
                right = [*goes_on, False].index(False)
                if out[0] != right:
                    wrong.append((name, ticket, out.tolist()))
                counts.setdefault(name, [0] * (NEXT + 1))[right] += 1
                past_empty += not all(out[1:].reshape(-1, 3)[:right, 1])
    return wrong, counts, past_empty
