"""Calls that would need more staging than allowed, done in rounds of fewer rows.

A round moves an equal share of every pair's rows, so that each round is as skewed as the call and
every rank cuts it alike, from the same traffic matrix. Rows of a round are gathered into, and
scattered from, one
contiguous tensor: a copy more on each side than a call in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Round:
    """Part of a call: rows [first, first + rows) of each pair, both [R, R]."""

    first: Matrix
    rows: Matrix


def cut(traffic: Matrix, num_rounds: int) -> Iterator[Round]:
    """Rounds of equal shares; those that move nothing are left out."""
    share, rest = traffic // num_rounds, traffic % num_rounds  # no product that could overflow
    first = np.zeros_like(traffic)
    for k in range(num_rounds):
        rows = share + (k < rest)
        if rows.any():
            yield Round(first, rows)
        first = first + rows


def gather(flat: torch.Tensor, rank: int, traffic: Matrix, part: Round) -> torch.Tensor:
    """This rank's input rows of a round. flat: [rows, row_bytes] uint8 of the whole call."""
    begins = _prefix(traffic[rank]) + part.first[rank]
    return torch.cat(_slices(flat, begins, part.rows[rank]))


def scatter(
    flat: torch.Tensor, received: torch.Tensor, rank: int, traffic: Matrix, part: Round
) -> None:
    """Put a round's output rows where they belong in the whole output `flat` [rows, row_bytes]."""
    begins = _prefix(traffic[:, rank]) + part.first[:, rank]
    at = 0
    for place in _slices(flat, begins, part.rows[:, rank]):
        place.copy_(received[at : at + len(place)])
        at += len(place)


def _prefix(rows: Matrix) -> Matrix:
    return np.cumsum(rows) - rows


def _slices(flat: torch.Tensor, begins: Matrix, rows: Matrix) -> list[torch.Tensor]:
    return [flat[b : b + n] for b, n in zip(begins.tolist(), rows.tolist(), strict=True)]
