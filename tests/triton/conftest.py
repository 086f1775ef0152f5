"""A process that interprets kernels, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.triton.interpreted import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as process:
        yield process
