"""The kernel of an all-to-all."""

from __future__ import annotations

import triton
import triton.language as tl

from .move_rows import move_rows
from .persistent import run_call


@triton.jit
def fastkern_exchange(ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr):
    """LaunchArgs: blocks_per_rank programs for each of num_ranks ranks."""
    run_call(ranks, blocks_per_rank, move_rows, TILE_BYTES)
