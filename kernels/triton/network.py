"""Between servers: what all wires (wires.py) have in common; as kernels/transport/network.h.

Mapped stores inside a server, a library's one-sided puts between servers. Addresses of ranks of
other servers are null in KernelArgs, and nothing of theirs is read.

    flags   A flag that set_flag() sets (ready, credit) vouches for no bytes. Whoever writes it a
            second time has got something from the rank that saw the first, so one update of a flag
            is on its way at most.
    beats   A block tells the same-index peers of its rank, 8 times in a deadline at most, when its
            server has claimed something since. So the claims here and the beats that came in change
            while any rank gets on anywhere.
    aborts  Inside a server as with mapped stores, its first rank keeping the home word. Every rank
            that leaves also puts the word into `notice` of its same-index peers, who copy it to
            their server. Two servers that give up at once may name different origins.

Example, 2 servers x 2 ranks: rank 3 gives up: CAS on the abort word of rank 2, its server's home,
then on that of rank 3; notice of rank 1. Rank 2 sees its abort word, leaves, and puts it into the
notice of rank 0. Ranks 0 and 1 copy it to the home word of rank 0 and to each other, and leave.

`call` is a Call (call.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from . import wires
from .access import acquire, get, load64, peek, place, put, swap_if
from .mapped import claims_of, raise_abort_from
from .target import lanes, now_ns

_BEATS_PER_DEADLINE = tl.constexpr(8)
_LANES = tl.constexpr(1024)  # at least a block's threads


@triton.jit
def _num_local(call):
    """Ranks of a server."""
    return get(call.header, at.HEADER_GPUS_PER_SERVER)


@triton.jit
def _first_local(call):
    """The first rank of this server."""
    return call.rank - get(call.header, at.HEADER_LOCAL_RANK)


@triton.jit
def is_far(call, rank):
    """Whether a rank is of another server; of a tensor of ranks, too."""
    num_local = _num_local(call)
    return rank // num_local != call.rank // num_local


@triton.jit
def flags_seen(call, slot, wanted, writer, here):
    """1 when flags that have been seen, [32], are all there by the words of the library whose
    writers are far, else 0. An acquire of them must follow."""
    lane = lanes(32)
    far = here & is_far(call, writer)
    seen = call.rank * 0 + 1
    left = tl.sum(tl.where(far, (lane * 0 + 1) << lane, 0))
    k = call.rank * 0
    while left != 0:
        if (left & 1) != 0:
            flag = tl.sum(tl.where(lane == k, slot, 0))
            seen = seen * wires.seen(call, flag, tl.sum(tl.where(lane == k, wanted, 0)))
        left = left >> 1
        k += 1
    return seen


@triton.jit
def _controls(call):
    """The list of this server's Controls."""
    return get(call.args, at.ARGS_CONTROLS) + _first_local(call) * 8


@triton.jit
def progress_of_all(call):
    """A figure that changes while any rank gets on."""
    total = claims_of(call, _controls(call), _num_local(call))
    lane = lanes(_LANES)
    for first in range(0, _num_local(call), _LANES):
        here = first + lane < _num_local(call)
        beats = place(load64(_controls(call) + (first + lane) * 8, here), at.CONTROL_BEATS)
        pointer = beats.to(tl.pointer_type(tl.int64))
        total += tl.sum(tl.load(pointer, mask=here, other=0, volatile=True))
    return total


@triton.jit
def progress(call):
    """Now and then: tell the other servers that this one gets on, if it does."""
    word = place(call.control, at.CONTROL_LAST_BEAT_NS)
    now = now_ns()
    last = peek(word)
    due = now - last >= get(call.args, at.ARGS_PROGRESS_NS) // _BEATS_PER_DEADLINE
    if due:  # noqa: SIM102 - Triton would evaluate both
        if swap_if(word, last, now) == last:  # else another block does
            claims = claims_of(call, _controls(call), _num_local(call))
            if claims != peek(place(call.control, at.CONTROL_LAST_BEAT_CLAIMS)):
                put(call.control, at.CONTROL_LAST_BEAT_CLAIMS, claims)
                for server in range(get(call.header, at.HEADER_SERVERS)):
                    rank = server * _num_local(call) + get(call.header, at.HEADER_LOCAL_RANK)
                    if rank != call.rank:
                        wires.beat(call, rank)


@triton.jit
def told_to_leave(call):
    """1 once this rank has been told to leave, else 0. What another server has told is told on to
    this one."""
    abort = peek(place(call.control, at.CONTROL_ABORT))
    notice = peek(place(call.control, at.CONTROL_NOTICE))
    if (abort == 0) & (notice != 0):
        raise_abort_from(call, notice, _first_local(call), _num_local(call))
    return ((abort | notice) != 0).to(tl.int64)


@triton.jit
def pass_on_abort(call):
    """The same-index peers are told what this rank has been told."""
    word = acquire(place(call.control, at.CONTROL_ABORT))
    for server in range(get(call.header, at.HEADER_SERVERS)):
        rank = server * _num_local(call) + get(call.header, at.HEADER_LOCAL_RANK)
        if rank != call.rank:
            wires.notify(call, rank, word)


@triton.jit
def raise_abort(call, word):
    """Tell every rank to leave."""
    raise_abort_from(call, word, _first_local(call), _num_local(call))
    pass_on_abort(call)
