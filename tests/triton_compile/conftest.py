"""Starts what tests will ask for; reports the registers of every whole kernel."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.triton_compile import builds
from tests.triton_compile.kernels import registers_used, source_of


@pytest.fixture(scope="session", autouse=True)
def started(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles, beside the tests, what the selected ones are named for: a kernel and an arch.

    Those that take longest first: the whole kernels.
    """
    wanted: dict[tuple[builds.Source, str], bool] = {}
    for item in request.session.items:
        if item.path.parent != Path(__file__).parent:
            continue
        callspec = getattr(item, "callspec", None)
        given = callspec.params if callspec else {}
        name, arch = given.get("name", ""), given.get("arch", "")
        if name.startswith("fastkern_"):
            wanted[source_of(name), arch] = True
        elif item.path.name == "test_primitives.py" and name:
            wanted[builds.Source(builds.PRIMITIVES, name), arch] = False
    for source, arch in sorted(wanted, key=lambda pair: not wanted[pair]):
        builds.start(source, arch)
    yield
    builds.stop()


def pytest_report_header() -> str:
    return f"triton: {importlib.metadata.version('triton')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if registers_used:
        terminalreporter.section("registers")
    for line in registers_used:
        terminalreporter.write_line(line)
