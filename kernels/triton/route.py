"""Route: from topk_idx alone, which rows a rank sends and where each choice of a token goes.

Results are those of kernels/body/route.h, byte for byte, and so is the record, RouteArgs:
    fastkern_route_count  a program per unit (a run of tokens): counts of each key
    fastkern_route_scan   a program per KEYS_PER_PROGRAM keys: each unit's first places, totals
    fastkern_route_fill   a program per unit: pack list, row headers and token map of the handle
Keys are experts, then servers, then ranks. Grids are exact: num_units, and keys rounded up to whole
programs. Kernels follow each other in a stream, and no word is written by two programs of one.

A program takes a tile of choices at a time (choices.py), which says how many of them come before a
choice; what came in the tiles before is in the unit's counts. Words of a unit that several threads
touch are parted by finish_writes: the counts, zeroed, or read and then written; kNone in headers
and map, then what is there. (Kernels have one stage: loads stay behind the stores before them.)

Example: top-k 2, 4 experts on 4 ranks of 2 servers, rank 0. A tile of tokens [0, 2], [3, 2]:
    position         0  1  2  3
    expert = rank    0  2  3  2
    server           0  1  1  1
    copies before    0  0  0  1   of the same expert
    first of server  y  y  y  n   in its token
    tokens before    0  0  1  1   with a choice on the same server
    rows sent: position 0's to rank 0, and to server 1 position 1's (the first) and 2's (the second,
    with two choices: place 0 of rank 3, place 1 of rank 2)
Expert 2's count in the unit was 0 and becomes 2, written by position 3, after which none comes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from .access import finish_writes, load32, load64, place, store32, store64
from .choices import POSITIONS, read_choices, set_of, size_of, tokens_at_once
from .handle import view_handle

KEYS_PER_PROGRAM = 32
"""Of the scan: its grid is the number of keys over this, rounded up."""

_KEYS = tl.constexpr(KEYS_PER_PROGRAM)
_UNITS = tl.constexpr(32)  # that a scan takes at a time
_WORDS = tl.constexpr(512)  # set to one value at a time
_HEADER_WORDS = tl.constexpr(16)  # of each row's header, as above
_NO_BAD = tl.constexpr(2**63 - 1)  # above all positions; -1, which is ~0, in memory


@triton.jit
def _unit_begin(num_tokens, num_units, unit):
    return num_tokens // num_units * unit + tl.minimum(unit, num_tokens % num_units)


@triton.jit
def fastkern_route_count(
    topk_idx,
    num_tokens,
    owner,
    local_index,
    counts,
    totals,
    bad,
    handle,
    slot_base,
    window_base,
    list_base,
    return_base,
    partial_base,
    idx_bytes,
    topk,
    num_experts,
    num_ranks,
    servers,
    gpus_per_server,
    rank,
    num_units,
    layout,
    reserved,
):
    unit = tl.program_id(0).to(tl.int64)
    num_keys = num_experts.to(tl.int64) + servers + num_ranks
    counts += unit * num_keys * 8
    first_rank = num_experts.to(tl.int64) + servers  # key of rank 0
    words = tl.arange(0, _WORDS).to(tl.int64)
    for key in range(0, num_keys, _WORDS):
        store64(counts + (key + words) * 8, words * 0, key + words < num_keys)
    finish_writes()
    one = tl.full((POSITIONS,), 1, tl.int64)
    first_bad = tl.full((POSITIONS,), _NO_BAD, tl.int64)
    last = _unit_begin(num_tokens, num_units, unit + 1)
    for first in range(_unit_begin(num_tokens, num_units, unit), last, tokens_at_once(topk)):
        c = read_choices(
            topk_idx, idx_bytes, topk, owner, num_experts, gpus_per_server, first, last
        )
        wrong = (c.expert != -1) & ~c.routed
        first_bad = tl.minimum(first_bad, tl.where(wrong, c.position, _NO_BAD))
        _add(counts + c.expert * 8, one, c.routed)
        _add(counts + (num_experts + c.server) * 8, one, c.first_of_server)
        _add(counts + (first_rank + c.rank) * 8, one, c.first_of_rank)
    found = tl.min(first_bad, axis=0)
    store64(bad + unit * 8, tl.where(found == _NO_BAD, -1, found))


@triton.jit
def _add(address, value, mask):
    """To words that only this program's threads write: in any order the same sum."""
    tl.atomic_add(address.to(tl.pointer_type(tl.int64)), value, mask=mask, sem="relaxed")


@triton.jit
def fastkern_route_scan(
    topk_idx,
    num_tokens,
    owner,
    local_index,
    counts,
    totals,
    bad,
    handle,
    slot_base,
    window_base,
    list_base,
    return_base,
    partial_base,
    idx_bytes,
    topk,
    num_experts,
    num_ranks,
    servers,
    gpus_per_server,
    rank,
    num_units,
    layout,
    reserved,
):
    program = tl.program_id(0).to(tl.int64)
    num_keys = num_experts.to(tl.int64) + servers + num_ranks
    key = program * _KEYS + tl.arange(0, _KEYS).to(tl.int64)
    units = tl.arange(0, _UNITS).to(tl.int64)
    total = tl.zeros((_KEYS,), tl.int64)
    for first in range(0, num_units, _UNITS):
        unit = first + units
        words = counts + (unit[:, None] * num_keys + key[None, :]) * 8
        mask = (unit < num_units)[:, None] & (key < num_keys)[None, :]
        here = load64(words, mask)
        finish_writes()
        store64(words, total[None, :] + tl.cumsum(here, axis=0) - here, mask)
        total += tl.sum(here, axis=0)
    store64(totals + key * 8, total, key < num_keys)
    if program == 0:
        first_bad = tl.full((_UNITS,), _NO_BAD, tl.int64)
        for first in range(0, num_units, _UNITS):
            unit = first + units
            found = load64(bad + unit * 8, unit < num_units)
            first_bad = tl.minimum(
                first_bad, tl.where((unit < num_units) & (found >= 0), found, _NO_BAD)
            )
        lowest = tl.min(first_bad, axis=0)
        store64(bad + num_units.to(tl.int64) * 8, tl.where(lowest == _NO_BAD, -1, lowest))


@triton.jit
def _fill_with_none(row, entry_words, head):
    """The headers of these rows, addresses, of so many words each."""
    words = tl.arange(0, _HEADER_WORDS).to(tl.int64)
    for first in range(0, entry_words, _HEADER_WORDS):
        word = first + words
        address = row[:, None] + word[None, :] * 4
        store32(address, address * 0 + at.NONE, head[:, None] & (word < entry_words)[None, :])


@triton.jit
def fastkern_route_fill(
    topk_idx,
    num_tokens,
    owner,
    local_index,
    counts,
    totals,
    bad,
    handle,
    slot_base,
    window_base,
    list_base,
    return_base,
    partial_base,
    idx_bytes,
    topk,
    num_experts,
    num_ranks,
    servers,
    gpus_per_server,
    rank,
    num_units,
    layout,
    reserved,
):
    unit = tl.program_id(0).to(tl.int64)
    num_keys = num_experts.to(tl.int64) + servers + num_ranks
    counts += unit * num_keys * 8
    first_rank = num_experts.to(tl.int64) + servers  # key of rank 0
    memory = view_handle(handle)
    own_server = rank // gpus_per_server
    own_local = rank % gpus_per_server
    header_bytes = topk.to(tl.int64) * at.SIZEOF_ENTRY
    # Of a first slot the low half, as slots are u32.
    slots = tl.where(layout == at.EXPERT_LAYOUT, slot_base, local_index)
    slot_stride = tl.where(layout == at.EXPERT_LAYOUT, 8, 4)
    map_words = servers.to(tl.int64) + gpus_per_server
    first_token = _unit_begin(num_tokens, num_units, unit)
    last = _unit_begin(num_tokens, num_units, unit + 1)
    words = tl.arange(0, _WORDS).to(tl.int64)
    for first in range(first_token * map_words, last * map_words, _WORDS):
        word = first + words
        store32(memory.token_map + word * 4, words * 0 + at.NONE, word < last * map_words)
    for first in range(first_token, last, tokens_at_once(topk)):
        c = read_choices(
            topk_idx, idx_bytes, topk, owner, num_experts, gpus_per_server, first, last
        )
        of_expert = load64(counts + c.expert * 8, c.routed) + size_of(c.same_expert & c.before)
        tokens = set_of(c.first_of_rank) & c.tokens_before
        of_rank = load64(counts + (first_rank + c.rank) * 8, c.routed) + size_of(
            c.same_rank & tokens
        )
        tokens = set_of(c.first_of_server) & c.tokens_before
        of_server = load64(counts + (num_experts + c.server) * 8, c.routed) + size_of(
            c.same_server & tokens
        )
        slot = load32(slots + c.expert * slot_stride, c.routed)
        slot = tl.where(layout == at.EXPERT_LAYOUT, slot + of_expert, slot)
        window_row = load64(window_base + c.rank * 8, c.routed) + of_rank
        local_rank = c.rank - c.server * gpus_per_server
        # Of the row that carries the choice; the first choice of each row writes what is the row's.
        own = c.server == own_server
        head = tl.where(own, c.first_of_rank, c.first_of_server)
        in_list = tl.where(own, of_rank, of_server)
        carrier = tl.where(own, c.rank, c.server * gpus_per_server + own_local)
        row = load64(list_base + carrier * 8, c.routed) + in_list
        header = memory.entries + row * header_bytes
        _fill_with_none(header, header_bytes // 4, head)
        base = tl.where(own, partial_base + local_rank * 8, return_base + c.server * 8)
        back = load64(base, head) + in_list
        back = tl.where(c.rank == rank, window_row, back)
        mapped = c.token * map_words + tl.where(own, servers + local_rank, c.server)
        finish_writes()
        # A key's last choice in the tile writes how many there were.
        up_to = c.before * 2 + 1
        last_of_expert = c.routed & ((c.same_expert & ~up_to) == 0)
        last_of_rank = c.routed & ((c.same_rank & ~up_to) == 0)
        last_of_server = c.routed & ((c.same_server & ~up_to) == 0)
        store64(counts + c.expert * 8, of_expert + 1, last_of_expert)
        store64(counts + (first_rank + c.rank) * 8, of_rank + 1, last_of_rank)
        store64(counts + (num_experts + c.server) * 8, of_server + 1, last_of_server)
        store32(memory.pack_list + row * 4, c.token, head)
        store32(memory.token_map + mapped * 4, back, head)
        entry = header + c.choice * at.SIZEOF_ENTRY
        store32(place(entry, at.ENTRY_SLOT), slot, c.routed)
        store32(place(entry, at.ENTRY_WINDOW_ROW), window_row, c.routed)
        store32(place(entry, at.ENTRY_LOCAL_RANK), local_rank, c.routed)
        finish_writes()
