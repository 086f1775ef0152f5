"""NaN where nobody may look never shows; NaN in a row that counts does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastkern import Communicator
from tests.processes import Pool

NAN = float("nan")
LAYOUTS = ("expert", "rank")
SUMMED = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Ranks 0 to 3 have these tokens; two experts per rank. Rank 3 has none, token 2 of rank 0 goes
# nowhere.
CHOICES = [
    [[-1, 0], [5, -1], [-1, -1], [2, 7]],
    [[6, 6], [-1, 1]],
    [[3, 4], [4, -1], [0, 7]],
    [],
]


def topk_idx_of(rank: int) -> Tensor:
    return torch.tensor(CHOICES[rank], dtype=torch.int64).reshape(-1, 2)


def inputs(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, 4]: rank + 1, NaN where the token goes nowhere; topk_idx; weights: 2 where live."""
    topk_idx = topk_idx_of(rank)
    x = torch.full((len(topk_idx), 4), rank + 1.0, dtype=dtype)
    x[(topk_idx < 0).all(1)] = NAN
    return x, topk_idx, torch.full(topk_idx.shape, 2.0).masked_fill(topk_idx < 0, NAN)


def slots(topk_idx: Tensor, layout: str) -> Tensor:
    """float64 [T]: what a token's rows count: its slots, or the ranks that it goes to."""
    if layout == "expert":
        return (topk_idx >= 0).sum(1).double()
    ranks = [{e // 2 for e in row if e >= 0} for row in topk_idx.tolist()]
    return torch.tensor([float(len(r)) for r in ranks], dtype=torch.float64)


def hidden_nan(
    rank: int, num_ranks: int, servers: int, layout: str, name: str, static: bool, policy: str
) -> None:
    """NaN in masked weights, in tokens that go nowhere, in padding rows and their weights."""
    dtype = SUMMED[name]
    x, topk_idx, weights = inputs(rank, dtype)
    with Communicator(servers=servers, policy=policy, entry_timeout_s=50) as comm:  # type: ignore[arg-type]
        recv, recv_weights, counts, handle = comm.dispatch(
            x,
            topk_idx,
            weights,
            num_experts=8,
            layout=layout,
            expert_alignment=4 if layout == "expert" else 1,
            num_max_tokens_per_rank=4 if static else None,
        )
        live = torch.zeros(len(recv), dtype=torch.bool)
        if layout == "expert":
            begin = 0
            for count in counts.tolist():
                live[begin : begin + count] = True
                begin += -(-count // 4) * 4
        else:
            live = (handle.recv_topk_idx >= 0).any(1)
            recv_weights = recv_weights.amax(1)
        assert not recv[live].isnan().any(), "NaN of a token that goes nowhere"
        assert (recv_weights[live] == 2).all(), "weights"
        assert len(recv) > live.sum() or layout == "rank" or not len(recv), "no padding to test"
        outs, row_weights = recv.clone(), recv_weights.clone()
        outs[~live], row_weights[~live] = NAN, NAN
        right = slots(topk_idx, layout)[:, None] * (rank + 1) * torch.ones(1, 4)
        for given, factor in ((None, 1), (row_weights, 2)):
            sums = comm.combine(outs, handle, weights=given)
            assert sums.dtype == dtype
            assert torch.equal(sums.double(), factor * right), f"{sums}, not {factor * right}"
        bias = torch.full((4,), 8.0, dtype=dtype)
        sums = comm.combine(outs, handle, bias=bias)
        assert torch.equal(sums.double(), right + 8), f"{sums}, not {right + 8}"


@pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])
@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("servers", "policy"), [(1, "auto"), (2, "whole"), (4, "direct")])
def test_nan_that_is_masked_never_shows(
    four: Pool, servers: int, policy: str, layout: str, name: str, static: bool
) -> None:
    four.run(hidden_nan, servers, layout, name, static, policy)


def live_nan(rank: int, num_ranks: int, servers: int, layout: str, name: str) -> None:
    """One number of one row of rank 2's token 0 on rank 1 is NaN; another is infinite."""
    dtype = SUMMED[name]
    x, topk_idx, weights = inputs(rank, dtype)
    x[topk_idx.amax(1) < 0] = 0
    if rank == 2:
        x[0, 1], x[0, 3] = NAN, float("inf")
    with Communicator(servers=servers, entry_timeout_s=50) as comm:
        recv, _, _, handle = comm.dispatch(x, topk_idx, weights, num_experts=8, layout=layout)
        assert int(recv.isnan().sum()) == (1 if rank in (1, 2) else 0), recv
        sums = comm.combine(recv, handle)
        right = slots(topk_idx, layout)[:, None] * (rank + 1) * torch.ones(1, 4)
        if rank == 2:
            assert sums[0, 1].isnan(), sums
            assert sums[0, 3] == float("inf"), sums
            sums[0, 1], sums[0, 3] = right[0, 1], right[0, 3]
        assert torch.equal(sums.double(), right), f"{sums}, not {right}"
        outs = torch.ones(len(recv), 1, dtype=dtype)
        row_weights = torch.ones(len(recv))
        if rank == 0:  # its first row: expert 0 of rank 0's token 0, the first token here
            row_weights[0] = NAN
        sums = comm.combine(outs, handle, weights=row_weights)
        shown = torch.zeros(len(topk_idx), 1, dtype=torch.bool)
        if rank == 0:
            shown[0] = True
        assert torch.equal(sums.isnan(), shown), f"NaN weight: {sums}"


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_nan_that_counts_shows(four: Pool, servers: int, layout: str, name: str) -> None:
    four.run(live_nan, servers, layout, name)
