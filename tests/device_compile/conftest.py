"""Starts what tests will ask for; reports the registers of every kernel that was compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device_compile.toolchain import (
    KERNELS,
    PRIMITIVES,
    WEIGHTED_SUM,
    registers_used,
    start_build,
    stop_builds,
)

STARTED_AHEAD = {*KERNELS, PRIMITIVES, WEIGHTED_SUM}


@pytest.fixture(scope="session", autouse=True)
def builds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles, beside the tests, what the selected ones are named for: an entry and an arch.

    entry: by parameter, or the module's ENTRY.
    """
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        given = callspec.params if callspec else {}
        module = item.getparent(pytest.Module)
        entry = given.get("entry", getattr(module and module.obj, "ENTRY", None))
        if entry in STARTED_AHEAD and "arch" in given:
            start_build(entry, given["arch"])
    yield
    stop_builds()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if registers_used:
        terminalreporter.section("registers")
    for line in registers_used:
        terminalreporter.write_line(line)
