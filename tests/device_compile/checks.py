"""What must hold in the assembly of the kernels. Each check returns the faults it finds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

CUDA_SYNCHRONISING = (
    "ld.acquire.sys.global.u64",
    "ld.relaxed.sys.global.u64",
    "st.release.sys.global.u64",
    "st.relaxed.sys.global.u64",
    "atom.acq_rel.sys.global.add.u64",
    "atom.acq_rel.sys.global.cas.b64",
)


def ptx_faults(ptx: str, names: Sequence[str] = CUDA_SYNCHRONISING) -> list[str]:
    """Flags are loaded and stored at system scope, in the global space, with their orders.

    names: the synchronising instructions that the kernel has, and no others.
    """
    faults = [f"no {name}" for name in names if name not in ptx]
    orders = "acquire|release|relaxed|acq_rel"
    for name in re.findall(rf"\b(?:ld|st|atom|red)\.(?:{orders})\.[a-z0-9.]+", ptx):
        if name not in names:
            faults.append(f"unexpected {name}")
    return faults


def wide_sass_faults(sass: str) -> list[str]:
    """Rows move in 16-byte global accesses."""
    return [f"no {name}" for name in ("LDG.E.128", "STG.E.128") if f"{name} " not in sass]


def sass_faults(sass: str) -> list[str]:
    """Wide accesses name the global space, and nothing goes through the non-coherent path."""
    faults = [f"generic {name}" for name in re.findall(r"\b(?:LD|ST)\.E\.128\S*", sass)]
    faults += [f"non-coherent {name}" for name in re.findall(r"\bLDG\S*\.CONSTANT\S*", sass)]
    return faults


def ptxas_faults(log: str) -> list[str]:
    """No register is spilled."""
    spills = re.findall(r"(\d+) bytes spill (stores|loads)", log)
    if not spills:
        return ["ptxas says nothing of spills"]
    return [f"{size} bytes spill {kind}" for size, kind in spills if size != "0"]


def ptxas_registers(log: str) -> dict[str, int]:
    """Registers of a lane, by kernel."""
    parts = re.split(r"Compiling entry function '(\w+)'", log)[1:]
    found = [re.search(r"Used (\d+) registers", text) for text in parts[1::2]]
    return {name: int(m[1]) for name, m in zip(parts[::2], found, strict=True) if m}


def fused_faults(assembly: str) -> list[str]:
    """CUDA or AMD: products are rounded before they are added, as float and as double."""
    sass = ("FMUL", "FADD", "DMUL", "DADD")
    amd = ("v_mul_f32", "v_add_f32", "v_mul_f64", "v_add_f64")
    names = sass if "FMUL" in assembly else amd
    fused = r"\b(?:[FD]FMA2?\b\S*|v_\w*(?:fma|mac|mad)\w*f(?:32|64)\w*)"
    faults = [f"no {name}" for name in names if name not in assembly]
    return faults + [f"fused {name}" for name in re.findall(fused, assembly)]


def _instructions(assembly: str) -> list[str]:
    """Instructions and labels of an AMD listing, without comments and directives."""
    lines = (line.split(";")[0].strip() for line in assembly.splitlines())
    return [
        line for line in lines if line and (line.endswith(":") or re.match(r"[a-z]+_[a-z]", line))
    ]


def hip_faults(assembly: str) -> list[str]:
    """Rows move in wide global accesses, releases wait for the write-back."""
    faults = [
        f"no {name}"
        for name in ("global_load_dwordx4", "global_store_dwordx4", "buffer_wbl2", "s_sleep")
        if name not in assembly
    ]
    lines = _instructions(assembly)
    for line, following in pairwise(lines):
        if line.startswith("buffer_wbl2") and not re.match(r"s_waitcnt\b.*\bvmcnt\(0\)", following):
            faults.append(f"no wait for the write-back before {following}")

    # All barriers but that of the broadcast follow data that other devices will read.
    undrained = 0
    for k, line in enumerate(lines):
        if line == "s_barrier":
            block = lines[max(0, k - 10) : k]
            labels = [j for j, other in enumerate(block) if other.endswith(":")]
            block = block[labels[-1] + 1 :] if labels else block
            undrained += not any(other.startswith("buffer_wbl2") for other in block)
    if undrained != 1:
        faults.append(f"{undrained} barriers without a write-back, not 1")
    return faults


def hip_spill_faults(assembly: str) -> list[str]:
    """No register is spilled, neither to memory nor into a lane of another."""
    faults = []
    for kind in ("vgpr", "sgpr"):
        counts = re.findall(rf"\.{kind}_spill_count:\s*(\d+)", assembly)
        if not counts:
            faults.append(f"nothing is said of {kind} spills")
        faults += [f"{count} {kind} spills" for count in counts if count != "0"]
    return faults


def hip_registers(assembly: str) -> dict[str, tuple[int, int]]:
    """Vector registers of a lane and scalar ones of a wave, by kernel."""
    fields = r"\.name:\s+(\w+)|\.(sgpr_count|vgpr_count):\s+(\d+)"
    metadata = assembly[assembly.index(".amdgpu_metadata") :]
    found: dict[str, tuple[int, int]] = {}
    for text in re.split(r"^  - \.agpr_count", metadata, flags=re.MULTILINE)[1:]:
        values = {m[2] or "name": m[1] or m[3] for m in re.finditer(fields, text)}
        found[values["name"]] = (int(values["vgpr_count"]), int(values["sgpr_count"]))
    return found


def hip_scope_faults(assembly: str) -> list[str]:
    """gfx942 and later: sc0 and sc1 together on cache control, sc1 on atomics: system scope."""
    faults = []
    for line in _instructions(assembly):
        name, bits = line.split()[0], set(line.split()) & {"sc0", "sc1"}
        whole = name in ("buffer_wbl2", "buffer_inv") and bits != {"sc0", "sc1"}
        if whole or (name.startswith("global_atomic") and "sc1" not in bits):
            faults.append(f"narrower than the system: {line}")
    for name in ("buffer_wbl2", "buffer_inv", "global_atomic_cmpswap_x2", "global_atomic_add_x2"):
        if name not in assembly:
            faults.append(f"no {name}")
    for name in ("load", "store"):  # flags
        if not re.search(rf"global_{name}_dwordx2\b[^\n]* sc0 sc1", assembly):
            faults.append(f"no 8-byte {name} at system scope")
    return faults
