"""What must hold in every kernel, whole or of one operation. Checks return the faults they find."""

from __future__ import annotations

import re

from tests.device_compile.listing import Kernel, sass_kernels
from tests.device_compile.toolchain import ROOT
from tests.triton_compile.builds import Build
from tests.triton_compile.devices import DEVICES
from tests.triton_compile.listing import SOURCES, function_at, ttir_frames, ttir_places

# Positions in a tile of at most 32 choices are computed in 32 bits.
_SMALL = {"read_choices"}
# 32-bit arithmetic that may wrap.
_NARROW = r"arith\.(?:addi|subi|muli|shli)"


def general_faults(build: Build, kernel: Kernel) -> list[str]:
    bad = [f"bad access: {text}" for text in kernel.texts(DEVICES[build.arch].bad)]
    return [*spill_faults(build), *bad, *extern_faults(build), *narrow_faults(build.ttir)]


def spill_faults(build: Build) -> list[str]:
    """No register lies in memory: no spills, no arrays of a thread."""
    if build.arch.startswith("sm_"):
        fields = re.findall(r"\b(STACK|LOCAL):(\d+)", build.usage)
        if not fields:
            return ["nothing is said of the stack"]
        (machine,) = sass_kernels(build.sass, ROOT).values()
        faults = [f"{name} {value}" for name, value in fields if int(value) != 0]
        return faults + machine.texts(r"LDL|STL|LD\S*\.CONSTANT")
    names = ("vgpr_spill_count", "private_segment_fixed_size")
    return [f"{name} {found}" for name in names if (found := _said(build, name)) != [0]]


def scalar_spills(build: Build) -> int:
    """AMD: scalar registers that lie in lanes of vector ones, which costs instructions."""
    return 0 if build.arch.startswith("sm_") else sum(_said(build, "sgpr_spill_count"))


def _said(build: Build, name: str) -> list[int]:
    found = re.findall(rf"^ +\.{name}: +(\d+)$", build.text, re.MULTILINE)
    return [int(value) for value in found]


def registers_of(build: Build) -> int:
    """Of a thread; of AMD the vector registers."""
    if not build.arch.startswith("sm_"):
        return _said(build, "vgpr_count")[0]
    (count,) = re.findall(r"\bREG:(\d+)", build.usage)
    return int(count)


def extern_faults(build: Build) -> list[str]:
    """Nothing is left to be linked but the shared memory of a launch."""
    externs = re.findall(r"^\s*\.extern\b.*", build.text, re.MULTILINE)
    return [f"not resolved: {text}" for text in externs if "global_smem[]" not in text]


def narrow_faults(ttir: str) -> list[str]:
    """F11: nothing that was computed in 32 bits is widened afterwards.

    Widened may be what was loaded, compared, chosen or counted: program numbers, ranges.
    """
    places = ttir_places(ttir)
    faults, made = [], {}  # by name, what it is: the last before, as regions use names again
    for line in ttir.splitlines():
        if widened := re.search(r"= arith\.ext[su]i (%[\w#]+) : \S*i32>? to ", line):
            operation, where = made.get(widened[1], ("", ""))
            if re.fullmatch(_NARROW, operation) and where not in _SMALL:
                faults.append(
                    f"{operation} of 32 bits, widened afterwards: {widened[1]} in {where}"
                )
        if defined := re.match(r" *(%[\w#]+)(?::\d+)? = ([\w.]+).* loc\((.*)\)", line):
            frames = ttir_frames(defined[3], places)
            made[defined[1]] = defined[2], function_at(*frames[0], SOURCES)
    return faults


def sum_faults(kernel: Kernel) -> list[str]:
    """Products are rounded before they are added, and small numbers stay what they are.

    What AMD divides whole numbers by, with 2^32 and -2^32 as factors, is none of it.
    """
    fused = r"fma\.rn\.\S*f(?:32|64)|v_\w*(?:fma|mac|mad)\w*f(?:32|64)(?!.*0x[4c]f800000)"
    faults = [f"fused: {text}" for text in kernel.texts(fused)]
    return faults + [f"flushes: {i.text}" for i in kernel.instructions if ".ftz" in i.text]
