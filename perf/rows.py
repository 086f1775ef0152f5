"""The one row format of all benchmarks here, and the traffic they share.

A row: benchmark, case, commit, device, servers, ranks per server, bytes per rank, p20, p50 and p80
of the slowest rank's time in microseconds, and the share of the bound (bound / p50; empty where
there is none).
"""

from __future__ import annotations

import csv
import platform
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

RESULTS = Path(__file__).parent / "results.csv"


@dataclass(frozen=True)
class Row:
    """One measured case."""

    benchmark: str
    case: str
    commit: str
    device: str
    servers: int
    ranks_per_server: int
    bytes_per_rank: int
    p20_us: float
    p50_us: float
    p80_us: float
    share_of_bound: float | None


def make_row(
    benchmark: str,
    case: str,
    shape: tuple[int, int, int],
    times_us: npt.ArrayLike,
    bound_us: float | None = None,
) -> Row:
    """A row from times in microseconds; shape is (servers, ranks per server, bytes per rank)."""
    p20, p50, p80 = (float(np.percentile(np.asarray(times_us), p)) for p in (20, 50, 80))
    share = None if bound_us is None else round(bound_us / p50, 4)
    return Row(
        benchmark,
        case,
        commit(),
        device(),
        *shape,
        round(p20, 2),
        round(p50, 2),
        round(p80, 2),
        share,
    )


def commit() -> str:
    """Short hash of the checkout, with + when it has changes; "unknown" outside one."""
    here = Path(__file__).parent
    try:
        run = lambda *a: subprocess.run(  # noqa: E731
            ["git", *a], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        return run("rev-parse", "--short", "HEAD") + ("+" if run("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device() -> str:
    """What it ran on."""
    info = Path("/proc/cpuinfo")
    names = (
        [k for k in info.read_text().splitlines() if k.startswith("model name")]
        if info.exists()
        else []
    )
    name = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{name} x{max(1, len(names))}"


def append(rows: list[Row], path: Path = RESULTS) -> None:
    """Add rows to the CSV file, with its header line if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        if new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def zipf_traffic(
    servers: int, per_server: int, rows_per_rank: int, factor: float, seed: int
) -> npt.NDArray[np.int64]:
    """[R, R] rows: sizes of all pairs of distinct ranks follow rank^-factor, placed at random."""
    num_ranks = servers * per_server
    rng = np.random.default_rng(seed)
    sizes = np.arange(1, num_ranks * (num_ranks - 1) + 1) ** -factor
    rng.shuffle(sizes)
    traffic = np.zeros((num_ranks, num_ranks))
    traffic[~np.eye(num_ranks, dtype=bool)] = sizes
    return (traffic / traffic.sum() * rows_per_rank * num_ranks).astype(np.int64)


def uniform_traffic(
    servers: int, per_server: int, rows_per_rank: int, seed: int
) -> npt.NDArray[np.int64]:
    """[R, R] rows, uniform at random between distinct ranks."""
    num_ranks = servers * per_server
    traffic = np.random.default_rng(seed).random((num_ranks, num_ranks))
    np.fill_diagonal(traffic, 0)
    return (traffic / traffic.sum() * rows_per_rank * num_ranks).astype(np.int64)
