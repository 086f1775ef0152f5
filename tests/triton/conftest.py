"""Processes that interpret kernels, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import SharedPools
from tests.triton.communicators import InterpretingPools
from tests.triton.interpreted import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as process:
        yield process


@pytest.fixture(scope="session")
def interpreting_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPools]:
    """Ranks as processes, by number."""
    pools = InterpretingPools(tmp_path_factory)
    yield pools
    pools.close()
