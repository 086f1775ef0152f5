"""Items: the heads of all queues, found together. Where tickets point to is in locate.py, what an
item waits for in waits.py.

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
from .locate import locate, plan_time
from .target import lanes
from .transport import PEER

_LANES = tl.constexpr(16)
_TICKETS = tl.constexpr(16)  # of a queue that are looked at together
NEXT = tl.constexpr(8)  # items after a head that are looked at where other blocks have been quicker
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
    """[16], a lane for each queue, and more."""
    return lanes(_LANES)


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

    next_one = lanes(_TICKETS)[None, :]
    found = locate(call, lane[:, None], ticket[:, None] + next_one, queue[:, None])

    # The first with rows of each queue; those before it have none.
    head = tl.min(tl.where(found.full, next_one, _TICKETS), axis=1)
    num_items = get(queue_record(call.header, lane), at.QUEUE_NUM_ITEMS, queue)
    left = tl.minimum(num_items - ticket, _TICKETS)
    empty = tl.where(queue, tl.maximum(tl.minimum(head, left), 0), 0)
    waiting = head < _TICKETS
    here = next_one == head[:, None]
    return Heads(
        ticket=ticket + empty,
        stage=_at_head(found.stage, here),
        stream=_at_head(found.stream, here),
        chunk=_at_head(found.chunk, here),
        first_row=_at_head(found.first_row, here),
        num_rows=_at_head(found.num_rows, here),
        first_segment=_at_head(found.first_segment, here),
        time=tl.where(waiting, _at_head(plan_time(found), here), at.LATE),
        waiting=waiting.to(tl.int64),
        empty=empty,
        aborted=tl.sum(tl.where(lane == _ABORT_LANE, seen, 0)),
    )


@triton.jit
def _at_head(values, here):
    """Of each queue the one value of [16, 16] that `here` marks; 0 without one."""
    return tl.sum(tl.where(here, values, 0), axis=1)


@triton.jit
def _of(values, here):
    return tl.sum(tl.where(here, values, 0))


@triton.jit
def _item_at(call, queue, found, here):
    """The one that `here` marks, of heads or of located items."""
    return Item(
        queue=queue,
        ticket=_of(found.ticket, here),
        stage=_of(found.stage, here),
        stream=call.streams + _of(found.stream, here) * at.SIZEOF_STREAM,
        chunk=_of(found.chunk, here),
        first_row=_of(found.first_row, here),
        num_rows=_of(found.num_rows, here),
        first_segment=_of(found.first_segment, here),
    )


@triton.jit
def item_of(call, heads, queue):
    """The head of one queue."""
    return _item_at(call, queue, heads, queue_lanes() == queue)


@triton.jit
def items_from(call, queue, ticket):
    """Some tickets of one queue, from one on, located: [8]."""
    tickets = ticket + lanes(NEXT)
    queues = tickets * 0 + queue
    return locate(call, queues, tickets, queues >= 0)


@triton.jit
def nth_item(call, queue, found, n):
    """One of items_from."""
    return _item_at(call, queue, found, lanes(NEXT) == n)
