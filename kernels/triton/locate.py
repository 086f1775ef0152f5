"""Where tickets point to: which chunk of which stream, and its rows.

A queue's items are numbered through its stages; within a stage chunk after chunk, and of each chunk
stream after stream. Example: a stage whose first item is 10, of 3 streams: ticket 17 is the second
stream's chunk 2, since 7 = 2 * 3 + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from .access import get
from .call import queue_record


class Located(NamedTuple):
    """Items of tickets, int64 tensors of one shape.

    ticket; queue; stage: within the queue; record: the stage's address. stream, chunk; first_row,
    num_rows: of the chunk, in the stream; first_segment: the first that reaches into it. here:
    whether there is such an item; full: whether it has rows; elsewhere the others say nothing.
    """

    ticket: tl.tensor
    queue: tl.tensor
    stage: tl.tensor
    record: tl.tensor
    stream: tl.tensor
    chunk: tl.tensor
    first_row: tl.tensor
    num_rows: tl.tensor
    first_segment: tl.tensor
    here: tl.tensor
    full: tl.tensor


@triton.jit
def bits_of(number):
    """Rounds of a binary search among so many."""
    bits = number * 0
    while number > 0:
        number = number >> 1
        bits += 1
    return bits


@triton.jit
def _stage_of(call, first_stage, num_stages, ticket, live):
    """Within the queue: the last stage whose first item is not past the ticket."""
    low = ticket * 0
    high = low + num_stages
    for _ in range(bits_of(tl.max(num_stages))):
        middle = (low + high) // 2
        apart = live & (high - low > 1)
        stage = call.stages + (first_stage + middle) * at.SIZEOF_STAGE
        up = apart & (get(stage, at.STAGE_FIRST_ITEM, apart) <= ticket)
        low = tl.where(up, middle, low)
        high = tl.where(apart & (up == 0), middle, high)
    return low


@triton.jit
def _segment_of(call, first, end, row, live):
    """The first segment of a stream that ends after the row."""
    low = first
    high = end
    for _ in range(bits_of(tl.max(end - first))):
        apart = live & (low < high)
        middle = (low + high) // 2
        segment = call.segments + middle * at.SIZEOF_SEGMENT
        ends = get(segment, at.SEGMENT_STREAM_ROW, apart) + get(segment, at.SEGMENT_NUM_ROWS, apart)
        up = apart & (ends <= row)
        low = tl.where(up, middle + 1, low)
        high = tl.where(apart & (up == 0), middle, high)
    return low


@triton.jit
def locate(call, queue, ticket, live):
    """Tickets of queues. queue, and live, false where there is none, may be broadcast to ticket."""
    queues = queue_record(call.header, queue)
    first_stage = get(queues, at.QUEUE_FIRST_STAGE, live)
    num_stages = get(queues, at.QUEUE_NUM_STAGES, live)
    live = live & (ticket < get(queues, at.QUEUE_NUM_ITEMS, live))
    stage = _stage_of(call, first_stage, num_stages, ticket, live)
    record = call.stages + (first_stage + stage) * at.SIZEOF_STAGE
    num_streams = tl.maximum(get(record, at.STAGE_NUM_STREAMS, live), 1)
    within = ticket - get(record, at.STAGE_FIRST_ITEM, live)
    chunk = tl.where(live, within // num_streams, 0)
    stream = get(record, at.STAGE_FIRST_STREAM, live) + tl.where(live, within % num_streams, 0)

    streams = call.streams + stream * at.SIZEOF_STREAM
    chunk_rows = get(streams, at.STREAM_CHUNK_ROWS, live)
    first_row = chunk * chunk_rows
    num_rows = tl.minimum(get(streams, at.STREAM_NUM_ROWS, live) - first_row, chunk_rows)
    some = live & (num_rows > 0)
    first = get(streams, at.STREAM_FIRST_SEGMENT, some)
    end = first + get(streams, at.STREAM_NUM_SEGMENTS, some)
    segment = _segment_of(call, first, end, first_row, some)
    reached = some & (segment < end)
    row = get(call.segments + segment * at.SIZEOF_SEGMENT, at.SEGMENT_STREAM_ROW, reached)
    return Located(
        ticket=ticket,
        queue=queue,
        stage=stage,
        record=record,
        stream=stream,
        chunk=chunk,
        first_row=first_row,
        num_rows=num_rows,
        first_segment=segment,
        here=live,
        full=reached & (row < first_row + num_rows),
    )


@triton.jit
def plan_time(found):
    """Of located items. See plan_time in planner/stage_table.h."""
    begin = get(found.record, at.STAGE_TICKS_BEGIN, found.full)
    ticks = get(found.record, at.STAGE_TICKS_END, found.full) - begin
    num_chunks = tl.maximum(get(found.record, at.STAGE_NUM_CHUNKS, found.full), 1)
    queue = tl.minimum(found.queue, at.NUM_QUEUES - 1)
    ended = (queue * 0 + at.AT_CHUNK_END) >> queue & 1
    phase = (queue * 0 + at.PHASES) >> (4 * queue) & 15
    return (begin + ticks * (found.chunk + ended) // num_chunks) * 4 + phase
