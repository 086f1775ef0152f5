"""Transports and what they can do.

A transport that was asked for by name and cannot run raises; nothing falls back in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Capabilities:
    """What a transport offers to the planner and to the runtime.

    cross_rail: a rank can put to any rank of another server, not only to its same-index peer.
    across_hosts: ranks may be on several hosts.
    rejoin: a fresh communicator can be made in the same processes after a rank was lost.
    device: tensors and kernels are on GPUs, one for each rank; else in host memory.
    """

    cross_rail: bool
    across_hosts: bool
    rejoin: bool
    device: bool = False


@dataclass(frozen=True)
class Transport:
    """A named transport with the figures that the planner costs a call with.

    scale_up_GBps, scale_out_GBps: per rank, 1e9 bytes per second. alpha_us: fixed cost of a put.
    """

    name: str
    scale_up_GBps: float  # noqa: N815
    scale_out_GBps: float  # noqa: N815
    alpha_us: float
    capabilities: Capabilities

    @property
    def shaped(self) -> bool:
        """Whether links are slowed down to the given rates."""
        return self.name == "shaped"

    @property
    def device(self) -> bool:
        """Whether its ranks have a GPU each, and their tensors on it."""
        return self.capabilities.device


_ONE_HOST = Capabilities(cross_rail=True, across_hosts=False, rejoin=True)
_PEER = Capabilities(cross_rail=True, across_hosts=False, rejoin=True, device=True)
# NVSHMEM cannot be initialised again in a process; so no network promises to rejoin.
_NETWORK = Capabilities(cross_rail=True, across_hosts=True, rejoin=False, device=True)
_RAIL_NETWORK = replace(_NETWORK, cross_rail=False)


def shm(
    scale_up_GBps: float = 4.0,  # noqa: N803
    scale_out_GBps: float = 4.0,  # noqa: N803
    alpha_us: float = 20.0,
) -> Transport:
    """POSIX shared memory, one host. The figures only weigh plans; copies run at memory speed."""
    return _checked(Transport("shm", scale_up_GBps, scale_out_GBps, alpha_us, _ONE_HOST))


def shaped(
    scale_up_GBps: float = 0.225,  # noqa: N803
    scale_out_GBps: float = 0.025,  # noqa: N803
    alpha_us: float = 100.0,
) -> Transport:
    """Shared memory on which each rank's egress and ingress, per tier, run at the given rates."""
    return _checked(Transport("shaped", scale_up_GBps, scale_out_GBps, alpha_us, _ONE_HOST))


def peer(
    scale_up_GBps: float = 400.0,  # noqa: N803
    scale_out_GBps: float = 400.0,  # noqa: N803
    alpha_us: float = 3.0,
) -> Transport:
    """GPUs of one host that map each other's memory, as one server or as several.

    The figures only weigh plans. The defaults here and below are round numbers near the nominal
    rates of the hardware: NVLink 4 here.
    """
    return _checked(Transport("peer", scale_up_GBps, scale_out_GBps, alpha_us, _PEER))


def nvshmem(
    scale_up_GBps: float = 400.0,  # noqa: N803
    scale_out_GBps: float = 45.0,  # noqa: N803
    alpha_us: float = 8.0,
) -> Transport:
    """NVIDIA GPUs: mapped memory in a server, NVSHMEM between servers (NVLink 4, 400 Gb/s)."""
    return _checked(Transport("nvshmem", scale_up_GBps, scale_out_GBps, alpha_us, _NETWORK))


def nccl_gin(
    scale_up_GBps: float = 400.0,  # noqa: N803
    scale_out_GBps: float = 45.0,  # noqa: N803
    alpha_us: float = 8.0,
    cross_rail: bool = False,
) -> Transport:
    """NVIDIA GPUs: mapped memory in a server, NCCL's device API (GIN) between servers.

    cross_rail: connect every rank with all ranks of other servers, which direct plans need; else
    with its same-index peers alone, which costs less memory.
    """
    capabilities = _NETWORK if cross_rail else _RAIL_NETWORK
    return _checked(Transport("nccl_gin", scale_up_GBps, scale_out_GBps, alpha_us, capabilities))


def rocshmem(
    scale_up_GBps: float = 300.0,  # noqa: N803
    scale_out_GBps: float = 45.0,  # noqa: N803
    alpha_us: float = 8.0,
) -> Transport:
    """AMD GPUs: mapped memory in a server, rocSHMEM between servers (xGMI of MI300X, 400 Gb/s)."""
    return _checked(Transport("rocshmem", scale_up_GBps, scale_out_GBps, alpha_us, _NETWORK))


MAKERS: dict[str, Callable[[], Transport]] = {
    "shm": shm,
    "shaped": shaped,
    "peer": peer,
    "nvshmem": nvshmem,
    "nccl_gin": nccl_gin,
    "rocshmem": rocshmem,
}


def _checked(transport: Transport) -> Transport:
    for name in ("scale_up_GBps", "scale_out_GBps"):
        value = getattr(transport, name)
        if not (math.isfinite(value) and 1e-6 <= value <= 1e5):
            raise ValueError(
                f"{transport.name}: {name} must be between 1e-6 and 1e5, not {value!r}"
            )
    return transport


def resolve(transport: str | Transport) -> Transport:
    """A transport, by name with its default figures. Raises ValueError for an unknown name."""
    if isinstance(transport, Transport):
        return transport
    if transport not in MAKERS:
        raise ValueError(f"transport must be one of {', '.join(MAKERS)}, not {transport!r}")
    return MAKERS[transport]()
