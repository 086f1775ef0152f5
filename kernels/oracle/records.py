"""What the oracle is given for each rank of a dispatch or a combine, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .region import Rows
from .route import Route, Words
from .values import Values

_ALIGN = 16
_ENTRY_BYTES = 12


class RowForm(NamedTuple):
    """How a token's row is laid out that a dispatch moves: byte offsets of its parts, its size."""

    topk: int
    part_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    weight_bytes: int  # of one; 0: none travel
    weights_offset: int
    header_offset: int
    row_bytes: int

    @classmethod
    def of(cls, part_bytes: Sequence[int], weight_bytes: int, topk: int) -> RowForm:
        """Parts, weights [K], header [K]: each from a multiple of 16 bytes on."""
        sizes = [*part_bytes, weight_bytes * topk, _ENTRY_BYTES * topk]
        begins = [0]
        for size in sizes:
            begins.append(begins[-1] + -(-size // _ALIGN) * _ALIGN)
        *offsets, weights_offset, header_offset, row_bytes = begins
        return cls(
            topk,
            tuple(part_bytes),
            tuple(offsets),
            weight_bytes,
            weights_offset,
            header_offset,
            max(row_bytes, _ALIGN),
        )


@dataclass(frozen=True)
class DispatchRank:
    """One rank's side of a dispatch.

    parts: the bytes of its payload tensors, uint8 [T, bytes of a row]. weights: float32 or float64
    [T, K], or None. route: by `route_all`, or a handle's arrays.
    """

    parts: Sequence[Rows]
    weights: Values | None
    route: Route

    @property
    def form(self) -> RowForm:
        """Of its rows."""
        weight_bytes = 0 if self.weights is None else self.weights.dtype.itemsize
        return RowForm.of([p.shape[1] for p in self.parts], weight_bytes, self.route.topk)


@dataclass(frozen=True)
class Dispatched:
    """What a rank has after a dispatch. Rows of padding hold 0xAA in every byte.

    parts: uint8 [rows, bytes of a row] for each payload. weights: [rows], rank layout [rows, K], or
    None. index: rank layout: int64 [rows, K], the expert's index on its rank, or -1; else None.

    The handle's arrays, see kernels/body/handle.h: window_slots uint32 [window_rows, K]; touched
    uint32 [rows proxied, M]; arrivals uint32 [flags, M, 4], fields of Arrival in order, 0xAA where
    no chunk came. num_partials: partial rows given out as proxy; in which order is up to the order
    of items.
    """

    parts: list[Rows]
    weights: Values | None
    index: npt.NDArray[np.int64] | None
    window_slots: Words
    touched: Words
    arrivals: Words
    num_partials: int


@dataclass(frozen=True)
class CombineRank:
    """One rank's side of a combine.

    expert_out: [rows, width] of `kind`, see `values`; bfloat16 as its bits, uint16. weights: [rows]
    of the sums' dtype, or None. bias: [T, width] or [width] of `bias_kind`, or None. wire: the kind
    between servers. route and handle: of the dispatch.
    """

    expert_out: Values
    kind: str
    wire: str
    weights: Values | None
    bias: Values | None
    bias_kind: str
    route: Route
    handle: Dispatched


def as_bytes(values: npt.NDArray[Any]) -> Rows:
    """The bytes of each row of a 2-d array: uint8 [rows, bytes]."""
    rows = np.ascontiguousarray(values)
    return rows.view(np.uint8).reshape(len(rows), values.shape[1] * values.dtype.itemsize)
