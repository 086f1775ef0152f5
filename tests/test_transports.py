"""Transports as they are declared: names, capabilities, figures."""

from __future__ import annotations

import pytest

from fastkern import transports
from fastkern.transports import MAKERS, Capabilities, Transport, resolve

# cross_rail, across_hosts, rejoin, device
DECLARED = {
    "shm": (True, False, True, False),
    "shaped": (True, False, True, False),
    "peer": (True, False, True, True),
    "nvshmem": (True, True, False, True),
    "nccl_gin": (False, True, False, True),
    "rocshmem": (True, True, False, True),
}


@pytest.mark.parametrize("name", DECLARED)
def test_declared_capabilities(name: str) -> None:
    transport = resolve(name)
    assert transport.name == name
    assert transport.capabilities == Capabilities(*DECLARED[name])
    assert transport.device == transport.capabilities.device
    assert transport.shaped == (name == "shaped")


def test_every_maker_is_declared_here() -> None:
    assert list(MAKERS) == list(DECLARED)
    for name, maker in MAKERS.items():
        assert maker is getattr(transports, name)


def test_nccl_gin_can_be_connected_in_full() -> None:
    assert transports.nccl_gin(cross_rail=True).capabilities.cross_rail
    assert transports.nccl_gin().capabilities.rejoin is False


def test_a_network_is_slower_between_servers_than_inside() -> None:
    for name in ("nvshmem", "nccl_gin", "rocshmem"):
        transport = resolve(name)
        assert transport.scale_out_GBps < transport.scale_up_GBps
        assert transport.capabilities.across_hosts


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("figure", ["scale_up_GBps", "scale_out_GBps"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_rates_out_of_range_are_refused(name: str, figure: str, value: float) -> None:
    maker = getattr(transports, name)
    assert getattr(maker(**{figure: 12.5}), figure) == 12.5
    with pytest.raises(ValueError, match=rf"^{name}: {figure} must be between"):
        maker(**{figure: value})


def test_names_are_listed_where_one_is_unknown() -> None:
    with pytest.raises(
        ValueError, match="shm, shaped, peer, nvshmem, nccl_gin, rocshmem, not 'ib'"
    ):
        resolve("ib")


def test_a_transport_is_taken_as_it_is() -> None:
    mine = Transport("shm", 1.0, 2.0, 3.0, Capabilities(True, False, True))
    assert resolve(mine) is mine
    assert not mine.device
