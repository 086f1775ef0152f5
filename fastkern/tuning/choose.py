"""What a communicator launches with: what it was given, else its profile's, else the default."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .blocks import BlockCounts
from .store import find_profile

if TYPE_CHECKING:
    from ..device.driver import DeviceProperties

log = logging.getLogger("fastkern")

# By the kernels, see driver.Driver.
LANES_BY_DEFAULT = {"cxx": 512, "triton": 256}
MOST_LANES = {"cxx": 512, "triton": 1024}
TILE_BYTES_BY_DEFAULT = 16384
_HOST_LANES = 64  # of a block, on the host target
_PROCESSORS_PER_BLOCK = 6


@dataclass(frozen=True)
class LaunchParameters:
    """blocks: of each call. num_lanes: of a block. tile_bytes: that a block of a kernel in Triton
    moves at a time. defaults: of settings, by name."""

    blocks: BlockCounts
    num_lanes: int
    tile_bytes: int
    defaults: Mapping[str, Any]


def default_num_blocks(properties: DeviceProperties) -> int:
    """Blocks of a launch: one for each six processors (22 on an H200, 50 on an MI300X).

    A guess: they should saturate the links, while the other processors go on computing.
    """
    return max(1, properties.num_processors // _PROCESSORS_PER_BLOCK)


def default_lanes(kernels: str, properties: DeviceProperties) -> int:
    """Lanes of a block. kernels: which, see driver.Driver."""
    return min(LANES_BY_DEFAULT[kernels], properties.most_lanes)


def choose_parameters(
    transport: str,
    properties: DeviceProperties | None,
    num_blocks: int | None,
    kernels: str = "cxx",
) -> LaunchParameters:
    """For a communicator over `transport` on a device, or on the host where properties is None.

    kernels: which the device runs, see driver.Driver. num_blocks: as given in code or by the
    environment, which wins over the profile. Raises ValueError where a profile cannot be read, or
    asks for what the device does not have.
    """
    if properties is None:
        architecture, name = "host", platform.processor() or platform.machine()
        usual, most_lanes = 1, _HOST_LANES  # host ranks usually outnumber cores
    else:
        architecture, name = properties.architecture, properties.name
        usual = default_num_blocks(properties)
        most_lanes = min(MOST_LANES[kernels], properties.most_lanes)
    profile, source = find_profile(architecture, name, transport, kernels)
    log.info(
        "launch parameters for %s (%s) over %s: %s, %s",
        architecture,
        name,
        transport,
        source,
        f"measured {profile.measured_at}" if profile.measured else "not measured",
    )
    lanes = profile.num_lanes
    if lanes is None:
        lanes = 1 if properties is None else default_lanes(kernels, properties)
    if lanes > most_lanes:
        raise ValueError(
            f"tuning profile {source}: num_lanes is {lanes} for {architecture} over {transport}, "
            f"a block here has at most {most_lanes}"
        )
    if num_blocks is not None:
        blocks = BlockCounts(num_blocks)
    else:
        blocks = BlockCounts(
            profile.most_blocks(usual), lambda op, size: profile.blocks_of(op, size) or usual
        )
    chunk = profile.chunk_bytes
    defaults = {} if chunk is None else {"chunk_bytes": chunk}
    return LaunchParameters(blocks, lanes, profile.tile_bytes or TILE_BYTES_BY_DEFAULT, defaults)
