"""The GPU of this machine. Where there is none, every test here fails and says why.

Tests that use `gpu` or `kernels` run twice, with the kernels in C++ and with those in Triton, which
fail where Triton is missing; -k cxx or -k triton picks one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastkern.device.driver import Driver
from fastkern.device.triton_library import import_triton
from fastkern.errors import DeviceUnavailableError
from perf.gpu.detect import find_target
from perf.gpu.session import open_kernels
from tests.conftest import SharedPools


@pytest.fixture(scope="session")
def target() -> str:
    """CUDA or HIP, whichever device can be opened."""
    try:
        return find_target("auto")
    except DeviceUnavailableError as error:
        pytest.fail(f"these tests need a GPU: {error}", pytrace=False)


@pytest.fixture(scope="session", params=["cxx", "triton"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Which kernels move rows, see driver.Driver."""
    found = str(request.param)
    if found == "triton":
        try:
            import_triton()
        except DeviceUnavailableError as error:
            pytest.fail(f"these tests need Triton: {error}", pytrace=False)
    return found


@pytest.fixture(scope="session")
def gpu(target: str, kernels: str) -> Iterator[Driver]:
    """The device, running these kernels."""
    try:
        driver = open_kernels(target, kernels)
    except DeviceUnavailableError as error:
        pytest.fail(f"these tests need a GPU for the kernels in {kernels}: {error}", pytrace=False)
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def pools(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPools]:
    """Ranks as processes, on a machine that has a GPU."""
    made = SharedPools(tmp_path_factory)
    yield made
    made.close()
