"""Values of expert outputs and sums: reading and rounding as kernels/body/number.h, bit for bit.

16-bit values are read and rounded by operations on integers, so that every target, the interpreter
too, rounds alike: to the nearest, ties to even; a NaN stays one, and comes out as 0x7fc0 (bfloat16)
or with its sign as 0x7e00 (float16). Sums are float32, or float64 where SUM64 says so: then so are
all values.

Example: 257 as bfloat16 lies between 0x4380 (256) and 0x4381 (258), and goes to 256, the even one.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ValueKind in kernels/body/number.h.
FLOAT64 = tl.constexpr(0)
FLOAT32 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)


@triton.jit
def value_bytes(kind):
    """Of one value; kind: a scalar, int64."""
    return tl.where(kind == FLOAT64, 8, tl.where(kind == FLOAT32, 4, 2)).to(tl.int64)


@triton.jit
def float_of_bfloat16(half):
    """half: uint32, below 2^16."""
    return (half << 16).to(tl.float32, bitcast=True)


@triton.jit
def float_of_float16(half):
    """half: uint32, below 2^16."""
    sign = (half & 0x8000) << 16
    exponent = (half >> 10) & 0x1F
    fraction = half & 0x3FF
    # Zero or subnormal: fraction * 2^-24, exact.
    small = (fraction.to(tl.float32) * 5.9604644775390625e-8).to(tl.uint32, bitcast=True)
    bits = ((exponent + 112) << 23) | (fraction << 13)
    bits = tl.where(exponent == 0, small, bits)
    bits = tl.where(exponent == 0x1F, (fraction << 13) | 0x7F800000, bits)
    return (sign | bits).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_of_float(value):
    """uint32, below 2^16."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def float16_of_float(value):
    """uint32, below 2^16."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits of the sum.
    small = magnitude.to(tl.float32, bitcast=True) + 0.5
    half = small.to(tl.uint32, bitcast=True) - 0x3F000000
    rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1)
    half = tl.where(magnitude >= 0x38800000, (rounded - 0x38000000) >> 13, half)  # from 2^-14
    half = tl.where(magnitude >= 0x477FF000, 0x7C00, half)  # 65520 and more round to infinity
    half = tl.where(magnitude > 0x7F800000, 0x7E00, half)
    return ((bits >> 16) & 0x8000) | half


@triton.jit
def negative_zeros(COLUMNS: tl.constexpr, SUM64: tl.constexpr):
    """Sums of nothing yet: -0, which changes no term that it is added to. By its bits: Triton 3.6
    takes the constant -0.0 for 0."""
    if SUM64:
        bits = tl.full([COLUMNS], 1, tl.uint64) << 63
        return bits.to(tl.float64, bitcast=True)
    else:
        bits = tl.full([COLUMNS], 1, tl.uint32) << 31
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _pointers(address, column, TYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGNMENT) + column


@triton.jit
def load_values(address, kind, column, here, WIDE: tl.constexpr, SUM64: tl.constexpr):
    """Values `column` of a row, as sums; any where `here` is false.

    WIDE: rows begin at a multiple of 16 bytes, those of 2-byte values at one of 8, so that each
    thread reads four (of float64 two) at once.
    """
    if SUM64:
        return tl.load(_pointers(address, column, tl.float64, 16 if WIDE else 8), mask=here)
    else:
        if kind == FLOAT32:
            values = tl.load(_pointers(address, column, tl.float32, 16 if WIDE else 4), mask=here)
        else:
            pointers = _pointers(address, column, tl.uint16, 8 if WIDE else 2)
            halves = tl.load(pointers, mask=here).to(tl.uint32)
            values = float_of_bfloat16(halves) if kind == BFLOAT16 else float_of_float16(halves)
        return values


@triton.jit
def store_values(address, kind, column, here, sums, WIDE: tl.constexpr, SUM64: tl.constexpr):
    """Round sums and write them; see `load_values`."""
    if SUM64:
        tl.store(_pointers(address, column, tl.float64, 16 if WIDE else 8), sums, mask=here)
    else:
        if kind == FLOAT32:
            tl.store(_pointers(address, column, tl.float32, 16 if WIDE else 4), sums, mask=here)
        else:
            halves = bfloat16_of_float(sums) if kind == BFLOAT16 else float16_of_float(sums)
            pointers = _pointers(address, column, tl.uint16, 8 if WIDE else 2)
            tl.store(pointers, halves.to(tl.uint16), mask=here)
