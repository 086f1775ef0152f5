"""What must hold in what compilers say of kernels, and in their text. Checks return faults.

Checks of ways through a kernel are in order_checks.py, those of single operations in
primitive_checks.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.device_compile.listing import Kernel

# Of a lane: so that two blocks of 512 fit on each of an NVIDIA GPU's multiprocessors, and eight
# waves on each of an AMD GPU's SIMDs.
MOST_REGISTERS = 64

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
    orders = "acquire|release|relaxed|acq_rel|volatile|mmio"
    found = re.findall(rf"\b(?:ld|st|atom|red)\.(?:{orders})\.[a-z0-9.]+", ptx)
    found += re.findall(
        r"\b(?:fence|membar)\.[a-z0-9._]+|\b(?:atom|red)\.(?!acq_rel)[a-z0-9.]+", ptx
    )
    return faults + [f"unexpected {name}" for name in found if name not in names]


def ptxas_faults(log: str) -> list[str]:
    """No register is spilled."""
    spills = re.findall(r"(\d+) bytes spill (stores|loads)", log)
    if not spills:
        return ["ptxas says nothing of spills"]
    return [f"{size} bytes spill {kind}" for size, kind in spills if size != "0"]


def ptxas_registers(log: str) -> dict[str, int]:
    """Registers of a lane, by kernel."""
    return _of_kernels(log, r"Used (\d+) registers")


def ptxas_stack(log: str) -> dict[str, int]:
    """Bytes of a lane's own memory that are not spills, by kernel."""
    return _of_kernels(log, r"(\d+) bytes stack frame")


def _of_kernels(log: str, pattern: str) -> dict[str, int]:
    parts = re.split(r"Compiling entry function '(\w+)'", log)[1:]
    found = [re.search(pattern, text) for text in parts[1::2]]
    return {name: int(m[1]) for name, m in zip(parts[::2], found, strict=True) if m}


def register_faults(registers: dict[str, int]) -> list[str]:
    return [f"{name}: {n} registers" for name, n in registers.items() if n > MOST_REGISTERS]


def fused_faults(kernel: Kernel, kinds: Sequence[str]) -> list[str]:
    """CUDA or AMD: products are rounded before they are added. kinds: "float", "double"."""
    sass = {"float": ("FMUL", "FADD"), "double": ("DMUL", "DADD")}
    amd = {"float": ("v_mul_f32", "v_add_f32"), "double": ("v_mul_f64", "v_add_f64")}
    names = amd if kernel.find("s_endpgm") else sass
    faults = [f"no {name}" for kind in kinds for name in names[kind] if not kernel.find(name)]
    fused = kernel.texts(r"[FD]FMA|v_\w*(?:fma|mac|mad)\w*f(?:32|64)")
    return faults + [f"fused {text.split()[0]}" for text in fused]


def hip_spill_faults(assembly: str) -> list[str]:
    """No register is spilled: to memory, into a lane of another, or to the accumulators."""
    faults = []
    for kind in ("vgpr_spill_count", "sgpr_spill_count", "agpr_count"):
        counts = re.findall(rf"\.{kind}:\s*(\d+)", assembly)
        if not counts:
            faults.append(f"nothing is said of {kind}")
        faults += [f"{kind} {count}" for count in counts if count != "0"]
    return faults


def hip_registers(assembly: str) -> dict[str, tuple[int, int]]:
    """Vector registers of a lane, accumulators among them, and scalar ones of a wave, by kernel."""
    fields = ("vgpr_count", "sgpr_count")
    return {name: (found[fields[0]], found[fields[1]]) for name, found in _hip_kernels(assembly)}


def hip_stack(assembly: str) -> dict[str, int]:
    """Bytes of a lane's own memory, by kernel."""
    return {name: found["private_segment_fixed_size"] for name, found in _hip_kernels(assembly)}


def _hip_kernels(assembly: str) -> list[tuple[str, dict[str, int]]]:
    metadata = assembly[assembly.index(".amdgpu_metadata") :]
    parts = re.split(r"^  - \.agpr_count", metadata, flags=re.MULTILINE)[1:]
    kernels = []
    for text in parts:
        name = re.search(r"^    \.name: +(\w+)", text, re.MULTILINE)
        assert name
        fields = re.findall(r"^    \.(\w+): +(\d+)$", text, re.MULTILINE)
        kernels.append((name[1], {field: int(value) for field, value in fields}))
    return kernels


HIP_SYNCHRONISING = (
    "buffer_wbl2",
    "buffer_inv",
    "global_atomic_cmpswap_x2",
    "global_atomic_add_x2",
)


def hip_scope_faults(assembly: str, names: Sequence[str] = HIP_SYNCHRONISING) -> list[str]:
    """gfx942 and later: sc0 and sc1 together on cache control, sc1 on atomics: system scope.

    names: the instructions that there must be.
    """
    lines = (line.split(";")[0].strip() for line in assembly.splitlines())
    code = [line for line in lines if re.match(r"[a-z]+_[a-z]", line)]
    faults = []
    for line in code:
        name, bits = line.split()[0], set(line.split()) & {"sc0", "sc1"}
        whole = name in ("buffer_wbl2", "buffer_inv") and bits != {"sc0", "sc1"}
        if whole or (name.startswith("global_atomic") and "sc1" not in bits):
            faults.append(f"narrower than the system: {line}")
    for name in names:
        if name not in assembly:
            faults.append(f"no {name}")
    for name in ("load", "store"):  # flags
        if not re.search(rf"global_{name}_dwordx2\b[^\n]* sc0 sc1", assembly):
            faults.append(f"no 8-byte {name} at system scope")
    return faults
