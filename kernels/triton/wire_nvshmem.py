"""NVSHMEM between servers: as kernels/transport/nvshmem.h, where the memory order is explained.

A symmetric address is the local address of the same object, with a PE. put() is the fused put with
signal of the whole block, which begins and ends with a block barrier. Reads of what was put are
ordered behind NVSHMEM's own test of the flag, and nothing else.

quiet() waits, as there is no test for completion; only this rank's own puts are waited for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import external
from . import layout as at
from .access import get, load32, place

_SET = tl.constexpr(9)  # NVSHMEM_SIGNAL_SET
_ADD = tl.constexpr(10)  # NVSHMEM_SIGNAL_ADD


@triton.jit
def _pe(call, rank):
    return load32(get(get(call.args, at.ARGS_NETWORK), at.NETWORK_PEERS) + rank * 4)


@triton.jit
def _signal(call, rank, word, value, OPERATION: tl.constexpr):
    operation = word * 0 + OPERATION
    external.call_external("fastkern_nvshmem_signal", (word, value, operation, _pe(call, rank)))


@triton.jit
def put(call, to, source, num_bytes, rank, slot, stamp):
    flag = call.flags + slot * 8
    external.call_external(
        "fastkern_nvshmem_put", (to, source, num_bytes, flag, stamp, _pe(call, rank))
    )


@triton.jit
def set_flag(call, rank, slot, stamp):
    _signal(call, rank, call.flags + slot * 8, stamp, _SET)


@triton.jit
def seen(call, slot, stamp):
    return external.from_one_thread("fastkern_nvshmem_test", (call.flags + slot * 8, stamp))


@triton.jit
def notify(call, rank, word):
    _signal(call, rank, place(call.control, at.CONTROL_NOTICE), word, _SET)


@triton.jit
def beat(call, rank):
    word = place(call.control, at.CONTROL_BEATS)
    _signal(call, rank, word, word * 0 + 1, _ADD)


@triton.jit
def quiet(call):
    external.call_external("fastkern_nvshmem_quiet", (call.rank,))
    tl.debug_barrier()
    return call.rank * 0 + 1
