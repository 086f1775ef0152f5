"""Launches of the route kernels: how many blocks, and their arguments.

Per rank: count, a unit for each run of tokens; scan, for each key; fill, as count, once the counts
of all ranks are known. In C++ a lane does a unit or a key by itself. In Triton a block does a unit,
or KEYS_PER_PROGRAM keys: 4096 tokens are 512 units of 8 tokens in C++, 8 blocks of 64 lanes, and
256 units of 16 tokens in Triton, 256 blocks.
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

# By driver.Driver.kernels: tokens of a unit where there are not too many units, and their most.
TOKENS_PER_UNIT = {"cxx": 8, "triton": 16}
_MOST_UNITS = {"cxx": 1024, "triton": 512}


def num_units(num_tokens: int, kernels: str) -> int:
    """Runs that so many tokens are counted in. kernels: which, see driver.Driver."""
    return min(max(1, -(-num_tokens // TOKENS_PER_UNIT[kernels])), _MOST_UNITS[kernels])


def num_keys(placement: Placement, topology: Topology) -> int:
    """Counts of a rank: of experts, servers and ranks."""
    return placement.num_experts + topology.servers + topology.num_ranks


def route_record(
    call: DispatchCall,
    placement: Placement,
    topology: Topology,
    rank: int,
    units: int,
    **addresses: int,
) -> Any:
    """RouteArgs of a rank's tokens.

    units: as `num_units` has it. addresses: of topk_idx, owner, local_index, counts, totals, bad.
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
        num_units=units,
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
    """Start a kernel of route for so many units, or keys."""
    lanes = kernels.lanes_of(kernel, 0)
    per_block = lanes
    if driver.kernels == "triton":
        per_block = _keys_per_program() if kernel == "fastkern_route_scan" else 1
    function = kernels.get(kernel, lanes)
    driver.launch(function, -(-num_items // per_block), lanes, stream, args.tobytes())


def _keys_per_program() -> int:
    """Of the scan in Triton."""
    from ..kernels.triton.route import KEYS_PER_PROGRAM

    return int(KEYS_PER_PROGRAM)
