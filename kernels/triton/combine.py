"""Combine: expert outputs back to their tokens, summed on the way: by rank, by server, then over
servers in server order. See kernels/body/combine.h: who writes what, and a worked example. How a
row is summed is in sum_rows.py.

Example: a pack of chunk 2 from ranks 0 and 1 of the proxy's server, whose Arrival records say 3
window rows from 10 on, to partial rows from 4 on, and 1 from 40 on, to 9: two runs, one signal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from .access import get
from .call import data_of, receive_of, signal, window_of
from .copy import copy_vectors
from .handle import view_handle
from .move_rows import end_of_segments, give_credit, part_of, run_put, signal_destinations
from .persistent import run_call
from .rounding import FLOAT32, FLOAT64
from .sum_rows import is_aligned, rows_of, sum_rows


@triton.jit
def _run_of(call, item, k):
    """Run k of an item: its first row as the dispatch numbers them, its first row in the target,
    and how many. Pack: one of each source, as its Arrival record says."""
    segment = call.segments + item.first_segment * at.SIZEOF_SEGMENT
    segment_row = get(segment, at.SEGMENT_ROW)
    first = item.first_row
    to_row = item.first_row
    num_rows = item.num_rows
    if item.queue == at.QUEUE_PACK:
        handle = view_handle(get(get(call.args, at.ARGS_MOE), at.MOE_HANDLE))
        number = (segment_row + item.chunk) * get(call.header, at.HEADER_GPUS_PER_SERVER) + k
        arrival = handle.arrivals + number * at.SIZEOF_ARRIVAL
        first = get(arrival, at.ARRIVAL_WINDOW_ROW)
        to_row = get(arrival, at.ARRIVAL_PARTIAL_ROW) + get(call.header, at.HEADER_SCRATCH_BASE)
        num_rows = get(arrival, at.ARRIVAL_NUM_ROWS)
    elif item.queue != at.QUEUE_REDUCE:
        if item.queue == at.QUEUE_PUSH:
            first += segment_row
        else:
            first += get(item.stream, at.STREAM_SOURCE_ROW)
        to_row += get(item.stream, at.STREAM_TARGET_ROW)
    return first, to_row, num_rows


@triton.jit
def _combine_sums(call, item, TILE_BYTES: tl.constexpr, SUM64: tl.constexpr):
    """Pack, push, sum, reduce."""
    rows = rows_of(call, item, FLOAT64 if SUM64 else FLOAT32)
    aligned = is_aligned(rows.moe, SUM64)
    num_runs = item.queue * 0 + 1
    if item.queue == at.QUEUE_PACK:
        num_runs = get(call.header, at.HEADER_GPUS_PER_SERVER)
    for k in range(num_runs):
        first, to_row, num_rows = _run_of(call, item, k)
        if aligned:
            sum_rows(call, rows, first, to_row, num_rows, TILE_BYTES, True, SUM64)
        else:
            sum_rows(call, rows, first, to_row, num_rows, TILE_BYTES, False, SUM64)
    if item.queue != at.QUEUE_REDUCE:
        slot = get(item.stream, at.STREAM_SLOT) + item.chunk
        signal(call, get(item.stream, at.STREAM_PEER), slot, 1)


@triton.jit
def _return_rows(call, item, TILE_BYTES: tl.constexpr):
    """A chunk that came back: to the windows of its tokens' owners, this rank's own too."""
    give_credit(call, item)
    source = receive_of(call, data_of(call, call.rank))
    source += get(item.stream, at.STREAM_SOURCE_ROW) * call.row_bytes
    left = end_of_segments(call, item) - item.first_segment
    index = item.first_segment
    while left > 0:
        first, row, num_rows = part_of(call, item, index)
        rank = get(call.segments + index * at.SIZEOF_SEGMENT, at.SEGMENT_PEER)
        copy_vectors(
            window_of(call, data_of(call, rank)) + row * call.row_bytes,
            source + first * call.row_bytes,
            num_rows * call.row_bytes,
            TILE_BYTES,
        )
        index += 1
        left = tl.where(num_rows == 0, 0, left - 1)
    signal_destinations(call, item)


@triton.jit
def _combine(call, item, TILE_BYTES: tl.constexpr, SUM64: tl.constexpr):
    if item.queue == at.QUEUE_PUT:
        run_put(call, item, TILE_BYTES)
    elif item.queue == at.QUEUE_RECEIVE:
        _return_rows(call, item, TILE_BYTES)
    elif (item.queue != at.QUEUE_LAND) & (item.queue != at.QUEUE_TAKE):  # there the wait was all
        _combine_sums(call, item, TILE_BYTES, SUM64)


@triton.jit
def combine_rows(call, item, TILE_BYTES: tl.constexpr):
    """An item of a combine."""
    _combine(call, item, TILE_BYTES, False)


@triton.jit
def combine_rows_float64(call, item, TILE_BYTES: tl.constexpr):
    """An item of a combine of float64 values."""
    _combine(call, item, TILE_BYTES, True)


@triton.jit
def fastkern_combine(ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr):
    """LaunchArgs: blocks_per_rank programs for each of num_ranks ranks."""
    run_call(ranks, blocks_per_rank, combine_rows, TILE_BYTES)


@triton.jit
def fastkern_combine_float64(ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr):
    """As fastkern_combine, for float64 values."""
    run_call(ranks, blocks_per_rank, combine_rows_float64, TILE_BYTES)
