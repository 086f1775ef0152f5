"""The transports: what the constexpr TRANSPORT of a kernel says, by number (see entry.py).

    PEER        one server: mapped stores (call.py)
    NVSHMEM     between servers NVSHMEM (wire_nvshmem.py), inside one mapped stores
    NCCL_GIN    likewise, with NCCL's device API (wire_gin.py)
    SHARED      for tests: with memory that all processes of this host map (wire_shared.py)

What a function is given of it is the length of a tuple: Triton makes a tensor of every number that
a variable or a field holds, and then compiles both ways of an `if`; lengths stay what they are.
So call.wire is a tuple of nothing, as long as the number: `len(call.wire) == NVSHMEM`.
"""

from __future__ import annotations

import triton.language as tl

from .entry import TRANSPORTS

PEER = tl.constexpr(TRANSPORTS["peer"])
NVSHMEM = tl.constexpr(TRANSPORTS["nvshmem"])
NCCL_GIN = tl.constexpr(TRANSPORTS["nccl_gin"])
SHARED = tl.constexpr(TRANSPORTS["shared"])
