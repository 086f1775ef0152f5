"""Rows of sums of a combine: what each adds up, in which order.

A row of sums is a block's, one after the other, so that a term that is not there costs a look and
nothing else. Of a row some columns at a time are summed in registers:

    total     servers before the own one, the own server, servers after it, the bias
    server    ranks before the own one, the own rank, ranks after it
    rank      the own rank's slots, in top-k order

A product with a weight is rounded before it is added. Every sum starts at -0, which changes no term
that it is added to; a row without any term is +0.

Example, local rank 1 of 3 in server 1 of 2, a token with slots a and b here, c on local rank 2, and
a sum d from server 0: a + b; then + c; then d + that; then + the bias.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from .access import get, load32
from .call import data_of, scratch_of, send_of, window_of
from .handle import view_handle
from .rounding import (
    FLOAT32,
    FLOAT64,
    load_values,
    negative_zeros,
    store_values,
    value_bytes,
)

# Of a row at a time: three sums of each value lie in registers.
_MOST_TILE_BYTES = tl.constexpr(16384)

# The terms of a row, in the order in which they are added.
_SERVERS_BEFORE = tl.constexpr(0)
_RANKS_BEFORE = tl.constexpr(1)
_SLOTS = tl.constexpr(2)
_RANKS_AFTER = tl.constexpr(3)
_SERVERS_AFTER = tl.constexpr(4)
_BIAS = tl.constexpr(5)


class Rows(NamedTuple):
    """What an item's rows of sums have in common, scalars; parts and kind int32, the others int64.

    moe: address of MoeArgs. first_part, last_part: kinds of terms. slots: address of the handle's
    window_slots. ranks, servers: addresses of the ranks' and the servers' row numbers of row 0,
    map_bytes from those of row 1. partials: address of partial row 0 here. target, target_bytes,
    kind: where row 0 goes, how far apart rows are, and of what kind their values are.
    """

    moe: tl.tensor
    first_part: tl.tensor
    last_part: tl.tensor
    slots: tl.tensor
    ranks: tl.tensor
    servers: tl.tensor
    map_bytes: tl.tensor
    partials: tl.tensor
    target: tl.tensor
    target_bytes: tl.tensor
    kind: tl.tensor


class Terms(NamedTuple):
    """Terms of one kind of a row, scalars; count and kind int32, the others int64.

    count: how many. listed: address of their row numbers, u32; 0: there is one, `number`. source,
    row_bytes, kind: where row 0 lies, how far apart rows are, and of what kind their values are.
    """

    count: tl.tensor
    listed: tl.tensor
    number: tl.tensor
    source: tl.tensor
    row_bytes: tl.tensor
    kind: tl.tensor


@triton.jit
def rows_of(call, item, SUM_KIND: tl.constexpr):
    """Of an item. SUM_KIND: FLOAT64 or FLOAT32."""
    moe = get(call.args, at.ARGS_MOE)
    handle = view_handle(get(moe, at.MOE_HANDLE))
    num_servers = get(call.header, at.HEADER_SERVERS)
    num_local = get(call.header, at.HEADER_GPUS_PER_SERVER)
    partial_bytes = get(call.header, at.HEADER_SCRATCH_ROW_BYTES)
    own = data_of(call, call.rank)
    partials = scratch_of(call, own)
    zero = (call.rank * 0).to(tl.int32)
    first_part = zero + _SLOTS
    last_part = zero + _SLOTS
    servers = handle.token_map
    ranks = servers + num_servers * 4
    map_bytes = (num_servers + num_local) * 4
    if item.queue == at.QUEUE_REDUCE:
        first_part = zero + _SERVERS_BEFORE
        last_part = zero + _BIAS
        kind = get(moe, at.MOE_VALUE_KIND)
        target = get(moe, at.MOE_RESULT)
        target_bytes = get(moe, at.MOE_WIDTH) * value_bytes(kind)
    elif item.queue == at.QUEUE_SUM:
        first_part = zero + _RANKS_BEFORE
        last_part = zero + _RANKS_AFTER
        ranks = handle.touched
        map_bytes = num_local * 4
        partials += get(call.header, at.HEADER_SCRATCH_BASE) * partial_bytes
        kind = get(moe, at.MOE_WIRE_KIND)
        target = send_of(call, own)
        target_bytes = call.row_bytes
    else:
        kind = call.rank * 0 + SUM_KIND
        target = scratch_of(call, data_of(call, get(item.stream, at.STREAM_PEER)))
        target_bytes = partial_bytes
    return Rows(
        moe=moe,
        first_part=first_part,
        last_part=last_part,
        slots=handle.window_slots,
        ranks=ranks,
        servers=servers,
        map_bytes=map_bytes,
        partials=partials,
        target=target,
        target_bytes=target_bytes,
        kind=kind.to(tl.int32),
    )


@triton.jit
def _terms_of(call, rows, row, own_row, part, SUM_KIND: tl.constexpr):
    """The terms of one kind (part: _SERVERS_BEFORE, ...) of a row. own_row: the row of the
    dispatch's window whose slots the own rank adds, or NONE."""
    own_local = get(call.header, at.HEADER_LOCAL_RANK)
    own_server = get(call.header, at.HEADER_SERVER)
    number = row
    if part == _SLOTS:
        handle = get(rows.moe, at.MOE_HANDLE)
        topk = get(handle, at.HANDLE_TOPK)
        count = topk
        listed = rows.slots + own_row * topk * 4
        number = own_row
        if get(handle, at.HANDLE_LAYOUT) == at.RANK_LAYOUT:  # one output row for all choices
            count = count * 0 + 1
            listed = listed * 0
        if own_row == at.NONE:
            count = count * 0
        kind = get(rows.moe, at.MOE_VALUE_KIND)
        source = get(rows.moe, at.MOE_EXPERT_OUT)
        row_bytes = get(rows.moe, at.MOE_WIDTH) * value_bytes(kind)
    elif (part == _RANKS_BEFORE) | (part == _RANKS_AFTER):
        count = own_local
        listed = rows.ranks + row * rows.map_bytes
        if part == _RANKS_AFTER:
            count = get(call.header, at.HEADER_GPUS_PER_SERVER) - 1 - own_local
            listed += (own_local + 1) * 4
        kind = call.rank * 0 + SUM_KIND
        source = rows.partials
        row_bytes = get(call.header, at.HEADER_SCRATCH_ROW_BYTES)
    elif part == _BIAS:
        source = get(rows.moe, at.MOE_BIAS)
        count = (source != 0).to(tl.int64)
        listed = source * 0
        kind = get(rows.moe, at.MOE_BIAS_KIND)
        row_bytes = get(rows.moe, at.MOE_BIAS_STRIDE)
    else:
        count = own_server
        listed = rows.servers + row * rows.map_bytes
        if part == _SERVERS_AFTER:
            count = get(call.header, at.HEADER_SERVERS) - 1 - own_server
            listed += (own_server + 1) * 4
        kind = get(rows.moe, at.MOE_WIRE_KIND)
        source = window_of(call, data_of(call, call.rank))
        row_bytes = call.row_bytes
    return Terms(count.to(tl.int32), listed, number, source, row_bytes, kind.to(tl.int32))


@triton.jit
def _weight_of(rows, part, number, SUM64: tl.constexpr):
    """Of an output row; 1 of another term, or without weights."""
    weights = get(rows.moe, at.MOE_ROW_WEIGHTS)
    weighted = (part == _SLOTS) & (weights != 0)
    if SUM64:
        pointer = (weights + number * 8).to(tl.pointer_type(tl.float64))
    else:
        pointer = (weights + number * 4).to(tl.pointer_type(tl.float32))
    return tl.load(pointer, mask=weighted, other=1.0)


@triton.jit
def _sum_columns(call, rows, row, own_row, column, here, WIDE: tl.constexpr, SUM64: tl.constexpr):
    """The sums of some columns of a row."""
    SUM_KIND: tl.constexpr = FLOAT64 if SUM64 else FLOAT32
    nothing = negative_zeros(column.shape[0], SUM64)
    total = nothing
    server = nothing
    sums = nothing
    num_terms = rows.kind * 0
    for part in range(rows.first_part, rows.last_part + 1):
        terms = _terms_of(call, rows, row, own_row, part, SUM_KIND)
        for k in range(terms.count):
            number = terms.number
            if terms.listed != 0:
                number = load32(terms.listed + (row * 0 + k) * 4)
            if number != at.NONE:
                num_terms += 1
                source = terms.source + number * terms.row_bytes
                values = load_values(source, terms.kind, column, here, WIDE, SUM64)
                sums = sums + values * _weight_of(rows, part, number, SUM64)
        if part == _SERVERS_BEFORE:
            total = sums
            sums = nothing
        elif part == _RANKS_BEFORE:
            server = sums
            sums = nothing
        elif part == _SLOTS:
            sums = server + sums
        elif part == _RANKS_AFTER:
            sums = total + sums
    if num_terms == 0:
        sums = tl.zeros_like(sums)
    return sums


@triton.jit
def sum_rows(
    call,
    rows,
    first_row,
    to_row,
    num_rows,
    TILE_BYTES: tl.constexpr,
    WIDE: tl.constexpr,
    SUM64: tl.constexpr,
):
    """A run of rows of an item, from first_row on, to rows of its target from to_row on."""
    LESS: tl.constexpr = TILE_BYTES if TILE_BYTES < _MOST_TILE_BYTES else _MOST_TILE_BYTES
    COLUMNS: tl.constexpr = LESS // (8 if SUM64 else 4)
    MANY: tl.constexpr = 2 if SUM64 else 4  # values that a thread reads at once
    own_local = get(call.header, at.HEADER_LOCAL_RANK)
    width = get(rows.moe, at.MOE_WIDTH).to(tl.int32)
    if WIDE:
        TILE: tl.constexpr = COLUMNS
        width = width // MANY * MANY
    else:  # in a layout of its own
        TILE: tl.constexpr = COLUMNS // MANY
    for k in range(num_rows):
        row = first_row + k
        own_row = row
        if rows.first_part != _SLOTS:
            own_row = load32(rows.ranks + row * rows.map_bytes + own_local * 4)
        target = rows.target + (to_row + k) * rows.target_bytes
        for first in range(0, width, TILE):
            column = first + tl.arange(0, TILE)
            here = column < width
            sums = _sum_columns(call, rows, row, own_row, column, here, WIDE, SUM64)
            store_values(target, rows.kind, column, here, sums, WIDE, SUM64)


@triton.jit
def is_aligned(moe, SUM64: tl.constexpr):
    """Rows that move lie at multiples of 16 bytes; do those of the caller where they must?"""
    MANY: tl.constexpr = 2 if SUM64 else 4  # values
    num_bytes = value_bytes(get(moe, at.MOE_VALUE_KIND))
    places = get(moe, at.MOE_EXPERT_OUT) | get(moe, at.MOE_RESULT)
    aligned = ((places | get(moe, at.MOE_WIDTH) * num_bytes) & (MANY * num_bytes - 1)) == 0
    bias = get(moe, at.MOE_BIAS)
    bias_bytes = value_bytes(get(moe, at.MOE_BIAS_KIND))
    beside = ((bias | get(moe, at.MOE_BIAS_STRIDE)) & (MANY * bias_bytes - 1)) == 0
    return aligned & ((bias == 0) | beside)
