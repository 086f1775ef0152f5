"""What is done to the sources of static exchanges, and what must be found then."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.device_compile.order_checks import EARLY_FLAG, EARLY_READ, UNDRAINED
from tests.device_compile.toolchain import Edit

CUDA, HIP = "kernels/target/cuda.h", "kernels/target/hip.h"
MAPPED = "kernels/transport/mapped.h"
ENTER, STATIC = "kernels/body/enter.h", "kernels/body/static.h"


@dataclass(frozen=True)
class Broken:
    """Several breaks at once, where they do not hide each other.

    faults: in both kernels that enter a call, how each begins. direct: in the one that plans
    besides. sites: of call sites, likewise.
    """

    arches: tuple[str, ...]
    edits: list[Edit]
    faults: list[str]
    direct: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    direct_sites: list[str] = field(default_factory=list)


def no_barrier(path: str, before: str, after: str = "") -> Edit:
    """Without the barrier between these lines."""
    return Edit(path, rf"({before}\n) +target\.barrier\(\);\n( *{after})", r"\1\2")


def no_drain(after: str) -> Edit:
    """Without the drain before the barrier that is before this line."""
    return Edit(ENTER, rf" +target\.drain\(\);.*\n( +target\.barrier\(\);\n +{after})", r"\1")


OWN_ROW, COPIES, LAST = r"for \(u32 k = 1", r"for \(u32 j = 1 \+ target\.lane", "return target"
NO_RELEASE = "a flag without a release"
NO_ACQUIRE = Edit(MAPPED, r" && target\.load_acquire\(flag\) >= stamp", "")
UNACQUIRED = "load_acquire < seen_at < seen: 0, "
PAST_COHERENCE = r"\1 __ldg(&counts_of(r)[keys()])"
ARRAY = Edit(  # in a lane's own memory
    STATIC,
    r"if \(target\.lane\(\) == 0\) (\*fixed_\.entries =) board\(\)\.entry;",
    r"u64 few[64]; for (u32 k = 0; k < 64; ++k) few[k] = counts_of(k)[0];"
    r"\1 few[target.lane() % 64];",
)
MEMORY = ["bad access: STL", "bad access: LDL"]
BREAKS = {
    "no-barriers": Broken(
        ("sm_90", "gfx942"),
        [
            no_barrier(ENTER, r"target\.drain\(\);", OWN_ROW),
            no_barrier(ENTER, r"target\.drain\(\);", COPIES),
            no_barrier(ENTER, r"target\.drain\(\);.*", LAST),
            Edit(  # each lane goes on by itself, once lane 0 has seen the flag
                ENTER,
                r"target\.template broadcast<u32>\(\[.*\{\s*word = (await.*?);\s*\}\)",
                r"target.lane() != 0 || \1",
            ),
            no_barrier(STATIC, r"fixed\.outcome\[\d\] = 0;\n    \}"),
            no_barrier(STATIC, r"refuse\(r, bad - 1\);"),
            no_barrier(STATIC, r"route_count\(route_, unit\);"),
            no_barrier(STATIC, r"route_scan\(route_, key\);"),
            no_barrier(STATIC, r"= rows;\n        \}"),
            no_barrier(STATIC, r"refuse\(route_\.owner\[e\], kTooManyRows\);\n        \}"),
            no_barrier(STATIC, r"preparation\.bind\(\);"),
        ],
        [
            "a row may be copied while lanes still write it",
            EARLY_FLAG,
            EARLY_READ,
            "lane 0 may look for an abort while others still wait",
            "refused may read what refuse still writes",
            "lanes may read shared memory before it is written",
        ],
        [
            "route_scan may read what route_count still writes",
            "enter may read what route_scan still writes",
            "route_fill may read what bind still writes",
        ],
        [
            "barrier < enter_call < enter: 0, not 3",
            "barrier < broadcast < enter_call: 1, not 2",
            "barrier < enter < prepare_dispatch: 0, not 1",
        ],
        [
            "barrier < count < prepare_dispatch: 0, not 2",
            "barrier < bind < prepare_dispatch: 0, not 2",
        ],
    ),
    "no-drains": Broken(
        ("gfx942",),
        [no_drain(COPIES), no_drain(LAST)],
        [UNDRAINED, EARLY_READ],
        sites=["drain < enter_call < enter: 1, not 3"],
    ),
    "own-row-undrained": Broken(
        ("gfx90a",),
        [no_drain(OWN_ROW)],
        [UNDRAINED],
        sites=["drain < enter_call < enter: 2, not 3"],
    ),
    "relaxed-flags": Broken(
        ("sm_90", "gfx942"),
        [Edit(MAPPED, r"target_\.store_release", "target_.store_relaxed")],
        ["no flag"],
        sites=[
            f"{operation} < signal < {caller}: {count}"
            for caller in ("enter_call", "put")
            for operation, count in (("store_release", "0, not 1"), ("store_relaxed", "1, not 0"))
        ],
    ),
    "reads": Broken(
        ("sm_90",),
        [
            Edit(CUDA, r"st\.release", "st.relaxed"),
            NO_ACQUIRE,
            Edit(STATIC, r"(const u64 bad =) counts_of\(r\)\[keys\(\)\]", PAST_COHERENCE),
            ARRAY,
        ],
        [NO_RELEASE, "no acquire", "bad access: LDG.E.64.CONSTANT", *MEMORY],
        sites=[UNACQUIRED],
    ),
    "hip-reads": Broken(
        ("gfx942",),
        [
            Edit(HIP, r"(void store_release\(.*\{)\n +write_back\(\);", r"\1"),
            NO_ACQUIRE,
            ARRAY,
        ],
        [NO_RELEASE, "no acquire", "bad access: scratch_"],
        sites=[UNACQUIRED],
    ),
}
