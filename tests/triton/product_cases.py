"""Products of rows and strides past 32 bits, in kernels that are interpreted."""

from __future__ import annotations

import mmap
import tempfile
from typing import Any

import numpy as np
import triton
import triton.language as tl

from fastkern.kernels.triton import layout as at
from fastkern.kernels.triton.access import get, load64
from fastkern.kernels.triton.copy import copy_bytes, copy_rows

ROW_BYTES = 32
# Strides with the rows that are 32 bits apart from one another; the products are 0, 2^30, 2^31 and
# 3 * 2^30, and around 2^31.
CASES = ((1 << 30, (0, 1, 2, 3)), (2048, ((1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 21) - 1)))


@triton.jit
def read_fields(base, record, out):
    """out[k] = the word at row k of 4, whose number and stride are read from records, as u32."""
    lane = tl.arange(0, 4).to(tl.int64)
    number = get(record + lane * at.SIZEOF_ENTRY, at.ENTRY_SLOT)
    stride = get(record + lane * at.SIZEOF_ENTRY, at.ENTRY_WINDOW_ROW)
    tl.store(out.to(tl.pointer_type(tl.int64)) + lane, load64(base + number * stride))


@triton.jit
def move(base, record, out, row_bytes: tl.constexpr):
    """Rows there and back: gathered by copy_rows, one more by copy_bytes."""
    lane = tl.arange(0, 4).to(tl.int64)
    number = get(record + lane * at.SIZEOF_ENTRY, at.ENTRY_SLOT)
    stride = get(record + lane * at.SIZEOF_ENTRY, at.ENTRY_WINDOW_ROW)
    copy_rows(out + lane * row_bytes, base + number * stride, lane < 4, row_bytes, base)
    copy_rows(base + number * stride + row_bytes, out + lane * row_bytes, lane < 3, row_bytes, base)
    last = get(record + 3 * at.SIZEOF_ENTRY, at.ENTRY_SLOT)
    copy_bytes(
        base + last * get(record, at.ENTRY_WINDOW_ROW) + row_bytes,
        out + 3 * row_bytes,
        row_bytes,
        256,
    )


def run(case: int) -> tuple[list[int], list[int], bool]:
    """What was read at each product, what is right, and whether rows were moved there and back."""
    stride, numbers = CASES[case]
    with tempfile.TemporaryFile() as file:  # of holes: only what is written takes memory
        file.truncate(1 << 32)
        pages = mmap.mmap(file.fileno(), 1 << 32)
    memory = np.frombuffer(pages, dtype=np.uint8)
    rng = np.random.default_rng(case)
    rows = rng.integers(0, 255, (4, ROW_BYTES), dtype=np.uint8)
    for number, row in zip(numbers, rows, strict=True):
        memory[number * stride :][:ROW_BYTES] = row
    records: Any = np.zeros((4, 3), dtype=np.uint32)
    records[:, 0], records[:, 1] = numbers, stride
    words, out = np.zeros(4, dtype=np.int64), np.zeros((4, ROW_BYTES), dtype=np.uint8)
    base = memory.ctypes.data
    read_fields[(1,)](base, records.ctypes.data, words.ctypes.data)
    move[(1,)](base, records.ctypes.data, out.ctypes.data, ROW_BYTES)
    back = [memory[n * stride + ROW_BYTES :][:ROW_BYTES] for n in numbers]
    moved = bool((out == rows).all() and (np.stack(back) == rows).all())
    right = rows.view(np.int64)[:, 0].tolist()
    return words.tolist(), right, moved


@triton.jit
def narrow(base, record, out):
    """As a kernel must not do it: the product of two 32-bit numbers."""
    lane = tl.arange(0, 4)
    row = (record + lane.to(tl.int64) * 12).to(tl.pointer_type(tl.int32))
    product = tl.load(row) * tl.load(row + 1)
    tl.store(out.to(tl.pointer_type(tl.int64)) + lane, product.to(tl.int64))


def narrow_products() -> list[int]:
    """The products of the first case in 32 bits."""
    stride, numbers = CASES[0]
    records: Any = np.zeros((4, 3), dtype=np.uint32)
    records[:, 0], records[:, 1] = numbers, stride
    out = np.zeros(4, dtype=np.int64)
    narrow[(1,)](0, records.ctypes.data, out.ctypes.data)
    return out.tolist()  # type: ignore[no-any-return]
