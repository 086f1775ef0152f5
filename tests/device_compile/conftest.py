"""Starts what tests will ask for; reports the registers of every kernel that was compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device_compile.toolchain import KERNELS, registers_used, start_build, stop_builds


@pytest.fixture(scope="session", autouse=True)
def builds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles, beside the tests, the entries that the selected ones are named for."""
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        given = callspec.params if callspec else {}
        if given.get("entry") in KERNELS and "arch" in given:
            start_build(given["entry"], given["arch"])
    yield
    stop_builds()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if registers_used:
        terminalreporter.section("registers")
    for line in registers_used:
        terminalreporter.write_line(line)
