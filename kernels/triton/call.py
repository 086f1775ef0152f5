"""What a block knows of its call, and how ranks tell one another of it over mapped memory.

Every peer's heap is written with plain stores; a flag lives with its waiter and has one writer.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from .access import acquire, finish_writes, get, load64, place, swap_far
from .target import forget, store_release

_COUNT_LANES = tl.constexpr(1024)  # at least a block's threads


class Call(NamedTuple):
    """int64 scalars, held in registers all along: few. Addresses, but for rank, row_bytes, epoch.

    args: KernelArgs. header, stages, streams, segments: of the stage table. row_bytes: of a row
    that moves. control, flags: this rank's own. epoch: of this call.
    """

    args: tl.tensor
    rank: tl.tensor
    header: tl.tensor
    stages: tl.tensor
    streams: tl.tensor
    segments: tl.tensor
    row_bytes: tl.tensor
    control: tl.tensor
    flags: tl.tensor
    epoch: tl.tensor


@triton.jit
def forget_call(call):
    """The same call, of which nothing is known that has been computed from it."""
    return Call(
        args=forget(call.args),
        rank=call.rank,
        header=forget(call.header),
        stages=forget(call.stages),
        streams=forget(call.streams),
        segments=forget(call.segments),
        row_bytes=call.row_bytes,
        control=forget(call.control),
        flags=forget(call.flags),
        epoch=call.epoch,
    )


@triton.jit
def queue_record(header, queue):
    """The record of a queue, or of a tensor of queues."""
    return header + at.SIZEOF_HEADER + queue * at.SIZEOF_QUEUE


@triton.jit
def posts_of(header):
    """The flags to raise at the start."""
    return header + at.SIZEOF_HEADER + at.NUM_QUEUES * at.SIZEOF_QUEUE


@triton.jit
def links_of(call):
    """The links of all streams."""
    return call.segments + get(call.header, at.HEADER_NUM_SEGMENTS) * at.SIZEOF_SEGMENT


@triton.jit
def open_call(ranks, blocks_per_rank):
    """The call of this program: ranks' blocks follow one another in the launch."""
    index = (tl.program_id(0) // blocks_per_rank).to(tl.int64)
    args = ranks.to(tl.int64) + index * at.SIZEOF_ARGS
    rank = get(args, at.ARGS_RANK)
    header = get(args, at.ARGS_TABLE)
    stages = posts_of(header) + get(header, at.HEADER_NUM_POSTS) * at.SIZEOF_POST
    streams = stages + get(header, at.HEADER_NUM_STAGES) * at.SIZEOF_STAGE
    control = load64(get(args, at.ARGS_CONTROLS) + rank * 8)
    epoch = get(args, at.ARGS_EPOCH)
    if epoch == 0:  # the last block out advances the word, after every block has read it
        epoch = get(control, at.CONTROL_EPOCH) + 1
    return Call(
        args=args,
        rank=rank,
        header=header,
        stages=stages,
        streams=streams,
        segments=streams + get(header, at.HEADER_NUM_STREAMS) * at.SIZEOF_STREAM,
        row_bytes=get(header, at.HEADER_ROW_BYTES),
        control=control,
        flags=load64(get(args, at.ARGS_FLAGS) + rank * 8),
        epoch=epoch,
    )


@triton.jit
def _region(num_rows, row_bytes):
    return (num_rows * row_bytes + 255) // 256 * 256


@triton.jit
def send_of(call, data):
    """Send staging in a rank's data: all ranks' data is laid out alike (planner/stage_table.h)."""
    return data


@triton.jit
def receive_of(call, data):
    """Receive staging in a rank's data."""
    return data + _region(get(call.header, at.HEADER_SEND_ROWS), call.row_bytes)


@triton.jit
def window_of(call, data):
    """The window in a rank's data."""
    num_rows = get(call.header, at.HEADER_RECEIVE_ROWS)
    return receive_of(call, data) + _region(num_rows, call.row_bytes)


@triton.jit
def scratch_of(call, data):
    """Scratch in a rank's data."""
    num_rows = get(call.header, at.HEADER_WINDOW_ROWS)
    return window_of(call, data) + _region(num_rows, call.row_bytes)


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
    acquire(place(call.control, at.CONTROL_ABORT))  # none from a cache, where volatile is ignored
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
    swap_far(home, 0, word)
    first = acquire(home)
    for rank in range(get(call.header, at.HEADER_NUM_RANKS)):
        swap_far(place(control_of(call, call.rank * 0 + rank), at.CONTROL_ABORT), 0, first)
