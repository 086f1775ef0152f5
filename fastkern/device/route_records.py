"""Launches of the route kernels: how many lanes, and their arguments.

Per rank: count, with a lane for each run of tokens; scan, with one for each key; fill, as count,
once the counts of all ranks are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..moe.counts import FirstRows
from ..moe.dispatch_arguments import DispatchCall
from ..moe.placement import Placement
from ..planner import Topology
from .driver import Driver
from .records import ROUTE_ARGS, new_record
from .virtual_kernels import Kernels

TOKENS_PER_UNIT = 8
_MOST_UNITS = 1024
_LANES = 64  # a lane does a unit or a key by itself: blocks on many processors, not large ones


def num_units(num_tokens: int) -> int:
    """Runs that so many tokens are counted in."""
    return min(max(1, -(-num_tokens // TOKENS_PER_UNIT)), _MOST_UNITS)


def num_keys(placement: Placement, topology: Topology) -> int:
    """Counts of a rank: of experts, servers and ranks."""
    return placement.num_experts + topology.servers + topology.num_ranks


def route_record(
    call: DispatchCall, placement: Placement, topology: Topology, rank: int, **addresses: int
) -> Any:
    """RouteArgs of a rank's tokens.

    addresses: of topk_idx, owner, local_index, counts, totals and bad.
    """
    assert call.topk_idx is not None
    return new_record(
        ROUTE_ARGS,
        num_tokens=call.num_tokens,
        idx_bytes=call.topk_idx.element_size(),
        topk=call.topk,
        num_experts=placement.num_experts,
        num_ranks=topology.num_ranks,
        servers=topology.servers,
        gpus_per_server=topology.gpus_per_server,
        rank=rank,
        num_units=num_units(call.num_tokens),
        **addresses,
    )


def base_rows(first: FirstRows) -> Sequence[tuple[str, npt.NDArray[np.uint64]]]:
    """The arrays that a fill starts from, by the names of RouteArgs."""
    arrays = (
        ("slot_base", first.slot),
        ("window_base", first.window),
        ("list_base", first.pack_list),
        ("return_base", first.returned),
        ("partial_base", first.partial),
    )
    return [(name, np.ascontiguousarray(rows, dtype=np.uint64)) for name, rows in arrays]


def launch_route(
    driver: Driver, kernels: Kernels, kernel: str, args: Any, num_items: int, stream: int
) -> None:
    """Start a kernel of route with a lane for each item."""
    lanes = min(_LANES, driver.properties().most_lanes)
    function = kernels.get(kernel, lanes)
    driver.launch(function, -(-num_items // lanes), lanes, stream, args.tobytes())
