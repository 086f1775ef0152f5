"""The set-up of NCCL for nccl_gin, with a binding that is made up: calls, their order, arguments,
what is refused, failures at each call, and whole communicators over it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from packaging.version import Version

from fastkern import Communicator, DeviceUnavailableError
from fastkern.device.network_gin import check_nccl
from fastkern.device.records import NETWORK_ARGS
from fastkern.device.transfer import download
from fastkern.planner.api import DEFAULT_CHUNK_SLOTS
from tests.device.communicators import host_device, message
from tests.device.fake_nccl import (
    CONTEXTS,
    DEV_COMM,
    Made,
    NcclGinConnectionType,
    NcclGinType,
    Site,
)
from tests.device.shared_network import hosts_of, network_communicator, on_network
from tests.device.test_communicator_failures import exchange
from tests.processes import Pool

MEMORY = ["mem_alloc", "register_window", "get_peer_device_pointer"]
START = ["init", "create_dev_comm"]


def whole_life(rank: int, ranks: int, cross_rail: bool) -> None:
    """Calls before and after growth; what was asked of NCCL, in which order."""
    made = Made()
    with network_communicator(2, made, cross_rail=cross_rail) as comm:
        nccl, runtime = made.nccl, comm._runtime
        assert nccl.calls == ["get_unique_id"] * (rank == 0) + START + MEMORY * 2
        needs = nccl.requirements
        connection = NcclGinConnectionType.FULL if cross_rail else NcclGinConnectionType.RAIL
        assert (needs.gin_connection_type, needs.gin_type) == (connection, NcclGinType.NONE)
        assert (needs.gin_signal_count, needs.gin_counter_count) == (0, 1)
        assert (needs.gin_va_signals_required, needs.gin_strong_signals_required) == (True, False)
        check_record(runtime, ranks)
        exchange(comm)
        begin = len(nccl.calls)
        comm.reserve(32 << 20)
        assert nccl.calls[begin:] == ["window_deregister", "mem_free", *MEMORY]
        check_record(runtime, ranks)
        exchange(comm)
        begin = len(nccl.calls)
    released = ["window_deregister", "mem_free"]
    assert nccl.calls[begin:] == [*released, *released, "dev_comm_destroy", "abort"]


def check_record(runtime: Any, ranks: int) -> None:
    """What kernels are told."""
    driver, heap = runtime.driver, runtime._heap
    address = runtime._ring._slots[0]._common.network
    raw = download(driver, address, NETWORK_ARGS.itemsize)
    record: Any = np.frombuffer(raw, dtype=NETWORK_ARGS)[0]
    assert record["heap"] == heap.control_address(runtime.rank)
    assert record["window"] == heap._control.kept[1].handle
    assert record["data_window"] == heap._data.kept[1].handle
    peers = np.frombuffer(download(driver, int(record["peers"]), 4 * ranks), dtype=np.uint32)
    assert peers.tolist() == list(range(ranks))
    assert download(driver, int(record["comm"]), len(DEV_COMM)) == DEV_COMM
    for name, count in (("written", ranks * (2 + DEFAULT_CHUNK_SLOTS)), ("puts", CONTEXTS)):
        assert download(driver, int(record[name]), 8 * count) == bytes(8 * count)


@pytest.mark.parametrize("cross_rail", [False, True], ids=["rail", "full"])
def test_a_whole_life(four: Pool, cross_rail: bool) -> None:
    four.run(whole_life, cross_rail)


def refused(rank: int, ranks: int, site: Site, cross_rail: bool) -> tuple[str, list[str]]:
    made = Made(site)
    with host_device() as driver, hosts_of(rank, ranks // 2, made):
        text = message(lambda: Communicator(**on_network(driver, 2, {"cross_rail": cross_rail})))
        dist.barrier()
    return text, made.nccl.calls[-2:]


SITES: dict[str, tuple[Site, bool, str]] = {
    "lsa": (
        Site(lsa=4),
        False,
        "NCCL maps the memory of 4 ranks into one another: servers= must be 1",
    ),
    "small lsa": (Site(lsa=1), False, "NCCL maps the memory of 1 ranks into one another"),
    "no device api": (
        Site(device_api=False),
        False,
        "NCCL has no network here that GPUs can start",
    ),
    "no gin": (Site(kinds=frozenset()), False, "but for []: it needs NICs with GPUDirect RDMA"),
    "efa": (Site(kinds=frozenset({NcclGinType.EFA_GDA})), False, "(GIN), but for ['EFA_GDA']"),
    "rail only": (
        Site(connection=NcclGinConnectionType.RAIL),
        True,
        "connections of kind RAIL here, and FULL is needed: nccl_gin(cross_rail=False) does with",
    ),
    "no connection": (
        Site(connection=NcclGinConnectionType.NONE),
        False,
        "connections of kind NONE here, and RAIL is needed",
    ),
    "no windows": (Site(windows=False), False, "ncclCommWindowRegister: no window"),
}


@pytest.mark.parametrize("name", SITES)
def test_what_nccl_must_have(four: Pool, name: str) -> None:
    site, cross_rail, said = SITES[name]
    for text, last in four.run(refused, site, cross_rail):
        assert text.startswith("FastkernError: "), text
        assert said in text, text
        assert last[-1] == "abort"


def with_kinds(rank: int, ranks: int, kinds: frozenset[NcclGinType]) -> NcclGinType:
    made = Made(Site(kinds=kinds, connection=NcclGinConnectionType.RAIL))
    with network_communicator(2, made) as comm:
        exchange(comm)
    found: NcclGinType = made.nccl.requirements.gin_type
    return found


def test_beside_efa_another_kind_is_asked_for(four: Pool) -> None:
    kind = NcclGinType
    for others, chosen in (({kind.PROXY, kind.GPI}, kind.PROXY), ({kind.GPI}, kind.GPI)):
        assert set(four.run(with_kinds, frozenset(others | {kind.EFA_GDA}))) == {chosen}


def failing(rank: int, ranks: int, call: str, times: int) -> tuple[str, list[str], float]:
    made = Made(failing=(call, times))
    with host_device() as driver, hosts_of(rank, ranks // 2, made):
        text = message(lambda: Communicator(**on_network(driver, 2, {})))
        dist.barrier()
    return text, made.nccl.calls


@pytest.mark.parametrize(
    ("call", "times", "done"),
    [
        ("init", 1, []),
        ("create_dev_comm", 1, []),
        ("mem_alloc", 1, []),
        ("register_window", 1, ["mem_alloc"]),
        ("get_peer_device_pointer", 1, ["mem_alloc", "register_window"]),
        ("mem_alloc", 2, MEMORY),
        ("register_window", 2, [*MEMORY, "mem_alloc"]),
    ],
)
def test_a_call_that_fails(four: Pool, call: str, times: int, done: list[str]) -> None:
    """On one rank; all raise its error and undo what they had, the last first."""
    undo = {"mem_alloc": "mem_free", "register_window": "window_deregister"}
    for rank, (text, calls) in enumerate(four.run(failing, call, times)):
        assert text.partition(": ")[0] in ("FastkernError", "HeapMemoryError"), text
        assert "rank 1: nccl" in text, text
        assert f"{call} fails, as wished" in text, text
        if rank == 1:
            at = max(k for k, name in enumerate(calls) if name == call)
            expected = [undo[name] for name in reversed(done) if name in undo]
            if "create_dev_comm" in calls[:at]:
                expected.append("dev_comm_destroy")
            if call != "init":
                expected.append("abort")
            assert calls[at + 1 :] == expected
        elif call != "init":
            assert "abort" in calls  # before the memory goes, where it waits inside NCCL
        counts = [calls.count(name) for name in ("mem_alloc", "mem_free")]
        if rank != 1:
            assert counts[0] == counts[1]


def test_the_unique_id_fails(four: Pool) -> None:
    """It is of rank 0 alone."""
    for text, calls in four.run(failing_id):
        assert text == "FastkernError: NCCL's unique id, rank 0: ncclGetUniqueId: no id"
        assert "init" not in calls


def failing_id(rank: int, ranks: int) -> tuple[str, list[str]]:
    made = Made()

    def make(setting: Any) -> Any:
        network = made(setting)

        def refuse() -> Any:
            raise ValueError("no id")

        made.nccl.get_unique_id = refuse
        return network

    with host_device() as driver, hosts_of(rank, ranks // 2, make):
        text = message(lambda: Communicator(**on_network(driver, 2, {})))
        dist.barrier()
    return text, made.nccl.calls


# -- what is installed -----------------------------------------------------------------------------


def versions(library: str | None, binding: str = "2.32.3") -> Any:
    found = None if library is None else SimpleNamespace(version=Version(library), path="/a/lib")
    made = SimpleNamespace(nccl4py="0.6.0", nccl_bindings=Version(binding), libnccl=found)
    return SimpleNamespace(get_version=lambda: made)


def test_releases_that_go_together() -> None:
    check_nccl(versions("2.32.3"), 23203)
    check_nccl(versions("2.33.1"), 23201)  # newer libraries know older layouts


@pytest.mark.parametrize(
    ("library", "binding", "kernels", "said"),
    [
        (None, "2.32.3", 23203, "nccl4py finds no libnccl.so.2"),
        (
            "2.29.7",
            "2.32.3",
            23203,
            r"NCCL 2.32.0 or newer, and this process has 2.29.7 \(/a/lib\)",
        ),
        (
            "2.33.0",
            "2.32.3",
            23300,
            r"for NCCL 2.32.3, and the kernels are for 2.33.0: NCCL's headers",
        ),
        ("2.33.0", "2.34.1", 23400, r"for NCCL 2.34.1, and this process has 2.33.0"),
    ],
)
def test_releases_that_do_not(library: str | None, binding: str, kernels: int, said: str) -> None:
    with pytest.raises(DeviceUnavailableError, match=said) as caught:
        check_nccl(versions(library, binding), kernels)
    assert "pip install 'fastkern[gin]'" in str(caught.value)
