"""The MoE layer whole in one process: against its definition and the ranks' order of sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fastkern.nn import (
    ExpertParallelMoE,
    OneProcess,
    TopKGate,
    load_whole_state,
    replicated_parameters,
)
from tests.moe_reference import combine
from tests.moe_routing import Routing
from tests.nn_cases import FFN, HIDDEN, Case, same_bits


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 1), (6, 3), (5, 5), (1, 1)])
def test_whole_layer_is_its_definition(num_experts: int, top_k: int) -> None:
    layer = Case(num_experts, top_k, (17,), 1).layer(None)
    x = torch.randn(17, HIDDEN, dtype=torch.float64)
    output = layer(x)
    scores = x @ layer.gate.scores.weight.T
    for t in range(len(x)):
        best = scores[t].argsort(descending=True)[:top_k]
        weights = scores[t, best].exp() / scores[t, best].exp().sum()
        expected = sum(
            w * layer.experts[str(int(e))](x[t]) for w, e in zip(weights, best, strict=True)
        )
        torch.testing.assert_close(output[t], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(layer(x.view(17, 1, HIDDEN)), output.view(17, 1, HIDDEN))


def test_whole_layer_is_differentiable() -> None:
    layer = Case(4, 2, (5,), 1).layer(OneProcess(2, 2))
    x = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    expert_weight = layer.experts["1"].up.weight  # type: ignore[union-attr]
    inputs = (x, layer.gate.scores.weight, expert_weight)
    assert torch.autograd.gradcheck(lambda *_: layer(x), inputs)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("expert_to_rank", [None, (3, 1, 0, 3, 2, 1, 1, 0)])
def test_sum_order_is_the_ranks(dtype: torch.dtype, expert_to_rank: tuple[int, ...] | None) -> None:
    torch.manual_seed(1)
    topk_idx = torch.randint(-1, 8, (4, 11, 5))
    weights = torch.rand(4, 11, 5)
    routing = Routing(2, list(topk_idx), 8, expert_to_rank)
    exchange = OneProcess(2, 2, expert_to_rank)
    idx = topk_idx.flatten(0, 1)
    x = torch.randn(44, 3, dtype=dtype)
    rows, row_weights, counts, handle = exchange.dispatch(
        x, idx, weights.flatten(0, 1), num_experts=8
    )
    assert row_weights is not None
    assert counts.tolist() == [int((idx == e).sum()) for e in range(8)]
    assert torch.equal(rows, torch.cat([x[(idx == e).nonzero()[:, 0]] for e in range(8)]))
    computed = torch.randn(len(rows), 3, dtype=dtype)
    computed[::7] = -0.0
    found = exchange.combine(computed, handle, row_weights)
    begins = counts.cumsum(0) - counts
    mine = [  # the rows of each rank's experts
        torch.cat([torch.arange(int(counts[e])) + int(begins[e]) for e in routing.experts_of(rank)])
        for rank in range(4)
    ]
    expected = [
        combine(
            routing,
            [computed[m] for m in mine],
            [row_weights[m] for m in mine],
            None,
            None,
            rank,
        )
        for rank in range(4)
    ]
    assert same_bits(found, torch.cat(expected))
    unweighted = exchange.combine(computed, handle)
    expected = [
        combine(routing, [computed[m] for m in mine], None, None, None, rank) for rank in range(4)
    ]
    assert same_bits(unweighted, torch.cat(expected))


def test_a_token_without_choices_gets_zero() -> None:
    exchange = OneProcess()
    nan = float("nan")
    rows, weights, _, handle = exchange.dispatch(
        torch.ones(3, 2),
        torch.tensor([[-1, 0], [3, -1], [-1, -1]]),
        torch.tensor([[nan, 0.5], [0.25, nan], [nan, nan]]),
        num_experts=4,
    )
    assert rows.shape == (2, 2)
    output = exchange.combine(rows, handle, weights)
    assert output.tolist() == [[0.5, 0.5], [0.25, 0.25], [0, 0]]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="top_k must be 1 to 4, the experts, and is 5"):
        ExpertParallelMoE(HIDDEN, FFN, 4, 5)
    for shape in ((3, 2 * HIDDEN), (HIDDEN + 1,), ()):
        with pytest.raises(ValueError, match=f"x must have rows of {HIDDEN}, and has shape"):
            Case(4, 2, (1,), 1).layer(None)(torch.ones(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match="and is 0"):
        TopKGate(HIDDEN, 4, 0)
    with pytest.raises(ValueError, match="not -1 to 3"):
        OneProcess().dispatch(torch.ones(1, 2), torch.tensor([[4]]), num_experts=4)
    with pytest.raises(ValueError, match="num_experts must be given"):
        OneProcess().dispatch(torch.ones(1, 2), torch.tensor([[0]]))
    with pytest.raises(ValueError, match=r"expert_to_rank\[1\] is 1"):
        ExpertParallelMoE(HIDDEN, FFN, 2, 1, expert_to_rank=[0, 1])


def test_gate_weights_are_float32_for_small_floats() -> None:
    gate = TopKGate(HIDDEN, 4, 2).bfloat16()
    idx, weights = gate(torch.randn(3, HIDDEN, dtype=torch.bfloat16))
    assert idx.dtype == torch.int64
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    assert (weights[:, 0] >= weights[:, 1]).all()


def test_the_global_generator_moves_alike_whatever_lives_here() -> None:
    torch.manual_seed(5)
    few = ExpertParallelMoE(HIDDEN, FFN, 2, 1)
    after_few = torch.rand(3)
    torch.manual_seed(5)
    many = ExpertParallelMoE(HIDDEN, FFN, 9, 1)
    assert torch.equal(torch.rand(3), after_few)
    weights = [e.up.weight for e in (*few.experts.values(), *many.experts.values())]  # type: ignore[union-attr]
    assert torch.equal(weights[0], weights[2])  # type: ignore[arg-type]
    assert not torch.equal(weights[0], weights[1])  # type: ignore[arg-type]
    next_one = ExpertParallelMoE(HIDDEN, FFN, 2, 1)
    assert not torch.equal(few.gate.scores.weight, next_one.gate.scores.weight)


def test_a_state_with_a_name_missing_is_refused() -> None:
    layer = Case(2, 1, (1,), 1).layer(None)
    state = dict(layer.state_dict())
    del state["experts.1.up.bias"]
    with pytest.raises(KeyError, match=r"experts\.1\.up\.bias"):
        load_whole_state(layer, state)


def test_a_layer_alone_is_all_replicated_but_its_experts() -> None:
    layer = Case(3, 1, (1,), 1).layer(None)
    assert [id(p) for p in replicated_parameters(layer)] == [id(layer.gate.scores.weight)]
    model = nn.Sequential(nn.Linear(2, 2), layer)
    assert len(replicated_parameters(model)) == 3
