"""The runtime that a communicator's calls run on: the host's, or a device's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .device.backend import DeviceBackend
from .errors import DeviceUnavailableError, FastkernError
from .heap import ProcessIdentity
from .host_runtime import HostRuntime
from .moe.backend import HostMoe, MoeBackend
from .planner import Topology
from .runtime import Runtime, RuntimeOptions


def runtime_on(
    device: DeviceBackend | None,
    group: Any,
    rank: int,
    topology: Topology,
    processes: Sequence[ProcessIdentity],
    hosts: Sequence[str],
    options: RuntimeOptions,
) -> tuple[Runtime, MoeBackend]:
    """The runtime, and what dispatch and combine need beside it. device: None for the host.

    processes, hosts: of each rank.
    """
    if device is None:
        return HostRuntime(group, rank, topology, processes, options), HostMoe(rank, topology)
    from .device.device_moe import DeviceMoe  # only now: the host does without
    from .device.device_runtime import DeviceRuntime

    runtime = DeviceRuntime(group, rank, topology, processes, hosts, options, device)
    return runtime, DeviceMoe(runtime, topology)


def shareable(error: Exception) -> Exception:
    """An error that is made of a text alone, as ranks tell one another."""
    alike = (TypeError, ValueError, DeviceUnavailableError)
    return error if isinstance(error, alike) else FastkernError(str(error))
