"""Small kernels in Triton that stand for the real ones: what compiling and loading is tested with.

Which of Triton's faces they have (compiled, interpreted) is decided when this is imported.
"""

# ruff: noqa: N803 - constants are in capitals
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl

from fastkern.kernels.triton import entry


@triton.jit
def fastkern_exchange(ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr):
    """A word for each program at `ranks`; and enough of a sum to need shared memory."""
    program = tl.program_id(0)
    tile = tl.arange(0, TILE_BYTES).to(tl.int64)
    total = tl.sum(tile * (num_ranks + program))
    address = (ranks + 8 * program).to(tl.int64)
    tl.store(address.to(tl.pointer_type(tl.int64)), total + blocks_per_rank)


def expected(grid: int, num_ranks: int, blocks_per_rank: int, tile_bytes: int) -> list[int]:
    """The words that fastkern_exchange writes."""
    total = tile_bytes * (tile_bytes - 1) // 2
    return [total * (num_ranks + program) + blocks_per_rank for program in range(grid)]


@triton.jit
def another_name(ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr):
    pass


def another_order() -> Any:
    """Its parameters are not the record's."""

    @triton.jit
    def fastkern_exchange(num_ranks, ranks, blocks_per_rank, TILE_BYTES: tl.constexpr):
        pass

    return fastkern_exchange


def does_not_compile() -> Any:
    """A name that is nowhere."""

    @triton.jit
    def fastkern_exchange(ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr):
        tl.store(ranks, nowhere)  # noqa: F821

    return fastkern_exchange


def much_shared() -> Any:
    """64 KiB in shared memory, or more: threads read what others wrote."""

    @triton.jit
    def fastkern_exchange(ranks, num_ranks, blocks_per_rank, TILE_BYTES: tl.constexpr):
        base = ranks.to(tl.pointer_type(tl.int64))
        i, k = tl.arange(0, 128), tl.arange(0, 128)
        block = tl.load(base + (i[:, None] * 128 + k[None, :]))
        tl.store(base + (i[:, None] * 128 + k[None, :]), tl.gather(block, block.to(tl.int32), 0))

    return fastkern_exchange


def use(monkeypatch: pytest.MonkeyPatch, kernel: Any = None) -> None:
    """Let entry "exchange" be a kernel of this file."""
    found = fastkern_exchange if kernel is None else kernel
    monkeypatch.setattr(entry, "kernel_of", lambda name, between_servers=False: found)
