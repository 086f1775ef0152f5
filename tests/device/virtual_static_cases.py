"""Static exchanges of a virtual cluster, each call compared with the cluster's eager ones.

For every device, as virtual_cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_moe import VirtualDispatch
from fastkern.device.virtual_static import VirtualStatic
from fastkern.device.virtual_static_tensors import StaticResult
from fastkern.moe.dispatch_arguments import DispatchOptions
from fastkern.moe.static_shape import StaticShape, make_static_shape
from tests.device.virtual_cases import random_rows
from tests.moe_checks import same_bytes

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
PLANNERS = ("device", "host")
# Of topk_idx: any experts, few of them -1; at most some choices; all tokens to one; as many
# choices of one expert as fit the worst case of rows; none at all.
KINDS = ("distinct", "masked", "one_expert", "duplicates", "none")


@dataclass(frozen=True)
class StaticCase:
    """An exchange. most: tokens per rank, C. dtypes: of payloads; the first has rows of `width`
    and, with `combine`, is summed; the others have short ones. experts: "default", "random" or
    "few" (ranks without any)."""

    planner: str = "device"
    layout: str = "expert"
    alignment: int = 1
    topk: int = 3
    num_experts: int = 7
    most: int = 9
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.int16)
    width: int = 12
    weights: torch.dtype | None = torch.float32
    wire: torch.dtype | None = None
    combine: bool = True
    experts: str = "default"
    zero_padding: bool = False

    def options(self, num_ranks: int) -> DispatchOptions:
        """Of the exchange, and of eager dispatches."""
        rng, placed = np.random.default_rng(self.num_experts + num_ranks), None
        if self.experts == "random":
            placed = tuple(int(r) for r in rng.integers(num_ranks, size=self.num_experts))
        elif self.experts == "few":
            placed = tuple(e % max(1, num_ranks // 2) for e in range(self.num_experts))
        return DispatchOptions(
            self.num_experts, placed, self.layout, self.alignment, self.zero_padding, self.most
        )

    def row_shapes(self) -> list[tuple[int, ...]]:
        """Of each payload."""
        return [(self.width,), *((k + 1, 2) for k in range(1, len(self.dtypes)))]

    def shape(self, num_ranks: int) -> StaticShape:
        """What the exchange is made with."""
        like = [
            torch.empty(0, *row, dtype=dtype)
            for row, dtype in zip(self.row_shapes(), self.dtypes, strict=True)
        ]
        return make_static_shape(
            like,
            self.topk,
            self.weights,
            like[0] if self.combine else None,
            self.wire,
            self.options(num_ranks),
            self.planner,
            num_ranks,
        )


CASES = (
    StaticCase(alignment=16),
    StaticCase(layout="rank", dtypes=(torch.float64, F8, torch.uint8), weights=torch.float64),
    StaticCase(dtypes=(BF16, F8), wire=torch.float32, width=33, zero_padding=True),
    StaticCase(dtypes=(F8, torch.float32), combine=False, weights=None, experts="few"),
    StaticCase(dtypes=(torch.float64,), weights=torch.float64, topk=8, num_experts=13, most=5),
    StaticCase(num_experts=2, topk=1, width=1, weights=torch.float64),
    StaticCase(alignment=16, num_experts=16, topk=2, most=30, experts="random"),
    StaticCase(layout="rank", dtypes=(BF16,), num_experts=40, topk=32, most=2),
    StaticCase(weights=None, experts="random", most=17),
    StaticCase(layout="rank", alignment=16, experts="few", weights=None, zero_padding=True),
    StaticCase(most=1, topk=5, dtypes=(torch.float16, torch.complex64, torch.int8)),
)


@dataclass(frozen=True)
class Step:
    """Inputs of all ranks."""

    what: str
    xs: list[list[Tensor]]
    idx: list[Tensor]
    weights: list[Tensor] | None


def draw(
    case: StaticCase, tokens: list[int], kind: str, rng: np.random.Generator, idx_dtype: torch.dtype
) -> Step:
    """Random inputs; tokens: of each rank."""
    if kind == "duplicates":
        tokens = [min(n, case.most // case.topk) for n in tokens]
    xs = []
    for n in tokens:
        rows = zip(case.row_shapes(), case.dtypes, strict=True)
        xs.append([_values(n, row, dtype, rng) for row, dtype in rows])
    idx = [_choices(case, n, kind, rng).to(idx_dtype) for n in tokens]
    weights = None
    if case.weights is not None:
        drawn = [torch.from_numpy(rng.random((n, case.topk))) for n in tokens]
        weights = [w.to(case.weights) for w in drawn]
    return Step(f"{kind}, tokens {tokens}", xs, idx, weights)


def _values(n: int, row: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """Numbers where they are summed, else any bytes."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.from_numpy(rng.standard_normal((n, *row))).to(dtype)
    return random_rows(n, row, dtype, rng)


def _choices(case: StaticCase, n: int, kind: str, rng: np.random.Generator) -> Tensor:
    """int64 [n, K]."""
    experts, topk = case.num_experts, case.topk
    idx = np.full((n, topk), -1, dtype=np.int64)
    if kind == "one_expert":
        idx[np.arange(n), rng.integers(topk, size=n)] = int(rng.integers(experts))
    elif kind == "duplicates":
        idx[:] = rng.integers(-1, experts, size=(n, topk))
        idx[: n // 2] = int(rng.integers(experts))
    elif kind != "none":
        for t in range(n):
            drawn = rng.permutation(experts)[:topk]
            idx[t, : len(drawn)] = drawn
        idx[rng.random((n, topk)) < (0.1 if kind == "distinct" else 0.6)] = -1
    return torch.from_numpy(idx)


def steps(
    case: StaticCase,
    num_ranks: int,
    num_steps: int,
    rng: np.random.Generator,
    tokens: list[int] | None = None,
    idx_dtype: torch.dtype | None = None,
) -> Iterator[Step]:
    """Every kind in turn, tokens from 0 to C on every rank. tokens: the same in each step."""
    for k in range(num_steps):
        counts = tokens or [int(n) for n in rng.integers(0, case.most + 1, size=num_ranks)]
        if tokens is None and k % 3 == 0:
            counts[k // 3 % num_ranks] = case.most
        if tokens is None and k % 3 == 1:
            counts[int(rng.integers(num_ranks))] = 0
        kinds = KINDS if tokens is None else [kind for kind in KINDS if kind != "duplicates"]
        dtype = idx_dtype or (torch.int64, torch.int32)[k % 2]
        yield draw(case, counts, kinds[k % len(kinds)], rng, dtype)


def write(exchange: VirtualStatic, step: Step) -> None:
    """The step's inputs."""
    exchange.write(step.xs, step.idx, step.weights)


def check_result(
    cluster: VirtualCluster, exchange: VirtualStatic, case: StaticCase, step: Step
) -> None:
    """What the exchange has given is what the cluster's own dispatch and combine give, bit by bit;
    poison stays where neither writes."""
    got = exchange.read()
    options = case.options(cluster.num_ranks)
    right = cluster.dispatch(step.xs, step.idx, step.weights, options)
    try:
        for rank in range(cluster.num_ranks):
            _compare(cluster, case, step, rank, got, right)
        if not case.combine:
            assert got.sums is None
            return
        sums = cluster.combine(
            right.handle,
            [recv[0] for recv in right.recv],
            right.weights if _weighted(case) else None,
            wire_dtype=case.wire,
        )
        assert got.sums is not None
        for rank, (a, b) in enumerate(zip(got.sums, sums, strict=True)):
            same_bytes(a, b, f"{case}, {step.what}: sums of rank {rank}")
    finally:
        right.handle.close()


def _weighted(case: StaticCase) -> bool:
    """Whether the exchange's combine applies the weights received."""
    sums = torch.float64 if case.dtypes[0] == torch.float64 else torch.float32
    return case.layout == "expert" and case.weights == sums


def _compare(
    cluster: VirtualCluster,
    case: StaticCase,
    step: Step,
    rank: int,
    got: StaticResult,
    right: VirtualDispatch,
) -> None:
    what = f"{case}, {step.what}: rank {rank}"
    same_bytes(got.tokens_per_expert[rank], right.tokens_per_expert[rank], f"{what}, counts")
    pairs = [(a, b, f"payload {p}") for p, (a, b) in enumerate(zip(
        got.recv[rank], right.recv[rank], strict=True))]  # fmt: skip
    if case.weights is not None:
        assert got.weights is not None
        assert right.weights is not None
        pairs.append((got.weights[rank], right.weights[rank], "weights"))
    if case.layout == "rank":
        assert got.idx is not None
        assert right.idx is not None
        pairs.append((got.idx[rank], right.idx[rank], "indices"))
    place = _places(cluster, case, right, rank)
    for a, b, name in pairs:
        if place is not None:  # the rest holds what padding does: that at the eager one's end
            spread = b[-1:].expand_as(b).clone()
            spread[place] = b[: len(place)]
            b = spread if len(place) < len(b) else b
        same_bytes(a, b, f"{what}, {name}")


def _places(
    cluster: VirtualCluster, case: StaticCase, right: VirtualDispatch, rank: int
) -> Tensor | None:
    """Rank layout, planned on the device: where the rows of an eager dispatch lie, those of source
    s from s * C on."""
    if case.layout == "expert" or case.planner == "host":
        return None
    counts = right.handle.counts.to_rank[:, rank]
    return torch.cat(
        [torch.arange(s * case.most, s * case.most + int(n)) for s, n in enumerate(counts)]
    )


def check_steps(
    cluster: VirtualCluster,
    case: StaticCase,
    num_steps: int,
    rng: np.random.Generator,
) -> None:
    """Steps on one exchange, run eagerly."""
    exchange = cluster.static_exchange(case.shape(cluster.num_ranks))
    try:
        for step in steps(case, cluster.num_ranks, num_steps, rng):
            write(exchange, step)
            exchange.run()
            check_result(cluster, exchange, case, step)
    finally:
        exchange.close()


def check_static_replays(
    cluster: VirtualCluster, case: StaticCase, num_steps: int, rng: np.random.Generator
) -> None:
    """A captured call replayed with other inputs: topk_idx, counts, tokens (where the host plans:
    as captured) and ranks without any. Eager calls of the cluster after each replay, and eager runs
    of the exchange after some."""
    num_ranks, tokens, idx_dtype = cluster.num_ranks, None, None
    if case.planner == "host":
        tokens = [int(n) for n in rng.integers(0, case.most + 1, size=num_ranks)]
        tokens[int(rng.integers(num_ranks))] = 0
        idx_dtype = torch.int64
    exchange = cluster.static_exchange(case.shape(num_ranks))
    try:
        all_steps = list(steps(case, num_ranks, num_steps, rng, tokens, idx_dtype))
        write(exchange, all_steps[0])
        exchange.capture()
        for k, step in enumerate(all_steps):
            write(exchange, step)
            exchange.replay()
            check_result(cluster, exchange, case, step)
            if k % 2:
                write(exchange, all_steps[-1 - k])
                exchange.run()
                check_result(cluster, exchange, case, all_steps[-1 - k])
    finally:
        exchange.close()
