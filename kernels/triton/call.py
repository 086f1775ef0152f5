"""What a block knows of its call, and how ranks tell one another of it over mapped memory.

Every peer's heap is written with plain stores; a flag lives with its waiter and has one writer.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from .access import acquire, finish_writes, get, load64, place, swap_if
from .target import store_release

_COUNT_LANES = tl.constexpr(1024)  # at least a block's threads


class Call(NamedTuple):
    """int64 scalars: addresses, but for rank, sizes and the epoch.

    args: KernelArgs. header, queues, posts, stages, streams, segments, links: of the stage table.
    row_bytes: of a row that moves. send, receive, window, scratch: offsets in a rank's data. own:
    this rank's data. control, flags: its own. epoch: of this call.
    """

    args: tl.tensor
    rank: tl.tensor
    header: tl.tensor
    queues: tl.tensor
    posts: tl.tensor
    stages: tl.tensor
    streams: tl.tensor
    segments: tl.tensor
    links: tl.tensor
    row_bytes: tl.tensor
    send: tl.tensor
    receive: tl.tensor
    window: tl.tensor
    scratch: tl.tensor
    own: tl.tensor
    control: tl.tensor
    flags: tl.tensor
    epoch: tl.tensor


@triton.jit
def _round_up(num_bytes):
    return (num_bytes + 255) // 256 * 256


@triton.jit
def open_call(ranks, blocks_per_rank):
    """The call of this program: ranks' blocks follow one another in the launch."""
    index = (tl.program_id(0) // blocks_per_rank).to(tl.int64)
    args = ranks.to(tl.int64) + index * at.SIZEOF_ARGS
    rank = get(args, at.ARGS_RANK)
    header = get(args, at.ARGS_TABLE)
    queues = header + at.SIZEOF_HEADER
    posts = queues + at.NUM_QUEUES * at.SIZEOF_QUEUE
    stages = posts + get(header, at.HEADER_NUM_POSTS) * at.SIZEOF_POST
    streams = stages + get(header, at.HEADER_NUM_STAGES) * at.SIZEOF_STAGE
    segments = streams + get(header, at.HEADER_NUM_STREAMS) * at.SIZEOF_STREAM
    links = segments + get(header, at.HEADER_NUM_SEGMENTS) * at.SIZEOF_SEGMENT
    row_bytes = get(header, at.HEADER_ROW_BYTES)
    receive = _round_up(get(header, at.HEADER_SEND_ROWS) * row_bytes)
    window = receive + _round_up(get(header, at.HEADER_RECEIVE_ROWS) * row_bytes)
    scratch = window + _round_up(get(header, at.HEADER_WINDOW_ROWS) * row_bytes)
    control = load64(get(args, at.ARGS_CONTROLS) + rank * 8)
    epoch = get(args, at.ARGS_EPOCH)
    if epoch == 0:  # the last block out advances the word, after every block has read it
        epoch = get(control, at.CONTROL_EPOCH) + 1
    return Call(
        args=args,
        rank=rank,
        header=header,
        queues=queues,
        posts=posts,
        stages=stages,
        streams=streams,
        segments=segments,
        links=links,
        row_bytes=row_bytes,
        send=rank * 0,
        receive=receive,
        window=window,
        scratch=scratch,
        own=load64(get(args, at.ARGS_DATA) + rank * 8),
        control=control,
        flags=load64(get(args, at.ARGS_FLAGS) + rank * 8),
        epoch=epoch,
    )


@triton.jit
def data_of(call, rank):
    """A rank's data, as mapped here; a tensor of ranks, too."""
    return load64(get(call.args, at.ARGS_DATA) + rank * 8)


@triton.jit
def control_of(call, rank):
    """A rank's Control, as mapped here."""
    return load64(get(call.args, at.ARGS_CONTROLS) + rank * 8)


@triton.jit
def stamp(call, value):
    """What a flag holds once it has been raised to `value` in this call."""
    return (call.epoch << at.VALUE_BITS) + value


@triton.jit
def raise_flag(call, rank, slot, value):
    """Release a flag; what the block has written before is in order only behind a barrier."""
    flags = load64(get(call.args, at.ARGS_FLAGS) + rank * 8)
    store_release(flags + slot * 8, stamp(call, value))


@triton.jit
def signal(call, rank, slot, value):
    """Raise a flag that vouches for all that the block has written."""
    finish_writes()
    raise_flag(call, rank, slot, value)


@triton.jit
def claims_of_all(call):
    """Claims of all ranks: changes while any of them gets on. Reads the peers' words, by plain
    loads, one or more for each thread, and a sum over all threads."""
    num_words = get(call.header, at.HEADER_NUM_RANKS) * at.NUM_QUEUES
    controls = get(call.args, at.ARGS_CONTROLS)
    lane = tl.arange(0, _COUNT_LANES).to(tl.int64)
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
def raise_abort(call, word):
    """Tell every rank to leave. The words of all name the same origin: the first to reach rank 0's,
    whoever copies it on."""
    home = place(control_of(call, call.rank * 0), at.CONTROL_ABORT)
    swap_if(home, 0, word)
    first = acquire(home)
    for rank in range(get(call.header, at.HEADER_NUM_RANKS)):
        swap_if(place(control_of(call, call.rank * 0 + rank), at.CONTROL_ABORT), 0, first)
