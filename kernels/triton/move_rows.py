"""All-to-all: what each item moves; and what operations have in common of puts and receives.

Example: a receive of rows 6 to 11 of a stream with segments [0, 4) for rank 2, [4, 9) for rank 3
and [9, 12) for this rank, 1: part [6, 9) goes to the window of rank 3, [9, 12) to the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from .access import finish_writes, get
from .call import data_of, links_of, raise_flag, receive_of, send_of, signal, window_of
from .copy import copy_bytes

_SEGMENTS = tl.constexpr(32)  # looked at together


@triton.jit
def run_put(call, item, TILE_BYTES: tl.constexpr):
    """A chunk from send staging to the peer's receive staging."""
    peer = get(item.stream, at.STREAM_PEER)
    source = get(item.stream, at.STREAM_SOURCE_ROW) + item.first_row
    target = get(item.stream, at.STREAM_TARGET_ROW) + item.first_row
    copy_bytes(
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
    lane = tl.arange(0, _SEGMENTS).to(tl.int64)
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
def move_rows(call, item, TILE_BYTES: tl.constexpr):
    """Everything but a put."""
    if item.queue == at.QUEUE_RECEIVE:
        give_credit(call, item)
    peer = get(item.stream, at.STREAM_PEER)
    sends = item.queue <= at.QUEUE_PUSH
    receives = item.queue == at.QUEUE_RECEIVE
    own = data_of(call, call.rank)
    source = window_of(call, own)
    if sends:
        source = get(call.args, at.ARGS_INPUT)
    elif receives:
        source = receive_of(call, own)
    left = end_of_segments(call, item) - item.first_segment
    index = item.first_segment
    while left > 0:
        first, row, num_rows = part_of(call, item, index)
        if num_rows == 0:
            left = left * 0
        else:
            from_row = row
            to_row = row
            rank = call.rank
            if sends:
                to_row = get(item.stream, at.STREAM_TARGET_ROW) + first
                rank = peer
            elif receives:
                from_row = get(item.stream, at.STREAM_SOURCE_ROW) + first
                rank = get(call.segments + index * at.SIZEOF_SEGMENT, at.SEGMENT_PEER)
            target = get(call.args, at.ARGS_OUTPUT)
            if item.queue == at.QUEUE_PACK:
                target = send_of(call, data_of(call, rank))
            elif rank != call.rank:
                target = window_of(call, data_of(call, rank))
            copy_bytes(
                target + to_row * call.row_bytes,
                source + from_row * call.row_bytes,
                num_rows * call.row_bytes,
                TILE_BYTES,
            )
            index += 1
            left -= 1
    if sends:
        slot = get(item.stream, at.STREAM_SLOT)
        if slot != at.NO_SLOT:
            signal(call, peer, slot + item.chunk, 1)
    elif receives:
        if get(item.stream, at.STREAM_NUM_LINKS) != 0:
            signal_destinations(call, item)
