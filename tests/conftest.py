"""Fixtures: pools of ranks, which cases share because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import Pool


class SharedPools:
    """Pools by size; one that a case made unusable is replaced."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._pools: dict[int, Pool] = {}

    def pool(self, num_ranks: int) -> Pool:
        found = self._pools.get(num_ranks)
        if found is None or not found.usable:
            found = Pool(num_ranks, self._folders.mktemp("ranks"))
            self._pools[num_ranks] = found
        return found

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def shared_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPools]:
    pools = SharedPools(tmp_path_factory)
    yield pools
    pools.close()


@pytest.fixture
def four(shared_pools: SharedPools) -> Pool:
    """Four ranks, shared with other tests."""
    return shared_pools.pool(4)


@pytest.fixture
def mortal_four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four ranks of the test's own, to be killed."""
    with Pool(4, tmp_path_factory.mktemp("mortal")) as pool:
        yield pool
