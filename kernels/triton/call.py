"""What a block knows of its call, and how ranks tell one another of it.

Inside a server every peer's heap is written with plain stores; between servers, where there are
any, a library does it (network.py). A flag lives with its waiter and has one writer.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from . import network, wires
from .access import finish_writes, get, load64
from .mapped import claims_of, raise_abort_from
from .target import forget, store_release
from .transport import PEER


class Call(NamedTuple):
    """int64 scalars, held in registers all along: few. Addresses, but for rank, row_bytes, epoch.

    args: KernelArgs. header, stages, streams, segments: of the stage table. row_bytes: of a row
    that moves. control, flags: this rank's own. epoch: of this call. wire: a tuple as long as the
    number of the transport, see transport.py.
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
    wire: tl.tuple


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
        wire=call.wire,
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
def open_call(ranks, blocks_per_rank, TRANSPORT: tl.constexpr):
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
    if TRANSPORT == PEER:  # noqa: SIM108 - Triton 3.6 cannot make the other one
        wire = ()
    else:
        wire = (None,) * TRANSPORT
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
        wire=wire,
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
def stamp(call, value):
    """What a flag holds once it has been raised to `value` in this call."""
    return (call.epoch << at.VALUE_BITS) + value


@triton.jit
def _release_flag(call, rank, slot, value):
    flags = load64(get(call.args, at.ARGS_FLAGS) + rank * 8)
    store_release(flags + slot * 8, stamp(call, value))


@triton.jit
def raise_flag(call, rank, slot, value):
    """Release a flag; what the block has written before is in order only behind a barrier."""
    if len(call.wire) == PEER:
        _release_flag(call, rank, slot, value)
    elif network.is_far(call, rank):
        wires.set_flag(call, rank, slot, stamp(call, value))
    else:
        _release_flag(call, rank, slot, value)


@triton.jit
def signal(call, rank, slot, value):
    """Raise a flag that vouches for all that the block has written."""
    finish_writes()
    raise_flag(call, rank, slot, value)


@triton.jit
def claims_of_all(call):
    """What changes while any rank gets on: claims of all of them. Between servers those of this
    server, and what others have told of theirs."""
    if len(call.wire) == PEER:
        controls = get(call.args, at.ARGS_CONTROLS)
        return claims_of(call, controls, get(call.header, at.HEADER_NUM_RANKS))
    else:
        return network.progress_of_all(call)


@triton.jit
def raise_abort(call, word):
    """Tell every rank to leave."""
    if len(call.wire) == PEER:
        raise_abort_from(call, word, call.rank * 0, get(call.header, at.HEADER_NUM_RANKS))
    else:
        network.raise_abort(call, word)
