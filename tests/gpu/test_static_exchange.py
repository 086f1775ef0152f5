"""A communicator's static exchange in PyTorch's graphs: ranks as processes, which share this
machine's GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fastkern import Communicator
from tests.conftest import SharedPools
from tests.gpu.test_communicator import on_gpu

PLANNERS = ("device", "host")
SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))
TOKENS, WIDTH, TOPK, EXPERTS = 24, 256, 3, 7
OPTIONS = {"num_experts": EXPERTS, "num_max_tokens_per_rank": TOKENS, "expert_alignment": 4}


@dataclass
class Layer:
    """What a graph of dispatch, experts that double, and combine works on, and gives."""

    exchange: Any
    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    got: Any = None
    sums: Any = None

    def run(self) -> None:
        """Put all three into the current stream."""
        self.got = self.exchange.dispatch(self.x, self.idx, self.weights)
        self.sums = self.exchange.combine(self.got.recv_x * 2, self.got.recv_topk_weights)

    def refill(self, seed: int) -> None:
        """Other tokens; of some none goes anywhere."""
        rng = torch.Generator().manual_seed(seed)
        chosen = torch.rand(TOKENS, EXPERTS, generator=rng).argsort(1)[:, :TOPK].clone()
        chosen[torch.rand(TOKENS, generator=rng) < seed % 3 / 2] = -1
        self.idx.copy_(chosen)
        self.x.copy_(torch.randn(TOKENS, WIDTH, generator=rng))
        self.weights.copy_(torch.rand(TOKENS, TOPK, generator=rng))

    def check(self, comm: Communicator, what: str) -> None:
        """The communicator's own calls give the same bits."""
        recv, weights, tokens, handle = comm.dispatch(self.x, self.idx, self.weights, **OPTIONS)
        sums = comm.combine(recv * 2, handle, weights=weights)
        assert torch.equal(self.got.tokens_per_expert.cpu(), tokens.cpu()), what
        assert torch.equal(self.got.recv_topk_weights, weights), what
        begin = 0
        for count in tokens.tolist():
            rows = slice(begin, begin + count)
            assert torch.equal(self.got.recv_x[rows], recv[rows]), what
            begin += -(-count // 4) * 4
        assert torch.equal(self.sums, sums), what


def layer_of(comm: Communicator, planner: str) -> Layer:
    x = torch.zeros(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    idx = torch.full((TOKENS, TOPK), -1, device="cuda")
    weights = torch.zeros(TOKENS, TOPK, device="cuda")
    exchange = comm.static_exchange(x, topk=TOPK, expert_out=x, planner=planner, **OPTIONS)
    return Layer(exchange, x, idx, weights)


def captured(layer: Layer, pause_s: float = 0) -> torch.cuda.CUDAGraph:
    """The layer's graph, warmed up on a stream beside, as PyTorch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run()
        time.sleep(pause_s)
    return graph


def replays(rank: int, ranks: int, servers: int, planner: str, kernels: str) -> None:
    del ranks
    with on_gpu(servers, kernels) as comm, torch.no_grad():
        layer = layer_of(comm, planner)
        graph = captured(layer)
        kept = layer.got, layer.sums
        for step in range(6):
            layer.refill(100 * rank + step)
            graph.replay()
            layer.check(comm, f"replay {step}")
            layer.exchange.check()
            if step % 2:
                layer.refill(100 * rank + 50 + step)
                layer.run()
                layer.check(comm, f"eager {step}")
                layer.got, layer.sums = kept
        comm.barrier()
        torch.cuda.synchronize()
        del graph
        layer.exchange.close()


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_replays(pools: SharedPools, shape: tuple[int, int], planner: str, kernels: str) -> None:
    pools.pool(shape[0] * shape[1]).run(replays, shape[0], planner, kernels, timeout_s=240)


def refused(rank: int, ranks: int, servers: int, planner: str, kernels: str) -> str:
    """Rank 1's index is bad in one replay; the next one is as if nothing had been."""
    del ranks
    with on_gpu(servers, kernels) as comm, torch.no_grad():
        layer = layer_of(comm, planner)
        graph = captured(layer)
        layer.refill(rank)
        if rank == 1:
            layer.idx[5, 2] = EXPERTS
        graph.replay()
        torch.cuda.synchronize()
        text = ""
        try:
            layer.exchange.check()
        except ValueError as error:
            text = str(error)
        torch.cuda.synchronize()
        comm.barrier()
        layer.refill(rank)
        graph.replay()
        layer.check(comm, "after the refusal")
        layer.exchange.check()
        comm.barrier()
        torch.cuda.synchronize()
        del graph
        layer.exchange.close()
        return text


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_bad_index_is_told_of_on_every_rank(
    pools: SharedPools, planner: str, kernels: str
) -> None:
    texts = pools.pool(2).run(refused, 1, planner, kernels, timeout_s=120)
    assert len(texts) == 2
    for text in texts:
        assert "topk_idx[5][2] of rank 1 is neither -1 nor one of 7 experts" in text


def watched(rank: int, ranks: int, planner: str, kernels: str) -> None:
    """The watchdog looks many times while a graph is captured, in the mode that refuses what any
    thread does meanwhile that might break it; launches are under way before."""
    del rank, ranks
    with on_gpu(1, kernels, progress_timeout_s=0.05) as comm, torch.no_grad():
        layer = layer_of(comm, planner)
        x = torch.zeros(4, device="cuda")
        comm.all_to_all_single(torch.empty_like(x), x)
        graph = captured(layer, pause_s=0.5)
        for step in range(3):
            layer.refill(step)
            graph.replay()
            layer.check(comm, f"replay {step}")
        layer.exchange.check()
        torch.cuda.synchronize()
        del graph
        layer.exchange.close()


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_watchdog_leaves_captures_alone(pools: SharedPools, planner: str, kernels: str) -> None:
    pools.pool(1).run(watched, planner, kernels, timeout_s=120)


class Training(Layer):
    """A step of two layers in one graph, forward and backward, each with an exchange of its own."""

    def run(self) -> None:
        """Put it into the current stream."""
        y = self.x
        for exchange in self.exchange:
            got = exchange.dispatch(y, self.idx, self.weights)
            y = exchange.combine(got.recv_x * 2, got.recv_topk_weights)
        self.sums = y.detach()
        self.got = torch.autograd.grad(y.float().square().sum(), (self.x, self.weights))

    def check(self, comm: Communicator, what: str) -> None:
        """The communicator's own calls give the same sums, bit by bit, and close gradients."""
        y = self.x
        for _ in self.exchange:
            recv, weights, _, handle = comm.dispatch(
                y, self.idx, self.weights, zero_padding=True, **OPTIONS
            )
            y = comm.combine(recv * 2, handle, weights=weights)
        grads = torch.autograd.grad(y.float().square().sum(), (self.x, self.weights))
        assert torch.equal(self.sums, y.detach()), what
        for made, right in zip(self.got, grads, strict=True):
            torch.testing.assert_close(made, right)


def trained(rank: int, ranks: int, servers: int, planner: str, kernels: str) -> None:
    del ranks
    with on_gpu(servers, kernels) as comm:
        like = torch.zeros(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
        first = comm.static_exchange(
            like,
            topk=TOPK,
            expert_out=like,
            planner=planner,
            gradients=True,
            zero_padding=True,
            **OPTIONS,
        )
        layers = [first, first.sibling()]
        idx = torch.full((TOKENS, TOPK), -1, device="cuda")
        weights = torch.zeros(TOKENS, TOPK, device="cuda", requires_grad=True)
        step = Training(layers, like.clone().requires_grad_(), idx, weights)
        graph = captured(step)
        for turn in range(4):
            with torch.no_grad():
                step.refill(100 * rank + turn)
            graph.replay()
            step.check(comm, f"replay {turn}")
            for layer in layers:
                layer.check()
        comm.barrier()
        torch.cuda.synchronize()
        del graph
        for layer in layers:
            layer.close()


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_training_steps(
    pools: SharedPools, shape: tuple[int, int], planner: str, kernels: str
) -> None:
    """Forward and backward in one graph, two layers in flight on one heap."""
    pools.pool(shape[0] * shape[1]).run(trained, shape[0], planner, kernels, timeout_s=240)
