"""Gradients of MoE layers on processes: against differences, a dense layer and the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.moe_layers import (
    PROBLEMS,
    Inputs,
    Problem,
    StandIn,
    backward,
    communicator,
    dense_layer,
    expert_rank,
    own_experts,
    problem_named,
    routing_of,
    same,
    sharded_layer,
)
from tests.processes import Pool


def differences(rank: int, num_ranks: int, problem: Problem) -> int:
    """Compare gradients with how the sum of all ranks' losses changes; the number compared.

    One input on one rank is moved at a time, along a random direction; all ranks compute.
    """
    step, compared, wrong = 1e-6, 0, []
    with communicator() as comm:
        _, gradients = backward(comm, problem)
        leaves = [leaf.detach() for leaf in Inputs.of(problem, rank).leaves]
        filled: list[Any] = [None] * num_ranks
        dist.all_gather_object(filled, [leaf.numel() > 0 for leaf in leaves])
        for other, index in itertools.product(range(num_ranks), range(len(leaves))):
            if not filled[other][index]:
                continue
            leaf, losses = leaves[index], []
            direction = torch.randn(leaf.shape, dtype=leaf.dtype)
            for sign in (1, -1):
                moved = list(leaves)
                if rank == other:
                    moved[index] = leaf + sign * step * direction
                with torch.no_grad():
                    y = sharded_layer(comm, problem, Inputs(*moved))
                loss = (y * problem.cotangents[rank]).sum()
                dist.all_reduce(loss)
                losses.append(float(loss))
            gradient = gradients[index]
            if rank == other:
                assert gradient is not None
                got = float(torch.where(leaf.isnan(), 0, gradient * direction).sum())
                right = (losses[0] - losses[1]) / (2 * step)
                if not abs(got - right) < 1e-7:
                    wrong.append(f"input {index}: {got}, not {right}")
                compared += 1
    assert not wrong, wrong  # now, when no other rank waits
    return compared


@pytest.mark.parametrize("name", ["static", "rank"])
def test_backward_is_the_slope(four: Pool, name: str) -> None:
    problem = problem_named(name, tokens=(2, 0, 1, 2), topk=2)
    assert four.run(differences, problem) == [4, 2, 4, 4]  # rank 1 has no tokens


def dense(rank: int, num_ranks: int, servers: int, problem: Problem) -> None:
    """Compare result and gradients with those of the dense layer."""
    with communicator(servers) as comm:
        y, gradients = backward(comm, problem)
    matrices = problem.matrices.clone().requires_grad_()
    bias = problem.bias.clone().requires_grad_()
    for other in range(num_ranks):
        theirs = Inputs.of(problem, other)
        theirs.matrices = matrices
        theirs.bias = bias if other == rank else problem.bias
        dense_y = dense_layer(problem, theirs, other)
        (dense_y * problem.cotangents[other]).sum().backward()
        if other == rank:
            mine, right = theirs, dense_y.detach()
    assert matrices.grad is not None
    close = 1e-12 if problem.dtype == torch.float64 else 3e-2
    kwargs = {"rtol": close, "atol": close}
    torch.testing.assert_close(y, right, **kwargs)
    expected = [mine.x.grad, mine.topk_weights.grad, matrices.grad[own_experts(problem, rank)]]
    for got, wanted in zip(gradients, [*expected, bias.grad], strict=True):
        if got is None:  # of experts that a rank has not
            assert wanted is not None
            assert wanted.numel() == 0
            continue
        torch.testing.assert_close(got, wanted, **kwargs)


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("name", PROBLEMS)
def test_equal_to_a_dense_layer(four: Pool, servers: int, name: str) -> None:
    four.run(dense, servers, problem_named(name))


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_equal_to_a_dense_layer_in_bfloat16(four: Pool, layout: str) -> None:
    four.run(dense, 2, problem_named(layout, dtype=torch.bfloat16))


def same_bits(rank: int, num_ranks: int, problem: Problem) -> None:
    """The exchanges give the gradients that the reference's do, bit by bit."""
    with communicator() as comm:
        got = backward(comm, problem)
    right = backward(StandIn(2), problem)
    for one, other in zip([got[0], *got[1]], [right[0], *right[1]], strict=True):
        assert (one is None and other is None) or same(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["static", "rank", "no-experts"])
def test_bits_are_those_of_the_reference(four: Pool, name: str, dtype: torch.dtype) -> None:
    four.run(same_bits, problem_named(name, dtype=dtype, width=33))


def some(rank: int, num_ranks: int, problem: Problem, wanted: list[int]) -> None:
    """Only some inputs require a gradient: it is the same as if all did."""
    with communicator() as comm:
        y, right = backward(comm, problem)
        inputs = Inputs.of(problem, rank)
        for index, leaf in enumerate(inputs.leaves):
            leaf.requires_grad_(index in wanted)
        got = sharded_layer(comm, problem, inputs)
        assert got.requires_grad == bool(wanted)
        if wanted:
            (got * problem.cotangents[rank]).sum().backward()
    assert same(got.detach(), y)
    for index, gradient in enumerate(inputs.gradients):
        assert same(gradient, right[index]) if index in wanted else gradient is None


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [1, 2], []], ids=str)
@pytest.mark.parametrize("name", ["aligned", "rank"])
def test_only_some_inputs_require_gradients(four: Pool, name: str, wanted: list[int]) -> None:
    four.run(some, problem_named(name), wanted)


# -- one operator at a time ------------------------------------------------------------------------


def of_combine(rank: int, num_ranks: int, options: dict[str, Any], whole_bias: bool) -> int:
    """Gradients of combine's inputs in bfloat16, each as its formula says; the padding rows."""
    problem = Problem(dtype=torch.bfloat16, options=options)
    cotangent = problem.cotangents[rank]
    padding = torch.tensor([row is None for row in routing_of(problem).rows(rank)])
    with communicator() as comm:
        _, _, _, handle = comm.dispatch(
            problem.xs[rank], problem.topk_idx[rank], num_experts=6, **options
        )
        rows = torch.randn(len(padding), 4).bfloat16()
        rows[padding] = torch.nan
        weights = torch.rand(len(padding))
        weights[padding] = torch.nan
        bias = torch.randn(problem.bias.shape if whole_bias else cotangent.shape)
        for leaf in (rows, weights, bias):
            leaf.requires_grad_()
        comm.combine(rows, handle, weights, bias).backward(cotangent)
        arrived = comm.dispatch(cotangent, handle=handle)[0]
    precise = arrived.float()
    of_rows = (precise * weights.detach().unsqueeze(1)).bfloat16()
    of_weights = (precise * rows.detach().float()).sum(1)
    of_rows[padding], of_weights[padding] = 0, 0
    assert same(rows.grad, of_rows)
    assert same(weights.grad, of_weights)
    assert same(bias.grad, cotangent.float().sum(0) if whole_bias else cotangent.float())
    return int(padding.sum())


@pytest.mark.parametrize("whole_bias", [True, False])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_gradients_of_combine(four: Pool, layout: str, whole_bias: bool) -> None:
    options = {"layout": layout, "num_max_tokens_per_rank": 5}
    assert all(rows > 0 for rows in four.run(of_combine, options, whole_bias))


def of_dispatch(rank: int, num_ranks: int, options: dict[str, Any]) -> None:
    """On rank 1 only the weights count, elsewhere only the first payload; others nowhere."""
    problem = Problem(dtype=torch.float32, options=options)
    idx = problem.topk_idx[rank]
    x, weights = Inputs.of(problem, rank).leaves[:2]
    ids = torch.arange(len(idx))
    scales = torch.rand(len(idx), 2, 2).requires_grad_()
    fixed = torch.rand(len(idx))
    with communicator() as comm:
        recv, recv_weights, _, _ = comm.dispatch(
            [x, ids, scales, fixed], idx, weights, num_experts=6, **options
        )
        assert [t.requires_grad for t in recv] == [True, False, True, False]
        assert recv_weights.requires_grad
        assert recv_weights.grad_fn is recv[0].grad_fn
        loss = 3 * recv_weights.sum() if rank == 1 else 2 * recv[0].sum()
        loss.backward()
    counts, on_rank_1 = torch.zeros(len(idx)), torch.zeros(idx.shape)
    for token, choices in enumerate(idx.tolist()):
        ranks = [expert_rank(problem, expert) for expert in choices if expert >= 0]
        ranks = sorted(set(ranks)) if options["layout"] == "rank" else ranks
        counts[token] = sum(rank != 1 for rank in ranks)
        for k, expert in enumerate(choices):
            on_rank_1[token, k] = expert >= 0 and expert_rank(problem, expert) == 1
    assert same(x.grad, 2 * counts.unsqueeze(1).expand(x.shape))
    assert same(weights.grad, 3 * on_rank_1)
    assert same(scales.grad, torch.zeros_like(scales))


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_outputs_that_do_not_count_on_one_rank(four: Pool, layout: str) -> None:
    options = {"layout": layout, "num_max_tokens_per_rank": 4, "expert_alignment": 3}
    four.run(of_dispatch, options)
