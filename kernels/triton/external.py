"""Functions of a library in LLVM bitcode, as Triton calls them: externs, of int64 alone.

Triton calls an extern on every thread of the block. Those named here are the wrappers of
nvshmem.ll and nccl_gin.ll, linked before the library (fastkern/device/triton_network.py).

    call_external(name, arguments)     a wrapper that looks after the threads by itself; returns 0
    from_one_thread(name, arguments)   a wrapper that takes a lane before its arguments and does
                         something for lane 0 alone: what it returned there, on all threads
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from .target import lanes

# At least the threads of any block, so that one thread holds lane 0, and a sum over the lanes goes
# through shared memory.
_LANES = tl.constexpr(1024)


@core.extern
def call_external(name, arguments, _semantic=None):
    kinds = tuple(core.dtype("int64") for _ in arguments)
    return core.extern_elementwise(
        "",
        "",
        [*arguments],
        {kinds: (core._unwrap_if_constexpr(name), core.dtype("int64"))},
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit
def from_one_thread(NAME: tl.constexpr, arguments):
    lane = lanes(_LANES)
    both = (lane,) + arguments  # noqa: RUF005 - Triton knows no stars
    return tl.sum(call_external(NAME, both))
