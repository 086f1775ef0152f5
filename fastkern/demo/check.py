"""Comparing what the ranks did with the same layer in one process, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import DemoError
from .layer import Whole
from .results import RankResult
from .rows import RowCounts

# For sums of a few float32 terms of order 1 that are added in another order.
RELATIVE, ABSOLUTE = 1e-5, 1e-5


def same_rows(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise DemoError, naming the first difference, unless both hold the same bytes.

    found, expected: [rows, ...] of one dtype. Bytes are compared, so NaN equals itself and 0.0
    differs from -0.0.
    """
    _same_kind(what, found, expected)
    if found.numel() == 0:
        return
    pair = [t.contiguous().view(torch.uint8).reshape(len(t), -1) for t in (found, expected)]
    _raise_for(what, (pair[0] != pair[1]).any(dim=1))


def close_rows(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same for sums that were taken in another order; NaN is close to nothing."""
    _same_kind(what, found, expected)
    close = torch.isclose(found, expected, rtol=RELATIVE, atol=ABSOLUTE)
    _raise_for(what, (~close).flatten(1).any(dim=1))


def _same_kind(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise DemoError(
            f"{what}: {found.dtype} {list(found.shape)} instead of "
            f"{expected.dtype} {list(expected.shape)}"
        )


def _raise_for(what: str, wrong_rows: torch.Tensor) -> None:
    wrong = wrong_rows.nonzero().squeeze(1)
    if len(wrong):
        raise DemoError(
            f"{what}: {len(wrong)} of {len(wrong_rows)} rows differ, first row {int(wrong[0])}"
        )


def check_results(wholes: Sequence[Whole], results: Sequence[RankResult]) -> None:
    """Hold every rank against its part of the layer in one process; DemoError at a difference."""
    for rank, (whole, result) in enumerate(zip(wholes, results, strict=True)):
        for what, found, expected in (
            ("experts chosen", result.topk_idx, whole.topk_idx),
            ("weights", result.topk_weights, whole.topk_weights),
            ("rows received for its experts", result.received, whole.received),
            ("weights received with them", result.received_weights, whole.received_weights),
            ("the layer's output", result.output, whole.output),
        ):
            same_rows(f"rank {rank}, {what}", found, expected)


def check_rows_sent(counts: RowCounts, results: Sequence[RankResult]) -> None:
    """DemoError unless a token crossed once to each server that has experts of it."""
    sent = sum(int(result.stats.scale_out_rows) for result in results)
    if sent != counts.tokens_across:
        raise DemoError(f"{sent} rows left their servers instead of {counts.tokens_across}")
