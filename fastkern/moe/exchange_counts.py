"""The exchange of counts: a page in each rank's entry record, further pages if there are many."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..planner import Topology
from ..records import MOST_BODY_WORDS, OP_COUNTS, Words, agreed_bodies, encode_call
from ..runtime import Runtime
from .backend import Route
from .counts import RouteCounts

HEAD = 1  # word of a record before the counts: 1 + rows of `out`, 0 where none was given
_COUNTS_PER_PAGE = 2 * (MOST_BODY_WORDS - HEAD)  # of 32 bits


def count_page(route: Route, page: int) -> Words:
    """The head, empty, and a page of this rank's counts."""
    part = route.totals[page * _COUNTS_PER_PAGE : (page + 1) * _COUNTS_PER_PAGE]
    words: Words = np.zeros(HEAD + -(-len(part) // 2), dtype=np.uint64)
    words[HEAD:].view(np.uint32)[: len(part)] = part
    return words


def all_counts(runtime: Runtime, route: Route, body: Words) -> Any:
    """Counts of all ranks [R, E + N + R]: in the records, and in further pages if need be."""
    total = len(route.totals)
    pages = [body]
    for page in range(1, -(-total // _COUNTS_PER_PAGE)):
        record = encode_call(OP_COUNTS, f"page {page}", "", count_page(route, page))
        pages.append(agreed_bodies(runtime.exchange(record, "dispatch")))
    rows = [np.ascontiguousarray(p[:, HEAD:]).view(np.uint32) for p in pages]
    return np.concatenate(rows, axis=1)[:, :total]


def given_counts(
    counts: RouteCounts | Sequence[torch.Tensor] | None,
    num_experts: int,
    topology: Topology,
    rank: int,
    route: Route,
) -> RouteCounts | None:
    """The caller's counts, checked against what this rank found; None if there are none."""
    if counts is None:
        return None
    if not isinstance(counts, RouteCounts):
        parts = [np.asarray(c) for c in counts]
        if len(parts) != 3:
            raise ValueError("counts must be copies [R, E], to_server [R, N] and to_rank [R, R]")
        counts = RouteCounts(*parts)
    counts.check(num_experts, topology.servers, topology.num_ranks)
    if not np.array_equal(counts.row(rank), route.totals.astype(np.int64)):
        raise ValueError("counts are not those of topk_idx")
    return RouteCounts(
        *(
            np.ascontiguousarray(c, dtype=np.int64)
            for c in (counts.copies, counts.to_server, counts.to_rank)
        )
    )


def counts_hash(counts: RouteCounts) -> str:
    digest = hashlib.sha256()
    for part in (counts.copies, counts.to_server, counts.to_rank):
        digest.update(part.tobytes())
    return digest.hexdigest()[:16]
