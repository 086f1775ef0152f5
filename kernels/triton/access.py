"""Reading and writing memory that is given by addresses: everything else is built on these.

Addresses are int64, scalars or tensors; so are all values, of whatever width in memory: a product
of a row and a stride never wraps (F11: stride 2^30, rows 0 to 3: 0, 2^30, 2^31, 3 * 2^30).

Two kinds of memory:
  - what nobody writes while the kernel runs (tables, arguments, a handle's lists), or what a flag
    vouches for: `get`, plain loads.
  - words that others write meanwhile: `peek`, `acquire`, `claim`, `add_word`. All of them are
    atomics, because Triton's scalars must be equal on all threads of a block: of an atomic one
    thread reads and the others get what it has read, while a plain load is done by each thread for
    itself. It also keeps a wait a wait: compilers remove a loop around a plain load (F17).

Order: a flag's writer calls `signal`: all threads' stores, drained, a block barrier, one release at
system scope. Its reader calls `peek` until the value is there, then `acquire`, whose result goes
from one thread to all behind a block barrier; then all threads read what the flag vouches for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout as at
from .target import acquired, drain

_WIDTH_BITS = tl.constexpr(at.WIDTH_BITS)
_WIDTHS = tl.constexpr((1 << at.WIDTH_BITS) - 1)


@triton.jit
def load32(address, mask=None):
    """A u32 as int64; 0 where the mask is false."""
    if mask is None:
        return tl.load(address.to(tl.pointer_type(tl.uint32))).to(tl.int64)
    else:
        return tl.load(address.to(tl.pointer_type(tl.uint32)), mask=mask, other=0).to(tl.int64)


@triton.jit
def load64(address, mask=None):
    """A u64 as int64; 0 where the mask is false."""
    if mask is None:
        return tl.load(address.to(tl.pointer_type(tl.int64)))
    else:
        return tl.load(address.to(tl.pointer_type(tl.int64)), mask=mask, other=0)


@triton.jit
def store32(address, value, mask=None):
    """The low 32 bits."""
    tl.store(address.to(tl.pointer_type(tl.uint32)), value.to(tl.uint32), mask=mask)


@triton.jit
def store64(address, value, mask=None):
    tl.store(address.to(tl.pointer_type(tl.int64)), value, mask=mask)


@triton.jit
def place(record, FIELD: tl.constexpr):
    """Where a field of a record lies. FIELD: a constant of layout.py."""
    return record + (FIELD >> _WIDTH_BITS)


@triton.jit
def get(record, FIELD: tl.constexpr, mask=None):
    """A field of a record, or of a tensor of records; 0 where the mask is false."""
    WIDTH: tl.constexpr = FIELD & _WIDTHS
    tl.static_assert(WIDTH == 4 or WIDTH == 8)
    if WIDTH == 4:
        return load32(place(record, FIELD), mask)
    else:
        return load64(place(record, FIELD), mask)


@triton.jit
def put(record, FIELD: tl.constexpr, value):
    """Set a field of one record."""
    WIDTH: tl.constexpr = FIELD & _WIDTHS
    tl.static_assert(WIDTH == 4 or WIDTH == 8)
    if WIDTH == 4:
        store32(place(record, FIELD), value)
    else:
        store64(place(record, FIELD), value)


@triton.jit
def peek(address, mask=None):
    """Words that others may be writing, as they are now; equal on all threads."""
    pointer = address.to(tl.pointer_type(tl.int64))
    return tl.atomic_add(pointer, address * 0, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def acquire(address, mask=None):
    """As `peek`, and what was written before they were released is visible to the block."""
    pointer = address.to(tl.pointer_type(tl.int64))
    seen = tl.atomic_add(pointer, address * 0, mask=mask, sem="acquire", scope="sys")
    value = acquired(seen)
    tl.debug_barrier()
    return value


@triton.jit
def add_word(address, value, mask=None):
    """Add to words; returns what they were."""
    pointer = address.to(tl.pointer_type(tl.int64))
    return tl.atomic_add(pointer, address * 0 + value, mask=mask, sem="acq_rel", scope="sys")


@triton.jit
def swap_if(address, expected, desired):
    """Compare and swap words of this device; returns what the words were.

    With Triton 3.6 on HIP a scalar's scope is the device; and of a tensor smaller than the block
    each element is swapped by several threads, so that results may say what the first one stored.
    """
    pointer = address.to(tl.pointer_type(tl.int64))
    zero = address * 0
    return tl.atomic_cas(pointer, zero + expected, zero + desired, sem="acq_rel", scope="sys")


@triton.jit
def swap_far(address, expected, desired):
    """Compare and swap a word of any rank that never becomes `expected` again."""
    swap_if(address + tl.arange(0, 1).to(tl.int64), expected, desired)


@triton.jit
def finish_writes():
    """Before a signal: what the block has written is behind the barrier."""
    drain()
    tl.debug_barrier()
