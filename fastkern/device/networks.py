"""The networks that there are, by the name of their transport."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .network import Network, Setting
from .sources import NETWORKS


@dataclass(frozen=True)
class NetworkKind:
    """target: of the drivers that it works with. check: raises DeviceUnavailableError where
    something is missing on this machine, without a device or another rank. make: for a
    communicator; nothing is started yet."""

    target: str
    check: Callable[[], None]
    make: Callable[[Setting], Network]


def _call(module: str, name: str, *arguments: Any) -> Any:
    """A function of a library's own file, which is imported only when it is used."""
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*arguments)


def _kind(transport: str, module: str, check: str, make: str) -> NetworkKind:
    target = NETWORKS[transport]
    return NetworkKind(target, partial(_call, module, check), partial(_call, module, make))


KINDS = {
    "nccl_gin": _kind("nccl_gin", "network_gin", "check_nccl", "GinNetwork"),
    "nvshmem": _kind("nvshmem", "network_nvshmem", "check_nvshmem", "make_nvshmem"),
    "rocshmem": _kind("rocshmem", "network_rocshmem", "check_rocshmem", "make_rocshmem"),
}
