"""Route's tiles: choices of whole tokens, and which of them go to the same place.

A tile has POSITIONS choices, as many as a set has bits: bit p of a set says whether position p
belongs to it. Sets come from one comparison of all pairs of positions for each kind of key, and
what route asks of them is a mask and a count: how many choices of its expert come before a choice,
whether an earlier choice of its token goes to its server.

A tile of 64 would take twice the tokens at a time, but spills registers: Triton reads the choices
again for either side of a comparison, once for each pair that a thread compares.

Example: top-k 2, tokens [0, 2], [3, 2], so that positions 0 to 3 have experts 0, 2, 3, 2:
    same expert    0b0001, 0b1010, 0b0100, 0b1010
    before         0b0000, 0b0001, 0b0011, 0b0111
    tokens before  0b0000, 0b0000, 0b0011, 0b0011
Copies of its expert before position 3: size_of(0b1010 & 0b0111) = 1.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .access import load32

POSITIONS = tl.constexpr(32)  # of a tile; the largest top-k, and the bits of a set


class Choices(NamedTuple):
    """A tile's choices, tensors of [POSITIONS]. Of a choice that is not routed (none, no expert's,
    past the end) only `position` and `expert` mean something.
    """

    position: tl.tensor  # in topk_idx
    expert: tl.tensor  # what topk_idx says; -1 past the end
    routed: tl.tensor
    token: tl.tensor
    choice: tl.tensor  # of its token
    rank: tl.tensor
    server: tl.tensor
    same_expert: tl.tensor  # the set of choices that go to its expert
    same_rank: tl.tensor
    same_server: tl.tensor
    before: tl.tensor  # the set of positions before it
    tokens_before: tl.tensor  # the set of positions of tokens before its own
    first_of_rank: tl.tensor  # no earlier choice of its token goes to this rank
    first_of_server: tl.tensor  # nor to this server


@triton.jit
def _same(key, bits):
    """For each position the set of those that have its key. key: of 32 bits."""
    key = key.to(tl.uint32)
    return tl.sum(tl.where(key[:, None] == key[None, :], bits[:, None], 0), axis=0)


@triton.jit
def size_of(x):
    """How many positions a set holds."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int64)


@triton.jit
def tokens_at_once(topk):
    """The tokens of a tile; 0 choices are as 1."""
    columns = tl.maximum(topk, 1)
    return (columns * 0 + POSITIONS) // columns


@triton.jit
def read_choices(topk_idx, idx_bytes, topk, owner, num_experts, gpus_per_server, first, last):
    """The choices of tokens `first` on, before `last`, as many as a tile holds."""
    here = tl.arange(0, POSITIONS)
    columns = tl.maximum(topk, 1)
    token_here = here // columns
    begin_here = token_here * columns
    tokens = tl.minimum(tokens_at_once(topk), last - first)
    listed = here < tokens * topk
    token = first + token_here.to(tl.int64)
    position = first * topk + here.to(tl.int64)
    address = topk_idx + position * idx_bytes
    is_narrow = position * 0 + idx_bytes == 4
    narrow = tl.load(address.to(tl.pointer_type(tl.int32)), mask=listed & is_narrow, other=-1)
    wide = tl.load(address.to(tl.pointer_type(tl.int64)), mask=listed & ~is_narrow, other=-1)
    expert = tl.where(is_narrow, narrow.to(tl.int64), wide)
    routed = expert.to(tl.uint64) < num_experts.to(tl.uint64)
    rank = load32(owner + expert * 4, routed)
    server = (rank.to(tl.int32) // gpus_per_server).to(tl.int64)
    one = here * 0 + 1
    bits = tl.where(routed, one << here, 0)
    before = (one << here) - 1
    tokens_before = (one << begin_here) - 1
    same_rank = _same(rank, bits)
    same_server = _same(server, bits)
    of_token = before & ~tokens_before
    return Choices(
        position,
        expert,
        routed,
        token,
        (here - begin_here).to(tl.int64),
        rank,
        server,
        _same(expert, bits),
        same_rank,
        same_server,
        before,
        tokens_before,
        routed & ((same_rank & of_token) == 0),
        routed & ((same_server & of_token) == 0),
    )


@triton.jit
def set_of(mask):
    """The set of the positions where the mask is true."""
    here = tl.arange(0, POSITIONS)
    return tl.sum(tl.where(mask, (here * 0 + 1) << here, 0), axis=0)
