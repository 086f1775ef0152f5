"""Reports the registers of every kernel that was compiled."""

from __future__ import annotations

import pytest

from tests.device_compile.toolchain import registers_used


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if registers_used:
        terminalreporter.section("registers")
    for line in registers_used:
        terminalreporter.write_line(line)
