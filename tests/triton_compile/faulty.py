"""Waits as one would write them first, and what compilers make of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vanished_wait(flag, expected, to):
    """F17: a loop that only loads has no effect, and goes."""
    word = flag.to(tl.pointer_type(tl.int64))
    while tl.load(word) != expected:
        pass
    tl.store(to.to(tl.pointer_type(tl.int64)), expected)


@triton.jit
def kept_wait(flag, expected, to):
    """A volatile load may stay, but each thread does its own: some may go on, some not."""
    word = flag.to(tl.pointer_type(tl.int64))
    while tl.load(word, volatile=True) != expected:
        pass
    tl.store(to.to(tl.pointer_type(tl.int64)), expected)


@triton.jit
def unused_acquire(flag, to):
    """Before Triton 3.9 nothing is left of it on NVIDIA, and no barrier on AMD: see `acquired`."""
    word = flag.to(tl.pointer_type(tl.int64))
    tl.atomic_add(word, 0, sem="acquire", scope="sys")
    lane = tl.arange(0, 256).to(tl.int64)
    data = (to + lane * 8).to(tl.pointer_type(tl.int64))
    tl.store(data, tl.load(data) + 1)


@triton.jit
def narrow_row(base, row, stride, to):
    """F11: products of 32 bits, widened when they have wrapped; of a number, then of several."""
    offset = row.to(tl.int32) * stride.to(tl.int32)
    rows = tl.arange(0, 256) * stride.to(tl.int32)
    place = (base + offset.to(tl.int64) + rows.to(tl.int64)).to(tl.pointer_type(tl.int64))
    tl.store(to.to(tl.pointer_type(tl.int64)) + tl.arange(0, 256), tl.load(place))


@triton.jit
def fused_sum(values, to):
    """One rounding instead of two."""
    value = tl.load(values.to(tl.pointer_type(tl.float32)))
    tl.store(to.to(tl.pointer_type(tl.float32)), tl.fma(value, value, value))
