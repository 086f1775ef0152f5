"""How many blocks a call is launched with: the caller's number, or the one usual for its size."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


class BlockCounts:
    """Blocks per launch of one communicator.

    most: what it was made with; kernels of so many blocks are known to fit the device. usual: for
    an operation and the bytes that a rank gives or gets in a call, whichever are more; `most` for
    all where it is None.
    """

    def __init__(self, most: int, usual: Callable[[str, int], int] | None = None) -> None:
        self.most = most
        self._usual = usual

    def check(self, num_blocks: Any) -> int | None:
        """A caller's num_blocks, None as it is. Raises TypeError or ValueError naming it."""
        if num_blocks is None:
            return None
        if isinstance(num_blocks, bool) or not hasattr(num_blocks, "__index__"):
            raise TypeError(f"num_blocks must be a whole number, not {num_blocks!r}")
        if not 1 <= operator.index(num_blocks) <= self.most:
            raise ValueError(
                f"num_blocks must be 1 to {self.most}, which this communicator was made with, "
                f"not {num_blocks}"
            )
        return operator.index(num_blocks)

    def of(self, num_blocks: int | None, op: str, num_bytes: int) -> int:
        """Blocks of a call: `num_blocks`, which has been checked, or what is usual for it."""
        if num_blocks is not None:
            return num_blocks
        return self.most if self._usual is None else min(self.most, self._usual(op, num_bytes))
