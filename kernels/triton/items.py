"""Items: the heads of all queues, found together. What they wait for is in waits.py.

A lane each for the queues and for some tickets from the queue's on: which chunk of which stream
that is, whether it has rows, when it is planned. Items without rows, of which tables may have many
more than others, are passed all at once. One more lane reads the word that tells the rank to leave;
between servers another one the notice of another server, which says the same.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from .access import get, peek, place
from .call import queue_record
from .target import forget
from .transport import PEER

_LANES = tl.constexpr(16)
_TICKETS = tl.constexpr(16)  # of a queue that are looked at together
_ABORT_LANE = tl.constexpr(at.NUM_QUEUES.value)
_NOTICE_LANE = tl.constexpr(at.NUM_QUEUES.value + 1)  # between servers


class Heads(NamedTuple):
    """[16] int64, a lane for each queue; the lanes past them are zero.

    ticket, stage (within the queue), stream, chunk: of the first item with rows; first_row,
    num_rows: of the chunk, in the stream; first_segment: the first that reaches into it; time: its
    plan time. waiting: 1 where there is one among those that were looked at. empty: how many items
    without rows come before it. aborted: a scalar, not 0 once this rank has been told to leave.
    """

    ticket: tl.tensor
    stage: tl.tensor
    stream: tl.tensor
    chunk: tl.tensor
    first_row: tl.tensor
    num_rows: tl.tensor
    first_segment: tl.tensor
    time: tl.tensor
    waiting: tl.tensor
    empty: tl.tensor
    aborted: tl.tensor


class Item(NamedTuple):
    """int64 scalars, as in Heads; stream: the address of its record."""

    queue: tl.tensor
    ticket: tl.tensor
    stage: tl.tensor
    stream: tl.tensor
    chunk: tl.tensor
    first_row: tl.tensor
    num_rows: tl.tensor
    first_segment: tl.tensor


@triton.jit
def queue_lanes():
    """[16], the lanes' numbers. What is computed from them alone is not kept in registers."""
    return forget(tl.arange(0, _LANES).to(tl.int64))


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
def _plan_time(lane, stage, chunk, num_chunks, live):
    """See plan_time in planner/stage_table.h."""
    begin = get(stage, at.STAGE_TICKS_BEGIN, live)
    ticks = get(stage, at.STAGE_TICKS_END, live) - begin
    queue = tl.minimum(lane, at.NUM_QUEUES - 1)
    ended = (lane * 0 + at.AT_CHUNK_END) >> queue & 1
    phase = (lane * 0 + at.PHASES) >> (4 * queue) & 15
    return (begin + ticks * (chunk + ended) // num_chunks) * 4 + phase


@triton.jit
def look(call):
    """The heads of all queues."""
    lane = queue_lanes()
    queue = lane < at.NUM_QUEUES
    tickets = place(call.control, at.CONTROL_TICKETS) + lane * 8
    word = tl.where(queue, tickets, place(call.control, at.CONTROL_ABORT))
    if len(call.wire) == PEER:
        seen = peek(word, lane <= _ABORT_LANE)
    else:
        word = tl.where(lane == _NOTICE_LANE, place(call.control, at.CONTROL_NOTICE), word)
        seen = peek(word, lane <= _NOTICE_LANE)
        noticed = tl.sum(tl.where(lane == _NOTICE_LANE, seen, 0))
        seen = tl.where(lane == _ABORT_LANE, seen | noticed, seen)
    ticket = tl.where(queue, seen, 0)

    record = queue_record(call.header, lane)
    num_items = get(record, at.QUEUE_NUM_ITEMS, queue)
    first_stage = get(record, at.QUEUE_FIRST_STAGE, queue)[:, None]
    num_stages = get(record, at.QUEUE_NUM_STAGES, queue)[:, None]
    next_one = tl.arange(0, _TICKETS).to(tl.int64)[None, :]
    tickets = ticket[:, None] + next_one
    live = queue[:, None] & (tickets < num_items[:, None])
    stage = _stage_of(call, first_stage, num_stages, tickets, live)
    stages = call.stages + (first_stage + stage) * at.SIZEOF_STAGE
    num_streams = tl.maximum(get(stages, at.STAGE_NUM_STREAMS, live), 1)
    within = tickets - get(stages, at.STAGE_FIRST_ITEM, live)
    chunk = tl.where(live, within // num_streams, 0)
    stream = get(stages, at.STAGE_FIRST_STREAM, live) + tl.where(live, within % num_streams, 0)

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
    full = reached & (row < first_row + num_rows)

    # The first with rows of each queue; those before it have none.
    head = tl.min(tl.where(full, next_one, _TICKETS), axis=1)
    left = tl.minimum(num_items - ticket, _TICKETS)
    empty = tl.where(queue, tl.maximum(tl.minimum(head, left), 0), 0)
    waiting = head < _TICKETS
    here = next_one == head[:, None]
    num_chunks = tl.maximum(get(stages, at.STAGE_NUM_CHUNKS, live), 1)
    time = _plan_time(lane[:, None], stages, chunk, num_chunks, live)
    return Heads(
        ticket=ticket + empty,
        stage=_at_head(stage, here),
        stream=_at_head(stream, here),
        chunk=_at_head(chunk, here),
        first_row=_at_head(first_row, here),
        num_rows=_at_head(num_rows, here),
        first_segment=_at_head(segment, here),
        time=tl.where(waiting, _at_head(time, here), at.LATE),
        waiting=waiting.to(tl.int64),
        empty=empty,
        aborted=tl.sum(tl.where(lane == _ABORT_LANE, seen, 0)),
    )


@triton.jit
def _at_head(values, here):
    """Of each queue the one value of [16, 16] that `here` marks; 0 without one."""
    return tl.sum(tl.where(here, values, 0), axis=1)


@triton.jit
def _of(values, queue):
    return tl.sum(tl.where(queue_lanes() == queue, values, 0))


@triton.jit
def item_of(call, heads, queue):
    """The head of one queue."""
    return Item(
        queue=queue,
        ticket=_of(heads.ticket, queue),
        stage=_of(heads.stage, queue),
        stream=call.streams + _of(heads.stream, queue) * at.SIZEOF_STREAM,
        chunk=_of(heads.chunk, queue),
        first_row=_of(heads.first_row, queue),
        num_rows=_of(heads.num_rows, queue),
        first_segment=_of(heads.first_segment, queue),
    )
