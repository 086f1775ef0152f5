"""Transports and what they can do.

A transport that was asked for by name and cannot run raises; nothing falls back in silence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """What a transport offers to the planner and to the runtime.

    cross_rail: a rank can put to any rank of another server, not only to its same-index peer.
    across_hosts: ranks may be on several hosts.
    rejoin: a fresh communicator can be made in the same processes after a rank was lost.
    """

    cross_rail: bool
    across_hosts: bool
    rejoin: bool


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


_ONE_HOST = Capabilities(cross_rail=True, across_hosts=False, rejoin=True)


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
    makers = {"shm": shm, "shaped": shaped}
    if transport not in makers:
        raise ValueError(f"transport must be one of {', '.join(makers)}, not {transport!r}")
    return makers[transport]()
