"""The kernels in Triton, whole: they compile for every device, and what they say is what runs.

Operations by themselves are judged in test_primitives.py, with the reasons.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fastkern.kernels.triton.entry import NAMES, entry_of, kernel_of
from tests.triton_compile.breaks import access, copy_kernels, edit, target
from tests.triton_compile.builds import ARCHES, build, start
from tests.triton_compile.call_sites import source_sites
from tests.triton_compile.checks import general_faults, registers_of, scalar_spills, sum_faults
from tests.triton_compile.kernel_checks import (
    EARLY_FLAG,
    EARLY_READ,
    UNDRAINED,
    order_faults,
    scope_faults,
    site_faults,
    wait_faults,
)
from tests.triton_compile.kernels import registers_used, source_of
from tests.triton_compile.listing import kernel_of as listing_of

PERSISTENT = [name for name in NAMES if entry_of(name) != "route"]
COMBINES = [name for name in NAMES if entry_of(name) == "combine"]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", NAMES)
def test_kernel(name: str, arch: str) -> None:
    made = build(source_of(name), arch)
    line = f"{name:28} {arch:7} {registers_of(made):4} registers"
    spills = scalar_spills(made)
    registers_used.append(line + f", {spills} scalar ones spilled to vector ones" * (spills > 0))
    assert general_faults(made, listing_of(made)) == []


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", PERSISTENT)
def test_orders(name: str, arch: str) -> None:
    made = build(source_of(name), arch)
    assert order_faults(made) == []
    assert scope_faults(made, listing_of(made)) == []
    assert wait_faults(made, listing_of(made)) == []


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", PERSISTENT)
def test_call_sites(name: str, arch: str) -> None:
    made = build(source_of(name), arch)
    sites = source_sites(kernel_of(name), cuda=arch.startswith("sm_"))
    assert site_faults(made, listing_of(made), sites) == []


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", COMBINES)
def test_sums(name: str, arch: str) -> None:
    assert sum_faults(listing_of(build(source_of(name), arch))) == []


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_lost_waits_are_found(arch: str) -> None:
    """A kernel that waits for nobody has no such loop."""
    made = build(source_of("fastkern_route_scan"), arch)
    assert wait_faults(made, listing_of(made)) == ["0 looks in loops", "0 pauses in loops"]


def test_lost_calls_are_found() -> None:
    made = build(source_of("fastkern_exchange"), "sm_90")
    sites = source_sites(kernel_of("fastkern_exchange"), cuda=True)
    more = sites + Counter({"peek < nobody": 1})
    assert site_faults(made, listing_of(made), more) == ["peek < nobody: 0, not 1"]
    kernel = listing_of(made)
    flag = min(kernel.find(r"st\.release"))
    kernel.instructions[flag] = replace(kernel.instructions[flag], text="st.global.b64 [x], y")
    count = sum(n for name, n in sites.items() if name.startswith("store_release"))
    found = f"{count - 1} of {count} calls of store_release are left"
    assert site_faults(made, kernel, sites) == [found]


def test_narrow_scopes_are_found() -> None:
    made = build(source_of("fastkern_exchange"), "sm_90")
    kernel = listing_of(made)
    for k in kernel.find(r"st\.release"):
        text = kernel.instructions[k].text.replace(".sys", ".gpu")
        kernel.instructions[k] = replace(kernel.instructions[k], text=text)
    assert {text.split()[0] for text in scope_faults(made, kernel)} == {"synchronises"}


def test_broken_orders_are_found(tmp_path: Path) -> None:
    edits = [
        edit("call.py", r"    finish_writes\(\)\n", ""),
        edit("move_rows.py", r"    finish_writes\(\)\n", ""),
        target(r'"s_waitcnt vmcnt\(0\)",', '"",'),
        access(r"value = acquired\(seen\)\n    tl\.debug_barrier\(\)", "value = acquired(seen)"),
    ]
    package, folder = copy_kernels(tmp_path, edits)
    source = source_of("fastkern_exchange", package, str(folder.parent))
    started = {arch: start(source, arch) for arch in ("sm_90", "gfx942")}
    assert order_faults(started["sm_90"].result(), (folder,)) == [EARLY_FLAG]
    found = order_faults(started["gfx942"].result(), (folder,))
    assert found[-2:] == [UNDRAINED, EARLY_READ]
