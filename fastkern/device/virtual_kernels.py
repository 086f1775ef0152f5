"""The kernels of a process: loaded when first needed, and held to what a device can hold.

Blocks of a persistent kernel wait for one another, so all blocks of all ranks must be on the device
at once: a launch of more would never end.

Of a driver with the kernels in Triton those are loaded, compiled for the lanes that they are asked
for with; `fastkern_static_*` are the ones in C++ on every driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..kernels.triton.entry import TRANSPORTS
from ..tuning.choose import MOST_LANES, TILE_BYTES_BY_DEFAULT
from ..tuning.profile import LEAST_TILE_BYTES, MOST_TILE_BYTES
from .compile import compile_entry
from .driver import Driver
from .sources import MOVING, image_name
from .triton_image import TritonImage, pack_image

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
# Of route in C++ a lane does a unit or a key by itself: blocks on many processors, not large ones.
_ROUTE_LANES = {"cxx": 64, "triton": 128}

Load = Callable[[str, int], bytes]


def default_load(
    driver: Driver, transport: str = "peer", tile_bytes: int = TILE_BYTES_BY_DEFAULT
) -> Load:
    """Images compiled for the driver's device, through the cache of compiled kernels.

    tile_bytes: what a block of a kernel in Triton moves at a time, a power of two. Raises
    ValueError naming it.
    """
    if not LEAST_TILE_BYTES <= tile_bytes <= MOST_TILE_BYTES or tile_bytes & tile_bytes - 1:
        raise ValueError(
            f"tile_bytes must be a power of two from {LEAST_TILE_BYTES} to {MOST_TILE_BYTES}, not "
            f"{tile_bytes}"
        )

    def load(entry: str, num_lanes: int) -> bytes:
        target, architecture = driver.target, driver.properties().architecture
        if is_triton(driver, entry):
            constants = {} if entry == "route" else {"TILE_BYTES": tile_bytes}
            if entry in MOVING and transport != "peer":
                constants["TRANSPORT"] = TRANSPORTS["shared" if target == "host" else transport]
            if target == "host":
                return pack_image(TritonImage(target, architecture, constants))
            from .compile_triton import compile_triton

            return compile_triton(entry, target, architecture, num_lanes, constants)
        if target == "host":
            return b""  # the host target is part of the package
        return compile_entry(entry, target, architecture, transport=transport)

    return load


def is_triton(driver: Driver, entry: str) -> bool:
    """Whether an entry's kernels are those in Triton."""
    return driver.kernels == "triton" and entry != "static"


def check_lanes(target: str, kernels: str, num_lanes: int) -> None:
    """Raise ValueError for lanes that a kernel which moves rows cannot have: on a GPU whole warps
    or waves, of the kernels in Triton a power of two of them, and not too many."""
    team, most = TEAM_LANES.get(target), MOST_LANES[kernels]
    if team is None:  # the host's teams are its own, and the interpreter has no lanes
        return
    if kernels == "cxx":
        if num_lanes < 1 or num_lanes % team:
            raise ValueError(f"num_lanes must be a multiple of {team}, not {num_lanes}")
        return
    if not team <= num_lanes <= most or num_lanes & num_lanes - 1:
        raise ValueError(
            f"num_lanes must be {team} times a power of two, at most {most}, for the kernels in "
            f"Triton, not {num_lanes}"
        )


class Kernels:
    """Functions by name. load: the compiled image of an entry ("exchange", ...) for blocks of so
    many lanes, which those in C++ do not depend on.

    transport: what moves rows. Between servers it has one image for all entries that do.
    """

    def __init__(
        self,
        driver: Driver,
        load: Load,
        num_ranks: int,
        num_blocks: int,
        transport: str = "peer",
    ) -> None:
        self._transport = transport
        self._driver = driver
        self._load = load
        self._num_ranks = num_ranks
        self._num_blocks = num_blocks
        self._modules: dict[tuple[str, int], Any] = {}
        self._functions: dict[tuple[str, int], Any] = {}

    def lanes_of(self, name: str, num_lanes: int) -> int:
        """Lanes of a kernel's blocks, where those of the kernels that move rows have num_lanes."""
        if ENTRY_OF[name] == "route":
            return min(_ROUTE_LANES[self._driver.kernels], self._driver.properties().most_lanes)
        return min(num_lanes, MOST_LANES["cxx"]) if ENTRY_OF[name] == "static" else num_lanes

    def get(self, name: str, num_lanes: int) -> Any:
        """A kernel to launch with blocks of lanes_of(name, num_lanes) lanes.

        Raises ValueError where blocks that wait for one another do not fit the device all at once,
        or are not such as the kernel must have, see `check_lanes`.
        """
        if name in (*PERSISTENT, *_STATIC):
            check_lanes(self._driver.target, self._driver.kernels, num_lanes)
        key = name, self._compiled_lanes(name, num_lanes)
        if key not in self._functions:
            function = self._driver.function(self.module_of(name, num_lanes), name)
            if name in (*PERSISTENT, *_STATIC):
                num_blocks = self._num_blocks if name in PERSISTENT else 1
                self._check_room(name, function, self.lanes_of(name, num_lanes), num_blocks)
            self._functions[key] = function
        return self._functions[key]

    def module_of(self, name: str, num_lanes: int) -> Any:
        """The driver's module that holds a kernel, loaded once for all kernels in it."""
        entry, lanes = ENTRY_OF[name], self._compiled_lanes(name, num_lanes)
        key = (entry if lanes else image_name(entry, self._transport)), lanes
        if key not in self._modules:
            self._modules[key] = self._driver.load_module(self._load(entry, lanes))
        return self._modules[key]

    def moving_modules(self, num_lanes: int) -> list[Any]:
        """All of the driver's modules that hold kernels which move rows, once each. Where the
        driver keeps several under one name, those."""
        modules: list[Any] = []
        for name in PERSISTENT:
            module = self.module_of(name, num_lanes)
            for part in getattr(self._driver, "parts_of", lambda whole: [whole])(module):
                if part not in modules:
                    modules.append(part)
        return modules

    def _compiled_lanes(self, name: str, num_lanes: int) -> int:
        """What an image is made for; 0 where one is good for all."""
        return self.lanes_of(name, num_lanes) if is_triton(self._driver, ENTRY_OF[name]) else 0

    def most_blocks(self, name: str, num_lanes: int) -> int:
        """Blocks per rank of a persistent kernel that the device holds for all ranks at once."""
        function = self._driver.function(self.module_of(name, num_lanes), name)
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
