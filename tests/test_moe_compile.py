"""Dispatch and combine under torch.compile: whole graphs, with eager's bits and its exchanges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

from fastkern.moe import calls, exchanges
from tests.conftest import SharedPools
from tests.moe_layers import Problem, communicator, same
from tests.processes import Pool


@pytest.fixture
def two(shared_pools: SharedPools) -> Pool:
    """Two ranks, of a server each; compiling takes every rank seconds."""
    return shared_pools.pool(2)


class Logged:
    """fastkern.moe.calls, which notes the exchanges that there are."""

    DispatchOptions = calls.DispatchOptions
    slot_choice = staticmethod(calls.slot_choice)
    meta_info = staticmethod(calls.meta_info)

    def __init__(self) -> None:
        self._log: list[str] = []

    def dispatch_tensors(self, comm: Any, xs: list[Tensor], *rest: Any) -> Any:
        self._log.append(f"dispatch {[list(x.shape[1:]) for x in xs]}")
        return calls.dispatch_tensors(comm, xs, *rest)

    def combine_tensors(self, comm: Any, expert_out: Tensor, *rest: Any) -> Tensor:
        self._log.append(f"combine {list(expert_out.shape[1:])}")
        return calls.combine_tensors(comm, expert_out, *rest)

    def taken(self) -> list[str]:
        """What was noted since the last time."""
        noted, self._log = self._log, []
        return noted


@contextlib.contextmanager
def logged_communicator() -> Iterator[tuple[Any, Logged]]:
    """A communicator and the log of its exchanges; nothing compiled before is used."""
    torch._dynamo.reset()
    logged = Logged()
    with communicator() as comm, fresh_cache():
        comm.exchange_number = exchanges.register(comm, logged)
        yield comm, logged


# -- layers, as one would write them ---------------------------------------------------------------

# x, topk_idx, topk_weights, matrix [hidden, hidden], bias [hidden] -> y [T, hidden]
Layer = Callable[..., Tensor]


def expert_layer(comm: Any, options: dict[str, Any]) -> Layer:
    """A row for each choice; combine weighs and adds the bias."""

    def layer(x: Tensor, idx: Tensor, weights: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        recv_x, recv_weights, _, handle = comm.dispatch(x, idx, weights, **options)
        rows = torch.relu(recv_x @ matrix)
        return x + comm.combine(rows, handle, weights=recv_weights, bias=bias)

    return layer


def rank_layer(comm: Any, options: dict[str, Any]) -> Layer:
    """A row for each token; the layer weighs."""

    def layer(x: Tensor, idx: Tensor, weights: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        recv_x, recv_weights, _, handle = comm.dispatch(x, idx, weights, layout="rank", **options)
        here = torch.where(handle.recv_topk_idx >= 0, recv_weights, 0).sum(1, keepdim=True)
        return x + comm.combine(torch.relu(recv_x @ matrix) * here, handle, bias=bias)

    return layer


def deaf_layer(comm: Any, options: dict[str, Any]) -> Layer:
    """What comes back depends on nothing that was received, as on a rank without experts."""

    def layer(x: Tensor, idx: Tensor, weights: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        recv_x, _, _, handle = comm.dispatch(x, idx, weights, **options)
        rows = torch.ones_like(recv_x)
        return torch.relu(x @ matrix) + comm.combine(rows, handle, bias=bias)

    return layer


def reusing_layer(comm: Any, options: dict[str, Any]) -> Layer:
    """Several payloads, and the layout again for other rows."""

    def layer(x: Tensor, idx: Tensor, weights: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        ids = torch.arange(len(x))
        (recv_x, recv_ids), _, _, first = comm.dispatch([x, ids], idx, **options)
        again, recv_weights, _, second = comm.dispatch(
            (x * 2)[:, :2], topk_weights=weights, handle=first
        )
        odd = torch.where((recv_ids % 2 == 1).unsqueeze(1), recv_x, -recv_x)
        left = comm.combine(odd @ matrix, first, bias=bias)
        right = comm.combine(again, second, weights=recv_weights)
        return left + torch.cat([right, right], 1)

    return layer


def parallel_layers(comm: Any, options: dict[str, Any]) -> Layer:
    """Two layers side by side and a third behind; on a rank without tokens none needs another."""
    first, second = expert_layer(comm, options), rank_layer(comm, options)

    def layer(x: Tensor, idx: Tensor, weights: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        left = first(x, idx, weights, matrix, bias)
        right = second(torch.sin(x), idx.flip(1), weights.flip(1), matrix, bias)
        return first(torch.relu(left) * torch.relu(right), idx, weights, matrix, bias)

    return layer


def grouped_layer(comm: Any, options: dict[str, Any]) -> Layer:
    """Each expert on its rows, by counts that are known when it runs."""

    def layer(x: Tensor, idx: Tensor, weights: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        recv_x, recv_weights, counts, handle = comm.dispatch(x, idx, weights, **options)
        parts = [
            torch.relu(part @ (matrix * (expert + 1)))
            for expert, part in enumerate(torch.split(recv_x, counts.tolist()))
        ]
        rows = torch.cat(parts) if parts else torch.zeros_like(recv_x)
        return x + comm.combine(rows, handle, weights=recv_weights, bias=bias)

    return layer


# -- comparison ------------------------------------------------------------------------------------

Result = tuple[Tensor, list[Tensor], list[str]]


def leaves_of(problem: Problem, rank: int) -> list[Tensor]:
    """A layer's inputs on this rank; topk_idx comes second."""
    matrix = problem.matrices[0][:, : problem.hidden]
    weights = problem.topk_weights[rank]
    made = [problem.xs[rank], weights, matrix, problem.bias[: problem.hidden]]
    leaves = [part.clone().requires_grad_() for part in made]
    return [leaves[0], problem.topk_idx[rank], *leaves[1:]]


def results(layer: Layer, problem: Problem, rank: int, logged: Logged) -> Result:
    """Value, gradients and exchanges."""
    logged.taken()
    leaves = leaves_of(problem, rank)
    y = layer(*leaves)
    y.square().sum().backward()
    gradients = [leaf.grad for leaf in leaves if leaf.requires_grad]
    assert all(gradient is not None for gradient in gradients)
    return y.detach(), [g for g in gradients if g is not None], logged.taken()


def compare(got: Result, right: Result, exact: bool = True) -> None:
    pairs = zip([got[0], *got[1]], [right[0], *right[1]], strict=True)
    for index, (one, other) in enumerate(pairs):
        equal = same(one, other) if exact else torch.allclose(one, other, rtol=1e-4)
        assert equal, f"result or gradient {index}: {one}, not {other}"
    assert got[2] == right[2], "other exchanges than in eager mode"


def compiled(
    rank: int,
    num_ranks: int,
    make: Callable[[Any, dict[str, Any]], Layer],
    problem: Problem,
    backend: str,
    exact: bool = True,
) -> list[str]:
    """Compare eager and compiled; the exchanges."""
    options = {"num_experts": problem.num_experts, **problem.options}
    with logged_communicator() as (comm, logged):
        layer = make(comm, options)
        right = results(layer, problem, rank, logged)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            quick = torch.compile(layer, fullgraph=True, backend=backend)
            compare(results(quick, problem, rank, logged), right, exact)
        return right[2]


SIZES: dict[str, Any] = {"tokens": (5, 0), "hidden": 4, "dtype": torch.float32}
STATIC = {"num_max_tokens_per_rank": 6, "expert_alignment": 2, "zero_padding": True}
LAYERS: dict[str, tuple[Any, Problem, int]] = {
    # with the number of exchanges, forward and backward
    "expert": (expert_layer, Problem(**SIZES), 2 + 3),
    "static": (expert_layer, Problem(options=STATIC, **SIZES), 2 + 3),
    "rank": (rank_layer, Problem(**SIZES), 2 + 3),
    "rank-static": (rank_layer, Problem(options=STATIC, **SIZES), 2 + 3),
    "no-experts": (expert_layer, Problem(num_experts=1, **SIZES), 2 + 3),
    "deaf": (deaf_layer, Problem(num_experts=1, **SIZES), 2 + 3),
    "reusing": (reusing_layer, Problem(**SIZES), 4 + 5),
    "parallel": (parallel_layers, Problem(**SIZES), 6 + 9),
    "grouped": (grouped_layer, Problem(**SIZES), 2 + 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_whole_graphs_with_the_bits_of_eager_mode(two: Pool, name: str) -> None:
    make, problem, num_exchanges = LAYERS[name]
    first, second = two.run(compiled, make, problem, "aot_eager", timeout_s=120)
    assert first == second
    assert len(first) == num_exchanges


@pytest.mark.parametrize("name", ["expert", "deaf", "parallel"])
def test_inductor_keeps_exchanges_and_their_order(two: Pool, name: str) -> None:
    """It may compute sines and sums in other ways, but what it only hands on keeps its bits."""
    make, problem, num_exchanges = LAYERS[name]
    exact = name != "parallel"
    first, second = two.run(compiled, make, problem, "inductor", exact, timeout_s=280)
    assert first == second
    assert len(first) == num_exchanges


# -- sizes -----------------------------------------------------------------------------------------


def sizes(rank: int, num_ranks: int, options: dict[str, Any]) -> list[Any]:
    """The number of received rows as the graph knows it, and how many graphs many sizes need."""
    known: list[Any] = []
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        for node in graph.graph.nodes:
            if node.target is torch.ops.fastkern.combine.default:
                known.append(node.args[0].meta["example_value"].shape[0])
        return graph.forward

    with logged_communicator() as (comm, logged):
        layer = rank_layer(comm, {"num_experts": 6, **options})
        quick = torch.compile(layer, fullgraph=True, backend=backend)
        for tokens in ((5, 4), (3, 6), (2, 2), (6, 3), (4, 5)):
            problem = Problem(**{**SIZES, "tokens": tokens, "seed": sum(tokens)})
            right = results(layer, problem, rank, logged)
            compare(results(quick, problem, rank, logged), right)
    assert graphs <= 2, "one with sizes, one without"
    return [rows if isinstance(rows, int) else "unknown" for rows in known]


def test_worst_case_sizes_are_known_to_the_graph(two: Pool) -> None:
    options = {"num_max_tokens_per_rank": 7, "zero_padding": True}
    assert two.run(sizes, options, timeout_s=120) == [[14, 14]] * 2


def test_exact_sizes_are_not_and_need_no_graph_each(two: Pool) -> None:
    assert two.run(sizes, {}, timeout_s=120) == [["unknown"] * 2] * 2


# -- parts, and results into given tensors ---------------------------------------------------------


def in_parts(rank: int, num_ranks: int, compile_first: bool) -> None:
    """Handles go into and come out of graphs."""
    problem = Problem(**SIZES)
    with logged_communicator() as (comm, logged):

        def send(x: Tensor, idx: Tensor, weights: Tensor) -> Any:
            return comm.dispatch(x, idx, weights, num_experts=6)

        def bring(rows: Tensor, handle: Any, weights: Tensor, bias: Tensor) -> Tensor:
            return comm.combine(torch.relu(rows), handle, weights=weights, bias=bias)

        def layer(x: Tensor, idx: Tensor, weights: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
            recv_x, recv_weights, _, handle = there(x, idx, weights)
            return x + back(recv_x @ matrix, handle, recv_weights, bias)

        there, back = send, bring
        right = results(layer, problem, rank, logged)
        if compile_first:
            there = torch.compile(send, fullgraph=True, backend="aot_eager")
        else:
            back = torch.compile(bring, fullgraph=True, backend="aot_eager")
        compare(results(layer, problem, rank, logged), right)


@pytest.mark.parametrize("compile_first", [True, False])
def test_handles_cross_graphs(two: Pool, compile_first: bool) -> None:
    two.run(in_parts, compile_first, timeout_s=120)


def checkpointed(rank: int, num_ranks: int) -> None:
    """A graph that runs again in backward."""
    problem = Problem(**SIZES)
    with logged_communicator() as (comm, logged):
        layer = expert_layer(comm, {"num_experts": 6})
        quick = torch.compile(layer, fullgraph=True, backend="aot_eager")
        seen = []
        for run in (layer, quick):

            def again(*leaves: Tensor, run: Layer = run) -> Tensor:
                y: Tensor = checkpoint(run, *leaves, use_reentrant=False)
                return y

            seen.append(results(again, problem, rank, logged))
        compare(seen[1], seen[0])
        assert len(seen[0][2]) == 2 + 2 + 3


def test_activation_checkpointing_of_a_graph(two: Pool) -> None:
    two.run(checkpointed, timeout_s=120)


def into_given(rank: int, num_ranks: int) -> None:
    """out= of both calls, without gradients."""
    problem = Problem(**SIZES)
    x, idx = problem.xs[rank], problem.topk_idx[rank]
    with logged_communicator() as (comm, _):
        received = len(comm.dispatch(x, idx, num_experts=6)[0])

        def layer(x: Tensor, rows: Tensor, y: Tensor) -> Tensor:
            recv_x, _, _, handle = comm.dispatch(x, idx, num_experts=6, out=rows)
            return comm.combine(recv_x * 2, handle, out=y)

        seen = []
        for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            rows, y = torch.zeros(received, problem.hidden), torch.zeros_like(x)
            with torch.no_grad():
                assert run(x, rows, y) is y
            seen.append((rows, y))
    for one, other in zip(*seen, strict=True):
        assert same(one, other)
    assert rank == 1 or bool(seen[0][1].any())
    assert bool(seen[0][0].any())


def test_into_given_tensors(two: Pool) -> None:
    two.run(into_given, timeout_s=120)
