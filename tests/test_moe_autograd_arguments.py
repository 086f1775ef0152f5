"""Arguments of dispatch and combine where gradients are about: NumPy's, wrong ones, refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastkern import ClosedError, FastkernError
from fastkern.moe import exchanges
from fastkern.moe.counts import RouteCounts
from fastkern.moe.sizes import worst_case_rows
from tests.moe_layers import (
    PROBLEMS,
    Inputs,
    Problem,
    all_same,
    backward,
    communicator,
    expert_rank,
    loss_of,
    problem_named,
    routing_of,
    same,
    sharded_layer,
)
from tests.processes import Pool


def numpy_arguments(rank: int, num_ranks: int, with_counts: bool) -> None:
    """NumPy's numbers do, and the caller's counts; gradients flow all the same."""
    problem = Problem(options={"zero_padding": True})
    inputs = Inputs.of(problem, rank)
    owners = np.array([expert_rank(problem, expert) for expert in range(6)])
    routing, counts = routing_of(problem), None
    if with_counts:
        to_rank = np.zeros((4, 4), dtype=np.int64)
        to_server = np.zeros((4, 2), dtype=np.int64)
        copies = np.zeros((4, 6), dtype=np.int64)
        for source, choices in enumerate(routing.choices):
            for token, experts in enumerate(choices):
                there = routing.ranks_of(source, token)
                to_rank[source, there] += 1
                to_server[source, sorted({other // 2 for other in there})] += 1
                np.add.at(copies[source], [e for e in experts if e >= 0], 1)
        counts = RouteCounts(copies, to_server, to_rank)
    with communicator() as comm:
        y, right = backward(comm, problem)
        recv, weights, per_expert, handle = comm.dispatch(
            inputs.x,
            problem.topk_idx[rank],
            inputs.topk_weights,
            num_experts=np.int64(6),
            expert_to_rank=owners,
            expert_alignment=np.int32(1),
            zero_padding=np.bool_(True),
            counts=counts,
        )
        rows = [
            torch.tanh(part @ matrix)
            for part, matrix in zip(recv.split(per_expert.tolist()), inputs.matrices, strict=True)
        ]
        got = comm.combine(torch.cat(rows), handle, weights, inputs.bias)
        loss_of(problem, rank, got).backward()
    assert same(got.detach(), y)
    assert all_same(inputs.gradients, right)


@pytest.mark.parametrize("with_counts", [False, True])
def test_arguments_of_numpy(four: Pool, with_counts: bool) -> None:
    four.run(numpy_arguments, with_counts)


def one_is_wrong(rank: int, num_ranks: int, spoil: str) -> None:
    """One rank's argument is of a type that no operator takes; others' are right."""
    problem = Problem()
    wrong = rank == 2
    given: dict[str, Any] = {
        "x": problem.xs[rank],
        "topk_idx": problem.topk_idx[rank],
        "topk_weights": problem.topk_weights[rank],
        "num_experts": 6,
    }
    summed: dict[str, Any] = {"weights": None, "wire_dtype": None, "bias": None}
    with communicator() as comm:
        if wrong and spoil in given:
            given[spoil] = {"num_experts": "6"}.get(spoil, [1, 2])
        _, weights, _, handle = comm.dispatch(**given)
        summed |= {"expert_out": torch.zeros(len(weights), 2), "handle": handle}
        if wrong:
            summed[spoil] = 7
        comm.combine(**summed)


@pytest.mark.parametrize(
    "spoil",
    [
        *("x", "topk_idx", "topk_weights", "num_experts"),
        *("expert_out", "handle", "weights", "wire_dtype"),
    ],
)
def test_wrong_types_on_one_rank(four: Pool, spoil: str) -> None:
    for error in four.errors(one_is_wrong, spoil):
        assert isinstance(error, TypeError), repr(error)


def refused(rank: int, num_ranks: int, how: Callable[[Any, Problem, int], None]) -> None:
    with communicator() as comm:
        how(comm, Problem(), rank)


def second_order(comm: Any, problem: Problem, rank: int) -> None:
    inputs = Inputs.of(problem, rank)
    y = sharded_layer(comm, problem, inputs)
    (slope,) = torch.autograd.grad(loss_of(problem, rank, y.square()), inputs.x, create_graph=True)
    slope.sum().backward()


def into_given(comm: Any, problem: Problem, rank: int) -> None:
    x = problem.xs[rank].requires_grad_()
    comm.dispatch(x, problem.topk_idx[rank], num_experts=6, out=torch.empty(99, 5))


def combine_into_given(comm: Any, problem: Problem, rank: int) -> None:
    recv, _, _, handle = comm.dispatch(problem.xs[rank], problem.topk_idx[rank], num_experts=6)
    comm.combine(recv.requires_grad_(), handle, out=torch.empty_like(problem.xs[rank]))


def bytes_with_gradient(comm: Any, problem: Problem, rank: int) -> None:
    x = problem.xs[rank].to(torch.float8_e4m3fn).requires_grad_()
    comm.dispatch(x, problem.topk_idx[rank], num_experts=6)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (second_order, FastkernError, "second order"),
        (into_given, ValueError, "out="),
        (combine_into_given, ValueError, "out="),
        (bytes_with_gradient, TypeError, "float8"),
    ],
)
def test_gradients_that_cannot_be_had(
    four: Pool, how: Callable[..., None], kind: type[Exception], words: str
) -> None:
    for error in four.errors(refused, how):
        assert isinstance(error, kind), repr(error)
        assert words in str(error)


def test_a_communicator_is_not_kept() -> None:
    class Owner:
        pass

    owner, functions = Owner(), object()
    number = exchanges.register(owner, functions)
    assert exchanges.lookup(number) == (owner, functions)
    assert exchanges.register(owner, functions) != number
    del owner
    gc.collect()
    with pytest.raises(ClosedError, match="does not exist"):
        exchanges.lookup(number)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if "static" in name])
def test_worst_cases(name: str) -> None:
    """The example of the docstring, and the reference's sizes."""
    assert worst_case_rows(4, 10, 8, 3, 1, "expert") == 120
    assert worst_case_rows(4, 10, 8, 3, 16, "expert") == 176
    assert worst_case_rows(4, 10, 8, 0, 16, "expert") == 0
    assert worst_case_rows(4, 10, 8, 3, 16, "rank") == 40
    assert worst_case_rows(4, 10, 8, 0, 16, "rank") == 0
    for num_experts in (2, 6, 30):
        routing = routing_of(problem_named(name, num_experts=num_experts))
        for rank in range(4):
            own = len(routing.experts_of(rank))
            arguments = (own, routing.alignment, routing.layout)
            assert routing.num_max is not None
            rows = worst_case_rows(4, routing.num_max, routing.topk, *arguments)
            assert rows == routing.num_rows(rank)
