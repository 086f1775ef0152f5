"""NCCL's device API (GIN) between servers: as kernels/transport/nccl_gin.h, which says what the
host has made, why signals are weak and at addresses, and what `written` is for.

Example: rank 3's flag on rank 1 was set to 0x20001 in the last call; now it is to be 0x30001:
0x10000 is added, and `written` holds 0x30001.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import external
from . import layout as at
from .access import add_word, get, load32, load64, peek, place

_FLAGS_BEFORE_CHUNKS = tl.constexpr(2)  # ready, credit
_COUNTER_BITS = tl.constexpr(56)


@triton.jit
def _network(call):
    return get(call.args, at.ARGS_NETWORK)


@triton.jit
def _peer(call, rank):
    return load32(get(_network(call), at.NETWORK_PEERS) + rank * 4)


@triton.jit
def _context(call):
    """Blocks share the contexts in turn."""
    num_contexts = get(_network(call), at.NETWORK_NUM_CONTEXTS)
    return tl.program_id(0) % get(call.args, at.ARGS_NUM_BLOCKS) % num_contexts


@triton.jit
def _offset(call, word):
    """Of a word of this rank's control words and flags, in their window."""
    return word - get(_network(call), at.NETWORK_HEAP)


@triton.jit
def _to_add(call, rank, slot, stamp):
    """What to add to another rank's flag, which is then noted as written."""
    num_ranks = get(call.header, at.HEADER_NUM_RANKS)
    chunk_slots = get(call.header, at.HEADER_CHUNK_SLOTS)
    arrive = 2 * num_ranks + (num_ranks + call.rank) * chunk_slots
    kind = _FLAGS_BEFORE_CHUNKS + slot - arrive
    kind = tl.where(slot == num_ranks + call.rank, 1, kind)
    kind = tl.where(slot == call.rank, 0, kind)
    number = rank * (_FLAGS_BEFORE_CHUNKS + chunk_slots) + kind
    word = get(_network(call), at.NETWORK_WRITTEN) + number * 8
    before = tl.atomic_xchg(word.to(tl.pointer_type(tl.int64)), stamp, sem="relaxed", scope="gpu")
    return stamp - before


@triton.jit
def _add(call, rank, word, value):
    network = _network(call)
    external.call_external(
        "fastkern_gin_add",
        (
            get(network, at.NETWORK_COMM),
            _context(call),
            _peer(call, rank),
            get(network, at.NETWORK_WINDOW),
            _offset(call, word),
            value,
        ),
    )


@triton.jit
def put(call, to, source, num_bytes, rank, slot, stamp):
    """The thread that starts it releases at system scope what the block has acquired."""
    network = _network(call)
    own = load64(get(call.args, at.ARGS_DATA) + call.rank * 8)
    context = _context(call)
    external.call_external(
        "fastkern_gin_put",
        (
            get(network, at.NETWORK_COMM),
            context,
            _peer(call, rank),
            get(network, at.NETWORK_DATA_WINDOW),
            to - own,
            source - own,
            num_bytes,
            get(network, at.NETWORK_WINDOW),
            _offset(call, call.flags + slot * 8),
            _to_add(call, rank, slot, stamp),
        ),
    )
    add_word(get(network, at.NETWORK_PUTS) + context * 8, 1)


@triton.jit
def set_flag(call, rank, slot, stamp):
    _add(call, rank, call.flags + slot * 8, _to_add(call, rank, slot, stamp))


@triton.jit
def seen(call, slot, stamp):
    window = get(_network(call), at.NETWORK_WINDOW)
    offset = _offset(call, call.flags + slot * 8)
    return (external.from_one_thread("fastkern_gin_signal", (window, offset)) >= stamp).to(tl.int64)


@triton.jit
def notify(call, rank, word):
    network = _network(call)
    external.call_external(
        "fastkern_gin_set",
        (
            get(network, at.NETWORK_COMM),
            _context(call),
            _peer(call, rank),
            get(network, at.NETWORK_WINDOW),
            _offset(call, place(call.control, at.CONTROL_NOTICE)),
            word,
        ),
    )


@triton.jit
def beat(call, rank):
    _add(call, rank, place(call.control, at.CONTROL_BEATS), call.rank * 0 + 1)


@triton.jit
def quiet(call):
    """Each put adds to its context's counter once it has been read; `puts` are those begun."""
    network = _network(call)
    comm = get(network, at.NETWORK_COMM)
    left = call.rank * 0
    for k in range(get(network, at.NETWORK_NUM_CONTEXTS)):
        done = external.from_one_thread("fastkern_gin_counter", (comm, call.rank * 0 + k))
        begun = peek(get(network, at.NETWORK_PUTS) + k * 8)
        left = left | ((begun - done) << (64 - _COUNTER_BITS))
    return (left == 0).to(tl.int64)
