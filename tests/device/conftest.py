"""Fixtures: the CPU as a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastkern.device.host_driver import HostDriver


@pytest.fixture
def clean_driver() -> Iterator[HostDriver]:
    """A driver of its own; a test that leaves anything behind fails."""
    made = HostDriver()
    yield made
    left = made.leftovers()
    made.close()
    assert left == []
