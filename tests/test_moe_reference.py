"""The reference of dispatch and combine against examples worked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fastkern.moe.placement import Placement
from tests.moe_reference import Received, combine, dense_combine, dispatch, slot_choice
from tests.moe_routing import Routing, owners

NAN = float("nan")
PAD = None


def indices(*per_rank: Sequence[Sequence[int]]) -> list[Tensor]:
    """topk_idx of each rank from nested lists."""
    return [torch.tensor(tokens, dtype=torch.int64) for tokens in per_rank]


def marks(routing: Routing) -> list[list[Tensor]]:
    """Inputs whose one number says where it is from: 100 * rank + token."""
    return [
        [torch.arange(routing.num_tokens(rank)) + 100.0 * rank] for rank in range(routing.num_ranks)
    ]


def received(
    routing: Routing, rank: int, weights: list[Tensor] | None = None
) -> tuple[list[float | None], Received]:
    """The marks that the rank receives, PAD for rows that are not written; and the rest."""
    got = dispatch(routing, marks(routing), weights, rank)
    return [PAD if value != value else value for value in got.recv[0].tolist()], got


# -- owners ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "counts"),
    [
        (30, 8, [4, 4, 4, 4, 4, 4, 3, 3]),
        (5, 4, [2, 1, 1, 1]),
        (3, 4, [1, 1, 1, 0]),
        (7, 3, [3, 2, 2]),
        (1, 1, [1]),
    ],
)
def test_f07_first_ranks_own_one_more(num_experts: int, num_ranks: int, counts: list[int]) -> None:
    owner = owners(num_experts, num_ranks, None)
    assert [owner.count(rank) for rank in range(num_ranks)] == counts
    assert owner == sorted(owner)
    assert Placement(num_experts, num_ranks).owner.tolist() == owner


def test_experts_of_a_rank_are_ordered_by_id() -> None:
    placed = [1, 0, 1, 0, 1]
    routing = Routing(1, indices([[0]], [[0]]), 5, placed)
    assert routing.experts_of(0) == [1, 3]
    assert routing.experts_of(1) == [0, 2, 4]
    product = Placement(5, 2, placed)
    assert [product.experts_of(rank) for rank in (0, 1)] == [[1, 3], [0, 2, 4]]
    assert product.local_index.tolist() == [0, 0, 1, 1, 2]


# -- rows ------------------------------------------------------------------------------------------

# Two ranks, experts 0 and 1 on rank 0, 2 and 3 on rank 1. Rank 1's token names expert 1 twice.
SMALL = indices([[1, 2], [0, 1]], [[1, 1]])
SMALL_WEIGHTS = [torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor([[0.5, 0.6]])]


def test_expert_layout() -> None:
    routing = Routing(1, SMALL, 4)
    rows, got = received(routing, 0, SMALL_WEIGHTS)
    assert rows == [1, 0, 1, 100, 100]
    assert got.counts.tolist() == [1, 4]
    assert got.weights is not None
    assert got.weights.tolist() == torch.tensor([0.3, 0.1, 0.4, 0.5, 0.6]).tolist()
    assert got.idx is None
    assert slot_choice(routing, 0).tolist() == [0, 0, 1, 0, 1]
    rows, got = received(routing, 1, SMALL_WEIGHTS)
    assert rows == [0]
    assert got.counts.tolist() == [1, 0]


def test_padding_starts_each_expert_at_a_multiple() -> None:
    routing = Routing(1, SMALL, 4, alignment=3)
    assert received(routing, 0)[0] == [1, PAD, PAD, 0, 1, 100, 100, PAD, PAD]
    assert received(routing, 1)[0] == [0, PAD, PAD]
    assert slot_choice(routing, 0).tolist() == [0, -1, -1, 0, 1, 0, 1, -1, -1]
    assert routing.counts(0) == [1, 4], "padding is not counted"
    zeros = Routing(1, SMALL, 4, alignment=3, zero_padding=True)
    assert received(zeros, 0)[0] == [1, 0, 0, 0, 1, 100, 100, 0, 0]


def test_rank_layout() -> None:
    routing = Routing(1, SMALL, 4, layout="rank")
    rows, got = received(routing, 0, SMALL_WEIGHTS)
    assert rows == [0, 1, 100]
    assert got.idx is not None
    assert got.idx.tolist() == [[1, -1], [0, 1], [1, 1]]
    assert got.weights is not None
    assert torch.equal(got.weights, torch.tensor([[0.1, 0.0], [0.3, 0.4], [0.5, 0.6]]))
    assert got.counts.tolist() == [1, 4], "slots, not rows"
    rows, got = received(routing, 1, SMALL_WEIGHTS)
    assert rows == [0]
    assert got.idx is not None
    assert got.idx.tolist() == [[-1, 0]]


@pytest.mark.parametrize(
    ("layout", "alignment", "num_rows"),
    [("expert", 1, 12), ("expert", 4, 12 + 8), ("expert", 5, 15 + 10), ("rank", 1, 6)],
)
def test_rows_that_do_not_depend_on_the_routing(layout: str, alignment: int, num_rows: int) -> None:
    """R = 2, at most 3 tokens each, K = 2, two experts per rank: 2 * 3 * min(2, 2)."""
    routing = Routing(1, SMALL, 4, None, layout, alignment, num_max=3)
    rows, got = received(routing, 0)
    exact = received(Routing(1, SMALL, 4, None, layout, alignment), 0)[0]
    assert rows == exact + [PAD] * (num_rows - len(exact))
    if got.idx is not None:
        assert got.idx[3:].tolist() == [[-1, -1]] * 3


def test_a_rank_without_experts_has_no_rows() -> None:
    for layout in ("expert", "rank"):
        assert Routing(1, SMALL, 4, [0, 0, 0, 0], layout, 4, num_max=3).num_rows(1) == 0


def test_calls_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="rank 0 has 2 tokens, above 1"):
        Routing(1, SMALL, 4, num_max=1)
    twice = indices([[0, 0]], [[0, 0]])  # four rows where 2 * 1 * min(2, 1) have room
    with pytest.raises(ValueError, match="rank 0 gets 4 rows, above the 2"):
        Routing(1, twice, 2, num_max=1)
    assert Routing(1, twice, 2, None, "rank", num_max=1).num_rows(0) == 2


def test_scale_out_rows_are_distinct_pairs_of_token_and_server() -> None:
    """2 x 2, one expert per rank: rank 0's tokens go to servers (1), (0, 1), (0), none."""
    topk_idx = indices([[2, 3], [0, 2], [1, 0], [-1, -1]], [[3, 3]], [[2, -1]], [[0, 1]])
    assert Routing(2, topk_idx, 4).num_scale_out_rows == 2 + 1 + 0 + 1
    assert Routing(4, topk_idx, 4).num_scale_out_rows == 4 + 1 + 0 + 2
    assert Routing(1, topk_idx, 4).num_scale_out_rows == 0


# -- sums ------------------------------------------------------------------------------------------


def combined(
    servers: int,
    num_ranks: int,
    placed: list[int],
    values: list[float],
    dtype: torch.dtype,
    *,
    weights: list[float] | None = None,
    bias: float | None = None,
    wire_dtype: torch.dtype | None = None,
) -> float:
    """Rank 0's one token, whose choice k is expert k on rank placed[k], which gives values[k]."""
    topk = len(values)
    empty = torch.empty(0, topk, dtype=torch.int64)
    routing = Routing(servers, [torch.arange(topk)[None], *[empty] * (num_ranks - 1)], topk, placed)
    outs, row_weights = [], []
    for rank in range(num_ranks):
        mine = [row.choice for row in routing.rows(rank) if row is not None]
        outs.append(torch.tensor([[values[k]] for k in mine], dtype=dtype).reshape(-1, 1))
        row_weights.append(torch.tensor([(weights or values)[k] for k in mine]))
    given = None if weights is None else row_weights
    biases = None if bias is None else torch.tensor([bias])
    return float(combine(routing, outs, given, biases, wire_dtype, 0))


@pytest.mark.parametrize("values", [[256.0] + [1.0] * 7, [1.0] * 7 + [256.0]])
@pytest.mark.parametrize("placed", [[0] * 8, [0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4])
def test_f10_sums_are_fp32_and_round_once(values: list[float], placed: list[int]) -> None:
    assert combined(1, 2, placed, values, torch.bfloat16) == 264
    assert combined(1, 2, placed, values, torch.float32) == 263


def test_a_remote_servers_sum_is_rounded_on_the_wire() -> None:
    """bf16 above 256 knows even numbers only: the remote 256 + 1 travels as 256."""
    values, placed, bf16 = [1.0, 256.0, 1.0], [0, 1, 1], torch.bfloat16
    assert combined(2, 2, placed, values, bf16) == 256  # 1 + 256 = 257, to even
    assert combined(2, 2, placed, values, bf16, wire_dtype=torch.float32) == 258
    assert combined(1, 2, placed, values, bf16) == 258
    assert combined(2, 2, [1, 0, 0], values, bf16) == 258, "the own server's sum is not rounded"


def test_the_bias_is_added_before_the_rounding() -> None:
    assert combined(1, 1, [0, 0], [256.0, 1.0], torch.bfloat16) == 256
    assert combined(1, 1, [0, 0], [256.0, 1.0], torch.bfloat16, bias=1.0) == 258


@pytest.mark.parametrize(("dtype", "big"), [(torch.float32, 2.0**24), (torch.float64, 2.0**53)])
def test_the_order_of_a_sum(dtype: torch.dtype, big: float) -> None:
    """big + 1 is big again, big + 2 is not."""
    assert combined(1, 1, [0, 0, 0], [big, 1, 1], dtype) == big, "by k"
    assert combined(1, 1, [0, 0, 0], [1, 1, big], dtype) == big + 2, "by k"
    assert combined(1, 2, [0, 1, 1], [big, 1, 1], dtype) == big + 2, "each rank by itself"
    assert combined(1, 2, [1, 0, 1], [1, big, 1], dtype) == big + 2, "each rank by itself"
    assert combined(1, 3, [2, 0, 1], [1, big, 1], dtype) == big, "ranks in order"
    assert combined(1, 3, [0, 1, 2], [1, 1, big], dtype) == big + 2, "ranks in order"
    assert combined(2, 4, [0, 2, 3], [big, 1, 1], dtype) == big + 2, "each server by itself"
    assert combined(4, 4, [0, 2, 3], [big, 1, 1], dtype) == big, "servers in order"
    assert combined(4, 4, [3, 0, 2], [big, 1, 1], dtype) == big + 2, "servers in order"


def test_products_are_rounded_before_they_are_added() -> None:
    """(1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, whose last term fp32 drops; one fused step keeps it."""
    values, weights = [-(1 + 2**-11), 1 + 2**-12], [1.0, 1 + 2**-12]
    assert combined(1, 1, [0, 0], values, torch.float32, weights=weights) == 0


# -- whole calls -----------------------------------------------------------------------------------


def test_f05_a_rank_without_tokens_that_owns_all() -> None:
    """Three ranks send four tokens to six experts of rank 0: 12 tokens, 72 rows."""
    all_six = [list(range(6))] * 4
    topk_idx = [torch.empty(0, 6, dtype=torch.int64), *indices(all_six, all_six, all_six)]
    tokens = [100.0 * rank + token for rank in (1, 2, 3) for token in range(4)]
    routing = Routing(2, topk_idx, 6, [0] * 6)
    rows, got = received(routing, 0)
    assert rows == tokens * 6
    assert got.counts.tolist() == [12] * 6
    assert [routing.num_rows(rank) for rank in range(4)] == [72, 0, 0, 0]
    assert received(Routing(2, topk_idx, 6, [0] * 6, "rank"), 0)[0] == tokens
    outs = [got.recv[0][:, None], *[torch.empty(0, 1)] * 3]
    assert combine(routing, outs, None, None, None, 0).shape == (0, 1)
    assert combine(routing, outs, None, None, None, 2).tolist() == [
        [1200 + 6 * t] for t in range(4)
    ]


def test_f06_masked_slots() -> None:
    """Rank 1 owns experts 2 and 3. Nothing of a slot that is -1 is anywhere."""
    topk_idx = indices([[-1, 0], [3, -1], [-1, -1]], [])
    topk_idx[1] = topk_idx[1].reshape(0, 2)
    weights = [torch.tensor([[NAN, 0.5], [0.25, NAN], [NAN, NAN]]), torch.empty(0, 2)]
    routing = Routing(1, topk_idx, 4)
    first, second = dispatch(routing, marks(routing), weights, 0), received(routing, 1, weights)[1]
    assert (first.recv[0].tolist(), second.recv[0].tolist()) == ([0.0], [1.0])
    assert (first.counts.tolist(), second.counts.tolist()) == ([1, 0], [0, 1])
    assert first.weights is not None
    assert second.weights is not None
    assert (first.weights.tolist(), second.weights.tolist()) == ([0.5], [0.25])
    outs = [torch.tensor([[8.0]]), torch.tensor([[16.0]])]
    out_weights = [first.weights, second.weights]
    sums = combine(routing, outs, out_weights, None, None, 0)
    assert sums.tolist() == [[4.0], [4.0], [0.0]]
    assert combine(routing, outs, None, torch.tensor([3.0]), None, 0).tolist() == [[11], [19], [3]]
    by_rank = dispatch(Routing(1, topk_idx, 4, None, "rank"), marks(routing), weights, 0)
    assert by_rank.weights is not None
    assert by_rank.weights.tolist() == [[0.0, 0.5]]


def test_dense_combine() -> None:
    topk_idx = torch.tensor([[2, -1], [0, 0], [-1, -1]])
    rows = torch.tensor([[[1.0, 2.0], [NAN, NAN]], [[3.0, 4.0], [5.0, 6.0]], [[NAN, 0.0]] * 2])
    weights = torch.tensor([[0.5, NAN], [1.0, 2.0], [NAN, NAN]])
    plain = dense_combine(topk_idx, rows)
    assert plain.dtype == torch.float64
    assert plain.tolist() == [[1, 2], [8, 10], [0, 0]]
    bias = torch.tensor([10.0, 20.0])
    assert dense_combine(topk_idx, rows, weights, bias).tolist() == [[10.5, 21], [23, 36], [10, 20]]
