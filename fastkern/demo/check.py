"""Comparing what the ranks did with the same layer in one process, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layer import Placement, Whole
from .options import DemoError
from .results import RankResult


def same_rows(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise DemoError, naming the first difference, unless both hold the same bytes.

    found, expected: [rows, ...] of one dtype. Bytes are compared, so NaN equals itself and 0.0
    differs from -0.0.
    """
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise DemoError(
            f"{what}: {found.dtype} {list(found.shape)} instead of "
            f"{expected.dtype} {list(expected.shape)}"
        )
    if found.numel() == 0:
        return
    pair = [t.contiguous().view(torch.uint8).reshape(len(t), -1) for t in (found, expected)]
    wrong = (pair[0] != pair[1]).any(dim=1).nonzero().squeeze(1)
    if len(wrong):
        raise DemoError(f"{what}: {len(wrong)} of {len(found)} rows differ, first row {wrong[0]}")


def check_results(
    xs: Sequence[torch.Tensor],
    wholes: Sequence[Whole],
    placement: Placement,
    results: Sequence[RankResult],
) -> None:
    """Hold every rank's rows against the layer in one process; raises DemoError at a difference.

    xs: each rank's tokens [tokens, hidden], and wholes: the layer on them, both made in this
    process. Rows of both exchanges are derived from the choices by their definition alone.
    """
    hidden = xs[0].shape[1]
    for rank, (whole, result) in enumerate(zip(wholes, results, strict=True)):
        same_rows(f"rank {rank}, experts chosen", result.choice.experts, whole.choice.experts)
        same_rows(f"rank {rank}, weights", result.choice.weights, whole.choice.weights)
    for rank, result in enumerate(results):
        own = placement.experts_of(rank)
        sent = [
            x[(whole.choice.experts == e).nonzero()[:, 0]]  # (token, choice) order
            for x, whole in zip(xs, wholes, strict=True)
            for e in own
        ]
        expected = torch.cat(sent) if sent else torch.empty(0, hidden)
        same_rows(f"rank {rank}, rows received for its experts", result.received, expected)
    for rank, (whole, result) in enumerate(zip(wholes, results, strict=True)):
        flat = whole.choice.experts.reshape(-1)
        back = [whole.expert_rows[flat == e] for e in range(placement.num_experts)]
        same_rows(f"rank {rank}, rows received from experts", result.returned, torch.cat(back))
        same_rows(f"rank {rank}, the layer's output", result.output, whole.output)
