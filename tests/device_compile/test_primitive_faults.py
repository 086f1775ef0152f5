"""The checks of primitives find what is broken, and nothing else."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tests.device_compile.breaks import UNSEEN, Broken
from tests.device_compile.cuda_breaks import CUDA_BREAKS
from tests.device_compile.devices import DEVICES
from tests.device_compile.hip_breaks import HIP_BREAKS
from tests.device_compile.listing import Kernel, hip_kernels
from tests.device_compile.primitive_checks import CHECKS, faults_of
from tests.device_compile.toolchain import (
    PRIMITIVES,
    ROOT,
    copy_sources,
    hip_assembly,
    start_kernels_from,
)

Kernels = Future[dict[str, Kernel]]


CASES = [
    *(("sm_90", name) for name in CUDA_BREAKS),
    *(("gfx942", name) for name in HIP_BREAKS),
    # Where other instructions acquire and release.
    *(("gfx90a", name) for name in ("vanished-wait", "relaxed", "no-barrier", "early")),
]


def broken(arch: str, name: str) -> Broken:
    return (CUDA_BREAKS if arch == "sm_90" else HIP_BREAKS)[name]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Kernels]:
    """All cases, two at a time."""
    return {
        (arch, name): start_kernels_from(
            PRIMITIVES, arch, copy_sources(tmp_path_factory.mktemp(name), broken(arch, name).edits)
        )
        for arch, name in CASES
    }


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_broken_primitives_are_found(
    arch: str, name: str, kernels: dict[tuple[str, str], Kernels]
) -> None:
    made = kernels[arch, name].result()
    found = {each: faults_of(each, made[f"primitive_{each}"], DEVICES[arch]) for each in CHECKS}
    faults = {each: text for each, text in found.items() if text}
    expected = broken(arch, name).faults
    assert faults.keys() == expected.keys(), faults
    for each, fault in expected.items():
        assert any(text.startswith(fault) for text in faults[each]), (each, faults[each])


def test_a_dropped_wait_is_found() -> None:
    """In the listing, since the compiler here keeps the wait for a write-back by itself."""
    lines = hip_assembly(PRIMITIVES, "gfx942").splitlines()
    kept = [line for line in lines if line.strip() != "s_waitcnt vmcnt(0)"]
    kernels = hip_kernels("\n".join(kept), ROOT)
    faults = {
        name: faults_of(name, kernels[f"primitive_{name}"], DEVICES["gfx942"]) for name in CHECKS
    }
    assert faults["store_release"] == [UNSEEN]
    assert faults["drain"] == ["stores are on their way"]
    assert faults["signal"][0].startswith("a wave whose stores are on their way")
