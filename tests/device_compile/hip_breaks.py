"""The HIP target broken in several places at once, each of which some operations suffer from."""

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

HIP = "kernels/target/hip.h"


def hip(pattern: str, replacement: str) -> Edit:
    return Edit(HIP, pattern, replacement)


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
