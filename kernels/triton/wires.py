"""Wires: what a library does between servers; network.py is the protocol that all of them share.

Every wire supplies, for the call's whole block:

    put(call, to, source, num_bytes, rank, slot, stamp)   start moving bytes to another server; once
                         they are there, the flag holds `stamp`. to, source: addresses in this
                         rank's own data; `to` means the same place in the data of `rank`
    set_flag(call, rank, slot, stamp)   set a flag on another server
    seen(call, slot, stamp)   this rank's flag has been seen at `stamp` or past it, by `peek`: 1
                         when the library says so too, else 0. What its put has brought may be read
                         behind an acquire of the flag
    notify(call, rank, word)   Control.notice = word on another server
    beat(call, rank)     Control.beats += 1 on another server
    quiet(call)          1 when all puts of this rank have been read from its data, else 0

None reads from another server, and none waits for one but quiet() of NVSHMEM.

Memory order, of a chunk that crosses: who wrote the rows has signalled (release), a block of this
rank has acquired the flag and passed a block barrier; then put(): what the library reads for the
network is behind that barrier. The library sets the flag after the bytes have arrived, and vouches
for that chunk alone. The receiver's block sees the flag, asks the library, acquires; block barrier;
all threads read.

Functions of a library are called by one thread where they are not made for a block: the wrappers
in nvshmem.ll and nccl_gin.ll see to it, each once in a kernel and not inlined. What one thread has
found out reaches the others through a sum over elements of all of them (from_one_thread).
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it

from . import wire_gin, wire_nvshmem, wire_shared
from .transport import NCCL_GIN, NVSHMEM


@triton.jit
def put(call, to, source, num_bytes, rank, slot, stamp):
    if len(call.wire) == NVSHMEM:
        wire_nvshmem.put(call, to, source, num_bytes, rank, slot, stamp)
    elif len(call.wire) == NCCL_GIN:
        wire_gin.put(call, to, source, num_bytes, rank, slot, stamp)
    else:
        wire_shared.put(call, to, source, num_bytes, rank, slot, stamp)


@triton.jit
def set_flag(call, rank, slot, stamp):
    if len(call.wire) == NVSHMEM:
        wire_nvshmem.set_flag(call, rank, slot, stamp)
    elif len(call.wire) == NCCL_GIN:
        wire_gin.set_flag(call, rank, slot, stamp)
    else:
        wire_shared.set_flag(call, rank, slot, stamp)


@triton.jit
def seen(call, slot, stamp):
    if len(call.wire) == NVSHMEM:
        return wire_nvshmem.seen(call, slot, stamp)
    elif len(call.wire) == NCCL_GIN:
        return wire_gin.seen(call, slot, stamp)
    else:
        return wire_shared.seen(call, slot, stamp)


@triton.jit
def notify(call, rank, word):
    if len(call.wire) == NVSHMEM:
        wire_nvshmem.notify(call, rank, word)
    elif len(call.wire) == NCCL_GIN:
        wire_gin.notify(call, rank, word)
    else:
        wire_shared.notify(call, rank, word)


@triton.jit
def beat(call, rank):
    if len(call.wire) == NVSHMEM:
        wire_nvshmem.beat(call, rank)
    elif len(call.wire) == NCCL_GIN:
        wire_gin.beat(call, rank)
    else:
        wire_shared.beat(call, rank)


@triton.jit
def quiet(call):
    if len(call.wire) == NVSHMEM:
        return wire_nvshmem.quiet(call)
    elif len(call.wire) == NCCL_GIN:
        return wire_gin.quiet(call)
    else:
        return wire_shared.quiet(call)
