"""The kernels of a process: loaded when first needed, and held to what a device can hold.

Blocks of a persistent kernel wait for one another, so all blocks of all ranks must be on the device
at once: a launch of more would never end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .compile import compile_entry
from .driver import Driver
from .sources import image_name

# Kernels by the entry that holds them, see kernels/entry.
ENTRY_OF = {
    "fastkern_exchange": "exchange",
    "fastkern_dispatch": "dispatch",
    "fastkern_combine": "combine",
    "fastkern_combine_float64": "combine",
    "fastkern_route_count": "route",
    "fastkern_route_scan": "route",
    "fastkern_route_fill": "route",
    "fastkern_static_direct": "static",
    "fastkern_static_enter": "static",
    "fastkern_static_values": "static",
}
PERSISTENT = (
    "fastkern_exchange",
    "fastkern_dispatch",
    "fastkern_combine",
    "fastkern_combine_float64",
)
_STATIC = ("fastkern_static_direct", "fastkern_static_enter")
# Lanes that step together (warp, wave): kernels that move rows or records run on whole ones.
TEAM_LANES = {"cuda": 32, "hip": 64}


def default_load(driver: Driver, transport: str = "peer") -> Callable[[str], bytes]:
    """Images compiled for the driver's device, through the cache of compiled kernels."""
    if driver.target == "host":
        return lambda entry: b""  # the host target is part of the package
    architecture = driver.properties().architecture
    return functools.partial(
        compile_entry, target=driver.target, arch=architecture, transport=transport
    )


class Kernels:
    """Functions by name. load: the compiled image of an entry ("exchange", ...).

    transport: what moves rows. Between servers it has one image for all entries that do.
    """

    def __init__(
        self,
        driver: Driver,
        load: Callable[[str], bytes],
        num_ranks: int,
        num_blocks: int,
        transport: str = "peer",
    ) -> None:
        self._transport = transport
        self._driver = driver
        self._load = load
        self._num_ranks = num_ranks
        self._num_blocks = num_blocks
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}

    def get(self, name: str, num_lanes: int) -> Any:
        """A kernel to launch with blocks of num_lanes lanes.

        Raises ValueError where blocks that wait for one another do not fit the device all at once,
        or are not whole warps or waves where they must be.
        """
        team = TEAM_LANES.get(self._driver.target, 1)
        if name in (*PERSISTENT, *_STATIC) and num_lanes % team:
            raise ValueError(f"num_lanes must be a multiple of {team}, not {num_lanes}")
        if name not in self._functions:
            function = self._driver.function(self.module_of(name), name)
            if name in (*PERSISTENT, *_STATIC):
                num_blocks = self._num_blocks if name in PERSISTENT else 1
                self._check_room(name, function, num_lanes, num_blocks)
            self._functions[name] = function
        return self._functions[name]

    def module_of(self, name: str) -> Any:
        """The driver's module that holds a kernel, loaded once for all kernels in it."""
        entry = ENTRY_OF[name]
        image = image_name(entry, self._transport)
        if image not in self._modules:
            self._modules[image] = self._driver.load_module(self._load(entry))
        return self._modules[image]

    def most_blocks(self, name: str, num_lanes: int) -> int:
        """Blocks per rank of a persistent kernel that the device holds for all ranks at once."""
        function = self._driver.function(self.module_of(name), name)
        return self._driver.resident_blocks(function, num_lanes) // self._num_ranks

    def _check_room(self, name: str, function: Any, num_lanes: int, num_blocks: int) -> None:
        resident = self._driver.resident_blocks(function, num_lanes)
        wanted = self._num_ranks * num_blocks
        if wanted > resident:
            fit = resident // self._num_ranks
            raise ValueError(
                f"{name}: {self._num_ranks} ranks with {num_blocks} blocks each are {wanted} "
                f"blocks, but the device holds {resident} of {num_lanes} lanes at once: "
                + (f"at most {fit} per rank" if fit else "fewer ranks or lanes are needed")
            )

    def close(self) -> None:
        """Unload the modules; no kernel may run."""
        self._functions.clear()
        while self._modules:
            _, module = self._modules.popitem()
            self._driver.unload_module(module)
