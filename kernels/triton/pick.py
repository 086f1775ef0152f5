"""How a block finds work, and when it gives up: as kernels/body/pick.h.

A block looks at the heads of all queues and takes, by compare-and-swap on the queue's ticket, only
an item that can run now; it then runs it without waiting. So before a block waits it has claimed
and run whatever could run, of every queue, and it holds no claim while it waits: any number of
blocks ends, one program for each rank, too. For plan times strictly increase along dependencies and
never fall within a queue: the earliest item not yet run anywhere is at the head of its queue and
can run.

Example: heads are pack 3 (time 8, can run), put 1 (time 6, its pack flag is not there), land 0
(time 11, can run). Put 1 is looked at first, then pack 3, which is taken. Two other blocks saw the
same. Their swaps of ticket 3 find 4: they look at packs 4 to 11, of which 4 to 9 can run; one of
them takes 4, the other one, whose swap of 4 finds 5, takes 5.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from .access import get, place, put, swap_if
from .call import claims_of_all, raise_abort
from .items import item_of, items_from, nth_item, queue_lanes
from .target import now_ns, pause
from .waits import can_run, first_missing, num_runnable

_NO_RECORD = tl.constexpr(0)  # RecordState
_RECORD_IN_WORK = tl.constexpr(1)
_RECORD_WRITTEN = tl.constexpr(2)


class Idle(NamedTuple):
    """What a block remembers of a wait, int64 scalars.

    claimed: by all blocks of the rank, as last seen. since_ns: of the last progress. seen_of_all:
    claims of all ranks, when `looked` is 1. rounds: looks without progress.
    """

    claimed: tl.tensor
    since_ns: tl.tensor
    seen_of_all: tl.tensor
    looked: tl.tensor
    rounds: tl.tensor


@triton.jit
def first_runnable(call, heads):
    """The queue whose head is planned first of those that can run; -1 without any."""
    lane = queue_lanes()
    found = heads.aborted * 0 - 1
    tried = heads.aborted * 0
    left = tl.sum(heads.waiting)
    while (found < 0) & (left > 0):
        waiting = (heads.waiting != 0) & ((tried >> lane & 1) == 0)
        time = tl.where(waiting, heads.time, at.LATE)
        queue = tl.min(tl.where(waiting & (time == tl.min(time)), lane, at.NUM_QUEUES))
        if can_run(call, item_of(call, heads, queue)) != 0:
            found = queue
        tried = tried | ((tried * 0 + 1) << queue)
        left -= 1
    return found


@triton.jit
def _ticket_word(call, queue):
    """The queue's ticket, or those of a tensor of queues."""
    return place(call.control, at.CONTROL_TICKETS) + queue * 8


@triton.jit
def take(call, heads, queue):
    """Claim the head of a queue, which can run; where another block has been quicker, one after it.

    Blocks that look at the same time choose the same head: if all but one looked again, an item
    would be claimed in the time of a look. Returns 1 and the item; or 0, where the next one cannot
    run, or others have taken all that were looked at.
    """
    item = item_of(call, heads, queue)
    word = _ticket_word(call, queue)
    ticket = swap_if(word, item.ticket, item.ticket + 1)
    got = (ticket == item.ticket).to(tl.int64)
    if got == 0:
        found = items_from(call, queue, ticket)
        first = ticket
        end = first + num_runnable(call, queue, found)
        full = tl.sum(tl.where(found.full, (found.ticket * 0 + 1) << (found.ticket - first), 0))
        while (got == 0) & (ticket < end):
            seen = swap_if(word, ticket, ticket + 1)
            if seen == ticket:
                got = full >> (ticket - first) & 1
                ticket += 1 - got  # without rows: passed
            else:
                ticket = seen
        item = nth_item(call, queue, found, ticket - first)
    return got, item


@triton.jit
def pass_empty(call, heads):
    """Pass the items without rows before the heads: they need no wait and do nothing. A swap that
    is done twice does nothing either: tickets only grow."""
    lane = queue_lanes()
    word = _ticket_word(call, tl.minimum(lane, at.NUM_QUEUES - 1))
    expected = tl.where(heads.empty != 0, heads.ticket - heads.empty, -1)  # no ticket is -1
    swap_if(word, expected, heads.ticket)


@triton.jit
def abort_call(call, missing, queue, stage, chunk, waited_ns):
    """One record here, then every rank is told to leave. missing: a Missing."""
    record = place(call.control, at.CONTROL_RECORD)
    state = place(record, at.ERROR_STATE)
    if swap_if(state, _NO_RECORD, _RECORD_IN_WORK) == _NO_RECORD:
        put(record, at.ERROR_EXPECTED, missing.expected)
        put(record, at.ERROR_SEEN, missing.seen)
        put(record, at.ERROR_WAITED_NS, waited_ns)
        put(record, at.ERROR_EPOCH, call.epoch)
        put(record, at.ERROR_QUEUE, queue)
        put(record, at.ERROR_STAGE, stage)
        put(record, at.ERROR_CHUNK, chunk)
        put(record, at.ERROR_PEER, missing.peer)
        put(record, at.ERROR_SLOT, missing.slot)
        tl.debug_barrier()
        swap_if(state, _RECORD_IN_WORK, _RECORD_WRITTEN)
        raise_abort(call, (call.epoch << at.VALUE_BITS) + call.rank + 1)


@triton.jit
def _give_up(call, stuck, waited_ns):
    """A deadline has passed. Returns 0 where nothing is missing after all."""
    missing = first_missing(call, stuck)
    if missing.found != 0:
        abort_call(call, missing, stuck.queue, stuck.stage, stuck.chunk, waited_ns)
    return missing.found


@triton.jit
def start_idle(call):
    """Before the first look."""
    zero = call.rank * 0
    return Idle(claimed=zero - 1, since_ns=now_ns(), seen_of_all=zero, looked=zero, rounds=zero)


@triton.jit
def wait_a_little(call, heads, idle):
    """Nothing can run: sleep, and give up once nobody has got on for the progress deadline.

    Half the deadline after the last claim here the block looks around: waiting long is no fault
    while other ranks get on. The deadline counts from the last change anywhere, seen by looks half
    of it apart.
    """
    now = now_ns()
    deadline = get(call.args, at.ARGS_PROGRESS_NS)
    claimed = tl.sum(heads.ticket)
    since = idle.since_ns
    seen_of_all = idle.seen_of_all
    looked = idle.looked
    rounds = idle.rounds
    if (claimed != idle.claimed) | (since == 0):
        since = now
        looked = looked * 0
        rounds = rounds * 0
    elif now - since > deadline // 2:
        expired = (now - since > deadline).to(tl.int64)
        if (looked == 0) | (expired != 0):
            seen = claims_of_all(call)
            moved = 1 - looked * (seen == seen_of_all).to(tl.int64)
            looked = looked * 0 + 1
            seen_of_all = seen
            if expired != 0:
                if moved != 0:
                    since = now - deadline // 2
                else:
                    lane = queue_lanes()
                    first = tl.min(heads.time)
                    waits = (heads.waiting != 0) & (heads.time == first)
                    queue = tl.min(tl.where(waits, lane, at.NUM_QUEUES))
                    if _give_up(call, item_of(call, heads, queue), now - since) == 0:
                        since = now  # it came after all
    pause(rounds.to(tl.int32))
    return Idle(
        claimed=claimed, since_ns=since, seen_of_all=seen_of_all, looked=looked, rounds=rounds + 1
    )
