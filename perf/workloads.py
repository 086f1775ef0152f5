"""Routing to measure with: skew workloads by name, each with one cause, and recorded routing.

A workload is a function of a Shape. It returns one int64 array [tokens, top_k] of expert ids per
rank; the experts of a token are distinct. Token counts may differ between ranks, and -1 (no expert)
may stand in recorded routing. Experts live where `fastkern.moe.placement` puts them by default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from fastkern.moe.placement import Placement

Ints = npt.NDArray[np.int64]
Routing = list[Ints]  # per rank: [tokens, top_k]

HEAT = 0.5  # share of all choices that goes to what is hot, as far as distinct experts allow
BURST_PERIOD = 4  # steps
BURST_FACTOR = 4  # times the tokens of the other steps


@dataclass(frozen=True)
class Shape:
    """What a workload is made for.

    num_ranks: R. num_tokens: tokens of a rank, where the workload gives all ranks alike.
    num_experts: E. top_k: K, at most E. seed: which experts and ranks are hot, and every draw.
    step: which call of a sequence; draws differ from step to step.
    """

    num_ranks: int
    num_tokens: int
    num_experts: int
    top_k: int
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_tokens < 0:
            raise ValueError(f"{self.num_ranks} ranks of {self.num_tokens} tokens are no workload")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"no {self.top_k} distinct experts among {self.num_experts}")

    @property
    def placement(self) -> Placement:
        """Where the experts live."""
        return Placement(self.num_experts, self.num_ranks)

    def lasting(self) -> np.random.Generator:
        """Draws that stay the same from step to step."""
        return np.random.default_rng([self.seed, 0])

    def passing(self) -> np.random.Generator:
        """Draws of this step."""
        return np.random.default_rng([self.seed, 1, self.step])


# -- without skew ----------------------------------------------------------------------------------


def balanced(shape: Shape) -> Routing:
    """Every expert gets as many choices as every other, up to one: shuffled experts dealt out."""
    num_experts, k = shape.num_experts, shape.top_k
    slots = shape.num_ranks * shape.num_tokens * k
    deal = math.lcm(num_experts, k)  # a token never takes from two shuffles
    rng, deals = shape.passing(), []
    for _ in range(-(-slots // deal)):
        deals.append(np.tile(rng.permutation(num_experts), deal // num_experts))
    dealt = np.concatenate(deals)[:slots] if deals else np.empty(0)
    rows = dealt.astype(np.int64).reshape(shape.num_ranks, shape.num_tokens, k)
    return list(rows)


def uniform(shape: Shape) -> Routing:
    """Every token draws distinct experts, all alike likely."""
    rng = shape.passing()
    return [
        _distinct(rng, shape.num_tokens, np.arange(shape.num_experts), shape.top_k)
        for _ in range(shape.num_ranks)
    ]


# -- heat: a few experts take a large share --------------------------------------------------------


def hot_experts(shape: Shape) -> Routing:
    """A random sixteenth of the experts takes HEAT of all choices, whatever ranks they are on."""
    size = max(1, shape.num_experts // 16)
    return _heated(shape, shape.lasting().permutation(shape.num_experts)[:size])


def hot_rank(shape: Shape) -> Routing:
    """The experts of one rank take HEAT of all choices; rank `seed` modulo those with experts."""
    return _heated(shape, _experts_of_hot_rank(shape))


def spread_heat(shape: Shape) -> Routing:
    """`hot_rank` with its experts renumbered so that the hot ones lie on different ranks.

    As many hot experts, as hot, in the same tokens: only where they live differs.
    """
    placement, hot = shape.placement, _experts_of_hot_rank(shape)
    by_place = np.lexsort((placement.owner, placement.local_index))  # first expert of each rank..
    apart = by_place[: len(hot)]
    new_name = np.arange(shape.num_experts)
    # The two sets change places; what is in both stays.
    out, come = np.setdiff1d(hot, apart), np.setdiff1d(apart, hot)
    new_name[out], new_name[come] = come, out
    return [new_name[ids] for ids in hot_rank(shape)]


def rotating_hotspot(shape: Shape) -> Routing:
    """`hot_rank`, with the next rank hot at every step."""
    return _heated(shape, _experts_of_hot_rank(replace(shape, seed=shape.seed + shape.step)))


def _experts_of_hot_rank(shape: Shape) -> Ints:
    with_experts = min(shape.num_ranks, shape.num_experts)
    return np.array(shape.placement.experts_of(shape.seed % with_experts), dtype=np.int64)


def _heated(shape: Shape, hot: Ints) -> Routing:
    """HEAT of every rank's choices among `hot`, the rest among the others, both all alike likely.

    Capped by what distinct experts allow: at most len(hot) of a token's choices are hot.
    """
    rng, k, num_tokens = shape.passing(), shape.top_k, shape.num_tokens
    cold = np.setdiff1d(np.arange(shape.num_experts), hot)
    most, least = min(k, len(hot)), max(0, k - len(cold))
    found = []
    for _ in range(shape.num_ranks):
        total = min(max(round(HEAT * num_tokens * k), least * num_tokens), most * num_tokens)
        num_hot = np.full(num_tokens, total // max(1, num_tokens))
        num_hot[rng.permutation(num_tokens)[: total % max(1, num_tokens)]] += 1
        both = np.concatenate(
            [
                _distinct(rng, num_tokens, hot, most),
                _distinct(rng, num_tokens, cold, min(k, len(cold))),
            ],
            axis=1,
        )
        column = np.arange(k)[None, :]
        taken = np.where(column < num_hot[:, None], column, column - num_hot[:, None] + most)
        found.append(rng.permuted(np.take_along_axis(both, taken, axis=1), axis=1))
    return found


# -- sources, idle parts, time ---------------------------------------------------------------------


def ragged_sources(shape: Shape) -> Routing:
    """Token counts differ from rank to rank, 1 : 2 : .. : R in random order; experts uniform."""
    weights = shape.lasting().permutation(shape.num_ranks) + 1
    total = shape.num_ranks * shape.num_tokens
    ends = np.cumsum(weights) * total // weights.sum()
    counts = np.diff(ends, prepend=0)
    rng, experts = shape.passing(), np.arange(shape.num_experts)
    return [_distinct(rng, int(n), experts, shape.top_k) for n in counts]


def zero_load(shape: Shape) -> Routing:
    """Idle parts: odd ranks hold no tokens, their experts and every second other expert get none.

    The rest is uniform. Raises ValueError where fewer than top_k experts are left.
    """
    placement = shape.placement
    busy = np.flatnonzero((placement.owner % 2 == 0) & (placement.local_index % 2 == 0))
    if len(busy) < shape.top_k:
        raise ValueError(f"zero_load leaves {len(busy)} experts, too few for top-{shape.top_k}")
    rng = shape.passing()
    return [
        _distinct(rng, 0 if rank % 2 else shape.num_tokens, busy, shape.top_k)
        for rank in range(shape.num_ranks)
    ]


def burst(shape: Shape) -> Routing:
    """Uniform; the last of every BURST_PERIOD steps has BURST_FACTOR times the tokens."""
    bursting = shape.step % BURST_PERIOD == BURST_PERIOD - 1
    num_tokens = shape.num_tokens * (BURST_FACTOR if bursting else 1)
    return uniform(replace(shape, num_tokens=num_tokens))


def zipf(shape: Shape, factor: float = 0.8) -> Routing:
    """The j-th most popular expert is drawn with weight j^-factor, which experts at random.

    A token draws one expert after the other, without those that it has: for large top_k the loads
    are flatter than the weights.
    """
    log_weight = -factor * np.log(np.arange(1, shape.num_experts + 1))
    shape.lasting().shuffle(log_weight)
    rng = shape.passing()
    found = []
    for _ in range(shape.num_ranks):
        # The largest of log-weights plus Gumbel noise are such draws.
        key = log_weight + rng.gumbel(size=(shape.num_tokens, shape.num_experts))
        found.append(np.argsort(-key, axis=1)[:, : shape.top_k].astype(np.int64))
    return found


def _distinct(rng: np.random.Generator, num_rows: int, among: Ints, k: int) -> Ints:
    """[num_rows, k] of `among`, distinct within a row, all alike likely."""
    order = np.argsort(rng.random((num_rows, len(among))), axis=1)[:, :k]
    return among[order].reshape(num_rows, k).astype(np.int64)


WORKLOADS: dict[str, Callable[[Shape], Routing]] = {
    "balanced": balanced,
    "uniform": uniform,
    "zipf 0.4": partial(zipf, factor=0.4),
    "zipf 0.8": zipf,
    "hot experts": hot_experts,
    "hot rank": hot_rank,
    "spread heat": spread_heat,
    "rotating hotspot": rotating_hotspot,
    "ragged sources": ragged_sources,
    "zero load": zero_load,
    "burst": burst,
}
