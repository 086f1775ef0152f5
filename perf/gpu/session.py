"""What every step starts with: its arguments, the device, and how large things are there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastkern.device.driver import Driver
from fastkern.device.open_driver import open_driver
from fastkern.errors import DeviceUnavailableError

from .record import Record

SHAPES = ((1, 1), (1, 3), (2, 2), (3, 1), (2, 3), (1, 8), (2, 4), (4, 2))  # servers x ranks
_DRY_SHAPES = ((1, 1), (1, 3), (2, 2), (3, 1))


@dataclass(frozen=True)
class Scale:
    """Sizes of cases and measures. lanes: of blocks, to be taken in turn. ranks: of a cluster at
    most; measures have as many. The rest: at most."""

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
    ranks: int = 8

    def possible(self, shape: tuple[int, int]) -> bool:
        """Whether a cluster may have so many servers, of so many ranks."""
        return shape[0] * shape[1] <= self.ranks

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
# Of a kernel in Triton: each number of lanes is another image to be compiled.
GPU_TRITON = replace(GPU, lanes=(256, 64))
# Triton's interpreter takes 10 ms for what a thread does in 10 us, and holds one rank.
INTERPRETED = replace(
    DRY, shapes=((1, 1),), lanes=(1,), stage_rows=4, stage_tokens=4, call_bytes=1024, ranks=1
)


def scale_of(driver: Driver) -> Scale:
    """What the driver's kernels are checked with."""
    if driver.target == "host":
        return INTERPRETED if driver.kernels == "triton" else DRY
    return GPU_TRITON if driver.kernels == "triton" else GPU


def open_kernels(target: str, kernels: str) -> Driver:
    """The driver of a target, with the kernels in C++ ("cxx") or in Triton ("triton").

    Raises DeviceUnavailableError where there is none, or PyTorch, by which the kernels in Triton
    are opened, is not of that target.
    """
    if kernels == "cxx":
        return open_driver(target)
    driver = open_driver("triton")
    if driver.target != target:
        driver.close()
        found = f"the kernels in Triton run on {driver.target} here, not on {target}"
        raise DeviceUnavailableError(f"{found}: that is as PyTorch and TRITON_INTERPRET have it")
    return driver


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
    parser.add_argument("--kernels", choices=("cxx", "triton"), default="cxx")
    parser.add_argument("--out", required=True, type=Path, help="JSON file for what is found")
    parser.add_argument("--seconds", type=float, default=60.0, help="when to begin no more cases")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    args = parser.parse_args(arguments)
    end = time.monotonic() + args.seconds
    record = Record(args.out)
    record.add_facts(seed=args.seed)
    driver = open_kernels(args.target, args.kernels)
    return Session(driver, scale_of(driver), record, end, args.seed, args)
