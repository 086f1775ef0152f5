"""What every step starts with: its arguments, the device, and how large things are there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastkern.device.driver import Driver
from fastkern.device.open_driver import open_driver

from .record import Record

SHAPES = ((1, 1), (1, 3), (2, 2), (3, 1), (2, 3), (1, 8), (2, 4), (4, 2))  # servers x ranks
_DRY_SHAPES = ((1, 1), (1, 3), (2, 2), (3, 1))


@dataclass(frozen=True)
class Scale:
    """Sizes of cases and measures. lanes: of blocks, to be taken in turn. The rest: at most."""

    dry: bool
    shapes: Sequence[tuple[int, int]]
    lanes: Sequence[int]
    max_rows: int
    max_width: int
    deadline_s: float
    copy_bytes: int
    flush_bytes: int
    stage_rows: int  # per rank
    stage_tokens: int
    hidden: int
    call_bytes: int  # per rank
    repeats: int

    def blocks(self, most: int) -> list[int]:
        """Blocks per rank to try: 1 to as many as fit, few of them where blocks are threads."""
        if self.dry:
            return [1, 2, 3]
        return sorted({1, 2, max(1, most // 2), most})


GPU = Scale(
    dry=False,
    shapes=SHAPES,
    lanes=(512, 64, 128, 256),
    max_rows=96,
    max_width=3000,
    deadline_s=0.3,
    copy_bytes=1 << 30,
    flush_bytes=256 << 20,
    stage_rows=4096,
    stage_tokens=1024,
    hidden=7168,
    call_bytes=16 << 20,
    repeats=25,
)
DRY = Scale(
    dry=True,
    shapes=_DRY_SHAPES,
    lanes=(1, 2, 3),
    max_rows=9,
    max_width=12,
    deadline_s=0.4,
    copy_bytes=1 << 20,
    flush_bytes=1 << 20,
    stage_rows=16,
    stage_tokens=8,
    hidden=64,
    call_bytes=16 << 10,
    repeats=3,
)


@dataclass(frozen=True)
class Session:
    """A step under way. end: of its time, on time.monotonic's clock. seed: of its random data."""

    driver: Driver
    scale: Scale
    record: Record
    end: float
    seed: int
    args: argparse.Namespace

    def time_is_up(self) -> bool:
        """Whether no more than what is under way should be done."""
        return time.monotonic() > self.end


def begin(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> Session:
    """Read the step's arguments and open the device."""
    parser.add_argument("--target", required=True, choices=("cuda", "hip", "host"))
    parser.add_argument("--out", required=True, type=Path, help="JSON file for what is found")
    parser.add_argument("--seconds", type=float, default=60.0, help="when to begin no more cases")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    args = parser.parse_args(arguments)
    end = time.monotonic() + args.seconds
    record = Record(args.out)
    record.add_facts(seed=args.seed)
    scale = DRY if args.target == "host" else GPU
    return Session(open_driver(args.target), scale, record, end, args.seed, args)
