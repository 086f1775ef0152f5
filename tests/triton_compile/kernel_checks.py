"""What must hold on the ways through a whole kernel. Checks return the faults that they find."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.device_compile.listing import Kernel
from tests.triton_compile.builds import Build
from tests.triton_compile.call_sites import ttir_sites
from tests.triton_compile.devices import CUDA, DEVICES
from tests.triton_compile.listing import SOURCES, functions_of, kernel_of
from tests.triton_compile.llir import AMD, llir_kernel
from tests.triton_compile.primitive_checks import missing

EARLY_FLAG = "a flag may be raised while threads still write rows"
UNDRAINED = "a flag may be raised before a wave's rows are visible"
EARLY_READ = "threads may read rows for which no flag has been acquired"
# Their flags vouch for no rows: ready, credit, the epoch.
WITHOUT_ROWS = {"_post_start_flags", "give_credit", "_leave"}
CUDA_ORDERS = {
    name: getattr(CUDA, name) for name in ("barrier", "flag", "acquire", "load", "store")
}
# By operation what is left of each call site when all is compiled, on NVIDIA.
_LEFT = {
    "peek": "look",
    "acquire": "acquire",
    "add_word": "add",
    "swap_if": "swap",
    "store_release": "flag",
    "now_ns": "clock",
    "pause": "sleep",
}


def wait_faults(build: Build, kernel: Kernel) -> list[str]:
    """The loop that waits is still there: it reads tickets, then flags, again and again, and rests.

    Compilers have removed a loop around a plain load.
    """
    device = DEVICES[build.arch]
    looks, sleeps = (kernel.in_loops(kernel.find(p)) for p in (device.look, device.sleep))
    found = {"looks": len(looks), "pauses": len(sleeps)}
    least = {"looks": 2, "pauses": 1}
    return [f"{n} {what} in loops" for what, n in found.items() if n < least[what]]


def order_faults(build: Build, sources: tuple[Path, ...] = SOURCES) -> list[str]:
    """Rows are written, then made visible, then a barrier, then a flag; a flag is acquired, then a
    barrier, then rows are read. In PTX, or in LLVM's form for AMD.

    sources: the folders of what was compiled.
    """
    cuda = build.arch.startswith("sm_")
    kernel = kernel_of(build, sources) if cuda else llir_kernel(build.llir, sources)
    patterns = CUDA_ORDERS if cuda else AMD

    def rows(pattern: str) -> set[int]:
        names = functions_of(sources[0] / "copy.py")
        return {k for name in names for k in kernel.find(pattern, name)}

    stores, loads = rows(patterns["store"]), rows(patterns["load"])
    flags = {k for k in kernel.find(patterns["flag"]) if not _says_nothing_of_rows(kernel, k)}
    acquires, barriers = kernel.find(patterns["acquire"]), kernel.find(patterns["barrier"])
    faults = missing(stores_of_rows=stores, loads_of_rows=loads, flag=flags, acquire=acquires)
    if kernel.can_miss([barriers], flags, stores):
        faults.append(EARLY_FLAG)
    if not cuda and kernel.can_miss([kernel.find(patterns["drain"]), barriers], flags, stores):
        faults.append(UNDRAINED)
    handed_on = [] if cuda else [kernel.find(patterns["hand_on"])]
    if kernel.can_miss([*handed_on, barriers], loads, acquires):
        faults.append(EARLY_READ)
    return faults


def _says_nothing_of_rows(kernel: Kernel, flag: int) -> bool:
    return bool(set(kernel.instructions[flag].functions) & WITHOUT_ROWS)


def site_faults(build: Build, kernel: Kernel, sites: Counter[str]) -> list[str]:
    """Triton has compiled every call of the sources, and on NVIDIA something is left of each.

    On AMD equal ends of branches are merged: what is left there, order_faults judges.
    """
    compiled = ttir_sites(build.ttir)
    faults = [
        f"{name}: {compiled[name]}, not {sites[name]}"
        for name in sorted(compiled | sites)
        if compiled[name] != sites[name]
    ]
    if build.arch.startswith("sm_"):
        wanted: Counter[str] = Counter()
        for name, count in compiled.items():
            wanted[name.split(" < ")[0]] += count
        for operation, kind in _LEFT.items():
            left = len(kernel.find(getattr(CUDA, kind)))
            if left < wanted[operation]:
                faults.append(f"{left} of {wanted[operation]} calls of {operation} are left")
    return faults


def scope_faults(build: Build, kernel: Kernel) -> list[str]:
    """NVIDIA: whatever synchronises does so at system scope, and was asked for by its name."""
    if not build.arch.startswith("sm_"):
        return []
    known = "|".join(getattr(CUDA, kind) for kind in ("look", "acquire", "add", "swap", "flag"))
    orders = r"(?:ld|st|atom|red)\S*\.(?:acquire|release|relaxed|acq_rel|volatile|gpu|cta)\S* "
    found = kernel.find(rf"{orders}|fence|membar|red\.|atom\.") - kernel.find(known)
    found -= kernel.find(r"ld\.volatile\.global", "claims_of")  # at system scope: by each thread
    return [f"synchronises otherwise: {kernel.instructions[k].text}" for k in sorted(found)]
