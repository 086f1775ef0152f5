"""The kernels of static exchanges, whose blocks wait for other ranks: call sites, and orders.

As test_call_sites.py and test_compile.py do it for those that move rows; here a row is what a rank
tells the others of its counts. Each check is also run on sources that were broken on purpose.
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tests.device_compile.call_sites import CallSites, added, call_sites, differences
from tests.device_compile.devices import DEVICES, Device
from tests.device_compile.listing import Kernel
from tests.device_compile.order_checks import entering_faults, synchronising_faults
from tests.device_compile.static_breaks import BREAKS
from tests.device_compile.toolchain import (
    CUDA_ARCHES,
    HIP_ARCHES,
    KERNELS,
    STATIC,
    copy_sources,
    kernels_of,
    start_kernels_from,
)

ENTRY = STATIC
ENTER, DIRECT, VALUES = "fastkern_static_enter", "fastkern_static_direct", "fastkern_static_values"

# Behind each of these a flag is raised, or a row copied that others have written.
RAISING = {
    "put < enter_call": 1,  # the own row to another server
    # The own row is written; a row is on all local ranks; all local flags have been acquired.
    "enter_call < enter": 3,
}
ENTERING: CallSites = {
    "load_relaxed": {
        "epoch_of_call < MappedTransport": 1,  # a captured call does not know its number
        # Another server's row, a local rank's copy of a row; and when that does not come, whether
        # the rank that would bring it has entered.
        "seen_at < seen": 4,
        "peek < await_entry": 2,  # what was found instead, for the error record
        "note_wrong_call < refuse": 1,  # how many calls were wrong
    },
    "load_acquire": {
        "seen_at < seen": 4,  # what a poll has found
        "aborted < await_entry": 2,  # told to leave?
        "aborted < enter_call": 1,  # by lane 0, for all: has any lane been?
        "raise_abort_from < raise_abort": 2,  # which origin was first
    },
    "compare_and_swap": {
        "abort_call < await_entry": 2,  # one record per rank
        "raise_abort_from < raise_abort": 4,  # the home word, then all others
        "refuse < enter": 1,  # a bad index: this call moves nothing, for one reason
    },
    "store_relaxed": {"note_wrong_call < refuse": 3},  # one more is, whose fault, and why
    "store_release": {
        "signal < put": 1,  # rail: behind the put's barrier
        "signal < enter_call": 1,  # local: behind the copies' barrier
        "abort_call < await_entry": 2,  # the record is whole
    },
    "barrier": RAISING
    | {
        "prepare_dispatch < kernel": 2,  # the call's arguments; where its rows are
        "broadcast < enter_call": 2,  # another server's row has come; has anybody been told?
        "enter < prepare_dispatch": 1,  # whether this call is refused
    },
    "pause": {"await_entry < enter_call": 2},
    "copy": {"put < enter_call": 1},
    "team_copy": {"enter_call < enter": 1},
}
OWN: dict[str, CallSites] = {
    ENTER: {"load_relaxed": {"refused < report": 1}},
    DIRECT: {
        # Whether this call is: for the experts' tokens, and for the rows.
        "load_relaxed": {"refused < bind": 2, "note_wrong_call < refuse": 2},
        "compare_and_swap": {"refuse < bind": 1},  # more rows than there is room for
        "store_relaxed": {"note_wrong_call < refuse": 6},
        "barrier": {
            "count < prepare_dispatch": 2,  # counts; places, and this rank's totals
            "bind < prepare_dispatch": 2,  # rows of each expert; whether this call is refused
            "prepare_dispatch < kernel": 3,  # and first rows of each expert
        },
    },
}


def expected(kernel: str, device: str) -> CallSites:
    if kernel == VALUES:  # a combine of another dispatch than the last
        stores = 3 if device == "hip" else 1
        noted = "note_wrong_call < follow_dispatch"
        return {"load_relaxed": {noted: 1}, "store_relaxed": {noted: stores}}
    sites = added(ENTERING, OWN[kernel])
    if device == "hip":  # before each, each wave for itself
        return added(sites, {"drain": RAISING})
    # Arguments are copied to shared memory. The barrier after that has the next one's position.
    sites["barrier"]["prepare_dispatch < kernel"] -= 1
    # Another server's row comes from its source: which of both to name needs no look. The relaxed
    # load of the look that is left counts as peek's, which is beside it.
    sites["load_acquire"]["seen_at < seen"] -= 1
    sites["load_relaxed"]["seen_at < seen"] -= 2
    # Three stores in a row have one position.
    sites["store_relaxed"] = {name: n // 3 for name, n in sites["store_relaxed"].items()}
    return added(sites, {"barrier": {"share < prepare_dispatch": 1}})


# Which functions read rows; what lanes write in one function and others read in another.
READERS = {ENTER: ("enter", "report"), DIRECT: ("enter", "bind")}
HANDED_ON = {
    ENTER: (("refuse", "refused"),),
    DIRECT: (
        ("route_count", "route_scan"),
        ("route_scan", "enter"),
        ("refuse", "refused"),
        ("bind", "route_fill"),
    ),
}


def faults_of(name: str, kernel: Kernel, device: Device) -> list[str]:
    """Of orders; accesses past coherence, and of a lane's own memory but for route's arrays."""
    faults = entering_faults(kernel, device, READERS[name], HANDED_ON[name])
    faults += synchronising_faults(kernel, device)
    arrays = kernel.find(device.bad, "route_count") | kernel.find(device.bad, "route_fill")
    texts = (kernel.instructions[k].text for k in sorted(kernel.find(device.bad) - arrays))
    return faults + [f"bad access: {text}" for text in texts]


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *HIP_ARCHES])
def test_call_sites(arch: str) -> None:
    device = "cuda" if arch in CUDA_ARCHES else "hip"
    kernels = kernels_of(STATIC, arch)
    assert sorted(kernels) == sorted(KERNELS[STATIC])
    for name, kernel in kernels.items():
        assert differences(call_sites(kernel), expected(name, device)) == [], name


@pytest.mark.parametrize("name", [ENTER, DIRECT])
@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *HIP_ARCHES])
def test_orders(arch: str, name: str) -> None:
    assert faults_of(name, kernels_of(STATIC, arch)[name], DEVICES[arch]) == []


CASES = [(arch, name) for name, broken in BREAKS.items() for arch in broken.arches]
Builds = dict[tuple[str, str], "Future[dict[str, Kernel]]"]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Of all that is broken, two at a time."""
    folder = tmp_path_factory.mktemp("broken")
    return {
        (arch, name): start_kernels_from(
            STATIC, arch, copy_sources(folder / arch / name, BREAKS[name].edits)
        )
        for arch, name in CASES
    }


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_broken_entries_are_found(arch: str, name: str, builds: Builds) -> None:
    kernels, broken = builds[arch, name].result(), BREAKS[name]
    device = "cuda" if arch in CUDA_ARCHES else "hip"
    for kernel in (ENTER, DIRECT):
        is_direct = kernel == DIRECT
        faults = faults_of(kernel, kernels[kernel], DEVICES[arch])
        begin = [*broken.faults, *(broken.direct if is_direct else [])]
        assert [text for text in begin if not any(f.startswith(text) for f in faults)] == []
        assert [text for text in faults if not text.startswith(tuple(begin))] == []
        found = differences(call_sites(kernels[kernel]), expected(kernel, device))
        sites = [*broken.sites, *(broken.direct_sites if is_direct else [])]
        assert [text for text in sites if not any(f.startswith(text) for f in found)] == []
