"""What an all-to-all is, and the traffic that tests plan: matrices and inputs, random and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Matrix = npt.NDArray[np.int64]  # [R, R], rows from source to destination
Rows = npt.NDArray[np.uint8]  # [rows, row_bytes]

KINDS = (
    "zero",
    "one_pair",
    "one_row_each",
    "uniform",
    "ragged",
    "sparse",
    "zero_rows",
    "zero_columns",
    "hot_pair",
    "hot_destination",
    "hot_source",
    "hot_tile",
    "local_only",
    "remote_only",
    "diagonal",
)


class Case(NamedTuple):
    """One call: traffic between `servers` x `gpus_per_server` ranks, in rows of `row_bytes`."""

    servers: int
    gpus_per_server: int
    traffic: Matrix
    row_bytes: int


def reference_all_to_all(traffic: Matrix, inputs: Sequence[Rows]) -> list[Rows]:
    """The definition: output d holds, for each source in turn, that source's rows for d.

    traffic: [R, R] rows from source to destination. inputs: R arrays [rows, row_bytes], rows
    ordered by destination. Returns R arrays [rows, row_bytes], rows ordered by source.
    """
    ends = np.cumsum(traffic, axis=1)
    begins = ends - traffic
    num_ranks = len(traffic)
    return [
        np.concatenate([inputs[s][begins[s, d] : ends[s, d]] for s in range(num_ranks)])
        for d in range(num_ranks)
    ]


def random_inputs(traffic: Matrix, row_bytes: int, rng: np.random.Generator) -> list[Rows]:
    """Random bytes for every rank: uint8 [rows that it sends, row_bytes]."""
    return [rng.integers(0, 256, (rows, row_bytes), dtype=np.uint8) for rows in traffic.sum(axis=1)]


def random_traffic(
    servers: int, gpus_per_server: int, rng: np.random.Generator, max_rows: int = 16, kind: str = ""
) -> Matrix:
    """A traffic matrix [R, R] of a kind in `KINDS` (default: any of them).

    Entries are at most max_rows; hot pairs, columns, rows and tiles get 8 * max_rows on top.
    """
    num_ranks = servers * gpus_per_server
    kind = kind or KINDS[rng.integers(len(KINDS))]
    shape = (num_ranks, num_ranks)
    traffic: Matrix = rng.integers(0, max_rows + 1, shape, dtype=np.int64)
    server = np.arange(num_ranks) // gpus_per_server
    same_server = server[:, None] == server[None, :]
    a, b = (int(rank) for rank in rng.integers(num_ranks, size=2))
    hot = 8 * max(1, max_rows)
    if kind == "zero":
        return np.zeros(shape, dtype=np.int64)
    if kind == "one_pair":
        traffic[:] = 0
        traffic[a, b] = hot
    elif kind == "one_row_each":
        traffic[:] = 1
    elif kind == "uniform":
        traffic[:] = max_rows
    elif kind == "sparse":
        traffic[rng.random(shape) < 0.8] = 0
    elif kind == "zero_rows":
        traffic[rng.random(num_ranks) < 0.5, :] = 0
    elif kind == "zero_columns":
        traffic[:, rng.random(num_ranks) < 0.5] = 0
    elif kind == "hot_pair":
        traffic[a, b] += hot
    elif kind == "hot_destination":
        traffic[:, b] += hot
    elif kind == "hot_source":
        traffic[a, :] += hot
    elif kind == "hot_tile":
        traffic[np.ix_(server == server[a], server == server[b])] += hot
    elif kind == "local_only":
        traffic[~same_server] = 0
    elif kind == "remote_only":
        traffic[same_server] = 0
    elif kind == "diagonal":
        traffic[~np.eye(num_ranks, dtype=np.bool_)] = 0
    elif kind != "ragged":
        raise ValueError(f"no such kind of traffic: {kind!r}")
    return traffic


@st.composite
def traffic_matrices(
    draw: st.DrawFn,
    max_servers: int = 5,
    max_gpus_per_server: int = 8,
    max_rows: int = 24,
    max_bytes: int = 1 << 20,
) -> Case:
    """Cases of 1-5 servers of 1-8 ranks, every kind of traffic, rows of 1-20000 bytes.

    max_bytes: the rows of large matrices are kept so narrow that all inputs stay within it, as far
        as rows of 1 byte allow.
    """
    servers = draw(st.integers(1, max_servers))
    gpus_per_server = draw(st.integers(1, max_gpus_per_server))
    kind = draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    traffic = random_traffic(servers, gpus_per_server, rng, draw(st.integers(0, max_rows)), kind)
    widest = min(20000, max(1, max_bytes // max(1, int(traffic.sum()))))
    sizes = st.sampled_from([b for b in (1, 2, 16, 48, 4096, 7168, 20000) if b <= widest])
    row_bytes = draw(sizes | st.integers(1, widest))
    return Case(servers, gpus_per_server, traffic, row_bytes)


def small_matrices(size: int, max_rows: int) -> st.SearchStrategy[Matrix]:
    """Matrices [size, size] drawn entry by entry, so that failures shrink to few rows."""
    entries = st.lists(st.integers(0, max_rows), min_size=size * size, max_size=size * size)
    return entries.map(lambda rows: np.array(rows, dtype=np.int64).reshape(size, size))
