"""Gradients and what else one does with them: handles used late or again, checkpoints, errors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastkern import ClosedError, FastkernError
from fastkern.moe import exchanges, operators
from fastkern.moe.counts import RouteCounts
from fastkern.moe.sizes import worst_case_rows
from tests.moe_layers import (
    PROBLEMS,
    Inputs,
    Problem,
    backward,
    communicator,
    expert_rank,
    problem_named,
    routing_of,
    same,
    sharded_layer,
)
from tests.processes import Pool


def loss_of(problem: Problem, rank: int, y: Tensor) -> Tensor:
    """What is differentiated."""
    return (y * problem.cotangents[rank]).sum()


def all_same(ones: list[Tensor | None], others: list[Tensor | None]) -> bool:
    """Whether all gradients are equal, bit by bit."""
    pairs = zip(ones, others, strict=True)
    return all((a is None and b is None) or same(a, b) for a, b in pairs)


# -- handles ---------------------------------------------------------------------------------------


def late(rank: int, num_ranks: int, problem: Problem, num_calls: int) -> None:
    """A backward long after its forward, behind many calls with other routing."""
    with communicator() as comm:
        _, right = backward(comm, problem)
        inputs = Inputs.of(problem, rank)
        y = sharded_layer(comm, problem, inputs)
        with torch.no_grad():
            for seed in range(num_calls):
                other = Problem(seed=seed, topk=2, hidden=3, dtype=torch.float32)
                sharded_layer(comm, other, Inputs.of(other, rank))
        loss_of(problem, rank, y).backward()
    assert all_same(inputs.gradients, right)


@pytest.mark.parametrize("name", ["static", "rank"])
def test_handles_outlive_later_calls(four: Pool, name: str) -> None:
    four.run(late, problem_named(name), 300)  # more than plans are kept


def layout_again(rank: int, num_ranks: int, options: dict[str, Any]) -> None:
    """A layout that is used again: with other rows, in the same step and in later ones."""
    problem = Problem(options=options)
    idx, cotangent = problem.topk_idx[rank], problem.cotangents[rank]
    with communicator() as comm:
        first = Inputs.of(problem, rank)
        _, _, counts, handle = comm.dispatch(first.x, idx, num_experts=6, **options)
        seen: list[Any] = []
        for step in range(3):
            x, weights = (leaf.detach().requires_grad_() for leaf in first.leaves[:2])
            fresh = comm.dispatch(x * 2, idx, weights, num_experts=6, **options)
            again = comm.dispatch(x * 2, topk_weights=weights, handle=handle)
            assert same(again[0], fresh[0])
            assert same(again[2], counts)
            results = []
            for recv, recv_weights, _, made in (fresh, again):
                scale = recv_weights if recv_weights.dim() == 1 else recv_weights.sum(1)
                # The old handle does for the second one from the second step on.
                used = handle if made is again[3] and step else made
                y = comm.combine(recv[:, :4] * scale.unsqueeze(1), used)
                grads = torch.autograd.grad((y * cotangent).sum(), (x, weights), retain_graph=True)
                results.append(grads)
            assert all_same(*(list(r) for r in results))
            seen.append(results[1])
            if step == 0:
                y = comm.combine(recv.detach(), handle)  # its way back is the first dispatch
                y.sum().backward()
                assert first.x.grad is not None
        assert all_same(list(seen[0]), list(seen[2]))


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_layout_is_used_again(four: Pool, layout: str) -> None:
    four.run(layout_again, {"layout": layout, "zero_padding": True, "expert_alignment": 2})


# -- what PyTorch does with functions --------------------------------------------------------------


def checkpointed(rank: int, num_ranks: int, problem: Problem) -> None:
    """Computing the layer again in backward gives the same bits."""
    with communicator() as comm:
        y, right = backward(comm, problem)
        inputs = Inputs.of(problem, rank)
        calls = 0

        def layer(*leaves: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return sharded_layer(comm, problem, Inputs(*leaves))

        again = checkpoint(layer, *inputs.leaves, use_reentrant=False)
        loss_of(problem, rank, again).backward()
    assert calls == 2
    assert same(again.detach(), y)
    assert all_same(inputs.gradients, right)


@pytest.mark.parametrize("name", ["expert", "no-experts", "rank-static"])
def test_activation_checkpointing(four: Pool, name: str) -> None:
    four.run(checkpointed, problem_named(name, dtype=torch.float32))


def branches(rank: int, num_ranks: int, problem: Problem) -> None:
    """Two layers side by side and one behind: the sum of what each gives alone."""
    with communicator() as comm:
        alone = [backward(comm, problem)[1], backward(comm, problem)[1]]
        inputs = [Inputs.of(problem, rank) for _ in range(2)]
        ys = [sharded_layer(comm, problem, each) for each in inputs]
        loss_of(problem, rank, ys[0] + ys[1]).backward()
    for each, right in zip(inputs, alone, strict=True):
        assert all_same(each.gradients, right)


@pytest.mark.parametrize("name", ["expert", "no-experts"])
def test_layers_side_by_side(four: Pool, name: str) -> None:
    four.run(branches, problem_named(name))


def checked_by_torch(rank: int, num_ranks: int, problem: Problem) -> list[str]:
    """PyTorch's own checks of the operators; what they said."""
    x, weights = Inputs.of(problem, rank).leaves[:2]
    said: list[str] = []

    def check(op: Any, arguments: tuple[Any, ...], *more: str) -> None:
        checks = ("test_schema", "test_autograd_registration", "test_faketensor", *more)
        found = torch.library.opcheck(
            op.overload, arguments, test_utils=checks, raise_exception=False
        )
        said.extend(f"{op}: {name}: {result}" for name, result in found.items())

    with communicator() as comm:
        number, idx = comm.exchange_number, problem.topk_idx[rank]
        layout = problem.options.get("layout", "expert")
        most = problem.options.get("num_max_tokens_per_rank")
        first = ([x], idx, weights, [], number, rank, num_ranks, 6, None, layout, 1, True, most)
        check(operators.dispatch_op, first)  # no more: no two calls have equal handles
        recv, recv_weights, recv_idx, _, meta, anchor = operators.dispatch_op(*first)
        again = ([x], weights, meta, anchor.detach(), recv_idx, number)
        check(operators.dispatch_again_op, again, "test_aot_dispatch_dynamic")
        rows = recv.detach().requires_grad_()
        row_weights = recv_weights.detach().reshape(len(rows), -1)[:, 0].clone().requires_grad_()
        bias = torch.zeros(problem.hidden, dtype=x.dtype).requires_grad_()
        check(
            operators.combine_op,
            (rows, row_weights, bias, meta, anchor.detach(), number, torch.float64),
            "test_aot_dispatch_dynamic",
        )
    return said


@pytest.mark.parametrize("name", ["expert", "rank-static"])
def test_operators_pass_the_checks_of_torch(four: Pool, name: str) -> None:
    problem = problem_named(name)
    problem.topk_weights = [w.nan_to_num(0) for w in problem.topk_weights]  # NaN is not NaN
    for said in four.run(checked_by_torch, problem, timeout_s=120):
        assert len(said) == 3 + 4 + 4
        assert not [line for line in said if not line.endswith("SUCCESS")]


# -- arguments -------------------------------------------------------------------------------------


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
