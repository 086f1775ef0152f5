"""Transports of devices: equal operations, by their text; the network entries compile and link.

Each check is also run on something broken on purpose, which it must find out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.device_compile import checks, transport_checks
from tests.device_compile.test_sources import conditionals
from tests.device_compile.toolchain import (
    HIP_ARCHES,
    ROOT,
    CompileError,
    Edit,
    copy_sources,
    disassemble_cuda,
    registers_used,
)
from tests.device_compile.transport_builds import (
    GIN,
    NETWORK_ARCHES,
    NVSHMEM,
    ROCSHMEM,
    NetworkBuild,
    compile_gin,
    compile_nvshmem,
    compile_rocshmem,
    kernels_for,
    link_nvshmem,
    linked_registers,
    only_exchange,
    plain_name,
    sources_for,
    undefined_functions,
)

# Of every kernel, so that a block has 512 lanes.
MOST_REGISTERS = 128
WIRES = {"nvshmem": "Nvshmem", "nccl_gin": "Gin", "rocshmem": "Rocshmem"}
# As rocSHMEM's documented signatures are mangled where uint64_t is unsigned long.
ROCSHMEM_NAMES = {
    "_ZN8rocshmem29rocshmem_putmem_signal_nbi_wgEPvPKvmPmmii",
    "_ZN8rocshmem26rocshmem_uint64_atomic_setEPmmi",
    "_ZN8rocshmem26rocshmem_uint64_atomic_addEPmmi",
    "_ZN8rocshmem23rocshmem_ulonglong_testEPyiy",
    "_ZN8rocshmem14rocshmem_quietEv",
}


def transport_text(name: str) -> str:
    return (ROOT / f"kernels/transport/{name}.h").read_text()


def listed_operations(header: str) -> set[str]:
    """Those named in the comment at the top, on lines indented by three."""
    head = header.split("#pragma once")[0]
    lines = re.findall(r"^//   (\w+\([^)]*\)(?:, \w+\([^)]*\))*)", head, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"(\w+)\(", line)}


def operations(header: str) -> set[str]:
    """Public member functions of the header's transport or wire, constructors apart."""
    pattern = r"^class \w+(?:Transport|Wire)\b[^{]*\{\n.*?^  public:\n(.*?)^  private:"
    body = re.search(pattern, header, re.DOTALL | re.MULTILINE)
    assert body, "no transport and no wire"
    declaration = r"^    (?:FASTKERN_DEVICE )?(?!FASTKERN_|return\b|using\b)\w+ (\w+)\("
    return set(re.findall(declaration, body[1], re.MULTILINE))


def ranks_indexed(header: str) -> set[str]:
    """Whose data, flags and control words are touched by a pointer."""
    return set(re.findall(r"\b(?:data|flags|controls)\[([^\]]*)\]", header))


@pytest.mark.parametrize("name", ["mapped", "network"])
def test_transports_supply_what_is_listed(name: str) -> None:
    listed = listed_operations(transport_text("mapped"))
    assert {"put", "signal", "seen", "stamp", "quiet", "progress_of_all", "pass_on_abort"} <= listed
    assert operations(transport_text(name)) == listed


@pytest.mark.parametrize("name", ["shaped", "shuffled"])
def test_variants_of_mapped_add_nothing(name: str) -> None:
    text = transport_text(name)
    assert ": public MappedTransport<Target>" in text
    assert operations(text) <= listed_operations(transport_text("mapped"))


@pytest.mark.parametrize("name", WIRES)
def test_wires_supply_what_is_listed(name: str) -> None:
    listed = listed_operations(transport_text("network"))
    assert listed == {"put", "raise", "seen", "notify", "beat", "quiet"}
    text = transport_text(name)
    assert operations(text) == listed
    alias = f"using {WIRES[name]}Transport = NetworkTransport<Target, {WIRES[name]}Wire>;"
    assert alias in text


@pytest.mark.parametrize("name", WIRES)
def test_wires_touch_own_memory_only(name: str) -> None:
    """What others have on another server is null, or not mapped."""
    assert ranks_indexed(transport_text(name)) <= {"args.rank", "args_.rank"}


@pytest.mark.parametrize("name", ["mapped", "network", *WIRES])
def test_other_operations_are_found(name: str) -> None:
    """A lost one and a new one both change the list."""
    text = transport_text(name)
    renamed, count = re.subn(r"\bbool quiet\(\) const", "bool silent() const", text)
    assert count == 1
    assert operations(text) - operations(renamed) == {"quiet"}
    assert operations(renamed) - operations(text) == {"silent"}


def test_foreign_memory_is_found() -> None:
    text = transport_text("nvshmem").replace("flags[args_.rank]", "flags[rank]")
    assert "rank" in ranks_indexed(text)


def test_network_holds_no_conditionals() -> None:
    for name in ("network", "network_args", "nccl_gin"):
        assert conditionals(transport_text(name)) == []


def report(transport: str, arch: str, registers: dict[str, int], spills: dict[str, int]) -> None:
    for name in sorted(registers):
        spilled = f", {spills[name]} bytes spilled" if spills.get(name) else ""
        registers_used.append(f"{arch:8} {name:24} {registers[name]:4} ({transport}{spilled})")


Builds = dict[str, "Future[NetworkBuild]"]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    """What takes longest, two at a time: all that is compiled for CUDA, by transport and arch.

    "bridgeless" has NVSHMEM's put with signal as NVRTC calls it, which the library has under
    another name. "broken" loads past coherence, and has 32 registers for a lane.
    """

    def nvshmem(arch: str) -> NetworkBuild:
        folder = tmp_path_factory.mktemp("nvshmem")
        return compile_nvshmem(arch, sources_for(NVSHMEM, arch, folder))

    def gin(arch: str) -> NetworkBuild:
        folder = tmp_path_factory.mktemp("gin")
        return compile_gin(arch, folder, sources_for(GIN, arch, folder))

    def bridgeless() -> NetworkBuild:
        bridge = Edit("kernels/transport/nvshmem.h", r"#ifdef __CUDACC_RTC__\n[\s\S]*?#endif\n", "")
        folder = tmp_path_factory.mktemp("bridgeless")
        return compile_nvshmem("sm_90", copy_sources(folder, [bridge, only_exchange(NVSHMEM)]))

    def broken() -> NetworkBuild:
        folder = tmp_path_factory.mktemp("broken")
        edits = [
            only_exchange(GIN),
            Edit("kernels/target/cuda.h", r"ld\.global\.v4", "ld.global.nc.v4"),
            Edit(GIN, r"__launch_bounds__\(512, 1\)", "__launch_bounds__(1024, 2)"),
        ]
        return compile_gin("sm_90", folder, copy_sources(folder, edits))

    pool = ThreadPoolExecutor(2)
    made = {f"gin {arch}": pool.submit(gin, arch) for arch in NETWORK_ARCHES}
    made |= {f"nvshmem {arch}": pool.submit(nvshmem, arch) for arch in NETWORK_ARCHES}
    made |= {"bridgeless": pool.submit(bridgeless), "broken": pool.submit(broken)}
    yield made
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("arch", NETWORK_ARCHES)
def test_nvshmem(arch: str, builds: Builds) -> None:
    build = builds[f"nvshmem {arch}"].result()
    linked = link_nvshmem(build.cubin, arch)
    assert linked.cubin.startswith(b"\x7fELF")
    registers = linked_registers(linked.log)
    spills = transport_checks.spills_by_function(build.log)
    assert sorted(registers) == sorted(kernels_for(arch))
    assert all(name in spills for name in registers)
    assert max(registers.values()) <= MOST_REGISTERS
    report("nvshmem", arch, registers, spills)
    assert transport_checks.copy_loop_faults(disassemble_cuda(build.cubin)) == []


def test_an_unresolved_symbol_is_found(builds: Builds) -> None:
    relocatable = builds["bridgeless"].result().cubin
    with pytest.raises(CompileError, match="Undefined reference to '_Z37nvshmemi_transfer_put_sig"):
        link_nvshmem(relocatable, "sm_90")


@pytest.mark.parametrize("arch", NETWORK_ARCHES)
def test_nccl_gin(arch: str, builds: Builds) -> None:
    build = builds[f"gin {arch}"].result()
    assert build.cubin.startswith(b"\x7fELF")
    registers = checks.ptxas_registers(build.log)
    assert sorted(registers) == sorted(kernels_for(arch))
    assert max(registers.values()) <= MOST_REGISTERS
    report("nccl_gin", arch, registers, transport_checks.spills_by_function(build.log))
    assert transport_checks.copy_loop_faults(disassemble_cuda(build.cubin)) == []


def test_spills_and_bad_copy_loops_are_found(builds: Builds) -> None:
    build = builds["broken"].result()
    assert transport_checks.spills_by_function(build.log)["fastkern_exchange"] > 0
    faults = transport_checks.copy_loop_faults(disassemble_cuda(build.cubin))
    assert any(fault.startswith("non-coherent: LDG.E.128.CONSTANT") for fault in faults)


@pytest.mark.parametrize("arch", HIP_ARCHES)
def test_rocshmem(arch: str, tmp_path: Path) -> None:
    assembly = compile_rocshmem(arch, sources_for(ROCSHMEM, arch, tmp_path))
    assert undefined_functions(assembly) == ROCSHMEM_NAMES
    registers = checks.hip_registers(assembly)
    assert sorted(registers) == sorted(kernels_for(arch))
    registers_used.extend(
        f"{arch:8} {name:24} {registers[name][0]:4} and {registers[name][1]} scalar (rocshmem)"
        for name in registers
    )
    assert transport_checks.amd_copy_loop_faults(assembly) == []
    if arch != "gfx90a":  # which has no scope bits
        assert checks.hip_scope_faults(assembly) == []


def test_rocshmem_declarations_are_what_is_called() -> None:
    text = transport_text("rocshmem_declarations")
    declared = re.findall(r"^__device__ \w+ (\w+)\(", text, re.MULTILINE)
    assert sorted(declared) == sorted(plain_name(name) for name in ROCSHMEM_NAMES)


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        (
            Edit("kernels/transport/rocshmem.h", r"rocshmem::rocshmem_quiet\(\);", ""),
            {"_ZN8rocshmem14rocshmem_quietEv"},
        ),
        (
            Edit("kernels/transport/rocshmem_declarations.h", r"Size bytes,", "int bytes,"),
            {
                "_ZN8rocshmem29rocshmem_putmem_signal_nbi_wgEPvPKvmPmmii",
                "_ZN8rocshmem29rocshmem_putmem_signal_nbi_wgEPvPKviPmmii",
            },
        ),
    ],
    ids=["not-called", "other-signature"],
)
def test_other_functions_are_found(edit: Edit, change: set[str], tmp_path: Path) -> None:
    root = copy_sources(tmp_path, [edit, only_exchange(ROCSHMEM)])
    undefined = undefined_functions(compile_rocshmem("gfx942", root))
    assert undefined ^ ROCSHMEM_NAMES == change


def test_a_bad_amd_copy_loop_is_found(tmp_path: Path) -> None:
    narrow = Edit("kernels/target/block_copy.h", r"skew % 16 == 0", "skew % 16 == 16")
    root = copy_sources(tmp_path, [narrow, only_exchange(ROCSHMEM)])
    faults = transport_checks.amd_copy_loop_faults(compile_rocshmem("gfx942", root))
    assert faults == ["no loop of 16-byte global loads and stores"]
