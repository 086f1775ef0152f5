"""Reading and rounding in Triton: a kernel that does nothing else. Bodies for the interpreter."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from fastkern.kernels.triton import rounding

_TILE = 1 << 16
_KINDS = {"bfloat16": rounding.BFLOAT16.value, "float16": rounding.FLOAT16.value}


@triton.jit
def _convert(source, target, count, from_kind, to_kind, tile: tl.constexpr, wide: tl.constexpr):
    for first in range(0, count, tile):
        column = first + tl.arange(0, tile)
        here = column < count
        sums = rounding.load_values(source, from_kind, column, here, wide, False)
        rounding.store_values(target, to_kind, column, here, sums, wide, False)


def convert(name: str, direction: str, values: bytes, wide: bool) -> bytes:
    """(type, "widen" or "round", values) -> values; see tests/number_check.cc."""
    half, full = (_KINDS[name], np.uint16), (rounding.FLOAT32.value, np.float32)
    (from_kind, from_type), (to_kind, to_type) = (
        (half, full) if direction == "widen" else (full, half)
    )
    source = np.frombuffer(values, dtype=from_type)
    target = np.zeros(len(source) + 4, dtype=to_type)  # the last ones stay as they are
    addresses = source.ctypes.data, target.ctypes.data
    _convert[(1,)](*addresses, len(source), from_kind, to_kind, tile=_TILE, wide=wide)
    assert not target[len(source) :].any()
    return target[: len(source)].tobytes()


def kinds() -> dict[str, int]:
    """Numbers of the types."""
    return {
        "float64": rounding.FLOAT64.value,
        "float32": rounding.FLOAT32.value,
        "bfloat16": rounding.BFLOAT16.value,
        "float16": rounding.FLOAT16.value,
    }


@triton.jit
def _start(target, columns: tl.constexpr, sum64: tl.constexpr):
    bits = tl.uint64 if sum64 else tl.uint32
    zeros = rounding.negative_zeros(columns, sum64).to(bits, bitcast=True)
    tl.store(target.to(tl.pointer_type(bits)) + tl.arange(0, columns), zeros)


def sums_at_start() -> tuple[list[int], list[int]]:
    """What sums are before their first term, as bits."""
    floats, doubles = np.zeros(4, np.uint32), np.zeros(4, np.uint64)
    _start[(1,)](floats.ctypes.data, columns=4, sum64=False)
    _start[(1,)](doubles.ctypes.data, columns=4, sum64=True)
    return floats.tolist(), doubles.tolist()
