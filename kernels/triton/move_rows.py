"""All-to-all: what each item moves; and what operations have in common of puts and receives.

Example: a receive of rows 6 to 11 of a stream with segments [0, 4) for rank 2, [4, 9) for rank 3
and [9, 12) for this rank, 1: part [6, 9) goes to the window of rank 3, [9, 12) to the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from . import wires
from .access import finish_writes, get
from .call import data_of, links_of, raise_flag, receive_of, send_of, signal, stamp, window_of
from .copy import copy_bytes, copy_vectors
from .target import lanes
from .transport import PEER

_SEGMENTS = tl.constexpr(32)  # looked at together


@triton.jit
def _put_by_wire(call, item):
    """A chunk to another server."""
    own = data_of(call, call.rank)
    source = get(item.stream, at.STREAM_SOURCE_ROW) + item.first_row
    target = get(item.stream, at.STREAM_TARGET_ROW) + item.first_row
    wires.put(
        call,
        receive_of(call, own) + target * call.row_bytes,
        send_of(call, own) + source * call.row_bytes,
        item.num_rows * call.row_bytes,
        get(item.stream, at.STREAM_PEER),
        get(item.stream, at.STREAM_SLOT) + item.chunk,
        stamp(call, 1),
    )


@triton.jit
def run_put(call, item, TILE_BYTES: tl.constexpr):
    """A chunk from send staging to the peer's receive staging, and its flag; row_bytes is a
    multiple of 16."""
    if len(call.wire) == PEER:
        _put_mapped(call, item, TILE_BYTES)
    else:
        _put_by_wire(call, item)


@triton.jit
def _put_mapped(call, item, TILE_BYTES: tl.constexpr):
    peer = get(item.stream, at.STREAM_PEER)
    source = get(item.stream, at.STREAM_SOURCE_ROW) + item.first_row
    target = get(item.stream, at.STREAM_TARGET_ROW) + item.first_row
    copy_vectors(
        receive_of(call, data_of(call, peer)) + target * call.row_bytes,
        send_of(call, data_of(call, call.rank)) + source * call.row_bytes,
        item.num_rows * call.row_bytes,
        TILE_BYTES,
    )
    signal(call, peer, get(item.stream, at.STREAM_SLOT) + item.chunk, 1)


@triton.jit
def give_credit(call, item):
    """A receive lets the next sender start, before it copies anything onward."""
    slot = get(item.stream, at.STREAM_CREDIT_SLOT)
    if (slot != at.NO_SLOT) & (get(item.stream, at.STREAM_CREDIT_CHUNK) == item.chunk):
        rank = get(item.stream, at.STREAM_CREDIT_RANK)
        raise_flag(call, rank, slot, get(item.stream, at.STREAM_CREDIT_VALUE))


@triton.jit
def _touches(call, item, rank):
    """1 where the chunk has rows for a rank."""
    end = get(item.stream, at.STREAM_FIRST_SEGMENT) + get(item.stream, at.STREAM_NUM_SEGMENTS)
    lane = lanes(_SEGMENTS)
    found = item.queue * 0
    first = item.first_segment
    while (found == 0) & (first < end):
        here = first + lane < end
        segment = call.segments + (first + lane) * at.SIZEOF_SEGMENT
        row = get(segment, at.SEGMENT_STREAM_ROW, here)
        here = here & (row < item.first_row + item.num_rows)
        here = here & (get(segment, at.SEGMENT_PEER, here) == rank)
        found = tl.max(here.to(tl.int64))
        first += _SEGMENTS
    return found


@triton.jit
def signal_destinations(call, item):
    """A receive tells the destinations that its chunk has rows for."""
    finish_writes()
    first = links_of(call) + get(item.stream, at.STREAM_FIRST_LINK) * at.SIZEOF_LINK
    for k in range(get(item.stream, at.STREAM_NUM_LINKS)):
        link = first + k * at.SIZEOF_LINK
        rank = get(link, at.LINK_RANK)
        if _touches(call, item, rank) != 0:
            raise_flag(call, rank, get(link, at.LINK_SLOT) + item.chunk, 1)


@triton.jit
def end_of_segments(call, item):
    """The number of the stream's last segment, plus one."""
    return get(item.stream, at.STREAM_FIRST_SEGMENT) + get(item.stream, at.STREAM_NUM_SEGMENTS)


@triton.jit
def part_of(call, item, index):
    """Of a segment's rows inside the chunk: first row in the stream, the segment's own row for it,
    and how many; none where the segment begins after the chunk."""
    segment = call.segments + index * at.SIZEOF_SEGMENT
    begin = get(segment, at.SEGMENT_STREAM_ROW)
    first = tl.maximum(begin, item.first_row)
    last = begin + get(segment, at.SEGMENT_NUM_ROWS)
    last = tl.minimum(last, item.first_row + item.num_rows)
    row = get(segment, at.SEGMENT_ROW) + (first - begin)
    return first, row, tl.maximum(last - first, 0)


@triton.jit
def _ends_of_part(call, item, index):
    """Where a part of a chunk comes from, where it goes, and its bytes; none: past the chunk."""
    own = data_of(call, call.rank)
    first, row, num_rows = part_of(call, item, index)
    rank = call.rank
    from_row = row
    to_row = row
    if item.queue <= at.QUEUE_PUSH:
        rank = get(item.stream, at.STREAM_PEER)
        source = get(call.args, at.ARGS_INPUT)
        to_row = get(item.stream, at.STREAM_TARGET_ROW) + first
    elif item.queue == at.QUEUE_PUT:  # at once
        first = item.first_row
        num_rows = item.num_rows
        rank = get(item.stream, at.STREAM_PEER)
        source = send_of(call, own)
        from_row = get(item.stream, at.STREAM_SOURCE_ROW) + first
        to_row = get(item.stream, at.STREAM_TARGET_ROW) + first
    elif item.queue == at.QUEUE_RECEIVE:
        rank = get(call.segments + index * at.SIZEOF_SEGMENT, at.SEGMENT_PEER)
        source = receive_of(call, own)
        from_row = get(item.stream, at.STREAM_SOURCE_ROW) + first
    else:  # land, take
        source = window_of(call, own)
    if item.queue == at.QUEUE_PACK:
        target = send_of(call, data_of(call, rank))
    elif item.queue == at.QUEUE_PUT:
        target = receive_of(call, data_of(call, rank))
    elif rank != call.rank:
        target = window_of(call, data_of(call, rank))
    else:
        target = get(call.args, at.ARGS_OUTPUT)
    num_bytes = num_rows * call.row_bytes
    return source + from_row * call.row_bytes, target + to_row * call.row_bytes, num_bytes


@triton.jit
def move_rows(call, item, TILE_BYTES: tl.constexpr):
    """An item of an all-to-all."""
    if len(call.wire) == PEER:
        _move_mapped(call, item, TILE_BYTES)
    elif item.queue == at.QUEUE_PUT:
        _put_by_wire(call, item)
    else:
        _move_mapped(call, item, TILE_BYTES)


@triton.jit
def _move_mapped(call, item, TILE_BYTES: tl.constexpr):
    if item.queue == at.QUEUE_RECEIVE:
        give_credit(call, item)
    left = end_of_segments(call, item) - item.first_segment
    if item.queue == at.QUEUE_PUT:
        left = left * 0 + 1
    index = item.first_segment
    while left > 0:
        source, target, num_bytes = _ends_of_part(call, item, index)
        copy_bytes(target, source, num_bytes, TILE_BYTES)
        index += 1
        left = tl.where(num_bytes == 0, 0, left - 1)
    slot = get(item.stream, at.STREAM_SLOT)
    if item.queue <= at.QUEUE_PUT:
        if slot != at.NO_SLOT:
            signal(call, get(item.stream, at.STREAM_PEER), slot + item.chunk, 1)
    elif (item.queue == at.QUEUE_RECEIVE) & (get(item.stream, at.STREAM_NUM_LINKS) != 0):
        signal_destinations(call, item)
