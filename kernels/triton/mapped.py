"""Words of other ranks in mapped memory: how far they have come, and that they shall leave."""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from .access import acquire, get, load64, place, swap_far
from .target import lanes

_COUNT_LANES = tl.constexpr(1024)  # at least a block's threads


@triton.jit
def control_of(call, rank):
    """A rank's Control, as mapped here."""
    return load64(get(call.args, at.ARGS_CONTROLS) + rank * 8)


@triton.jit
def claims_of(call, controls, num_ranks):
    """Claims of some ranks, whose Controls a list says: changes while any of them gets on. Reads
    the peers' words, by plain loads, one or more for each thread, and a sum over all threads."""
    acquire(place(call.control, at.CONTROL_ABORT))  # none from a cache, where volatile is ignored
    num_words = num_ranks * at.NUM_QUEUES
    lane = lanes(_COUNT_LANES)
    total = call.rank * 0
    for first in range(0, num_words, _COUNT_LANES):
        word = first + lane
        here = word < num_words
        control = load64(controls + word // at.NUM_QUEUES * 8, here)
        ticket = place(control, at.CONTROL_TICKETS) + word % at.NUM_QUEUES * 8
        pointer = ticket.to(tl.pointer_type(tl.int64))
        total += tl.sum(tl.load(pointer, mask=here, other=0, volatile=True))
    return total


@triton.jit
def raise_abort_from(call, word, first_rank, num_ranks):
    """Tell some ranks to leave, the first of them keeping the home word. The words of all name the
    same origin: the first to reach the home word, whoever copies it on."""
    home = place(control_of(call, first_rank), at.CONTROL_ABORT)
    swap_far(home, 0, word)
    first = acquire(home)
    for rank in range(num_ranks):
        swap_far(place(control_of(call, first_rank + rank), at.CONTROL_ABORT), 0, first)
