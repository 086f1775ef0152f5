"""The checks of operations find what is broken, and nothing else."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from tests.device_compile.listing import Kernel
from tests.triton_compile import releases
from tests.triton_compile.breaks import BREAKS, HIP_BREAKS, Broken, copy_kernels
from tests.triton_compile.builds import PRIMITIVES, Build, Source, build, start
from tests.triton_compile.checks import extern_faults, narrow_faults, spill_faults, sum_faults
from tests.triton_compile.devices import DEVICES
from tests.triton_compile.listing import kernel_of
from tests.triton_compile.primitive_checks import CHECKS, EARLY_READ, after_acquire

FAULTY = "tests.triton_compile.faulty"
# Of each broken variant the devices that suffer from it. On AMD a release brings a barrier of its
# own, and one thread (3.9) or one wave raises a flag whatever is asked for; gfx90a has no scopes.
ONLY_CUDA = ("no-barrier", "all-raise")
NOT_GFX90A = ("narrow", "relaxed")
CASES = [
    *(("sm_90", name) for name in BREAKS),
    *(("gfx942", name) for name in BREAKS if name not in (*ONLY_CUDA, "relaxed")),
    *(("gfx942", name) for name in HIP_BREAKS),
    *(("gfx90a", name) for name in HIP_BREAKS),
]


def broken(name: str) -> Broken:
    return (BREAKS | HIP_BREAKS)[name]


@pytest.fixture(scope="module")
def builds(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], tuple[dict[str, Future[Build]], str]]:
    """All cases, two at a time: by operation, and the folder of the sources."""
    copies = {
        name: copy_kernels(tmp_path_factory.mktemp("broken"), broken(name).edits)
        for name in dict.fromkeys(name for _, name in CASES)
    }
    started = {}
    for arch, name in CASES:
        package, folder = copies[name]
        found = {
            each: start(Source(f"{package}.primitives", each, str(folder.parent)), arch)
            for each in (*broken(name).faults, *broken(name).sound)
        }
        started[arch, name] = found, str(folder)
    return started


def faults_of(made: Build, name: str, folder: str) -> list[str]:
    kernel = kernel_of(made, (Path(folder),))
    return CHECKS[name](kernel, DEVICES[made.arch], made)


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_broken_operations_are_found(
    arch: str, name: str, builds: dict[tuple[str, str], tuple[dict[str, Future[Build]], str]]
) -> None:
    made, folder = builds[arch, name]
    for each, begins in broken(name).faults.items():
        found = faults_of(made[each].result(), each, folder)
        assert any(text.startswith(begins) for text in found), (each, found)
    for each in broken(name).sound:
        assert faults_of(made[each].result(), each, folder) == []


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_wait_that_only_loads_vanishes(arch: str) -> None:
    """Whoever reads the source sees a wait, whoever reads the assembly none: hence `peek`."""
    vanished = kernel_of(build(Source(FAULTY, "vanished_wait"), arch))
    assert not vanished.in_loops(range(len(vanished.instructions)))
    assert not vanished.find(DEVICES[arch].look)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_volatile_load_is_done_by_each_thread(arch: str) -> None:
    made = build(Source(FAULTY, "kept_wait"), arch)
    kernel, device = kernel_of(made), DEVICES[arch]
    stays = kernel.in_loops(kernel.find(r"ld\.volatile\.global|global_load"))
    assert bool(stays) == (
        arch == "sm_90" or made.triton >= (3, 7)
    )  # before, AMD's is not volatile
    assert not kernel.find(device.write_shared)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_an_acquire_that_nobody_uses(arch: str) -> None:
    made = build(Source(FAULTY, "unused_acquire"), arch)
    kernel, device = kernel_of(made), DEVICES[arch]
    acquires = kernel.find(device.acquire if arch == "sm_90" else "buffer_inv")
    loads = kernel.find(device.load)
    handed_on = acquires and not kernel.can_miss([kernel.find(device.barrier)], loads, acquires)
    assert bool(handed_on) == (made.triton >= releases.KEEPS_UNUSED_ACQUIRES)
    if arch == "gfx942":  # and here its wait is missing in any release
        assert EARLY_READ in after_acquire(kernel, device, acquires, loads)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_narrow_products_are_found(arch: str) -> None:
    made = build(Source(FAULTY, "narrow_row"), arch)
    assert [text.split()[0] for text in narrow_faults(made.ttir)] == ["arith.muli"] * 2


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_fused_sums_are_found(arch: str) -> None:
    kernel = kernel_of(build(Source(FAULTY, "fused_sum"), arch))
    assert [text.split(":")[0] for text in sum_faults(kernel)] == ["fused"]
    (k,) = kernel.find(r"fma|v_\w*fma")
    flushing = replace(kernel.instructions[k], text="add.ftz.f32 %r1, %r2, %r3")
    assert sum_faults(Kernel([flushing], [[]])) == ["flushes: add.ftz.f32 %r1, %r2, %r3"]


def test_spills_and_externs_are_found() -> None:
    made = replace(build(Source(PRIMITIVES, "store_8"), "sm_90"), triton=(3, 9))
    assert spill_faults(replace(made, usage="REG:8 STACK:16 LOCAL:0")) == ["STACK 16"]
    assert spill_faults(replace(made, usage="")) == ["nothing is said of the stack"]
    sass = made.sass.replace("STG.E.64", "STL.64")
    assert spill_faults(replace(made, sass=sass))[0].startswith("STL.64")
    text = made.text.replace(".visible .entry", ".extern .func send\n.visible .entry")
    assert extern_faults(replace(made, text=text)) == ["not resolved: .extern .func send"]
    made = build(Source(PRIMITIVES, "store_8"), "gfx942")
    text = made.text.replace(".vgpr_spill_count: 0", ".vgpr_spill_count: 3")
    assert spill_faults(replace(made, text=text)) == ["vgpr_spill_count [3]"]
