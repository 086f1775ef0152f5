"""What wrong calls of a static exchange have left for the host to find."""

from __future__ import annotations

from typing import Any

from ..moe.static_shape import StaticShape

OUTCOME_BYTES = 32  # see StaticArgs in kernels/body/static.h
_TOO_MANY_ROWS, _OTHER_DISPATCH = (1 << 64) - 1, (1 << 64) - 2  # WrongCall there


class Refusals:
    """Tells of each wrong call once, whatever is read again or late."""

    def __init__(self, shape: StaticShape) -> None:
        self._shape = shape
        self._told = 0

    def news(self, outcome: Any) -> ValueError | None:
        """outcome: its words as they are now. Of several calls since the last look, the last."""
        _, refused, rank, position = (int(word) for word in outcome)
        if refused == self._told:
            return None
        self._told = refused
        shape = self._shape
        if position == _TOO_MANY_ROWS:
            return ValueError(
                f"static dispatch: rank {rank} would receive more rows than the worst case for "
                f"{shape.num_max_tokens} tokens per rank; the call moved nothing"
            )
        if position == _OTHER_DISPATCH:
            return ValueError(
                f"static exchange: rank {rank} made a combine, or a backward, that belongs to "
                "another dispatch than the last one that was made or replayed; its results are "
                "wrong"
            )
        token, k = divmod(position, shape.topk)
        return ValueError(
            f"static dispatch: topk_idx[{token}][{k}] of rank {rank} is neither -1 nor one of "
            f"{shape.options.num_experts} experts; the call moved nothing"
        )
