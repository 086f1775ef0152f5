"""The kernels that move rows where there is a library between servers (network.py, wires.py): those
of the entries' own files, with a constexpr TRANSPORT more, the number of one of entry.TRANSPORTS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .combine import combine_rows, combine_rows_float64
from .dispatch import dispatch_rows
from .move_rows import move_rows
from .persistent import run_call


@triton.jit
def fastkern_exchange(
    ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr, TRANSPORT: tl.constexpr
):
    """LaunchArgs: blocks_per_rank programs for each of num_ranks ranks."""
    run_call(ranks, blocks_per_rank, move_rows, TILE_BYTES, TRANSPORT)


@triton.jit
def fastkern_dispatch(
    ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr, TRANSPORT: tl.constexpr
):
    """LaunchArgs: blocks_per_rank programs for each of num_ranks ranks."""
    run_call(ranks, blocks_per_rank, dispatch_rows, TILE_BYTES, TRANSPORT)


@triton.jit
def fastkern_combine(
    ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr, TRANSPORT: tl.constexpr
):
    """LaunchArgs: blocks_per_rank programs for each of num_ranks ranks."""
    run_call(ranks, blocks_per_rank, combine_rows, TILE_BYTES, TRANSPORT)


@triton.jit
def fastkern_combine_float64(
    ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr, TRANSPORT: tl.constexpr
):
    """As fastkern_combine, for float64 values."""
    run_call(ranks, blocks_per_rank, combine_rows_float64, TILE_BYTES, TRANSPORT)
