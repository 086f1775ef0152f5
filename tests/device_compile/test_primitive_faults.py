"""The checks of primitives find what is broken, and nothing else.

A target is broken in several places at once, each of which some operations suffer from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.device_compile.devices import DEVICES
from tests.device_compile.listing import hip_kernels
from tests.device_compile.primitive_checks import CHECKS, faults_of
from tests.device_compile.toolchain import (
    PRIMITIVES,
    ROOT,
    Edit,
    copy_sources,
    hip_assembly,
    kernels_from,
)

CUDA = "kernels/target/cuda.h"
HIP = "kernels/target/hip.h"
COPY = "kernels/target/block_copy.h"

UNSEEN = "what came before may not be visible"
STALE = "what follows may see what was cached before"
NO_LOAD = "no load at system scope"
NO_STORE = "no store at system scope"
NO_OPERATION = "no operation at system scope"
NOT_ACQUIRED = "lanes read data before it is acquired for them"
NOT_WRITTEN = "reads what may not be written yet"


@dataclass(frozen=True)
class Broken:
    edits: list[Edit]
    faults: dict[str, str]  # how one begins, by operation; all other operations have none


def cuda(pattern: str, replacement: str) -> Edit:
    return Edit(CUDA, pattern, replacement)


def hip(pattern: str, replacement: str) -> Edit:
    return Edit(HIP, pattern, replacement)


def body(path: str, function: str, statements: str) -> Edit:
    """Another body for a function of a target."""
    return Edit(path, rf"(\b{function}\(.*\{{)[\s\S]*?\n    \}}", rf"\1 {statements} }}")


def no_loop(width: int, times: int) -> str:
    return f"no loop of {times} loads and stores of {width} bytes"


ALL_LANES = Edit(
    "kernels/body/items.h",
    r"if \(call\.target\.lane\(\) == 0\) (call\.transport\.signal\(rank)",
    r"\1",
)
NARROW_COPY = Edit(COPY, r"skew % 16 == 0", "skew % 16 == 16")

CUDA_BREAKS = {
    # Flags read as ordinary memory: once, before the loop, if at all.
    "vanished-wait": Broken(
        [body(CUDA, f"load_{order}", "return *p;") for order in ("relaxed", "acquire")],
        {
            "wait": "no poll in a loop",
            "broadcast": "no acquire",
            **dict.fromkeys(("load_relaxed", "load_acquire"), NO_LOAD),
        },
    ),
    "relaxed": Broken(
        [
            cuda(r"ld\.acquire", "ld.relaxed"),
            cuda(r"st\.release", "st.relaxed"),
            cuda(r"acq_rel\.sys\.global\.add", "acquire.sys.global.add"),
            cuda(r"acq_rel\.sys\.global\.cas", "acquire.sys.global.cas"),
        ],
        {
            "wait": "reads what was cached before the flag was seen",
            "signal": "a flag without a release",
            "broadcast": NOT_ACQUIRED,
            "load_acquire": STALE,
            **dict.fromkeys(("store_release", "fetch_add", "compare_and_swap"), UNSEEN),
        },
    ),
    "narrow": Broken(
        [
            cuda(r"ld\.relaxed\.sys", "ld.relaxed.cta"),
            cuda(r"ld\.acquire\.sys", "ld.acquire.gpu"),
            cuda(r"st\.relaxed\.sys", "st.relaxed.cta"),
            cuda(r"st\.release\.sys", "st.release.gpu"),
            cuda(r"acq_rel\.sys\.global\.add", "acq_rel.gpu.global.add"),
            cuda(r"acq_rel\.sys\.global\.cas", "acq_rel.cta.global.cas"),
        ],
        {
            "wait": "no poll in a loop",
            "signal": "no flag",
            "broadcast": "no acquire",
            **dict.fromkeys(("load_relaxed", "load_acquire"), NO_LOAD),
            **dict.fromkeys(("store_relaxed", "store_release"), NO_STORE),
            **dict.fromkeys(("fetch_add", "compare_and_swap"), NO_OPERATION),
        },
    ),
    "no-barrier": Broken(
        [cuda(r"__syncthreads\(\);", "")],
        {
            "signal": "a flag without a barrier",
            "broadcast": "lanes read the slot before it is written",
            **dict.fromkeys(("barrier", "share"), NOT_WRITTEN),
            "keep": "writes while others may still read",
        },
    ),
    "non-coherent": Broken(
        [
            cuda(r"ld\.global\.v4", "ld.global.nc.v4"),
            cuda(r"ld\.global\.u32", "ld.global.nc.u32"),
            cuda(r"ld\.global\.u8", "ld.global.nc.u8"),
            cuda(r"return global\(p\);", "__builtin_assume(__isGlobal(p)); return p;"),
        ],
        dict.fromkeys(("copy", "team_copy"), "bad access: LDG.E.U8.CONSTANT")
        | {"load16": "bad access: LDG.E.128.CONSTANT"},
    ),
    "generic": Broken(
        [
            cuda(r"st\.global\.v4", "st.v4"),
            cuda(r"__builtin_assume\(__isGlobal\(p\)\);", ""),
        ],
        dict.fromkeys(("copy", "team_copy", "store16"), "bad access: ST.E.128")
        | dict.fromkeys(("constant", "forget", "global", "share"), "bad access: LD.E"),
    ),
    "lanes": Broken(
        [
            cuda(r"%%tid\.x", "%%tid.y"),
            cuda(r"blockDim\.x", "blockDim.y"),
            cuda(r"blockIdx\.x", "blockIdx.y"),
            cuda(r"kWarp = 32", "kWarp = 16"),
            cuda(r"return __popc\(mask & .*\);", "return 0;"),
            cuda(r"(u32 found =) __shfl_sync\(.*\);", r"\1 value;"),
            cuda(r"return __shfl_sync\(.*\);", "return value;"),
        ],
        {
            **dict.fromkeys(("lane", "num_lanes", "block"), "0 x "),
            **dict.fromkeys(("team", "num_teams", "team_lane", "team_lanes"), "0 x "),
            "team_rank": "1 x POPC, not 2",
            **dict.fromkeys(("team_pick", "team_read"), "0 x SHFL"),
        },
    ),
    "early": Broken(
        [
            ALL_LANES,
            cuda(r"turn_ \^= 1", "turn_"),
            cuda(r"barrier\(\);\n( +return record)", r"\1"),
            cuda(r"(void keep\(const T& value\) const \{)\n +barrier\(\);", r"\1"),
            cuda(r"acq_rel\.sys\.global\.add", "release.sys.global.add"),
            cuda(r"acq_rel\.sys\.global\.cas", "release.sys.global.cas"),
        ],
        {
            "signal": "every lane raises the flag",
            "broadcast": "1 slots for two broadcasts",
            "share": NOT_WRITTEN,
            "keep": "writes while others may still read",
            **dict.fromkeys(("fetch_add", "compare_and_swap"), STALE),
        },
    ),
    "slow": Broken(
        [
            NARROW_COPY,
            cuda(r"(void drain\(\) const \{)", r"\1 __threadfence_system(); "),
            cuda(r"__nanosleep\(.*\);", ""),
        ],
        {
            "copy": no_loop(16, 4),
            "team_copy": no_loop(16, 2),
            "drain": "orders already: MEMBAR",
            "wait": "no sleep in a loop",
            "pause": "0 x NANOSLEEP",
        },
    ),
    "wrong": Broken(
        [
            cuda(r"kWarp, 4>\(team", "kWarp, 2>(team"),
            cuda(r"kWarp, 2>\(0", "kWarp, 4>(0"),
            cuda(r"%%globaltimer", "%%clock64"),
            cuda(r"__dmul_rn\(a, b\)", "a * b"),
        ],
        {
            "copy": no_loop(8, 4),
            "team_copy": no_loop(1, 2),
            "now_ns": "0 x CS2R",
            "product": "fused DFMA",
        },
    ),
}

HIP_BREAKS = {
    "vanished-wait": Broken(
        [
            body(HIP, f"load_{order}", "return *HipMemory::global(p);")
            for order in ("relaxed", "acquire")
        ],
        {
            "wait": "no poll in a loop",
            "broadcast": "no acquire",
            **dict.fromkeys(("load_relaxed", "load_acquire"), NO_LOAD),
        },
    ),
    "relaxed": Broken(
        [
            body(HIP, "load_acquire", "return load_relaxed(p);"),
            *(
                hip(rf"({operation}\(.*\{{)\n +write_back\(\);", r"\1")
                for operation in ("store_release", "fetch_add", "compare_and_swap")
            ),
        ],
        {
            "wait": "reads what was cached before the flag was seen",
            "signal": "a flag without a release",
            "broadcast": NOT_ACQUIRED,
            "load_acquire": STALE,
            **dict.fromkeys(("store_release", "fetch_add", "compare_and_swap"), UNSEEN),
        },
    ),
    "narrow": Broken(
        [hip(r"= __HIP_MEMORY_SCOPE_SYSTEM", "= __HIP_MEMORY_SCOPE_AGENT")],
        {
            "wait": "no poll in a loop",
            "signal": "no flag",
            "broadcast": "no acquire",
            **dict.fromkeys(("load_relaxed", "load_acquire"), NO_LOAD),
            **dict.fromkeys(("store_relaxed", "store_release"), NO_STORE),
            **dict.fromkeys(("fetch_add", "compare_and_swap"), NO_OPERATION),
            "forget": "no second load",
        },
    ),
    "narrow-write-back": Broken(
        [hip(r'RELEASE, ""', 'RELEASE, "agent"')],
        {
            "signal": "a wave whose stores are on their way comes to the barrier",
            "drain": "stores are on their way",
            **dict.fromkeys(("store_release", "fetch_add", "compare_and_swap"), UNSEEN),
        },
    ),
    "no-barrier": Broken(
        [hip(r"__builtin_amdgcn_s_barrier\(\);", "")],
        {
            "signal": "a flag without a barrier",
            "broadcast": "lanes read the slot before it is written",
            "barrier": NOT_WRITTEN,
        },
    ),
    "no-fence": Broken(
        [hip(r'__builtin_amdgcn_fence\(__ATOMIC_RELEASE, "workgroup"\);', "")],
        {
            "broadcast": "lanes read the slot before it is written",
            "barrier": NOT_WRITTEN,
        },
    ),
    "generic": Broken(
        [
            hip(r"\*global\((reinterpret_cast<const Words\*>\(p\))\)", r"*\1"),
            hip(r"\*global\((reinterpret_cast<Words\*>\(p\))\)", r"*\1"),
            body(HIP, "static __device__ const T\\* constant", "return p;"),
            body(HIP, "static __device__ T\\* global", "return p;"),
        ],
        dict.fromkeys(("copy", "team_copy"), "bad access: flat_load_dwordx4")
        | {"load16": "bad access: flat_load", "store16": "bad access: flat_store"}
        | dict.fromkeys(("global", "product"), "bad access: flat_load")
        | dict.fromkeys(("constant", "share"), "not by scalar instructions")
        | {"forget": "bad access: flat_load"},
    ),
    "lanes": Broken(
        [
            hip(r"workgroup_size_x", "workgroup_size_y"),
            hip(r"kWave = 64", "kWave = 32"),
            hip(r"return __builtin_popcountll\(mask & .*\);", "return 0;"),
            hip(r"return __builtin_amdgcn_readlane\(value, __bu.*", "return value;"),
            hip(r"return __builtin_amdgcn_readlane\(value, lane\);", "return value + lane;"),
            hip(r"return __builtin_amdgcn_readfirstlane\(value\);", "return value;"),
        ],
        {
            **dict.fromkeys(("num_lanes", "team", "num_teams", "team_lane", "team_lanes"), "0 x "),
            "team_rank": "0 x v_bcnt",
            **dict.fromkeys(("team_pick", "team_read"), "0 x v_readlane"),
            "uniform": "0 x v_readfirstlane",
        },
    ),
    "early": Broken(
        [
            hip(r"void drain\(\) const \{.*\}", "void drain() const {}"),
            hip(r"wait_for_memory\(\);  // the.*", ""),
            hip(r"v, __ATOMIC_ACQUIRE, kSystem", "v, __ATOMIC_RELAXED, kSystem"),
            hip(r"__ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE", "__ATOMIC_RELAXED, __ATOMIC_RELAXED"),
            body(HIP, "void forget", "(void)p;"),
        ],
        {
            "signal": "a wave whose stores are on their way comes to the barrier",
            "drain": "stores are on their way",
            "broadcast": NOT_ACQUIRED,
            **dict.fromkeys(("fetch_add", "compare_and_swap"), STALE),
            "forget": "no second load",
        },
    ),
    "slow": Broken(
        [NARROW_COPY, ALL_LANES, body(HIP, "void pause", "(void)rounds;")],
        {
            "copy": no_loop(16, 4),
            "team_copy": no_loop(16, 2),
            "signal": "every lane raises the flag",
            "wait": "no sleep in a loop",
            "pause": "0 x s_sleep 1$",
        },
    ),
    "wrong": Broken(
        [
            hip(r"kWave, 4>", "kWave, 2>"),
            hip(r"turn_ \^= 1", "turn_"),
            hip(r"__builtin_readsteadycounter", "__builtin_readcyclecounter"),
            hip(r"(float product\(.*\n)#pragma.*\n", r"\1"),
        ],
        {
            "copy": no_loop(8, 4),
            "broadcast": "1 slots for two broadcasts",
            "now_ns": "0 x s_memrealtime",
            "product": "fused v_fma",
        },
    ),
}


@pytest.mark.parametrize("name", CUDA_BREAKS)
def test_broken_cuda_primitives_are_found(name: str, tmp_path: Path) -> None:
    check_faults(CUDA_BREAKS[name], "sm_90", tmp_path)


@pytest.mark.parametrize("name", HIP_BREAKS)
def test_broken_hip_primitives_are_found(name: str, tmp_path: Path) -> None:
    check_faults(HIP_BREAKS[name], "gfx942", tmp_path)


@pytest.mark.parametrize("name", ["vanished-wait", "relaxed", "no-barrier", "early"])
def test_broken_gfx90a_primitives_are_found(name: str, tmp_path: Path) -> None:
    """Where other instructions acquire and release."""
    check_faults(HIP_BREAKS[name], "gfx90a", tmp_path)


def check_faults(broken: Broken, arch: str, folder: Path) -> None:
    kernels = kernels_from(PRIMITIVES, arch, copy_sources(folder, broken.edits))
    found = {name: faults_of(name, kernels[f"primitive_{name}"], DEVICES[arch]) for name in CHECKS}
    faults = {name: text for name, text in found.items() if text}
    assert faults.keys() == broken.faults.keys(), faults
    for name, fault in broken.faults.items():
        assert any(text.startswith(fault) for text in faults[name]), (name, faults[name])


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
