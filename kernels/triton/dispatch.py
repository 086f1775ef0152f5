"""Dispatch: a token's row goes once to each server that it has experts on, with a header that says
where each choice belongs; inside a server it is handed once to each rank, and lands in the slots.

The row that moves: the parts of all payload tensors, the weights [K] if any, the header
(RowEntry[K]), each at a multiple of 16 bytes. See kernels/body/dispatch.h; who writes what beside
the rows is in arrivals.py. Here a block moves ROWS rows at a time, a choice after the other.

Example, 2 servers x 2 ranks, K = 2, two experts per rank: token 5 of rank 0 chooses experts 5 and
6, on ranks 2 and 3. Its row crosses once, 0 -> 2. Rank 2 finds choice 0 is its own and scatters the
row into its slot; for choice 1 it copies the row to the window of rank 3, at the row that the
header names, and tells rank 3. Rank 3 lands it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from .access import finish_writes, get, load32, load64, place, store32, store64
from .arrivals import read_arrival, tell_all
from .call import data_of, forget_call, links_of, raise_flag, receive_of, send_of, signal, window_of
from .copy import copy_rows
from .handle import view_handle
from .move_rows import end_of_segments, give_credit, part_of, run_put
from .persistent import run_call
from .target import lanes

_ROWS = tl.constexpr(8)  # at a time: a warp's or half a wave's each
_CHOICES = tl.constexpr(32)  # the most that there are


class Rows(NamedTuple):
    """Rows of a dispatch, to be read: [ROWS] int64.

    wire: addresses of rows that moved; where moved, a scalar, is 0, the caller's tensors are read
    instead. entries: of their headers. token: number of the caller's row. here: 0 for no row. to:
    addresses that rows are gathered at; where gathers, a scalar, is 0, their choices say.
    """

    wire: tl.tensor
    entries: tl.tensor
    token: tl.tensor
    here: tl.tensor
    to: tl.tensor
    moved: tl.tensor
    gathers: tl.tensor


@triton.jit
def _record_choices(call, rows, landed):
    """What landed rows leave besides their payload, for each choice: slots and weights. landed:
    [ROWS] their window rows, or NONE."""
    moe = get(call.args, at.ARGS_MOE)
    handle = get(moe, at.MOE_HANDLE)
    topk = get(handle, at.HANDLE_TOPK)
    expert_layout = (get(handle, at.HANDLE_LAYOUT) == at.EXPERT_LAYOUT).to(tl.int64)
    k = lanes(_CHOICES)
    here = (landed != at.NONE)[:, None] & (k < topk)[None, :]
    entry = rows.entries[:, None] + (k * at.SIZEOF_ENTRY)[None, :]
    slot = get(entry, at.ENTRY_SLOT, here)
    own = here & (get(entry, at.ENTRY_LOCAL_RANK, here) == get(call.header, at.HEADER_LOCAL_RANK))
    number = (landed * topk)[:, None] + k[None, :]
    if get(moe, at.MOE_RECORD) != 0:
        slots = view_handle(handle).window_slots
        store32(slots + number * 4, tl.where(own, slot, at.NONE), here)
    index_output = get(moe, at.MOE_INDEX_OUTPUT)
    if (expert_layout == 0) & (index_output != 0):
        store64(index_output + number * 8, tl.where(own, slot, -1), here)
    weight_bytes = get(moe, at.MOE_WEIGHT_BYTES)
    if weight_bytes != 0:
        if rows.moved != 0:
            weights = rows.wire + get(moe, at.MOE_WEIGHTS_OFFSET)
        else:
            weights = get(moe, at.MOE_WEIGHTS_INPUT) + rows.token * topk * weight_bytes
        source = weights[:, None] + (k * weight_bytes)[None, :]
        written = here
        if expert_layout != 0:
            number = slot
            written = own
        target = get(moe, at.MOE_WEIGHTS_OUTPUT) + number * weight_bytes
        if weight_bytes == 8:
            store64(target, load64(source, own), written)
        else:
            store32(target, load32(source, own), written)


@triton.jit
def _ends_of_piece(call, rows, p, target_row, lands, goes, peers):
    """Piece p of rows: where it comes from and goes, which rows have it, its bytes and alignment.

    The parts of all payloads; then what is gathered besides, weights and header; or else the whole
    row, for other ranks: peers, [ROWS].
    """
    moe = get(call.args, at.ARGS_MOE)
    num_parts = get(moe, at.MOE_NUM_PARTS)
    topk = get(get(moe, at.MOE_HANDLE), at.HANDLE_TOPK)
    mask = lands
    alignment = p * 0
    if p < num_parts:
        part = place(moe, at.MOE_PARTS) + p * at.SIZEOF_PART
        num_bytes = get(part, at.PART_ROW_BYTES)
        source = rows.wire + get(part, at.PART_OFFSET)
        if rows.moved == 0:
            alignment = get(part, at.PART_INPUT)
            source = alignment + rows.token * num_bytes
        target = rows.to + get(part, at.PART_OFFSET)
        if rows.gathers == 0:
            output = get(part, at.PART_OUTPUT)
            alignment = alignment | output
            target = output + target_row * num_bytes
    elif rows.gathers == 0:
        mask = goes
        num_bytes = call.row_bytes
        source = rows.wire
        target = window_of(call, data_of(call, peers)) + target_row * call.row_bytes
    elif p == num_parts:
        num_bytes = topk * get(moe, at.MOE_WEIGHT_BYTES)
        alignment = get(moe, at.MOE_WEIGHTS_INPUT)
        source = alignment + rows.token * num_bytes
        target = rows.to + get(moe, at.MOE_WEIGHTS_OFFSET)
    else:
        num_bytes = topk * at.SIZEOF_ENTRY
        alignment = view_handle(get(moe, at.MOE_HANDLE)).entries
        source = rows.entries
        target = rows.to + get(moe, at.MOE_HEADER_OFFSET)
    return source, target, mask, num_bytes, alignment


@triton.jit
def _move_tile(call, rows, forward):
    """Gather rows: payloads, weights, header; or take them to where their choices want them, to
    other ranks of the server too, once to each, where `forward` is not 0."""
    moe = get(call.args, at.ARGS_MOE)
    handle = get(moe, at.MOE_HANDLE)
    topk = get(handle, at.HANDLE_TOPK)
    own_local = get(call.header, at.HEADER_LOCAL_RANK)
    expert_layout = (get(handle, at.HANDLE_LAYOUT) == at.EXPERT_LAYOUT).to(tl.int64)
    present = rows.here != 0
    choice = lanes(_CHOICES)
    entry = rows.entries[:, None] + (choice * at.SIZEOF_ENTRY)[None, :]
    chosen = present[:, None] & (choice < topk)[None, :]
    local_ranks = tl.where(chosen, get(entry, at.ENTRY_LOCAL_RANK, chosen), at.NONE)
    landed = rows.here * 0 + at.NONE
    num_rounds = topk
    num_pieces = get(moe, at.MOE_NUM_PARTS) + 1
    if rows.gathers != 0:
        num_rounds = topk * 0 + 1
        num_pieces += 1
    for k in range(num_rounds):
        lands = present
        goes = present & (rows.here == 0)
        target_row = rows.here * 0
        peers = rows.here * 0 + call.rank
        if rows.gathers == 0:
            entries = rows.entries + k * at.SIZEOF_ENTRY
            local_rank = get(entries, at.ENTRY_LOCAL_RANK, present)
            same = (local_ranks == local_rank[:, None]) & (choice < k)[None, :]
            again = tl.max(same.to(tl.int32), axis=1) != 0  # rank layout, and others: sent
            valid = present & (local_rank != at.NONE)
            own = valid & (local_rank == own_local)
            lands = own & ((again == 0) | (rows.here * expert_layout != 0))
            goes = valid & (own == 0) & (again == 0) & (rows.here * forward != 0)
            target_row = get(entries, at.ENTRY_WINDOW_ROW, valid)
            landed = tl.where(own, target_row, landed)
            peers = tl.where(goes, call.rank - own_local + local_rank, call.rank)
            if expert_layout != 0:
                target_row = tl.where(own, get(entries, at.ENTRY_SLOT, own), target_row)
        for p in range(num_pieces):
            source, target, mask, num_bytes, alignment = _ends_of_piece(
                forget_call(call), rows, p, target_row, lands, goes, peers
            )
            if tl.max(mask.to(tl.int32)) != 0:
                copy_rows(target, source, mask, num_bytes, alignment)
    if rows.gathers == 0:
        _record_choices(forget_call(call), rows, landed)


@triton.jit
def _move_run(call, item, first, target_row, num_rows):
    """Rows from number `first` on of the list that route made (pack, push), of the window (land,
    take) or of what has been received; the first of a pack or push goes to row target_row."""
    moe = get(call.args, at.ARGS_MOE)
    handle = view_handle(get(moe, at.MOE_HANDLE))
    topk = get(handle.header, at.HANDLE_TOPK)
    peer = get(item.stream, at.STREAM_PEER)
    sends = item.queue <= at.QUEUE_PUSH
    own = data_of(call, call.rank)
    wires = window_of(call, own)
    forward = item.queue * 0
    moved = item.queue * 0 + 1
    gathers = item.queue * 0
    target = send_of(call, data_of(call, peer))
    if item.queue == at.QUEUE_RECEIVE:
        wires = receive_of(call, own)
        forward += 1
    elif sends:
        moved -= 1
        if item.queue == at.QUEUE_PUSH:
            target = window_of(call, data_of(call, peer))
        if (item.queue == at.QUEUE_PACK) | (peer != call.rank):
            gathers += 1
    lane = lanes(_ROWS)
    for begin in range(0, num_rows, _ROWS):
        here = begin + lane < num_rows
        number = first + begin + lane
        wire = wires + number * call.row_bytes
        entries = wire + get(moe, at.MOE_HEADER_OFFSET)
        token = lane * 0
        if sends:
            entries = handle.entries + number * topk * at.SIZEOF_ENTRY
            token = load32(handle.pack_list + number * 4, here)
        rows = Rows(
            wire=wire,
            entries=entries,
            token=token,
            here=here.to(tl.int64),
            to=target + (target_row + begin + lane) * call.row_bytes,
            moved=moved,
            gathers=gathers,
        )
        _move_tile(forget_call(call), rows, forward)


@triton.jit
def _signal_all(call, item):
    """Tell every local rank that its part of a chunk is there, if it has one or not."""
    finish_writes()
    first = links_of(call) + get(item.stream, at.STREAM_FIRST_LINK) * at.SIZEOF_LINK
    for k in range(get(item.stream, at.STREAM_NUM_LINKS)):
        link = first + k * at.SIZEOF_LINK
        raise_flag(call, get(link, at.LINK_RANK), get(link, at.LINK_SLOT) + item.chunk, 1)


@triton.jit
def dispatch_rows(call, item, TILE_BYTES: tl.constexpr):
    """An item of a dispatch. Receive: one run of rows. Land: one of each source, as its proxy has
    told. Others: one of each segment."""
    if item.queue == at.QUEUE_PUT:
        run_put(call, item, TILE_BYTES)
    else:
        num_runs = end_of_segments(call, item) - item.first_segment
        if item.queue == at.QUEUE_RECEIVE:
            num_runs = num_runs * 0 + 1
            give_credit(call, item)
            tell_all(forget_call(call), item)
        elif item.queue == at.QUEUE_LAND:
            num_runs = get(call.header, at.HEADER_GPUS_PER_SERVER)
        for k in range(num_runs):
            target_row = item.queue * 0
            if item.queue == at.QUEUE_RECEIVE:
                first = get(item.stream, at.STREAM_SOURCE_ROW) + item.first_row
                num_rows = item.num_rows
            elif item.queue == at.QUEUE_LAND:
                first, num_rows = read_arrival(call, item, k)
            else:
                stream_row, first, num_rows = part_of(call, item, item.first_segment + k)
                target_row = get(item.stream, at.STREAM_TARGET_ROW) + stream_row
            _move_run(forget_call(call), item, first, target_row, num_rows)
        slot = get(item.stream, at.STREAM_SLOT)
        if item.queue == at.QUEUE_RECEIVE:
            if get(item.stream, at.STREAM_NUM_LINKS) != 0:
                _signal_all(forget_call(call), item)
        elif (item.queue <= at.QUEUE_PUSH) & (slot != at.NO_SLOT):
            signal(call, get(item.stream, at.STREAM_PEER), slot + item.chunk, 1)


@triton.jit
def fastkern_dispatch(ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr):
    """LaunchArgs: blocks_per_rank programs for each of num_ranks ranks."""
    run_call(ranks, blocks_per_rank, dispatch_rows, TILE_BYTES)
