"""What a search tries: candidates of launch parameters that a device can hold, calls by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..device.driver import DeviceProperties, Driver
from ..device.virtual_kernels import PERSISTENT, Kernels, check_lanes, default_load
from ..planner import Topology
from ..planner.api import DEFAULT_CHUNK_BYTES
from .choose import MOST_LANES, TILE_BYTES_BY_DEFAULT, default_lanes, default_num_blocks
from .profile import LEAST_TILE_BYTES, MOST_BLOCKS, MOST_TILE_BYTES, OPERATIONS

_TILES = (TILE_BYTES_BY_DEFAULT // 2, TILE_BYTES_BY_DEFAULT, 2 * TILE_BYTES_BY_DEFAULT)


@dataclass(frozen=True)
class SearchOptions:
    """A search, as asked for. Empty sequences: what suits the device.

    topology: ranks, all on the one device. operations: of profile.OPERATIONS. sizes: of calls,
    bytes that a rank gives or gets, powers of two. num_blocks, num_lanes, chunk_bytes, tile_bytes:
    candidates; the last for the kernels in Triton alone. rounds: measures of each. warm_ups:
    launches before them. seed: of routing and of the order.
    """

    topology: Topology
    operations: Sequence[str] = OPERATIONS
    sizes: Sequence[int] = ()
    num_blocks: Sequence[int] = ()
    num_lanes: Sequence[int] = ()
    chunk_bytes: Sequence[int] = ()
    tile_bytes: Sequence[int] = ()
    rounds: int = 9
    warm_ups: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError naming what cannot be."""
        for name, wrong in (
            ("operations", [op for op in self.operations if op not in OPERATIONS]),
            ("sizes", [n for n in self.sizes if not 1 <= n <= 1 << 40 or n & (n - 1)]),
            ("num_blocks", [n for n in self.num_blocks if not 1 <= n <= MOST_BLOCKS]),
            ("num_lanes", [n for n in self.num_lanes if n < 1]),
            ("chunk_bytes", [n for n in self.chunk_bytes if n < 1]),
            ("tile_bytes", [n for n in self.tile_bytes if not _is_tile(n)]),
            ("rounds", [self.rounds] if self.rounds < 1 else []),
        ):
            if wrong:
                right = {
                    "operations": f"be of {', '.join(OPERATIONS)}",
                    "sizes": "be powers of two up to 2^40",
                    "num_blocks": f"be 1 to {MOST_BLOCKS}",
                    "tile_bytes": f"be powers of two, {LEAST_TILE_BYTES} to {MOST_TILE_BYTES}",
                }.get(name, "be at least 1")
                raise ValueError(f"{name} must {right}, not {wrong[0]}")


def _is_tile(num_bytes: int) -> bool:
    return LEAST_TILE_BYTES <= num_bytes <= MOST_TILE_BYTES and not num_bytes & num_bytes - 1


@dataclass(frozen=True, order=True)
class Shape:
    """What a cluster is made with: lanes of a block, chunks of puts, tiles of a block, 0 for the
    kernels in C++, which have none."""

    num_lanes: int
    chunk_bytes: int
    tile_bytes: int = 0

    @property
    def compiled(self) -> tuple[int, int]:
        """What kernels are compiled for."""
        return self.num_lanes, self.tile_bytes

    def __str__(self) -> str:
        tiles = f", tiles of {self.tile_bytes} bytes" if self.tile_bytes else ""
        return f"{self.num_lanes} lanes{tiles}, chunks of {self.chunk_bytes} bytes"


@dataclass(frozen=True)
class SearchSpace:
    """Candidates that fit the device. blocks: for each (lanes, tile), see Shape, ascending."""

    blocks: dict[tuple[int, int], tuple[int, ...]]
    chunk_bytes: tuple[int, ...]
    sizes: tuple[int, ...]
    left_out: tuple[str, ...]

    @property
    def shapes(self) -> list[Shape]:
        """Every combination of lanes, tiles and chunks."""
        return [
            Shape(lanes, chunk, tile) for lanes, tile in self.blocks for chunk in self.chunk_bytes
        ]


def search_space(driver: Driver, options: SearchOptions) -> SearchSpace:
    """The candidates of a search on this device; those that do not fit are left out, by name.

    Raises ValueError where none is left.
    """
    properties = driver.properties()
    blocks: dict[tuple[int, int], tuple[int, ...]] = {}
    left_out: list[str] = []
    for tile in dict.fromkeys(_tiles(driver, options)):
        load = default_load(driver, tile_bytes=tile or TILE_BYTES_BY_DEFAULT)
        kernels = Kernels(driver, load, options.topology.num_ranks, 1)
        try:
            for lanes in dict.fromkeys(options.num_lanes or _lanes(driver)):
                what = f"{lanes} lanes" + (f" and tiles of {tile} bytes" if tile else "")
                most = _most_blocks(kernels, driver, lanes)
                wanted = sorted(set(options.num_blocks or _blocks(properties, most)))
                fitting = tuple(n for n in wanted if n <= most)
                if fitting:
                    blocks[lanes, tile] = fitting
                left_out += [f"{n} blocks of {what}" for n in wanted if n > most]
                if not most and not wanted:
                    left_out.append(f"blocks of {what}")
        finally:
            kernels.close()
    if not blocks:
        raise ValueError(
            f"nothing to measure: the device, {properties.name}, holds none of the candidates with "
            f"{options.topology.num_ranks} ranks at once: {', '.join(left_out)}"
        )
    chunks = options.chunk_bytes or (DEFAULT_CHUNK_BYTES // 4, DEFAULT_CHUNK_BYTES, 1 << 19)
    sizes = options.sizes or (1 << 14, 1 << 17, 1 << 20, 1 << 23)
    return SearchSpace(blocks, tuple(sorted(set(chunks))), tuple(sorted(set(sizes))), (*left_out,))


def _tiles(driver: Driver, options: SearchOptions) -> Sequence[int]:
    if driver.kernels == "cxx":
        if options.tile_bytes:
            raise ValueError("tile_bytes: the kernels in C++ have no tiles")
        return (0,)
    return options.tile_bytes or _TILES


def _lanes(driver: Driver) -> list[int]:
    """The default and those beside it."""
    usual = default_lanes(driver.kernels, driver.properties())
    factors = (4, 2, 1) if driver.kernels == "cxx" else (2, 1)
    return [usual // n for n in factors if usual // n] + [2 * usual] * (driver.kernels != "cxx")


def _blocks(properties: DeviceProperties, most: int) -> list[int]:
    """Powers of two up to four times the default, which is among them, as many as fit."""
    usual = default_num_blocks(properties)
    powers = [1 << k for k in range(MOST_BLOCKS.bit_length()) if 1 << k <= 4 * usual]
    return [n for n in {*powers, usual} if n <= most]


def _most_blocks(kernels: Kernels, driver: Driver, num_lanes: int) -> int:
    """Blocks per rank that the device holds of every kernel that calls are made of."""
    if num_lanes > min(MOST_LANES[driver.kernels], driver.properties().most_lanes):
        return 0
    try:
        check_lanes(driver.target, driver.kernels, num_lanes)
    except ValueError:
        return 0
    return min(MOST_BLOCKS, *(kernels.most_blocks(name, num_lanes) for name in PERSISTENT))
