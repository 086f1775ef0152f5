"""A network on the host, for tests: as kernels/transport/shared.h. Its library is memory that is
mapped under addresses which the kernel's arguments do not have.

Of NetworkArgs: peers are places in the two tables of addresses that `window` (of control words) and
`data_window` point to; `heap` is where this rank's control words begin.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from .access import add_word, finish_writes, get, load32, load64, place
from .copy import copy_bytes
from .target import store_release

_TILE_BYTES = tl.constexpr(16384)


@triton.jit
def _base(call, TABLE: tl.constexpr, rank):
    network = get(call.args, at.ARGS_NETWORK)
    peer = load32(get(network, at.NETWORK_PEERS) + rank * 4)
    return load64(get(network, TABLE) + peer * 8)


@triton.jit
def _there(call, rank, word):
    """The same word on another rank."""
    heap = get(get(call.args, at.ARGS_NETWORK), at.NETWORK_HEAP)
    return _base(call, at.NETWORK_WINDOW, rank) + (word - heap)


@triton.jit
def put(call, to, source, num_bytes, rank, slot, stamp):
    own = load64(get(call.args, at.ARGS_DATA) + call.rank * 8)
    target = _base(call, at.NETWORK_DATA_WINDOW, rank) + (to - own)
    copy_bytes(target, source, num_bytes, _TILE_BYTES)
    finish_writes()
    set_flag(call, rank, slot, stamp)


@triton.jit
def set_flag(call, rank, slot, stamp):
    store_release(_there(call, rank, call.flags + slot * 8), stamp)


@triton.jit
def seen(call, slot, stamp):
    return call.rank * 0 + 1


@triton.jit
def notify(call, rank, word):
    store_release(_there(call, rank, place(call.control, at.CONTROL_NOTICE)), word)


@triton.jit
def beat(call, rank):
    add_word(_there(call, rank, place(call.control, at.CONTROL_BEATS)), 1)


@triton.jit
def quiet(call):
    return call.rank * 0 + 1
