"""The MoE layer over ranks against the same layer in one process; its weights and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fastkern
from fastkern.nn import load_whole_state, sum_gradients, whole_state
from tests.nn_cases import (
    CASES,
    Case,
    same_bits,
    sgd_weights,
    spread_output,
    spread_step,
    whole_step,
)
from tests.processes import Pool


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_have_the_bits_of_one_process(four: Pool, case: Case) -> None:
    case = replace(case, dtype=torch.float32)
    whole, exchange = case.layer(None), case.one_process()
    xs = [case.tokens(rank) for rank in range(4)]
    with torch.no_grad():
        # A rank's tokens go through its gate alone; products of other shapes can have other bits.
        idx, weights = map(torch.cat, zip(*(whole.gate(x) for x in xs), strict=True))
        rows, row_weights, _, handle = exchange.dispatch(
            torch.cat(xs), idx, weights, num_experts=case.num_experts
        )
        computed = whole.run_experts(rows, handle.tokens_per_expert_list)
        expected = exchange.combine(computed, handle, row_weights).split(list(case.num_tokens))
    for found, right in zip(
        four.run(spread_output, case, ["own weights", "from whole"]), expected, strict=True
    ):
        assert [same_bits(output, right) for output in found] == [True, True]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_one_process(
    four: Pool, case: Case, dtype: torch.dtype, tolerance: float
) -> None:
    case = replace(case, dtype=dtype)
    whole = whole_step(case)
    steps = four.run(spread_step, case)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(torch.cat([s.output for s in steps]), whole.output, **close)
    torch.testing.assert_close(torch.cat([s.grad_x for s in steps]), whole.grad_x, **close)
    names: list[str] = []
    for step in steps:
        for name, grad in step.grads.items():
            torch.testing.assert_close(grad, whole.grads[name], **close)
        names += step.grads
    assert set(names) == set(whole.grads)
    assert names.count("gate.scores.weight") == 4
    assert all(names.count(name) == 1 for name in whole.grads if "experts" in name)


def test_bfloat16_is_close(four: Pool) -> None:
    case = replace(CASES[0], dtype=torch.bfloat16)
    with torch.no_grad():
        whole = case.layer(None)(torch.cat([case.tokens(rank) for rank in range(4)]))
    found = torch.cat([outputs[0] for outputs in four.run(spread_output, case, ["own weights"])])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, whole, rtol=2e-2, atol=2e-2)


def _no_expert_no_gate_gradient(rank: int, num_ranks: int) -> list[Tensor | None]:
    """A first layer whose gate is frozen: a rank without experts has nothing that wants any."""
    case = Case(2, 1, (3, 3, 3, 3), 2)
    layer = case.layer(fastkern.init(servers=2))
    layer.gate.requires_grad_(False)
    layer(case.tokens(rank)).sum().backward()
    return [p.grad for p in layer.experts.parameters()]


def test_backward_passes_a_rank_with_nothing_to_learn(four: Pool) -> None:
    grads = four.run(_no_expert_no_gate_gradient)
    assert [len(g) for g in grads] == [4, 4, 0, 0]
    assert all(g is not None for rank in grads for g in rank)


# -- weights and gradients in a training loop ------------------------------------------------------


def _states(rank: int, num_ranks: int, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of a model that was loaded from another's whole state: its own, and gathered."""
    comm = fastkern.init(servers=case.servers)
    torch.manual_seed(77)
    given = nn.ModuleDict({"a": nn.Linear(2, 3), "moe": case.layer(None), "top": case.layer(None)})
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "moe": case.layer(comm), "top": case.layer(comm)})
    with torch.no_grad():
        for p in given.parameters():
            p.uniform_()
    load_whole_state(model, given.state_dict())
    gathered = whole_state(model)
    assert gathered.keys() == given.state_dict().keys()
    assert all(torch.equal(gathered[k], v) for k, v in given.state_dict().items())
    return dict(model.state_dict()), gathered


def test_state_of_ranks_is_the_whole_one(four: Pool) -> None:
    case = Case(6, 2, (1, 1, 1, 1), 2, (3, 1, 3, 0, 1, 3))
    states = four.run(_states, case)
    for own, whole in states:
        assert all(torch.equal(whole[name], value) for name, value in own.items())
    own = [{n.split(".")[2] for n in s if n.startswith("moe.experts")} for s, _ in states]
    assert own == [{"3"}, {"1", "4"}, set(), {"0", "2", "5"}]


def _summed(rank: int, num_ranks: int) -> list[list[float] | None]:
    small, wide, double, frozen, unused = (nn.Parameter(torch.zeros(n)) for n in (1, 2, 1, 1, 1))
    double.data = double.data.double()
    small.grad = torch.tensor([rank + 1.0])
    wide.grad = None if rank == 2 else torch.tensor([1.0, rank])
    double.grad = torch.tensor([1e-12 * rank + 1], dtype=torch.float64)
    frozen.requires_grad_(False)
    sum_gradients([small, wide, double, frozen, unused])
    return [
        None if p.grad is None else p.grad.tolist() for p in (small, wide, double, frozen, unused)
    ]


def test_gradients_are_summed_over_ranks(four: Pool) -> None:
    for found in four.run(_summed):
        assert found[0] == [10.0]
        assert found[1] == [3.0, 4.0]
        assert found[2] == pytest.approx([4 + 6e-12], abs=1e-15)
        assert found[3:] == [None, [0.0]]


def test_replicated_weights_stay_equal(four: Pool) -> None:
    case = Case(4, 2, (5, 0, 7, 3), 1)
    weights = four.run(sgd_weights, case)
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))
