"""From measures to a profile: lanes, tiles and chunks of all calls, how many blocks for each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .profile import SizeRule
from .search import Measured
from .search_space import Shape

NEARLY = 1.03  # no worse than the best, as far as we can tell


@dataclass(frozen=True)
class Chosen:
    """What a search has found. best: for each operation and size, the measure that was chosen."""

    shape: Shape
    num_blocks: int
    operations: dict[str, tuple[SizeRule, ...]]
    best: dict[tuple[str, int], Measured]


def select(measures: Sequence[Measured]) -> Chosen:
    """The parameters to launch with.

    Lanes, tiles and chunks are one choice for all calls: the one with the least geometric mean of
    times, each with its best number of blocks. Blocks are chosen for each operation and size: the
    fewest that take at most 3% longer than the best; the other processors are left to computing.
    Calls larger than what was measured get the most of what the largest ones got.
    """
    by_call: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    for measured in measures:
        by_call[measured.op, measured.size].append(measured)
    shapes = sorted({measured.shape for measured in measures})
    shape = min(shapes, key=lambda shape: _log_times(by_call.values(), shape))
    best = {call: _fewest([m for m in ms if m.shape == shape]) for call, ms in by_call.items()}
    sizes = sorted({size for _, size in best})
    largest = [m.num_blocks for (_, size), m in best.items() if size == sizes[-1]]
    operations = {}
    for op in dict.fromkeys(op for op, _ in best):
        rules: list[SizeRule] = []
        for size in sizes:
            if rules and rules[-1].num_blocks == best[op, size].num_blocks:
                rules.pop()
            rules.append(SizeRule(size, best[op, size].num_blocks))
        if rules[-1].num_blocks == max(largest):
            rules.pop()
        operations[op] = tuple(rules)
    return Chosen(shape, max(largest), operations, best)


def _log_times(calls: Iterable[list[Measured]], shape: Shape) -> float:
    total = 0.0
    for measures in calls:
        total += math.log(min(m.median_us for m in measures if m.shape == shape))
    return total


def _fewest(measures: Sequence[Measured]) -> Measured:
    """Of one call."""
    limit = NEARLY * min(m.median_us for m in measures)
    good = [m for m in measures if m.median_us <= limit]
    return min(good, key=lambda m: m.num_blocks)
