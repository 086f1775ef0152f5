"""Where a kernel calls the operations that synchronise and move rows: found in its assembly.

An instruction's frames say which operation it is of, and from where that was called. Compilers copy
code (unrolling, tails); as the frames of copies agree, they are one call site.
"""

from __future__ import annotations

import re
from collections import defaultdict

from tests.device_compile.listing import Frame, Kernel

_LOADS = r"LD\w*\.|(?:global|flat)_load"
_STORES = r"ST\w*\.|(?:global|flat)_store"
_RELEASES = r"MEMBAR|buffer_wbl2"
# What does the work of an operation. (Line tables err now and then about other instructions.)
WORK = {
    "load_relaxed": _LOADS,
    "load_acquire": _LOADS,
    "store_relaxed": _STORES,
    "store_release": rf"{_STORES}|{_RELEASES}",
    "fetch_add": rf"ATOM|global_atomic_add|{_RELEASES}",
    "compare_and_swap": rf"ATOM|global_atomic_cmpswap|{_RELEASES}",
    "barrier": r"BAR\.|s_barrier",
    "drain": r"MEMBAR|buffer_wbl2",
    "pause": r"NANOSLEEP|s_sleep",
    "copy": rf"{_LOADS}|{_STORES}",
    "team_copy": rf"{_LOADS}|{_STORES}",
    "load16": _LOADS,
    "load8": _LOADS,
    "store16": _STORES,
    "store8": _STORES,
}

# By operation and by "caller < its caller": how many call sites there are.
CallSites = dict[str, dict[str, int]]


def call_sites(kernel: Kernel) -> CallSites:
    found: dict[str, dict[str, set[tuple[Frame, ...]]]] = defaultdict(lambda: defaultdict(set))
    for instruction in kernel.instructions:
        for depth, function in enumerate(instruction.functions):
            work = WORK.get(function)
            if work and re.match(rf"(?:@\S+ )?(?:{work})", instruction.text):
                callers = instruction.frames[depth + 1 :]
                found[function][" < ".join(name for _, _, name in callers[:2])].add(callers)
                break
    return {
        operation: {name: len(sites) for name, sites in sorted(by_name.items())}
        for operation, by_name in sorted(found.items())
    }


def added(*parts: CallSites) -> CallSites:
    """All of them; of what several have, the last."""
    operations = {operation for part in parts for operation in part}
    return {
        operation: {name: n for part in parts for name, n in part.get(operation, {}).items()}
        for operation in operations
    }


def differences(found: CallSites, expected: CallSites) -> list[str]:
    """What differs, a line for each call site: found and expected."""
    return [
        f"{operation} < {name}: {here.get(name, 0)}, not {there.get(name, 0)}"
        for operation in sorted({*found, *expected})
        for here, there in [(found.get(operation, {}), expected.get(operation, {}))]
        for name in sorted({*here, *there})
        if here.get(name, 0) != there.get(name, 0)
    ]
