"""Every operation of the Triton kernels, compiled alone, is what the protocol takes it for.

That the checks find what is broken is in test_primitive_faults.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fastkern.device.triton_library import OLDEST
from tests.device_compile.toolchain import ROOT
from tests.triton_compile.builds import ARCHES, PRIMITIVES, Source, build
from tests.triton_compile.checks import general_faults, scalar_spills
from tests.triton_compile.devices import DEVICES
from tests.triton_compile.listing import SOURCES, kernel_of
from tests.triton_compile.primitive_checks import CHECKS


def functions(path: Path) -> set[str]:
    """Those that a kernel calls, as they are named."""
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_operation_has_a_kernel() -> None:
    kernels = Path(__file__).with_name("primitives.py")
    assert {name for name in functions(kernels) if not name.startswith("_")} == set(CHECKS)
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(kernels.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    operations = functions(SOURCES[0] / "access.py") | functions(SOURCES[0] / "target.py")
    # Parts of others: a field's place, an acquire's end, which target it is.
    parts = {"place", "acquired", "target_name"}
    assert {name for name in operations if not name.startswith("_")} - parts <= calls


def test_the_oldest_release_is_the_oldest_that_fastkern_takes() -> None:
    """`make check-triton-oldest` runs all this with it."""
    found = re.search(
        r"^OLDEST_TRITON := triton==(\d+)\.(\d+)", (ROOT / "Makefile").read_text(), re.M
    )
    assert found
    assert tuple(map(int, found.groups())) == OLDEST


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("arch", ARCHES)
def test_primitive(arch: str, name: str) -> None:
    made = build(Source(PRIMITIVES, name), arch)
    kernel = kernel_of(made)
    faults = CHECKS[name](kernel, DEVICES[arch], made) + general_faults(made, kernel)
    assert faults == []
    assert scalar_spills(made) == 0
