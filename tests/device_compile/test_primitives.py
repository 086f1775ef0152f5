"""Every operation of the device targets, compiled alone, is what the protocol takes it for.

That the checks find what is broken is in test_primitive_faults.py.
"""

from __future__ import annotations

import pytest

from tests.device_compile import checks
from tests.device_compile.devices import DEVICES
from tests.device_compile.listing import ptx_kernels
from tests.device_compile.primitive_checks import CHECKS, faults_of
from tests.device_compile.test_sources import listed_operations, target_text
from tests.device_compile.toolchain import (
    CUDA_ARCHES,
    HIP_ARCHES,
    PRIMITIVES,
    cuda_build,
    kernels_of,
)

ENTRY = PRIMITIVES
# Constants, asserted where they are compiled; and what is part of `keep` and of `barrier`.
WITHOUT_A_KERNEL = {"kValues", "kWide", "kept", "shared"}

# What synchronises, by its name in PTX; all others do not.
PTX = {
    "wait": ["ld.relaxed.sys.global.u64", "ld.acquire.sys.global.u64"],
    "signal": ["ld.relaxed.sys.global.u64", "st.release.sys.global.u64"],  # reads the epoch first
    "broadcast": ["ld.acquire.sys.global.u64"],
    "forget": ["st.relaxed.sys.global.u64"],
    "load_relaxed": ["ld.relaxed.sys.global.u64"],
    "load_acquire": ["ld.acquire.sys.global.u64"],
    "store_relaxed": ["st.relaxed.sys.global.u64"],
    "store_release": ["st.release.sys.global.u64"],
    "fetch_add": ["atom.acq_rel.sys.global.add.u64"],
    "compare_and_swap": ["atom.acq_rel.sys.global.cas.b64"],
}


def test_every_operation_has_a_kernel() -> None:
    operations = listed_operations(target_text("host"))
    assert set(CHECKS) == operations - WITHOUT_A_KERNEL | {"wait", "signal"}
    for arch in (*CUDA_ARCHES, *HIP_ARCHES):
        kernels = kernels_of(ENTRY, arch)
        assert set(kernels) == {f"primitive_{name}" for name in CHECKS}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *HIP_ARCHES])
def test_primitive(arch: str, name: str) -> None:
    kernel = kernels_of(ENTRY, arch)[f"primitive_{name}"]
    assert faults_of(name, kernel, DEVICES[arch]) == []


@pytest.mark.parametrize("arch", CUDA_ARCHES)
def test_orders_in_ptx(arch: str) -> None:
    """SASS does not tell an acquire from a relaxed load."""
    kernels = ptx_kernels(cuda_build(ENTRY, arch).ptx)
    for name in CHECKS:
        text = "\n".join(found.text for found in kernels[f"primitive_{name}"].instructions)
        assert checks.ptx_faults(text, PTX.get(name, [])) == [], name
