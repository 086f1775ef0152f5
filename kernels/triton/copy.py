"""Copying rows: all threads of a block, 16 bytes each where addresses allow, every byte once.

Example: 5,000 bytes to an address 8 past a multiple of 16, from one likewise, TILE_BYTES 4096: 8
bytes lead up to the first multiple of 16; of the 4,992 after it one tile takes 4,096 and the next
896 by vectors of 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy_few(to, source, num_bytes):
    """Less than 16 bytes."""
    lane = tl.arange(0, 16)
    here = lane < num_bytes
    value = tl.load(source.to(tl.pointer_type(tl.int8)) + lane, mask=here)
    tl.store(to.to(tl.pointer_type(tl.int8)) + lane, value, mask=here)


@triton.jit
def _copy_units(to, source, num_bytes, UNIT: tl.constexpr, TILE_BYTES: tl.constexpr):
    """`to` and `source` are equal modulo UNIT: 16, 4 or 1 bytes."""
    if UNIT == 1:
        lane = tl.arange(0, TILE_BYTES // 16)
        for first in range(0, num_bytes, TILE_BYTES // 16):
            here = first + lane < num_bytes
            value = tl.load(source.to(tl.pointer_type(tl.int8)) + first + lane, mask=here)
            tl.store(to.to(tl.pointer_type(tl.int8)) + first + lane, value, mask=here)
    else:
        head = tl.minimum((0 - to) & (UNIT - 1), num_bytes)
        units = (num_bytes - head) // UNIT
        tail = head + units * UNIT
        if head > 0:
            _copy_few(to, source, head)
        if tail < num_bytes:
            _copy_few(to + tail, source + tail, num_bytes - tail)
        num_words = units * (UNIT // 4)
        words_to = tl.multiple_of((to + head).to(tl.pointer_type(tl.int32)), UNIT)
        words_from = tl.multiple_of((source + head).to(tl.pointer_type(tl.int32)), UNIT)
        TILE: tl.constexpr = TILE_BYTES // 4 if UNIT == 16 else TILE_BYTES // 16  # words
        lane = tl.arange(0, TILE)
        for first in range(0, num_words, TILE):
            here = first + lane < num_words
            value = tl.load(words_from + first + lane, mask=here)
            tl.store(words_to + first + lane, value, mask=here)


@triton.jit
def copy_vectors(to, source, num_bytes, TILE_BYTES: tl.constexpr):
    """One run of bytes; all three are multiples of 16."""
    words_to = tl.multiple_of(to.to(tl.pointer_type(tl.int32)), 16)
    words_from = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    num_words = num_bytes // 16 * 4
    lane = tl.arange(0, TILE_BYTES // 4)
    for first in range(0, num_words, TILE_BYTES // 4):
        here = first + lane < num_words
        value = tl.load(words_from + first + lane, mask=here)
        tl.store(words_to + first + lane, value, mask=here)


@triton.jit
def copy_bytes(to, source, num_bytes, TILE_BYTES: tl.constexpr):
    """One run of bytes; `to` and `source` are addresses, which may be null for no bytes."""
    skew = to - source
    if (skew & 15) == 0:
        _copy_units(to, source, num_bytes, 16, TILE_BYTES)
    elif (skew & 3) == 0:
        _copy_units(to, source, num_bytes, 4, TILE_BYTES)
    else:
        _copy_units(to, source, num_bytes, 1, TILE_BYTES)


@triton.jit
def _copy_row_units(to, source, here, num_bytes, UNIT: tl.constexpr):
    """Addresses and num_bytes are multiples of UNIT: 16 or 1 bytes.

    A tile is so wide that a warp covers a row of it: a thread holds the addresses of one row, and
    has four vectors, or bytes, on their way.
    """
    COLUMNS: tl.constexpr = 128 if UNIT == 16 else 32  # words; or bytes
    if UNIT == 16:
        to_rows = tl.multiple_of(to.to(tl.pointer_type(tl.int32)), [16])[:, None]
        from_rows = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), [16])[:, None]
        size = num_bytes // 16 * 4
    else:
        to_rows = to.to(tl.pointer_type(tl.int8))[:, None]
        from_rows = source.to(tl.pointer_type(tl.int8))[:, None]
        size = num_bytes
    lane = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, size, 4 * COLUMNS):
        a = first + lane
        b = first + COLUMNS + lane
        c = first + 2 * COLUMNS + lane
        d = first + 3 * COLUMNS + lane
        value_a = tl.load(from_rows + a, mask=here[:, None] & (a < size))
        value_b = tl.load(from_rows + b, mask=here[:, None] & (b < size))
        value_c = tl.load(from_rows + c, mask=here[:, None] & (c < size))
        value_d = tl.load(from_rows + d, mask=here[:, None] & (d < size))
        tl.store(to_rows + a, value_a, mask=here[:, None] & (a < size))
        tl.store(to_rows + b, value_b, mask=here[:, None] & (b < size))
        tl.store(to_rows + c, value_c, mask=here[:, None] & (c < size))
        tl.store(to_rows + d, value_d, mask=here[:, None] & (d < size))


@triton.jit
def copy_rows(to, source, here, num_bytes, alignment):
    """Some rows at once, of num_bytes each, from anywhere to anywhere.

    to, source: [ROWS] addresses. here: [ROWS], false: not this row. alignment: a number whose low
    four bits are 0 only where those of all addresses are: say, bases and strides of both, or'ed.
    """
    if ((alignment | num_bytes) & 15) == 0:
        _copy_row_units(to, source, here, num_bytes, 16)
    else:
        _copy_row_units(to, source, here, num_bytes, 1)
