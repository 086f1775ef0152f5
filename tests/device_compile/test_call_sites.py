"""Where each kernel synchronises and moves rows, found in its assembly and counted.

test_primitives.py says that an operation is what the protocol takes it for; here, that each is
where the protocol wants it, and nowhere else. A body that changes must change these lists, after
somebody has looked why. Names are "caller < its caller".
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device_compile.call_sites import CallSites, added, call_sites, differences
from tests.device_compile.toolchain import (
    COMBINE,
    CUDA_ARCHES,
    DISPATCH,
    EXCHANGE,
    HIP_ARCHES,
    Edit,
    copy_sources,
    kernels_from,
    kernels_of,
)

# In every kernel.
PICKING: CallSites = {
    "load_relaxed": {
        "look_at < look": 1,  # the ticket of a queue
        # The five waits of can_run (gate; pack flags of a put; a receive; its links; land and
        # take), to look, and once more before giving up. Most polls find nothing.
        "seen_at < seen": 10,
        "peek < check": 5,  # what was found instead, for the error record
        "claims_of < progress_of_all": 1,  # near a deadline: does any rank get on?
        "epoch_of_call < MappedTransport": 1,  # a captured graph does not know its call's number
    },
    "load_acquire": {
        "seen_at < seen": 10,  # what a poll has found
        "exhausted < can_run": 2,  # reduce: whoever claimed what lands has seen the flags
        "aborted < choose": 1,  # told to leave?
        "aborted < leave": 1,
        "raise_abort_from < raise_abort": 1,  # which origin was first
    },
    "compare_and_swap": {
        "look_at < look": 1,  # passes an item without rows
        "claim < choose": 1,  # claims the item: releases and acquires, see exhausted()
        "abort_call < give_up": 1,  # one record per rank
        "raise_abort_from < raise_abort": 2,  # the home word, then all others
    },
    "fetch_add": {
        "leave < run_items": 1,  # the last block out has seen what all others did
        "trace_item < run_items": 1,
    },
    "store_relaxed": {
        "leave < run_items": 2,  # tickets and the count of blocks, for the next call
    },
    "store_release": {
        "signal < post_start_flags": 1,  # ready, credit: this rank's buffers are free
        "signal < give_credit": 1,  # the next sender may start
        "signal < put": 1,  # arrive: the rows are behind the put's barrier
        "signal < signal_after_writes": 1,  # pack, push, sum: behind its barrier
        "abort_call < give_up": 1,  # the record is whole
        "leave < run_items": 1,  # the epoch: the next call may start
    },
    "barrier": {
        "begin < run_items": 1,  # how many items to look at, to all lanes
        "run_items < exchange_block": 1,  # what the lanes have seen, to lane 0
        "broadcast < run_items": 1,  # the item, and what lane 0 has seen, to all lanes
    },
    "pause": {"wait_a_little < choose": 1},
}
# Of a rank's item, whose caller is what differs.
MOVING: dict[str, CallSites] = {
    "fastkern_exchange": {
        "store_release": {"signal < signal_destinations": 1},  # land, behind its barrier
        "barrier": {
            "put < run_put": 1,
            "signal_after_writes < move_rows": 1,
            "signal_destinations < move_rows": 1,
        },
        "copy": {"put < run_put": 1, "move_rows < run": 1},
    },
    "fastkern_dispatch": {
        "store_release": {"signal < signal_all": 1},  # land, to every rank
        "barrier": {
            "put < run_put": 1,
            "signal_after_writes < dispatch_rows": 1,
            "signal_all < dispatch_rows": 1,
        },
        "copy": {"put < run_put": 1},
        "team_copy": {"move_row < move_run": 1},  # a team for each row
        "fetch_add": {"tell_arrivals < tell_all_arrivals": 1},  # partial rows given out
    },
    "fastkern_combine_float64": {
        "store_release": {"signal < signal_destinations": 1},
        "barrier": {
            "put < run_put": 1,
            "signal_after_writes < combine_sums": 1,
            "signal_destinations < return_rows": 1,
        },
        "copy": {"put < run_put": 1, "return_rows < combine_rows": 1},
    },
}
MOVING["fastkern_combine"] = MOVING["fastkern_combine_float64"] | {
    # Four sums of a lane at once: floats, and halves.
    "load16": {"load < sum_values": 1},
    "load8": {"load < sum_values": 1},
    "store16": {"store < sum_values": 1},
    "store8": {"store < sum_values": 1},
}
# CUDA: records are copied to shared memory, and what follows from them is kept there, between two
# barriers.
KEEPING: dict[str, CallSites] = {
    "fastkern_exchange": {"barrier": {"share < run_launch": 1, "keep < keep_views": 4}},
    "fastkern_dispatch": {
        "barrier": {"share < run_launch": 1, "share < exchange_block": 1, "keep < keep_views": 5}
    },
}
KEEPING["fastkern_combine"] = KEEPING["fastkern_dispatch"]
KEEPING["fastkern_combine_float64"] = KEEPING["fastkern_dispatch"]
# What line tables do not tell apart: CUDA's two calls of a function in a row; HIP's merged code.
MERGED = {
    "cuda": {("store_relaxed", "leave < run_items"): 1},
    "hip": {("load_relaxed", "peek < check"): 2},
}


def expected(kernel: str, device: str) -> CallSites:
    sites = added(PICKING, MOVING[kernel])
    if device == "cuda":
        sites = added(sites, KEEPING[kernel])
    else:  # before each barrier behind which a flag is raised: each wave for itself
        raising = MOVING[kernel]["barrier"]
        sites = added(sites, {"drain": raising})
    for (operation, name), count in MERGED[device].items():
        sites[operation][name] = count
    return sites


@pytest.mark.parametrize("entry", [EXCHANGE, DISPATCH, COMBINE], ids=lambda e: Path(e).name)
@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *HIP_ARCHES])
def test_call_sites(arch: str, entry: str) -> None:
    device = "cuda" if arch in CUDA_ARCHES else "hip"
    for name, kernel in kernels_of(entry, arch).items():
        assert differences(call_sites(kernel), expected(name, device)) == [], name


BODY = "kernels/body"
# What is done to the sources, and what must be found then.
EDITS = [
    (
        Edit("kernels/transport/mapped.h", r"target_\.store_release", "target_.store_relaxed"),
        [f"store_release < signal < {name}: 0, not 1" for name in ("put", "give_credit")],
    ),
    (
        Edit("kernels/transport/mapped.h", r"target\.load_relaxed\(flag\) >= stamp && ", ""),
        ["load_relaxed < seen_at < seen: 0, not 10"],
    ),
    (
        Edit(f"{BODY}/exchange.h", r"\.look\(\);\n        target\.barrier\(\);", ".look();"),
        ["barrier < run_items < exchange_block: 0, not 1"],
    ),
    (
        Edit(f"{BODY}/move_rows.h", r"(u64 sent_rows = 0;)", r"\1 call.target.barrier();"),
        ["barrier < move_rows < run: 1, not 0"],
    ),
    (
        Edit(
            f"{BODY}/items.h",
            r"call\.(transport\.signal\(rank, slot, 1, tier, bytes\);)",
            r"call.\1 call.target.store_release(&call.control().beats, 1);",
        ),
        ["store_release < signal_after_writes < move_rows: 1, not 0"],
    ),
]


@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_other_call_sites_are_found(device: str, tmp_path: Path) -> None:
    root = copy_sources(tmp_path, [edit for edit, _ in EDITS])
    kernels = kernels_from(EXCHANGE, "sm_90" if device == "cuda" else "gfx942", root)
    sites = call_sites(kernels["fastkern_exchange"])
    found = differences(sites, expected("fastkern_exchange", device))
    for _, lines in EDITS:
        assert set(lines) <= set(found)


def test_a_lost_drain_is_found(tmp_path: Path) -> None:
    edit = Edit(f"{BODY}/dispatch.h", r"    target\.drain\(\);\n", "")
    kernels = kernels_from(DISPATCH, "gfx942", copy_sources(tmp_path, [edit]))
    sites = call_sites(kernels["fastkern_dispatch"])
    found = differences(sites, expected("fastkern_dispatch", "hip"))
    assert found == ["drain < signal_all < dispatch_rows: 0, not 1"]
