"""Calls of static exchanges, compared with the communicator's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkern import Communicator

WIDTH = 12


@dataclass(frozen=True)
class StaticCase:
    """What an exchange is made with. most: tokens per rank."""

    layout: str = "expert"
    alignment: int = 1
    topk: int = 3
    num_experts: int = 7
    most: int = 9
    weights: torch.dtype | None = torch.float32
    dtype: torch.dtype = torch.float32
    wire: torch.dtype | None = None
    planner: str = "device"
    expert_to_rank: tuple[int, ...] | None = None
    narrow: bool = True  # expert outputs; else as wide as the tokens
    gradients: bool = False
    num_blocks: int | None = None

    def options(self) -> dict[str, Any]:
        """Of the eager dispatch."""
        return {
            "num_experts": self.num_experts,
            "layout": self.layout,
            "expert_alignment": self.alignment,
            "num_max_tokens_per_rank": self.most,
            "expert_to_rank": self.expert_to_rank,
            "zero_padding": True,
        }

    def like(self) -> tuple[list[Tensor], Tensor]:
        """Tensors like those of the calls: payloads, expert outputs."""
        ids = torch.empty(0, 3, dtype=torch.int16)
        width = 5 if self.narrow else WIDTH
        x, expert_out = (torch.empty(0, n, dtype=self.dtype) for n in (WIDTH, width))
        return [x, ids], expert_out


@dataclass(frozen=True)
class Inputs:
    """Of one rank."""

    xs: list[Tensor]
    idx: Tensor
    weights: Tensor | None


def inputs(case: StaticCase, num_tokens: int, generator: torch.Generator) -> Inputs:
    """Random tokens; a few choices are none."""
    idx = torch.stack(
        [torch.randperm(case.num_experts, generator=generator)[: case.topk]
         for _ in range(num_tokens)]
    ) if num_tokens else torch.empty(0, case.topk, dtype=torch.int64)  # fmt: skip
    idx[torch.rand(idx.shape, generator=generator) < 0.2] = -1
    x = torch.randn(num_tokens, WIDTH, generator=generator).to(case.dtype)
    ids = torch.randint(0, 999, (num_tokens, 3), dtype=torch.int16, generator=generator)
    weights = None
    if case.weights is not None:
        weights = torch.rand(num_tokens, case.topk, generator=generator).to(case.weights)
    return Inputs([x, ids], idx, weights)


def live_rows(case: StaticCase, tokens: Tensor, rows: int) -> Tensor:
    """bool [rows]: rows of an expert layout into which something was received."""
    live, at = torch.zeros(rows, dtype=torch.bool), 0
    for count in tokens.tolist():
        live[at : at + count] = True
        at += -(-count // case.alignment) * case.alignment
    return live


def experts(case: StaticCase, recv: Tensor) -> Tensor:
    """What all experts do: rows of 5 values, row by row; or nothing."""
    return (recv[:, :5] * 2 + recv[:, 5:10]).contiguous() if case.narrow else recv


def sums_of(comm: Communicator, case: StaticCase, given: Inputs) -> tuple[list[Tensor], Tensor]:
    """By the communicator's own calls: what is received, and the sums."""
    recv, weights, tokens, handle = comm.dispatch(
        given.xs, given.idx, given.weights, **case.options()
    )
    row_weights = weights if case.layout == "expert" else None
    y = comm.combine(experts(case, recv[0]), handle, weights=row_weights, wire_dtype=case.wire)
    extra = [tokens] if weights is None else [tokens, weights]
    if case.layout == "rank":
        extra.append(handle.recv_topk_idx)
    return [*recv, *extra], y


def static_of(comm: Communicator, case: StaticCase) -> Any:
    xs, expert_out = case.like()
    options = case.options()
    return comm.static_exchange(
        xs,
        topk=case.topk,
        weights_dtype=case.weights,
        expert_out=expert_out,
        wire_dtype=case.wire,
        planner=case.planner,
        gradients=case.gradients,
        num_blocks=case.num_blocks,
        **options,
    )


def received(case: StaticCase, got: Any) -> list[Tensor]:
    """A static dispatch's results in the order of `sums_of`."""
    extra = [got.tokens_per_expert]
    extra += [] if got.recv_topk_weights is None else [got.recv_topk_weights]
    return [*got.recv_x, *extra, *([] if got.recv_topk_idx is None else [got.recv_topk_idx])]


def compare(case: StaticCase, got: list[Tensor], right: list[Tensor], what: str) -> None:
    """Rows bit by bit. Rank layout, planned on the device: sources stand apart."""
    if case.layout == "rank":
        live = (right[-1] >= 0).any(1)
        found = (got[-1] >= 0).any(1)
        assert int(live.sum()) == int(found.sum()), what
        for k, (a, b) in enumerate(zip(got, right, strict=True)):
            per_row = len(b) == len(live) and k != 2
            assert torch.equal(a[found] if per_row else a, b[live] if per_row else b), (what, k)
        return
    live = live_rows(case, right[2], len(right[0]))
    for k, (a, b) in enumerate(zip(got, right, strict=True)):
        per_row = k != 2
        assert torch.equal(a[live] if per_row else a, b[live] if per_row else b), (what, k)
        if per_row:
            assert not a[~live].any(), (what, k, "padding")


def steps(comm: Communicator, case: StaticCase, seed: int, num_steps: int) -> Iterator[Inputs]:
    """This rank's inputs of each step: tokens of any number, of none on some ranks."""
    generator = torch.Generator().manual_seed(seed + 1000 * comm.rank)
    for step in range(num_steps):
        some = int(torch.randint(1, case.most + 1, (1,), generator=generator))
        yield inputs(case, 0 if (step + comm.rank) % 4 == 3 else some, generator)
