"""Rows of a buffer, and the errors of those who use them wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from fastkern.planner.table import Item, StageTable

Rows = npt.NDArray[np.uint8]  # [rows, row_bytes]
POISON = 0xAA  # every byte that nothing has written
BEFORE_CALL = 0  # writer of rows that were there; items count from 1
_UNWRITTEN = -1


class OracleError(RuntimeError):
    """The tables break the protocol at `rank`; `item` and flag `slot` where they are known."""

    def __init__(self, text: str, slot: int | None = None):
        super().__init__(text)
        self.rank: int | None = None
        self.item: Item | None = None
        self.slot = slot

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.item}: {self.args[0]}"


@contextmanager
def blame(rank: int, item: Item | None = None) -> Iterator[None]:
    """Say whose fault an error is."""
    try:
        yield
    except (OracleError, IndexError) as caught:
        error = OracleError("an index in the table is too large")
        if isinstance(caught, OracleError):
            error = caught
        if error.rank is None:
            error.rank, error.item = rank, item
        raise error from None


class Region:
    """Rows of a buffer: all inside it, each written once, none read before its writer's flag."""

    def __init__(self, name: str, rows: Rows, written: bool = False):
        self.name = name
        self.rows = rows
        self.writer = np.full(len(rows), BEFORE_CALL if written else _UNWRITTEN)

    @classmethod
    def empty(cls, name: str, num_rows: int, row_bytes: int) -> Region:
        """A region of its own memory, none of it written."""
        return cls(name, np.full((num_rows, row_bytes), POISON, dtype=np.uint8))

    @property
    def written(self) -> npt.NDArray[np.bool_]:
        """[rows] whether anything has written them."""
        flags: npt.NDArray[np.bool_] = self.writer != _UNWRITTEN
        return flags

    def write(self, row: int, data: Rows, writer: int) -> None:
        """Rows from `row` on, by item number `writer`."""
        where = self._inside(row, row + len(data))
        if self.written[where].any():
            raise OracleError(f"rows {row}..{where.stop} of {self.name} are written twice")
        self.rows[where], self.writer[where] = data, writer

    def read(self, row: int, num_rows: int, known: Set[int]) -> Rows:
        """The rows, by an item that has seen flags of the items `known`."""
        where = self._inside(row, row + num_rows)
        if not self.written[where].all():
            raise OracleError(f"rows {row}..{where.stop} of {self.name} are read but not written")
        if not set(self.writer[where].tolist()) <= known:
            raise OracleError(
                f"rows {row}..{where.stop} of {self.name} are read without their flag"
            )
        return self.rows[where]

    def _inside(self, begin: int, end: int) -> slice:
        if begin < 0 or end > len(self.rows):
            raise OracleError(f"rows {begin}..{end} of {self.name}, which has {len(self.rows)}")
        return slice(begin, end)


def heap_regions(table: StageTable) -> dict[str, Region]:
    """The parts of a rank's heap: send staging, receive staging, window, scratch."""
    layout, header = table.data_layout(), table.header
    heap = np.full(layout.bytes, POISON, dtype=np.uint8)
    result = {}
    for name in ("send", "receive", "window", "scratch"):
        num_rows = int(header[name + "_rows"])
        row_bytes = int(header["scratch_row_bytes" if name == "scratch" else "row_bytes"])
        begin: int = getattr(layout, name)
        part = heap[begin : begin + num_rows * row_bytes]
        result[name] = Region(name, part.reshape(num_rows, row_bytes))
    return result
