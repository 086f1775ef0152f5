"""The persistent kernel: one launch for each rank and call; blocks run the items of its queues.

How they find them is in pick.py; what an item does in move_rows.py (all-to-all), dispatch.py and
combine.py. Who writes which flag, and the memory order, are those of kernels/body/exchange.h:
    ready [r] at local peers, and in direct mode r's senders   kernel start of r
    credit[r] at r's next sender                               kernel start, or r's receive item
    pack, push, land, arrive                                   the item that wrote the data
Every remote write but ready, credit and abort waits for the target's ready or credit of this epoch:
"kernel start" means "my buffers are free", and nothing is zeroed between calls.

Example, 2 servers x 2 ranks, ranks 0 and 1 send 8 and 4 rows to server 1, chunks of 6 rows. Rank 0
packs 6 rows into its own staging and 2 into rank 1's, then signals pack[0] at both. Rank 1 adds its
4. Each puts one chunk of 6 rows to its same-index peer (0 -> 2, 1 -> 3) once pack flags and credit
are there, and signals arrive. Rank 3 lands what is its own, hands the rest to rank 2's window and
signals land[1] there; rank 2 copies window -> output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from .access import add_word, finish_writes, get, peek, place, put, store64
from .call import forget_call, open_call, posts_of, raise_flag
from .items import look
from .network import pass_on_abort, progress, told_to_leave
from .pick import Idle, first_runnable, pass_empty, start_idle, take, wait_a_little
from .quiet import await_quiet
from .target import lanes, now_ns, store_release
from .transport import PEER

_LOOKS_PER_BEAT = tl.constexpr(16)  # between servers: looks for work until the clock is read again


@triton.jit
def _post_start_flags(call):
    for k in range(get(call.header, at.HEADER_NUM_POSTS)):
        post = posts_of(call.header) + k * at.SIZEOF_POST
        slot = get(post, at.POST_SLOT)
        raise_flag(call, get(post, at.POST_RANK), slot, get(post, at.POST_VALUE))


@triton.jit
def _trace_item(call, item, begin_ns):
    events = get(call.args, at.ARGS_TRACE)
    number = add_word(get(call.args, at.ARGS_TRACE_COUNT), 1)
    if number < get(call.args, at.ARGS_TRACE_CAPACITY):
        event = events + number * at.SIZEOF_TRACE
        put(event, at.TRACE_BEGIN_NS, begin_ns)
        put(event, at.TRACE_END_NS, now_ns())
        put(event, at.TRACE_BYTES, item.num_rows * call.row_bytes)
        put(event, at.TRACE_QUEUE, item.queue)
        put(event, at.TRACE_STAGE, item.stage)
        put(event, at.TRACE_CHUNK, item.chunk)
        put(event, at.TRACE_PEER, get(item.stream, at.STREAM_PEER))
        put(event, at.TRACE_BLOCK, tl.program_id(0) % get(call.args, at.ARGS_NUM_BLOCKS))
        put(event, at.TRACE_EPOCH, call.epoch)


@triton.jit
def _end(call):
    """No block of the rank runs any more."""
    queue = lanes(at.NUM_QUEUES)
    store64(place(call.control, at.CONTROL_TICKETS) + queue * 8, queue * 0)
    store64(place(call.control, at.CONTROL_BLOCKS_OUT), call.rank * 0)
    finish_writes()
    store_release(place(call.control, at.CONTROL_EPOCH), call.epoch)


@triton.jit
def _leave(call):
    """The last block out makes the rank ready for the next call."""
    tl.debug_barrier()
    out = add_word(place(call.control, at.CONTROL_BLOCKS_OUT), 1)
    last = out + 1 == get(call.args, at.ARGS_NUM_BLOCKS)
    if len(call.wire) == PEER:
        if last & (peek(place(call.control, at.CONTROL_ABORT)) == 0):
            _end(call)
    elif last:
        if await_quiet(call) != 0:
            _end(call)
        else:
            pass_on_abort(call)


@triton.jit
def run_call(
    ranks,
    blocks_per_rank,
    MOVE: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    TRANSPORT: tl.constexpr = PEER,
):
    """One block of one rank. MOVE(call, item, TILE_BYTES): what an operation does with an item.
    TRANSPORT: see transport.py."""
    opened = open_call(ranks, blocks_per_rank, TRANSPORT)
    call = forget_call(opened)
    block = tl.program_id(0) % get(call.args, at.ARGS_NUM_BLOCKS)
    traced = get(call.args, at.ARGS_TRACE) != 0
    if block == 0:
        _post_start_flags(call)
    idle = start_idle(call)
    claimed, since_ns, seen_of_all, looked, rounds = idle
    running = call.rank * 0 + 1
    if len(call.wire) != PEER:
        looks = call.rank * 0
    while running != 0:
        call = forget_call(opened)
        if len(call.wire) != PEER:
            looks += 1
            if looks % _LOOKS_PER_BEAT == 0:
                progress(call)
        heads = look(call)
        if (heads.aborted != 0) | (tl.sum(heads.waiting + heads.empty) == 0):
            running = running * 0
            if len(call.wire) != PEER:
                told_to_leave(call)  # tells this server at once what another one has told
        else:
            num_empty = tl.sum(heads.empty)
            if num_empty != 0:
                pass_empty(call, heads)
            queue = first_runnable(call, heads)
            if queue >= 0:
                since_ns = since_ns * 0
                got, item = take(call, heads, queue)
                if got != 0:
                    call = forget_call(opened)
                    begin_ns = since_ns
                    if traced:
                        begin_ns = now_ns()
                    MOVE(call, item, TILE_BYTES)
                    if traced:
                        _trace_item(call, item, begin_ns)
            elif num_empty == 0:
                idle = Idle(claimed, since_ns, seen_of_all, looked, rounds)
                claimed, since_ns, seen_of_all, looked, rounds = wait_a_little(call, heads, idle)
    _leave(forget_call(opened))
