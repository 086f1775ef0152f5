"""What an item waits for: flags of this rank, looked at together, and acquired once they are there.

Example: put 1 of chunk 2, whose rows two sources pack: its stream's gate (ready or credit of the
peer), then the pack flags of both sources for chunk 2. All must hold this call's epoch.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from . import network
from .access import acquire, get, peek, place
from .call import links_of, queue_record, stamp
from .items import NEXT, Item
from .target import lanes
from .transport import PEER

_WAITS = tl.constexpr(32)  # flags that are looked at together
_OWN_WAITS = tl.constexpr(2)


class Waits(NamedTuple):
    """[32] flags of this rank that an item waits for, or [n, 32] of n items: slot; flag: its
    address; wanted: what it must hold; writer. here: where the lane stands for one."""

    slot: tl.tensor
    flag: tl.tensor
    wanted: tl.tensor
    writer: tl.tensor
    here: tl.tensor


@triton.jit
def _num_waits(call, item):
    """How many lanes to look at, some of them for nothing."""
    extra = item.chunk * 0
    if item.queue == at.QUEUE_PUT:
        first = get(item.stream, at.STREAM_FIRST_SEGMENT)
        extra = first + get(item.stream, at.STREAM_NUM_SEGMENTS) - item.first_segment
    elif (item.queue == at.QUEUE_RECEIVE) | (item.queue == at.QUEUE_SUM):
        extra = get(item.stream, at.STREAM_NUM_LINKS)
    return extra + _OWN_WAITS


@triton.jit
def _waits_of(call, item, number):
    """The flags of some numbers: 0, the stream's gate; 1, the chunk's own flag; then, of a put, one
    of each source, and of a receive or a sum one of each link."""
    zero = number * 0
    peer = get(item.stream, at.STREAM_PEER)
    gate = get(item.stream, at.STREAM_GATE_SLOT)
    arrives = (item.queue == at.QUEUE_RECEIVE) | (item.queue == at.QUEUE_LAND)
    arrives = arrives | (item.queue == at.QUEUE_TAKE)
    slot = tl.where(number == 0, gate, get(item.stream, at.STREAM_SLOT) + item.chunk)
    value = tl.where(number == 0, get(item.stream, at.STREAM_GATE_VALUE), 1)
    here = ((number == 0) & (gate != at.NO_SLOT)) | ((number == 1) & arrives)
    writer = zero + peer
    if item.queue == at.QUEUE_PUT:
        index = item.first_segment + number - _OWN_WAITS
        end = get(item.stream, at.STREAM_FIRST_SEGMENT)
        end += get(item.stream, at.STREAM_NUM_SEGMENTS)
        more = (number >= _OWN_WAITS) & (index < end)
        segment = call.segments + index * at.SIZEOF_SEGMENT
        row = get(segment, at.SEGMENT_STREAM_ROW, more)
        more = more & (row < item.first_row + item.num_rows)
        slot = tl.where(more, get(segment, at.SEGMENT_SLOT, more) + item.chunk, slot)
        writer = tl.where(more, get(segment, at.SEGMENT_PEER, more), writer)
        here = here | more
    elif (item.queue == at.QUEUE_RECEIVE) | (item.queue == at.QUEUE_SUM):
        index = get(item.stream, at.STREAM_FIRST_LINK) + number - _OWN_WAITS
        more = number >= _OWN_WAITS
        more = more & (number < _OWN_WAITS + get(item.stream, at.STREAM_NUM_LINKS))
        link = links_of(call) + index * at.SIZEOF_LINK
        if item.queue == at.QUEUE_SUM:
            wanted = get(link, at.LINK_SLOT, more) + item.chunk
        else:
            wanted = get(link, at.LINK_GATE_SLOT, more)
        more = more & (wanted != at.NO_SLOT)
        slot = tl.where(more, wanted, slot)
        writer = tl.where(more, get(link, at.LINK_RANK, more), writer)
        here = here | more
    here = here != 0  # a mask, in the interpreter too
    return Waits(
        slot=slot,
        flag=call.flags + tl.where(here, slot, 0) * 8,
        wanted=tl.where(here, stamp(call, value), 0),
        writer=writer,
        here=here,
    )


@triton.jit
def _are_there(waits, seen):
    """Of flags as they have been seen; true where a lane stands for none."""
    return ((seen >= waits.wanted) | (waits.here == 0)).to(tl.int64)


@triton.jit
def _all_claimed(call, QUEUE: tl.constexpr):
    """Has every item of the queue been claimed, and so every flag that they wait for been seen?"""
    claimed = acquire(place(call.control, at.CONTROL_TICKETS) + QUEUE * 8)
    record = queue_record(call.header, QUEUE)
    return (claimed >= get(record, at.QUEUE_NUM_ITEMS)).to(tl.int64)


@triton.jit
def can_run(call, item):
    """1 when all waits of the item are over, else 0. Never blocks. Acquires what it has seen."""
    ready = item.queue * 0 + 1
    if item.queue == at.QUEUE_REDUCE:
        ready = _all_claimed(call, at.QUEUE_LAND) * _all_claimed(call, at.QUEUE_TAKE)
    num_waits = _num_waits(call, item)
    first = item.queue * 0
    while (ready != 0) & (first < num_waits):
        waits = _waits_of(call, item, first + lanes(_WAITS))
        ready = tl.min(_are_there(waits, peek(waits.flag, waits.here)))
        if ready != 0:
            if len(call.wire) != PEER:
                heard = network.flags_seen(call, waits.slot, waits.wanted, waits.writer, waits.here)
            ready = tl.min(_are_there(waits, acquire(waits.flag, waits.here)))
            if len(call.wire) != PEER:
                ready = ready & heard
        first += _WAITS
    return ready


@triton.jit
def _num_heard(call, waits, here, count):
    """Of so many items whose flags have been seen: those whose far ones the library vouches for."""
    row = lanes(NEXT)[:, None]
    heard = count * 0
    asked = heard + 1
    while (asked != 0) & (heard < count):
        this = here & (row == heard)
        some = tl.max(this.to(tl.int32), axis=0) != 0
        slot = tl.sum(tl.where(this, waits.slot, 0), axis=0)
        wanted = tl.sum(tl.where(this, waits.wanted, 0), axis=0)
        writer = tl.sum(tl.where(this, waits.writer, 0), axis=0)
        asked = network.flags_seen(call, slot, wanted, writer, some)
        heard += asked
    return heard


@triton.jit
def num_runnable(call, queue, found):
    """Of located items of a queue whose head could run, [NEXT], how many can run or have no rows,
    from the first on; one that waits for more than 32 flags ends them. Acquires what their flags
    vouch for."""
    items = Item(
        queue=queue,
        ticket=found.ticket[:, None],
        stage=found.stage[:, None],
        stream=(call.streams + found.stream * at.SIZEOF_STREAM)[:, None],
        chunk=found.chunk[:, None],
        first_row=found.first_row[:, None],
        num_rows=found.num_rows[:, None],
        first_segment=found.first_segment[:, None],
    )
    waits = _waits_of(call, items, lanes(_WAITS)[None, :])
    here = waits.here & found.full[:, None]  # elsewhere streams are any
    if len(call.wire) == PEER:  # noqa: SIM108
        seen = acquire(waits.flag, here)
    else:
        seen = peek(waits.flag, here)
    there = tl.min(_are_there(waits, seen), axis=1) != 0
    few = tl.max(_num_waits(call, items), axis=1) <= _WAITS
    n = lanes(NEXT)
    ready = found.here & ((there & few) | (found.full == 0))
    count = tl.min(tl.where(ready, NEXT, n))
    if len(call.wire) != PEER:
        count = _num_heard(call, waits, here, count)
        acquire(waits.flag, here & (n < count)[:, None])
    return count


class Missing(NamedTuple):
    """The first flag of an item that is not there; found: 0 where all are."""

    found: tl.tensor
    expected: tl.tensor
    seen: tl.tensor
    peer: tl.tensor
    slot: tl.tensor


@triton.jit
def first_missing(call, item):
    """For error records."""
    found = item.queue * 0
    expected = found
    seen = found
    peer = found
    slot = found
    num_waits = _num_waits(call, item)
    first = item.queue * 0
    while (found == 0) & (first < num_waits):
        waits = _waits_of(call, item, first + lanes(_WAITS))
        values = peek(waits.flag, waits.here)
        lane = tl.where(_are_there(waits, values) == 0, lanes(_WAITS), _WAITS)
        which = tl.min(lane)
        if which < _WAITS:
            found += 1
            expected = tl.sum(tl.where(lanes(_WAITS) == which, waits.wanted, 0))
            seen = tl.sum(tl.where(lanes(_WAITS) == which, values, 0))
            peer = tl.sum(tl.where(lanes(_WAITS) == which, waits.writer, 0))
            slot = tl.sum(tl.where(lanes(_WAITS) == which, waits.slot, 0))
        first += _WAITS
    return Missing(found=found, expected=expected, seen=seen, peer=peer, slot=slot)
