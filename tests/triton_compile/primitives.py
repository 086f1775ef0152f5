"""Each operation of kernels/triton/access.py, target.py and copy.py in a kernel of its own.

Lower-case parameters are int64, upper-case ones constants. A kernel is compiled from this file and
read, never run: what must hold in it is in primitive_checks.py.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from fastkern.kernels.triton import layout as at
from fastkern.kernels.triton.access import (
    acquire,
    add_word,
    finish_writes,
    get,
    load32,
    load64,
    peek,
    put,
    store32,
    store64,
    swap_far,
    swap_if,
)
from fastkern.kernels.triton.copy import copy_bytes, copy_rows, copy_vectors
from fastkern.kernels.triton.rounding import load_values, store_values
from fastkern.kernels.triton.target import drain, forget, lanes, now_ns, pause, store_release


@triton.jit
def _lanes(THREADS: tl.constexpr):
    return tl.arange(0, THREADS).to(tl.int64)


@triton.jit
def _copy_words(to, source, THREADS: tl.constexpr):
    """A word for each thread: none may read before the flag is there for it."""
    store64(to + _lanes(THREADS) * 8, load64(source + _lanes(THREADS) * 8))


@triton.jit
def wait(flag, expected, to, data, THREADS: tl.constexpr):
    """Until the flag is there; then what it vouches for."""
    rounds = 0
    while peek(flag) < expected:
        pause(rounds)
        rounds += 1
    acquire(flag)
    _copy_words(to, data, THREADS)


@triton.jit
def wait_for_all(flags, expected, to, data, THREADS: tl.constexpr, FLAGS: tl.constexpr):
    """Until all of some flags are there, fewer than there are threads."""
    places = flags + tl.arange(0, FLAGS).to(tl.int64) * 8
    rounds = 0
    while tl.min((peek(places) >= expected).to(tl.int64)) == 0:
        pause(rounds)
        rounds += 1
    acquire(places)
    _copy_words(to, data, THREADS)


@triton.jit
def wait_by_result(flags, expected, to, data, THREADS: tl.constexpr, FLAGS: tl.constexpr):
    """As blocks look at a queue's head: the acquires' results decide."""
    places = flags + tl.arange(0, FLAGS).to(tl.int64) * 8
    if tl.min((acquire(places) >= expected).to(tl.int64)) != 0:
        _copy_words(to, data, THREADS)


@triton.jit
def signal(flag, value, to, THREADS: tl.constexpr):
    """Data of all threads, then the flag that vouches for it."""
    store64(to + _lanes(THREADS) * 8, _lanes(THREADS))
    finish_writes()
    store_release(flag, value)


@triton.jit
def peek_one(word, to, THREADS: tl.constexpr):
    store64(to + _lanes(THREADS) * 8, _lanes(THREADS) * 0 + peek(word))


@triton.jit
def peek_some(words, to, count, THREADS: tl.constexpr, FLAGS: tl.constexpr):
    lane = tl.arange(0, FLAGS).to(tl.int64)
    store64(
        to + _lanes(THREADS) * 8, _lanes(THREADS) + tl.sum(peek(words + lane * 8, lane < count))
    )


@triton.jit
def acquire_one(word, to, THREADS: tl.constexpr):
    store64(to + _lanes(THREADS) * 8, _lanes(THREADS) * 0 + acquire(word))


@triton.jit
def add_one(word, value, to, THREADS: tl.constexpr):
    store64(to + _lanes(THREADS) * 8, _lanes(THREADS) * 0 + add_word(word, value))


@triton.jit
def add_some(words, value, to, THREADS: tl.constexpr, FLAGS: tl.constexpr):
    lane = tl.arange(0, FLAGS).to(tl.int64)
    store64(to + _lanes(THREADS) * 8, _lanes(THREADS) + tl.sum(add_word(words + lane * 8, value)))


@triton.jit
def swap_one(word, expected, desired, to, THREADS: tl.constexpr):
    old = swap_if(word, expected, desired)
    store64(to + _lanes(THREADS) * 8, _lanes(THREADS) * 0 + old)


@triton.jit
def swap_some(words, expected, desired, FLAGS: tl.constexpr):
    """Without the results, which say nothing before Triton 3.8 on AMD."""
    swap_if(words + tl.arange(0, FLAGS).to(tl.int64) * 8, expected, desired)


@triton.jit
def swap_other(word, expected, desired):
    swap_far(word, expected, desired)


@triton.jit
def load_4(word, to):
    store64(to, load32(word))


@triton.jit
def load_8(word, to):
    store64(to, load64(word))


@triton.jit
def store_4(to, value):
    store32(to, value)


@triton.jit
def store_8(to, value):
    store64(to, value)


@triton.jit
def get_4(record, to):
    store64(to, get(record, at.QUEUE_NUM_STAGES))


@triton.jit
def get_8(record, to):
    store64(to, get(record, at.QUEUE_NUM_ITEMS))


@triton.jit
def put_4(record, value):
    put(record, at.ERROR_QUEUE, value)


@triton.jit
def put_8(record, value):
    put(record, at.ERROR_EXPECTED, value)


@triton.jit
def row_of(base, rows, stride, to, THREADS: tl.constexpr):
    """F11: a row's number in 32 bits, its address in 64."""
    row = load32(rows + _lanes(THREADS) * 4)
    store64(to + _lanes(THREADS) * 8, load64(base + row * stride))


@triton.jit
def clock(to, THREADS: tl.constexpr):
    store64(to + _lanes(THREADS) * 8, _lanes(THREADS) * 0 + now_ns())


@triton.jit
def pause_once(rounds):
    pause(rounds)


@triton.jit
def drain_between(to, THREADS: tl.constexpr):
    store64(to + _lanes(THREADS) * 8, _lanes(THREADS))
    drain()
    store64(to + _lanes(THREADS) * 8, _lanes(THREADS) + 1)


@triton.jit
def forget_between(word, to, stride):
    store64(to, word * stride)
    store64(to + 8, forget(word) * stride)


@triton.jit
def lanes_twice(to, stride):
    store64(to + lanes(64) * stride, lanes(64))
    store64(to + 8 + lanes(64) * stride, lanes(64))


@triton.jit
def copy_aligned(to, source, num_bytes, TILE_BYTES: tl.constexpr):
    copy_vectors(to, source, num_bytes, TILE_BYTES)


@triton.jit
def copy_row(to, source, num_bytes, TILE_BYTES: tl.constexpr):
    copy_bytes(to, source, num_bytes, TILE_BYTES)


@triton.jit
def copy_some_rows(to, source, num_rows, num_bytes):
    row = tl.arange(0, 8).to(tl.int64)
    bases = to | source
    copy_rows(to + row * num_bytes, source + row * num_bytes, row < num_rows, num_bytes, bases)


@triton.jit
def sum_values(to, source, kind, width, TILE_BYTES: tl.constexpr):
    column = tl.arange(0, TILE_BYTES // 4)
    here = column < width // 4 * 4
    values = load_values(source, kind, column, here, True, False)
    store_values(to, kind, column, here, values + values, True, False)


@triton.jit
def sum_products(values, weights, to, THREADS: tl.constexpr):
    """As combine adds weighted rows, in float and in double."""
    place = _lanes(THREADS) * 4
    value = tl.load((values + place).to(tl.pointer_type(tl.float32)))
    weight = tl.load((weights + place).to(tl.pointer_type(tl.float32)))
    total = value + value * weight
    tl.store((to + place).to(tl.pointer_type(tl.float32)), total)
    wide = total.to(tl.float64) * weight.to(tl.float64) + value.to(tl.float64)
    tl.store((to + place * 4).to(tl.pointer_type(tl.float64)), wide)
