"""What a proxy tells the ranks of its server of a chunk of a dispatch: Arrival records.

For each chunk and local rank, in that rank's scratch: of each source the run of window rows that
the chunk brings, and where this proxy wants their sums in a combine; and in its own handle, for
each staging row and local rank, `touched`. See kernels/body/dispatch.h.

Example: a chunk with rows 0 to 2 of source 0 and row 3 of source 1; rows 0, 2 and 3 have choices on
local rank 1, at window rows 10, 11 and 40; 5 partial rows have been given out before. Local rank 1
is told {10, 2 rows, partial 5} of source 0 and {40, 1 row, partial 7} of source 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from .access import add_word, get, load32, place, put, store32
from .call import data_of, forget_call, links_of, receive_of, scratch_of
from .handle import view_handle
from .move_rows import end_of_segments, part_of
from .target import lanes

_ROWS = tl.constexpr(128)  # looked at together


@triton.jit
def first_arrival(call, land_slot):
    """The record of a landing flag for source 0; in scratch and in a handle alike."""
    num_ranks = get(call.header, at.HEADER_NUM_RANKS)
    num_chunks = num_ranks * get(call.header, at.HEADER_CHUNK_SLOTS)
    first_slot = num_ranks * at.LAND_PER_RANK + num_chunks * at.LAND_PER_CHUNK
    return (land_slot - first_slot) * get(call.header, at.HEADER_GPUS_PER_SERVER)


@triton.jit
def _choices_of(entries, topk, local_rank, here):
    """Of rows [128] with headers at `entries`: the window row of the first choice for a local rank,
    or NONE."""
    window_row = entries * 0 + at.NONE
    for k in range(topk):
        entry = entries + k * at.SIZEOF_ENTRY
        wanted = here & (window_row == at.NONE)
        wanted = wanted & (get(entry, at.ENTRY_LOCAL_RANK, wanted) == local_rank)
        window_row = tl.where(wanted, get(entry, at.ENTRY_WINDOW_ROW, wanted), window_row)
    return window_row


@triton.jit
def _tell(call, item, local_rank, arrivals):
    """One local rank. arrivals: its records in its scratch, or 0 for this rank itself."""
    moe = get(call.args, at.ARGS_MOE)
    handle = get(moe, at.MOE_HANDLE)
    record = get(moe, at.MOE_RECORD)
    topk = get(handle, at.HANDLE_TOPK)
    num_sources = get(call.header, at.HEADER_GPUS_PER_SERVER)
    staged = get(item.stream, at.STREAM_SOURCE_ROW) + item.first_row
    lane = lanes(_ROWS)
    headers = receive_of(call, data_of(call, call.rank)) + staged * call.row_bytes
    headers += get(moe, at.MOE_HEADER_OFFSET)
    place_in = call.rank * 0
    if arrivals != 0:
        total = call.rank * 0
        for first in range(0, item.num_rows, _ROWS):
            here = first + lane < item.num_rows
            entries = headers + (first + lane) * call.row_bytes
            found = _choices_of(entries, topk, local_rank, here) != at.NONE
            total += tl.sum(found.to(tl.int64))
        if (record != 0) & (total != 0):
            place_in = add_word(place(handle, at.HANDLE_NUM_PARTIALS), total)
        for source in range(num_sources):  # sources without rows are told of too
            arrival = arrivals + source * at.SIZEOF_ARRIVAL
            put(arrival, at.ARRIVAL_WINDOW_ROW, call.rank * 0)
            put(arrival, at.ARRIVAL_NUM_ROWS, call.rank * 0)
            put(arrival, at.ARRIVAL_PARTIAL_ROW, place_in)
            put(arrival, at.ARRIVAL_RESERVED, call.rank * 0)
    touched = view_handle(handle).touched
    left = end_of_segments(call, item) - item.first_segment
    index = item.first_segment
    while left > 0:
        stream_row, _, num_rows = part_of(call, item, index)
        if num_rows == 0:
            left = left * 0
        else:
            begin = stream_row - item.first_row
            first_place = place_in
            first_window_row = call.rank * 0
            for first in range(begin, begin + num_rows, _ROWS):
                row = first + lane
                here = row < begin + num_rows
                window_row = _choices_of(headers + row * call.row_bytes, topk, local_rank, here)
                found = window_row != at.NONE
                one = found.to(tl.int64)
                mine = place_in + tl.cumsum(one) - one
                if record != 0:
                    kept = window_row
                    if arrivals != 0:
                        kept = tl.where(found, mine, window_row)
                    word = touched + ((staged + row) * num_sources + local_rank) * 4
                    store32(word, kept, here)
                if place_in == first_place:
                    leader = tl.min(tl.where(found, lane, _ROWS))
                    first_window_row = tl.sum(tl.where(lane == leader, window_row, 0))
                place_in += tl.sum(one)
            if arrivals != 0:
                source = get(call.segments + index * at.SIZEOF_SEGMENT, at.SEGMENT_PEER)
                arrival = arrivals + source % num_sources * at.SIZEOF_ARRIVAL
                put(arrival, at.ARRIVAL_WINDOW_ROW, first_window_row)
                put(arrival, at.ARRIVAL_NUM_ROWS, place_in - first_place)
                put(arrival, at.ARRIVAL_PARTIAL_ROW, first_place)
            index += 1
            left -= 1


@triton.jit
def tell_all(call, item):
    """All ranks of the server but this one, and its own handle."""
    num_links = get(item.stream, at.STREAM_NUM_LINKS)
    first = links_of(call) + get(item.stream, at.STREAM_FIRST_LINK) * at.SIZEOF_LINK
    record = get(get(call.args, at.ARGS_MOE), at.MOE_RECORD)
    num_local = get(call.header, at.HEADER_GPUS_PER_SERVER)
    num_told = num_links
    if record != 0:
        num_told += 1
    for k in range(num_told):
        rank = call.rank
        arrivals = call.rank * 0
        if k < num_links:
            link = first + k * at.SIZEOF_LINK
            rank = get(link, at.LINK_RANK)
            record_of = first_arrival(call, get(link, at.LINK_SLOT) + item.chunk)
            arrivals = scratch_of(call, data_of(call, rank)) + record_of * at.SIZEOF_ARRIVAL
        _tell(forget_call(call), item, rank % num_local, arrivals)


@triton.jit
def read_arrival(call, item, source):
    """What the proxy of a landing has told of a source: first window row and number of rows. Kept
    in the handle, for the combine."""
    record = first_arrival(call, get(item.stream, at.STREAM_SLOT) + item.chunk) + source
    told = scratch_of(call, data_of(call, call.rank)) + record * at.SIZEOF_ARRIVAL
    moe = get(call.args, at.ARGS_MOE)
    if get(moe, at.MOE_RECORD) != 0:
        kept = view_handle(get(moe, at.MOE_HANDLE)).arrivals + record * at.SIZEOF_ARRIVAL
        word = lanes(at.SIZEOF_ARRIVAL // 4) * 4
        store32(kept + word, load32(told + word))
    return get(told, at.ARRIVAL_WINDOW_ROW), get(told, at.ARRIVAL_NUM_ROWS)
