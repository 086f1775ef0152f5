"""The GPU of this machine. Where there is none, every test here fails and says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastkern.device.driver import Driver
from fastkern.device.open_driver import open_driver
from fastkern.errors import DeviceUnavailableError
from perf.gpu.detect import find_target
from tests.conftest import SharedPools


@pytest.fixture(scope="session")
def gpu() -> Iterator[Driver]:
    """A CUDA or HIP device, whichever can be opened."""
    try:
        driver = open_driver(find_target("auto"))
    except DeviceUnavailableError as error:
        pytest.fail(f"these tests need a GPU: {error}", pytrace=False)
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def pools(gpu: Driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPools]:
    """Ranks as processes, on a machine that has a GPU."""
    made = SharedPools(tmp_path_factory)
    yield made
    made.close()
