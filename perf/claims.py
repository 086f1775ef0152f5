"""How many items the blocks of a rank can claim in a time: a model, of what no CPU shows.

python -m perf.claims: blocks that look for work see the same queues and choose the same item; one
of their swaps succeeds. Then either all others look again, or each goes on from the ticket that its
swap has found, within the items after it that it finds runnable (`take` in kernels/triton/pick.py).
All items of one queue can run, each is a chunk to copy; what is printed is bytes over time, beside
what blocks would copy if claims never met. The times are estimates from the dependent reads of a
look, not measured: read the ratios.

Example: 22 blocks, chunks of 128 KiB that take a block 8.7 us, looks of 10 us: 22 blocks could
copy 154 GB/s; where losers look again, one item is claimed in about 10 us, 13 GB/s.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from perf.rows import append, make_row

LINK_GBPS = 400.0  # of a rank, and the most that one block copies
BLOCK_GBPS = 20.0
ITEM_US = 1.5  # of an item besides its bytes: flags
SWAP_US = 0.7  # an atomic on the device, there and back
NUM_ITEMS = 2000
NUM_BLOCKS = (8, 22, 64)
CHUNK_KIB = (32, 128, 512)


@dataclass(frozen=True)
class Looks:
    """Microseconds: of a look until its swap returns; of finding what can run after it. window:
    how many items that is, 0: none, look again."""

    name: str
    look_us: float
    next_us: float
    window: int


LOOKS = (
    Looks("3.5 us, again", 3.5, 0, 0),
    Looks("3.5 us, go on", 3.5, 2, 8),
    Looks("10 us, again", 10, 0, 0),
    Looks("10 us, go on", 10, 3, 8),
)


def item_us(chunk_bytes: int, num_blocks: int) -> float:
    """What an item takes a block."""
    return chunk_bytes / min(BLOCK_GBPS, LINK_GBPS / num_blocks) / 1e3 + ITEM_US


def simulate(num_blocks: int, run_us: float, looks: Looks, seed: int = 0) -> float:
    """Microseconds for NUM_ITEMS items that each take a block run_us."""
    rng = random.Random(seed)
    ticket, end = 0, 0.0
    # When, what: a look begins, its ticket is read, a swap arrives; of that the ticket that it
    # expects, and the end of what the block knows can run; -1: it knows of its head only.
    events = [(rng.random() * looks.look_us, "look", b, 0, 0) for b in range(num_blocks)]
    heapq.heapify(events)
    while events:
        now, what, block, expected, known = heapq.heappop(events)
        if ticket >= NUM_ITEMS:
            continue
        back = now + SWAP_US / 2
        if what == "look":
            event = (back, "read", block, 0, 0)
        elif what == "read":
            lasts = looks.look_us * rng.uniform(0.9, 1.1)
            event = (now + lasts - SWAP_US, "swap", block, ticket, -1)
        elif ticket == expected:
            ticket += 1
            end = max(end, back + run_us)
            event = (back + run_us, "look", block, 0, 0)
        elif known == -1 and looks.window:
            lasts = looks.next_us * rng.uniform(0.9, 1.1)
            event = (back + lasts - SWAP_US / 2, "swap", block, ticket, ticket + looks.window)
        elif ticket < known:
            event = (now + SWAP_US, "swap", block, ticket, known)
        else:
            event = (back, "look", block, 0, 0)
        heapq.heappush(events, event)
    return end


def main() -> None:
    """Print one table: GB/s, and in brackets the share of what blocks could copy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", action="store_true", help="append rows to perf/results.csv")
    o = parser.parse_args()
    table = Table(title="a model of claims: GB/s of a rank's copies (of what its blocks could)")
    for name in ("blocks", "chunk", *(looks.name for looks in LOOKS)):
        table.add_column(name)
    rows = []
    for num_blocks in NUM_BLOCKS:
        for kib in CHUNK_KIB:
            run_us = item_us(kib * 1024, num_blocks)
            shown = []
            for looks in LOOKS:
                bound_us = (run_us + looks.look_us) / num_blocks
                times = [simulate(num_blocks, run_us, looks, s) / NUM_ITEMS for s in range(3)]
                size = (1, 1, kib * 1024)
                case = f"{num_blocks} blocks, {looks.name}"
                row = make_row("claims", case, size, times, bound_us)
                rows.append(row)
                gbps = kib * 1024 / row.p50_us / 1e3
                shown.append(f"{gbps:.0f} ({bound_us / row.p50_us:.2f})")
            table.add_row(str(num_blocks), f"{kib} KiB", *shown)
    Console().print(table)
    if o.csv:
        append(rows)


if __name__ == "__main__":
    main()
