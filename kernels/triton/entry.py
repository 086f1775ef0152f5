"""The kernels by name: which file holds each, and what it is launched with.

Names and launch records are those of `kernels/entry`, so that whoever launches one need not know
which of the two it is. A record is passed as it is: Triton's parameters are its fields, in order.
"""

from __future__ import annotations

import importlib
from typing import Any

# By entry, as in kernels/entry.
ENTRIES: dict[str, tuple[str, ...]] = {
    "exchange": ("fastkern_exchange",),
    "dispatch": ("fastkern_dispatch",),
    "combine": ("fastkern_combine", "fastkern_combine_float64"),
    "route": ("fastkern_route_count", "fastkern_route_scan", "fastkern_route_fill"),
}
NAMES = tuple(name for names in ENTRIES.values() for name in names)
# What is between servers, by the number that kernels know it by (TRANSPORT, see transport.py).
# "shared" is for tests. Kernels of "peer", which knows one server, lie in the entry's own file, all
# others in between_servers.py.
TRANSPORTS = {"peer": 0, "nvshmem": 1, "nccl_gin": 2, "shared": 3}


def entry_of(name: str) -> str:
    """The entry that holds a kernel; raises KeyError for an unknown one."""
    for entry, names in ENTRIES.items():
        if name in names:
            return entry
    raise KeyError(name)


def record_of(name: str) -> str:
    """The record that a kernel is launched with."""
    return "RouteArgs" if entry_of(name) == "route" else "LaunchArgs"


def kernel_of(name: str, between_servers: bool = False) -> Any:
    """The Triton function. Imports Triton, and what the kernel needs.

    between_servers: the one that has a constexpr TRANSPORT; of an entry that moves rows.
    """
    file = "between_servers" if between_servers else entry_of(name)
    module = importlib.import_module(f".{file}", __package__)
    return getattr(module, name)
