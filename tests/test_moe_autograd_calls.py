"""Gradients and what else one does with them: handles used late or again, checkpoints, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastkern.moe import operators
from tests.moe_layers import (
    Inputs,
    Problem,
    all_same,
    backward,
    communicator,
    loss_of,
    problem_named,
    same,
    sharded_layer,
)
from tests.processes import Pool

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
    first = Inputs.of(problem, rank)

    def gradients(comm: Any, given: Any, used: Any, fresh: bool) -> list[Tensor | None]:
        """Of a layer whose dispatch goes by `given`, and whose combine goes by `used`."""
        x, weights = (leaf.detach().requires_grad_() for leaf in first.leaves[:2])
        how = {"topk_idx": idx, "num_experts": 6, **options} if fresh else {"handle": given}
        recv, recv_weights, counts, made = comm.dispatch(x * 2, topk_weights=weights, **how)
        assert same(counts, given.tokens_per_expert)
        scale = recv_weights if recv_weights.dim() == 1 else recv_weights.sum(1)
        y = comm.combine(recv[:, :4] * scale.unsqueeze(1), used or made)
        (y * cotangent).sum().backward()
        return [x.grad, weights.grad]

    with communicator() as comm:
        recv, _, _, handle = comm.dispatch(first.x, idx, num_experts=6, **options)
        right = gradients(comm, handle, None, True)
        assert all_same(gradients(comm, handle, None, False), right)
        comm.combine(torch.zeros_like(recv), handle).sum().backward()
        assert same(first.x.grad, torch.zeros_like(first.x))
        for _ in range(2):  # the backward of the first dispatch is over, and not for these
            assert all_same(gradients(comm, handle, handle, False), right)


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


@pytest.mark.parametrize("name", ["expert", "no-experts", "no-experts-rank", "rank-static"])
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


@pytest.mark.parametrize("name", ["expert", "no-experts-rank"])
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
        said.extend(f"{op.overload}: {name}: {result}" for name, result in found.items())

    with communicator() as comm:
        number, idx = comm.exchange_number, problem.topk_idx[rank]
        layout = problem.options.get("layout", "expert")
        most = problem.options.get("num_max_tokens_per_rank")
        first = (
            [x],
            idx,
            weights,
            [],
            number,
            rank,
            num_ranks,
            6,
            None,
            layout,
            1,
            True,
            most,
            None,
        )
        check(operators.dispatch_op, first)  # no more: no two calls have equal handles
        recv, recv_weights, recv_idx, _, meta, anchor = operators.dispatch_op(*first)
        again = ([x], weights, meta, anchor.detach(), recv_idx, number, None)
        check(operators.dispatch_again_op, again, "test_aot_dispatch_dynamic")
        rows = recv.detach().requires_grad_()
        row_weights = recv_weights.detach().reshape(len(rows), -1)[:, 0].clone().requires_grad_()
        bias = torch.zeros(problem.hidden, dtype=x.dtype).requires_grad_()
        check(
            operators.combine_op,
            (rows, row_weights, bias, meta, anchor.detach(), number, torch.float64, None),
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
