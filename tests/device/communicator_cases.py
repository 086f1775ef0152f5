"""Calls of a communicator on a device, compared: the CPU for a device, and GPUs in tests/gpu."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastkern import Communicator
from fastkern.moe.handle import slot_choice
from tests.device.communicators import message
from tests.device.virtual_cases import expected_rows, random_rows
from tests.reference import Matrix
from tests.test_all_to_all_single import bits
from tests.test_moe_calls import routing


def call_once(comm: Communicator, traffic: Matrix, dtype: torch.dtype, seed: int, way: str) -> None:
    """An all-to-all of random rows, "plain", "strided" or "queued", compared bit by bit."""
    rng, device = np.random.default_rng(seed), comm.device
    width = int(rng.integers(1, 20))
    inputs = [random_rows(int(n), (width,), dtype, rng) for n in traffic.sum(axis=1)]
    expected = expected_rows(traffic, inputs)[comm.rank]
    source, out = inputs[comm.rank].to(device), torch.empty_like(expected, device=device)
    if way == "strided":
        source = torch.stack([source, source], dim=-1)[..., 0]
        out = torch.empty(width, len(expected), dtype=dtype, device=device).t()
    splits = traffic[:, comm.rank].tolist(), traffic[comm.rank].tolist()
    work = comm.all_to_all_single(out, source, *splits, async_op=way == "queued")
    if work is not None:
        assert work.wait()
    assert torch.equal(bits(out.cpu()), bits(expected)), f"{dtype} {way}"


def step(comm: Communicator, layout: str) -> tuple[list[Tensor], list[Tensor]]:
    """Forward, backward, the handle again: what must be equal everywhere, and the gradients, whose
    sums a GPU's PyTorch may add in another order."""
    x, idx, weights = (t.to(comm.device) for t in routing(comm.rank, 6 + comm.rank, 4, 7))
    x.requires_grad_()
    weights.requires_grad_()
    alignment = 3 if layout == "expert" else 1
    recv, got, counts, handle = comm.dispatch(
        x, idx, weights, num_experts=7, layout=layout, expert_alignment=alignment
    )
    scale = torch.linspace(1, 2, recv.shape[1]).to(comm.device)
    bias = torch.ones(recv.shape[1], device=comm.device, requires_grad=True)
    row_weights = got if layout == "expert" else got.max(1).values
    y = comm.combine(recv * scale, handle, weights=row_weights, bias=bias)
    y.square().sum().backward()  # type: ignore[no-untyped-call]
    again, _, _, _ = comm.dispatch(torch.cat([x.detach(), x.detach()], 1), handle=handle)
    started = comm.combine_start(again, handle)
    refused = message(comm.barrier)
    assert refused.startswith("FastkernError: combine_start has not been finished")
    twice = started.finish()
    choice = slot_choice(handle.meta) if layout == "expert" else handle.recv_topk_idx
    live = choice >= 0 if layout == "expert" else torch.ones(len(again), dtype=torch.bool)
    s = handle.stats
    moved = [s.scale_out_rows, s.packed_rows, s.pushed_rows, s.handed_on_rows, s.row_bytes]
    assert counts.device.type == handle.meta.device.type == "cpu"
    rows = [t.detach()[live] for t in (recv, got, again)]
    exact = [*rows, counts, y.detach(), twice, choice, torch.tensor(moved)]
    gradients = [t.grad for t in (x, weights, bias) if t.grad is not None]
    assert len(gradients) == 3
    return [t.cpu() for t in exact], [t.cpu() for t in gradients]


def check_step(comm: Communicator, host: Communicator, layout: str, exactly: bool) -> None:
    """A step on a device is what it is on the host. exactly: gradients too."""
    (exact, gradients), (right, close) = step(comm, layout), step(host, layout)
    for k, (a, b) in enumerate(zip(exact, right, strict=True)):
        assert torch.equal(a, b), f"{layout}, result {k}:\n{a}\n{b}"
    for k, (a, b) in enumerate(zip(gradients, close, strict=True)):
        if exactly:
            assert torch.equal(a, b), f"{layout}, gradient {k}:\n{a}\n{b}"
        torch.testing.assert_close(a, b)
