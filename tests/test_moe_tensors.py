"""Tensors of any kind and any place: strides, shapes of rows, outputs over inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastkern import Communicator
from tests.moe_cases import Case, Data
from tests.moe_checks import same_bytes
from tests.moe_reference import combine, dispatch
from tests.processes import Pool

GRID = {"1x4": 1, "2x2": 2, "4x1": 4}


def any_tensor(rank: int, num_ranks: int, servers: int) -> None:
    """Strides; rows of no, one and two dimensions, and of nothing; tensors that want gradients."""
    data = Data(Case("any", 95, topk=4, num_tokens=6), servers, num_ranks)
    routing = data.routing
    generator = torch.Generator().manual_seed(5)
    wholes = [torch.randn(2 * n, 6, 4, generator=generator) for n in data.tokens]
    views = {
        "strided": lambda x: x[::2, 1, ::2],
        "transposed": lambda x: x[::2].transpose(1, 2),
        "expanded": lambda x: x[::2, :1, :1].expand(-1, 3, 5),
        "numbers": lambda x: x[::2, 0, 0],
        "nothing": lambda x: x[::2, 0, :0],
        "gradients": lambda x: x[::2, 0].clone().requires_grad_(),
    }
    assert data.weights is not None
    # Strides of indices and weights as a router's transposed output has them.
    topk_idx = routing.topk_idx[rank].t().contiguous().t()
    weights = data.weights[rank].t().contiguous().t()
    with Communicator(servers=servers, entry_timeout_s=50) as comm:
        for name, view in views.items():
            inputs = [[view(x)] for x in wholes]
            recv, recv_weights, _, handle = comm.dispatch(
                inputs[rank][0], topk_idx, weights, num_experts=8
            )
            expected = dispatch(routing, [[x.detach()] for [x] in inputs], data.weights, rank)
            assert expected.weights is not None
            same_bytes(recv, expected.recv[0], name)
            same_bytes(recv_weights, expected.weights, name)
            outs = [dispatch(routing, inputs, None, r).recv[0].detach() for r in range(num_ranks)]
            bias = torch.ones(outs[rank].shape[1:])
            sums = comm.combine(_strided(outs[rank]), handle, bias=bias)
            same_bytes(sums, combine(routing, outs, None, bias, None, rank), name)
            assert sums.shape == inputs[rank][0].shape, name


def _strided(tensor: Tensor) -> Tensor:
    """The same numbers, with others between the rows."""
    return torch.stack([tensor, torch.full_like(tensor, float("nan"))], 1)[:, 0]


@pytest.mark.parametrize("servers", GRID.values(), ids=GRID)
def test_tensors_of_any_kind(four: Pool, servers: int) -> None:
    four.run(any_tensor, servers)


def over_inputs(rank: int, num_ranks: int, servers: int) -> None:
    """Each rank's tokens go to the next rank, so `out` can be the memory of any input."""
    rows, width = 64, 257
    topk_idx = torch.full((rows, 1), (rank + 1) % num_ranks)
    generator = torch.Generator().manual_seed(rank)
    a, b, bias = torch.randn(3, rows, width, generator=generator)
    weights = torch.rand(rows, generator=generator)
    with Communicator(servers=servers, chunk_bytes=4096, entry_timeout_s=50) as comm:
        options = {"num_experts": num_ranks}
        (first, second), kept, _, handle = comm.dispatch(
            [a, b], topk_idx, weights[:, None], **options
        )
        pair = torch.stack([a, b])
        comm.dispatch(list(pair), topk_idx, **options, out=[pair[1], pair[0]])
        same_bytes(pair, torch.stack([second, first]), "payloads exchanged")
        shifted = torch.cat([a, a[:1]])
        comm.dispatch(shifted[:-1], topk_idx, **options, out=shifted[1:])
        same_bytes(shifted[1:], first, "over x")
        over = torch.zeros(rows, width)
        over.view(-1)[:rows] = weights
        got = comm.dispatch(a, topk_idx, over.view(-1)[:rows, None], **options, out=over)
        same_bytes(over, first, "over topk_weights")
        assert kept is not None
        assert got[1] is not None
        same_bytes(got[1], kept, "topk_weights under out")
        sums = comm.combine(first, handle, weights=kept, bias=bias)
        again = {"expert_out": first.clone(), "weights": kept, "bias": bias.clone()}
        for name in ("expert_out", "bias"):
            out = again[name].clone()
            got_sums = comm.combine(**{**again, name: out}, handle=handle, out=out)
            same_bytes(got_sums, sums, f"over {name}")
        over.view(-1)[:rows] = kept
        comm.combine(first, handle, over.view(-1)[:rows], bias, out=over)
        same_bytes(over, sums, "over weights")
        shifted = torch.cat([bias, bias[:1]])
        comm.combine(first, handle, kept, shifted[:-1], out=shifted[1:])
        same_bytes(shifted[1:], sums, "over bias, a row further")


@pytest.mark.parametrize("servers", GRID.values(), ids=GRID)
def test_out_may_be_an_inputs_memory(four: Pool, servers: int) -> None:
    four.run(over_inputs, servers)
