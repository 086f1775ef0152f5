"""The GPU of this machine. Where there is none, every test here fails and says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastkern.device.driver import Driver
from fastkern.device.open_driver import open_driver
from fastkern.errors import DeviceUnavailableError
from perf.gpu.detect import find_target


@pytest.fixture(scope="session")
def gpu() -> Iterator[Driver]:
    """A CUDA or HIP device, whichever can be opened."""
    try:
        driver = open_driver(find_target("auto"))
    except DeviceUnavailableError as error:
        pytest.fail(f"these tests need a GPU: {error}", pytrace=False)
    yield driver
    driver.close()
