"""A handle's memory, seen by Triton: the addresses of its arrays, from its header's numbers.

kernels/body/handle.h defines the layout and says what each array holds; this is its
`handle_layout`, and a test holds the two equal. The header is complete before a kernel starts.

Example: 2 ranks in 1 server, 1 own expert, 3 rows packed, top-k 2. The header has 168 bytes, then
    to_server at 168 (2 x 1 x 8), to_rank at 184 (2 x 2 x 8), tokens_per_expert at 216 (1 x 8),
    pack_list at 224 (3 x 4), entries at 236 (3 x 2 x 12), token_map at 308, ...
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout as at
from .access import get


class Handle(NamedTuple):
    """Byte addresses, int64. Shapes are in kernels/body/handle.h."""

    header: tl.tensor
    to_server: tl.tensor
    to_rank: tl.tensor
    tokens_per_expert: tl.tensor
    pack_list: tl.tensor
    entries: tl.tensor
    token_map: tl.tensor
    window_slots: tl.tensor
    touched: tl.tensor
    arrivals: tl.tensor


@triton.jit
def view_handle(block):
    """The arrays of the handle at this address."""
    ranks = get(block, at.HANDLE_NUM_RANKS)
    servers = get(block, at.HANDLE_SERVERS)
    gpus_per_server = get(block, at.HANDLE_GPUS_PER_SERVER)
    topk = get(block, at.HANDLE_TOPK)
    pack_rows = get(block, at.HANDLE_PACK_ROWS)
    to_server = block + at.SIZEOF_HANDLE
    to_rank = to_server + ranks * servers * 8
    tokens_per_expert = to_rank + ranks * ranks * 8
    pack_list = tokens_per_expert + get(block, at.HANDLE_NUM_OWN_EXPERTS) * 8
    entries = pack_list + pack_rows * 4
    token_map = entries + pack_rows * topk * at.SIZEOF_ENTRY
    per_token = (servers + gpus_per_server) * 4
    window_slots = token_map + get(block, at.HANDLE_NUM_TOKENS) * per_token
    touched = window_slots + get(block, at.HANDLE_WINDOW_ROWS) * topk * 4
    arrivals = touched + get(block, at.HANDLE_RECEIVE_ROWS) * gpus_per_server * 4
    return Handle(
        block,
        to_server,
        to_rank,
        tokens_per_expert,
        pack_list,
        entries,
        token_map,
        window_slots,
        touched,
        arrivals,
    )
