"""`fastkern tune`: a search on the device at hand, a table, a profile. Never on a live call.

All ranks are on one device (the virtual cluster): what is measured are the kernels and that
device's memory, not links. Good numbers of blocks and lanes carry over to ranks with a device each
as far as memory and processors set the time; the table says what was measured.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ..device.driver import Driver
from ..device.open_driver import open_driver
from ..errors import DeviceUnavailableError
from ..planner.api import DEFAULT_CHUNK_BYTES
from ..version import __version__
from .choose import TILE_BYTES_BY_DEFAULT, default_lanes, default_num_blocks
from .profile import Profile
from .search import Measured, measure
from .search_space import SearchOptions, SearchSpace, Shape, search_space
from .select import Chosen, select
from .store import read_profiles, save_profile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def find_target(kernels: str = "cxx") -> str:
    """The kind of GPU that this PyTorch sees. Raises DeviceUnavailableError where there is none,
    saying what there is instead for these kernels."""
    import torch

    if not torch.cuda.is_available():
        instead = {
            "cxx": "--driver host tries the search on the CPU",
            "triton": "backend triton is tuned on one",
        }
        raise DeviceUnavailableError(f"PyTorch {torch.__version__} sees no GPU; {instead[kernels]}")
    return "hip" if torch.version.hip else "cuda"


def run_tune(
    target: str | None,
    device: int,
    transport: str,
    options: SearchOptions,
    path: Path,
    console: Console,
    kernels: str = "cxx",
) -> Profile:
    """Search, print what was found, and write it into the file at `path`.

    target: "cuda", "hip" or "host"; None: the GPU that PyTorch sees. transport: what the profile is
    for. kernels: which are measured, see driver.Driver; those in Triton on a GPU alone. Raises
    ValueError, FastkernError or DeviceUnavailableError; the file is then as it was.
    """
    if path.exists():
        read_profiles(path)  # a file that cannot be added to is found before the work
    driver = open_driver(target or find_target(kernels), device)
    try:
        if kernels == "triton":
            driver = _with_triton(driver)
        properties = driver.properties()
        space = search_space(driver, options)
        ranks = f"{options.topology.servers} x {options.topology.gpus_per_server} ranks"
        console.print(f"{properties.name} ({properties.architecture}), {ranks} on this one device")
        for text in space.left_out:
            console.print(f"left out, does not fit: {text}")
        with console.status("measuring") as status:
            measures = measure(driver, space, options, lambda text: status.update(text))
        chosen = select(measures)
        console.print(table_of(driver, space, measures, chosen))
        profile = Profile(
            architecture=properties.architecture,
            transport=transport,
            device_name=properties.name,
            measured=transport == "peer",  # which the virtual cluster stands for
            measured_with=(
                f"fastkern {__version__} tune, {driver.target} driver, "
                f"{'kernels in Triton, ' if kernels == 'triton' else ''}virtual cluster of {ranks} "
                f"on one device, medians of {options.rounds} interleaved rounds"
            ),
            measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            num_blocks=chosen.num_blocks,
            num_lanes=chosen.shape.num_lanes,
            chunk_bytes=chosen.shape.chunk_bytes,
            operations=chosen.operations,
            kernels=kernels,
            tile_bytes=chosen.shape.tile_bytes or None,
        )
    finally:
        driver.close()
    save_profile(path, profile)
    console.print(
        f"{chosen.num_blocks} blocks at most, {chosen.shape}: written to {path}",
        soft_wrap=True,
    )
    return profile


def _with_triton(driver: Driver) -> Driver:
    """Raises ValueError where its ranks could not run at once, DeviceUnavailableError."""
    from ..device.triton_driver import TritonDriver
    from ..device.triton_library import interpreting

    if driver.target == "host" or interpreting():
        raise ValueError(
            "backend triton is tuned on a GPU: its interpreter runs one block after the other"
        )
    return TritonDriver(driver)


def table_of(driver: Driver, space: SearchSpace, measures: list[Measured], chosen: Chosen) -> Table:
    """What was chosen for each call, beside the untuned parameters where those were measured."""
    from rich.table import Table

    properties = driver.properties()
    tile = 0 if driver.kernels == "cxx" else TILE_BYTES_BY_DEFAULT
    shape = Shape(default_lanes(driver.kernels, properties), DEFAULT_CHUNK_BYTES, tile)
    untuned = shape, default_num_blocks(properties)
    times = {(m.op, m.size, m.shape, m.num_blocks): m.median_us for m in measures}
    table = Table(title="Medians; links between devices are not in them")
    for name in ("operation", "MB per rank", "blocks", "us", "GB/s per rank", "untuned us"):
        first = name == "operation"
        table.add_column(name, justify="left" if first else "right", no_wrap=first)
    for (op, size), m in chosen.best.items():
        before = times.get((op, size, *untuned))
        table.add_row(
            op,
            f"{m.num_bytes / 1e6:.3f}",
            str(m.num_blocks),
            f"{m.median_us:.1f}",
            f"{m.num_bytes / m.median_us / 1e3:.2f}",
            "not measured" if before is None else f"{before:.1f}",
        )
    return table
