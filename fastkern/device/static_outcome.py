"""What a call of a static exchange that moved nothing has left for the host to find."""

from __future__ import annotations

from typing import Any

from ..moe.static_shape import StaticShape

OUTCOME_BYTES = 16  # the words that stay, see StaticArgs in kernels/body/static.h
_TOO_MANY_ROWS = (1 << 64) - 1


def outcome_error(outcome: Any, shape: StaticShape) -> ValueError | None:
    """outcome: its two words. None where every call since the last look has moved its rows."""
    if not int(outcome[0]):
        return None
    rank, position = int(outcome[0]) - 1, int(outcome[1])
    if position == _TOO_MANY_ROWS:
        return ValueError(
            f"static dispatch: rank {rank} would receive more rows than the worst case for "
            f"{shape.num_max_tokens} tokens per rank; the call moved nothing"
        )
    token, k = divmod(position, shape.topk)
    return ValueError(
        f"static dispatch: topk_idx[{token}][{k}] of rank {rank} is neither -1 nor one of "
        f"{shape.options.num_experts} experts; the call moved nothing"
    )
