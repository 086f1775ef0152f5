"""The CUDA target broken in several places at once, each of which some operations suffer from."""

from __future__ import annotations

from tests.device_compile.breaks import (
    ALL_LANES,
    NARROW_COPY,
    NO_LOAD,
    NO_OPERATION,
    NO_STORE,
    NOT_ACQUIRED,
    NOT_WRITTEN,
    STALE,
    UNSEEN,
    Broken,
    body,
    no_loop,
)
from tests.device_compile.toolchain import Edit

CUDA = "kernels/target/cuda.h"


def cuda(pattern: str, replacement: str) -> Edit:
    return Edit(CUDA, pattern, replacement)


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
